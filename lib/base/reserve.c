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

void reserve_forget(void *at, size_t bytes)
{
    uintptr_t whole = (uintptr_t)sysconf(_SC_PAGESIZE) - 1;
    if (!(((uintptr_t)at | bytes) & whole))
        madvise(at, bytes, MADV_DONTNEED); /* refused, where the process locks its memory: it stays as it is */
}

void reserve_free(void *at, size_t bytes)
{
    if (at)
        munmap(at, bytes);
}
