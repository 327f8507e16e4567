/*
 * The preload's book of live allocations, by one thread: where an allocation may lie, and on which device. Several
 * threads are tsan_book's.
 */
#include <criterion/criterion.h>
#include <stdint.h>

#include "../../lib/preload/book.h"

/* Each shelf has tables of its own. */
Test(book, an_allocation_may_lie_across_a_shelf_s_edge)
{
    const uint64_t shelf = UINT64_C(1) << 35, start = 5 * shelf - 4096, bytes = 8 << 20;
    uint64_t found;
    struct allocation allocation;
    cr_assert(book_add(start, (struct allocation){.bytes = bytes, .device = 1}));
    for (uint64_t at = start; at < start + bytes; at += 1000000) {
        cr_assert(book_find(at, &found, &allocation));
        cr_expect_eq(found, start);
        cr_expect_eq(allocation.bytes, bytes);
    }
    cr_expect_not(book_find(start + bytes, &found, &allocation));
    cr_expect(book_take(start, &allocation));
}

Test(book, a_device_that_it_has_no_number_for_is_refused)
{
    cr_expect_not(book_add(1 << 20, (struct allocation){.bytes = 256, .device = BOOK_DEVICES}));
    cr_expect(book_add(1 << 20, (struct allocation){.bytes = 256, .device = BOOK_DEVICES - 1}));
}
