/*
 * radix.h - sorting of numbered things: keys of which the upper half orders, and the lower half is a number to carry.
 *
 * A radix sort from the lowest digit on (Knuth, The Art of Computer Programming, volume 3, 5.2.5), a byte at a time. It
 * skips the digits in which no two keys differ, so that what lies close together takes few rounds: of 300 regions in an
 * address space of a few thousand pages two, where a sort that compares makes 2,500 comparisons by calls.
 */
#ifndef VPMM_LIB_RADIX_H
#define VPMM_LIB_RADIX_H

#include <stddef.h>
#include <stdint.h>

static inline uint64_t radix_key(uint32_t orders, uint32_t number)
{
    return (uint64_t)orders << 32 | number;
}

static inline uint32_t radix_number(uint64_t key)
{
    return (uint32_t)key;
}

/*
 * Sorts key[0 .. n) by the upper halves, ascending; what is equal there stays in order. `spare` has n places as well.
 */
void radix_sort(uint64_t *key, uint64_t *spare, size_t n);

#endif
