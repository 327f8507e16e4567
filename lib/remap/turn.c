#include "remap/turn.h"

#include "base/assert.h"
#include "base/clock.h"

void turn_init(struct turn *turn, struct await *await)
{
    turn->await = await;
    pthread_mutex_init(&turn->lock, NULL);
}

void turn_destroy(struct turn *turn)
{
    vpmm_assert(!turn->first);
    pthread_mutex_destroy(&turn->lock);
}

/* ---- the queue, under the lock ---- */

static void append(struct turn *turn, struct turn_place *place, struct turn_request request)
{
    *place = (struct turn_place){.request = request, .at = AWAIT_NO_PLACE};
    *(turn->first ? &turn->last->next : &turn->first) = place;
    turn->last = place;
    store_relaxed_u32(&turn->length, load_relaxed_u32(&turn->length) + 1);
}

/* The place that was before it; NULL: it was the first. */
static struct turn_place *take_out(struct turn *turn, const struct turn_place *place)
{
    struct turn_place *before = NULL, **link = &turn->first;
    while (*link != place) {
        before = *link;
        vpmm_assert(before); /* the place is in the queue */
        link = &before->next;
    }
    *link = place->next;
    if (turn->last == place)
        turn->last = before;
    store_relaxed_u32(&turn->length, load_relaxed_u32(&turn->length) - 1);
    return before;
}

enum ahead { NOBODY, THE_HOLDER, MORE };

/* NOBODY also for who has its answer. */
static enum ahead who_is_ahead(struct turn *turn, const struct turn_place *place)
{
    enum ahead ahead = NOBODY;
    lock_take(&turn->lock);
    if (!place->is_served && turn->first != place)
        ahead = turn->first->next == place ? THE_HOLDER : MORE;
    pthread_mutex_unlock(&turn->lock);
    return ahead;
}

/* Nobody serves it any more, but if it is served already: true. */
static bool end_service(struct turn *turn, struct turn_place *place)
{
    if (turn->served == place)
        turn->served = NULL;
    place->request.may_be_served = false;
    return place->is_served;
}

/* Where the thread of this place is woken. NULL: there is none. */
static unsigned at_of(const struct turn_place *place)
{
    return place ? place->at : AWAIT_NO_PLACE;
}

/* ---- entering ---- */

/* From when its place says where, its thread is woken there: who leaves reads that under the lock. */
static void prepare_to_wait(struct turn *turn, struct turn_place *place, uint64_t pages, uint32_t slot)
{
    unsigned at = await_enter(turn->await, pages, slot);
    lock_take(&turn->lock);
    place->at = at;
    pthread_mutex_unlock(&turn->lock);
    place->ended = load_relaxed_u64(&turn->ended);
    place->called = load_relaxed_u64(&turn->called);
    place->since = place->moved = clock_now_ns();
}

bool turn_enter(struct turn *turn, struct turn_place *place, struct turn_request request)
{
    lock_take(&turn->lock);
    append(turn, place, request);
    bool has_come = turn->first == place;
    pthread_mutex_unlock(&turn->lock);
    if (!has_come)
        prepare_to_wait(turn, place, request.pages, request.stream ? request.stream->slot : 0);
    return has_come;
}

bool turn_try(struct turn *turn, struct turn_place *place)
{
    if (load_relaxed_u32(&turn->length) || !lock_try(&turn->lock))
        return false;
    bool has_come = !turn->first;
    if (has_come)
        append(turn, place, (struct turn_request){0});
    pthread_mutex_unlock(&turn->lock);
    return has_come;
}

/* ---- waiting ---- */

void turn_read(const struct turn *turn, struct turn_place *place)
{
    place->seen = await_read(turn->await, place->at);
}

/* Whether a call was under way at this look, or has ended since the one before: both counts are hints. */
static bool driver_moves(const struct turn *turn, struct turn_place *place)
{
    uint64_t called = load_relaxed_u64(&turn->called), before = place->called;
    place->called = called;
    return called != before || load_relaxed_u64(&turn->calls) != called;
}

static uint64_t until(uint64_t since_ns, uint64_t most_ns, uint64_t now_ns)
{
    return now_ns - since_ns < most_ns ? since_ns + most_ns - now_ns : 0;
}

/*
 * The patience begins again whenever the turn has changed hands, and while the driver is called. When one waiter's
 * ends, it ends for all who wait for that holder: each would only find out the same for itself. Who gives memory back
 * takes turns as often as it has extents, and would lose its patience each time.
 */
static uint64_t patience_left(struct turn *turn, struct turn_place *place)
{
    uint64_t now = clock_now_ns(), ended = load_relaxed_u64(&turn->ended);
    bool is_another = ended != place->ended;
    if (driver_moves(turn, place) || is_another)
        place->moved = now;
    if (is_another) {
        place->ended = ended;
        place->since = now;
    }
    uint64_t left = until(place->moved, TURN_PATIENCE_NS, now), longest = until(place->since, TURN_LONGEST_NS, now);
    if (!left || !longest) /* who is late may say the same of an earlier turn in its place: it ends for fewer then */
        store_relaxed_u64(&turn->outlasted, ended + 1);
    if (!left || !longest || load_relaxed_u64(&turn->outlasted) == ended + 1)
        return 0;
    return left < longest ? left : longest;
}

static bool sleep_until_news(struct turn *turn, struct turn_place *place)
{
    uint64_t left = patience_left(turn, place);
    enum ahead ahead = who_is_ahead(turn, place);
    if (ahead == NOBODY || !left)
        return false;
    if (ahead == MORE || !await_spin(turn->await, place->at, place->seen, TURN_SPIN_NS))
        await_sleep(turn->await, place->at, place->seen, left);
    return who_is_ahead(turn, place) != NOBODY && patience_left(turn, place);
}

/* Who builds is told of nothing, and who publishes looks at one want less. */
static enum turn_news end_waiting(struct turn *turn, struct turn_place *place)
{
    unsigned at = place->at;
    lock_take(&turn->lock);
    bool is_served = end_service(turn, place), has_come = turn->first == place;
    place->at = AWAIT_NO_PLACE;
    pthread_mutex_unlock(&turn->lock);
    await_leave(turn->await, at);
    return is_served ? TURN_SERVED : has_come ? TURN_COME : TURN_OVERDUE;
}

enum turn_news turn_wait(struct turn *turn, struct turn_place *place)
{
    return sleep_until_news(turn, place) ? TURN_LOOK : end_waiting(turn, place);
}

void turn_take(struct turn *turn, struct turn_place *place)
{
    const uint64_t nothing = UINT32_MAX; /* pages: no region has so many */
    if (turn_enter(turn, place, (struct turn_request){.pages = nothing}))
        return;
    do
        turn_read(turn, place);
    while (turn_wait(turn, place) == TURN_LOOK);
}

/* ---- serving ---- */

bool turn_serve(struct turn *turn, struct turn_place *place, struct turn_request *request)
{
    lock_take(&turn->lock);
    struct turn_place *next = turn->first == place ? place->next : NULL;
    bool serves = next && next->request.may_be_served;
    vpmm_assert(!serves || !turn->served);
    if (serves) {
        turn->served = next;
        *request = next->request;
        stream_join(request->stream);
    }
    pthread_mutex_unlock(&turn->lock);
    return serves;
}

bool turn_answer(struct turn *turn, struct turn_place *place, const struct turn_answer *answer)
{
    unsigned at = AWAIT_NO_PLACE;
    lock_take(&turn->lock);
    struct turn_place *served = turn->served;
    vpmm_assert(turn->first == place && (!served || (served == place->next && !served->is_served)));
    if (served && answer) {
        served->answer = *answer;
        served->is_served = true;
        take_out(turn, served);
        at = at_of(served);
    }
    turn->served = NULL;
    pthread_mutex_unlock(&turn->lock);
    await_wake(turn->await, at);
    return served && answer;
}

/* ---- leaving ---- */

bool turn_withdraw(struct turn *turn, struct turn_place *place)
{
    lock_take(&turn->lock);
    bool is_served = end_service(turn, place);
    pthread_mutex_unlock(&turn->lock);
    if (is_served)
        await_leave(turn->await, place->at);
    else
        turn_leave(turn, place);
    return is_served;
}

void turn_leave(struct turn *turn, struct turn_place *place)
{
    unsigned next = AWAIT_NO_PLACE, after_next = AWAIT_NO_PLACE;
    lock_take(&turn->lock);
    vpmm_assert(!place->is_served && (turn->first != place || !turn->served));
    if (!take_out(turn, place)) {
        store_relaxed_u64(&turn->ended, load_relaxed_u64(&turn->ended) + 1);
        next = at_of(turn->first);
        after_next = at_of(turn->first ? turn->first->next : NULL);
    }
    pthread_mutex_unlock(&turn->lock);
    await_leave(turn->await, place->at);
    await_wake(turn->await, next);
    await_wake(turn->await, after_next);
}
