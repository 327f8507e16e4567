#!/usr/bin/env python3
"""Draws what a server under PyTorch held over time: from the --samples of pytorch_server.py, one run of each allocator
with the same number of workers, to an SVG file. Needs matplotlib.

example: stress/plot_held.py samples.csv held.svg
"""
import argparse
import collections
import csv

GIB = 1 << 30
NAMES = {"native": "PyTorch's caching allocator", "expandable": "expandable segments", "async": "cudaMallocAsync",
         "vpmm": "vpmm behind CUDAPluggableAllocator", "vpmm_torch": "vpmm_torch"}
COLORS = {"native": "tab:red", "expandable": "tab:orange", "async": "tab:blue", "vpmm": "tab:olive",
          "vpmm_torch": "tab:green"}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("samples")
    parser.add_argument("picture")
    args = parser.parse_args()
    import matplotlib  # here, so that --help needs nothing
    matplotlib.use("svg")
    import matplotlib.pyplot as plt
    runs, workers = collections.defaultdict(list), set()
    with open(args.samples, encoding="utf-8", newline="") as file:
        for allocator, number, seconds, held, in_use in csv.reader(file):
            runs[allocator].append((float(seconds), int(held) / GIB, int(in_use) / GIB))
            workers.add(int(number))
    plt.rcParams.update({"svg.hashsalt": "vpmm", "svg.fonttype": "none", "font.size": 9, "axes.spines.top": False,
                         "axes.spines.right": False})
    figure, axes = plt.subplots(figsize=(8, 3.6), layout="constrained")
    for allocator in (name for name in NAMES if name in runs):
        seconds, held, in_use = zip(*runs[allocator])
        axes.plot(seconds, held, color=COLORS[allocator], linewidth=1.4, label=NAMES[allocator])
        axes.plot(seconds, in_use, color=COLORS[allocator], linewidth=0.6, alpha=0.5)
    axes.set(xlabel="seconds", ylabel="GiB held (thin: in use)", ylim=(0, None), xlim=(0, None),
             title=f"A Llama server under PyTorch, {workers.pop()} workers, one H200")
    axes.legend(frameon=False, loc="upper left", fontsize=8)
    figure.savefig(args.picture, metadata={"Date": None})


if __name__ == "__main__":
    main()
