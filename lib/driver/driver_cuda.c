/*
 * driver_cuda.c - the driver table filled from libcuda, the only file that knows it.
 *
 * libcuda.so.1 is opened at run time, so that a program starts, and says what is missing, where there is no driver. It
 * is never closed: the driver has threads and exit handlers of its own.
 *
 * Each entry is asked for by the name in the documentation and the ABI version in vpmm/driver.h. The plain symbol in
 * libcuda is the oldest ABI of a function (cuMemAlloc with 32-bit sizes), so it stands in for a failed
 * cuGetProcAddress only where cuda.h has never renamed the function.
 *
 * Two entries are not the driver's own: cuMemPoolCreate and cuMemPoolDestroy go through kept_pools.h.
 *
 * Nothing is locked over the dynamic loader's calls: a thread may come in from the constructor of a library that it
 * opens, while another one, here, waits for the loader. Who comes first looks everything up; of several at once one
 * keeps what it found, by an exchange whose release pairs with the acquire of every later caller.
 */
#include <vpmm/driver.h>

#include "base/atomic.h"
#include "base/status.h"
#include "driver/kept_pools.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LIBRARY "libcuda.so.1"

/* The newest driver of which an entry is required. */
#define REQUIRED_VERSION 11080

/* cuGetProcAddress of CUDA 11.3, and of 12.0, whose last parameter 11.8's cuda.h does not know. */
typedef CUresult(CUDAAPI *get_proc_address_v1)(const char *symbol, void **function, int version, cuuint64_t flags);
typedef CUresult(CUDAAPI *get_proc_address_v2)(const char *symbol, void **function, int version, cuuint64_t flags,
                                               void *status);

struct library {
    void *handle;
    get_proc_address_v1 get_v1;
    get_proc_address_v2 get_v2;
};

struct loaded {
    vpmm_driver libcuda; /* its own entries, */
    vpmm_driver table;   /* and what programs are given */
    bool complete;
    char failure[400]; /* why not, for every later caller */
};

static _Atomic(void *) kept; /* struct loaded, constant once it is here, and never freed */

/* ISO C has no conversion from an object pointer to a function pointer; POSIX guarantees the representation. */
static void set_function(void *function_pointer, void *symbol)
{
    memcpy(function_pointer, &symbol, sizeof(symbol));
}

static bool open_library(struct library *library, struct loaded *loaded)
{
    library->handle = dlopen(LIBRARY, RTLD_NOW | RTLD_LOCAL);
    if (!library->handle) {
        const char *reason = dlerror();
        snprintf(loaded->failure, sizeof(loaded->failure), "dlopen of " LIBRARY " (the NVIDIA driver) failed: %s",
                 reason ? reason : "no reason given");
        return false;
    }
    set_function(&library->get_v2, dlsym(library->handle, "cuGetProcAddress_v2"));
    set_function(&library->get_v1, dlsym(library->handle, "cuGetProcAddress"));
    if (library->get_v2 || library->get_v1)
        return true;
    snprintf(loaded->failure, sizeof(loaded->failure),
             LIBRARY " has no cuGetProcAddress; CUDA driver 11.8 or later is needed");
    return false;
}

/* NULL if the driver does not have the entry; *result says why. */
static void *find(const struct library *library, const char *name, int version, bool renamed, CUresult *result)
{
    void *symbol = NULL;
    /* Legacy: stream 0 is the one stream that all threads share, however the program was compiled. */
    const cuuint64_t flags = CU_GET_PROC_ADDRESS_LEGACY_STREAM;
    if (library->get_v2) {
        int status = 0; /* CUdriverProcAddressQueryResult */
        *result = library->get_v2(name, &symbol, version, flags, &status);
    } else {
        *result = library->get_v1(name, &symbol, version, flags);
    }
    if (*result == CUDA_SUCCESS && symbol)
        return symbol;
    return renamed ? NULL : dlsym(library->handle, name);
}

#define EXPANDED_TEXT(name) #name
#define EXPANDED(name)      EXPANDED_TEXT(name)

static const struct entry {
    const char *name; /* as documented: # does not expand cuda.h's renaming macros */
    const char *renamed;
    int version;
    size_t offset;
} entries[] = {
#define ENTRY(name, version, parameters, arguments) {#name, EXPANDED(name), version, offsetof(vpmm_driver, name)},
    VPMM_DRIVER_ENTRIES(ENTRY)
#undef ENTRY
};

/* Called through a table, so one is kept. */
static const vpmm_driver *libcuda(void)
{
    const struct loaded *loaded = load_acquire_ptr(&kept);
    return &loaded->libcuda;
}

static CUresult CUDAAPI create_pool(CUmemoryPool *pool, const CUmemPoolProps *props)
{
    return kept_pools_create(libcuda(), pool, props);
}

static CUresult CUDAAPI destroy_pool(CUmemoryPool pool)
{
    return kept_pools_destroy(libcuda(), pool);
}

static void load(struct loaded *loaded)
{
    struct library library = {0};
    if (!open_library(&library, loaded))
        return;
    for (size_t i = 0; i < sizeof(entries) / sizeof(entries[0]); i++) {
        const struct entry *entry = &entries[i];
        CUresult result = CUDA_SUCCESS;
        void *symbol = find(&library, entry->name, entry->version, strcmp(entry->name, entry->renamed) != 0, &result);
        if (!symbol && entry->version <= REQUIRED_VERSION) {
            snprintf(loaded->failure, sizeof(loaded->failure),
                     LIBRARY " lacks %s of ABI version %d (cuGetProcAddress answered CUresult %d); CUDA driver 11.8 or "
                             "later is needed",
                     entry->name, entry->version, (int)result);
            return;
        }
        set_function((char *)&loaded->libcuda + entry->offset, symbol);
    }
    loaded->libcuda.size = sizeof(loaded->libcuda);
    loaded->table = loaded->libcuda;
    loaded->table.cuMemPoolCreate = create_pool;
    loaded->table.cuMemPoolDestroy = destroy_pool;
    loaded->complete = true;
}

/* NULL: the host's memory is exhausted. */
static const struct loaded *load_or_find(void)
{
    void *found = load_acquire_ptr(&kept);
    if (found)
        return found;
    struct loaded *loaded = calloc(1, sizeof *loaded);
    if (!loaded)
        return NULL;
    load(loaded);
    if (cas_acq_rel_ptr(&kept, &found, loaded))
        return loaded;
    free(loaded);
    return load_acquire_ptr(&kept);
}

const vpmm_driver *vpmm_driver_cuda(void)
{
    const struct loaded *loaded = load_or_find();
    if (loaded && loaded->complete)
        return &loaded->table;
    fail(VPMM_ERROR_NO_DRIVER, "%s", loaded ? loaded->failure : "the host's memory is exhausted");
    return NULL;
}
