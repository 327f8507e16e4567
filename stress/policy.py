#!/usr/bin/env python3
"""Measures what the placement policy's rules are worth: memory held, and driver time of mallocs, over traces.

Runs vpmm-replay of BUILD_DIR over the traces on the simulated GPU, with requests of at least 2 MiB, each trace twice on
one pool, at nine scales of the sizes in equal steps (0.6, 0.7125, ... 1.5): dense, and at the traces' own pace. Printed
is a row of each:

  held     peak mapped over peak in use of the first pass, from an empty pool: the mean of all traces and scales, the
           mean over the scales of the worst trace, and the highest of all
  cold     driver time of all mallocs of the first pass, ms: the sum over the traces, mean over the scales
  warm     that of the second pass
  longest  the longest driver time of one malloc in both passes, ms

The driver time is what the calls were measured to cost on an H200. The rules and their constants are at the head of
lib/remap/policy.c. To see what one is worth, run this, change the constant or take the rule out, build, run this again,
and compare the rows. Held moves by less than 0.001 from run to run, and a time by some per cent, because idle caches go
by the host's clock. The pool is configured by the VPMM_* environment variables.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys

EXIT_BAD, EXIT_USAGE = 1, 2
SCALES = [0.6 + 0.1125 * i for i in range(9)]
KINDS = {"dense": [], "paced": ["--pace"]}
EPILOG = """exit status: 0 all was measured; 1 a replay failed; 2 wrong usage, or nothing can be run.

example: stress/policy.py build examples/requests.csv"""


class Failure(Exception):
    """What to tell, and the exit status."""

    def __init__(self, words, status=EXIT_BAD):
        super().__init__(words)
        self.status = status


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, epilog=EPILOG,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", metavar="BUILD_DIR", help="where vpmm-replay was built")
    parser.add_argument("traces", metavar="TRACE", nargs="+", help="a CSV file: see stress/README.md")
    parser.add_argument("--json", action="store_true", help="an object with the rows, and those of each trace alone")
    return parser.parse_args()


# ---- runs ----


def replay(arguments, scale, options):
    """What vpmm-replay says of each trace and pass, in the traces' order."""
    command = [os.path.join(arguments.build, "vpmm-replay"), "--driver", "sim", "--json", "-", "--min-bytes", "2M",
               "--scale", f"{scale:.4f}", *options, "--", *arguments.traces]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Failure(f"{' '.join(command)} ends with {done.returncode}:\n{done.stderr.strip()}",
                      EXIT_USAGE if done.returncode == EXIT_USAGE else EXIT_BAD)
    return json.loads(done.stdout)


def run_all(arguments, options):
    """A list for each trace: its replays, two passes at each scale."""
    runs = [[] for _ in arguments.traces]
    for scale in SCALES:
        said = replay(arguments, scale, options)
        for i, of_trace in enumerate(runs):
            of_trace += said[2 * i:2 * i + 2]
    return runs


# ---- what it comes to ----


def times(replays, number):
    """Driver time of the mallocs of one pass, ms: the mean over the scales."""
    return statistics.mean(r["driver_us_malloc"] / 1000 for r in replays if r["pass"] == number)


def row_of(runs):
    """The figures of some traces."""
    held = [[r["held_ratio"] for r in replays if r["pass"] == 1] for replays in runs]
    means = [statistics.mean(of_trace) for of_trace in held]
    return {"held": statistics.mean(means), "held_worst_trace": max(means), "held_highest": max(map(max, held)),
            "cold_ms": sum(times(replays, 1) for replays in runs),
            "warm_ms": sum(times(replays, 2) for replays in runs),
            "longest_ms": max(r["driver_us_malloc_max"] / 1000 for replays in runs for r in replays)}


def print_table(rows):
    print(f"{'':8}{'held: mean':>11}{'worst trace':>13}{'highest':>9}{'cold ms':>9}{'warm ms':>9}{'longest ms':>12}")
    for kind, row in rows.items():
        print(f"{kind:8}{row['held']:11.4f}{row['held_worst_trace']:13.4f}{row['held_highest']:9.4f}"
              f"{row['cold_ms']:9.2f}{row['warm_ms']:9.2f}{row['longest_ms']:12.2f}")


def print_json(rows, runs):
    each = {kind: {replays[0]["trace"]: row_of([replays]) for replays in runs[kind]} for kind in runs}
    print(json.dumps({"rows": rows, "traces": each}, indent=1))


def main():
    arguments = parse_arguments()
    program = os.path.join(arguments.build, "vpmm-replay")
    try:
        if not os.access(program, os.X_OK):
            raise Failure(f"{program} is not there: build it with  cmake -S . -B {arguments.build} && "
                          f"cmake --build {arguments.build} --target vpmm-replay", EXIT_USAGE)
        runs = {kind: run_all(arguments, options) for kind, options in KINDS.items()}
        rows = {kind: row_of(of_kind) for kind, of_kind in runs.items()}
        if arguments.json:
            print_json(rows, runs)
        else:
            print_table(rows)
        return 0
    except Failure as failure:
        print(f"policy.py: {failure}", file=sys.stderr)
        return failure.status
    except KeyboardInterrupt:
        return EXIT_BAD


if __name__ == "__main__":
    sys.exit(main())
