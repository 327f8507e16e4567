#include "gzip.h"

#include <stdlib.h>

bool gzip_init(struct gzip *gzip, size_t bound)
{
    enum { FASTEST = 1, GZIP_WRAPPER = 16, MEMORY = 8 }; /* the text repeats itself: more effort gains little */
    *gzip = (struct gzip){.text = {.bound = bound}};
    return deflateInit2(&gzip->stream, FASTEST, Z_DEFLATED, MAX_WBITS + GZIP_WRAPPER, MEMORY, Z_DEFAULT_STRATEGY) ==
           Z_OK;
}

void gzip_free(struct gzip *gzip)
{
    deflateEnd(&gzip->stream);
    text_free(&gzip->text);
}

bool gzip_compress(struct gzip *gzip, const struct text *from)
{
    enum { STEP = 16 << 10 };
    unsigned char step[STEP];
    int status = Z_OK;
    text_clear(&gzip->text);
    deflateReset(&gzip->stream);
    gzip->stream.next_in = (Bytef *)from->bytes;
    gzip->stream.avail_in = (uInt)from->used;
    while (status == Z_OK) {
        gzip->stream.next_out = step;
        gzip->stream.avail_out = STEP;
        status = deflate(&gzip->stream, Z_FINISH);
        text_append(&gzip->text, (const char *)step, STEP - gzip->stream.avail_out);
    }
    return status == Z_STREAM_END && !gzip->text.cut;
}
