#include "remap/access.h"

#include "base/assert.h"
#include "base/lock.h"
#include "driver/burst.h"
#include "remap/extents.h"
#include "remap/mapping.h"

#include <stdio.h>

/* ---- the list ---- */

static CUmemAccessDesc rights_of(int ordinal, CUmemAccess_flags flags)
{
    return (CUmemAccessDesc){.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = ordinal}, .flags = flags};
}

void access_init(struct access *access, int ordinal)
{
    pthread_mutex_init(&access->lock, NULL);
    wakeup_init(&access->let_go);
    access->list = (struct access_list){.devices = 1};
    access->list.device[0] = rights_of(ordinal, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
}

void access_destroy(struct access *access)
{
    pthread_mutex_destroy(&access->lock);
}

struct access_list access_read(struct access *access)
{
    lock_take(&access->lock);
    struct access_list list = access->list;
    pthread_mutex_unlock(&access->lock);
    return list;
}

bool access_may_place(struct access *access, uint32_t version)
{
    lock_take(&access->lock);
    if (access->list.version == version)
        return true;
    pthread_mutex_unlock(&access->lock);
    return false;
}

void access_placed(struct access *access)
{
    pthread_mutex_unlock(&access->lock);
}

void access_hold(struct access *access)
{
    lock_take(&access->lock);
    access->holders++;
    pthread_mutex_unlock(&access->lock);
}

void access_let_go(struct access *access)
{
    lock_take(&access->lock);
    vpmm_assert(access->holders);
    bool is_last = !--access->holders;
    pthread_mutex_unlock(&access->lock);
    if (is_last)
        wakeup_signal(&access->let_go);
}

/* Takes the lock once nobody holds the list. */
static void await_holders(struct access *access)
{
    lock_take(&access->lock);
    while (access->holders) {
        uint32_t seen = wakeup_read(&access->let_go);
        pthread_mutex_unlock(&access->lock);
        wakeup_wait(&access->let_go, seen, 0);
        lock_take(&access->lock);
    }
}

static uint32_t place_in(const struct access_list *list, int ordinal)
{
    uint32_t i = 1;
    while (i < list->devices && list->device[i].location.id != ordinal)
        i++;
    return i;
}

static CUmemAccess_flags flags_in(const struct access_list *list, int ordinal)
{
    uint32_t i = place_in(list, ordinal);
    return i < list->devices ? list->device[i].flags : CU_MEM_ACCESS_FLAGS_PROT_NONE;
}

void access_taken(const struct access_list *given, const struct access_list *now, struct access_list *taken)
{
    taken->devices = 0;
    for (uint32_t i = 1; i < given->devices; i++)
        if (flags_in(now, given->device[i].location.id) == CU_MEM_ACCESS_FLAGS_PROT_NONE)
            taken->device[taken->devices++] = rights_of(given->device[i].location.id, CU_MEM_ACCESS_FLAGS_PROT_NONE);
}

/* A device without rights is not in it. False: it is full. */
static bool set_in(struct access_list *list, int ordinal, CUmemAccess_flags flags)
{
    uint32_t i = place_in(list, ordinal);
    bool is_new = i == list->devices;
    if (is_new && i == ACCESS_DEVICES)
        return flags == CU_MEM_ACCESS_FLAGS_PROT_NONE;
    list->device[i] = rights_of(ordinal, flags);
    list->devices += is_new;
    if (flags == CU_MEM_ACCESS_FLAGS_PROT_NONE)
        list->device[i] = list->device[--list->devices];
    return true;
}

/* ---- a change ---- */

struct change {
    struct access_list rights; /* of the one device */
    struct turn_place place;
    struct burst burst; /* while it goes on the change has the turn */
};

/* This pool's builders are let in with those of other pools. */
static void end_turn(struct arena *arena, struct change *change)
{
    burst_pause(&change->burst);
    turn_leave(&arena->turn, &change->place);
}

/* A parked extent is given the list's rights when it wakes. */
static bool give_rights(struct arena *arena, struct extent *extent, uint64_t page, void *data)
{
    struct change *change = data;
    if (extent->memory != EXTENT_MAPPED)
        return true;
    if (!change->burst.end_ns) {
        turn_take(&arena->turn, &change->place);
        burst_begin(&change->burst);
    }
    bool given = mapping_allow(arena, page, extent->pages, &change->rights) == CUDA_SUCCESS;
    if (burst_is_over(&change->burst))
        end_turn(arena, change);
    return given;
}

/* Under the pass lock. False: the driver refuses it for some extent; `ends`: and later ones have not been tried. */
static bool set(struct arena *arena, int ordinal, CUmemAccess_flags flags, bool ends)
{
    struct change change = {.rights = {.devices = 1, .device = {rights_of(ordinal, flags)}}};
    await_holders(&arena->access);
    bool has_room = set_in(&arena->access.list, ordinal, flags);
    arena->access.list.version++;
    pthread_mutex_unlock(&arena->access.lock);
    vpmm_assert(has_room);
    bool given = extents_visit(arena, ends, give_rights, &change);
    if (change.burst.end_ns)
        end_turn(arena, &change);
    burst_end(&change.burst);
    return given;
}

static vpmm_status set_back(struct arena *arena, int ordinal, CUmemAccess_flags before)
{
    char words[256];
    vpmm_status status = device_failed(arena->device, "giving a device access to the pool's memory");
    snprintf(words, sizeof words, "%s", vpmm_last_error());
    if (!set(arena, ordinal, before, false))
        arena->access.in_doubt = true;
    return fail(status, "%s", words);
}

vpmm_status access_set(struct arena *arena, int ordinal, CUmemAccess_flags flags)
{
    vpmm_status status = VPMM_SUCCESS;
    lock_take(&arena->pass_lock);
    struct access_list before = access_read(&arena->access), after = before;
    if (!set_in(&after, ordinal, flags))
        status = fail(VPMM_ERROR_NOT_SUPPORTED, "%d devices have access to the pool's memory, and no more can",
                      ACCESS_DEVICES);
    else if ((flags_in(&before, ordinal) != flags || arena->access.in_doubt) && !set(arena, ordinal, flags, true))
        status = set_back(arena, ordinal, flags_in(&before, ordinal));
    pthread_mutex_unlock(&arena->pass_lock);
    return status;
}
