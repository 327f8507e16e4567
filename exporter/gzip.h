/*
 * gzip.h - a scrape compressed, by zlib, in memory that is made once.
 * Threads: the exporter's alone.
 */
#ifndef VPMM_EXPORTER_GZIP_H
#define VPMM_EXPORTER_GZIP_H

#include "text.h"

#include <zlib.h>

struct gzip {
    z_stream stream;
    struct text text; /* of the latest */
};

bool gzip_init(struct gzip *, size_t bound);
void gzip_free(struct gzip *);

/* false: it does not fit; gzip->text is the result otherwise. */
bool gzip_compress(struct gzip *, const struct text *);

#endif
