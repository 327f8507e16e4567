#include "base/radix.h"

#include <string.h>

enum { DIGIT_BITS = 8, DIGITS = 1 << DIGIT_BITS, ORDERS_FROM = 32 };

static size_t digit(uint64_t key, unsigned shift)
{
    return key >> shift & (DIGITS - 1);
}

static void sort_digit(const uint64_t *from, uint64_t *to, size_t n, unsigned shift)
{
    size_t start[DIGITS + 1] = {0};
    for (size_t i = 0; i < n; i++)
        start[digit(from[i], shift) + 1]++;
    for (size_t d = 0; d < DIGITS; d++)
        start[d + 1] += start[d];
    for (size_t i = 0; i < n; i++)
        to[start[digit(from[i], shift)]++] = from[i];
}

/* The bits in which any two differ. */
static uint64_t differing(const uint64_t *key, size_t n)
{
    uint64_t bits = 0;
    for (size_t i = 1; i < n; i++)
        bits |= key[i] ^ key[0];
    return bits;
}

void radix_sort(uint64_t *key, uint64_t *spare, size_t n)
{
    uint64_t *from = key, *to = spare, bits = differing(key, n);
    for (unsigned shift = ORDERS_FROM; shift < 64; shift += DIGIT_BITS) {
        if (!digit(bits, shift))
            continue;
        sort_digit(from, to, n, shift);
        uint64_t *swap = from;
        from = to;
        to = swap;
    }
    if (from != key)
        memcpy(key, from, n * sizeof *key);
}
