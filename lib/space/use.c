#include "space/use.h"

#include "base/clock.h"

#include <stdlib.h>

enum { FIRST_CAPACITY = 3 };

static size_t bytes_for(uint32_t capacity)
{
    return sizeof(struct uses) + (capacity + 1) * sizeof(struct fence);
}

void uses_free(struct streams *streams, struct uses *uses)
{
    for (uint32_t i = 0; uses && i < uses->count; i++)
        if (!uses->stream[i].number)
            stream_end_use(stream_at(streams, uses->stream[i].stream));
    free(uses);
}

/* The use with this stream's slot; NULL: there is none. If it has a number it may be of who had the record before. */
static struct fence *find_use(struct uses *uses, const struct stream *stream)
{
    for (uint32_t i = 0; uses && i < uses->count; i++)
        if (uses->stream[i].stream == stream->slot)
            return &uses->stream[i];
    return NULL;
}

/*
 * Of a stream that has been released the last fence is known: the use waits for that, and its record for the use no
 * more. True: so it is from now on.
 */
static bool end_if_released(const struct streams *streams, struct fence *use)
{
    struct stream *stream = stream_at(streams, use->stream);
    if (use->number || load_sc_u32(&stream->state) != STREAM_RELEASED)
        return false;
    use->number = load_sc_u64(&stream->published);
    vpmm_assert(use->number > 0); /* the release has ended the uses that there were */
    stream_end_use(stream);
    return true;
}

/* What has passed of streams that have been released, or of fences. True: a record may be taken out of use. */
static bool drop_passed(const struct streams *streams, struct uses *uses)
{
    uint32_t left = 0;
    bool any_ended = false;
    for (uint32_t i = 0; i < uses->count; i++) {
        struct fence use = uses->stream[i];
        any_ended |= end_if_released(streams, &use);
        if (!use.number || !fence_passed(streams, use))
            uses->stream[left++] = use;
    }
    uses->count = left;
    return any_ended;
}

/*
 * Room for one more. Where a list is full what has passed is dropped first: else an allocation that lives long would
 * keep the record of each stream that has ever used it. False: there is no host memory; what is at *place stands for
 * the same.
 */
static bool make_room(struct space *space, struct uses **place)
{
    struct uses *uses = *place;
    if (uses && uses->count == uses->capacity && drop_passed(space->streams, uses))
        bell_ring(space->bell); /* see streams_pending */
    uint32_t count = uses ? uses->count : 0, capacity = uses ? uses->capacity : 0;
    if (count < capacity)
        return true;
    capacity = capacity ? capacity * 2 : FIRST_CAPACITY;
    uses = realloc(uses, bytes_for(capacity));
    if (!uses)
        return false;
    uses->count = count;
    uses->capacity = capacity;
    *place = uses;
    return true;
}

vpmm_status uses_add(struct space *space, struct uses **place, struct stream *stream)
{
    struct fence *use = find_use(*place, stream);
    bool is_brief = stream_is_brief(space->streams, stream);
    if (use && !use->number) { /* it has none before the free */
        if (stream_uses_are_closed(stream))
            fence_take(stream); /* it is being released, and the fence that ends its uses may be before this one */
        return VPMM_SUCCESS;
    }
    if (!use && !make_room(space, place))
        return fail(VPMM_ERROR_HOST_MEMORY, "no host memory for the streams that use an allocation");
    use = use ? use : &(*place)->stream[(*place)->count++];
    *use = is_brief ? fence_take(stream) : (struct fence){stream->slot, 0};
    if (!is_brief && stream_begin_use(stream))
        fence_take(stream); /* it is being released, which marks when this thread has left: see use.h */
    return VPMM_SUCCESS;
}

/* What one use without a number waits for. The record stays the stream's until stream_end_use. */
static struct fence end_of(struct streams *streams, uint32_t slot)
{
    struct stream *stream = stream_at(streams, slot);
    struct fence fence = {slot, 0};
    if (stream_enter_cached(stream)) {
        fence = fence_take(stream);
        stream_mark_by_other(streams, stream);
        stream_end_visit(stream);
    } else {
        fence.number = load_sc_u64(&stream->published); /* pairs with begin_release: its fence is in it */
    }
    stream_end_use(stream);
    return fence;
}

bool uses_end(struct streams *streams, struct uses *uses, struct fence fence)
{
    uint32_t left = 0;
    for (uint32_t i = 0; i < uses->count; i++) {
        struct fence use = uses->stream[i];
        if (use.stream != fence.stream)
            uses->stream[left++] = use.number ? use : end_of(streams, use.stream);
        else if (!use.number) /* the free's own fence covers it */
            stream_end_use(stream_at(streams, use.stream));
    }
    uses->count = left;
    if (!uses_pass(streams, uses))
        return false;
    uses->stream[uses->count++] = fence;
    return true;
}

uint32_t uses_pass(const struct streams *streams, struct uses *uses)
{
    uint32_t left = 0;
    for (uint32_t i = 0; i < uses->count; i++)
        if (!fence_passed(streams, uses->stream[i]))
            uses->stream[left++] = uses->stream[i];
    uses->count = left;
    return left;
}

/* ---- of a live region ---- */

/* Makes the live region of an address NOTING: in the caller's hands. *before: what it was. NULL: there is none. */
static struct unit *begin_note(struct space *space, CUdeviceptr address, enum unit_state *before)
{
    struct unit *first = unit_at_address(&space->units, address);
    uint64_t word = first ? load_acquire_u64(&first->word) : 0; /* pairs with unit_set's release */
    enum unit_state state;
    /* Blocking: who has it NOTING is inside vpmm_use of this allocation too, and makes no driver call there. */
    while ((state = word_state(word)) == UNIT_NOTING || state == UNIT_LIVE || state == UNIT_USED) {
        if (state == UNIT_NOTING) {
            clock_yield();
            word = load_acquire_u64(&first->word);
        } else if (cas_sc_u64(&first->word, &word, word_next(word, state, UNIT_NOTING))) {
            *before = state;
            return first;
        }
    }
    return NULL;
}

vpmm_status region_use(struct space *space, CUdeviceptr address, struct stream *stream)
{
    enum unit_state state;
    struct unit *first = begin_note(space, address, &state);
    if (!first)
        return region_not_live(address);
    struct uses *uses = state == UNIT_USED ? unit_uses(first) : NULL;
    vpmm_status status = uses_add(space, &uses, stream);
    store_relaxed_u64(&first->where, (uint64_t)(uintptr_t)uses);
    vpmm_assert(word_state(peek_u64(&first->word)) == UNIT_NOTING);
    unit_set(first, uses ? UNIT_USED : UNIT_LIVE, word_units(load_relaxed_u64(&first->word)));
    return status;
}
