#define _GNU_SOURCE
#include "base/reserve.h"

#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

/* Without access first: where the process locks what it maps (MCL_FUTURE), all of it would be there at once. */
void *reserve_zeros(size_t bytes)
{
    void *at = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED)
        return NULL;
    munlock(at, bytes);
    if (mprotect(at, bytes, PROT_READ | PROT_WRITE) == 0)
        return at;
    munmap(at, bytes);
    return NULL;
}

/* The host's pages that lie wholly in it: with pages of 64 KiB there are several descriptions in one. */
void reserve_forget(void *at, size_t bytes)
{
    uintptr_t less = (uintptr_t)sysconf(_SC_PAGESIZE) - 1;
    uintptr_t from = ((uintptr_t)at + less) & ~less, end = ((uintptr_t)at + bytes) & ~less;
    if (from < end)
        madvise((void *)from, end - from, MADV_DONTNEED); /* refused, where the process locks its memory: it stays */
}

void reserve_free(void *at, size_t bytes)
{
    if (at)
        munmap(at, bytes);
}
