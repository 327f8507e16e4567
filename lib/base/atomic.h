/*
 * atomic.h - every atomic operation of the library, its memory order in its name.
 *
 * One header for all of them, so that ThreadSanitizer sees each acquire and release, and so that a test can put a
 * scheduling point before each (schedule.h).
 *
 * A release store names, where it stands, the acquire load that it pairs with.
 */
#ifndef VPMM_LIB_ATOMIC_H
#define VPMM_LIB_ATOMIC_H

#include "base/schedule.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define VPMM_DEFINE_ATOMIC(type, suffix)                                                                               \
    /* For assertions, and for what nobody changes meanwhile: relaxed, and no point of a schedule. */                  \
    static inline type peek_##suffix(const _Atomic(type) *p)                                                           \
    {                                                                                                                  \
        return atomic_load_explicit((_Atomic(type) *)p, memory_order_relaxed);                                         \
    }                                                                                                                  \
    /* For what says nothing to anyone before another store: relaxed, and no point of a schedule. */                   \
    static inline void poke_##suffix(_Atomic(type) *p, type v)                                                         \
    {                                                                                                                  \
        atomic_store_explicit(p, v, memory_order_relaxed);                                                             \
    }                                                                                                                  \
    static inline type load_relaxed_##suffix(const _Atomic(type) *p)                                                   \
    {                                                                                                                  \
        vpmm_schedule_point(p, false);                                                                                 \
        return atomic_load_explicit((_Atomic(type) *)p, memory_order_relaxed);                                         \
    }                                                                                                                  \
    static inline type load_acquire_##suffix(const _Atomic(type) *p)                                                   \
    {                                                                                                                  \
        vpmm_schedule_point(p, false);                                                                                 \
        return atomic_load_explicit((_Atomic(type) *)p, memory_order_acquire);                                         \
    }                                                                                                                  \
    static inline type load_sc_##suffix(const _Atomic(type) *p)                                                        \
    {                                                                                                                  \
        vpmm_schedule_point(p, false);                                                                                 \
        return atomic_load_explicit((_Atomic(type) *)p, memory_order_seq_cst);                                         \
    }                                                                                                                  \
    static inline void store_relaxed_##suffix(_Atomic(type) *p, type v)                                                \
    {                                                                                                                  \
        vpmm_schedule_point(p, true);                                                                                  \
        atomic_store_explicit(p, v, memory_order_relaxed);                                                             \
    }                                                                                                                  \
    static inline void store_release_##suffix(_Atomic(type) *p, type v)                                                \
    {                                                                                                                  \
        vpmm_schedule_point(p, true);                                                                                  \
        atomic_store_explicit(p, v, memory_order_release);                                                             \
    }                                                                                                                  \
    static inline void store_sc_##suffix(_Atomic(type) *p, type v)                                                     \
    {                                                                                                                  \
        vpmm_schedule_point(p, true);                                                                                  \
        atomic_store_explicit(p, v, memory_order_seq_cst);                                                             \
    }                                                                                                                  \
    /* Success: acquire and release. Failure: relaxed, *expected is the value found. Never fails spuriously. */        \
    static inline bool cas_acq_rel_##suffix(_Atomic(type) *p, type *expected, type desired)                            \
    {                                                                                                                  \
        vpmm_schedule_point(p, true);                                                                                  \
        return atomic_compare_exchange_strong_explicit(p, expected, desired, memory_order_acq_rel,                     \
                                                       memory_order_relaxed);                                          \
    }                                                                                                                  \
    static inline bool cas_sc_##suffix(_Atomic(type) *p, type *expected, type desired)                                 \
    {                                                                                                                  \
        vpmm_schedule_point(p, true);                                                                                  \
        return atomic_compare_exchange_strong_explicit(p, expected, desired, memory_order_seq_cst,                     \
                                                       memory_order_seq_cst);                                          \
    }                                                                                                                  \
    static inline type exchange_relaxed_##suffix(_Atomic(type) *p, type v)                                             \
    {                                                                                                                  \
        vpmm_schedule_point(p, true);                                                                                  \
        return atomic_exchange_explicit(p, v, memory_order_relaxed);                                                   \
    }                                                                                                                  \
    static inline type exchange_acq_rel_##suffix(_Atomic(type) *p, type v)                                             \
    {                                                                                                                  \
        vpmm_schedule_point(p, true);                                                                                  \
        return atomic_exchange_explicit(p, v, memory_order_acq_rel);                                                   \
    }                                                                                                                  \
    static inline type exchange_sc_##suffix(_Atomic(type) *p, type v)                                                  \
    {                                                                                                                  \
        vpmm_schedule_point(p, true);                                                                                  \
        return atomic_exchange_explicit(p, v, memory_order_seq_cst);                                                   \
    }

#define VPMM_DEFINE_ATOMIC_ARITHMETIC(type, suffix)                                                                    \
    static inline type fetch_add_relaxed_##suffix(_Atomic(type) *p, type v)                                            \
    {                                                                                                                  \
        vpmm_schedule_point(p, true);                                                                                  \
        return atomic_fetch_add_explicit(p, v, memory_order_relaxed);                                                  \
    }                                                                                                                  \
    static inline type fetch_sub_relaxed_##suffix(_Atomic(type) *p, type v)                                            \
    {                                                                                                                  \
        vpmm_schedule_point(p, true);                                                                                  \
        return atomic_fetch_sub_explicit(p, v, memory_order_relaxed);                                                  \
    }                                                                                                                  \
    static inline type fetch_add_acq_rel_##suffix(_Atomic(type) *p, type v)                                            \
    {                                                                                                                  \
        vpmm_schedule_point(p, true);                                                                                  \
        return atomic_fetch_add_explicit(p, v, memory_order_acq_rel);                                                  \
    }                                                                                                                  \
    static inline type fetch_add_sc_##suffix(_Atomic(type) *p, type v)                                                 \
    {                                                                                                                  \
        vpmm_schedule_point(p, true);                                                                                  \
        return atomic_fetch_add_explicit(p, v, memory_order_seq_cst);                                                  \
    }                                                                                                                  \
    static inline type fetch_or_sc_##suffix(_Atomic(type) *p, type v)                                                  \
    {                                                                                                                  \
        vpmm_schedule_point(p, true);                                                                                  \
        return atomic_fetch_or_explicit(p, v, memory_order_seq_cst);                                                   \
    }                                                                                                                  \
    static inline type fetch_and_sc_##suffix(_Atomic(type) *p, type v)                                                 \
    {                                                                                                                  \
        vpmm_schedule_point(p, true);                                                                                  \
        return atomic_fetch_and_explicit(p, v, memory_order_seq_cst);                                                  \
    }                                                                                                                  \
    /* Raises *p to at least v. Lock-free: a failed exchange means that another thread raised it. */                   \
    static inline void raise_relaxed_##suffix(_Atomic(type) *p, type v)                                                \
    {                                                                                                                  \
        type seen = load_relaxed_##suffix(p);                                                                          \
        vpmm_schedule_point(p, true);                                                                                  \
        while (seen < v &&                                                                                             \
               !atomic_compare_exchange_weak_explicit(p, &seen, v, memory_order_relaxed, memory_order_relaxed))        \
            ;                                                                                                          \
    }

/*
 * Between a sequentially consistent store and a later load of what others store plainly. x86-64 orders the two as they
 * are; on aarch64 the store is ordered with later sequentially consistent loads alone. ThreadSanitizer knows no fences:
 * under it there is the processor's, where there has to be one.
 */
static inline void fence_sc(void)
{
#ifndef VPMM_TSAN
    atomic_thread_fence(memory_order_seq_cst);
#elif defined __aarch64__
    __asm__ volatile("dmb ish" ::: "memory");
#endif
}

VPMM_DEFINE_ATOMIC(uint64_t, u64)
VPMM_DEFINE_ATOMIC_ARITHMETIC(uint64_t, u64)
VPMM_DEFINE_ATOMIC(uint32_t, u32)
VPMM_DEFINE_ATOMIC_ARITHMETIC(uint32_t, u32)
VPMM_DEFINE_ATOMIC(uint16_t, u16)
VPMM_DEFINE_ATOMIC(void *, ptr)

/*
 * Adds where the calling thread is the only writer, and others read: no more than a load and a store. x86-64 has both
 * in one instruction, which compilers do not use for atomics.
 */
static inline void add_alone_u64(_Atomic(uint64_t) *p, uint64_t v)
{
    vpmm_schedule_point(p, true);
#if defined __x86_64__ && !defined VPMM_TSAN
    __asm__("addq %1, %0" : "+m"(*p) : "er"(v) : "cc");
#else
    atomic_store_explicit(p, atomic_load_explicit(p, memory_order_relaxed) + v, memory_order_relaxed);
#endif
}

/* The same, and what is there then. */
static inline uint64_t advance_alone_u64(_Atomic(uint64_t) *p, uint64_t v)
{
    vpmm_schedule_point(p, true);
#if defined __x86_64__ && !defined VPMM_TSAN
    __asm__("addq %1, %0\n\tmovq %0, %1" : "+&r"(v), "+m"(*p) : : "cc");
#else
    v += atomic_load_explicit(p, memory_order_relaxed);
    atomic_store_explicit(p, v, memory_order_relaxed);
#endif
    return v;
}

/* Whether v, of two numbers with signs, is above what is there, relaxed: no more than a comparison with memory. */
static inline bool above_relaxed_u64(uint64_t v, const _Atomic(uint64_t) *p)
{
    vpmm_schedule_point(p, false);
#if defined __x86_64__ && !defined VPMM_TSAN
    bool above;
    __asm__("cmpq %2, %1" : "=@ccg"(above) : "r"(v), "m"(*p));
    return above;
#else
    return (int64_t)v > (int64_t)atomic_load_explicit((_Atomic(uint64_t) *)p, memory_order_relaxed);
#endif
}

#endif
