/*
 * counts.cpp - what statistics.h promises of peaks, with threads whose lanes are added up: exact by one thread, and
 * short by a thousandth at most by several.
 */
#include "../../src/statistics.h"
#include "pytorch.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <mutex>
#include <random>
#include <system_error>
#include <thread>
#include <vector>

using c10::CachingDeviceAllocator::DeviceStats;
using vpmm_torch::Statistics;

static const size_t STAT_TYPES = 3, SMALL = 1, LARGE = 2;

/* What a single counter under a lock has counted. */
struct Truth {
  std::array<int64_t, STAT_TYPES> level{}, peak{}, count{}, peak_count{};

  void change(size_t block, int64_t sign) {
    for (size_t pool : {size_t{0}, block <= 1 << 20 ? SMALL : LARGE}) {
      level[pool] += sign * static_cast<int64_t>(block);
      count[pool] += sign;
      peak[pool] = std::max(peak[pool], level[pool]);
      peak_count[pool] = std::max(peak_count[pool], count[pool]);
    }
  }

  void reset_peaks() {
    peak = level;
    peak_count = count;
  }
};

static bool is_near(int64_t told, int64_t peak, int64_t slack) {
  return told <= peak && told >= peak - peak / 1024 - slack;
}

static void compare(Statistics& statistics, const Truth& truth, bool is_exact) {
  DeviceStats out;
  statistics.write(out);
  for (size_t pool = 0; pool < STAT_TYPES; pool++) {
    REQUIRE(out.allocated_bytes[pool].current == truth.level[pool]);
    REQUIRE(out.allocation[pool].current == truth.count[pool]);
    REQUIRE(!is_exact || out.allocated_bytes[pool].peak == truth.peak[pool]);
    REQUIRE(!is_exact || out.allocation[pool].peak == truth.peak_count[pool]);
    REQUIRE(is_near(out.allocated_bytes[pool].peak, truth.peak[pool], 1));
    REQUIRE(is_near(out.allocation[pool].peak, truth.peak_count[pool], 1));
  }
}

/* Adds and takes at random, one thread at a time, so that there is one truth; frees what any of them has allocated. */
static void count_by(unsigned threads, bool is_exact) {
  Statistics statistics;
  Truth truth;
  std::mutex lock;
  std::vector<size_t> live;
  std::mt19937 random(threads);
  auto step = [&] {
    std::lock_guard<std::mutex> guard(lock);
    bool grows = live.empty() || random() % 100 < (live.size() < 200 ? 60 : 40);
    size_t block = grows ? 512 * (1 + random() % (random() % 4 ? 2048 : 65536)) : live[random() % live.size()];
    if (grows) {
      live.push_back(block);
      statistics.add(block - random() % 512, block);
    } else {
      live.erase(std::find(live.begin(), live.end(), block));
      statistics.take(block, block);
    }
    truth.change(block, grows ? 1 : -1);
    if (random() % 500 == 0) {
      compare(statistics, truth, is_exact);
      statistics.reset_peaks();
      truth.reset_peaks();
    }
  };
  std::vector<std::thread> all;
  for (unsigned i = 0; i < threads; i++)
    all.emplace_back([&] {
      for (int n = 0; n < 4000; n++)
        step();
    });
  for (std::thread& thread : all)
    thread.join();
  compare(statistics, truth, is_exact);
}

/* All at once: nothing is lost. */
static void count_at_once(unsigned threads) {
  Statistics statistics;
  std::vector<std::thread> all;
  for (unsigned i = 0; i < threads; i++)
    all.emplace_back([&] {
      for (int n = 0; n < 4000; n++) {
        statistics.add(1000, 1024);
        statistics.add(2 << 20, 2 << 20);
        statistics.take(1000, 1024);
        statistics.take(2 << 20, 2 << 20);
      }
      statistics.add(3 << 20, 3 << 20);
    });
  for (std::thread& thread : all)
    thread.join();
  DeviceStats out;
  statistics.write(out);
  const int64_t each = 3 << 20, last = threads * each;
  REQUIRE(out.allocation[0].current == threads && out.allocated_bytes[LARGE].current == last);
  REQUIRE(out.allocation[SMALL].current == 0 && out.allocation[SMALL].allocated == 4000 * threads);
  REQUIRE(out.allocated_bytes[0].peak >= last && out.allocation[0].peak <= 2 * threads);
}

/* Since the reset it is one thread, whoever was the last to look before. */
static void count_alone_after_a_reset() {
  Statistics statistics;
  Truth truth;
  auto add = [&](size_t block) {
    statistics.add(block, block);
    truth.change(block, 1);
  };
  add(1 << 30);
  std::thread([&] { add(300 << 10); }).join();
  statistics.reset_peaks();
  truth.reset_peaks();
  for (size_t n = 1; n <= 100; n++) {
    add(512 * n);
    compare(statistics, truth, true);
  }
}

/* Memory goes from thread to thread while it is counted: it is seen once, or not at all. */
static void count_hand_overs() {
  enum { ROUNDS = 20000, AT_MOST = 2 };
  Statistics statistics;
  std::atomic<int> live{0};
  std::atomic<bool> is_over{false};
  std::thread taker([&] {
    while (!is_over || live)
      if (live) {
        statistics.take(1000, 1024);
        live--;
      }
  });
  std::thread adder([&] {
    for (int i = 0; i < ROUNDS; i++) {
      while (live == AT_MOST)
        std::this_thread::yield();
      statistics.add(1000, 1024);
      live++;
    }
    is_over = true;
  });
  while (!is_over) {
    DeviceStats out;
    statistics.write(out);
    const auto& count = out.allocation[0];
    REQUIRE(0 <= count.current && count.current <= AT_MOST + 1 && count.peak <= AT_MOST + 1); // one is being counted
  }
  adder.join();
  taker.join();
}

/* What a thread frees as it ends, when its number has gone already, is counted too. */
static void count_at_end() {
  struct Last {
    Statistics* statistics = nullptr;
    ~Last() {
      if (!statistics)
        return;
      REQUIRE(vpmm_torch::thread_number() == vpmm_torch::NO_NUMBER);
      statistics->take(1000, 1024);
      statistics->add(2 << 20, 2 << 20);
    }
  };
  Statistics statistics;
  for (int i = 0; i < 3; i++)
    std::thread([&] {
      static thread_local Last last; // made before the thread has a number, and so destroyed after it has gone
      last.statistics = &statistics;
      REQUIRE(vpmm_torch::thread_number() < vpmm_torch::threads_numbered());
      statistics.add(1000, 1024);
    }).join();
  DeviceStats out;
  statistics.write(out);
  REQUIRE(out.allocation[SMALL].current == 0 && out.allocation[SMALL].allocated == 3);
  REQUIRE(out.allocation[LARGE].current == 3 && out.allocation[0].peak == 3);
}

/* More threads at once than there are numbers, one after the other; as many as the machine lets there be. */
static void count_by_more_than_are_numbered() {
  Statistics statistics;
  std::mutex lock;
  unsigned counted = 0, numbered = 0; // under it
  std::atomic<bool> over{false};
  auto count_and_wait = [&] {
    {
      std::lock_guard<std::mutex> guard(lock);
      numbered += vpmm_torch::thread_number() != vpmm_torch::NO_NUMBER;
      statistics.add(1000, 1024);
      counted++;
    }
    while (!over)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
  };
  std::vector<std::thread> all;
  try {
    while (all.size() < vpmm_torch::THREADS + 8)
      all.emplace_back(count_and_wait);
  } catch (const std::system_error&) { // no more threads
  }
  auto have_all_counted = [&] {
    std::lock_guard<std::mutex> guard(lock);
    return counted == all.size();
  };
  while (!have_all_counted())
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  over = true;
  for (std::thread& thread : all)
    thread.join();
  DeviceStats out;
  statistics.write(out);
  REQUIRE(numbered == std::min(all.size(), vpmm_torch::THREADS - 1)); // this thread has one, too
  REQUIRE(out.allocation[0].current == counted && is_near(out.allocation[0].peak, counted, 1));
}

void check_counts() {
  count_by(1, true);
  for (unsigned threads : {2, 4, 80})
    count_by(threads, false);
  count_alone_after_a_reset();
  count_at_once(4);
  count_hand_overs();
  count_at_end();
  count_by_more_than_are_numbered();
}
