/*
 * next.c - two libraries that define one function (with -DLAST: the second of them). The first calls the next one,
 * which it finds by RTLD_NEXT: behind itself, in the order of the libraries, whoever interposes dlsym.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <string.h>

int next_value(void);

#ifdef LAST

int next_value(void)
{
    return 10;
}

/* Of the driver's name, and none of its entries: who asks this library for it means this one. */
int cuMemAllocAsync(void);

int cuMemAllocAsync(void)
{
    return 10;
}

#else

int next_value(void)
{
    int (*next)(void);
    void *found = dlsym(RTLD_NEXT, "next_value");
    memcpy(&next, &found, sizeof next);
    return next && next != next_value ? next() + 1 : -1;
}

#endif
