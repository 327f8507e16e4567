/*
 * json.h - text in the JSON that these programs write.
 */
#ifndef VPMM_STRESS_JSON_H
#define VPMM_STRESS_JSON_H

#include <stdio.h>

/* In quotes: printable ASCII as it is, the rest escaped. A path may hold any byte; as Latin-1 it is JSON at least. */
static inline void json_write_text(FILE *out, const char *text)
{
    fputc('"', out);
    for (const unsigned char *c = (const unsigned char *)text; *c; c++)
        if (*c == '"' || *c == '\\' || *c < 0x20 || *c > 0x7e)
            fprintf(out, "\\u%04x", *c);
        else
            fputc(*c, out);
    fputc('"', out);
}

#endif
