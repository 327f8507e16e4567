/*
 * size.h - a number as the options of these programs take it: decimal digits, and an optional K, M or G.
 */
#ifndef VPMM_STRESS_SIZE_H
#define VPMM_STRESS_SIZE_H

#include <errno.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* False: it is not of that form, or not from min to max; nothing is stored. */
static inline bool size_parse(const char *text, uint64_t min, uint64_t max, uint64_t *out)
{
    static const char suffixes[] = "KMG";
    char *end;
    if (*text < '0' || *text > '9')
        return false;
    errno = 0;
    unsigned long long value = strtoull(text, &end, 10);
    const char *suffix = *end == '\0' ? NULL : strchr(suffixes, *end);
    unsigned shift = suffix == NULL ? 0 : 10 * (unsigned)(suffix - suffixes + 1);
    if (errno != 0 || (*end != '\0' && (suffix == NULL || end[1] != '\0')) || value > max >> shift ||
        value << shift < min)
        return false;
    *out = value << shift;
    return true;
}

/* What is allowed, in words. */
static inline void size_describe(char *words, size_t length, uint64_t min, uint64_t max)
{
    snprintf(words, length, "a number from %llu to %llu is allowed, with an optional K, M or G",
             (unsigned long long)min, (unsigned long long)max);
}

#endif
