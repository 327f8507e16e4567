/*
 * The library's hand-overs between threads under C++11's memory model (model.hpp).
 *
 *   relacy_handovers           every model; exit status 1 if one does not hold, or a fault in one is not found
 *   relacy_handovers --list    their names
 *   relacy_handovers <name>    one
 */
#include <cstdio>
#include <cstring>
#include <fstream>
#include <sstream>

#include "model.hpp" /* last: Relacy makes macros of keywords */

enum { NONE, LIVE, FREE, CACHED, OWN };

int FAULT;

/*
 * Two neighbours are published at once (region.c, take_again): one of the threads makes them one. The left one is 0.
 * The fence of a region is written before its word and read after it, by whoever may take it.
 */
struct neighbours : rl::test_suite<neighbours, 2> {
    word state[2], length_at_end, fence_number[2];
    int merged;

    void before()
    {
        for (int i = 0; i < 2; i++) {
            store(state[i], OWN, mo_relaxed);
            store(fence_number[i], 0, mo_relaxed);
        }
        store(length_at_end, 0, mo_relaxed);
        merged = 0;
    }

    void set_free(int i)
    {
        store(fence_number[i], 7 + i, mo_relaxed);
        if (i == 0)
            store(length_at_end, 1, unless(1, mo_seq_cst, mo_relaxed));
        store(state[i], FREE, unless(2, mo_seq_cst, mo_release));
    }

    bool looks_free(int i)
    {
        if (i == 0 && !load(length_at_end, unless(3, mo_seq_cst, mo_relaxed)))
            return false;
        return load(state[i], unless(4, mo_seq_cst, mo_acquire)) == FREE;
    }

    /* As region_claim: what was read of the fence counts if the word was still the same. */
    bool claim(int i)
    {
        int number = load(fence_number[i], mo_relaxed);
        if (!cas(state[i], FREE, OWN, mo_seq_cst))
            return false;
        RL_ASSERT(number == 7 + i);
        return true;
    }

    void thread(unsigned index)
    {
        int self = (int)index, left = 0, right = 1;
        set_free(self);
        if (FAULT == 5 || !looks_free(1 - self))
            return;
        if (self == right) { /* the left one first, on both sides */
            if (!claim(left))
                return;
            if (claim(right))
                merged++;
            else
                republish_left();
        } else if (claim(left)) {
            republish_left();
        }
    }

    /* From the beginning again: what is on the right is taken in, before or after it is FREE. */
    void republish_left()
    {
        for (;;) {
            if (looks_free(1) && claim(1)) {
                merged++;
                return;
            }
            set_free(0);
            if (!looks_free(1) || !claim(0))
                return;
        }
    }

    void after()
    {
        RL_ASSERT(merged == 1);
    }
};

static const quote neighbours_quotes[] = {
    {"lib/space/units.h", "        store_sc_u64(&unit->word, word);"},
    {"lib/space/units.h", "    return cas_sc_u64(&unit->word, &word, word_make(UNIT_OWN, word_units(word), word));"},
    {"lib/space/region.c", "    uint64_t length = load_sc_u32(&at(space, unit - 1)->back);"},
    {"lib/space/region.c", "    left->word = load_sc_u64(&at(space, left->first)->word);"},
    {"lib/space/region.c", "    right->word = load_sc_u64(&at(space, right->first)->word);"},
    {"lib/space/region.c",
     "    store_sc_u32(&at(space, region.first + region.units - 1)->back, (uint32_t)region.units);"},
    {0, 0}};

/* A fence passes while memory behind it is published (region.c, passed_meanwhile): one of the two moves it. */
struct passed_meanwhile : rl::test_suite<passed_meanwhile, 2> {
    word state, completed;
    int moved;

    void before()
    {
        store(state, OWN, mo_relaxed);
        store(completed, 0, mo_relaxed);
        moved = 0;
    }

    void thread(unsigned index)
    {
        if (index == 0) {
            store(state, FREE, unless(1, mo_seq_cst, mo_release));
            if (FAULT != 5 && load(completed, unless(2, mo_seq_cst, mo_acquire)) && cas(state, FREE, OWN, mo_seq_cst))
                moved++;
        } else {
            store(completed, 1, unless(3, mo_seq_cst, mo_release));
            if (load(state, unless(4, mo_seq_cst, mo_acquire)) == FREE && cas(state, FREE, OWN, mo_seq_cst))
                moved++;
        }
    }

    void after()
    {
        RL_ASSERT(moved == 1);
    }
};

static const quote passed_quotes[] = {
    {"lib/space/fence.c", "        store_sc_u64(&stream->completed, mark_number(last)); /* pairs with fence_passed, and"},
    {"lib/space/fence.h",
     "    return !fence.stream || (stream && fence.number <= load_sc_u64(&stream->completed));"},
    {"lib/space/hints.c", "    found->word = load_sc_u64(&unit_at(units, found->first)->word);"},
    {0, 0}};

/*
 * A cache is filled while it is emptied (front.h, "Emptying against filling"): what is put in is found, or noted again.
 * The slot has a stale address before. By the letter of C++11 the slot's plain store may be seen late, which Relacy
 * finds (fault 5). With the exchanges of x86-64 and aarch64, which order what stands before and after
 * them like fences, it holds.
 */
struct noted : rl::test_suite<noted, 2> {
    enum { STALE = 3, ADDRESS = 4, BY_THE_LETTER = 5 };
    word state, slot, noted;
    bool flushed;

    void before()
    {
        store(state, LIVE, mo_relaxed);
        store(slot, STALE, mo_relaxed);
        store(noted, 1, mo_relaxed);
        flushed = false;
    }

    void as_the_machine()
    {
        if (FAULT != BY_THE_LETTER)
            fence(mo_seq_cst);
    }

    void thread(unsigned index)
    {
        if (index == 0)
            give();
        else
            flush();
    }

    void give()
    {
        store(slot, ADDRESS, mo_relaxed);
        int seen = FAULT == 1 ? load(noted, mo_seq_cst) : 0;
        cas(state, LIVE, CACHED, FAULT == 2 ? mo_acq_rel : mo_seq_cst);
        if (FAULT != 2)
            as_the_machine();
        if (FAULT == 3)
            return;
        seen = FAULT == 1 ? seen : load(noted, FAULT == 2 ? mo_acquire : mo_seq_cst);
        if (!(seen & 1))
            fetch_or(noted, 1, mo_seq_cst);
    }

    void flush()
    {
        if (!load(noted, mo_seq_cst))
            return;
        if (FAULT == 4)
            store(noted, 0, mo_relaxed);
        else
            exchange(noted, 0, mo_seq_cst);
        if (FAULT != 4)
            as_the_machine();
        if (load(slot, mo_relaxed) == ADDRESS && load(state, FAULT == 4 ? mo_relaxed : mo_seq_cst) == CACHED)
            flushed = cas(state, CACHED, OWN, mo_seq_cst);
    }

    void after()
    {
        RL_ASSERT(flushed || load(noted, mo_seq_cst));
    }
};

static const quote noted_quotes[] = {
    {"lib/cache/regions.h", "    store_relaxed_u64(&bin->slot[count], address);"},
    {"lib/cache/regions.h", "    if (!cas_sc_u64(&first->word, &word, word_next(word, UNIT_LIVE, UNIT_CACHED)))"},
    {"lib/cache/regions.h", "    *unnoted = !(load_sc_u64(&cache->regions.noted) >> index & 1) ? index : CACHE_BINS;"},
    {"lib/cache/cache.c", "    if (!fetch_or_sc_u64(&set->noted, UINT64_C(1) << index))\n        cache_list_noted(cache);"},
    {"lib/cache/cache.c", "    return set && load_sc_u64(&set->noted) ? exchange_sc_u64(&set->noted, 0) : 0;"},
    {"lib/cache/regions.c", "    uint64_t word = load_sc_u64(&first->word); /* after the noted bits: see front.h */"},
    {0, 0}};

/* Addresses move between slots (regions_drop_stale, cache_flush_oldest) while the cache is emptied: as above, but the words
 * are not touched, and the bit is written whether it is there or not. Of the two writes to the bits one comes first. */
struct moved : rl::test_suite<moved, 2> {
    word slot[2], noted_bits;
    bool flushed;

    void before()
    {
        store(slot[0], 0, mo_relaxed);
        store(slot[1], 4, mo_relaxed);
        store(noted_bits, 1, mo_relaxed);
        flushed = false;
    }

    void thread(unsigned index)
    {
        if (index == 0) {
            store(slot[0], 4, mo_relaxed);
            store(slot[1], 5, mo_relaxed); /* as the next free writes over it */
            if (FAULT != 2)
                fetch_or(noted_bits, 1, unless(1, mo_seq_cst, mo_relaxed));
            else if (!load(noted_bits, mo_seq_cst))
                fetch_or(noted_bits, 1, mo_seq_cst);
        } else if (exchange(noted_bits, 0, mo_seq_cst)) {
            for (int i = 0; i < 2; i++)
                flushed |= load(slot[i], mo_relaxed) == 4;
        }
    }

    void after()
    {
        RL_ASSERT(flushed || load(noted_bits, mo_seq_cst));
    }
};

static const quote moved_quotes[] = {
    {"lib/cache/regions.c", "    if (kept)\n        cache_note_filled(cache, CACHED_REGIONS, index);"},
    {"lib/cache/cache.c", "    if (count > slots)\n        cache_note_filled(cache, kind, index);"},
    {0, 0}};

/* A hit of one stream, while another thread takes the region and frees it on another stream (front.h, ABA). */
struct hit : rl::test_suite<hit, 2> {
    word state, fence_stream; /* state: 10 * generation + state */
    word used_on;

    void before()
    {
        store(state, CACHED, mo_relaxed);
        store(fence_stream, 1, mo_relaxed);
    }

    int generation(int n)
    {
        return FAULT == 1 ? 0 : 10 * n;
    }

    void thread(unsigned index)
    {
        if (index == 0) {
            if (!cas(state, CACHED, generation(1) + LIVE, mo_seq_cst))
                return;
            if (!cas(state, generation(1) + LIVE, generation(2) + OWN, mo_seq_cst))
                return;
            store(fence_stream, 2, mo_relaxed);
            store(state, generation(3) + CACHED, unless(2, mo_seq_cst, mo_relaxed));
            return;
        }
        int seen = load(state, unless(3, mo_acquire, mo_relaxed));
        if (seen % 10 != CACHED)
            return;
        int of = FAULT == 4 ? 2 : load(fence_stream, mo_relaxed);
        /* As a taker of stream 2: what it has was freed on stream 2, so the word is not the first. */
        if (of == 2 && cas(state, seen, seen + 10 - CACHED + LIVE, mo_seq_cst))
            RL_ASSERT(load(fence_stream, mo_relaxed) == 2 && (FAULT == 1 || seen != CACHED));
        /* As a taker of stream 1, likewise. */
        if (of == 1 && cas(state, seen, seen + 10 - CACHED + LIVE, mo_seq_cst))
            RL_ASSERT(load(fence_stream, mo_relaxed) == 1);
    }
};

static const quote hit_quotes[] = {
    {"lib/cache/regions.h",
     "    uint64_t word = load_acquire_u64(&first->word);\n    return word_is_cached(word, length) && "
     "load_relaxed_u32(&first->fence_stream) == cache->slot &&\n           cas_sc_u64("},
    {0, 0}};

/* From a free to a malloc on another stream, by published, a mark, its ring and completed (fence.h). */
struct completion : rl::test_suite<completion, 4> {
    word published, number, ring, completed;
    rl::var<int> work; /* what the stream did with the memory, as the simulator and a host function would see it */

    void before()
    {
        store(published, 0, mo_relaxed);
        store(number, 0, mo_relaxed);
        store(ring, 0, mo_relaxed);
        store(completed, 0, mo_relaxed);
        work($) = 0;
    }

    void thread(unsigned index)
    {
        if (index == 0) { /* frees */
            work($) = 1;
            fetch_add(published, 1, unless(1, mo_seq_cst, mo_relaxed));
        } else if (index == 1) { /* marks: the event is recorded after what was published */
            int n = load(published, unless(2, mo_seq_cst, mo_relaxed));
            if (!n)
                return;
            store(number, n, unless(3, mo_release, mo_relaxed));
            store(ring, 1, unless(3, mo_release, mo_relaxed)); /* ck_ring's */
        } else if (index == 2) {                               /* the reaper */
            if (!load(ring, unless(4, mo_acquire, mo_relaxed)))
                return;
            int n = load(number, unless(4, mo_acquire, mo_relaxed));
            RL_ASSERT(n == 1);
            store(completed, n, unless(5, mo_seq_cst, mo_relaxed));
        } else if (load(completed, unless(6, mo_seq_cst, mo_relaxed)) >= 1) { /* mallocs */
            RL_ASSERT((int)work($) == 1);
        }
    }
};

static const quote completion_quotes[] = {
    {"lib/space/fence.h", "    return (struct fence){stream->slot, fetch_add_sc_u64(&stream->published, 1) + 1};"},
    {"lib/space/fence.c", "    uint64_t number = load_sc_u64(&stream->published); /* before the event is recorded */"},
    {"lib/space/fence.c", "    store_release_u64(&mark->word, mark_word(number, MARK_RECORDED)); /* as the event's */"},
    {"lib/space/fence.c", "    *word = load_acquire_u64(&stream->taken[i]->word);"},
    {0, 0}};

/*
 * The newest mark is recorded again while the reaper asks its event and frees its place (fence.c, claim_newest,
 * mark_again and retire_marks). The first point has passed, the second has not.
 */
struct marked_again : rl::test_suite<marked_again, 2> {
    enum { FREE_PLACE, RECORDED, BUSY, STATES = 4 };
    word mark, event; /* mark: number * STATES + state; event: the point that it was recorded at */
    bool forgotten;   /* the reaper asks it no more */

    void before()
    {
        store(mark, 1 * STATES + RECORDED, mo_relaxed);
        store(event, 1, mo_relaxed);
        forgotten = false;
    }

    void thread(unsigned index)
    {
        if (index == 0)
            record_again();
        else
            ask();
    }

    void record_again()
    {
        if (FAULT != 1 && !cas(mark, 1 * STATES + RECORDED, 1 * STATES + BUSY, mo_seq_cst))
            return;
        store(event, 2, mo_relaxed);
        store(mark, 2 * STATES + RECORDED, unless(2, mo_release, mo_relaxed));
    }

    void ask()
    {
        int seen = FAULT == 3 ? 0 : load(mark, unless(2, mo_acquire, mo_relaxed));
        bool passed = load(event, mo_relaxed) == 1;
        if (FAULT == 3)
            seen = load(mark, mo_acquire);
        if (!passed || seen % STATES != RECORDED)
            return;
        RL_ASSERT(seen / STATES == 1); /* what is published as completed */
        if (FAULT == 4)
            store(mark, seen / STATES * STATES, mo_seq_cst);
        forgotten = FAULT == 4 || cas(mark, seen, seen / STATES * STATES, mo_seq_cst);
    }

    void after()
    {
        RL_ASSERT(!forgotten || load(event, mo_relaxed) == 1);
    }
};

static const quote again_quotes[] = {
    {"lib/space/fence.c", "cas_sc_u64(&newest->word, &word, mark_word(mark_number(word), MARK_BUSY));"},
    {"lib/space/fence.c", "    store_release_u64(&newest->word, mark_word(recorded ? number : before, MARK_RECORDED));"},
    {"lib/space/fence.c", "    *word = load_acquire_u64(&stream->taken[i]->word);\n"
                     "    if (mark_state(*word) != MARK_RECORDED)\n        return false;"},
    {"lib/space/fence.c", "    bool retired = cas_sc_u64(&stream->taken[passed - 1]->word, &last, mark_word("},
    {0, 0}};

/*
 * Who marks for another, and a thread that waits for a mark of the stream (fence.c, mark_once and wait_counted): the
 * event that the waiter has chosen is not recorded in a capture under it. The place's mark has passed, is about to.
 */
struct waiters : rl::test_suite<waiters, 3> {
    word count, completed, place, captured; /* place: 0 as its mark has passed, 1 outstanding */

    void before()
    {
        store(count, 0, mo_relaxed);
        store(completed, 0, mo_relaxed);
        store(place, 1, mo_relaxed);
        store(captured, 0, mo_relaxed);
    }

    void thread(unsigned index)
    {
        if (index == 0) { /* waits for the number 1 */
            fetch_add(count, 1, unless(1, mo_seq_cst, mo_relaxed));
            if (FAULT == 5 || !load(completed, unless(2, mo_seq_cst, mo_relaxed)))
                RL_ASSERT(!load(captured, mo_relaxed));
            fetch_add(count, -1, mo_seq_cst);
        } else if (index == 1) { /* the reaper */
            store(completed, 1, unless(3, mo_seq_cst, mo_release));
            store(place, 0, mo_release);
        } else if (!load(place, mo_acquire) &&
                   (FAULT == 4 || !load(count, unless(1, mo_seq_cst, mo_relaxed)))) { /* the marker */
            store(captured, 1, mo_relaxed);
        }
    }
};

static const quote waiters_quotes[] = {
    {"lib/space/fence.c", "    fetch_add_sc_u32(&stream->waiters, 1);\n    status = wait_counted("},
    {"lib/space/fence.c", "    bool once;\n    if (number <= load_sc_u64(&stream->completed))"},
    {"lib/space/fence.c", "    if (by_other && (!is_free || load_sc_u32(&stream->waiters)))"},
    {0, 0}};

/*
 * Who waits on the host for a fence of a stream, and has left the stream's users by then, and the record that is used
 * again when the fence has passed (fence.c, wait_counted; stream.c, retire_record): not before the wait has ended.
 */
struct left : rl::test_suite<left, 2> {
    word users, waiters, completed;
    rl::var<int> record;

    void before()
    {
        store(users, 0, mo_relaxed);
        store(waiters, 0, mo_relaxed);
        store(completed, 0, mo_relaxed);
        record($) = 1;
    }

    void thread(unsigned index)
    {
        if (index == 0)
            wait();
        else
            complete_and_retire();
    }

    void wait()
    {
        fetch_add(users, 1, mo_seq_cst);
        if (load(completed, mo_seq_cst)) {
            fetch_add(users, -1, mo_seq_cst);
            return;
        }
        if (FAULT != 1)
            fetch_add(waiters, 1, mo_seq_cst);
        fetch_add(users, -1, mo_seq_cst);
        if (FAULT == 1)
            fetch_add(waiters, 1, mo_seq_cst);
        RL_ASSERT((int)record($) == 1);
        fetch_add(waiters, -1, mo_seq_cst);
    }

    void complete_and_retire()
    {
        if (FAULT != 4)
            store(completed, 1, mo_seq_cst);
        bool none_waits = FAULT == 3 && !load(waiters, mo_seq_cst);
        if (!load(users, mo_seq_cst) && (FAULT == 2 || none_waits || (FAULT != 3 && !load(waiters, mo_seq_cst))))
            record($) = 2;
        if (FAULT == 4)
            store(completed, 1, mo_seq_cst);
    }
};

static const quote left_quotes[] = {
    {"lib/space/fence.c", "    fetch_add_sc_u32(&stream->waiters, 1);\n    status = wait_counted("},
    {"lib/space/fence.c", "    if (!waiter)\n        stream_end_visit(stream);"},
    {"lib/space/stream.c", "!load_sc_u32(&stream->users) &&\n        !has_uses(stream) && !load_sc_u32(&stream->waiters) &&\n"
                           "        load_sc_u64(&stream->published) == load_relaxed_u64(&stream->completed)"},
    {0, 0}};

/*
 * A free that hits a cache while its stream is released (front.h, "Releasing"): the region is found by who empties the
 * cache, or the free finds the cache closed and is undone.
 */
struct closed : rl::test_suite<closed, 2> {
    word handle, noted, state, slot;

    void before()
    {
        store(handle, 1, mo_relaxed);
        store(noted, (int)rl::rand(2), mo_relaxed);
        store(state, LIVE, mo_relaxed);
        store(slot, 0, mo_relaxed);
    }

    void thread(unsigned index)
    {
        if (index == 0) {
            store(slot, 1, mo_relaxed);
            fence(mo_seq_cst); /* what the exchange of the word is to the slot on x86-64 and aarch64 */
            bool looked_before = FAULT == 4 && load(handle, mo_seq_cst);
            store(state, CACHED, unless(1, mo_seq_cst, mo_release));
            if (load(noted, unless(2, mo_seq_cst, mo_relaxed)))
                return;
            if (FAULT == 3 || looked_before || load(handle, mo_seq_cst))
                fetch_or(noted, 1, mo_seq_cst);
            else
                cas(state, CACHED, LIVE, mo_seq_cst);
        } else {
            if (FAULT != 5)
                store(handle, 0, mo_seq_cst);
            store(noted, 0, unless(2, mo_seq_cst, mo_release));
            if (FAULT != 6)
                fence(mo_seq_cst);
            if (load(slot, mo_relaxed) && load(state, unless(1, mo_seq_cst, mo_relaxed)) == CACHED)
                cas(state, CACHED, OWN, mo_seq_cst);
            if (FAULT == 5)
                store(handle, 0, mo_seq_cst);
        }
    }

    void after()
    {
        RL_ASSERT(load(state, mo_relaxed) != CACHED);
    }
};

static const quote closed_quotes[] = {
    {"lib/cache/cache.c", "    if (load_sc_ptr(&cache->handle) == CACHE_CLOSED)\n        return !undo_give(cache, kind, index);"},
    {"lib/cache/front.c", "        close_cache(cache);\n        cache_empty(cache, stream);"},
    {"lib/cache/cache.c", "        take_noted(cache, kind);\n        flush_bins(cache, stream, kind, every_bin(cache, kind));"},
    {"lib/cache/cache.c", "    fence_sc(); /* after the store of the noted bits, before the slots"},
    {0, 0}};

/* Two threads free and want to mark: the one that has the try-lock marks for both (fence.c, mark). */
struct marking : rl::test_suite<marking, 2> {
    word published, recorded, lock;
    rl::var<int> next_mark; /* under the try-lock */

    void before()
    {
        store(published, 0, mo_relaxed);
        store(recorded, 0, mo_relaxed);
        store(lock, 0, mo_relaxed);
        next_mark($) = 0;
    }

    void thread(unsigned)
    {
        fetch_add(published, 1, mo_seq_cst);
        bool again = load(published, mo_seq_cst) > load(recorded, mo_relaxed);
        while (again && !exchange(lock, 1, unless(4, mo_acq_rel, mo_relaxed))) {
            int n = load(published, mo_seq_cst);
            bool marked = n > load(recorded, mo_relaxed);
            if (marked) {
                next_mark($) = (int)next_mark($) + 1;
                store(recorded, n, mo_relaxed); /* raised: only the holder does */
            }
            store(lock, 0, FAULT == 1 ? mo_release : FAULT == 2 ? mo_relaxed : mo_seq_cst);
            again = FAULT != 3 && marked &&
                    load(published, FAULT == 1 ? mo_acquire : mo_seq_cst) > load(recorded, mo_relaxed);
        }
    }

    void after()
    {
        RL_ASSERT(load(recorded, mo_relaxed) == 2);
    }
};

static const quote marking_quotes[] = {
    {"lib/space/fence.c", "    while (again && !exchange_acq_rel_u32(&stream->marking, 1)) {"},
    {"lib/space/fence.c", "        store_sc_u32(&stream->marking, 0); /* pairs with the exchange */"},
    {"lib/space/fence.c",
     "        again = marked && load_sc_u64(&stream->published) > load_relaxed_u64(&stream->recorded);"},
    {0, 0}};

/* A thread that uses a stream's handle, and the release of the stream (stream.c, enter_known and stream_release). */
struct users : rl::test_suite<users, 2> {
    word state, count;
    rl::var<int> handle;

    void before()
    {
        store(state, 1, mo_relaxed);
        store(count, 0, mo_relaxed);
        handle($) = 1;
    }

    void thread(unsigned index)
    {
        if (index == 0) {
            if (FAULT != 5)
                fetch_add(count, 1, unless(1, mo_seq_cst, mo_relaxed));
            if (load(state, unless(2, mo_seq_cst, mo_relaxed)) == 1)
                RL_ASSERT((int)handle($) == 1);
            fetch_add(count, FAULT == 5 ? 0 : -1, unless(3, mo_seq_cst, mo_relaxed));
        } else {
            store(state, 2, unless(4, mo_seq_cst, mo_release));
            rl::backoff wait;
            while (load(count, unless(4, mo_seq_cst, mo_acquire)))
                wait.yield($);
            handle($) = 0; /* destroyed */
        }
    }
};

static const quote users_quotes[] = {
    {"lib/space/stream.c",
     "    fetch_add_sc_u32(&stream->users, 1);\n    if (load_sc_u32(&stream->state) == STREAM_ACTIVE &&"},
    {"lib/space/stream.h", "    fetch_add_sc_u32(&stream->users, UINT32_MAX);"},
    {"lib/space/stream.c", "        store_sc_u32(&stream->state, STREAM_RELEASING); /* before users is read: see stream_enter_cached"},
    {"lib/space/stream.c", "    while (load_sc_u32(&stream->users) > 1)\n        clock_yield();"},
    {0, 0}};

/*
 * A use of live memory by a stream, the free that ends it, and the stream's release (use.h): whatever the free finds of
 * the record, it has a fence of the stream that is later than the work, and an event covers it. After that the record
 * is another stream's, unless a use still names it.
 */
struct uses : rl::test_suite<uses, 2> {
    enum { ACTIVE = 1, RELEASING, CLOSING, RELEASED };

    word state, count, users, published;
    int fence_number, recorded;
    rl::var<int> record;

    void before()
    {
        store(state, ACTIVE, mo_relaxed);
        store(count, 0, mo_relaxed);
        store(users, 0, mo_relaxed);
        store(published, 0, mo_relaxed);
        fence_number = -1; /* the release came first: another stream is used, under another record */
        recorded = 0;
        record($) = 1;
    }

    void thread(unsigned index)
    {
        if (index == 0)
            use_and_free();
        else
            release_and_retire();
    }

    /* As one of these; `last`: the state after which none is counted in any more. */
    enum { GIVEN = 1, VISITOR = 1 << 16 | 1 };

    bool enter(int kind, int last)
    {
        fetch_add(users, kind, mo_seq_cst);
        if (load(state, unless(4, mo_seq_cst, mo_relaxed)) <= last)
            return true;
        fetch_add(users, -kind, mo_seq_cst);
        return false;
    }

    void use_and_free()
    {
        if (!enter(GIVEN, ACTIVE))
            return;
        if (fetch_add(count, 2, mo_seq_cst) & 1 && FAULT != 2)
            fetch_add(published, 1, mo_seq_cst);
        fetch_add(users, -1, mo_seq_cst);
        bool entered = enter(VISITOR, FAULT == 6 ? CLOSING : RELEASING);
        if (entered) {
            fence_number = fetch_add(published, 1, mo_seq_cst) + 1;
            fetch_add(users, -VISITOR, mo_seq_cst);
        } else {
            fence_number = load(published, unless(4, mo_seq_cst, mo_relaxed));
        }
        RL_ASSERT((int)record($) == 1);
        fetch_add(count, -2, mo_seq_cst);
    }

    void close()
    {
        if (fetch_or(count, 1, mo_seq_cst) > 1 && FAULT != 1)
            fetch_add(published, 1, unless(4, mo_seq_cst, mo_relaxed));
    }

    void await_given()
    {
        rl::backoff wait;
        for (;;) {
            int now = load(users, mo_seq_cst);
            if ((now & 0xffff) - (now >> 16) <= 1)
                return;
            wait.yield($);
        }
    }

    void await_visitors()
    {
        rl::backoff wait;
        while (load(users, mo_seq_cst) > 1)
            wait.yield($);
    }

    void release_and_retire()
    {
        fetch_add(users, 1, mo_seq_cst);
        if (FAULT != 3)
            close();
        store(state, RELEASING, unless(4, mo_seq_cst, mo_relaxed));
        await_given();
        store(state, CLOSING, unless(4, mo_seq_cst, mo_relaxed));
        if (FAULT == 3)
            close();
        await_visitors();
        recorded = load(published, mo_seq_cst);
        store(state, RELEASED, mo_seq_cst);
        fetch_add(users, -1, mo_seq_cst);
        if (!load(users, mo_seq_cst) && (FAULT == 5 || load(count, mo_seq_cst) < 2))
            record($) = 2;
    }

    void after()
    {
        RL_ASSERT(fence_number && fence_number <= recorded);
    }
};

static const quote uses_quotes[] = {
    {"lib/space/stream.h", "    return fetch_add_sc_u32(&stream->uses, 2) & 1;"},
    {"lib/space/stream.h", "    fetch_add_sc_u32(&stream->uses, 0 - 2u);"},
    {"lib/space/stream.c", "    if (fetch_or_sc_u32(&stream->uses, 1) > 1)\n        fence_take(stream);"},
    {"lib/space/stream.c", "        close_uses(stream);\n        store_sc_u32(&stream->state, STREAM_RELEASING);"},
    {"lib/space/stream.c", "    store_sc_u32(&stream->state, STREAM_CLOSING); /* before users is read, once more: see stream_enter_cached */\n"
                           "    await_visitors(stream);"},
    {"lib/space/stream.c", "!load_sc_u32(&stream->users) &&\n        !has_uses(stream) &&"},
    {"lib/space/use.c", "    if (!is_brief && stream_begin_use(stream))\n        fence_take(stream);"},
    {"lib/space/use.c", "        fence.number = load_sc_u64(&stream->published);"},
    {0, 0}};

/* A thread that empties a cache, the owner that lets go of it, and the record that is used again
 * (cache.c, cache_enter; front.c, detach; stream.c, retire_record). */
struct detach : rl::test_suite<detach, 3> {
    word cached, caches, count; /* cached: the cache's record, 0: none */
    rl::var<int> record;

    void before()
    {
        store(cached, 1, mo_relaxed);
        store(caches, 1, mo_relaxed);
        store(count, 0, mo_relaxed);
        record($) = 1;
    }

    void thread(unsigned index)
    {
        if (index == 0)
            enter();
        else if (index == 1)
            let_go();
        else
            retire();
    }

    void enter()
    {
        if (!load(cached, mo_seq_cst))
            return;
        fetch_add(count, 1, unless(1, mo_seq_cst, mo_relaxed));
        if (FAULT == 2 || load(cached, unless(3, mo_seq_cst, mo_relaxed)))
            RL_ASSERT((int)record($) == 1);
        fetch_add(count, -1, mo_seq_cst);
    }

    void let_go()
    {
        if (FAULT == 4)
            fetch_add(caches, -1, mo_seq_cst);
        store(cached, 0, mo_seq_cst);
        if (FAULT != 4)
            fetch_add(caches, -1, mo_seq_cst);
    }

    void retire()
    {
        bool unused = FAULT == 5 ? !load(count, mo_seq_cst) && !load(caches, mo_seq_cst)
                                 : !load(caches, mo_seq_cst) && !load(count, unless(6, mo_seq_cst, mo_relaxed));
        if (unused)
            record($) = 2; /* another stream's */
    }
};

static const quote detach_quotes[] = {
    {"lib/cache/cache.c", "    if (!stream || !stream_enter_cached(stream))\n        return NULL;\n"
                    "    if (load_sc_ptr(&cache->stream) == stream)"},
    {"lib/space/stream.c", "    stream_visit(stream);\n    enum stream_state state = load_sc_u32(&stream->state);"},
    {"lib/cache/front.c", "        store_sc_ptr(&cache->stream, NULL); /* before the count: see cache_enter */\n"
                    "        stream_end_visit(stream);\n    }\n    uint32_t caches = fetch_add_sc_u32(&stream_at("},
    {"lib/space/stream.c", "!has_caches(stream) && !load_sc_u32(&stream->users) &&"},
    {0, 0}};

/*
 * Memory is published while a thread begins to wait for some (await.h): it finds the memory, or is woken. The state is
 * a region's word; hints and their bits are other models'.
 */
struct awaited : rl::test_suite<awaited, 2> {
    word state, want, waiting, news;
    bool found;
    int seen;

    void before()
    {
        store(state, OWN, mo_relaxed);
        store(want, 0, mo_relaxed);
        store(waiting, 0, mo_relaxed);
        store(news, 0, mo_relaxed);
        found = false;
        seen = 0;
    }

    void publish()
    {
        if (FAULT == 3 && !load(waiting, mo_seq_cst))
            return store(state, FREE, mo_seq_cst);
        store(state, FREE, unless(1, mo_seq_cst, mo_release));
        if (load(waiting, unless(2, mo_seq_cst, mo_acquire)) && load(want, mo_seq_cst))
            fetch_add(news, 1, mo_acq_rel);
    }

    void enter()
    {
        cas(want, 0, 1, mo_seq_cst);
        fetch_add(waiting, 1, unless(4, mo_seq_cst, mo_acq_rel));
    }

    void begin_to_wait()
    {
        if (FAULT != 6)
            enter();
        seen = load(news, mo_acquire);
        found = load(state, unless(5, mo_seq_cst, mo_acquire)) == FREE;
        if (FAULT == 6)
            enter();
        if (FAULT == 7)
            seen = load(news, mo_acquire);
    }

    void thread(unsigned index)
    {
        if (index == 0)
            publish();
        else
            begin_to_wait();
    }

    void after() /* who has found nothing sleeps, until what it has read moves on */
    {
        RL_ASSERT(found || load(news, mo_seq_cst) != seen);
    }
};

static const quote awaited_quotes[] = {
    {"lib/space/await.c", "            !cas_sc_u64(&await->place[i].want, &nobody, units << SLOT_BITS | slot))\n"
                          "            continue;\n"
                          "        fetch_add_sc_u32(&await->waiting, 1);"},
    {"lib/space/await.c", "        uint64_t want = load_sc_u64(&await->place[i].want);"},
    {"lib/space/await.h", "    if (load_sc_u32(&await->waiting))\n        await_wake_wanting(await, units, fence);"},
    {"lib/space/region.c", "    await_published(&space->await, region.units, region.fence);"},
    {"lib/space/units.h", "        store_sc_u64(&unit->word, word);"},
    {"lib/space/hints.c", "    found->word = load_sc_u64(&unit_at(units, found->first)->word);"},
    {"lib/pool/tiers.c", "        turn_read(turn, place);\n        answer->source = find_pages("},
    {0, 0}};

/*
 * The builder leaves while the next in the queue prepares to wait (turn.c): that one sees that it is the first, or is
 * woken. `first` 1: the builder; 2: who waits.
 */
struct handed_on : rl::test_suite<handed_on, 2> {
    enum { NOWHERE, SOMEWHERE };
    rl::mutex lock;
    rl::var<int> first, at;
    word news;
    bool has_come;
    int seen;

    void before()
    {
        first($) = 1;
        at($) = NOWHERE;
        store(news, 0, mo_relaxed);
        has_come = false;
        seen = 0;
    }

    int leave()
    {
        lock.lock($);
        int woken = FAULT == 1 ? (int)at($) : NOWHERE;
        if (FAULT == 1) {
            lock.unlock($);
            lock.lock($);
        }
        first($) = 2;
        if (FAULT != 1)
            woken = at($);
        lock.unlock($);
        return woken;
    }

    void prepare()
    {
        if (FAULT != 2)
            lock.lock($);
        at($) = SOMEWHERE;
        if (FAULT != 2)
            lock.unlock($);
    }

    bool is_first()
    {
        lock.lock($);
        bool is = first($) == 2;
        lock.unlock($);
        return is;
    }

    void wait()
    {
        if (FAULT != 3)
            prepare();
        if (FAULT != 4)
            seen = load(news, mo_acquire);
        has_come = is_first();
        if (FAULT == 4)
            seen = load(news, mo_acquire);
        if (FAULT == 3)
            prepare();
    }

    void thread(unsigned index)
    {
        if (index == 1)
            wait();
        else if (leave() == SOMEWHERE && FAULT != 5)
            fetch_add(news, 1, mo_acq_rel);
    }

    void after()
    {
        RL_ASSERT(has_come || load(news, mo_seq_cst) != seen);
    }
};

static const quote handed_on_quotes[] = {
    {"lib/remap/turn.c", "    lock_take(&turn->lock);\n    place->at = at;\n    pthread_mutex_unlock(&turn->lock);"},
    {"lib/remap/turn.c", "        next = at_of(turn->first);\n"
                         "        after_next = at_of(turn->first ? turn->first->next : NULL);\n"
                         "    }\n"
                         "    pthread_mutex_unlock(&turn->lock);\n"
                         "    await_leave(turn->await, place->at);\n"
                         "    await_wake(turn->await, next);"},
    {"lib/remap/turn.c",
     "    if (ahead == NOBODY || !left)\n"
     "        return false;\n"
     "    if (ahead == MORE || !await_spin(turn->await, place->at, place->seen, TURN_SPIN_NS))\n"
     "        await_sleep(turn->await, place->at, place->seen, left);"},
    {"lib/remap/turn.c", "    do\n        turn_read(turn, place);\n    while (turn_wait(turn, place) == TURN_LOOK);"},
    {0, 0}};

/*
 * The builder answers the next in the queue while that one prepares to wait, sees that it has its answer or sleeps, or
 * finds memory itself and leaves (turn.c): what was built is one thread's, and who sleeps is woken. `serves` says that
 * the builder is at it, as turn->served does.
 */
struct served : rl::test_suite<served, 2> {
    enum { NOWHERE, SOMEWHERE };
    rl::mutex lock;
    rl::var<int> serves, is_served, at, region;
    word news;
    bool finds, has_answer, is_left;
    int seen;

    void before()
    {
        serves($) = 1;
        is_served($) = 0;
        at($) = NOWHERE;
        store(news, 0, mo_relaxed);
        finds = rl::rand(2);
        has_answer = is_left = false;
        seen = 0;
    }

    void take(int thread)
    {
        region($) = thread;
    }

    void answer()
    {
        int woken = NOWHERE;
        take(0);
        if (FAULT != 1)
            lock.lock($);
        bool given = FAULT == 2 || serves($);
        if (given) {
            if (FAULT != 3)
                is_served($) = 1;
            woken = at($);
        }
        serves($) = 0;
        if (FAULT != 1)
            lock.unlock($);
        if (woken == SOMEWHERE && FAULT != 4)
            fetch_add(news, 1, mo_acq_rel);
        if (!given)
            take(0); /* to publish it */
    }

    void prepare()
    {
        lock.lock($);
        at($) = SOMEWHERE;
        lock.unlock($);
        seen = load(news, mo_acquire);
    }

    /* As turn_withdraw, and as who_is_ahead, which leaves who serves it. */
    bool look(bool leaves)
    {
        lock.lock($);
        bool is = is_served($);
        if (leaves && FAULT != 5)
            serves($) = 0;
        lock.unlock($);
        return is;
    }

    void thread(unsigned index)
    {
        if (index == 0) {
            answer();
            return;
        }
        prepare();
        has_answer = look(finds);
        is_left = finds;
        if (has_answer)
            take(1);
    }

    void after()
    {
        bool is_given = is_served($);
        RL_ASSERT(!is_left || has_answer == is_given); /* what nobody waits for is the builder's */
        RL_ASSERT(is_left || is_given);                /* who waits has it, */
        RL_ASSERT(is_left || has_answer || load(news, mo_seq_cst) != seen);
    }
};

static const quote served_quotes[] = {
    {"lib/remap/turn.c", "    if (served && answer) {\n"
                         "        served->answer = *answer;\n"
                         "        served->is_served = true;\n"
                         "        take_out(turn, served);\n"
                         "        at = at_of(served);\n"
                         "    }\n"
                         "    turn->served = NULL;\n"
                         "    pthread_mutex_unlock(&turn->lock);\n"
                         "    await_wake(turn->await, at);"},
    {"lib/remap/turn.c", "    if (turn->served == place)\n"
                         "        turn->served = NULL;\n"
                         "    place->request.may_be_served = false;\n"
                         "    return place->is_served;"},
    {"lib/remap/turn.c", "    lock_take(&turn->lock);\n    bool is_served = end_service(turn, place);\n"
                         "    pthread_mutex_unlock(&turn->lock);"},
    {"lib/remap/turn.c", "    lock_take(&turn->lock);\n    if (!place->is_served && turn->first != place)"},
    {0, 0}};

/* Work for a reaper that goes to sleep (bell_ring; reaper.c, sleep_until_work). */
struct asleep : rl::test_suite<asleep, 2> {
    word work, sleeps, signals;
    bool slept;
    int seen;

    void before()
    {
        store(work, 0, mo_relaxed);
        store(sleeps, 0, mo_relaxed);
        store(signals, 0, mo_relaxed);
        slept = false;
    }

    void thread(unsigned index)
    {
        if (index == 0) {
            fetch_add(work, 1, unless(1, mo_seq_cst, mo_release));
            if (load(sleeps, unless(2, mo_seq_cst, mo_relaxed)))
                fetch_add(signals, 1, mo_seq_cst);
        } else {
            seen = load(signals, mo_acquire);
            store(sleeps, 1, unless(3, mo_seq_cst, mo_release));
            slept = FAULT == 5 || !load(work, unless(4, mo_seq_cst, mo_relaxed));
            if (!slept)
                store(sleeps, 0, mo_seq_cst);
        }
    }

    void after() /* who sleeps with nothing to wake it sleeps for ever */
    {
        RL_ASSERT(!slept || load(signals, mo_seq_cst) != seen);
    }
};

static const quote asleep_quotes[] = {
    {"lib/space/fence.c", "    fetch_add_sc_u32(&stream->outstanding, 1);"},
    {"lib/base/bell.h", "    if (load_sc_u32(&bell->asleep))"},
    {"lib/pool/reaper.c", "    store_sc_u32(&arena->bell.asleep, 1);\n    fence_sc();"},
    {"lib/pool/reaper.c", "    bool work = is_called(reaper);"},
    {"lib/space/stream.c", "        if (stream != but && (load_sc_u32(&stream->outstanding) || is_idle))"},
    {0, 0}};

/* The same of a pile, which Concurrency Kit pushes to with a release alone (pile_push; reaper.c, sleep_until_work). */
struct piled : rl::test_suite<piled, 2> {
    word head, sleeps;
    bool rung, slept;

    void before()
    {
        store(head, 0, mo_relaxed);
        store(sleeps, 0, mo_relaxed);
        rung = slept = false;
    }

    void thread(unsigned index)
    {
        if (index == 0) {
            cas(head, 0, 1, mo_release);
            if (FAULT != 1)
                fence(mo_seq_cst);
            rung = load(sleeps, mo_seq_cst);
        } else {
            store(sleeps, 1, mo_seq_cst);
            if (FAULT != 2)
                fence(mo_seq_cst);
            slept = !load(head, mo_relaxed);
        }
    }

    void after()
    {
        RL_ASSERT(rung || !slept);
    }
};

static const quote piled_quotes[] = {
    {"lib/base/queue.c", "    ck_pr_fence_atomic_load(); /* before bell_ring's load"},
    {"lib/base/queue.c", "    return ck_pr_load_ptr(&stack_of(pile)->head) == NULL;"},
    {"lib/pool/reaper.c", "    store_sc_u32(&arena->bell.asleep, 1);\n    fence_sc();"},
    {0, 0}};

/*
 * A record is put into the registry and found there (queue.c, object_map_put, over a relaxed store of ck_hs's, and
 * stream.c, enter_known): who finds it reads its key and counts itself in before it looks at the state.
 */
struct registered : rl::test_suite<registered, 2> {
    enum { UNUSED, ACTIVE };
    word slot, users, state;
    rl::var<int> key;

    void before()
    {
        store(slot, 0, mo_relaxed);
        store(users, 7, mo_relaxed); /* what was in the memory before */
        store(state, UNUSED, mo_relaxed);
    }

    void thread(unsigned index)
    {
        if (index == 0) {
            store(users, 0, mo_relaxed);
            key($) = 1;
            store(state, ACTIVE, mo_seq_cst);
            if (FAULT != 1)
                fence(mo_release);
            store(slot, 1, mo_relaxed);
        } else if (load(slot, unless(2, mo_acquire, mo_relaxed))) {
            RL_ASSERT((int)key($) == 1);
            RL_ASSERT(fetch_add(users, 1, mo_seq_cst) == 0);
            RL_ASSERT(load(state, mo_seq_cst) == ACTIVE);
        }
    }
};

static const quote registered_quotes[] = {
    {"lib/base/queue.c", "    ck_pr_fence_release(); /* nothing on x86-64 */"},
    {"lib/base/queue.c", "    handed_over(map);\n    writing = map;\n    bool done = ck_hs_put_unique("},
    {"lib/space/stream.c", "    store_sc_u32(&stream->state, STREAM_ACTIVE); /* pairs with enter_known's load"},
    {"lib/space/stream.c", "    fetch_add_sc_u32(&stream->users, 1);\n    if (load_sc_u32(&stream->state) == STREAM_ACTIVE"},
    {0, 0}};

/* The bit of a bin from which one thread removes the last hint while another enters one (hints.c). */
struct bits : rl::test_suite<bits, 2> {
    word count, bit;

    void before()
    {
        store(count, 1, mo_relaxed);
        store(bit, 1, mo_relaxed);
    }

    void thread(unsigned index)
    {
        if (index == 0) {
            if (FAULT == 5 && !(load(bit, mo_seq_cst) & 1))
                fetch_or(bit, 1, mo_seq_cst);
            fetch_add(count, 1, unless(1, mo_seq_cst, mo_relaxed));
            if (FAULT != 5 && !(load(bit, unless(2, mo_seq_cst, mo_relaxed)) & 1))
                fetch_or(bit, 1, mo_seq_cst);
        } else if (fetch_add(count, -1, mo_seq_cst) == 1) {
            fetch_and(bit, ~1, unless(3, mo_seq_cst, mo_relaxed));
            if (FAULT != 4 && load(count, unless(3, mo_seq_cst, mo_relaxed)))
                fetch_or(bit, 1, mo_seq_cst);
        }
    }

    void after()
    {
        RL_ASSERT(load(bit, mo_seq_cst) & 1);
    }
};

static const quote bits_quotes[] = {
    {"lib/space/hints.c", "    if (!(load_sc_u64(&hints->bits[bin / 64]) & bit))\n"
                    "        fetch_or_sc_u64(&hints->bits[bin / 64], bit);"},
    {"lib/space/hints.c",
     "    fetch_and_sc_u64(&hints->bits[bin / 64], ~bit);\n    if (load_sc_u32(&hints->count[bin]))"},
    {"lib/space/hints.c", "    fetch_add_sc_u32(&hints->count[number], 1);\n    set_bit(hints, number);"},
    {"lib/space/hints.c", "    if (fetch_add_sc_u32(&block->owner->count[number], UINT32_MAX) == 1)"},
    {0, 0}};

/* Fronts, tallies and blocks of hints: pushed by several, walked by others (front.c, stats.c, hints.c). */
struct pushed : rl::test_suite<pushed, 3> {
    word first;
    rl::var<int> next[3], content[3]; /* by number; 0: the end */

    void before()
    {
        store(first, 0, mo_relaxed);
    }

    void thread(unsigned index)
    {
        if (index < 2) {
            int self = (int)index + 1;
            content[self]($) = self;
            for (;;) {
                int seen = load(first, mo_relaxed);
                next[self]($) = seen;
                if (cas(first, seen, self, unless(1, mo_acq_rel, mo_relaxed)))
                    return;
            }
        }
        int found = 0;
        for (int i = load(first, unless(2, mo_acquire, mo_relaxed)); i; i = next[i]($))
            found += (int)content[i]($);
        RL_ASSERT(found <= 3);
    }
};

static const quote pushed_quotes[] = {
    {"lib/cache/front.c",
     "    while (!cas_acq_rel_ptr(&fronts->first, &first, front)); /* pairs with each acquire of `first` */"},
    {"lib/base/stats.c",
     "    while (!cas_acq_rel_ptr(&stats->tallies, &first, tally)); /* pairs with the acquire in add_tallies */"},
    {"lib/space/hints.c",
     "    while (!cas_acq_rel_ptr(&bin->first, &first, fresh)); /* pairs with the acquire of every walk */"},
    {0, 0}};

/* A record of a stream is made; others find it by its number, or by how many there are (stream.c, record_new). */
struct records : rl::test_suite<records, 3> {
    word segment, record, slots;
    rl::var<int> zeroed, content; /* of the segment, and of the record */

    void before()
    {
        store(segment, 0, mo_relaxed);
        store(record, 0, mo_relaxed);
        store(slots, 1, mo_relaxed);
    }

    void record_new()
    {
        zeroed($) = 1;
        store(segment, 1, unless(1, mo_release, mo_relaxed));
        content($) = 7;
        store(record, 1, unless(2, mo_release, mo_relaxed));
        store(slots, 2, unless(3, mo_release, mo_relaxed));
    }

    /* The number may be one of which this thread has only heard: then it sees no record, or a whole one. */
    bool stream_seen()
    {
        if (!load(segment, unless(4, mo_acquire, mo_relaxed)))
            return false;
        RL_ASSERT(zeroed($) == 1);
        if (!load(record, unless(5, mo_acquire, mo_relaxed)))
            return false;
        RL_ASSERT(content($) == 7);
        return true;
    }

    void thread(unsigned index)
    {
        if (index == 0)
            record_new();
        else if (index == 1)
            stream_seen();
        else if (load(slots, unless(6, mo_acquire, mo_relaxed)) > 1)
            RL_ASSERT(stream_seen());
    }
};

static const quote records_quotes[] = {
    {"lib/space/stream.c", "    store_release_ptr(place, segment); /* pairs with stream_seen's acquire */"},
    {"lib/space/stream.c", "    store_release_ptr(&segment->record[slot % STREAMS_A_SEGMENT], stream);"},
    {"lib/space/stream.c", "    store_release_u32(&streams->slots, slot + 1);"},
    {"lib/space/stream.h",
     "    const struct stream_segment *segment = load_acquire_ptr(&streams->segment[slot / STREAMS_A_SEGMENT]);\n"
     "    return segment ? load_acquire_ptr(&segment->record[slot % STREAMS_A_SEGMENT]) : NULL;"},
    {0, 0}};

/* ---- */

static const model models[] = {
    {"neighbours", 5, holds_in_all<neighbours>, neighbours_quotes},
    {"passed_meanwhile", 5, holds_in_all<passed_meanwhile>, passed_quotes},
    {"noted", 5, holds_in_all<noted>, noted_quotes},
    {"moved", 2, holds_in_all<moved>, moved_quotes},
    {"hit", 4, holds_in_all<hit>, hit_quotes},
    {"completion", 6, holds_in_all<completion>, completion_quotes},
    {"marked_again", 4, holds_in_all<marked_again>, again_quotes},
    {"waiters", 5, holds_in_all<waiters>, waiters_quotes},
    {"left", 4, holds_in_all<left>, left_quotes},
    {"closed", 6, holds_in_all<closed>, closed_quotes},
    {"marking", 4, holds_in_all<marking>, marking_quotes},
    {"users", 5, holds_in_all<users>, users_quotes},
    {"uses", 6, holds_in_all<uses>, uses_quotes},
    {"detach", 6, holds_in_all<detach>, detach_quotes},
    {"awaited", 7, holds_in_all<awaited>, awaited_quotes},
    {"handed_on", 5, holds_in_all<handed_on>, handed_on_quotes},
    {"served", 5, holds_in_all<served>, served_quotes},
    {"asleep", 5, holds_in_all<asleep>, asleep_quotes},
    {"piled", 2, holds_in_all<piled>, piled_quotes},
    {"registered", 2, holds_in_all<registered>, registered_quotes},
    {"bits", 5, holds_in_all<bits>, bits_quotes},
    {"pushed", 2, holds_in_all<pushed>, pushed_quotes},
    {"records", 6, holds_in_all<records>, records_quotes},
};

static bool stands_in_the_library(const quote &quoted)
{
    std::ifstream file((std::string(VPMM_SOURCE_DIR "/") + quoted.file).c_str());
    std::stringstream text;
    text << file.rdbuf();
    if (text.str().find(quoted.text) != std::string::npos)
        return true;
    std::printf("  %s no longer has: %s\n", quoted.file, quoted.text);
    return false;
}

static bool check(const model &model)
{
    bool good = true;
    for (const quote *quoted = model.quotes; quoted->file; quoted++)
        good &= stands_in_the_library(*quoted);
    for (FAULT = 0; FAULT <= model.faults; FAULT++)
        if (model.holds() != (FAULT == 0)) {
            std::printf(FAULT ? "  fault %d is not found\n" : "  does not hold\n", FAULT);
            good = false;
        }
    std::printf("%s: %s, %d faults\n", model.name, good ? "holds" : "FAILED", model.faults);
    return good;
}

int main(int argc, char **argv)
{
    bool good = true, any = false;
    for (const model &model : models) {
        if (argc > 1 && !std::strcmp(argv[1], "--list")) {
            std::printf("%s\n", model.name);
            any = true;
        } else if (argc < 2 || !std::strcmp(argv[1], model.name)) {
            good &= check(model);
            any = true;
        }
    }
    return good && any ? 0 : 1;
}
