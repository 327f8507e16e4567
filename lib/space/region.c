#include "space/region.h"

#include "base/assert.h"

static struct unit *at(const struct space *space, uint64_t unit)
{
    return unit_at(&space->units, unit);
}

/* For assertions: the region is in the hands of one thread, which is the caller. */
static bool is_owned(const struct space *space, uint64_t unit)
{
    return word_state(peek_u64(&at(space, unit)->word)) == UNIT_OWN;
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

static void write_span(struct space *space, uint64_t unit, uint64_t units, struct fence fence)
{
    struct unit *first = at(space, unit);
    store_relaxed_u32(&first->span_units, (uint32_t)units);
    store_relaxed_u32(&first->span_stream, fence.stream);
    store_relaxed_u64(&first->span_number, fence.number);
}

static uint64_t span_units(const struct space *space, uint64_t unit)
{
    return load_relaxed_u32(&at(space, unit)->span_units);
}

static struct fence span_fence(const struct space *space, uint64_t unit)
{
    const struct unit *first = at(space, unit);
    return (struct fence){load_relaxed_u32(&first->span_stream), load_relaxed_u64(&first->span_number)};
}

static void ensure_spans(struct space *space, struct region region)
{
    if (!region.has_spans)
        write_span(space, region.first, region.units, region.fence);
}

/* For assertions: the spans follow each other from the region's first unit to its end. */
static bool spans_fill(const struct space *space, struct region region)
{
    uint64_t unit = region.first, end = region.first + region.units;
    while (unit < end && span_units(space, unit))
        unit += span_units(space, unit);
    return unit == end;
}

/* The latest of a region's spans, which are all of one stream or passed. */
static struct fence latest_fence(const struct space *space, uint64_t unit, uint64_t end)
{
    struct fence latest = FENCE_PASSED;
    for (; unit < end; unit += span_units(space, unit)) {
        struct fence fence = settled(space, span_fence(space, unit));
        latest = fence.number > latest.number ? fence : latest;
    }
    return latest;
}

/* Splits an owned region in two at `units`; the span that lies across becomes two. */
static struct region split(struct space *space, struct region region, uint64_t units)
{
    vpmm_assert(is_owned(space, region.first) && units > 0 && units < region.units);
    struct region rest = {region.first + units, region.units - units, region.fence, region.has_spans};
    stats_count(space->stats, STAT_splits);
    if (!region.has_spans)
        return rest;
    uint64_t span = region.first;
    while (span + span_units(space, span) <= rest.first)
        span += span_units(space, span);
    uint64_t end = span + span_units(space, span);
    if (span < rest.first) {
        struct fence fence = span_fence(space, span);
        write_span(space, rest.first, end - rest.first, fence);
        write_span(space, span, rest.first - span, fence);
    }
    rest.fence = latest_fence(space, rest.first, rest.first + rest.units);
    return rest;
}

/* ---- neighbours ---- */

/* The FREE region that ends before this unit, if its hint on its last unit still holds. */
static bool left_of(const struct space *space, uint64_t unit, struct seen_region *left)
{
    uint64_t index = unit_index(&space->units, unit);
    if (!index)
        return false;
    uint64_t length = load_sc_u32(&at(space, unit - 1)->back);
    if (!length || length > index)
        return false;
    left->first = unit - length;
    left->word = load_sc_u64(&at(space, left->first)->word);
    left->units = length;
    return word_state(left->word) == UNIT_FREE && word_units(left->word) == length;
}

static bool right_of(const struct space *space, uint64_t unit, uint64_t units, struct seen_region *right)
{
    if (units == units_to_chunk_end(&space->units, unit))
        return false;
    right->first = unit + units;
    right->word = load_sc_u64(&at(space, right->first)->word);
    right->units = word_units(right->word);
    return word_state(right->word) == UNIT_FREE;
}

/* Of subpages: how many whole pages a region that becomes FREE, or no longer is, gives back or takes. */
static uint64_t whole_pages(const struct space *space, uint64_t unit, uint64_t units)
{
    uint64_t a_page = space->page_subpages;
    if (units < a_page || !a_page)
        return 0;
    uint64_t first = (unit + a_page - 1) / a_page, end = (unit + units) / a_page;
    return end > first ? end - first : 0;
}

static void count_whole(struct space *space, uint64_t whole)
{
    if (whole)
        fetch_add_relaxed_u64(&space->whole, whole);
}

bool region_claim(struct space *space, const struct seen_region *found, struct region *region)
{
    struct unit *first = at(space, found->first);
    struct fence fence = unit_fence(first);
    if (!unit_take(first, found->word))
        return false;
    vpmm_assert(word_state(found->word) == UNIT_FREE && word_units(found->word) == found->units);
    hints_remove(first);
    count_whole(space, 0 - whole_pages(space, found->first, found->units));
    *region = (struct region){found->first, found->units, fence, true};
    return true;
}

static bool claim_mergeable(struct space *space, const struct seen_region *neighbour, struct fence fence,
                            struct region *claimed, struct fence *merged)
{
    return may_merge(space, unit_fence(at(space, neighbour->first)), fence, merged) &&
           region_claim(space, neighbour, claimed);
}

/*
 * Whether spans of it may pass on their own: of different streams, or of one that only its own calls mark. What these
 * have marked passes, and what lies beside it without a mark, as from a front cache, waits for the next such call.
 */
static void note_mixture(struct space *space, struct fence a, struct fence b)
{
    bool one_stream = a.stream == b.stream &&
                      (!a.stream || a.number == b.number || !stream_is_private(stream_at(space->streams, a.stream)));
    if (!one_stream && !load_relaxed_u32(&space->mixed))
        store_relaxed_u32(&space->mixed, 1);
}

/* Both are in the caller's hands, `left` ends where `right` begins: they become one. */
static struct region unite(struct space *space, struct region left, struct region right, struct fence fence)
{
    vpmm_assert(is_owned(space, left.first) && is_owned(space, right.first) && left.first + left.units == right.first);
    note_mixture(space, left.fence, right.fence);
    ensure_spans(space, left);
    ensure_spans(space, right);
    unit_set(at(space, right.first), UNIT_NONE, 0);
    return (struct region){left.first, left.units + right.units, fence, true};
}

/* Takes mergeable neighbours in until there are none. Lock-free: each failed claim is another thread's progress. */
static struct region grow(struct space *space, struct region region)
{
    struct seen_region neighbour;
    struct region claimed;
    struct fence merged;
    while (left_of(space, region.first, &neighbour) &&
           claim_mergeable(space, &neighbour, region.fence, &claimed, &merged))
        region = unite(space, claimed, region, merged);
    while (right_of(space, region.first, region.units, &neighbour) &&
           claim_mergeable(space, &neighbour, region.fence, &claimed, &merged))
        region = unite(space, region, claimed, merged);
    return region;
}

/* The word that makes it FREE. The hint is entered first: a FREE region is always hinted. */
static struct seen_region set_free(struct space *space, struct region region)
{
    struct unit *first = at(space, region.first);
    vpmm_assert(is_owned(space, region.first) && region.units <= units_to_chunk_end(&space->units, region.first));
    region.has_spans = region.has_spans && region.fence.stream;
    ensure_spans(space, region);
    vpmm_assert_walk(spans_fill(space, region));
    unit_set_fence(first, region.fence);
    store_sc_u32(&at(space, region.first + region.units - 1)->back, (uint32_t)region.units);
    hints_enter(shard_of(space, region.fence), &space->hint_arena, first, region.first, region.units);
    count_whole(space, whole_pages(space, region.first, region.units));
    uint64_t word = unit_set(first, UNIT_FREE, region.units);
    return (struct seen_region){region.first, region.units, word};
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
    if (left_of(space, self.first, &neighbour) && claim_mergeable(space, &neighbour, fence, &claimed, &merged)) {
        *region = region_claim(space, &self, &own) ? unite(space, claimed, own, merged) : claimed;
        return true;
    }
    if (right_of(space, self.first, self.units, &neighbour) &&
        may_merge(space, unit_fence(at(space, neighbour.first)), fence, &merged) && region_claim(space, &self, &own)) {
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
    vpmm_assert(region.units > 0 && is_owned(space, region.first));
    fence_count_bytes(space->streams, region.fence, region.units << space->units.unit_shift);
    do {
        region.fence = settled(space, region.fence);
        region = grow(space, region);
        struct seen_region self = set_free(space, region);
        if (!take_again(space, self, &region) && !passed_meanwhile(space, self, &region))
            break;
    } while (true);
    fetch_add_sc_u64(&space->publications, 1);
    await_published(&space->await, region.units, region.fence);
    bell_ring(space->bell);
}

void region_publish_part(struct space *space, struct region whole, uint64_t from, uint64_t to)
{
    if (from == to)
        return;
    stats_count(space->stats, STAT_splits);
    unit_set(at(space, from), UNIT_OWN, to - from);
    region_publish(space, (struct region){from, to - from, whole.fence, false});
}

/* ---- finding ---- */

/*
 * Where a hint was found says nothing about the fence: between the look at the hint and the look at the word, the
 * region may have been taken, used and freed elsewhere. The fence is read after the word; if the claim by that word
 * succeeds, it was the fence of that word.
 */
bool region_is_usable(const struct space *space, const struct stream *stream, uint64_t unit)
{
    return fence_usable(space->streams, unit_fence(at(space, unit)), stream);
}

enum region_source region_take(struct space *space, struct stream *stream, struct want want, bool every_bin,
                               struct region *region)
{
    for (;;) { /* lock-free: a failed claim means that another thread took, merged or moved the region */
        struct seen_region own, passed;
        bool has_own = hints_best(&stream->free[space->level], &space->units, UNIT_FREE, want, every_bin, &own);
        bool has_passed = hints_best(&space->passed, &space->units, UNIT_FREE, want, every_bin, &passed);
        if (!has_own && !has_passed)
            return REGION_NONE;
        bool take_own = has_own && (!has_passed || own.units <= passed.units);
        const struct seen_region *found = take_own ? &own : &passed;
        if (region_is_usable(space, stream, found->first) && region_claim(space, found, region))
            return take_own ? REGION_OWN_STREAM : REGION_COMPLETED;
    }
}

struct join {
    struct space *space;
    const struct stream *stream;
    uint64_t wanted;
    uint64_t first, units; /* of the run found, from its first region on; units 0: none yet */
    unsigned looked;       /* regions that were not part of a long enough run */
};

/* The run of usable free regions around one of them, as far as it need be. */
static bool look_around(const struct seen_region *found, void *data)
{
    enum { REGIONS_LOOKED_AT = 128 }; /* a malloc that finds nothing here builds, and a build sees all runs */
    struct join *join = data;
    struct seen_region next;
    uint64_t unit = found->first, units = found->units;
    while (units < join->wanted && left_of(join->space, unit, &next) &&
           region_is_usable(join->space, join->stream, next.first)) {
        unit = next.first;
        units += next.units;
    }
    while (units < join->wanted && right_of(join->space, unit, units, &next) &&
           region_is_usable(join->space, join->stream, next.first))
        units += next.units;
    if (units >= join->wanted) {
        join->first = unit;
        join->units = units;
    }
    return !join->units && ++join->looked < REGIONS_LOOKED_AT;
}

/* Own fences are of one stream, and a passed one counts less than any of them. */
struct region region_unite(struct space *space, struct region left, struct region right)
{
    struct fence a = settled(space, left.fence), b = settled(space, right.fence);
    return unite(space, left, right, a.number > b.number ? a : b);
}

/* Claims regions from `unit` on until `wanted` units are together; false: something changed, nothing is kept. */
static bool claim_run(struct space *space, const struct stream *stream, uint64_t unit, uint64_t wanted,
                      struct region *region)
{
    struct seen_region next = {.first = unit, .word = load_sc_u64(&at(space, unit)->word)};
    struct region claimed;
    next.units = word_units(next.word);
    if (word_state(next.word) != UNIT_FREE || !region_is_usable(space, stream, unit) ||
        !region_claim(space, &next, region))
        return false;
    while (region->units < wanted) {
        if (!right_of(space, region->first, region->units, &next) || !region_is_usable(space, stream, next.first) ||
            !region_claim(space, &next, &claimed)) {
            /* As one region: its spans keep the fences that they had. */
            region_publish(space, *region);
            return false;
        }
        *region = region_unite(space, *region, claimed);
    }
    return true;
}

enum region_source region_join(struct space *space, struct stream *stream, uint64_t units, struct region *region)
{
    enum { TRIES = 4 };
    for (int i = 0; i < TRIES; i++) {
        struct join join = {.space = space, .stream = stream, .wanted = units};
        hints_each(&stream->free[space->level], &space->units, UNIT_FREE, look_around, &join);
        if (!join.units)
            return REGION_NONE;
        if (claim_run(space, stream, join.first, units, region))
            return REGION_OWN_STREAM;
    }
    return REGION_NONE;
}

struct part {
    struct space *space;
    uint64_t wanted;
    struct seen_region in; /* the region */
    uint64_t first, units; /* the run in it; units 0: none found */
    unsigned looked;
};

/* The spans may be changing: lengths are held against the region's, and the claim by its word decides. */
void region_longest_part(const struct space *space, const struct seen_region *found, uint64_t *unit, uint64_t *units)
{
    uint64_t end = found->first + found->units, run = found->first, length;
    *units = 0;
    for (uint64_t span = run; span < end; span += length) {
        length = span_units(space, span);
        if (!length || span + length > end)
            break;
        if (!fence_passed(space->streams, span_fence(space, span))) {
            run = span + length;
        } else if (span + length - run > *units) {
            *unit = run;
            *units = span + length - run;
        }
    }
}

static bool look_inside(const struct seen_region *found, void *data)
{
    enum { REGIONS_LOOKED_AT = 128 };
    struct part *part = data;
    uint64_t unit, units;
    region_longest_part(part->space, found, &unit, &units);
    if (units >= part->wanted) {
        part->in = *found;
        part->first = unit;
        part->units = units;
        return false;
    }
    return ++part->looked < REGIONS_LOOKED_AT;
}

/* Of what lies before a split: of its own spans. */
static struct region front_of(const struct space *space, struct region region, uint64_t units)
{
    region.units = units;
    if (region.has_spans)
        region.fence = latest_fence(space, region.first, region.first + units);
    return region;
}

struct region region_drop_front(struct space *space, struct region region, uint64_t units)
{
    struct region rest = split(space, region, units);
    unit_set(at(space, rest.first), UNIT_OWN, rest.units);
    region_publish(space, front_of(space, region, units));
    return rest;
}

struct region region_keep_front(struct space *space, struct region region, uint64_t units)
{
    struct region rest = split(space, region, units);
    unit_set(at(space, rest.first), UNIT_OWN, rest.units);
    region = front_of(space, region, units);
    region_publish(space, rest);
    return region;
}

struct region region_take_out(struct space *space, struct region region, uint64_t unit, uint64_t units)
{
    struct region run = region;
    vpmm_assert(unit >= region.first && units > 0 && unit + units <= region.first + region.units);
    if (unit > region.first)
        run = region_drop_front(space, region, unit - region.first);
    if (run.units > units)
        region_keep_front(space, run, units);
    return (struct region){unit, units, FENCE_PASSED, false};
}

bool region_take_part(struct space *space, struct stream *stream, uint64_t units, struct region *region)
{
    enum { TRIES = 4 };
    if (!load_relaxed_u32(&space->mixed))
        return false;
    for (int i = 0; i < TRIES; i++) {
        struct part part = {.space = space, .wanted = units};
        for (uint32_t slot = 1, n = load_acquire_u32(&space->streams->slots); slot < n && !part.units; slot++)
            if (stream_at(space->streams, slot) != stream)
                hints_each_from(&stream_at(space->streams, slot)->free[space->level], &space->units, UNIT_FREE, units,
                                look_inside, &part);
        if (!part.units)
            return false;
        if (region_claim(space, &part.in, region)) {
            *region = region_take_out(space, *region, part.first, part.units);
            return true;
        }
    }
    return false;
}

/* A search for the best fit that can be waited for, as `waitable` says. best.units 0: none so far. */
struct waited {
    const struct space *space;
    struct want want;
    bool (*waitable)(const struct streams *, struct fence);
    struct seen_region best;
    bool every_bin;
    unsigned looked; /* at regions one by one, of all streams */
};

static bool look_whether_waitable(const struct seen_region *found, void *data)
{
    enum { REGIONS_LOOKED_AT = 128 };
    struct waited *waited = data;
    const struct space *space = waited->space;
    uint64_t needed = want_place(waited->want, found->first) - found->first + waited->want.units;
    if (needed <= found->units && (!waited->best.units || found->units < waited->best.units) &&
        waited->waitable(space->streams, unit_fence(unit_at(&space->units, found->first))))
        waited->best = *found;
    return waited->every_bin || ++waited->looked < REGIONS_LOOKED_AT;
}

/* Of a stream whose end nobody else may record, what was freed last cannot be waited for, and the rest can. */
static void look_at_freed(struct waited *waited, const struct stream *stream)
{
    const struct space *space = waited->space;
    const struct hints *free = &stream->free[space->level];
    struct seen_region found;
    if (!hints_best(free, &space->units, UNIT_FREE, waited->want, waited->every_bin, &found) ||
        (waited->best.units && found.units >= waited->best.units))
        return;
    if (waited->waitable(space->streams, unit_fence(unit_at(&space->units, found.first)))) {
        waited->best = found;
        return;
    }
    if (waited->every_bin)
        hints_each(free, &space->units, UNIT_FREE, look_whether_waitable, waited);
    else
        hints_each_from(free, &space->units, UNIT_FREE, waited->want.units, look_whether_waitable, waited);
}

/* The best fit among what other streams have freed, and can be waited for. units 0: none. */
static struct seen_region find_freed_elsewhere(const struct space *space, const struct stream *stream, struct want want,
                                               bool every_bin, bool (*waitable)(const struct streams *, struct fence))
{
    struct waited waited = {.space = space, .want = want, .waitable = waitable, .every_bin = every_bin};
    for (uint32_t slot = 1, n = load_acquire_u32(&space->streams->slots); slot < n; slot++) {
        const struct stream *other = stream_at(space->streams, slot);
        if (other != stream)
            look_at_freed(&waited, other);
    }
    return waited.best;
}

bool region_may_wait(const struct space *space, const struct stream *stream, uint64_t units)
{
    return find_freed_elsewhere(space, stream, (struct want){units, 1}, false, fence_seems_waitable).units > 0;
}

bool region_take_freed_elsewhere(struct space *space, const struct stream *stream, struct want want, bool every_bin,
                                 bool (*waitable)(const struct streams *, struct fence), struct region *region)
{
    struct seen_region best;
    do { /* lock-free, as region_take */
        best = find_freed_elsewhere(space, stream, want, every_bin, waitable);
        if (!best.units)
            return false;
    } while (!region_claim(space, &best, region));
    uint64_t needed = want_place(want, region->first) - region->first + want.units;
    if (region->units > needed)
        *region = region_keep_front(space, *region, needed);
    return true;
}

enum region_source region_await(struct space *space, struct stream *stream, struct region region)
{
    bool passed = fence_passed(space->streams, region.fence);
    vpmm_status status = load_relaxed_u32(space->reuse) == VPMM_REUSE_WAIT_HOST
                             ? stream_wait_host(space->streams, region.fence)
                             : stream_wait(space->streams, stream, region.fence);
    if (status != VPMM_SUCCESS) {
        region_publish(space, region);
        return REGION_NONE;
    }
    return passed ? REGION_COMPLETED : REGION_WAITED;
}

/* ---- handing out and taking back ---- */

CUdeviceptr region_hand_out(struct space *space, struct region region, uint64_t units, uint64_t requested)
{
    struct unit *first = at(space, region.first);
    struct region rest = {0};
    vpmm_assert(is_owned(space, region.first) && units > 0 && units <= region.units);
    if (region.units > units) {
        rest = split(space, region, units);
        unit_set(at(space, rest.first), UNIT_OWN, rest.units);
    }
    store_relaxed_u64(&first->requested, requested);
    stats_begin_live(space->stats, space->live_stat, units << space->units.unit_shift, requested);
    unit_set(first, UNIT_LIVE, units); /* release: pairs with the acquire in region_take_back */
    if (rest.units)
        region_publish(space, rest);
    return unit_address(&space->units, region.first);
}

vpmm_status region_not_live(CUdeviceptr address)
{
    return fail(VPMM_ERROR_INVALID_POINTER,
                "0x%llx is not the start of a live allocation of this pool: it was freed before, lies inside one, or "
                "is not the "
                "pool's",
                (unsigned long long)address);
}

vpmm_status region_take_back(struct space *space, CUdeviceptr address, struct region *region, struct uses **uses)
{
    uint64_t unit;
    if (!unit_of_address(&space->units, address, &unit))
        return fail(VPMM_ERROR_INVALID_POINTER, "0x%llx is not the start of an allocation of this pool",
                    (unsigned long long)address);
    struct unit *first = at(space, unit);
    uint64_t word = load_acquire_u64(&first->word);
    bool is_used = word_state(word) == UNIT_USED;
    if ((word_state(word) != UNIT_LIVE && !is_used) || !unit_take(first, word))
        return region_not_live(address);
    *uses = is_used ? unit_uses(first) : NULL;
    *region = (struct region){unit, word_units(word), FENCE_PASSED, false};
    vpmm_assert(is_owned(space, unit) && region->units > 0);
    stats_end_live(space->stats, space->live_stat, region->units << space->units.unit_shift,
                   load_relaxed_u64(&first->requested));
    return VPMM_SUCCESS;
}

static bool pass_one(const struct seen_region *found, void *data)
{
    struct space *space = data;
    struct region region;
    if (fence_passed(space->streams, unit_fence(at(space, found->first))) && region_claim(space, found, &region))
        region_publish(space, region);
    return true;
}

void region_pass(struct space *space, struct stream *stream)
{
    hints_each(&stream->free[space->level], &space->units, UNIT_FREE, pass_one, space);
}
