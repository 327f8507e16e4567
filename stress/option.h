/*
 * option.h - what the programs' options take. What is not allowed is told on stderr, with what is, and the result is
 * false; nothing is stored then.
 */
#ifndef VPMM_STRESS_OPTION_H
#define VPMM_STRESS_OPTION_H

#include <stdbool.h>
#include <stdint.h>

/* Tells it: always false. */
bool option_refuse(const char *option, const char *value, const char *allowed);

/* A number from min to max, as size.h has it. */
bool option_number(const char *option, const char *text, uint64_t min, uint64_t max, uint64_t *out);
bool option_count(const char *option, const char *text, unsigned min, unsigned max, unsigned *out);

/* A factor from `least` to `most`. */
bool option_factor(const char *option, const char *text, double least, double most, double *out);

/* At a program's end: whether all of standard output could be written. Told if not. */
bool output_is_whole(void);

#endif
