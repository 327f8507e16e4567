/*
 * reserve.h - host memory for tables that may become large: reserved as address space, zero-filled, and committed by
 * the page where it is first touched, also where the process locks its memory.
 */
#ifndef VPMM_LIB_RESERVE_H
#define VPMM_LIB_RESERVE_H

#include <stddef.h>

/* NULL: the process has no such room (ulimit -v, or vm.overcommit_memory 2). */
void *reserve_zeros(size_t bytes);

/* Takes the memory of this part back, where it is whole pages of the host's: it reads as zeros until it is written. */
void reserve_forget(void *, size_t bytes);

/* NULL is a no-op. */
void reserve_free(void *, size_t bytes);

#endif
