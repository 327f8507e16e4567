/*
 * stress_health.c - what NVML knows of a device before a run and after it: errors of its memory, errors that the driver
 * reports (XID), and why its clocks are held down. NVML is a part of the driver, found by dlopen; there is no header
 * here, so the few declarations are those of its documentation (NVML API Reference).
 */
#define _GNU_SOURCE 1

#include "stress.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

typedef struct nvmlDevice_st *nvmlDevice_t;
typedef struct nvmlEventSet_st *nvmlEventSet_t;
typedef struct nvmlEventData {
    nvmlDevice_t device;
    unsigned long long type, data; /* data: the XID */
    unsigned instance, compute_instance;
} nvmlEventData;

enum { NVML_SUCCESS = 0, NVML_CORRECTED = 0, NVML_UNCORRECTED = 1, NVML_VOLATILE = 0, NVML_XID = 8, XIDS_MOST = 1000 };

#define NVML_FUNCTIONS(X)                                                                                              \
    X(nvmlInit_v2, (void))                                                                                             \
    X(nvmlShutdown, (void))                                                                                            \
    X(nvmlDeviceGetHandleByUUID, (const char *, nvmlDevice_t *))                                                       \
    X(nvmlDeviceGetTotalEccErrors, (nvmlDevice_t, int, int, unsigned long long *))                                     \
    X(nvmlDeviceGetRemappedRows, (nvmlDevice_t, unsigned *, unsigned *, unsigned *, unsigned *))                       \
    X(nvmlDeviceGetCurrentClocksThrottleReasons, (nvmlDevice_t, unsigned long long *))                                 \
    X(nvmlEventSetCreate, (nvmlEventSet_t *))                                                                          \
    X(nvmlDeviceRegisterEvents, (nvmlDevice_t, unsigned long long, nvmlEventSet_t))                                    \
    X(nvmlEventSetWait_v2, (nvmlEventSet_t, nvmlEventData *, unsigned))                                                \
    X(nvmlEventSetFree, (nvmlEventSet_t))

struct counters {
    unsigned long long corrected, uncorrected, throttled;
    unsigned remapped;
};

struct health {
    void *library;
#define MEMBER(name, parameters) int(*name) parameters;
    NVML_FUNCTIONS(MEMBER)
#undef MEMBER
    nvmlDevice_t device;
    nvmlEventSet_t events; /* NULL: the device reports none */
    struct counters before;
};

static struct health *none(struct health *h, const char *why)
{
    fprintf(stderr, "%s: --health: %s; without --health the run needs no NVML\n", program_name, why);
    if (h && h->library)
        dlclose(h->library);
    free(h);
    return NULL;
}

/* What a device does not count stays 0. */
static struct counters read_counters(const struct health *h)
{
    struct counters c = {0};
    unsigned corrected = 0, uncorrected = 0, pending, failed;
    h->nvmlDeviceGetTotalEccErrors(h->device, NVML_CORRECTED, NVML_VOLATILE, &c.corrected);
    h->nvmlDeviceGetTotalEccErrors(h->device, NVML_UNCORRECTED, NVML_VOLATILE, &c.uncorrected);
    h->nvmlDeviceGetRemappedRows(h->device, &corrected, &uncorrected, &pending, &failed);
    c.remapped = corrected + uncorrected;
    h->nvmlDeviceGetCurrentClocksThrottleReasons(h->device, &c.throttled);
    return c;
}

static void watch_events(struct health *h)
{
    if (h->nvmlEventSetCreate(&h->events) != NVML_SUCCESS)
        h->events = NULL;
    if (h->events && h->nvmlDeviceRegisterEvents(h->device, NVML_XID, h->events) != NVML_SUCCESS) {
        h->nvmlEventSetFree(h->events);
        h->events = NULL;
    }
}

struct health *health_open(const char *uuid)
{
    struct health *h = calloc(1, sizeof *h);
    if (!h)
        return none(NULL, "no host memory");
    h->library = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    if (!h->library)
        return none(h, "there is no libnvidia-ml.so.1");
    bool all = true;
#define FIND(name, parameters)                                                                                         \
    {                                                                                                                  \
        void *symbol = dlsym(h->library, #name);                                                                       \
        memcpy(&h->name, &symbol, sizeof symbol);                                                                      \
        all = all && symbol != NULL;                                                                                   \
    }
    NVML_FUNCTIONS(FIND)
#undef FIND
    if (!all)
        return none(h, "libnvidia-ml.so.1 lacks a function");
    if (h->nvmlInit_v2() != NVML_SUCCESS)
        return none(h, "NVML could not be started");
    if (h->nvmlDeviceGetHandleByUUID(uuid, &h->device) != NVML_SUCCESS) {
        h->nvmlShutdown();
        return none(h, "NVML does not know the device");
    }
    watch_events(h);
    h->before = read_counters(h);
    return h;
}

static unsigned count_xids(const struct health *h, unsigned long long *last)
{
    nvmlEventData event;
    unsigned xids = 0;
    while (h->events && xids < XIDS_MOST && h->nvmlEventSetWait_v2(h->events, &event, 0) == NVML_SUCCESS) {
        *last = event.data;
        xids++;
    }
    return xids;
}

bool health_close(struct health *h, char *words, size_t length)
{
    unsigned long long last = 0;
    struct counters now = read_counters(h), was = h->before;
    unsigned xids = count_xids(h, &last);
    snprintf(
        words, length,
        "ECC errors corrected %llu, uncorrected %llu; rows remapped %u; XIDs %u%s; reasons for lower clocks 0x%llx, "
        "before 0x%llx",
        now.corrected - was.corrected, now.uncorrected - was.uncorrected, now.remapped - was.remapped, xids,
        xids ? ", see dmesg" : "", now.throttled, was.throttled);
    if (h->events)
        h->nvmlEventSetFree(h->events);
    h->nvmlShutdown();
    dlclose(h->library);
    free(h);
    return now.uncorrected == was.uncorrected && now.remapped == was.remapped && xids == 0;
}
