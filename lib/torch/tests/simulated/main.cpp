/*
 * main.cpp - the back end's tests, on a simulated GPU.
 *
 *     simulated [THREADS [STEPS [SEED]]]    random.cpp's threads
 *     simulated cases [NAME...]             those of cases.cpp, in that order
 *     simulated cases --list                their names
 *     simulated cases --shuffled SEED       all of them, in an order of its own
 */
#include "pytorch.h"

#include <cstring>
#include <exception>

extern "C" const char* vpmm_torch_enable(void);

/* In the place of an allocator that has a MemPool without memory, and a memory fraction. */
static Back& enable_after_another() {
  const MempoolId_t former = {0, 77};
  uint64_t retained = vpmm_sim_calls(simulated.sim, "cuDevicePrimaryCtxRetain");
  torch_former_holds(1 << 20);
  REQUIRE(std::strstr(vpmm_torch_enable(), "before the first CUDA tensor"));
  torch_former_holds(0);
  torch_former_records(true);
  REQUIRE(std::strstr(vpmm_torch_enable(), "before _record_memory_history"));
  torch_former_records(false);
  torch_former_has(former);
  torch_former_allows(0.5);
  REQUIRE(!vpmm_torch_enable() && !vpmm_torch_enable());
  Back& back = *c10::cuda::CUDACachingAllocator::get();
  REQUIRE(back.initialized() && back.name() == "vpmm");
  REQUIRE(back.getMemoryFraction(0) == 0.5);
  REQUIRE(back.getPoolUseCount(0, former) == 1);
  back.releasePool(0, former);
  back.emptyCache(former);
  REQUIRE(back.getPoolUseCount(0, former) == 0);
  REQUIRE(vpmm_sim_calls(simulated.sim, "cuDevicePrimaryCtxRetain") == retained); // no device was asked for anything
  back.setMemoryFraction(1, 0);
  return back;
}

/* What they say of segments is of such pages. */
static Back& open_for_cases() {
  setenv("VPMM_PAGE_SIZE", "2M", 1);
  torch_open();
  DRIVE(cuCtxSetCurrent(simulated.context));
  return enable_after_another();
}

/* Says which case it is: no exception passes a thread that it has begun. */
[[noreturn]] static void end_by_exception() {
  std::fprintf(stderr, "%s: an exception that nobody has caught\n", what_runs ? what_runs : "");
  __gnu_cxx::__verbose_terminate_handler();
  std::abort();
}

static int cases(const std::vector<std::string>& arguments) {
  if (arguments == std::vector<std::string>{"--list"})
    list_cases();
  else if (arguments.size() == 2 && arguments[0] == "--shuffled")
    run_shuffled_cases(open_for_cases(), std::stoull(arguments[1]));
  else
    run_cases(open_for_cases(), arguments);
  return 0;
}

int main(int count, char** arguments) {
  std::set_terminate(end_by_exception);
  if (count > 1 && !std::strcmp(arguments[1], "cases"))
    return cases({arguments + 2, arguments + count});
  int threads = count > 1 ? std::atoi(arguments[1]) : 4, steps = count > 2 ? std::atoi(arguments[2]) : 2000;
  uint64_t seed = count > 3 ? std::strtoull(arguments[3], nullptr, 0) : 1;
  torch_open();
  DRIVE(cuCtxSetCurrent(simulated.context));
  Back& back = enable_after_another();
  back.allocate(4).clear(); // the thread has a number, which counts
  back.emptyCache({0, 0});
  check_counts();
  run_threads(back, threads, steps, seed);
  return 0;
}
