#!/usr/bin/env python3
"""Measures what the placement policy's rules are worth: memory held, and time taken, by one thread and by many.

Runs vpmm-virtual of BUILD_DIR over each trace on the simulated GPU, in virtual time, at three scales of the sizes (0.6,
1 and 1.4), each four times on one pool. Printed is a row for each number of threads, each replaying a copy of the trace:
dense, that is with next to no time between the calls, and at the traces' own pace with a GPU 300 us behind.

  held      highest mapped over highest in use since the pool's creation, after the first pass and after the fourth: the
            mean of all traces and scales; and the highest of all
  driver    ms of calls that change mappings in mallocs, first pass / fourth pass: the mean; and in the background
  longest   malloc, with all that it waits for, ms, first pass / fourth pass: the mean; and the highest of all
  built     of 1,000 mallocs, in the fourth pass

The rules and their constants are at the head of lib/remap/policy.c. To see what one is worth, run this, change the
constant or take the rule out, build, run this again, and compare the rows. The same build prints the same rows. The
pool is configured by the VPMM_* environment variables.
"""
import argparse
import concurrent.futures
import json
import os
import queue
import statistics
import subprocess
import sys

EXIT_BAD, EXIT_USAGE = 1, 2
SCALES = [0.6, 1, 1.4]
PASSES = 4
DENSE, LAGGING = [], ["--pace", "--lag", "300"]
ROWS = {"1, dense": (1, DENSE), "4, dense": (4, DENSE), "16, dense": (16, DENSE),
        "1, lagging": (1, LAGGING), "4, lagging": (4, LAGGING), "16, lagging": (16, LAGGING)}
EPILOG = """exit status: 0 all was measured; 1 a replay failed; 2 wrong usage, or nothing can be run.

example: stress/policy.py build examples/requests.csv"""


processors = queue.SimpleQueue()
for number in os.sched_getaffinity(0):
    processors.put(number)


class Failure(Exception):
    """What to tell, and the exit status."""

    def __init__(self, words, status=EXIT_BAD):
        super().__init__(words)
        self.status = status


def numbers_of_threads(text):
    allowed = sorted({threads for threads, _ in ROWS.values()})
    if not set(text.split(",")) <= set(map(str, allowed)):
        raise argparse.ArgumentTypeError(f"'{text}': of {', '.join(map(str, allowed))} some, separated by commas")
    return [int(n) for n in text.split(",")]


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, epilog=EPILOG,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", metavar="BUILD_DIR", help="where vpmm-virtual was built")
    parser.add_argument("traces", metavar="TRACE", nargs="+", help="a CSV file: see stress/README.md")
    parser.add_argument("--rows", metavar="N,...", type=numbers_of_threads, default=[1, 4, 16],
                        help="only the rows of these numbers of threads, of 1, 4 and 16")
    parser.add_argument("--json", action="store_true", help="an object with the rows, and those of each trace alone")
    return parser.parse_args()


# ---- runs ----


def replay(build, trace, scale, threads, options):
    """What vpmm-virtual says of each pass. Of its threads one at a time goes on, which is quickest on one processor."""
    processor = processors.get()
    try:
        return replay_on(processor, build, trace, scale, threads, options)
    finally:
        processors.put(processor)


def replay_on(processor, build, trace, scale, threads, options):
    command = [os.path.join(build, "vpmm-virtual"), "--json", "-", "--passes", str(PASSES), "--threads", str(threads),
               "--scale", str(scale), *options, "--", trace]
    done = subprocess.run(command, capture_output=True, text=True, check=False,
                          preexec_fn=lambda: os.sched_setaffinity(0, {processor}))
    if done.returncode != 0:
        raise Failure(f"{' '.join(command)} ends with {done.returncode}:\n{done.stderr.strip()}",
                      EXIT_USAGE if done.returncode == EXIT_USAGE else EXIT_BAD)
    return json.loads(done.stdout)


def run_row(arguments, threads, options):
    """For each trace its runs, one at each scale, of which each is a list of passes."""
    jobs = [(arguments.build, trace, scale, threads, options) for trace in arguments.traces for scale in SCALES]
    with concurrent.futures.ThreadPoolExecutor(processors.qsize()) as pool:
        runs = list(pool.map(lambda job: replay(*job), jobs))
    return [runs[i * len(SCALES):(i + 1) * len(SCALES)] for i in range(len(arguments.traces))]


# ---- what it comes to ----


def row_of(runs):
    """The figures of some runs."""
    first, last = [run[0] for run in runs], [run[-1] for run in runs]

    def mean(of, figure):
        return statistics.mean(map(figure, of))

    return {"held_first": mean(first, lambda r: r["held_in_use"]), "held": mean(last, lambda r: r["held_in_use"]),
            "held_highest": max(r["held_in_use"] for run in runs for r in run),
            "driver_first_ms": mean(first, lambda r: r["malloc_calls"]["us"] / 1e3),
            "driver_ms": mean(last, lambda r: r["malloc_calls"]["us"] / 1e3),
            "background_first_ms": mean(first, lambda r: r["background_calls"]["us"] / 1e3),
            "background_ms": mean(last, lambda r: r["background_calls"]["us"] / 1e3),
            "longest_first_ms": mean(first, lambda r: r["malloc_max_us"] / 1e3),
            "longest_ms": mean(last, lambda r: r["malloc_max_us"] / 1e3),
            "longest_highest_ms": max(r["malloc_max_us"] / 1e3 for run in runs for r in run),
            "built_of_1000": 1000 * sum(r["builds"] for r in last) / sum(r["mallocs"] for r in last)}


def print_head():
    print(f"{'threads':12}{'held: first':>12}{'fourth':>8}{'highest':>9}{'driver ms':>15}{'background ms':>15}"
          f"{'longest ms':>14}{'highest':>9}{'built':>7}")


def print_row(name, r):
    print(f"{name:12}{r['held_first']:12.3f}{r['held']:8.3f}{r['held_highest']:9.2f}"
          f"{r['driver_first_ms']:9.1f}{r['driver_ms']:6.1f}{r['background_first_ms']:9.1f}{r['background_ms']:6.1f}"
          f"{r['longest_first_ms']:8.2f}{r['longest_ms']:6.2f}{r['longest_highest_ms']:9.1f}{r['built_of_1000']:7.2f}",
          flush=True)


def measure(arguments):
    said = {"rows": {}, "traces": {}}
    if not arguments.json:
        print_head()
    for name, (threads, options) in ROWS.items():
        if threads not in arguments.rows:
            continue
        runs = run_row(arguments, threads, options)
        said["rows"][name] = row_of([run for of_trace in runs for run in of_trace])
        said["traces"][name] = {trace: row_of(of_trace) for trace, of_trace in zip(arguments.traces, runs)}
        if not arguments.json:
            print_row(name, said["rows"][name])
    if arguments.json:
        print(json.dumps(said, indent=1))


def main():
    arguments = parse_arguments()
    program = os.path.join(arguments.build, "vpmm-virtual")
    try:
        if not os.access(program, os.X_OK):
            raise Failure(f"{program} is not there: build it with  cmake -S . -B {arguments.build} && "
                          f"cmake --build {arguments.build} --target vpmm-virtual", EXIT_USAGE)
        measure(arguments)
        return 0
    except Failure as failure:
        print(f"policy.py: {failure}", file=sys.stderr)
        return failure.status
    except KeyboardInterrupt:
        return EXIT_BAD


if __name__ == "__main__":
    sys.exit(main())
