#include "remap/lookout.h"

#include "base/clock.h"
#include "remap/pass.h"

enum region_source lookout_take(const struct lookout *lookout, struct region *region)
{
    struct space *space = &lookout->arena->space;
    struct want want = {lookout->wanted, 1};
    if (!lookout->stream)
        return REGION_NONE;
    enum region_source source = region_take(space, lookout->stream, want, false, region);
    if (source == REGION_NONE && lookout->may_wait &&
        region_take_freed_elsewhere(space, lookout->stream, want, false, fence_seems_waitable, region))
        source = REGION_WAITED;
    return source;
}

static uint64_t idle_pages(const struct arena *arena)
{
    uint64_t mapped = stats_level(arena->stats, STAT_mapped_bytes), live = stats_level(arena->stats, STAT_live_bytes);
    return mapped > live ? (mapped - live) >> arena->space.units.unit_shift : 0;
}

void lookout_begin(struct lookout *lookout, uint64_t made)
{
    lookout->made = lookout->stream ? made : 0;
    if (lookout->made)
        lookout->idle_pages = idle_pages(lookout->arena);
}

/*
 * True: since lookout_begin, or since this was last true, idle memory has grown by half of what the build makes. What
 * others take again meanwhile counts against it. Then it is worth a question to the driver whether what was freed has
 * passed.
 */
static bool much_was_freed(struct lookout *lookout)
{
    uint64_t idle = idle_pages(lookout->arena);
    bool much = idle > lookout->idle_pages && 2 * (idle - lookout->idle_pages) >= lookout->made;
    if (much)
        lookout->idle_pages = idle;
    return much;
}

/* False: there was nothing to ask. */
static bool ask_what_has_passed(struct lookout *lookout)
{
    uint64_t since = clock_now_ns();
    bool any = pass_refresh(lookout->arena, lookout->stream);
    lookout->asked_ns += clock_now_ns() - since;
    return any;
}

/*
 * Takes a region that others have freed since the plan and that serves in place of new memory, if there is one: then
 * the build is given up. A build of 7 GiB takes 3 ms, in which the thread before it may be done with as much. After
 * four passes of llama_four_threads by four threads on an H200 the pool held 1.109 times what was in use (the mean of
 * 24 runs, at most 1.27), and without this, in turn, 1.132 (two were above 1.3, at most 1.44). Sixteen threads hold no
 * less with it.
 *
 * Not more often in turn than AT_MOST, with nothing made in between: where each build is overtaken the pool needs what
 * they make, and each malloc would pay for a build, and for its end, for ever.
 */
bool lookout_sees(struct lookout *lookout)
{
    enum { AT_MOST = 8 };
    struct space *space = &lookout->arena->space;
    uint64_t published = load_sc_u64(&space->publications); /* before the look: see find.c */
    if (lookout->found.units || !lookout->made || published == lookout->published ||
        load_relaxed_u32(&lookout->arena->overtaken) >= AT_MOST)
        return lookout->found.units > 0;
    lookout->published = published;
    lookout->source = lookout_take(lookout, &lookout->found);
    if (lookout->source == REGION_NONE && much_was_freed(lookout) && ask_what_has_passed(lookout))
        lookout->source = lookout_take(lookout, &lookout->found);
    if (lookout->found.units > lookout->wanted) /* others may have the rest while the build unwinds */
        lookout->found = region_keep_front(space, lookout->found, lookout->wanted);
    return lookout->found.units > 0;
}
