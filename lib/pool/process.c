#include "pool/process.h"

#include <pthread.h>
#include <stdlib.h>

static _Atomic(uint32_t) generation;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static int unwatched; /* what refused to call these handlers answered, for good */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t stopped = PTHREAD_COND_INITIALIZER; /* an entry's reaper, by exit() */
static struct process_entry *entries;
static uint32_t entries_generation; /* under the lock: of the process that made the entries */

static void before_fork(void)
{
    pthread_mutex_lock(&lock);
}

static void after_fork_in_parent(void)
{
    pthread_mutex_unlock(&lock);
}

static void after_fork_in_child(void)
{
    fetch_add_relaxed_u32(&generation, 1);
    pthread_mutex_unlock(&lock);
}

static struct process_entry *take_entry(struct reaper **reaper)
{
    struct process_entry *entry = entries_generation == process_generation() ? entries : NULL;
    while (entry && !entry->reaper)
        entry = entry->next;
    if (entry) {
        *reaper = entry->reaper;
        entry->reaper = NULL;
        entry->stopping = true;
    }
    return entry;
}

/* The lock is not held while a reaper ends; its entry stays, because process_remove waits for the end. */
static void at_exit(void)
{
    struct process_entry *entry;
    struct reaper *reaper;
    pthread_mutex_lock(&lock);
    while ((entry = take_entry(&reaper))) {
        pthread_mutex_unlock(&lock);
        reaper_stop(reaper);
        pthread_mutex_lock(&lock);
        entry->stopping = false;
        pthread_cond_broadcast(&stopped);
    }
    pthread_mutex_unlock(&lock);
}

static void set_up(void)
{
    unwatched = pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
    if (!unwatched)
        unwatched = atexit(at_exit);
}

vpmm_status process_watch(void)
{
    pthread_once(&once, set_up);
    if (!unwatched)
        return VPMM_SUCCESS;
    return fail(VPMM_ERROR_HOST_MEMORY,
                "pthread_atfork or atexit answered %d: without its handlers a pool would outlive a fork, or be at work "
                "while the process exits",
                unwatched);
}

const void *process_library(void)
{
    return &generation;
}

uint32_t process_generation(void)
{
    return load_relaxed_u32(&generation);
}

void process_add(struct process_entry *entry)
{
    pthread_mutex_lock(&lock);
    if (entries_generation != process_generation()) {
        entries = NULL; /* this process is a child: the parent's are not its own */
        entries_generation = process_generation();
    }
    entry->next = entries;
    entry->link = &entries;
    if (entries)
        entries->link = &entry->next;
    entries = entry;
    pthread_mutex_unlock(&lock);
}

struct reaper *process_remove(struct process_entry *entry)
{
    pthread_mutex_lock(&lock);
    while (entry->stopping)
        pthread_cond_wait(&stopped, &lock);
    struct reaper *reaper = entry->reaper;
    entry->reaper = NULL;
    *entry->link = entry->next;
    if (entry->next)
        entry->next->link = entry->link;
    pthread_mutex_unlock(&lock);
    return reaper;
}
