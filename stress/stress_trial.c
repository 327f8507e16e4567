/*
 * stress_trial.c - the fills and the checks are tried before a run: what they left out, the run would not see.
 */
#define _GNU_SOURCE 1

#include "random.h"
#include "stress_memory.h"

#include <stdio.h>
#include <stdlib.h>

enum { BLOCKS = 6, FLIPS = 64, ALIGNMENT = 256 };

struct trial {
    gpu *gpu;
    const stress_memory *memory;
    probe *probe;
    CUstream stream;
    CUdeviceptr base; /* of one allocation, in which the blocks stand, each with a gap before it */
    size_t bytes, page_size;
    uint32_t *word; /* a copy of it */
    block block[BLOCKS];
    struct flip {
        const block *in;
        uint64_t place;
    } flip[FLIPS];
    unsigned flips, looks; /* looks: that a check has at them */
};

static bool tell(const char *what)
{
    fprintf(stderr, "%s: the fills and checks do not work on this device: %s\n", program_name, what);
    return false;
}

static bool ok(const struct trial *t, const char *what, CUresult result)
{
    return gpu_ok(t->gpu, what, result);
}

/* Of a part of a four of words, and of a strip of the kernels, up to several pages. */
static void lay_out(struct trial *t)
{
    const size_t bytes[BLOCKS] = {4, 100, 4096 + 1500, (1 << 20) + 4, 2 * t->page_size, 3 * t->page_size + 20};
    for (unsigned i = 0; i < BLOCKS; i++) {
        t->bytes += ALIGNMENT;
        t->block[i] = (block){.address = t->bytes, .bytes = bytes[i], .number = 1 + i, .generation = i % 2};
        t->bytes = (t->bytes + bytes[i] + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    }
    t->bytes += ALIGNMENT;
}

static bool open_trial(struct trial *t, stress_memory *memory)
{
    lay_out(t);
    t->word = malloc(t->bytes);
    t->probe = probe_open(memory);
    if (!t->word || !t->probe)
        return tell("there is no host memory to try them");
    if (!ok(t, "cuStreamCreate", t->gpu->driver->cuStreamCreate(&t->stream, CU_STREAM_NON_BLOCKING)) ||
        !ok(t, "cuMemAlloc", t->gpu->driver->cuMemAlloc(&t->base, t->bytes)))
        return false;
    for (unsigned i = 0; i < BLOCKS; i++)
        t->block[i].address += t->base;
    return true;
}

static bool finish(const struct trial *t)
{
    return ok(t, "cuStreamSynchronize", t->gpu->driver->cuStreamSynchronize(t->stream));
}

static bool close_trial(struct trial *t)
{
    bool good = true;
    if (t->stream)
        good = finish(t) && ok(t, "cuStreamDestroy", t->gpu->driver->cuStreamDestroy(t->stream));
    if (t->base)
        good = ok(t, "cuMemFree", t->gpu->driver->cuMemFree(t->base)) && good;
    probe_close(t->probe);
    free(t->word);
    return good;
}

/* What should stand at a word of the allocation after the fill. */
static uint32_t expected_at(const struct trial *t, size_t at)
{
    for (unsigned i = 0; i < BLOCKS; i++) {
        const block *b = &t->block[i];
        uint64_t begin = (b->address - t->base) / 4;
        if (at >= begin && at < begin + b->bytes / 4)
            return memory_looks(t->memory, b->bytes, at - begin) ? memory_word(b->number, b->generation, at - begin)
                                                                 : 0;
    }
    return 0;
}

/* All that they are to write is written, and nothing else. */
static bool try_fill(struct trial *t)
{
    const vpmm_driver *driver = t->gpu->driver;
    if (!ok(t, "cuMemsetD32Async", driver->cuMemsetD32Async(t->base, 0, t->bytes / 4, t->stream)) ||
        !ok(t, "the fill", probe_fill(t->probe, t->block, BLOCKS, t->stream)) ||
        !ok(t, "cuMemcpyDtoHAsync", driver->cuMemcpyDtoHAsync(t->word, t->base, t->bytes, t->stream)) || !finish(t))
        return false;
    for (size_t at = 0; at < t->bytes / 4; at++)
        if (t->word[at] != expected_at(t, at))
            return tell("a fill does not write what it should, or writes elsewhere");
    return true;
}

static bool check(struct trial *t)
{
    return ok(t, "the check", probe_check(t->probe, t->block, BLOCKS, t->stream)) && finish(t);
}

static bool is_flipped(const struct trial *t, const block *in, uint64_t place)
{
    for (unsigned i = 0; i < t->flips; i++)
        if (t->flip[i].in == in && t->flip[i].place == place)
            return true;
    return false;
}

/* Any word of the block, or one of the first or last in any of its pages: VERIFY_EDGES looks at no others. */
static uint64_t any_place(const struct trial *t, const block *b, uint64_t *random)
{
    enum { EDGE_WORDS = 16 };
    uint64_t words = b->bytes / 4, page_words = t->page_size / 4;
    uint64_t page = random_below(random, (words + page_words - 1) / page_words) * page_words;
    uint64_t in_page = words - page < page_words ? words - page : page_words;
    uint64_t edge = in_page < EDGE_WORDS ? in_page : EDGE_WORDS;
    switch (random_below(random, 3)) {
    case 0:
        return page + random_below(random, edge);
    case 1:
        return page + in_page - 1 - random_below(random, edge);
    default:
        return random_below(random, words);
    }
}

/* A bit of a word that is looked at, and that was not flipped yet. */
static bool flip_any(struct trial *t, uint64_t *random)
{
    const block *b = &t->block[random_below(random, BLOCKS)];
    uint64_t place = any_place(t, b, random);
    unsigned looks = memory_looks(t->memory, b->bytes, place);
    if (looks == 0 || is_flipped(t, b, place))
        return true;
    uint32_t word = memory_word(b->number, b->generation, place) ^ 1U << random_below(random, 32);
    t->flip[t->flips++] = (struct flip){b, place};
    t->looks += looks;
    return ok(t, "cuMemsetD32Async", t->gpu->driver->cuMemsetD32Async(b->address + 4 * place, word, 1, t->stream));
}

/* Nothing is found where nothing is, and each flipped bit. */
static bool try_check(struct trial *t)
{
    enum { TRIES = 100000 }; /* not each is of a word that is looked at */
    uint64_t random = 1;
    bool good = check(t);
    if (good && probe_mismatches(t->probe) != 0)
        return tell("a check finds words that are there");
    for (int i = 0; i < TRIES && good && t->flips < FLIPS; i++)
        good = flip_any(t, &random);
    if (!good || !check(t))
        return false;
    if (probe_mismatches(t->probe) != t->looks)
        return tell("a check does not find each bit that was flipped");
    finding f[FINDINGS];
    for (size_t i = probe_findings(t->probe, f); i-- > 0;)
        if (f[i].number < 1 || f[i].number > BLOCKS || !is_flipped(t, &t->block[f[i].number - 1], f[i].place) ||
            f[i].expected != memory_word(f[i].number, f[i].generation, f[i].place) ||
            __builtin_popcount(f[i].expected ^ f[i].found) != 1)
            return tell("a check does not say where a bit was flipped");
    return true;
}

bool memory_try(gpu *g, stress_memory *memory, size_t page_size)
{
    struct trial t = {.gpu = g, .memory = memory, .page_size = page_size};
    bool good = open_trial(&t, memory) && try_fill(&t) && try_check(&t);
    return close_trial(&t) && good;
}
