/*
 * random.h - numbers that follow from a seed: splitmix64, https://prng.di.unimi.it/splitmix64.c. Any seed will do.
 */
#ifndef VPMM_STRESS_RANDOM_H
#define VPMM_STRESS_RANDOM_H

#include <stdint.h>

static inline uint64_t random_next(uint64_t *state)
{
    uint64_t z = *state += UINT64_C(0x9E3779B97F4A7C15);
    z = (z ^ z >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ z >> 27) * UINT64_C(0x94D049BB133111EB);
    return z ^ z >> 31;
}

/* Less than the bound, which is so small that none is likelier than another to speak of. */
static inline uint64_t random_below(uint64_t *state, uint64_t bound)
{
    return random_next(state) % bound;
}

#endif
