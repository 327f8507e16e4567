/*
 * exporter.c - the public functions, and what a fork does to exporters.
 *
 * Every exporter of the process stands in a list, whose lock fork takes, and each one's round (http.h) and pools' lock
 * after it: no connection comes or goes, and no pool is being read, added or removed, when the process is copied. In
 * the child the copied descriptors are closed, so that the parent's port is the parent's alone, and the list is
 * emptied; what was in it belongs to another process.
 */
#include "http.h"

#include <stdlib.h>

struct vpmm_exporter {
    struct pools pools;
    struct http http;
    struct vpmm_exporter *next, **link; /* under the list's lock */
    bool inherited;                     /* the process is a child of the one that started it; written by fork alone */
};

static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct vpmm_exporter *exporters;

static void lock_for_fork(struct vpmm_exporter *exporter)
{
    pthread_mutex_lock(&exporter->http.round);
    pthread_mutex_lock(&exporter->pools.lock);
}

static void unlock_after_fork(struct vpmm_exporter *exporter)
{
    pthread_mutex_unlock(&exporter->pools.lock);
    pthread_mutex_unlock(&exporter->http.round);
}

static void before_fork(void)
{
    pthread_mutex_lock(&lock);
    for (struct vpmm_exporter *exporter = exporters; exporter; exporter = exporter->next)
        lock_for_fork(exporter);
}

static void after_fork_in_parent(void)
{
    for (struct vpmm_exporter *exporter = exporters; exporter; exporter = exporter->next)
        unlock_after_fork(exporter);
    pthread_mutex_unlock(&lock);
}

static void after_fork_in_child(void)
{
    for (struct vpmm_exporter *exporter = exporters; exporter; exporter = exporter->next) {
        unlock_after_fork(exporter);
        http_close_sockets(&exporter->http);
        exporter->inherited = true;
    }
    exporters = NULL;
    pthread_mutex_unlock(&lock);
}

static int set_up_error;

static void set_up(void)
{
    set_up_error = pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
}

/* Under the lock, so that no fork sees sockets of an exporter that is not in the list. */
static vpmm_status start_and_enlist(struct vpmm_exporter *exporter, const struct settings *settings)
{
    pthread_mutex_lock(&lock);
    vpmm_status status = http_start(&exporter->http, settings, &exporter->pools);
    if (status == VPMM_SUCCESS) {
        exporter->next = exporters;
        exporter->link = &exporters;
        if (exporters)
            exporters->link = &exporter->next;
        exporters = exporter;
    }
    pthread_mutex_unlock(&lock);
    return status;
}

static void stop_and_delist(struct vpmm_exporter *exporter)
{
    pthread_mutex_lock(&lock);
    *exporter->link = exporter->next;
    if (exporter->next)
        exporter->next->link = exporter->link;
    http_stop(&exporter->http);
    pthread_mutex_unlock(&lock);
}

static vpmm_status check(const struct vpmm_exporter *exporter, const char *function)
{
    if (!exporter)
        return vpmm_error_set(VPMM_ERROR_INVALID_VALUE, "%s: the exporter is NULL", function);
    if (exporter->inherited)
        return vpmm_error_set(VPMM_ERROR_NOT_SUPPORTED,
                              "%s: the exporter was started before this process was forked, and serves in the parent; "
                              "start one here",
                              function);
    return VPMM_SUCCESS;
}

static vpmm_status start(struct vpmm_exporter *exporter, const vpmm_exporter_config *config)
{
    struct settings settings;
    vpmm_status status = settings_read(&settings, config);
    if (status != VPMM_SUCCESS)
        return status;
    status = start_and_enlist(exporter, &settings);
    settings_free(&settings);
    return status;
}

vpmm_status vpmm_exporter_start(const vpmm_exporter_config *given, vpmm_exporter **out)
{
    vpmm_exporter_config config = given ? *given : vpmm_exporter_config_default();
    if (!out)
        return vpmm_error_set(VPMM_ERROR_INVALID_VALUE, "vpmm_exporter_start: the output is NULL");
    struct vpmm_exporter *exporter = calloc(1, sizeof *exporter);
    if (!exporter)
        return vpmm_error_set(VPMM_ERROR_HOST_MEMORY, "no host memory for an exporter of %zu bytes", sizeof *exporter);
    pools_init(&exporter->pools);
    pthread_once(&once, set_up);
    vpmm_status status = set_up_error ? vpmm_error_set(VPMM_ERROR_HOST_MEMORY, "no host memory to watch for forks")
                                      : start(exporter, &config);
    if (status != VPMM_SUCCESS) {
        pools_free(&exporter->pools);
        free(exporter);
        return status;
    }
    *out = exporter;
    return VPMM_SUCCESS;
}

vpmm_status vpmm_exporter_add(vpmm_exporter *exporter, vpmm_pool *pool, const char *name)
{
    vpmm_status status = check(exporter, "vpmm_exporter_add");
    return status == VPMM_SUCCESS ? pools_add(&exporter->pools, pool, name) : status;
}

vpmm_status vpmm_exporter_remove(vpmm_exporter *exporter, vpmm_pool *pool)
{
    vpmm_status status = check(exporter, "vpmm_exporter_remove");
    return status == VPMM_SUCCESS ? pools_remove(&exporter->pools, pool) : status;
}

uint16_t vpmm_exporter_port(const vpmm_exporter *exporter)
{
    return exporter ? exporter->http.port : 0;
}

vpmm_status vpmm_exporter_stop(vpmm_exporter *exporter)
{
    if (!exporter)
        return VPMM_SUCCESS;
    vpmm_status status = check(exporter, "vpmm_exporter_stop");
    if (status != VPMM_SUCCESS)
        return status;
    stop_and_delist(exporter);
    pools_free(&exporter->pools);
    free(exporter);
    return VPMM_SUCCESS;
}
