/*
 * status.h - how a failure is said: a status for the program, words for the person.
 *
 * fail() keeps the words in a buffer of the calling thread's and returns the status, so that a failing path reads
 * `return fail(VPMM_ERROR_..., "...")`. A message names the call or the setting, the value it had, and what is
 * allowed. A later failure replaces it; success does not clear it. vpmm_error_set() is the same for other libraries.
 *
 * The buffer is on the heap, from a thread's first failure to its end, which is known by a pthread key: thread-local
 * storage is scarce where a library is loaded late, so what this one has of it is held to 384 bytes in all. Where there
 * is no memory for the buffer the words are lost, and the status stands; the thread's next failure tries again. In a
 * process that had no key left at its first failure the first 64 threads that fail have words, and no others.
 */
#ifndef VPMM_LIB_STATUS_H
#define VPMM_LIB_STATUS_H

#include <vpmm/observe.h>

__attribute__((format(printf, 2, 3))) vpmm_status fail(vpmm_status status, const char *format, ...);

/* Of a call that asks for no memory: where the driver had none for itself, that is a failure of the driver's. */
static inline vpmm_status without_shortage(vpmm_status status)
{
    return status == VPMM_ERROR_OUT_OF_MEMORY ? VPMM_ERROR_DRIVER : status;
}

#endif
