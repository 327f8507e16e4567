/*
 * tree.h - an ordered set of small integers, in a tree of 64-bit words.
 *
 * After the van Emde Boas tree of Gallatin: an inner word says which of its children have something, and no minimum and
 * no maximum. The words are the owner's, and zero is the empty set: what nobody has inserted into nobody touches.
 *
 *   leaf      a bit for each of 64 elements
 *   inner     version << 32 | present,   in present a bit for each of 32 children
 *   version   of an inner word: inserts that have come through it, modulo 2^32. Nothing else changes it
 *   empty     a leaf that is 0; an inner word whose present is 0, whatever its version
 *   root      the one word of the highest level; an inner one, also where one leaf would do
 *
 *   x is in the set  =  its bit in its leaf is set
 *   (1) once an insert of x has returned, the bits above x are set in every level until x is removed
 *   (2) a bit above an empty child is about to be cleared, or is cleared by the next search that comes to it
 *
 * Who may do what: any thread anything, at any time. The words are to outlive every call.
 *   insert    sets the bit in the leaf; then, in each level above, a version step, and then the bit if the step found
 *             it clear. Wait-free: at most two atomic steps a level
 *   remove    clears the bit in the leaf; where a word has become empty, reads the word above, looks whether its child
 *             is empty, and exchanges the word as it was read for one without the child's bit. Lock-free
 *   next      descends by the bits, and goes on behind a child that turns out to be empty, whose bit it clears as a
 *             remove does. Lock-free
 *   take      next and remove, until a remove is won. Lock-free: a remove is lost to one that is won
 *
 * Why (1) holds. An insert of x is done with a level when it has found or set its bit there. An exchange that clears
 * that bit later has read the word either before the insert's version step, and then it fails; or after it, and then it
 * looked at the child after the insert was done with the child's level. In a leaf, it has seen that x was removed; in
 * an inner word that the bit above x was cleared, and by the same argument, a level below, that x was removed. With the
 * bit before the step, an exchange between the two clears a bit that the insert has found set.
 *
 * ABA: between the read and the exchange a bit may have been cleared and set again under one version, by an insert that
 * had made its step before the read. That is harmless: of that insert, too, the child was looked at after its step, and
 * what it inserted was gone. 2^32 inserts below one word during one operation are excluded.
 *
 * An answer of none. A search reads the root before it descends and after: if the version is another one, or there is
 * a bit that was not there, it searches again. Otherwise none is right at the second read. Suppose an insert of x had
 * returned by then and x had not been removed since: its step in the root was before the first read, and so it was done
 * with the levels below; its bit in the root is set, so it was at the first read; then the search came by x, which it
 * has not met. The version alone does not do: an insert can have made its step before the first read, and set its bit,
 * and returned, after it.
 *
 * An element whose insert has not returned may be met by one search and passed over by the next one. Who takes it
 * orders its insert before; so that, of insert, remove and take, each happens at one instant.
 *
 * All operations on words are sequentially consistent: what is said above of before and after is said of their one
 * order, and a caller's own flags may be part of it.
 */
#ifndef VPMM_LIB_TREE_H
#define VPMM_LIB_TREE_H

#include "base/atomic.h"

enum { TREE_LEAF_BITS = 64, TREE_FANOUT = 32, TREE_MAX_LEVELS = 6 };

struct tree {
    _Atomic(uint64_t) *level[TREE_MAX_LEVELS]; /* level[0]: the leaves; level[levels - 1]: the root, one word */
    unsigned levels;                           /* 2 or more */
    unsigned stride;                           /* from a word of a level to the next one; 1: no other tree between */
    uint64_t capacity;
};

/* For elements below capacity, which is 1 to 2^31. 64-bit words: capacity / 64 * 32 / 31, rounded up in each level. */
size_t tree_words(uint64_t capacity);

/* The words are zero: the empty set. They stay the caller's. Touches none of them. */
void tree_init(struct tree *, _Atomic(uint64_t) *words, uint64_t capacity);

/*
 * The same of several trees of one capacity, tree_words of it for each. Their words lie among one another, so that sets
 * of few and small elements touch few pages of memory in all.
 */
void trees_init(struct tree *, unsigned trees, _Atomic(uint64_t) *words, uint64_t capacity);

void tree_insert(struct tree *, uint64_t x); /* x < capacity; may be in the set */
bool tree_remove(struct tree *, uint64_t x); /* whether x was in the set: of several removers one is told so */

/*
 * The least element that is not below `from`; false: none. Exact if nobody else changes the set. Otherwise: *x was in
 * the set at an instant of the call; whatever of `from` and above was in it during the whole call is not below *x; and
 * none was right at an instant of the call. Constant time: a word a level, and one for each empty child on the way.
 */
bool tree_next(const struct tree *, uint64_t from, uint64_t *x);

/* Removes an element that is not below `from`, as tree_next finds it. false: none, at an instant of the call. */
bool tree_take(struct tree *, uint64_t from, uint64_t *x);

#endif
