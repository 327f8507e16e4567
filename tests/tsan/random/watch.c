/*
 * watch.c - failures in words, progress, and what ends a program that hangs or crashes with its round's seed.
 */
#include "random.h"

#include <execinfo.h>
#include <inttypes.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { HANGS_S = 120, PROGRESS_S = 10, WORDS_MOST = 12, HUNG_STATUS = 124 };

atomic_uint_fast64_t counted[COUNT_KINDS];
static atomic_uint_fast64_t failed_checks, rounds_begun, idle_seconds, seconds; /* idle: without a call that ended */
static char settings[512]; /* of the round, in words: written between rounds, read by a signal handler too */

uint64_t failures(void)
{
    return atomic_load(&failed_checks);
}

void failed(const char *format, ...)
{
    char words[512];
    va_list arguments;
    if (atomic_fetch_add(&failed_checks, 1) >= WORDS_MOST)
        return;
    va_start(arguments, format);
    vsnprintf(words, sizeof words, format, arguments);
    va_end(arguments);
    fprintf(stderr, "FAILED after %" PRIuFAST64 " rounds, %" PRIuFAST64 " s: %s\n  %s\n", atomic_load(&rounds_begun),
            atomic_load(&seconds), words, settings);
}

void needs_success(vpmm_status status, const char *call)
{
    if (status != VPMM_SUCCESS)
        failed("%s answered %s: %s", call, vpmm_status_name(status), vpmm_last_error());
}

void needs_cuda(CUresult result, const char *call)
{
    if (result != CUDA_SUCCESS)
        failed("%s answered %d", call, (int)result);
}

/* Seed first: it is what makes the round again. */
static void say_settings(void)
{
    static const char *const modes[] = {"checked", "trusted", "eager"}, *const reuses[] = {"device", "completed",
                                                                                           "host"};
    const vpmm_config *c = &current.config;
    snprintf(settings, sizeof settings,
             "VPMM_TEST_SEED=%" PRIu64
             " VPMM_TEST_ONLY=%s: streams %s, captures %d, gate %d, reuse %s, small %s, reaper %d, cache_bytes %zu, "
             "extent_size %zu, max_mapped %zu, va_size %zu, device of %zu pages",
             current.seed, current.kind->name, modes[c->streams], c->captures, c->capture_gate.enter != NULL,
             reuses[c->reuse], c->small == VPMM_SMALL_SLAB ? "slab" : "async", c->reaper, c->cache_bytes,
             c->extent_size, c->max_mapped, c->va_size, current.device_pages);
}

void watch_round(void)
{
    say_settings();
    atomic_store(&idle_seconds, 0);
    atomic_fetch_add(&rounds_begun, 1);
    if (getenv("VPMM_TEST_VERBOSE"))
        fprintf(stderr, "%s\n", settings);
}

static void write_words(const char *words)
{
    ssize_t written = write(STDERR_FILENO, words, strlen(words));
    (void)written;
}

static void hung(void)
{
    write_words("HUNG\n  ");
    write_words(settings);
    write_words("\n");
    if (getenv("VPMM_TEST_ABORT"))
        abort();
    _exit(HUNG_STATUS);
}

/* What a round has done does not say how long it may take: on a busy machine the slowest take minutes. */
static bool any_progress(void)
{
    static uint64_t before;
    uint64_t now = 0;
    for (int i = 0; i < COUNT_KINDS; i++)
        now += atomic_load(&counted[i]);
    bool any = now != before;
    before = now;
    return any;
}

static void *watch(void *unused)
{
    (void)unused;
    for (;;) {
        sleep(1);
        if (any_progress())
            atomic_store(&idle_seconds, 0);
        else if (atomic_fetch_add(&idle_seconds, 1) + 1 >= HANGS_S)
            hung();
        if ((atomic_fetch_add(&seconds, 1) + 1) % PROGRESS_S == 0)
            fprintf(stderr,
                    "%" PRIuFAST64 " s: %" PRIuFAST64 " rounds, %" PRIuFAST64 " mallocs, %" PRIuFAST64 " failures\n",
                    atomic_load(&seconds), atomic_load(&rounds_begun), atomic_load(&counted[COUNT_mallocs]),
                    atomic_load(&failed_checks));
    }
    return NULL;
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
/* Their handlers say more. */
static void watch_for_crashes(void) {}
#else
/* The handler is gone after the first: the instruction that crashed does so again, for good. */
static void crashed(int signal)
{
    void *frames[64];
    (void)signal;
    write_words("CRASHED\n  ");
    write_words(settings);
    write_words("\n");
    backtrace_symbols_fd(frames, backtrace(frames, 64), STDERR_FILENO);
}

static void watch_for_crashes(void)
{
    struct sigaction action = {.sa_handler = crashed, .sa_flags = SA_RESETHAND};
    void *first;
    backtrace(&first, 1); /* loads what it needs, which a crash leaves no room for */
    sigaction(SIGSEGV, &action, NULL);
    sigaction(SIGBUS, &action, NULL);
    sigaction(SIGABRT, &action, NULL);
}
#endif

void watch_begin(void)
{
    pthread_t thread;
    watch_for_crashes();
    if (pthread_create(&thread, NULL, watch, NULL) == 0)
        pthread_detach(thread);
}

void watch_summary(uint64_t rounds)
{
    printf("%" PRIu64 " rounds, %" PRIu64 " failures:", rounds, failures());
#define COUNT_PRINT(name) printf(" " #name " %" PRIuFAST64, atomic_load(&counted[COUNT_##name]));
    COUNTS(COUNT_PRINT)
#undef COUNT_PRINT
    printf("\n");
}
