#include "threads.h"

#include <algorithm>
#include <bitset>
#include <mutex>

namespace vpmm_torch {

__thread size_t number_of_thread = NOT_NUMBERED;

/* Never destroyed: threads end, and tensors are freed, after the program's own destructors. */
struct Numbers {
  std::mutex lock;
  std::bitset<THREADS> taken; // under it
  std::atomic<size_t> above{0};
};

static Numbers& numbers() {
  static auto* made = new Numbers;
  return *made;
}

static size_t take_number() {
  Numbers& all = numbers();
  std::lock_guard<std::mutex> guard(all.lock);
  for (size_t number = 0; number < THREADS; number++)
    if (!all.taken[number]) {
      all.taken[number] = true;
      all.above.store(std::max(all.above.load(), number + 1));
      return number;
    }
  return NO_NUMBER;
}

static void leave_number(size_t number) {
  std::lock_guard<std::mutex> guard(numbers().lock);
  numbers().taken[number] = false;
}

/* At the thread's end; what it frees after that is not by its number any more. */
struct LeavesNumber {
  ~LeavesNumber() {
    size_t number = number_of_thread;
    number_of_thread = NO_NUMBER;
    if (number < THREADS)
      leave_number(number);
  }
};

size_t number_thread() {
  thread_local LeavesNumber leaves;
  (void)leaves;
  return number_of_thread = take_number();
}

/* At the thread's end. */
struct Life {
  const std::shared_ptr<std::atomic<bool>> goes_on = std::make_shared<std::atomic<bool>>(true);

  ~Life() {
    goes_on->store(false);
  }
};

std::shared_ptr<const std::atomic<bool>> this_thread_lives() {
  thread_local Life life;
  return life.goes_on;
}

size_t threads_numbered() {
  return numbers().above.load();
}

} // namespace vpmm_torch
