/*
 * cases.cpp - what PyTorch expects of its allocator, one case after the other, by one thread: before random.cpp's
 * threads begin. Each leaves nothing behind.
 */
#include "pytorch.h"

#include <string>
#include <utility>
#include <vector>

static const size_t SMALL = 1, LARGE = 2; // c10's StatType

static void refuses(Back& back) {
  std::string why;
  try {
    back.allocate(size_t{1} << 50);
  } catch (const c10::OutOfMemoryError& error) {
    why = error.what();
  }
  REQUIRE(why.find("CUDA out of memory. Tried to allocate 1048576.00 GiB. GPU 0 has a total capacity of") == 0);
  REQUIRE(back.allocate(0).get() == nullptr);
}

/* In steps of 512 bytes, those of up to 1 MiB as small. */
static void counts_blocks(Back& back) {
  const std::pair<size_t, size_t> cases[] = {{1, 512}, {512, 512}, {513, 1024}, {1 << 20, 1 << 20},
                                             {(1 << 20) + 1, (1 << 20) + 512}, {3 << 20, 3 << 20}};
  back.resetAccumulatedStats(0);
  int64_t requested = 0, block = 0;
  for (auto [bytes, expected] : cases) {
    c10::DataPtr memory = back.allocate(bytes);
    auto stats = back.getDeviceStats(0);
    size_t pool = expected <= 1 << 20 ? SMALL : LARGE;
    for (size_t i : {size_t{0}, pool}) {
      REQUIRE(stats.requested_bytes[i].current == static_cast<int64_t>(bytes));
      REQUIRE(stats.allocated_bytes[i].current == static_cast<int64_t>(expected));
      REQUIRE(stats.active_bytes[i].current == static_cast<int64_t>(expected));
      REQUIRE(stats.allocation[i].current == 1 && stats.active[i].current == 1);
    }
    REQUIRE(stats.allocation[SMALL + LARGE - pool].current == 0);
    requested += static_cast<int64_t>(bytes);
    block += static_cast<int64_t>(expected);
  }
  auto stats = back.getDeviceStats(0);
  REQUIRE(stats.allocated_bytes[0].current == 0 && stats.allocated_bytes[0].allocated == block);
  REQUIRE(stats.allocated_bytes[0].freed == block && stats.requested_bytes[0].allocated == requested);
  REQUIRE(stats.allocation[0].allocated == 6 && stats.allocation[SMALL].allocated == 4);
  back.resetPeakStats(0);
  back.resetAccumulatedStats(0);
  stats = back.getDeviceStats(0);
  REQUIRE(stats.allocated_bytes[0].peak == 0 && stats.allocated_bytes[0].allocated == 0);
  REQUIRE(stats.allocated_bytes[0].freed == 0);
}

/* roundup_power2_divisions: to the next part of the power of two below. */
static void rounds_up_as_the_settings_say(Back& back) {
  const size_t MIB = 1 << 20;
  const struct {
    size_t parts, bytes, block;
  } cases[] = {{4, 84 * MIB, 96 * MIB}, {8, 84 * MIB, 88 * MIB}, {2, 400 * MIB, 512 * MIB}, {1, 84 * MIB, 84 * MIB},
               {4, 64 * MIB, 64 * MIB}, {4, 1000, 1024},         {4, 2048, 2048},           {4, 2049, 2560}};
  for (auto [parts, bytes, block] : cases) {
    settings.roundup_power2_divisions = parts;
    c10::DataPtr memory = back.allocate(bytes);
    settings.roundup_power2_divisions = 0;
    auto stats = back.getDeviceStats(0);
    REQUIRE(stats.requested_bytes[0].current == static_cast<int64_t>(bytes));
    REQUIRE(stats.allocated_bytes[0].current == static_cast<int64_t>(block));
    REQUIRE(stats.reserved_bytes[0].current >= static_cast<int64_t>(block));
    memory.clear();
    REQUIRE(back.getDeviceStats(0).allocated_bytes[0].current == 0);
  }
}

void check_cases(Back& back) {
  refuses(back);
  counts_blocks(back);
  rounds_up_as_the_settings_say(back);
  back.emptyCache({0, 0});
}
