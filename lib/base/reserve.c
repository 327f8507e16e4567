#define _GNU_SOURCE
#include "base/reserve.h"

#include <sys/mman.h>

void *reserve_zeros(size_t bytes)
{
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return at == MAP_FAILED ? NULL : at;
}

void reserve_free(void *at, size_t bytes)
{
    if (at)
        munmap(at, bytes);
}
