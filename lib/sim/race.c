/*
 * race.c - who knows what, and accesses that nothing orders.
 *
 * An access is (lane, number). It is ordered before an operation of the same lane, and before whoever's clock has
 * t[lane] >= number. Clocks grow along the edges that CUDA promises, and no other:
 *
 *   host -> operation       what the host knew when it queued it
 *   record -> wait          cuEventRecord .. cuStreamWaitEvent; a stream-ordered free .. the allocation that reuses it
 *   lane -> host            a query that said CUDA_SUCCESS, a wait that returned
 *   lane -> lane            the legacy stream and the blocking ones
 *
 * Clocks are shared and copied when written, so an operation, which takes the host's along, costs a pointer.
 *
 * Each physical page lists the uses that still matter, by bytes, because one page may hold several small allocations.
 * A use leaves the list when a later one that is ordered after it covers it: who races with the old one races with the
 * new one as well. Uses through different mappings stay apart, for an unmap asks only about its own mapping: the old
 * address of memory that moved may go while the new one is in use.
 */
#include "internal.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- clocks ---- */

struct sim_clock *sim_clock_hold(struct sim_clock *clock)
{
    if (clock)
        clock->references++;
    return clock;
}

void sim_clock_drop(struct sim_clock *clock)
{
    if (clock && --clock->references == 0)
        free(clock);
}

bool sim_clock_knows(const struct sim_clock *clock, uint32_t lane, uint64_t number)
{
    return number == 0 || (clock && lane < clock->count && clock->t[lane] >= number);
}

/* *into alone, with room for count lanes. Without host memory it stays as it is, and knows too little, never more. */
static bool make_own(struct sim_clock **into, uint32_t count)
{
    struct sim_clock *old = *into;
    if (old && old->count > count)
        count = old->count;
    if (old && old->references == 1 && old->count == count)
        return true;
    struct sim_clock *own = calloc(1, sizeof *own + count * sizeof *own->t);
    if (!own)
        return false;
    own->references = 1;
    own->count = count;
    if (old)
        memcpy(own->t, old->t, old->count * sizeof *own->t);
    sim_clock_drop(old);
    *into = own;
    return true;
}

void sim_clock_learn(struct sim_clock **into, uint32_t lane, uint64_t number)
{
    enum { ROOM = 8 }; /* lanes come one by one; do not copy for each */
    if (!sim_clock_knows(*into, lane, number) && make_own(into, (lane / ROOM + 1) * ROOM))
        (*into)->t[lane] = number;
}

void sim_clock_join(struct sim_clock **into, struct sim_clock *other)
{
    if (!other || *into == other)
        return;
    if (!*into) {
        *into = sim_clock_hold(other);
        return;
    }
    for (uint32_t lane = 0; lane < other->count; lane++)
        if (!sim_clock_knows(*into, lane, other->t[lane]) && make_own(into, other->count))
            (*into)->t[lane] = other->t[lane];
}

/* ---- sites ---- */

struct sim_site *sim_site_new(CUstream stream, CUdeviceptr address, size_t bytes)
{
    const struct sim_frame *frame = sim_frame();
    struct sim_site *site = calloc(1, sizeof *site);
    if (site)
        *site = (struct sim_site){.references = 1,
                                  .entry = frame->entry,
                                  .caller = frame->caller,
                                  .stream = stream,
                                  .address = address,
                                  .bytes = bytes};
    return site;
}

static void sim_site_hold(struct sim_site *site)
{
    site->references++;
}

void sim_site_drop(struct sim_site *site)
{
    if (site && --site->references == 0)
        free(site);
}

static void print_site(const struct sim_site *site, const char *lead)
{
    Dl_info info;
    fprintf(stderr, "    %s %s, %zu bytes at 0x%llx, ", lead, sim_entry_name(site->entry), site->bytes,
            (unsigned long long)site->address);
    if (site->number)
        fprintf(stderr, "stream %p (operation %llu of lane %u)", (void *)site->stream, (unsigned long long)site->number,
                site->lane);
    else
        fprintf(stderr, "the host");
    if (!dladdr(site->caller, &info) || !info.dli_fname)
        fprintf(stderr, ", called from %p\n", site->caller);
    else
        fprintf(stderr, ", called from %s (%s+0x%zx)\n", info.dli_sname ? info.dli_sname : "?", info.dli_fname,
                (size_t)((const char *)site->caller - (const char *)info.dli_fbase));
}

/* One report for each pair of sites in a row, however many pages they share. */
static void report(vpmm_sim *sim, struct sim_site *old, struct sim_site *new_site, const char *what)
{
    enum { PRINTED_AT_MOST = 20 };
    if (new_site->reported == old)
        return;
    new_site->reported = old;
    if (sim->races++ >= PRINTED_AT_MOST)
        return;
    fprintf(stderr, "vpmm sim: race: %s\n", what);
    print_site(old, "first");
    print_site(new_site, "then ");
}

/* ---- pages ---- */

void sim_shadow_clear(struct sim_shadow *page)
{
    for (uint32_t i = 0; i < page->count; i++)
        sim_site_drop(page->uses[i].site);
    page->count = 0;
}

static void drop_use(struct sim_shadow *page, uint32_t at)
{
    sim_site_drop(page->uses[at].site);
    page->uses[at] = page->uses[--page->count];
}

/* The host has seen the use, and did so before it queued anything that is still to run. */
static bool is_over(vpmm_sim *sim, const struct sim_site *use)
{
    bool over = sim_clock_knows(sim->host_clock, use->lane, use->number);
    for (uint32_t i = 0; over && i < sim->lane_count; i++) {
        const struct sim_op *oldest = i == use->lane ? NULL : sim->lanes[i]->head;
        over = !oldest || sim_clock_knows(oldest->clock, use->lane, use->number);
    }
    return over;
}

/* A page with many uses forgets those that nothing can race with any more. */
static void forget_seen(vpmm_sim *sim, struct sim_shadow *page)
{
    for (uint32_t i = page->count; i-- > 0;)
        if (is_over(sim, page->uses[i].site))
            drop_use(page, i);
}

static bool add_use(vpmm_sim *sim, struct sim_shadow *page, struct sim_access use)
{
    enum { MANY = 32 };
    if (page->count == page->capacity && page->count >= MANY)
        forget_seen(sim, page);
    if (page->count == page->capacity) {
        uint32_t capacity = page->capacity ? 2 * page->capacity : 2;
        struct sim_access *uses = realloc(page->uses, capacity * sizeof *uses);
        if (!uses)
            return false;
        page->uses = uses;
        page->capacity = capacity;
    }
    sim_site_hold(use.site);
    page->uses[page->count++] = use;
    return true;
}

static bool same_operation(const struct sim_access *a, const struct sim_access *b)
{
    return a->site == b->site && a->write == b->write && a->mapping == b->mapping;
}

/* The new use makes the old one superfluous, if it comes after it. */
static bool covers(const struct sim_access *use, const struct sim_access *old)
{
    return old->lo >= use->lo && old->hi <= use->hi && (use->write || !old->write) &&
           (old->mapping == 0 || old->mapping == use->mapping);
}

void sim_race_access(vpmm_sim *sim, const struct sim_lane *lane, struct sim_shadow *page, struct sim_access use)
{
    uint32_t mine = UINT32_MAX; /* where this operation's own use stands, if it has one already */
    for (uint32_t i = page->count; i-- > 0;) {
        struct sim_access *old = &page->uses[i];
        if (same_operation(old, &use)) {
            if (old->lo <= use.hi && use.lo <= old->hi) /* rows may lie apart, with others' bytes between them */
                mine = i;
            continue;
        }
        bool overlap = old->lo < use.hi && use.lo < old->hi;
        bool ordered = old->site->lane == lane->id || sim_clock_knows(lane->clock, old->site->lane, old->site->number);
        bool race = overlap && !ordered && (use.write || old->write);
        if (race)
            report(sim, old->site, use.site,
                   use.write ? "a write is not ordered after an earlier use of the same bytes"
                             : "a read is not ordered after an earlier write of the same bytes");
        if ((ordered || race) && covers(&use, old)) {
            drop_use(page, i); /* moves the last one, which has been looked at, to i */
            mine = mine == page->count ? i : mine;
        }
    }
    if (mine == UINT32_MAX) {
        add_use(sim, page, use);
        return;
    }
    struct sim_access *own = &page->uses[mine];
    own->lo = use.lo < own->lo ? use.lo : own->lo;
    own->hi = use.hi > own->hi ? use.hi : own->hi;
}

/* Work that was queued before its memory was there: whoever ran it had no right to rely on it. */
void sim_race_early(vpmm_sim *sim, const struct sim_op *op, const struct sim_mapping *mapping, int device, bool write)
{
    if (mapping->since[device][write] <= op->host_time)
        return;
    struct sim_site host = {.entry = SIM_cuMemSetAccess, .address = mapping->base, .bytes = mapping->size};
    report(sim, op->site, &host, "work was queued before the memory that it uses was mapped");
}

/* What the host takes from a mapping, and from which uses of it. */
struct taking {
    int device;       /* ANY_DEVICE: every one's */
    bool writes_only; /* reads may go on */
    bool forgets;     /* there is no mapping any more */
    const char *words;
};

enum { ANY_DEVICE = -1 };

static bool needs(const vpmm_sim *sim, const struct sim_access *use, const struct taking *taking)
{
    bool is_meant = taking->device == ANY_DEVICE || sim->lanes[use->site->lane]->device == taking->device;
    return is_meant && (use->write || !taking->writes_only);
}

static void take_away(vpmm_sim *sim, const struct sim_mapping *mapping, const struct taking *taking)
{
    if (!sim->config.detect_races)
        return;
    const struct sim_frame *frame = sim_frame();
    const struct sim_handle *handle = mapping->handle;
    struct sim_site host = {
        .entry = frame->entry, .caller = frame->caller, .address = mapping->base, .bytes = mapping->size};
    for (uint32_t p = 0; p < handle->page_count; p++) {
        struct sim_shadow *page = &sim->devices[handle->device].shadow[handle->pages[p]];
        for (uint32_t i = 0; i < page->count; i++) {
            struct sim_access *old = &page->uses[i];
            if (old->mapping != mapping->serial || !needs(sim, old, taking))
                continue;
            if (!sim_clock_knows(sim->host_clock, old->site->lane, old->site->number))
                report(sim, old->site, &host, taking->words);
            if (taking->forgets)
                old->mapping = 0;
        }
    }
}

/* A right that is taken away while work that needs it may still run. */
void sim_race_revoke(vpmm_sim *sim, const struct sim_mapping *mapping, int device, CUmemAccess_flags left)
{
    take_away(sim, mapping,
              &(struct taking){device, left != CU_MEM_ACCESS_FLAGS_PROT_NONE, false,
                               "a right is taken away that is not ordered after its last use"});
}

void sim_race_unmap(vpmm_sim *sim, const struct sim_mapping *mapping)
{
    take_away(sim, mapping,
              &(struct taking){ANY_DEVICE, false, true, "an unmap is not ordered after the last use of the mapping"});
}
