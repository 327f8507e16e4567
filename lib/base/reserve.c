#define _GNU_SOURCE
#include "base/reserve.h"

#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

void *reserve_zeros(size_t bytes)
{
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return at == MAP_FAILED ? NULL : at;
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
