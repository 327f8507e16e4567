#include "base/tree.h"

enum { LEAF_SHIFT = 6, FANOUT_SHIFT = 5, LEVELS_MIN = 2 };

_Static_assert(TREE_LEAF_BITS == 1 << LEAF_SHIFT && TREE_FANOUT == 1 << FANOUT_SHIFT, "indices are cut out by shifts");

#define PRESENT      UINT64_C(0xffffffff)
#define VERSION_STEP (UINT64_C(1) << 32)

/* Of the elements that have one word in this level in common, the number is two to the power of this. */
static unsigned span_shift(unsigned level)
{
    return LEAF_SHIFT + FANOUT_SHIFT * level;
}

/* The same of those that have one bit in common. */
static unsigned bit_shift(unsigned level)
{
    return level ? span_shift(level - 1) : 0;
}

static size_t words_of_level(uint64_t capacity, unsigned level)
{
    return (size_t)((capacity - 1) >> span_shift(level)) + 1;
}

static unsigned levels_of(uint64_t capacity)
{
    unsigned levels = LEVELS_MIN;
    while (words_of_level(capacity, levels - 1) > 1)
        levels++;
    return levels;
}

size_t tree_words(uint64_t capacity)
{
    size_t words = 0;
    for (unsigned level = 0; level < levels_of(capacity); level++)
        words += words_of_level(capacity, level);
    return words;
}

void trees_init(struct tree *tree, unsigned trees, _Atomic(uint64_t) *words, uint64_t capacity)
{
    for (unsigned i = 0; i < trees; i++)
        tree[i] = (struct tree){.levels = levels_of(capacity), .stride = trees, .capacity = capacity};
    for (unsigned level = 0; level < tree->levels; level++) {
        for (unsigned i = 0; i < trees; i++)
            tree[i].level[level] = words + i;
        words += trees * words_of_level(capacity, level);
    }
}

void tree_init(struct tree *tree, _Atomic(uint64_t) *words, uint64_t capacity)
{
    trees_init(tree, 1, words, capacity);
}

static _Atomic(uint64_t) *word_of(const struct tree *tree, unsigned level, uint64_t x)
{
    return &tree->level[level][(x >> span_shift(level)) * tree->stride];
}

static uint64_t bit_of(unsigned level, uint64_t x)
{
    return UINT64_C(1) << ((x >> bit_shift(level)) & ((level ? TREE_FANOUT : TREE_LEAF_BITS) - 1u));
}

static uint64_t present(unsigned level, uint64_t word)
{
    return level ? word & PRESENT : word;
}

void tree_insert(struct tree *tree, uint64_t x)
{
    fetch_or_sc_u64(word_of(tree, 0, x), bit_of(0, x));
    for (unsigned level = 1; level < tree->levels; level++) {
        _Atomic(uint64_t) *word = word_of(tree, level, x);
        uint64_t bit = bit_of(level, x);
        if (!(fetch_add_sc_u64(word, VERSION_STEP) & bit))
            fetch_or_sc_u64(word, bit);
    }
}

/*
 * Clears the bit above x's word of this level, if that is empty; true: the word above is now empty, too. The word above
 * is read first, and by each exchange that fails; then the child. Lock-free: a failed exchange means an insert's step,
 * or a bit that was set after one, or cleared.
 */
static bool clear_above(const struct tree *tree, unsigned level, uint64_t x)
{
    _Atomic(uint64_t) *child = word_of(tree, level, x), *above = word_of(tree, level + 1, x);
    uint64_t bit = bit_of(level + 1, x), word = load_sc_u64(above);
    while (!present(level, load_sc_u64(child)))
        if (!(word & bit) || cas_sc_u64(above, &word, word & ~bit))
            return !present(level + 1, word & ~bit);
    return false;
}

static void clear_path(const struct tree *tree, unsigned level, uint64_t x)
{
    while (level < tree->levels - 1 && clear_above(tree, level, x))
        level++;
}

bool tree_remove(struct tree *tree, uint64_t x)
{
    uint64_t bit = bit_of(0, x), leaf = fetch_and_sc_u64(word_of(tree, 0, x), ~bit);
    if (leaf == bit)
        clear_path(tree, 0, x);
    return leaf & bit;
}

/* Of the word's bits, those of `from` and above. The word is that of `first` and does not end before `from`. */
static uint64_t present_from(unsigned level, uint64_t word, uint64_t first, uint64_t from)
{
    uint64_t skipped = from > first ? (from - first) >> bit_shift(level) : 0;
    return present(level, word) & ~UINT64_C(0) << skipped;
}

/* Depth first below a word as it was read, which is that of `first`. Wait-free but for the clearing: a word is read
   once, and no more of them than its bits say. */
static bool search(const struct tree *tree, unsigned level, uint64_t word, uint64_t first, uint64_t from, uint64_t *x)
{
    for (uint64_t bits = present_from(level, word, first, from); bits; bits &= bits - 1) {
        uint64_t at = first + ((uint64_t)__builtin_ctzll(bits) << bit_shift(level));
        if (!level) {
            *x = at;
            return true;
        }
        uint64_t child = load_sc_u64(word_of(tree, level - 1, at));
        if (!present(level - 1, child)) /* a remove is under way, or an insert came after it with the bit */
            clear_path(tree, level - 1, at);
        else if (search(tree, level - 1, child, at, from, x))
            return true;
    }
    return false;
}

static bool has_gained(uint64_t before, uint64_t after)
{
    return before >> 32 != after >> 32 || (after & ~before & PRESENT);
}

/* Lock-free: it searches again when an insert has made its step in the root, or set its bit there. */
bool tree_next(const struct tree *tree, uint64_t from, uint64_t *x)
{
    if (from >= tree->capacity)
        return false;
    unsigned top = tree->levels - 1;
    uint64_t before, after = load_sc_u64(tree->level[top]);
    do {
        before = after;
        if (search(tree, top, before, 0, from, x))
            return true;
        after = load_sc_u64(tree->level[top]);
    } while (has_gained(before, after));
    return false;
}

/* Lock-free: who loses x loses it to a remove that is won. Searches again from `from`, of which none is to be said. */
bool tree_take(struct tree *tree, uint64_t from, uint64_t *x)
{
    while (tree_next(tree, from, x))
        if (tree_remove(tree, *x))
            return true;
    return false;
}
