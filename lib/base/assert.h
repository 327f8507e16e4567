/*
 * assert.h - what must hold where memory changes hands, looked at while the program runs.
 *
 * vpmm_assert(condition) ends the process with the condition, the file and the line, in a build with
 * VPMM_DEBUG_CHECKS; any other build compiles the condition and does not evaluate it. It is for what a caller inside
 * the library owes, and for what a change of owner leaves behind. What a program may do wrong is answered with an
 * error, never with this.
 *
 * A condition reads shared fields by peek_ (atomic.h), which is no point of a schedule: a build with assertions
 * explores the same schedules as one without. A condition holds at each moment in which its thread may look: a field
 * that another thread may change is part of one only if no change makes it false.
 *
 * Walks of whole structures cost more than the calls that they check, and are behind VPMM_DEBUG_WALKS.
 */
#ifndef VPMM_LIB_ASSERT_H
#define VPMM_LIB_ASSERT_H

#ifdef VPMM_DEBUG_CHECKS
enum { VPMM_ASSERTS = 1 };
#else
enum { VPMM_ASSERTS = 0 };
#endif

#ifdef VPMM_DEBUG_WALKS
enum { VPMM_WALKS = 1 };
#else
enum { VPMM_WALKS = 0 };
#endif

_Noreturn void assert_failed(const char *condition, const char *file, int line);

#define vpmm_assert(condition)                                                                                         \
    do {                                                                                                               \
        if (VPMM_ASSERTS && !(condition))                                                                              \
            assert_failed(#condition, __FILE__, __LINE__);                                                             \
    } while (0)

/* Of a condition that walks a whole structure. */
#define vpmm_assert_walk(condition)                                                                                    \
    do {                                                                                                               \
        if (VPMM_WALKS && !(condition))                                                                                \
            assert_failed(#condition, __FILE__, __LINE__);                                                             \
    } while (0)

#endif
