#define _GNU_SOURCE /* RTLD_NEXT, dlvsym */
#include "real.h"

#include "lane.h"

#include <dlfcn.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#define LIBRARY "libcuda.so.1"

typedef void *(*dlsym_function)(void *handle, const char *name);

/* Where dlsym.c goes on when an answer is not ours. Any thread may write it, all of them the same. */
_Atomic(dlsym_function) preload_dlsym __attribute__((visibility("hidden")));

void *__wrap_dlsym(void *handle, const char *name);

static void *no_symbol(void *handle, const char *name)
{
    (void)handle, (void)name;
    return NULL;
}

/* ISO C has no conversion from an object pointer to a function pointer; POSIX guarantees the representation. */
static void set_function(void *function_pointer, void *symbol)
{
    memcpy(function_pointer, &symbol, sizeof(symbol));
}

/*
 * By its version: dlvsym is not interposed, and does not find our own dlsym, which has none. The oldest of x86-64 and
 * of aarch64 first, which later glibc has as well: an attempt that fails allocates its error's text, and who takes
 * malloc's place may look malloc up by dlsym.
 */
static dlsym_function find_dlsym(void)
{
#ifdef __aarch64__
    static const char *const versions[] = {"GLIBC_2.17", "GLIBC_2.34"};
#else
    static const char *const versions[] = {"GLIBC_2.2.5", "GLIBC_2.34"};
#endif
    dlsym_function found = atomic_load_explicit(&preload_dlsym, memory_order_relaxed);
    for (size_t i = 0; !found && i < sizeof(versions) / sizeof(versions[0]); i++)
        set_function(&found, dlvsym(RTLD_NEXT, "dlsym", versions[i]));
    found = found ? found : no_symbol;
    atomic_store_explicit(&preload_dlsym, found, memory_order_relaxed);
    return found;
}

void real_find_dlsym(void)
{
    find_dlsym();
}

void *real_dlsym(void *handle, const char *name)
{
    return find_dlsym()(handle, name);
}

/* What libvpmm.a calls as dlsym (the linker's --wrap). */
void *__wrap_dlsym(void *handle, const char *name)
{
    return real_dlsym(handle, name);
}

static struct real *look_up(void *library)
{
    struct real *real = calloc(1, sizeof *real);
    if (!real)
        return NULL;
#define LOOK_UP(name, symbol, base, parameters, ...) set_function(&real->name, real_dlsym(library, symbol));
    PRELOAD_ANSWERED(LOOK_UP)
    PRELOAD_RETRIED(LOOK_UP)
    PRELOAD_CALLED(LOOK_UP)
#undef LOOK_UP
    return real;
}

static const struct real *find(int mode)
{
    static _Atomic(struct real *) kept;
    static const struct real none;
    struct real *real = atomic_load_explicit(&kept, memory_order_acquire);
    if (real)
        return real;
    void *library = dlopen(LIBRARY, RTLD_NOW | mode); /* never closed, as vpmm does not */
    struct real *found = library ? look_up(library) : NULL;
    if (!found)
        return &none;
    if (atomic_compare_exchange_strong_explicit(&kept, &real, found, memory_order_acq_rel, memory_order_acquire)) {
        lane_prepare();
        return found;
    }
    free(found);
    return real;
}

const struct real *real_entries(void)
{
    return find(RTLD_LOCAL);
}

const struct real *real_entries_if_loaded(void)
{
    return find(RTLD_LOCAL | RTLD_NOLOAD);
}
