#include "region.h"

static struct page *at(const struct arena *arena, uint64_t page)
{
    return page_at(&arena->pages, page);
}

static struct hints *shard_of(struct arena *arena, struct fence fence)
{
    return fence.stream ? &stream_at(&arena->streams, fence.stream)->free : &arena->passed;
}

static struct fence settled(const struct arena *arena, struct fence fence)
{
    return fence_passed(&arena->streams, fence) ? FENCE_PASSED : fence;
}

static bool may_merge(const struct arena *arena, struct fence a, struct fence b, struct fence *merged)
{
    a = settled(arena, a);
    b = settled(arena, b);
    *merged = a.number > b.number ? a : b;
    return a.stream == b.stream || !a.stream || !b.stream;
}

/* ---- pieces ---- */

static void write_piece(struct arena *arena, uint64_t page, uint64_t pages, struct fence fence)
{
    struct page *first = at(arena, page);
    store_relaxed_u32(&first->piece_pages, (uint32_t)pages);
    store_relaxed_u32(&first->piece_stream, fence.stream);
    store_relaxed_u64(&first->piece_number, fence.number);
}

static uint64_t piece_pages(const struct arena *arena, uint64_t page)
{
    return load_relaxed_u32(&at(arena, page)->piece_pages);
}

static struct fence piece_fence(const struct arena *arena, uint64_t page)
{
    const struct page *first = at(arena, page);
    return (struct fence){load_relaxed_u32(&first->piece_stream), load_relaxed_u64(&first->piece_number)};
}

static void ensure_pieces(struct arena *arena, struct region region)
{
    if (!region.has_pieces)
        write_piece(arena, region.page, region.pages, region.fence);
}

/* The latest of a region's pieces, which are all of one stream or passed. */
static struct fence latest_fence(const struct arena *arena, uint64_t page, uint64_t end)
{
    struct fence latest = FENCE_PASSED;
    for (; page < end; page += piece_pages(arena, page)) {
        struct fence fence = settled(arena, piece_fence(arena, page));
        latest = fence.number > latest.number ? fence : latest;
    }
    return latest;
}

/* Cuts an owned region in two at `pages`; the piece that lies across becomes two. */
static struct region cut_off_front(struct arena *arena, struct region region, uint64_t pages)
{
    struct region rest = {region.page + pages, region.pages - pages, region.fence, region.has_pieces};
    if (!region.has_pieces)
        return rest;
    uint64_t piece = region.page;
    while (piece + piece_pages(arena, piece) <= rest.page)
        piece += piece_pages(arena, piece);
    uint64_t end = piece + piece_pages(arena, piece);
    if (piece < rest.page) {
        struct fence fence = piece_fence(arena, piece);
        write_piece(arena, rest.page, end - rest.page, fence);
        write_piece(arena, piece, rest.page - piece, fence);
    }
    rest.fence = latest_fence(arena, rest.page, rest.page + rest.pages);
    return rest;
}

/* ---- neighbours ---- */

/* The FREE region that ends before this page, if its hint on its last page still holds. */
static bool left_of(const struct arena *arena, uint64_t page, struct found *left)
{
    uint64_t index = page_index(&arena->pages, page);
    if (!index)
        return false;
    uint64_t length = load_sc_u32(&at(arena, page - 1)->back);
    if (!length || length > index)
        return false;
    left->page = page - length;
    left->word = load_sc_u64(&at(arena, left->page)->word);
    left->pages = length;
    return word_state(left->word) == PAGE_FREE && word_pages(left->word) == length;
}

static bool right_of(const struct arena *arena, uint64_t page, uint64_t pages, struct found *right)
{
    if (pages == pages_to_chunk_end(&arena->pages, page))
        return false;
    right->page = page + pages;
    right->word = load_sc_u64(&at(arena, right->page)->word);
    right->pages = word_pages(right->word);
    return word_state(right->word) == PAGE_FREE;
}

bool region_claim(struct arena *arena, const struct found *found, struct region *region)
{
    struct page *first = at(arena, found->page);
    struct fence fence = page_fence(first);
    if (!page_take(first, found->word))
        return false;
    hints_remove(first);
    *region = (struct region){found->page, found->pages, fence, true};
    return true;
}

static bool claim_mergeable(struct arena *arena, const struct found *neighbour, struct fence fence,
                            struct region *claimed, struct fence *merged)
{
    return may_merge(arena, page_fence(at(arena, neighbour->page)), fence, merged) &&
           region_claim(arena, neighbour, claimed);
}

/* Whether pieces of it may pass on their own. */
static void note_mixture(struct arena *arena, struct fence a, struct fence b)
{
    if (a.stream != b.stream && !load_relaxed_u32(&arena->mixed))
        store_relaxed_u32(&arena->mixed, 1);
}

/* Both are in the caller's hands, `left` ends where `right` begins: they become one. */
static struct region unite(struct arena *arena, struct region left, struct region right, struct fence fence)
{
    note_mixture(arena, left.fence, right.fence);
    ensure_pieces(arena, left);
    ensure_pieces(arena, right);
    page_set(at(arena, right.page), PAGE_NONE, 0);
    return (struct region){left.page, left.pages + right.pages, fence, true};
}

/* Takes mergeable neighbours in until there are none. Lock-free: each failed claim is another thread's progress. */
static struct region grow(struct arena *arena, struct region region)
{
    struct found neighbour;
    struct region claimed;
    struct fence merged;
    while (left_of(arena, region.page, &neighbour) &&
           claim_mergeable(arena, &neighbour, region.fence, &claimed, &merged))
        region = unite(arena, claimed, region, merged);
    while (right_of(arena, region.page, region.pages, &neighbour) &&
           claim_mergeable(arena, &neighbour, region.fence, &claimed, &merged))
        region = unite(arena, region, claimed, merged);
    return region;
}

/* The word that makes it FREE. The hint is entered first: a FREE region is always hinted. */
static struct found set_free(struct arena *arena, struct region region)
{
    struct page *first = at(arena, region.page);
    region.has_pieces = region.has_pieces && region.fence.stream;
    ensure_pieces(arena, region);
    page_set_fence(first, region.fence);
    store_sc_u32(&at(arena, region.page + region.pages - 1)->back, (uint32_t)region.pages);
    hints_enter(shard_of(arena, region.fence), &arena->hint_arena, first, region.page, region.pages);
    uint64_t word = page_set(first, PAGE_FREE, region.pages);
    return (struct found){region.page, region.pages, word};
}

/*
 * After publication: has a mergeable neighbour appeared meanwhile? True: `region` is in the caller's hands again and
 * must be published (it may be the neighbour alone).
 *
 * Two neighbours A (left) and B that are published at once: each stores its word FREE, then reads the other's (all
 * sequentially consistent), so at least one sees the other. Who sees claims the left one first, then the right one:
 * both threads want A first, so one of them gets it, and then gets B unless B has gone elsewhere. Who fails on the
 * first claim is done: the winner, or whoever has it now, looks at its neighbours again when it publishes.
 */
static bool take_again(struct arena *arena, struct found self, struct region *region)
{
    struct found neighbour;
    struct region claimed, own;
    struct fence merged;
    struct fence fence = region->fence;
    if (left_of(arena, self.page, &neighbour) && claim_mergeable(arena, &neighbour, fence, &claimed, &merged)) {
        *region = region_claim(arena, &self, &own) ? unite(arena, claimed, own, merged) : claimed;
        return true;
    }
    if (right_of(arena, self.page, self.pages, &neighbour) &&
        may_merge(arena, page_fence(at(arena, neighbour.page)), fence, &merged) && region_claim(arena, &self, &own)) {
        *region = own;
        return true;
    }
    return false;
}

/*
 * The fence may have passed, and the regions behind it been moved, between the look at it and the word that makes this
 * one FREE: then no later pass would find a reason to move it. The passer stores completed and then looks for FREE
 * words, this stores the word and then looks at completed, all sequentially consistent: one of the two sees the other.
 */
static bool passed_meanwhile(struct arena *arena, struct found self, struct region *region)
{
    return region->fence.stream && fence_passed(&arena->streams, region->fence) && region_claim(arena, &self, region);
}

void region_publish(struct arena *arena, struct region region)
{
    do {
        region.fence = settled(arena, region.fence);
        region = grow(arena, region);
        struct found self = set_free(arena, region);
        if (!take_again(arena, self, &region) && !passed_meanwhile(arena, self, &region))
            break;
    } while (true);
    fetch_add_sc_u64(&arena->publications, 1);
    arena_wake_reaper(arena);
}

/* ---- finding ---- */

/*
 * Where a hint was found says nothing about the fence: between the look at the hint and the look at the word, the
 * region may have been taken, used and freed elsewhere. The fence is read after the word; if the claim by that word
 * succeeds, it was the fence of that word.
 */
static bool usable(const struct arena *arena, const struct stream *stream, uint64_t page)
{
    return fence_usable(&arena->streams, page_fence(at(arena, page)), stream);
}

enum region_source region_take(struct arena *arena, struct stream *stream, uint64_t pages, bool every_bin,
                               struct region *region)
{
    for (;;) { /* lock-free: a failed claim means that another thread took, merged or moved the region */
        struct found own, passed;
        bool has_own = hints_best(&stream->free, &arena->pages, PAGE_FREE, pages, every_bin, &own);
        bool has_passed = hints_best(&arena->passed, &arena->pages, PAGE_FREE, pages, every_bin, &passed);
        if (!has_own && !has_passed)
            return REGION_NONE;
        bool take_own = has_own && (!has_passed || own.pages <= passed.pages);
        const struct found *found = take_own ? &own : &passed;
        if (usable(arena, stream, found->page) && region_claim(arena, found, region))
            return take_own ? REGION_OWN_STREAM : REGION_COMPLETED;
    }
}

struct join {
    struct arena *arena;
    const struct stream *stream;
    uint64_t wanted;
    uint64_t page, pages; /* of the run found, from its first region on; pages 0: none yet */
    unsigned looked;      /* regions that were not part of a long enough run */
};

/* The run of usable free regions around one of them, as far as it need be. */
static bool look_around(const struct found *found, void *data)
{
    enum { REGIONS_LOOKED_AT = 128 }; /* a malloc that finds nothing here builds, and a build sees all runs */
    struct join *join = data;
    struct found next;
    uint64_t page = found->page, pages = found->pages;
    while (pages < join->wanted && left_of(join->arena, page, &next) && usable(join->arena, join->stream, next.page)) {
        page = next.page;
        pages += next.pages;
    }
    while (pages < join->wanted && right_of(join->arena, page, pages, &next) &&
           usable(join->arena, join->stream, next.page))
        pages += next.pages;
    if (pages >= join->wanted) {
        join->page = page;
        join->pages = pages;
    }
    return !join->pages && ++join->looked < REGIONS_LOOKED_AT;
}

/* Own fences are of one stream, and a passed one counts less than any of them. */
struct region region_unite(struct arena *arena, struct region left, struct region right)
{
    struct fence a = settled(arena, left.fence), b = settled(arena, right.fence);
    return unite(arena, left, right, a.number > b.number ? a : b);
}

/* Claims regions from `page` on until `wanted` pages are together; false: something changed, nothing is kept. */
static bool claim_run(struct arena *arena, const struct stream *stream, uint64_t page, uint64_t wanted,
                      struct region *region)
{
    struct found next = {.page = page, .word = load_sc_u64(&at(arena, page)->word)};
    struct region piece;
    next.pages = word_pages(next.word);
    if (word_state(next.word) != PAGE_FREE || !usable(arena, stream, page) || !region_claim(arena, &next, region))
        return false;
    while (region->pages < wanted) {
        if (!right_of(arena, region->page, region->pages, &next) || !usable(arena, stream, next.page) ||
            !region_claim(arena, &next, &piece)) {
            /* As one region: its pieces keep the fences that they had. */
            region_publish(arena, *region);
            return false;
        }
        *region = region_unite(arena, *region, piece);
    }
    return true;
}

enum region_source region_join(struct arena *arena, struct stream *stream, uint64_t pages, struct region *region)
{
    enum { TRIES = 4 };
    for (int i = 0; i < TRIES; i++) {
        struct join join = {.arena = arena, .stream = stream, .wanted = pages};
        hints_each(&stream->free, &arena->pages, PAGE_FREE, look_around, &join);
        if (!join.pages)
            return REGION_NONE;
        if (claim_run(arena, stream, join.page, pages, region))
            return REGION_OWN_STREAM;
    }
    return REGION_NONE;
}

struct part {
    struct arena *arena;
    uint64_t wanted;
    struct found in;      /* the region */
    uint64_t page, pages; /* the run in it; pages 0: none found */
    unsigned looked;
};

/* The pieces may be changing: lengths are held against the region's, and the claim by its word decides. */
void region_longest_part(const struct arena *arena, const struct found *found, uint64_t *page, uint64_t *pages)
{
    uint64_t end = found->page + found->pages, run = found->page, length;
    *pages = 0;
    for (uint64_t piece = run; piece < end; piece += length) {
        length = piece_pages(arena, piece);
        if (!length || piece + length > end)
            break;
        if (!fence_passed(&arena->streams, piece_fence(arena, piece))) {
            run = piece + length;
        } else if (piece + length - run > *pages) {
            *page = run;
            *pages = piece + length - run;
        }
    }
}

static bool look_inside(const struct found *found, void *data)
{
    enum { REGIONS_LOOKED_AT = 128 };
    struct part *part = data;
    uint64_t page, pages;
    region_longest_part(part->arena, found, &page, &pages);
    if (pages >= part->wanted) {
        part->in = *found;
        part->page = page;
        part->pages = pages;
        return false;
    }
    return ++part->looked < REGIONS_LOOKED_AT;
}

struct region region_take_out(struct arena *arena, struct region region, uint64_t page, uint64_t pages)
{
    struct region run = region, rest = {0};
    if (page > region.page) {
        run = cut_off_front(arena, region, page - region.page);
        page_set(at(arena, run.page), PAGE_OWN, run.pages);
        region.pages = page - region.page;
        region_publish(arena, region);
    }
    if (run.pages > pages) {
        rest = cut_off_front(arena, run, pages);
        page_set(at(arena, rest.page), PAGE_OWN, rest.pages);
        region_publish(arena, rest);
    }
    return (struct region){page, pages, FENCE_PASSED, false};
}

bool region_take_part(struct arena *arena, struct stream *stream, uint64_t pages, struct region *region)
{
    enum { TRIES = 4 };
    if (!load_relaxed_u32(&arena->mixed))
        return false;
    for (int i = 0; i < TRIES; i++) {
        struct part part = {.arena = arena, .wanted = pages};
        for (uint32_t slot = 1, n = load_acquire_u32(&arena->streams.slots); slot < n && !part.pages; slot++)
            if (stream_at(&arena->streams, slot) != stream)
                hints_each(&stream_at(&arena->streams, slot)->free, &arena->pages, PAGE_FREE, look_inside, &part);
        if (!part.pages)
            return false;
        if (region_claim(arena, &part.in, region)) {
            *region = region_take_out(arena, *region, part.page, part.pages);
            return true;
        }
    }
    return false;
}

bool region_take_waiting(struct arena *arena, struct stream *stream, uint64_t pages, bool every_bin,
                         struct region *region)
{
    for (;;) { /* lock-free, as region_take */
        struct found best = {0}, found;
        for (uint32_t slot = 1, n = load_acquire_u32(&arena->streams.slots); slot < n; slot++) {
            struct stream *other = stream_at(&arena->streams, slot);
            if (other != stream && hints_best(&other->free, &arena->pages, PAGE_FREE, pages, every_bin, &found) &&
                (!best.pages || found.pages < best.pages) &&
                fence_waitable(&arena->streams, page_fence(at(arena, found.page))))
                best = found;
        }
        if (!best.pages)
            return false;
        if (region_claim(arena, &best, region))
            return true;
    }
}

/* ---- handing out and taking back ---- */

CUdeviceptr region_hand_out(struct arena *arena, struct region region, uint64_t pages, uint64_t requested)
{
    struct page *first = at(arena, region.page);
    struct region rest = {0};
    if (region.pages > pages) {
        rest = cut_off_front(arena, region, pages);
        page_set(at(arena, rest.page), PAGE_OWN, rest.pages);
    }
    store_relaxed_u64(&first->requested, requested);
    stats_begin_live(arena->stats, pages << arena->pages.page_shift, requested);
    page_set(first, PAGE_LIVE, pages); /* release: pairs with the acquire in region_take_back */
    if (rest.pages)
        region_publish(arena, rest);
    return page_address(&arena->pages, region.page);
}

vpmm_status region_take_back(struct arena *arena, CUdeviceptr address, struct region *region)
{
    uint64_t page;
    if (!page_of_address(&arena->pages, address, &page))
        return fail(VPMM_ERROR_INVALID_POINTER, "0x%llx is not the start of an allocation of this pool",
                    (unsigned long long)address);
    struct page *first = at(arena, page);
    uint64_t word = load_acquire_u64(&first->word);
    if (word_state(word) != PAGE_LIVE || !page_take(first, word))
        return fail(
            VPMM_ERROR_INVALID_POINTER,
            "0x%llx is not the start of a live allocation of this pool: it was freed before, or lies inside one",
            (unsigned long long)address);
    *region = (struct region){page, word_pages(word), FENCE_PASSED, false};
    stats_end_live(arena->stats, region->pages << arena->pages.page_shift, load_relaxed_u64(&first->requested));
    return VPMM_SUCCESS;
}

static bool pass_one(const struct found *found, void *data)
{
    struct arena *arena = data;
    struct region region;
    if (fence_passed(&arena->streams, page_fence(at(arena, found->page))) && region_claim(arena, found, &region))
        region_publish(arena, region);
    return true;
}

void region_pass(struct arena *arena, struct stream *stream)
{
    hints_each(&stream->free, &arena->pages, PAGE_FREE, pass_one, arena);
}

/* ---- holes ---- */

uint64_t hole_from(struct arena *arena, uint64_t page)
{
    uint64_t word = load_acquire_u64(&at(arena, page)->word);
    return word_state(word) == PAGE_HOLE ? word_pages(word) : 0;
}

uint64_t hole_until(struct arena *arena, uint64_t page)
{
    uint64_t index = page_index(&arena->pages, page);
    uint64_t length = index ? load_relaxed_u32(&at(arena, page - 1)->back) : 0;
    return length && length <= index && hole_from(arena, page - length) == length ? length : 0;
}

static void hole_put(struct arena *arena, uint64_t page, uint64_t pages)
{
    if (!pages)
        return;
    struct page *first = at(arena, page);
    store_relaxed_u32(&at(arena, page + pages - 1)->back, (uint32_t)pages);
    hints_enter(&arena->holes, &arena->hint_arena, first, page, pages);
    page_set(first, PAGE_HOLE, pages);
}

static void hole_take(struct arena *arena, uint64_t page)
{
    hints_remove(at(arena, page));
    page_set(at(arena, page), PAGE_NONE, 0);
}

void hole_add(struct arena *arena, uint64_t page, uint64_t pages)
{
    uint64_t before = hole_until(arena, page);
    uint64_t after = pages < pages_to_chunk_end(&arena->pages, page) ? hole_from(arena, page + pages) : 0;
    if (after)
        hole_take(arena, page + pages);
    if (before)
        hole_take(arena, page - before);
    page_set(at(arena, page), PAGE_NONE, 0);
    hole_put(arena, page - before, before + pages + after);
}

void hole_carve(struct arena *arena, uint64_t hole, uint64_t page, uint64_t pages)
{
    uint64_t length = hole_from(arena, hole);
    hole_take(arena, hole);
    page_set(at(arena, page), PAGE_OWN, pages);
    hole_put(arena, hole, page - hole);
    hole_put(arena, page + pages, hole + length - (page + pages));
}
