#include "cache/slab.h"

#include "base/assert.h"
#include "base/clock.h"
#include "base/reserve.h"
#include "space/region.h"
#include "space/use.h"

#include <stdlib.h>
#include <string.h>

/* A stream's slabs with free slices, by class. */
struct slab_set {
    struct tree tree[SLICE_CLASSES];
};

#define SIZE(bytes, kind)                                                                                              \
    {                                                                                                                  \
        bytes, kind, ((UINT64_C(1) << 40) + (bytes)-1) / (bytes)                                                       \
    }
#define EIGHT(first, step, kind)                                                                                       \
    SIZE(first, kind), SIZE(first + step, kind), SIZE(first + 2 * step, kind), SIZE(first + 3 * step, kind),           \
        SIZE(first + 4 * step, kind), SIZE(first + 5 * step, kind), SIZE(first + 6 * step, kind),                      \
        SIZE(first + 7 * step, kind)

/* Every slab is a whole number of subpages: its slices' steps are 8 KiB in sum. */
const struct slice_size slice_size[SLICE_CLASSES] = {
    EIGHT(256, 256, 0),   EIGHT(2304, 256, 0),   EIGHT(4608, 512, 1),
    EIGHT(9216, 1024, 2), EIGHT(18432, 2048, 3), EIGHT(36864, 4096, 4),
};

static uint64_t epoch_of(uint64_t word)
{
    return word >> 52;
}

/* The epoch is the upper twelve bits' and wraps. */
static uint64_t slab_word(uint64_t epoch, uint32_t owner, uint32_t free)
{
    return epoch << 52 | (uint64_t)owner << 32 | free;
}

/* ---- the fence number of a slab ---- */

#define NUMBER_MASK ((UINT64_C(1) << 52) - 1)

static uint64_t number_of(const struct slab *slab)
{
    return load_sc_u64(&slab->number) & NUMBER_MASK;
}

static void set_number(struct slab *slab, uint64_t epoch, uint64_t number)
{
    store_sc_u64(&slab->number, epoch << 52 | number);
}

/* Lock-free: a failed exchange is another thread's raise, or a new owner's, which ends it. */
static void raise_number(struct slab *slab, uint64_t epoch, uint64_t number)
{
    uint64_t seen = load_sc_u64(&slab->number);
    while (epoch_of(seen) == (epoch & 0xfff) && (seen & NUMBER_MASK) < number &&
           !cas_sc_u64(&slab->number, &seen, epoch << 52 | number))
        ;
}

static struct slab *slab_at(const struct slabs *slabs, uint64_t index)
{
    return load_acquire_ptr(&slabs->record[index]);
}

/* ---- memory of the trees and records ---- */

static size_t set_bytes(void)
{
    return sizeof(struct slab_set) + SLICE_CLASSES * tree_words(SLABS_MAX) * sizeof(uint64_t);
}

vpmm_status slabs_init(struct slabs *slabs, struct space *space)
{
    slabs->space = space;
    pile_init(&slabs->deferred);
    slabs->word_bytes = SLAB_KINDS * tree_words(SLABS_MAX) * sizeof(uint64_t);
    slabs->words = reserve_zeros(slabs->word_bytes);
    slabs->record = reserve_zeros(SLABS_MAX * sizeof(void *));
    slabs->set = reserve_zeros(STREAMS_MAX * sizeof(void *));
    if (!slabs->words || !slabs->record || !slabs->set)
        return fail(VPMM_ERROR_HOST_MEMORY, "no address space for the records of slabs");
    trees_init(slabs->unused, SLAB_KINDS, slabs->words, SLABS_MAX);
    return VPMM_SUCCESS;
}

void slabs_free(struct slabs *slabs)
{
    if (!slabs->space)
        return;
    for (uint32_t slot = 1; slabs->set && slot < load_acquire_u32(&slabs->space->streams->slots); slot++)
        reserve_free(load_relaxed_ptr(&slabs->set[slot]), set_bytes());
    for (uint32_t i = 0; slabs->record && i < load_relaxed_u32(&slabs->records); i++) {
        struct slab *slab = slab_at(slabs, i);
        for (unsigned j = 0; j < slab->slices; j++)
            uses_free(slabs->space->streams, slab->slice[j].uses);
        free(slab);
    }
    reserve_free(slabs->record, SLABS_MAX * sizeof(void *));
    reserve_free(slabs->set, STREAMS_MAX * sizeof(void *));
    reserve_free(slabs->words, slabs->word_bytes);
}

/* The set of a stream; NULL: it has none. */
static struct slab_set *set_of(const struct slabs *slabs, uint32_t owner)
{
    return load_acquire_ptr(&slabs->set[owner]);
}

/* The same, made on first use. NULL: no host memory. */
static struct slab_set *make_set(struct slabs *slabs, uint32_t owner)
{
    void *set = set_of(slabs, owner);
    if (set)
        return set;
    struct slab_set *fresh = reserve_zeros(set_bytes());
    if (!fresh)
        return NULL;
    trees_init(fresh->tree, SLICE_CLASSES, (_Atomic(uint64_t) *)(void *)(fresh + 1), SLABS_MAX);
    if (cas_acq_rel_ptr(&slabs->set[owner], &set, fresh)) /* pairs with the acquire in set_of */
        return fresh;
    reserve_free(fresh, set_bytes());
    return set;
}

static struct tree *tree_of(const struct slabs *slabs, uint32_t owner, unsigned class)
{
    struct slab_set *set = set_of(slabs, owner);
    return set ? &set->tree[class] : NULL;
}

static struct slab *new_record(struct slabs *slabs, unsigned kind)
{
    size_t bytes = sizeof(struct slab) + slab_slices(kind) * sizeof(struct slice);
    struct slab *slab = aligned_alloc(_Alignof(struct slab), bytes);
    if (!slab)
        return NULL;
    uint32_t index = fetch_add_relaxed_u32(&slabs->records, 1);
    if (index >= SLABS_MAX) {
        fetch_sub_relaxed_u32(&slabs->records, 1);
        free(slab);
        return NULL;
    }
    memset(slab, 0, bytes);
    slab->index = index;
    slab->slices = slab_slices(kind);
    store_release_ptr(&slabs->record[index], slab); /* pairs with the acquire in slab_at */
    return slab;
}

static struct slab *take_record(struct slabs *slabs, unsigned kind)
{
    uint64_t index;
    return tree_take(&slabs->unused[kind], 0, &index) ? slab_at(slabs, index) : new_record(slabs, kind);
}

/* ---- in its owner's tree, if and only if it has free slices ---- */

static void list(const struct slabs *slabs, const struct slab *slab, uint32_t owner)
{
    struct tree *tree = owner && owner != SLAB_CLAIMED ? tree_of(slabs, owner, load_relaxed_u32(&slab->class)) : NULL;
    if (tree)
        tree_insert(tree, slab->index);
}

static bool belongs(const struct slab *slab, uint32_t owner, unsigned class)
{
    uint64_t word = load_sc_u64(&slab->word);
    return slab_owner(word) == owner && slab_free_bits(word) && load_relaxed_u32(&slab->class) == class;
}

/* Removed first and then looked at again: who makes it belong meanwhile sees it in the tree, or inserts it after. */
static void unlist(const struct slabs *slabs, const struct slab *slab, uint32_t owner, unsigned class)
{
    struct tree *tree = tree_of(slabs, owner, class);
    vpmm_assert(tree); /* the owner has made its set before it had a slab */
    tree_remove(tree, slab->index);
    if (belongs(slab, owner, class))
        tree_insert(tree, slab->index);
}

/* ---- formatting and dissolving ---- */

/* For assertions. */
static enum unit_state state_at(const struct slabs *slabs, uint64_t subpage)
{
    return word_state(peek_u64(&unit_at(&slabs->space->units, subpage)->word));
}

struct want slab_want(unsigned class)
{
    uint64_t bytes = slice_size[class].bytes;
    bool is_power = !(bytes & (bytes - 1));
    return (struct want){bytes * slab_slices(slice_size[class].kind) / SUBPAGE_BYTES,
                         is_power && bytes > SUBPAGE_BYTES ? bytes / SUBPAGE_BYTES : 1};
}

static void name_slab(const struct slabs *slabs, uint64_t subpage, uint64_t subpages, struct slab *slab)
{
    for (uint64_t i = 0; i < subpages; i++)
        store_release_ptr(&unit_at(&slabs->space->units, subpage + i)->extent, slab); /* slab_of_subpage acquires */
}

/* The number of the fence that the region is behind for the stream: what it was made to wait for takes a new one. */
static uint64_t number_for(const struct slabs *slabs, struct stream *stream, struct fence fence)
{
    if (fence_passed(slabs->space->streams, fence))
        return 0;
    return fence.stream == stream->slot ? fence.number : fence_take(stream).number;
}

bool slab_format(struct slabs *slabs, const struct region *region, struct stream *stream, unsigned class)
{
    struct slab *slab = make_set(slabs, stream->slot) ? take_record(slabs, slice_size[class].kind) : NULL;
    if (!slab)
        return false;
    CUdeviceptr base = unit_address(&slabs->space->units, region->first);
    vpmm_assert(state_at(slabs, region->first) == UNIT_OWN && region->units == slab_want(class).units);
    vpmm_assert(!slab_owner(peek_u64(&slab->word)) && !slab_free_bits(peek_u64(&slab->word)) &&
                peek_u32(&stream->users) > 0);
    slab->subpage = region->first;
    store_relaxed_u64(&slab->base, base);
    store_relaxed_u64(&slab->reciprocal, slice_size[class].reciprocal);
    store_relaxed_u32(&slab->class, class);
    uint64_t epoch = epoch_of(load_relaxed_u64(&slab->word)) + 1;
    set_number(slab, epoch, number_for(slabs, stream, region->fence));
    for (unsigned i = 0; i < slab->slices; i++) {
        store_relaxed_u64(&slab->slice[i].address, base + (uint64_t)i * slice_size[class].bytes);
        store_relaxed_u64(&slab->slice[i].word, slice_word(SLICE_FREE, 0, class, 0));
    }
    name_slab(slabs, region->first, region->units, slab);
    unit_set(unit_at(&slabs->space->units, region->first), UNIT_CUT, region->units);
    fetch_add_relaxed_u64(&slabs->empty, 1);
    store_sc_u64(&slab->word, slab_word(epoch, stream->slot, slab_all(slab)));
    list(slabs, slab, stream->slot);
    return true;
}

/* For assertions. */
static bool are_free(const struct slab *slab)
{
    uint32_t i = 0;
    while (i < slab->slices && slice_state(peek_u64(&slab->slice[i].word)) == SLICE_FREE)
        i++;
    return i == slab->slices;
}

/* Of a slab whose word the caller has made 0: nobody else finds a free slice in it, and none is in use. */
static void dissolve(struct slabs *slabs, struct slab *slab, uint32_t owner)
{
    unsigned class = load_relaxed_u32(&slab->class);
    struct want want = slab_want(class);
    struct fence fence = {owner, number_of(slab)};
    struct region region = {slab->subpage, want.units, fence.number ? fence : FENCE_PASSED, false};
    vpmm_assert(state_at(slabs, region.first) == UNIT_CUT && owner && owner != SLAB_CLAIMED && are_free(slab));
    vpmm_assert(!slab_owner(peek_u64(&slab->word)) && !slab_free_bits(peek_u64(&slab->word)));
    fetch_add_relaxed_u64(&slabs->empty, UINT64_MAX);
    unlist(slabs, slab, owner, class);
    name_slab(slabs, region.first, region.units, NULL);
    unit_set(unit_at(&slabs->space->units, region.first), UNIT_OWN, region.units);
    tree_insert(&slabs->unused[slice_size[class].kind], slab->index);
    region_publish(slabs->space, region);
}

/* Unless it has slices in use, or belongs to none. */
static void try_dissolve(struct slabs *slabs, struct slab *slab)
{
    uint64_t word = load_sc_u64(&slab->word);
    uint32_t owner = slab_owner(word);
    if (owner && owner != SLAB_CLAIMED && slab_free_bits(word) == slab_all(slab) &&
        cas_sc_u64(&slab->word, &word, slab_word(epoch_of(word), 0, 0)))
        dissolve(slabs, slab, owner);
}

void slabs_dissolve_empty(struct slabs *slabs)
{
    uint32_t slots = load_acquire_u32(&slabs->space->streams->slots);
    for (uint32_t slot = 1; slot < slots && slabs_empty(slabs); slot++)
        for (unsigned class = 0; class < SLICE_CLASSES; class ++) {
            struct tree *tree = tree_of(slabs, slot, class);
            for (uint64_t index = 0; tree && tree_next(tree, index, &index); index++)
                try_dissolve(slabs, slab_at(slabs, index));
        }
}

/* ---- taking ---- */

static uint32_t lowest_bits(uint32_t bits, unsigned most)
{
    uint32_t lowest = 0;
    for (; bits && most; most--) {
        lowest |= bits & -bits;
        bits &= bits - 1;
    }
    return lowest;
}

/* Sets bits of slices that the caller has, and that work on the slab's stream may use. */
static void set_bits(struct slabs *slabs, struct slab *slab, uint64_t word, uint32_t bits)
{
    vpmm_assert(bits && !(bits & ~slab_all(slab)));
    do
        vpmm_assert(!(word & bits)); /* they are the caller's */
    while (!cas_sc_u64(&slab->word, &word, word | bits));
    if ((slab_free_bits(word) | bits) == slab_all(slab))
        fetch_add_relaxed_u64(&slabs->empty, 1);
    if (!slab_free_bits(word))
        list(slabs, slab, slab_owner(word));
}

/* Clears up to `most` bits, if the slab is the stream's. */
static uint32_t clear_bits(struct slabs *slabs, struct slab *slab, const struct stream *stream, unsigned class,
                           unsigned most)
{
    uint64_t word = load_sc_u64(&slab->word);
    uint32_t bits;
    do {
        bits = lowest_bits(slab_free_bits(word), most);
        if (slab_owner(word) != stream->slot || !bits || load_relaxed_u32(&slab->class) != class)
            return 0;
    } while (!cas_sc_u64(&slab->word, &word, word & ~(uint64_t)bits));
    if (slab_free_bits(word) == slab_all(slab))
        fetch_add_relaxed_u64(&slabs->empty, UINT64_MAX);
    if (load_relaxed_u32(&slab->class) == class) /* with slices of it taken, it is not dissolved any more */
        return bits;
    set_bits(slabs, slab, load_sc_u64(&slab->word), bits); /* it was, and has become another's */
    return 0;
}

unsigned slab_take(struct slabs *slabs, struct stream *stream, unsigned class, unsigned most, struct slice *taken[])
{
    struct slab_set *set = set_of(slabs, stream->slot);
    uint64_t index;
    vpmm_assert(most > 0 && most <= SLAB_SLICES);
    while (set && tree_next(&set->tree[class], 0, &index)) { /* lock-free: one that gave nothing leaves the tree */
        struct slab *slab = slab_at(slabs, index);
        uint32_t bits = clear_bits(slabs, slab, stream, class, most);
        if (!slab_free_bits(load_sc_u64(&slab->word)) || !bits)
            unlist(slabs, slab, stream->slot, class);
        unsigned n = 0;
        for (; bits; bits &= bits - 1) {
            taken[n] = &slab->slice[__builtin_ctz(bits)];
            vpmm_assert(slice_state(peek_u64(&taken[n]->word)) == SLICE_FREE);
            store_relaxed_u64(&taken[n++]->word, slice_word(SLICE_OWN, 0, class, 0));
        }
        if (n)
            return n;
    }
    return 0;
}

CUdeviceptr slab_hand_out(struct slabs *slabs, struct slice *slice, unsigned class, size_t bytes)
{
    vpmm_assert(slice_state(peek_u64(&slice->word)) == SLICE_OWN && bytes > 0 && bytes <= slice_size[class].bytes);
    stats_begin_live(slabs->space->stats, slabs->space->live_stat, slice_size[class].bytes, bytes);
    store_release_u64(&slice->word, slice_word(SLICE_LIVE, 0, class, bytes)); /* pairs with slice_is_live's acquire */
    return load_relaxed_u64(&slice->address);
}

/* ---- adopting ---- */

/* Of a claimed slab: only bits of passed slices are set meanwhile. */
static void set_owner(struct slab *slab, uint32_t owner, uint64_t epoch)
{
    uint64_t word = load_sc_u64(&slab->word);
    vpmm_assert(slab_owner(word) == SLAB_CLAIMED && owner != SLAB_CLAIMED); /* who has claimed it alone changes it */
    while (!cas_sc_u64(&slab->word, &word, slab_word(epoch, owner, slab_free_bits(word))))
        ;
}

static bool has_passed(const struct slabs *slabs, const struct slab *slab, uint32_t owner)
{
    return fence_passed(slabs->space->streams, (struct fence){owner, number_of(slab)});
}

static bool adopt(struct slabs *slabs, struct slab *slab, uint32_t from, struct stream *to, unsigned class)
{
    vpmm_assert(from != to->slot && peek_u32(&to->users) > 0);
    uint64_t word = load_sc_u64(&slab->word);
    if (slab_owner(word) != from || !slab_free_bits(word) || load_relaxed_u32(&slab->class) != class ||
        !has_passed(slabs, slab, from) ||
        !cas_sc_u64(&slab->word, &word, slab_word(epoch_of(word), SLAB_CLAIMED, slab_free_bits(word))))
        return false;
    bool is_ours = load_relaxed_u32(&slab->class) == class && has_passed(slabs, slab, from);
    if (is_ours)
        set_number(slab, epoch_of(word) + 1, 0);
    set_owner(slab, is_ours ? to->slot : from, epoch_of(word) + is_ours);
    list(slabs, slab, is_ours ? to->slot : from);
    if (!is_ours)
        return false;
    unlist(slabs, slab, from, class);
    stats_count(slabs->space->stats, STAT_adoptions);
    return true;
}

/* The next streams after its own, around. */
bool slab_adopt(struct slabs *slabs, struct stream *stream, unsigned class, bool every_one)
{
    enum { STREAMS_LOOKED_AT = 64, SLABS_LOOKED_AT = 64 };
    uint32_t others = load_acquire_u32(&slabs->space->streams->slots) - 2, slot = stream->slot;
    uint64_t slabs_left = every_one ? UINT64_MAX : SLABS_LOOKED_AT;
    if (!make_set(slabs, stream->slot))
        return false;
    for (uint32_t i = 0; i < others && (every_one || i < STREAMS_LOOKED_AT); i++) {
        slot = slot % (others + 1) + 1;
        struct tree *tree = tree_of(slabs, slot, class);
        for (uint64_t index = 0; tree && slabs_left && tree_next(tree, index, &index); index++, slabs_left--)
            if (adopt(slabs, slab_at(slabs, index), slot, stream, class))
                return true;
    }
    return false;
}

/* ---- giving back ---- */

static struct slab *slab_of(const struct slabs *slabs, const struct slice *slice)
{
    uint64_t subpage = 0;
    unit_around(&slabs->space->units, load_relaxed_u64(&slice->address), &subpage);
    return slab_of_subpage(slabs->space, subpage);
}

static void defer(struct slabs *slabs, struct slice *slice, struct fence fence, unsigned class)
{
    slice->number = fence.number;
    store_relaxed_u64(&slice->word, slice_word(SLICE_OWN, fence.stream, class, 0));
    pile_push(&slabs->deferred, &slice->node);
    bell_ring(slabs->space->bell);
}

/* Whether the owner has another slab of the class with free slices. */
static bool has_another(const struct slabs *slabs, const struct slab *slab, uint32_t owner)
{
    struct tree *tree = tree_of(slabs, owner, load_relaxed_u32(&slab->class));
    uint64_t index;
    return tree && tree_next(tree, 0, &index) && (index != slab->index || tree_next(tree, index + 1, &index));
}

void slab_give(struct slabs *slabs, struct slice *slice, struct fence fence)
{
    struct slab *slab = slab_of(slabs, slice);
    uint32_t bit = UINT32_C(1) << (slice - slab->slice);
    unsigned class = load_relaxed_u32(&slab->class);
    bool passed = fence_passed(slabs->space->streams, fence);
    uint64_t word = load_sc_u64(&slab->word);
    vpmm_assert(slice_state(peek_u64(&slice->word)) == SLICE_OWN && slice_class_of(peek_u64(&slice->word)) == class);
    vpmm_assert(bit & slab_all(slab));
    store_relaxed_u64(&slice->word, slice_word(SLICE_FREE, 0, class, 0));
    do {
        vpmm_assert(!(word & bit));
        if (!passed && slab_owner(word) != fence.stream) {
            defer(slabs, slice, fence, class);
            return;
        }
        if (!passed) /* before the exchange: see adopt */
            raise_number(slab, epoch_of(word), fence.number);
    } while (!cas_sc_u64(&slab->word, &word, word | bit));
    uint32_t owner = slab_owner(word);
    if (!slab_free_bits(word))
        list(slabs, slab, owner);
    if ((slab_free_bits(word) | bit) != slab_all(slab))
        return;
    fetch_add_relaxed_u64(&slabs->empty, 1);
    if (owner != SLAB_CLAIMED && has_another(slabs, slab, owner))
        try_dissolve(slabs, slab);
}

/* A word with another state. */
static uint64_t in_state(uint64_t word, enum slice_state state)
{
    return word - slice_state(word) + state;
}

bool slab_take_back(struct slabs *slabs, struct slice *slice, CUdeviceptr address, struct uses **uses)
{
    uint64_t word;
    bool is_live = slice_is_live(slice, address, &word);
    bool is_used = slice_state(word) == SLICE_USED && load_relaxed_u64(&slice->address) == address;
    unsigned class = slice_class_of(word);
    if (!(is_live || is_used) || !cas_sc_u64(&slice->word, &word, slice_word(SLICE_OWN, 0, class, 0)))
        return false;
    *uses = slice->uses;
    slice->uses = NULL;
    stats_end_live(slabs->space->stats, slabs->space->live_stat, slice_size[class].bytes, slice_requested(word));
    return true;
}

/* ---- further streams ---- */

/*
 * Makes a live slice NOTING: in the caller's hands. *before: its word. The slice may have become another allocation, if
 * the address was not live: then it is as it was, and whoever frees it meanwhile is right, so the address is looked at
 * before the exchange too. Blocking, as begin_note of use.c.
 */
static bool begin_note(struct slice *slice, CUdeviceptr address, uint64_t *before)
{
    uint64_t word = load_acquire_u64(&slice->word);
    enum slice_state state;
    while ((state = slice_state(word)) == SLICE_NOTING || state == SLICE_LIVE || state == SLICE_USED) {
        if (load_relaxed_u64(&slice->address) != address)
            return false;
        if (state == SLICE_NOTING) {
            clock_yield();
            word = load_acquire_u64(&slice->word);
        } else if (cas_sc_u64(&slice->word, &word, in_state(word, SLICE_NOTING))) {
            *before = word;
            if (load_relaxed_u64(&slice->address) == address)
                return true;
            store_sc_u64(&slice->word, word);
            return false;
        }
    }
    return false;
}

vpmm_status slab_use(struct slabs *slabs, struct slice *slice, CUdeviceptr address, struct stream *stream)
{
    uint64_t before;
    if (!begin_note(slice, address, &before))
        return region_not_live(address);
    vpmm_status status = uses_add(slabs->space, &slice->uses, stream);
    vpmm_assert(slice_state(peek_u64(&slice->word)) == SLICE_NOTING);
    store_sc_u64(&slice->word, in_state(before, slice->uses ? SLICE_USED : SLICE_LIVE));
    return status;
}

void slab_set_ending(struct slice *slice, bool ending)
{
    uint64_t word = peek_u64(&slice->word);
    vpmm_assert(slice_state(word) == (ending ? SLICE_OWN : SLICE_ENDING));
    /* Who has it next gets it by the pile, and the event lock (ending.h). */
    store_relaxed_u64(&slice->word, in_state(word, ending ? SLICE_ENDING : SLICE_OWN));
}

void slabs_pass(struct slabs *slabs)
{
    if (!slabs->space)
        return;
    struct pile_node *fresh = pile_take(&slabs->deferred), *waiting = NULL;
    for (struct pile_node *list[] = {fresh, slabs->waiting}, **from = list; from < list + 2; from++)
        for (struct pile_node *node = *from, *next; node; node = next) {
            struct slice *slice = (struct slice *)(void *)((char *)node - offsetof(struct slice, node));
            struct fence fence = {slice_stream(load_relaxed_u64(&slice->word)), slice->number};
            next = node->next;
            if (fence_passed(slabs->space->streams, fence)) {
                slab_give(slabs, slice, FENCE_PASSED);
            } else {
                node->next = waiting;
                waiting = node;
            }
        }
    slabs->waiting = waiting;
}

/* ---- what others give back ---- */

/* Of a slab with an owner: whether the slice is not in use. What is cached is in nobody's hands. */
static bool is_to_come(const struct slice *slice, struct word_seen *seen)
{
    uint64_t word = load_acquire_u64(&slice->word);
    enum slice_state state = slice_state(word);
    if (state == SLICE_FREE || state == SLICE_OWN || state == SLICE_ENDING)
        *seen = (struct word_seen){&slice->word, word};
    return state != SLICE_LIVE && state != SLICE_USED && state != SLICE_NOTING;
}

/* Of a record without an owner, whether it is of a slab that is being made or dissolved. */
static bool is_changing(const struct slabs *slabs, const struct slab *slab)
{
    const struct tree *unused = &slabs->unused[__builtin_ctz(SLAB_SLICES / slab->slices)];
    uint64_t index;
    return !(tree_next(unused, slab->index, &index) && index == slab->index);
}

bool slabs_any_to_come(const struct slabs *slabs, unsigned class, struct word_seen *seen)
{
    uint32_t records = load_relaxed_u32(&slabs->records);
    for (uint32_t i = 0; i < records && i < SLABS_MAX; i++) {
        const struct slab *slab = slab_at(slabs, i); /* NULL: it is being made, of a region in its thread's hands */
        uint64_t word = slab ? load_sc_u64(&slab->word) : 0;
        if (slab && !slab_owner(word) && is_changing(slabs, slab))
            return true;
        bool is_of_class = slab_owner(word) && load_relaxed_u32(&slab->class) == class;
        for (uint32_t j = 0; is_of_class && j < slab->slices; j++)
            if (is_to_come(&slab->slice[j], seen))
                return true;
    }
    return false;
}

bool slab_is_listed(const struct slabs *slabs, const struct slab *slab)
{
    struct tree *tree = tree_of(slabs, slab_owner(load_sc_u64(&slab->word)), load_relaxed_u32(&slab->class));
    uint64_t index;
    return tree && tree_next(tree, slab->index, &index) && index == slab->index;
}
