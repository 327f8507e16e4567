/*
 * model.hpp - what the models of hand-overs share.
 *
 * Relacy runs a model's threads in many orders and lets every load read each value that C++11's memory model allows it.
 * A model has the library's operations under the library's names, with the library's memory orders; `quote` names the
 * lines that it was taken from, and a model whose lines are no longer in the library fails: so an order that is changed
 * there must be changed here, and shown to be enough.
 *
 * FAULT 0 is the library as it is, which must hold. Each other number weakens one order or leaves one step out, and
 * Relacy must find what comes of it: a model that could not fail would show nothing.
 */
#ifndef VPMM_TESTS_RELACY_MODEL_HPP
#define VPMM_TESTS_RELACY_MODEL_HPP

#include <relacy/relacy.hpp>

typedef rl::atomic<int> word;
using rl::mo_acq_rel;
using rl::mo_acquire;
using rl::mo_relaxed;
using rl::mo_release;
using rl::mo_seq_cst;
typedef rl::memory_order order;

#define load(p, mo)         (p).load((mo), $)
#define store(p, v, mo)     (p).store((v), (mo), $)
#define exchange(p, v, mo)  (p).exchange((v), (mo), $)
#define fetch_add(p, v, mo) (p).fetch_add((v), (mo), $)
#define fetch_or(p, v, mo)  (p).fetch_or((v), (mo), $)
#define fetch_and(p, v, mo) (p).fetch_and((v), (mo), $)
#define fence(mo)           rl::atomic_thread_fence((mo), $)

/* *expected stays as it is, unlike the library's: models do not use what was found. */
#define cas(p, expected, v, mo) compare((p), (expected), (v), (mo), $)
static inline bool compare(word &p, int expected, int v, order mo, rl::debug_info_param info)
{
    order failed = mo == mo_seq_cst ? mo_seq_cst : mo_relaxed;
    return p.compare_exchange_strong(expected, v, mo, info, failed, info);
}

extern int FAULT;

/* Which of two orders: the library's, or the weaker one if this is the fault. */
#define unless(fault, right, weaker) (FAULT == (fault) ? (weaker) : (right))

struct quote {
    const char *file, *text;
};

struct model {
    const char *name;
    int faults;
    bool (*holds)();
    const quote *quotes; /* ends with {0, 0} */
};

/* Every order of the threads with up to so many switches, and then many random ones. */
template <typename suite> static bool holds_in_all()
{
    for (int random = 0; random < 2; random++) {
        rl::test_params params;
        rl::ostringstream said;
        params.output_stream = params.progress_stream = &said;
        params.search_type = random ? rl::sched_random : rl::sched_bound;
        params.context_bound = 3;
        params.iteration_count = random ? 20000 : 200000;
        if (!rl::simulate<suite>(params))
            return false;
    }
    return true;
}

#endif
