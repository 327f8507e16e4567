/*
 * Sorting of keys, held against the library's own sort, of which each key is different: the lower halves are numbers.
 */
#include <criterion/criterion.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/radix.h"

enum { MOST = 3000 };

static uint64_t key[MOST + 1], spare[MOST + 1], expected[MOST + 1];

static int by_key(const void *one, const void *other)
{
    uint64_t a = *(const uint64_t *)one, b = *(const uint64_t *)other;
    return a < b ? -1 : a > b;
}

static uint64_t next_random(void)
{
    static uint64_t random = 88172645463325252;
    random ^= random << 13;
    random ^= random >> 7;
    random ^= random << 17;
    return random >> 16;
}

/* Of n keys, in each of which the bits of `mask` are drawn, and the others those of `base`. */
static void check_sorts(size_t n, uint32_t mask, uint32_t base)
{
    const uint64_t behind = UINT64_C(0x5eed);
    for (size_t i = 0; i < n; i++)
        key[i] = radix_key(base ^ ((uint32_t)next_random() & mask), (uint32_t)i);
    key[n] = spare[n] = behind;
    memcpy(expected, key, n * sizeof *key);
    qsort(expected, n, sizeof *expected, by_key);
    radix_sort(key, spare, n);
    cr_assert_eq(memcmp(key, expected, n * sizeof *key), 0, "%zu keys, mask %x, base %x", n, mask, base);
    cr_assert(key[n] == behind && spare[n] == behind);
}

Test(radix, sorts_any_number_of_keys_by_any_digits)
{
    static const size_t counts[] = {0, 1, 2, 3, 300, MOST};
    static const uint32_t masks[] = {0, 1, 0xff, 0xff00, 0xffff, 0xff0000, 0x00ff00ff, 0xff000000, UINT32_MAX};
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++)
        for (size_t j = 0; j < sizeof masks / sizeof *masks; j++) {
            check_sorts(counts[i], masks[j], 0);
            check_sorts(counts[i], masks[j], UINT32_MAX);
        }
}

/* The first key alone differs: it is what the others are compared with. */
Test(radix, sorts_where_the_first_alone_is_different)
{
    for (unsigned bit = 0; bit < 32; bit++) {
        uint64_t few[] = {radix_key(1u << bit, 0), radix_key(0, 1), radix_key(0, 2)}, room[3];
        radix_sort(few, room, 3);
        for (uint32_t i = 0; i < 3; i++)
            cr_assert_eq(radix_number(few[i]), (i + 1) % 3);
    }
}
