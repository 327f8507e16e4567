#include "space/region.h"

#include "base/assert.h"

static struct page *at(const struct space *space, uint64_t page)
{
    return page_at(&space->pages, page);
}

/* For assertions: the region is in the hands of one thread, which is the caller. */
static bool is_owned(const struct space *space, uint64_t page)
{
    return word_state(peek_u64(&at(space, page)->word)) == PAGE_OWN;
}

static struct hints *shard_of(struct space *space, struct fence fence)
{
    return fence.stream ? &stream_at(space->streams, fence.stream)->free[space->level] : &space->passed;
}

static struct fence settled(const struct space *space, struct fence fence)
{
    return fence_passed(space->streams, fence) ? FENCE_PASSED : fence;
}

static bool may_merge(const struct space *space, struct fence a, struct fence b, struct fence *merged)
{
    a = settled(space, a);
    b = settled(space, b);
    *merged = a.number > b.number ? a : b;
    return a.stream == b.stream || !a.stream || !b.stream;
}

/* ---- spans ---- */

static void write_span(struct space *space, uint64_t page, uint64_t pages, struct fence fence)
{
    struct page *first = at(space, page);
    store_relaxed_u32(&first->span_pages, (uint32_t)pages);
    store_relaxed_u32(&first->span_stream, fence.stream);
    store_relaxed_u64(&first->span_number, fence.number);
}

static uint64_t span_pages(const struct space *space, uint64_t page)
{
    return load_relaxed_u32(&at(space, page)->span_pages);
}

static struct fence span_fence(const struct space *space, uint64_t page)
{
    const struct page *first = at(space, page);
    return (struct fence){load_relaxed_u32(&first->span_stream), load_relaxed_u64(&first->span_number)};
}

static void ensure_spans(struct space *space, struct region region)
{
    if (!region.has_spans)
        write_span(space, region.page, region.pages, region.fence);
}

/* For assertions: the spans follow each other from the region's first page to its end. */
static bool spans_fill(const struct space *space, struct region region)
{
    uint64_t page = region.page, end = region.page + region.pages;
    while (page < end && span_pages(space, page))
        page += span_pages(space, page);
    return page == end;
}

/* The latest of a region's spans, which are all of one stream or passed. */
static struct fence latest_fence(const struct space *space, uint64_t page, uint64_t end)
{
    struct fence latest = FENCE_PASSED;
    for (; page < end; page += span_pages(space, page)) {
        struct fence fence = settled(space, span_fence(space, page));
        latest = fence.number > latest.number ? fence : latest;
    }
    return latest;
}

/* Splits an owned region in two at `pages`; the span that lies across becomes two. */
static struct region split(struct space *space, struct region region, uint64_t pages)
{
    vpmm_assert(is_owned(space, region.page) && pages > 0 && pages < region.pages);
    struct region rest = {region.page + pages, region.pages - pages, region.fence, region.has_spans};
    stats_count(space->stats, STAT_splits);
    if (!region.has_spans)
        return rest;
    uint64_t span = region.page;
    while (span + span_pages(space, span) <= rest.page)
        span += span_pages(space, span);
    uint64_t end = span + span_pages(space, span);
    if (span < rest.page) {
        struct fence fence = span_fence(space, span);
        write_span(space, rest.page, end - rest.page, fence);
        write_span(space, span, rest.page - span, fence);
    }
    rest.fence = latest_fence(space, rest.page, rest.page + rest.pages);
    return rest;
}

/* ---- neighbours ---- */

/* The FREE region that ends before this page, if its hint on its last page still holds. */
static bool left_of(const struct space *space, uint64_t page, struct seen_region *left)
{
    uint64_t index = page_index(&space->pages, page);
    if (!index)
        return false;
    uint64_t length = load_sc_u32(&at(space, page - 1)->back);
    if (!length || length > index)
        return false;
    left->page = page - length;
    left->word = load_sc_u64(&at(space, left->page)->word);
    left->pages = length;
    return word_state(left->word) == PAGE_FREE && word_pages(left->word) == length;
}

static bool right_of(const struct space *space, uint64_t page, uint64_t pages, struct seen_region *right)
{
    if (pages == pages_to_chunk_end(&space->pages, page))
        return false;
    right->page = page + pages;
    right->word = load_sc_u64(&at(space, right->page)->word);
    right->pages = word_pages(right->word);
    return word_state(right->word) == PAGE_FREE;
}

/* Of granules: how many whole pages a region that becomes FREE, or no longer is, gives back or takes. */
static uint64_t whole_pages(const struct space *space, uint64_t page, uint64_t pages)
{
    uint64_t a_page = space->page_granules;
    if (pages < a_page || !a_page)
        return 0;
    uint64_t first = (page + a_page - 1) / a_page, end = (page + pages) / a_page;
    return end > first ? end - first : 0;
}

static void count_whole(struct space *space, uint64_t whole)
{
    if (whole)
        fetch_add_relaxed_u64(&space->whole, whole);
}

bool region_claim(struct space *space, const struct seen_region *found, struct region *region)
{
    struct page *first = at(space, found->page);
    struct fence fence = page_fence(first);
    if (!page_take(first, found->word))
        return false;
    vpmm_assert(word_state(found->word) == PAGE_FREE && word_pages(found->word) == found->pages);
    hints_remove(first);
    count_whole(space, 0 - whole_pages(space, found->page, found->pages));
    *region = (struct region){found->page, found->pages, fence, true};
    return true;
}

static bool claim_mergeable(struct space *space, const struct seen_region *neighbour, struct fence fence,
                            struct region *claimed, struct fence *merged)
{
    return may_merge(space, page_fence(at(space, neighbour->page)), fence, merged) &&
           region_claim(space, neighbour, claimed);
}

/* Whether spans of it may pass on their own. */
static void note_mixture(struct space *space, struct fence a, struct fence b)
{
    if (a.stream != b.stream && !load_relaxed_u32(&space->mixed))
        store_relaxed_u32(&space->mixed, 1);
}

/* Both are in the caller's hands, `left` ends where `right` begins: they become one. */
static struct region unite(struct space *space, struct region left, struct region right, struct fence fence)
{
    vpmm_assert(is_owned(space, left.page) && is_owned(space, right.page) && left.page + left.pages == right.page);
    note_mixture(space, left.fence, right.fence);
    ensure_spans(space, left);
    ensure_spans(space, right);
    page_set(at(space, right.page), PAGE_NONE, 0);
    return (struct region){left.page, left.pages + right.pages, fence, true};
}

/* Takes mergeable neighbours in until there are none. Lock-free: each failed claim is another thread's progress. */
static struct region grow(struct space *space, struct region region)
{
    struct seen_region neighbour;
    struct region claimed;
    struct fence merged;
    while (left_of(space, region.page, &neighbour) &&
           claim_mergeable(space, &neighbour, region.fence, &claimed, &merged))
        region = unite(space, claimed, region, merged);
    while (right_of(space, region.page, region.pages, &neighbour) &&
           claim_mergeable(space, &neighbour, region.fence, &claimed, &merged))
        region = unite(space, region, claimed, merged);
    return region;
}

/* The word that makes it FREE. The hint is entered first: a FREE region is always hinted. */
static struct seen_region set_free(struct space *space, struct region region)
{
    struct page *first = at(space, region.page);
    vpmm_assert(is_owned(space, region.page) && region.pages <= pages_to_chunk_end(&space->pages, region.page));
    region.has_spans = region.has_spans && region.fence.stream;
    ensure_spans(space, region);
    vpmm_assert_walk(spans_fill(space, region));
    page_set_fence(first, region.fence);
    store_sc_u32(&at(space, region.page + region.pages - 1)->back, (uint32_t)region.pages);
    hints_enter(shard_of(space, region.fence), &space->hint_arena, first, region.page, region.pages);
    count_whole(space, whole_pages(space, region.page, region.pages));
    uint64_t word = page_set(first, PAGE_FREE, region.pages);
    return (struct seen_region){region.page, region.pages, word};
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
static bool take_again(struct space *space, struct seen_region self, struct region *region)
{
    struct seen_region neighbour;
    struct region claimed, own;
    struct fence merged;
    struct fence fence = region->fence;
    if (left_of(space, self.page, &neighbour) && claim_mergeable(space, &neighbour, fence, &claimed, &merged)) {
        *region = region_claim(space, &self, &own) ? unite(space, claimed, own, merged) : claimed;
        return true;
    }
    if (right_of(space, self.page, self.pages, &neighbour) &&
        may_merge(space, page_fence(at(space, neighbour.page)), fence, &merged) && region_claim(space, &self, &own)) {
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
static bool passed_meanwhile(struct space *space, struct seen_region self, struct region *region)
{
    return region->fence.stream && fence_passed(space->streams, region->fence) && region_claim(space, &self, region);
}

void region_publish(struct space *space, struct region region)
{
    vpmm_assert(region.pages > 0 && is_owned(space, region.page));
    do {
        region.fence = settled(space, region.fence);
        region = grow(space, region);
        struct seen_region self = set_free(space, region);
        if (!take_again(space, self, &region) && !passed_meanwhile(space, self, &region))
            break;
    } while (true);
    fetch_add_sc_u64(&space->publications, 1);
    await_published(&space->await, region.pages, region.fence);
    bell_ring(space->bell);
}

/* ---- finding ---- */

/*
 * Where a hint was found says nothing about the fence: between the look at the hint and the look at the word, the
 * region may have been taken, used and freed elsewhere. The fence is read after the word; if the claim by that word
 * succeeds, it was the fence of that word.
 */
static bool usable(const struct space *space, const struct stream *stream, uint64_t page)
{
    return fence_usable(space->streams, page_fence(at(space, page)), stream);
}

enum region_source region_take(struct space *space, struct stream *stream, struct want want, bool every_bin,
                               struct region *region)
{
    for (;;) { /* lock-free: a failed claim means that another thread took, merged or moved the region */
        struct seen_region own, passed;
        bool has_own = hints_best(&stream->free[space->level], &space->pages, PAGE_FREE, want, every_bin, &own);
        bool has_passed = hints_best(&space->passed, &space->pages, PAGE_FREE, want, every_bin, &passed);
        if (!has_own && !has_passed)
            return REGION_NONE;
        bool take_own = has_own && (!has_passed || own.pages <= passed.pages);
        const struct seen_region *found = take_own ? &own : &passed;
        if (usable(space, stream, found->page) && region_claim(space, found, region))
            return take_own ? REGION_OWN_STREAM : REGION_COMPLETED;
    }
}

struct join {
    struct space *space;
    const struct stream *stream;
    uint64_t wanted;
    uint64_t page, pages; /* of the run found, from its first region on; pages 0: none yet */
    unsigned looked;      /* regions that were not part of a long enough run */
};

/* The run of usable free regions around one of them, as far as it need be. */
static bool look_around(const struct seen_region *found, void *data)
{
    enum { REGIONS_LOOKED_AT = 128 }; /* a malloc that finds nothing here builds, and a build sees all runs */
    struct join *join = data;
    struct seen_region next;
    uint64_t page = found->page, pages = found->pages;
    while (pages < join->wanted && left_of(join->space, page, &next) && usable(join->space, join->stream, next.page)) {
        page = next.page;
        pages += next.pages;
    }
    while (pages < join->wanted && right_of(join->space, page, pages, &next) &&
           usable(join->space, join->stream, next.page))
        pages += next.pages;
    if (pages >= join->wanted) {
        join->page = page;
        join->pages = pages;
    }
    return !join->pages && ++join->looked < REGIONS_LOOKED_AT;
}

/* Own fences are of one stream, and a passed one counts less than any of them. */
struct region region_unite(struct space *space, struct region left, struct region right)
{
    struct fence a = settled(space, left.fence), b = settled(space, right.fence);
    return unite(space, left, right, a.number > b.number ? a : b);
}

/* Claims regions from `page` on until `wanted` pages are together; false: something changed, nothing is kept. */
static bool claim_run(struct space *space, const struct stream *stream, uint64_t page, uint64_t wanted,
                      struct region *region)
{
    struct seen_region next = {.page = page, .word = load_sc_u64(&at(space, page)->word)};
    struct region claimed;
    next.pages = word_pages(next.word);
    if (word_state(next.word) != PAGE_FREE || !usable(space, stream, page) || !region_claim(space, &next, region))
        return false;
    while (region->pages < wanted) {
        if (!right_of(space, region->page, region->pages, &next) || !usable(space, stream, next.page) ||
            !region_claim(space, &next, &claimed)) {
            /* As one region: its spans keep the fences that they had. */
            region_publish(space, *region);
            return false;
        }
        *region = region_unite(space, *region, claimed);
    }
    return true;
}

enum region_source region_join(struct space *space, struct stream *stream, uint64_t pages, struct region *region)
{
    enum { TRIES = 4 };
    for (int i = 0; i < TRIES; i++) {
        struct join join = {.space = space, .stream = stream, .wanted = pages};
        hints_each(&stream->free[space->level], &space->pages, PAGE_FREE, look_around, &join);
        if (!join.pages)
            return REGION_NONE;
        if (claim_run(space, stream, join.page, pages, region))
            return REGION_OWN_STREAM;
    }
    return REGION_NONE;
}

struct part {
    struct space *space;
    uint64_t wanted;
    struct seen_region in; /* the region */
    uint64_t page, pages;  /* the run in it; pages 0: none found */
    unsigned looked;
};

/* The spans may be changing: lengths are held against the region's, and the claim by its word decides. */
void region_longest_part(const struct space *space, const struct seen_region *found, uint64_t *page, uint64_t *pages)
{
    uint64_t end = found->page + found->pages, run = found->page, length;
    *pages = 0;
    for (uint64_t span = run; span < end; span += length) {
        length = span_pages(space, span);
        if (!length || span + length > end)
            break;
        if (!fence_passed(space->streams, span_fence(space, span))) {
            run = span + length;
        } else if (span + length - run > *pages) {
            *page = run;
            *pages = span + length - run;
        }
    }
}

static bool look_inside(const struct seen_region *found, void *data)
{
    enum { REGIONS_LOOKED_AT = 128 };
    struct part *part = data;
    uint64_t page, pages;
    region_longest_part(part->space, found, &page, &pages);
    if (pages >= part->wanted) {
        part->in = *found;
        part->page = page;
        part->pages = pages;
        return false;
    }
    return ++part->looked < REGIONS_LOOKED_AT;
}

struct region region_drop_front(struct space *space, struct region region, uint64_t pages)
{
    struct region rest = split(space, region, pages);
    page_set(at(space, rest.page), PAGE_OWN, rest.pages);
    region.pages = pages;
    region_publish(space, region);
    return rest;
}

struct region region_keep_front(struct space *space, struct region region, uint64_t pages)
{
    struct region rest = split(space, region, pages);
    page_set(at(space, rest.page), PAGE_OWN, rest.pages);
    region.pages = pages;
    region_publish(space, rest);
    return region;
}

struct region region_take_out(struct space *space, struct region region, uint64_t page, uint64_t pages)
{
    struct region run = region;
    vpmm_assert(page >= region.page && pages > 0 && page + pages <= region.page + region.pages);
    if (page > region.page)
        run = region_drop_front(space, region, page - region.page);
    if (run.pages > pages)
        region_keep_front(space, run, pages);
    return (struct region){page, pages, FENCE_PASSED, false};
}

bool region_take_part(struct space *space, struct stream *stream, uint64_t pages, struct region *region)
{
    enum { TRIES = 4 };
    if (!load_relaxed_u32(&space->mixed))
        return false;
    for (int i = 0; i < TRIES; i++) {
        struct part part = {.space = space, .wanted = pages};
        for (uint32_t slot = 1, n = load_acquire_u32(&space->streams->slots); slot < n && !part.pages; slot++)
            if (stream_at(space->streams, slot) != stream)
                hints_each(&stream_at(space->streams, slot)->free[space->level], &space->pages, PAGE_FREE, look_inside,
                           &part);
        if (!part.pages)
            return false;
        if (region_claim(space, &part.in, region)) {
            *region = region_take_out(space, *region, part.page, part.pages);
            return true;
        }
    }
    return false;
}

/* The best fit among what other streams have freed, and can be waited for. */
static bool take_freed_elsewhere(struct space *space, const struct stream *stream, uint64_t pages, bool every_bin,
                                 struct region *region)
{
    struct want want = {pages, 1};
    for (;;) { /* lock-free, as region_take */
        struct seen_region best = {0}, found;
        for (uint32_t slot = 1, n = load_acquire_u32(&space->streams->slots); slot < n; slot++) {
            struct stream *other = stream_at(space->streams, slot);
            if (other != stream &&
                hints_best(&other->free[space->level], &space->pages, PAGE_FREE, want, every_bin, &found) &&
                (!best.pages || found.pages < best.pages) &&
                fence_waitable(space->streams, page_fence(at(space, found.page))))
                best = found;
        }
        if (!best.pages)
            return false;
        if (region_claim(space, &best, region))
            return true;
    }
}

/* What cannot be waited for is put back. What is not needed is free, behind its own fence, before the wait. */
enum region_source region_take_waiting(struct space *space, struct stream *stream, uint64_t pages, bool every_bin,
                                       struct region *region)
{
    if (!take_freed_elsewhere(space, stream, pages, every_bin, region))
        return REGION_NONE;
    if (region->pages > pages)
        *region = region_keep_front(space, *region, pages);
    bool passed = fence_passed(space->streams, region->fence);
    vpmm_status status = load_relaxed_u32(space->reuse) == VPMM_REUSE_WAIT_HOST
                             ? stream_wait_host(space->streams, region->fence)
                             : stream_wait(space->streams, stream, region->fence);
    if (status != VPMM_SUCCESS) {
        region_publish(space, *region);
        return REGION_NONE;
    }
    return passed ? REGION_COMPLETED : REGION_WAITED;
}

/* ---- handing out and taking back ---- */

CUdeviceptr region_hand_out(struct space *space, struct region region, uint64_t pages, uint64_t requested)
{
    struct page *first = at(space, region.page);
    struct region rest = {0};
    vpmm_assert(is_owned(space, region.page) && pages > 0 && pages <= region.pages);
    if (region.pages > pages) {
        rest = split(space, region, pages);
        page_set(at(space, rest.page), PAGE_OWN, rest.pages);
    }
    store_relaxed_u64(&first->requested, requested);
    stats_begin_live(space->stats, space->live_stat, pages << space->pages.page_shift, requested);
    page_set(first, PAGE_LIVE, pages); /* release: pairs with the acquire in region_take_back */
    if (rest.pages)
        region_publish(space, rest);
    return page_address(&space->pages, region.page);
}

vpmm_status region_not_live(CUdeviceptr address)
{
    return fail(VPMM_ERROR_INVALID_POINTER,
                "0x%llx is not the start of a live allocation of this pool: it was freed before, or lies inside one",
                (unsigned long long)address);
}

vpmm_status region_take_back(struct space *space, CUdeviceptr address, struct region *region)
{
    uint64_t page;
    if (!page_of_address(&space->pages, address, &page))
        return fail(VPMM_ERROR_INVALID_POINTER, "0x%llx is not the start of an allocation of this pool",
                    (unsigned long long)address);
    struct page *first = at(space, page);
    uint64_t word = load_acquire_u64(&first->word);
    if (word_state(word) != PAGE_LIVE || !page_take(first, word))
        return region_not_live(address);
    *region = (struct region){page, word_pages(word), FENCE_PASSED, false};
    vpmm_assert(is_owned(space, page) && region->pages > 0);
    stats_end_live(space->stats, space->live_stat, region->pages << space->pages.page_shift,
                   load_relaxed_u64(&first->requested));
    return VPMM_SUCCESS;
}

static bool pass_one(const struct seen_region *found, void *data)
{
    struct space *space = data;
    struct region region;
    if (fence_passed(space->streams, page_fence(at(space, found->page))) && region_claim(space, found, &region))
        region_publish(space, region);
    return true;
}

void region_pass(struct space *space, struct stream *stream)
{
    hints_each(&stream->free[space->level], &space->pages, PAGE_FREE, pass_one, space);
}
