#!/usr/bin/python3
"""Draws what Prometheus has seen of vpmm as a picture: the dashboard in small, for where no Grafana is.

usage: draw.py PROMETHEUS_URL SECONDS OUT.png

The latest SECONDS of all pools together. Needs python3-matplotlib. The picture in exporter/README.md is of
  vpmm-server --metrics-port 9435 --seconds 60
scraped each half second.
"""
import json
import sys
import time
import urllib.parse
import urllib.request

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

URL, SECONDS, OUT = sys.argv[1], float(sys.argv[2]), sys.argv[3]
POINTS = 120
END = time.time()
STEP = SECONDS / POINTS
WINDOW = f"[{max(2, SECONDS / 20):.0f}s]"
GIB = 1 << 30


def ask(expr, label=""):
    """{label's value: numbers over time}; what is missing is NaN."""
    query = urllib.parse.urlencode({"query": expr, "start": END - SECONDS, "end": END, "step": STEP})
    with urllib.request.urlopen(f"{URL}/api/v1/query_range?{query}", timeout=30) as reply:
        result = json.load(reply)["data"]["result"]
    series = {}
    for one in result:
        line = np.full(POINTS + 1, np.nan)
        for at, number in one["values"]:
            line[min(POINTS, round((at - END + SECONDS) / STEP))] = float(number)
        series[one["metric"].get(label, "")] = line
    return series


def level(metric):
    return next(iter(ask(f"sum({metric})").values()), np.zeros(POINTS + 1)) / GIB


def stack(axis, times, lines, unit):
    names = [name for name in lines if np.nanmax(lines[name], initial=0) > 0]
    axis.stackplot(times, [np.nan_to_num(lines[name]) for name in names], labels=names, alpha=0.8)
    axis.set_ylabel(unit)
    axis.legend(loc="lower right", fontsize=7)


def draw_heat_map(axis, times):
    buckets = ask(f"sum by (le) (rate(vpmm_malloc_duration_seconds_bucket{WINDOW}))", "le")
    edges = sorted((float(le), line) for le, line in buckets.items())
    counts = np.diff(np.array([np.nan_to_num(line) for _, line in edges]), axis=0, prepend=0)[:-1]
    rows = [le * 1e6 for le, _ in edges[:-1]]
    axis.pcolormesh(times, rows, np.where(counts > 0, counts, np.nan), cmap="Oranges", shading="nearest",
                    norm=matplotlib.colors.LogNorm(vmin=0.1, vmax=max(1, counts.max())))
    axis.set_yscale("log", base=2)
    axis.set_ylim(rows[0], 32768)
    axis.set_ylabel("µs")


def main():
    times = np.linspace(0, SECONDS, POINTS + 1)
    figure, axes = plt.subplots(2, 2, figsize=(10, 5.4), sharex=True)
    composition, tiers, heat, driver = axes.flat
    slabs = level("vpmm_slab_bytes")
    stack(composition, times, {"live": level("vpmm_live_bytes") - slabs, "cut for small requests": slabs,
                               "reusable": level("vpmm_reusable_bytes"),
                               "driver's pool": level("vpmm_async_bytes")}, "GiB")
    composition.set_title("memory held", fontsize=9)
    stack(tiers, times, ask(f"sum by (tier) (rate(vpmm_mallocs_total{WINDOW}))", "tier"), "per second")
    tiers.set_title("mallocs, by the tier that served them", fontsize=9)
    draw_heat_map(heat, times)
    heat.set_title("latency of mallocs that asked the driver", fontsize=9)
    stack(driver, times, ask(f"sum by (call) (rate(vpmm_driver_calls_total{{call=~\"cuMem(Create|Map|Unmap|Release|"
                             f"SetAccess)\"}}{WINDOW}))", "call"), "per second")
    driver.set_title("driver calls that map and unmap", fontsize=9)
    for axis in (heat, driver):
        axis.set_xlabel("seconds")
    figure.tight_layout()
    figure.savefig(OUT, dpi=90)


if __name__ == "__main__":
    main()
