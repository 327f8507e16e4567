/*
 * real.h - the driver's own entries, and the dynamic loader's own dlsym.
 *
 * Nothing is locked: a thread that opens a library may be in its constructors, and call in from there, while another
 * one waits for the loader. Who comes first looks everything up; two at once find the same, and one keeps it.
 */
#ifndef VPMM_PRELOAD_REAL_H
#define VPMM_PRELOAD_REAL_H

#include "entries.h"

struct real {
#define PRELOAD_MEMBER(name, symbol, base, parameters, ...) CUresult(CUDAAPI *name) parameters;
    PRELOAD_ANSWERED(PRELOAD_MEMBER)
    PRELOAD_RETRIED(PRELOAD_MEMBER)
    PRELOAD_CALLED(PRELOAD_MEMBER)
#undef PRELOAD_MEMBER
};

/* Never NULL. An entry that the driver lacks is NULL, and without a driver each of them. */
const struct real *real_entries(void);

/* The same without opening a driver: without one that is loaded, or the host's memory, each entry is NULL. */
const struct real *real_entries_if_loaded(void);

/* What an entry answers where the driver has none. A program has found none either, unless it asked this library. */
#define REAL(name, ...) (real_entries()->name ? real_entries()->name(__VA_ARGS__) : CUDA_ERROR_NOT_FOUND)

/* Finds the loader's dlsym, which dlsym.c jumps to. */
void real_find_dlsym(void);

/* The loader's dlsym; for a handle, never for RTLD_NEXT or RTLD_DEFAULT, which mean the caller's. */
void *real_dlsym(void *handle, const char *name);

#endif
