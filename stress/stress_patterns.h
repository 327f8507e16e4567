/*
 * stress_patterns.h - what a thread of vpmm-stress asks for: an endless sequence of steps, made from a seed alone.
 *
 *   step      a malloc into a slot, a free of a slot, a slot given to whichever thread takes it, a taking from another
 *             thread, or a change of stream
 *   slot      a place for one allocation; 0 to SEQUENCE_SLOTS - 1
 *   pattern   how a kind of program behaves: a function from the state of a sequence to its next step
 *   budget    bytes: what a sequence keeps in its slots at most, each rounded up to 256. Large sizes follow it
 *
 * A sequence knows only what it has asked for, not what came of it: the same pattern, seed and budget make the same
 * steps on every machine, with every allocator, and beside any other threads. Not thread-safe: a thread has its own.
 */
#ifndef VPMM_STRESS_PATTERNS_H
#define VPMM_STRESS_PATTERNS_H

#include <stddef.h>
#include <stdint.h>

enum { SEQUENCE_SLOTS = 2048 };

enum step_kind { STEP_MALLOC, STEP_FREE, STEP_GIVE, STEP_TAKE, STEP_STREAM };

typedef struct step {
    enum step_kind kind;
    unsigned slot;
    size_t bytes; /* of a malloc */
} step;

struct sequence;

typedef struct pattern {
    const char *name, *what; /* for --help */
    void (*next)(struct sequence *, step *);
} pattern;

enum { PATTERN_COUNT = 16 };
extern const pattern patterns[PATTERN_COUNT];

typedef struct sequence {
    const pattern *pattern;
    uint64_t random;
    size_t budget, live;
    uint64_t digest;      /* of all steps so far: two runs with one seed can be compared by it */
    uint64_t turn, phase; /* the pattern's */
    unsigned cursor;      /* where it looks for a slot to free next */
    size_t bytes[SEQUENCE_SLOTS];
} sequence;

/* bytes: at least 1 MiB. */
void sequence_begin(sequence *, const pattern *, uint64_t seed, size_t budget);
step sequence_next(sequence *);

#endif
