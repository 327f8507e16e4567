/*
 * Random operations from four threads on one pool, over a simulator in real time; for ThreadSanitizer, and useful
 * without it. A round has settings and a kind of its own, a fresh simulator and a fresh pool, and ends with nothing
 * live, lost, leaked or stranded: see random/random.h.
 *
 *   VPMM_TEST_SECONDS  rounds begin until then; without it there is one of each kind
 *   VPMM_TEST_SEED     of the first round; 1. The next round's is one more
 *   VPMM_TEST_ONLY     the kind of all rounds; without it one after the other. An unknown word lists them
 *   VPMM_TEST_OPS      operations of a thread in a round; without it as the kind says
 *   VPMM_TEST_DRIVER   cuda: on device 0 of this machine, with up to 1 GiB, in place of the simulator
 *   VPMM_TEST_VERBOSE  set: names each round as it begins
 *   VPMM_TEST_ABORT    set: a program that hangs leaves a core
 *
 * Exit status 0: nothing failed; 1: something did, and is named with the round's seed and settings; 124: nothing went
 * on for two minutes.
 */
#include "random/random.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

static uint64_t number_of(const char *variable, uint64_t otherwise)
{
    const char *text = getenv(variable);
    return text ? strtoull(text, NULL, 0) : otherwise;
}

static const struct kind *kind_named(const char *name)
{
    for (size_t i = 0; i < kinds_count; i++)
        if (strcmp(kinds[i].name, name) == 0)
            return &kinds[i];
    fprintf(stderr, "VPMM_TEST_ONLY is \"%s\"; allowed:", name);
    for (size_t i = 0; i < kinds_count; i++)
        fprintf(stderr, " %s", kinds[i].name);
    fprintf(stderr, "\n");
    exit(2);
}

static const vpmm_driver *chosen_driver(void)
{
    const char *text = getenv("VPMM_TEST_DRIVER");
    if (!text || strcmp(text, "cuda") != 0)
        return NULL;
    const vpmm_driver *driver = vpmm_driver_cuda();
    if (!driver) {
        fprintf(stderr, "%s\n", vpmm_last_error());
        exit(2);
    }
    return driver;
}

static uint64_t now_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec;
}

int main(void)
{
    const char *only = getenv("VPMM_TEST_ONLY");
    const struct kind *kind = only ? kind_named(only) : NULL;
    const vpmm_driver *cuda = chosen_driver();
    uint64_t seed = number_of("VPMM_TEST_SEED", 1), seconds = number_of("VPMM_TEST_SECONDS", 0);
    uint64_t begun = now_s(), rounds = 0;
    bool good = true;
    watch_begin();
    while (good && (seconds ? now_s() - begun < seconds : rounds < kinds_count)) {
        good = round_run(seed + rounds, kind ? kind : &kinds[rounds % kinds_count], cuda);
        rounds++;
    }
    watch_summary(rounds);
    return good ? 0 : 1;
}
