/*
 * text.h - a text that grows up to a bound, kept from scrape to scrape.
 *
 * Numbers are written here and not by printf, whose decimal point is the locale's. A text that has met its bound, or
 * found no memory, is `cut`: what is appended further is dropped, and it must not be served.
 *
 * Threads: one at a time; the exporter's alone.
 */
#ifndef VPMM_EXPORTER_TEXT_H
#define VPMM_EXPORTER_TEXT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct text {
    char *bytes;
    size_t used, capacity, bound;
    bool cut;
};

void text_free(struct text *);
void text_clear(struct text *); /* keeps its memory */

void text_append(struct text *, const char *bytes, size_t count);
void text_string(struct text *, const char *);
void text_u64(struct text *, uint64_t);

/* ns nanoseconds in seconds, exactly: "0.000001", "17", "2.5". */
void text_seconds(struct text *, uint64_t ns);

/* A label's value between its quotes: backslash, quote and line feed escaped. */
void text_label(struct text *, const char *value);

#endif
