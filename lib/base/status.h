/*
 * status.h - how a failure is said: a status for the program, words for the person.
 *
 * fail() keeps the words in a buffer of the calling thread's and returns the status, so that a failing path reads
 * `return fail(VPMM_ERROR_..., "...")`. A message names the call or the setting, the value it had, and what is
 * allowed. A later failure replaces it; success does not clear it. vpmm_error_set() is the same for other libraries.
 */
#ifndef VPMM_LIB_STATUS_H
#define VPMM_LIB_STATUS_H

#include <vpmm/observe.h>

__attribute__((format(printf, 2, 3))) vpmm_status fail(vpmm_status status, const char *format, ...);

#endif
