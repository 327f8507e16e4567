/*
 * lookup.c - what a program is answered that asks for an entry by name.
 *
 * The driver, or the loader, is asked first. If it answers the driver's own entry, and that is one of those in
 * entries.h, ours is answered in its place; any other answer stands. So what a driver does not have stays missing, and
 * a name that is looked up elsewhere, or is another ABI version, is left alone. But a search through all that the
 * program has loaded (RTLD_DEFAULT, a weak symbol) finds what we export, also where there is no driver: then it answers
 * CUDA_ERROR_NOT_FOUND.
 */
#define _GNU_SOURCE /* RTLD_DEFAULT, RTLD_NEXT */
#include "real.h"

#include <dlfcn.h>
#include <string.h>

#include <vpmm/driver.h>

void *preload_answer(void *handle, const char *name) __attribute__((visibility("hidden")));

static const struct known {
    const char *symbol, *base;
    size_t offset; /* in struct real */
} known[] = {
#define KNOWN(name, symbol, base, parameters, ...) {symbol, base, offsetof(struct real, name)},
    PRELOAD_ANSWERED(KNOWN) PRELOAD_RETRIED(KNOWN)
#undef KNOWN
};
enum { KNOWN = sizeof(known) / sizeof(known[0]) };

static void *ours(size_t index)
{
    static const struct real table = {
#define OURS(name, symbol, base, parameters, ...) .name = preload_##name,
        PRELOAD_ANSWERED(OURS) PRELOAD_RETRIED(OURS)
#undef OURS
    };
    void *function;
    memcpy(&function, (const char *)&table + known[index].offset, sizeof function);
    return function;
}

/*
 * For who is about to call it. Where vpmm finds the driver's entries is then known: to look for them takes the loader's
 * lock, which a thread may hold that runs a library's constructor, and waits there for the one that calls.
 */
static void *ours_now(size_t index)
{
    vpmm_driver_cuda();
    return ours(index);
}

static bool is_drivers(const struct real *real, size_t index, void *function)
{
    return memcmp((const char *)real + known[index].offset, &function, sizeof function) == 0;
}

static size_t find_symbol(const char *name)
{
    size_t i = 0;
    while (i < KNOWN && strcmp(known[i].symbol, name) != 0)
        i++;
    return i;
}

/*
 * For dlsym.c: NULL if the real dlsym is to answer. A search that begins at the caller's library, or at the program,
 * meets what we export by itself, in the place that it has among the libraries.
 */
void *preload_answer(void *handle, const char *name)
{
    real_find_dlsym();
    size_t i = name && name[0] == 'c' && name[1] == 'u' ? find_symbol(name) : KNOWN;
    void *function = i < KNOWN && handle != RTLD_DEFAULT && handle != RTLD_NEXT ? real_dlsym(handle, name) : NULL;
    if (!function || !is_drivers(real_entries_if_loaded(), i, function))
        return NULL;
    function = ours_now(i);
    dlerror(); /* what the look-ups may have left there: the program's dlsym succeeds */
    return function;
}

/* The driver knows entries by their names without a version; one that takes them with it is followed too. */
static void replace(const char *name, void **function)
{
    for (size_t i = 0; i < KNOWN; i++) {
        bool is_named = strcmp(known[i].base, name) == 0 || strcmp(known[i].symbol, name) == 0;
        if (is_named && is_drivers(real_entries(), i, *function)) {
            *function = ours_now(i);
            return;
        }
    }
}

CUresult preload_get_proc_address(const char *symbol, void **function, int version, cuuint64_t flags)
{
    CUresult result = REAL(get_proc_address, symbol, function, version, flags);
    if (result == CUDA_SUCCESS && function && *function)
        replace(symbol, function);
    return result;
}

CUresult preload_get_proc_address_v2(const char *symbol, void **function, int version, cuuint64_t flags, void *status)
{
    CUresult result = REAL(get_proc_address_v2, symbol, function, version, flags, status);
    if (result == CUDA_SUCCESS && function && *function)
        replace(symbol, function);
    return result;
}
