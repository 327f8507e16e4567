/*
 * book.h - which memory is vpmm's: each live allocation of this process, by its address.
 *
 * Every free asks it, and so does every question about an address, which may lie anywhere in an allocation. Nothing
 * here locks, and malloc and free touch what is their own allocation's alone:
 *
 *   grain    256 bytes, at a multiple of which each allocation begins
 *   block    2 MiB of address space. It has
 *              first   the allocation that begins at its first byte
 *              from    where the allocation begins, or began, that last reached into it from an earlier block
 *              slots   one for each other grain: the allocation that begins there. Made when the first one does
 *   shelf    16,384 blocks, 32 GiB; made when something is first allocated there
 *
 *   entry    one word, 0 if nothing begins there: its length, its device, and how it was asked for
 *
 * What lies at an address is found from the address alone: the nearest entry before it in its block, or what reaches
 * in. Allocations do not overlap, so no other can hold the address; and the entry says whether its own one does, so
 * `from` may be old.
 *
 * Cost. A malloc stores one word, and one more for each further block; a free exchanges the one.
 * A question reads backwards through the slots from its address to the allocation's start, at most 64 KiB of them.
 * Tables are mapped, so that only what is used of them is held: 8 bytes for each allocation and at most 3.2 % of memory
 * that is handed out in pieces of 256 bytes. They stay until the process ends.
 *
 * Who may do what. An address is added by the thread that has just been given it by vpmm, and taken before it goes back
 * there: whoever takes it has it alone, so of two frees of one address one finds nothing. What one thread stores in a
 * block's words is seen by the next one that is given the memory, because vpmm handed it over. A question beside the
 * free of the same memory is the program's mistake, and may be answered either way; each word by itself is whole.
 */
#ifndef VPMM_PRELOAD_BOOK_H
#define VPMM_PRELOAD_BOOK_H

#include <stdbool.h>
#include <stdint.h>

enum { BOOK_DEVICES = 128 };

struct allocation {
    uint64_t bytes; /* as they were asked for; below 2^48, and above 0 */
    unsigned device;
    bool at_once; /* not in stream order: by cuMemAlloc */
};

/* False: the host has no memory for a table, or the address is beyond what the book can hold; nothing has changed. */
bool book_add(uint64_t start, struct allocation);

/* Removes what begins at this address. False: nothing of ours does. */
bool book_take(uint64_t start, struct allocation *);

/* What lies at an address, which may be in its middle. False: nothing of ours. */
bool book_find(uint64_t address, uint64_t *start, struct allocation *);

/* Calls back with each allocation; the call may take it. Others that are added meanwhile are met, or are not. */
void book_each(void (*)(uint64_t start, struct allocation, void *data), void *data);

#endif
