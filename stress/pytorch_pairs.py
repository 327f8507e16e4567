#!/usr/bin/env python3
"""What a malloc and a free cost over PyTorch's allocators, called from C++ by many threads: no interpreter, no lock of it.

Each thread has a stream of its own and the device's context, and allocates and frees one size, over and over. For each
number of threads and each size it prints nanoseconds a pair, wall-clock time * threads / pairs, what a thread waits for
one pair: the best and the median of the rounds. One process measures one allocator:

  native      PyTorch's caching allocator            expandable  the same with expandable segments
  async       its cudaMallocAsync back end           vpmm_torch  lib/torch, installed or on PYTHONPATH

The C++ part is built when it is first run, by torch.utils.cpp_extension: with a C++ compiler and ninja.
"""
import argparse
import json
import os
import statistics

ALLOCATORS = {"native": None, "expandable": "expandable_segments:True", "async": "backend:cudaMallocAsync",
              "vpmm_torch": None}
UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}

SOURCE = """
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

/* Nanoseconds that one of `threads` threads waits for a pair, of each round. */
std::vector<double> pairs(int threads, int64_t bytes, int rounds, int64_t pairs_a_round) {
  pybind11::gil_scoped_release no_interpreter;
  auto* allocator = c10::cuda::CUDACachingAllocator::get();
  std::atomic<int> ready{0}, begun{0}, done{0};
  auto run = [&](int64_t n) {
    for (int64_t i = 0; i < n; i++)
      allocator->raw_delete(allocator->raw_alloc(static_cast<size_t>(bytes)));
  };
  auto work = [&] {
    c10::cuda::set_device(0, true);
    cudaFree(nullptr);
    c10::cuda::setCurrentCUDAStream(c10::cuda::getStreamFromPool());
    run(1000);
    for (int round = 0; round < rounds; round++) {
      ready++;
      while (begun.load() <= round) {
      }
      run(pairs_a_round);
      done++;
    }
  };
  std::vector<std::thread> running;
  for (int i = 0; i < threads; i++)
    running.emplace_back(work);
  std::vector<double> took;
  for (int round = 1; round <= rounds; round++) {
    while (ready.load() < threads * round)
      std::this_thread::yield();
    auto begin = std::chrono::steady_clock::now();
    begun++;
    while (done.load() < threads * round)
      std::this_thread::yield();
    std::chrono::duration<double, std::nano> time = std::chrono::steady_clock::now() - begin;
    took.push_back(time.count() / static_cast<double>(pairs_a_round));
  }
  for (std::thread& thread : running)
    thread.join();
  return took;
}
"""


def size(text):
    unit = UNITS.get(text[-1:].upper())
    return int(text[:-1]) * unit if unit else int(text)


def options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--allocator", choices=ALLOCATORS, default="native", help="see above (default native)")
    parser.add_argument("--threads", default="1,4,16", help="numbers of threads (default 1,4,16)")
    parser.add_argument("--bytes", default="1K,2M", help="sizes, with K, M or G (default 1K,2M)")
    parser.add_argument("--rounds", type=int, default=7, help="of each (default 7)")
    parser.add_argument("--pairs", type=int, default=5000, help="of each thread in a round (default 5000)")
    parser.add_argument("--json", action="store_true", help="one JSON array in place of the lines")
    return parser.parse_args()


def main():
    args = options()
    if ALLOCATORS[args.allocator]:
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = os.environ["PYTORCH_ALLOC_CONF"] = ALLOCATORS[args.allocator]
    import torch
    from torch.utils import cpp_extension
    if args.allocator == "vpmm_torch":
        import vpmm_torch
        vpmm_torch.enable()
    torch.zeros(1, device="cuda")
    native = cpp_extension.load_inline("vpmm_pytorch_pairs", SOURCE, functions=["pairs"], with_cuda=True)
    results = []
    for threads in map(int, args.threads.split(",")):
        for text in args.bytes.split(","):
            took = native.pairs(threads, size(text), args.rounds, args.pairs)
            results.append({"allocator": args.allocator, "threads": threads, "bytes": size(text),
                            "best_ns": round(min(took)), "median_ns": round(statistics.median(took))})
            if not args.json:
                print("{allocator:<10} {threads:>3} threads {bytes:>11} bytes: best {best_ns} ns a pair, median "
                      "{median_ns}".format(**results[-1]), flush=True)
    if args.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
