/*
 * chunk.h - address space for the pool: a chunk more of it, in which nothing is mapped yet.
 */
#ifndef VPMM_LIB_CHUNK_H
#define VPMM_LIB_CHUNK_H

#include "remap/arena.h"

/*
 * Reserves one chunk more than `seen`, in which there was no room, if no other thread has added it meanwhile (arena.h):
 * a hole. OUT_OF_ADDRESS_SPACE, DRIVER, HOST_MEMORY. Takes the reserve lock, and in it the plan lock.
 */
vpmm_status chunk_reserve(struct arena *, uint32_t seen);

#endif
