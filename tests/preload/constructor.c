/*
 * constructor.c - a library whose constructor calls into the program that opens it, while the loader's lock is held.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <string.h>

__attribute__((constructor)) static void call_in(void)
{
    void (*in_constructor)(void);
    void *symbol = dlsym(RTLD_DEFAULT, "in_constructor");
    memcpy(&in_constructor, &symbol, sizeof in_constructor);
    if (in_constructor)
        in_constructor();
}
