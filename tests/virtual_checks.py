#!/usr/bin/env python3
"""usage: tests/virtual_checks.py BUILD_DIR

Four threads replay examples/requests.csv at once in virtual time (vpmm-virtual). A run repeats itself to the byte, and
what they make anew hardly ever lay in another one's hands: they take turns, and who was built for runs soon. On the
default stream, which all of them share then, they hold as much. Exit status: 0 if all of it holds.
"""
import json
import os
import subprocess
import sys

ROOT = os.path.abspath(__file__).rsplit(os.sep, 2)[0]
HELD_AT_MOST = 1.2  # mapped over in use, at their highest; without turns it is 1.4
IN_HANDS_AT_MOST = 0.05  # of what is made meanwhile; without turns it is 0.65 and 1
DEFAULT_HELD_MORE = {"1": 0.02, "4": 0.1}  # on the default stream, at most, by so many threads; one whose requests
# do not take what it has freed there before they wait for others, 0.03


def run(program, threads, *options):
    trace = os.path.join(ROOT, "examples", "requests.csv")
    command = [program, "--threads", threads, "--passes", "3", "--lag", "100", "--json", "-", *options, trace]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout


def check_default_stream(program, threads):
    other, on_default = run(program, threads), run(program, threads, "--default-stream")
    held, held_on_default = (json.loads(said)[-1]["held_in_use"] for said in (other, on_default))
    good = on_default != other and abs(held_on_default - held) <= DEFAULT_HELD_MORE[threads]
    if not good:
        print(f"{threads} threads held {held_on_default} on the default stream, and {held} without it")
    return good


def main():
    program = os.path.join(sys.argv[1], "vpmm-virtual")
    first, second = run(program, "4"), run(program, "4")
    if first != second:
        print("two runs say two different things:", first.decode(), second.decode(), sep="\n")
        return 1
    for one_pass in json.loads(first):
        made = one_pass["malloc_calls"]["created_bytes"]
        if one_pass["missed"]["hands"] > IN_HANDS_AT_MOST * made or one_pass["held_in_use"] > HELD_AT_MOST:
            print(f"more than {IN_HANDS_AT_MOST} of what was made lay in other threads' hands meanwhile, or held more "
                  f"than {HELD_AT_MOST}: {one_pass}")
            return 1
    return 0 if all(check_default_stream(program, threads) for threads in DEFAULT_HELD_MORE) else 1


if __name__ == "__main__":
    sys.exit(main())
