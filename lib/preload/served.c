#include "served.h"

#include "book.h"
#include "captures.h"
#include "real.h"

#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

#include <vpmm/observe.h>

static struct device {
    struct served served;       /* constant while `primary` is not NULL */
    _Atomic(CUcontext) primary; /* publishes it */
    _Atomic(CUcontext) seen;    /* the primary context that the program was given last */
    _Atomic(int) shared;        /* SERVED_SHARED_... */
    atomic_bool pool_set;       /* at any time; what it is now, the driver is asked */
    atomic_bool refused;        /* no pool could be made, and none will be */
    pid_t process;              /* that made the pool */
    pthread_mutex_t making;     /* over the making of it, and a reset where there is none: no other device waits */
} devices[BOOK_DEVICES] = {[0 ... BOOK_DEVICES - 1] = {.making = PTHREAD_MUTEX_INITIALIZER}};

static _Atomic(int) highest = 0; /* device whose primary context was seen, + 1 */

static struct device *device_at(int device)
{
    return device >= 0 && device < BOOK_DEVICES ? &devices[device] : NULL;
}

/* ---- those that are there ---- */

static struct served *published(struct device *device)
{
    return device && atomic_load_explicit(&device->primary, memory_order_acquire) ? &device->served : NULL;
}

struct served *served_find(CUcontext context)
{
    int end = atomic_load_explicit(&highest, memory_order_acquire);
    for (int i = 0; i < end; i++)
        if (atomic_load_explicit(&devices[i].primary, memory_order_acquire) == context)
            return &devices[i].served;
    return NULL;
}

struct served *served_on(int device)
{
    return published(device_at(device));
}

struct served *served_by_standard(CUmemoryPool pool)
{
    int end = atomic_load_explicit(&highest, memory_order_acquire);
    for (int i = 0; i < end; i++)
        if (published(&devices[i]) && devices[i].served.standard == pool)
            return pool ? &devices[i].served : NULL;
    return NULL;
}

/* ---- primary contexts ---- */

void served_note_primary(int device, CUcontext context)
{
    struct device *noted = device_at(device);
    int end = atomic_load_explicit(&highest, memory_order_relaxed);
    if (!noted)
        return;
    for (int i = 0; i < end; i++) { /* of a device that was reset, the handle may be this one's now */
        CUcontext former = context;
        if (&devices[i] != noted)
            atomic_compare_exchange_strong(&devices[i].seen, &former, NULL);
    }
    atomic_store_explicit(&noted->seen, context, memory_order_relaxed);
    while (end <= device && !atomic_compare_exchange_weak(&highest, &end, device + 1))
        ;
}

int served_device_of(CUcontext context)
{
    int end = atomic_load_explicit(&highest, memory_order_acquire);
    for (int i = 0; context && i < end; i++)
        if (atomic_load_explicit(&devices[i].seen, memory_order_relaxed) == context)
            return i;
    return -1;
}

/* ---- what the program says of devices ---- */

void served_pool_set(int device)
{
    struct device *set = device_at(device);
    if (set)
        atomic_store_explicit(&set->pool_set, true, memory_order_relaxed);
}

void served_share(int device, int how)
{
    struct device *shared = device_at(device);
    if (shared)
        atomic_fetch_or_explicit(&shared->shared, how, memory_order_relaxed);
}

bool served_is_shared(int device, int how)
{
    struct device *shared = device_at(device);
    return shared && atomic_load_explicit(&shared->shared, memory_order_relaxed) & how;
}

bool served_is_standard(int device, CUmemoryPool pool)
{
    CUmemoryPool standard;
    const struct served *served = served_on(device);
    if (served)
        return pool == served->standard;
    return vpmm_driver_cuda()->cuDeviceGetDefaultMemPool(&standard, device) == CUDA_SUCCESS && pool == standard;
}

bool served_elsewhere(int device)
{
    CUmemoryPool pool;
    if (!atomic_load_explicit(&devices[device].pool_set, memory_order_relaxed))
        return false;
    return REAL(device_get_pool, &pool, device) != CUDA_SUCCESS || !served_is_standard(device, pool);
}

/* ---- forks ---- */

/* The threads that were making pools are not in the child. */
static void begin_in_child(void)
{
    for (int i = 0; i < BOOK_DEVICES; i++)
        pthread_mutex_init(&devices[i].making, NULL);
}

__attribute__((constructor)) static void watch_forks(void)
{
    pthread_atfork(NULL, NULL, begin_in_child);
}

/* ---- captures ---- */

CUstreamCaptureMode served_relax(void)
{
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    if (vpmm_driver_cuda()->cuThreadExchangeStreamCaptureMode(&mode) != CUDA_SUCCESS)
        return CU_STREAM_CAPTURE_MODE_GLOBAL; /* CUDA's default */
    return mode;
}

void served_unrelax(CUstreamCaptureMode mode)
{
    vpmm_driver_cuda()->cuThreadExchangeStreamCaptureMode(&mode);
}

/* ---- making one ---- */

/*
 * What is set is set at the driver's pool first, and then here, by threads that may overtake each other in between: so
 * each sets it once more until it is what the driver's is.
 */
void served_set_threshold(const struct served *served, cuuint64_t threshold)
{
    cuuint64_t theirs = threshold;
    do {
        threshold = theirs;
        vpmm_pool_set_attribute(served->pool, VPMM_ATTRIBUTE_RELEASE_THRESHOLD, threshold);
    } while (REAL(pool_get_attribute, served->standard, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &theirs) == CUDA_SUCCESS &&
             theirs != threshold);
}

void served_set_reuse(const struct served *served, int may_wait)
{
    int theirs = may_wait;
    do {
        may_wait = theirs;
        vpmm_pool_set_attribute(served->pool, VPMM_ATTRIBUTE_REUSE,
                                may_wait ? VPMM_REUSE_WAIT_DEVICE : VPMM_REUSE_COMPLETED);
    } while (REAL(pool_get_attribute, served->standard, CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES, &theirs) ==
                 CUDA_SUCCESS &&
             theirs != may_wait);
}

/*
 * What the program has said of the default pool before there was one of ours. After it is published, so that what is
 * said meanwhile is said to it or seen here.
 */
static void take_over_attributes(const struct served *served)
{
    cuuint64_t threshold = 0;
    int may_wait = 1;
    if (!served->standard)
        return;
    if (REAL(pool_get_attribute, served->standard, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &threshold) == CUDA_SUCCESS &&
        threshold)
        served_set_threshold(served, threshold);
    if (REAL(pool_get_attribute, served->standard, CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES, &may_wait) ==
            CUDA_SUCCESS &&
        !may_wait)
        served_set_reuse(served, may_wait);
}

/*
 * Whether the user says that captures begin where they are not seen, as in a library that found the driver elsewhere.
 */
static bool captures_are_unseen(void)
{
    vpmm_config said = vpmm_config_default();
    return vpmm_config_from_env(&said) == VPMM_SUCCESS && said.captures;
}

static vpmm_status make_pool(struct served *served)
{
    vpmm_config config = vpmm_config_default();
    config.captures = true;
    if (!captures_are_unseen())
        config.capture_gate = captures_gate;
    config.exportable = false;
    vpmm_status status = vpmm_config_from_env(&config);
    config.device = served->device;
    served->small_async = config.small == VPMM_SMALL_ASYNC;
    config.reaper = true;                       /* nobody here calls vpmm_poll */
    if (config.streams == VPMM_STREAMS_TRUSTED) /* a stream that is destroyed as it captures is not released: life.c */
        config.streams = VPMM_STREAMS_CHECKED;
    return status == VPMM_SUCCESS ? vpmm_pool_create(&config, &served->pool) : status;
}

/* The pool is gone if there can be none. */
static vpmm_status make_quiet(const vpmm_driver *driver, struct served *served)
{
    CUresult result = driver->cuStreamCreate(&served->quiet, CU_STREAM_NON_BLOCKING);
    if (result == CUDA_SUCCESS)
        return VPMM_SUCCESS;
    vpmm_pool_destroy(served->pool);
    return vpmm_error_set(result == CUDA_ERROR_OUT_OF_MEMORY ? VPMM_ERROR_OUT_OF_MEMORY : VPMM_ERROR_DRIVER,
                          "cuStreamCreate answered %d", (int)result);
}

/* With the primary context current. False: nothing is left of it, and lane_explain has been told. */
static bool make_served(const vpmm_driver *driver, struct device *device)
{
    struct served *served = &device->served;
    vpmm_status status = make_pool(served);
    if (status == VPMM_SUCCESS)
        status = make_quiet(driver, served);
    if (status == VPMM_SUCCESS) {
        if (driver->cuDeviceGetDefaultMemPool(&served->standard, served->device) != CUDA_SUCCESS)
            served->standard = NULL;
        pthread_mutex_init(&served->waiting, NULL);
        if (driver->cuMemAlloc(&served->block, 1) != CUDA_SUCCESS)
            served->block = 0;
        return true;
    }
    lane_explain(vpmm_last_error());
    /* A want of memory passes. */
    if (status != VPMM_ERROR_OUT_OF_MEMORY && status != VPMM_ERROR_HOST_MEMORY)
        atomic_store_explicit(&device->refused, true, memory_order_relaxed);
    return false;
}

/* Under `making`. */
static void publish(struct device *device)
{
    device->process = getpid();
    atomic_store_explicit(&device->primary, device->served.primary, memory_order_release);
}

/* Whether it is the device's primary one, which is then retained. One that is not active is not made so. */
static bool retain_primary(const vpmm_driver *driver, int device, CUcontext context)
{
    CUcontext primary;
    unsigned int flags;
    int active = 0;
    if (REAL(primary_state, device, &flags, &active) != CUDA_SUCCESS || !active ||
        driver->cuDevicePrimaryCtxRetain(&primary, device) != CUDA_SUCCESS)
        return false;
    if (primary != context)
        driver->cuDevicePrimaryCtxRelease(device);
    return primary == context;
}

/* Under `making`, with the context current. */
static bool make_on(const vpmm_driver *driver, int number, CUcontext context, enum count *why)
{
    struct device *device = &devices[number];
    *why = COUNT_left_unserved;
    if (!retain_primary(driver, number, context)) {
        *why = COUNT_left_context;
        return false;
    }
    device->served = (struct served){.device = number, .primary = context};
    bool made = make_served(driver, device);
    if (made) {
        publish(device);
        take_over_attributes(&device->served);
    }
    driver->cuDevicePrimaryCtxRelease(number); /* the pool retains it */
    return made;
}

static struct served *make(const vpmm_driver *driver, int number, CUcontext context, enum count *why)
{
    CUcontext left;
    pthread_mutex_lock(&devices[number].making);
    struct served *served = served_find(context); /* another thread's, meanwhile */
    if (!served) {
        CUstreamCaptureMode mode = served_relax();
        *why = COUNT_left_context;
        if (driver->cuCtxPushCurrent(context) == CUDA_SUCCESS) {
            served = make_on(driver, number, context, why) ? &devices[number].served : NULL;
            driver->cuCtxPopCurrent(&left);
        }
        served_unrelax(mode);
    }
    pthread_mutex_unlock(&devices[number].making);
    return served;
}

struct served *served_of_primary(int device, CUcontext context, enum count *why)
{
    struct served *served = served_find(context);
    *why = COUNT_left_unserved;
    if (served || atomic_load_explicit(&devices[device].refused, memory_order_relaxed))
        return served;
    return make(vpmm_driver_cuda(), device, context, why);
}

/* ---- the end of one ---- */

/*
 * The driver may refuse a call, and not the next one of the same kind: a pool that stays would use the context's end.
 */
enum { END_TRIES = 3 };

static void free_live(uint64_t start, struct allocation allocation, void *data)
{
    const struct served *served = data;
    if (allocation.device != (unsigned)served->device || !book_take(start, &allocation))
        return;
    vpmm_status status = VPMM_ERROR_DRIVER;
    for (int i = 0; i < END_TRIES && status != VPMM_SUCCESS; i++)
        status = vpmm_free(served->pool, start, served->quiet);
}

/*
 * With the lanes shut and the context current, whose work has ended but for what was queued in the last moment: all of
 * it must before the memory is unmapped. A pool that will not be destroyed is forgotten, with what it holds.
 */
static void end_served(const vpmm_driver *driver, struct device *device)
{
    struct served *served = &device->served;
    atomic_store_explicit(&device->primary, NULL, memory_order_relaxed);
    driver->cuCtxSynchronize();
    book_each(free_live, served);
    vpmm_stream_release(served->pool, served->quiet);
    driver->cuStreamDestroy(served->quiet);
    if (served->block)
        driver->cuMemFree(served->block);
    vpmm_status status = VPMM_ERROR_BUSY;
    for (int i = 0; i < END_TRIES && status == VPMM_ERROR_BUSY; i++)
        status = vpmm_pool_destroy(served->pool);
    lane_clear_beyond(served->device);
}

/* A forked child has nothing that it could end. False: the context is not to be had, as in a host function. */
static bool enter_served(const vpmm_driver *driver, struct device *device)
{
    return published(device) && device->process == getpid() &&
           driver->cuCtxPushCurrent(device->served.primary) == CUDA_SUCCESS;
}

/* Where it has no pool, and none is made meanwhile: whatever waits in the lanes, a reset of it does not. */
static bool reset_unserved(int number, CUresult(CUDAAPI *reset)(CUdevice), CUresult *result)
{
    struct device *device = device_at(number);
    if (device)
        pthread_mutex_lock(&device->making);
    bool is_unserved = !published(device) || device->process != getpid();
    if (is_unserved)
        *result = reset(number);
    if (device)
        pthread_mutex_unlock(&device->making);
    return is_unserved;
}

/*
 * The work is waited for before the lanes are shut as well: it may need another thread that is about to enter them.
 * Captures in the context end there, which the reset would do. Where the context is not to be had, as in a host
 * function, the driver refuses the reset too, and all stays as it is: nobody is waited for there.
 */
CUresult served_end(int number, CUresult(CUDAAPI *reset)(CUdevice))
{
    CUcontext left;
    CUresult result;
    struct device *device = device_at(number);
    const vpmm_driver *driver = vpmm_driver_cuda();
    if (reset_unserved(number, reset, &result))
        return result;
    lane_enter();
    bool is_entered = enter_served(driver, device);
    lane_leave();
    if (!is_entered) /* else another thread's reset has ended it */
        return reset_unserved(number, reset, &result) ? result : reset(number);
    driver->cuCtxSynchronize();
    driver->cuCtxPopCurrent(&left);
    lane_shut();
    if (enter_served(driver, device)) {
        end_served(driver, device);
        driver->cuCtxPopCurrent(&left);
    }
    result = reset(number);
    lane_open();
    return result;
}
