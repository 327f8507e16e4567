/*
 * threads.h - a small number for each thread that allocates or frees, by which it finds what is its own in a table.
 *
 *   number   0 .. THREADS - 1, the lowest that no running thread has. A thread that ends leaves its number, with whatever
 *            is in the tables there, to a later one: what it wrote happens before that
 *   others   have NO_NUMBER: a thread whose number has gone already, because it frees as it ends, and those that come
 *            while THREADS have one. They share what is theirs. A thread whose first call comes from a pthread key's
 *            destructor, as it ends, leaves its number to nobody
 */
#ifndef VPMM_TORCH_THREADS_H
#define VPMM_TORCH_THREADS_H

#include <atomic>
#include <cstddef>
#include <memory>

namespace vpmm_torch {

constexpr size_t THREADS = 1024;
constexpr size_t NO_NUMBER = THREADS;

/* The calling thread's once it has asked, in a place that costs no call to find. */
constexpr size_t NOT_NUMBERED = NO_NUMBER + 1;
extern __thread size_t number_of_thread __attribute__((visibility("hidden"), tls_model("initial-exec")));

size_t number_thread();

inline size_t thread_number() {
  size_t number = number_of_thread;
  return number != NOT_NUMBERED ? number : number_thread();
}

/* Above each number that there was. */
size_t threads_numbered();

/* Whether the calling thread still runs, for others to look at. */
std::shared_ptr<const std::atomic<bool>> this_thread_lives();

} // namespace vpmm_torch

#endif
