#!/usr/bin/env python3
"""Measures what scrapes of the metrics do to a malloc and free pair.

Runs vpmm-pairs of BUILD_DIR twice a round: once without metrics at all, and once with --metrics-port while this process
asks for /metrics at the rate, so that the ratio holds all that metrics cost. Which of the two is first changes from
round to round. Each run is a new process with a new pool, and times a quarter of a second. The rate achieved is that of
the answers that show the pool, from the first to the last.

This process is the scraper. It asks for text, without gzip, over one connection that is kept alive, and opens a new one
where the exporter has closed it, which it does after 10 s. A scrape that comes late is made up for at once. Printed are
the medians of ns_per_pair with their quartiles, the ratio of the medians, and the scrapes a second: the rounds' median,
and the worst.

The scraper takes up to a core, and the exporter's thread a part of another: have two more than --threads, and nothing
else running, or what is measured is how a full machine shares its cores. Where the quartiles lie further apart than the
limit, take more rounds, or a quieter machine. The pool is configured by the VPMM_* environment variables.
"""
import argparse
import http.client
import json
import math
import os
import re
import statistics
import subprocess
import sys
import time

EXIT_BAD, EXIT_USAGE = 1, 2
EPILOG = """exit status: 0 the ratio is at most the limit; 1 it is above, or less than --least of the rate was
achieved, or a run failed; 2 wrong usage, or nothing can be run.

example: stress/scrapes.py build --threads 4 --rounds 15"""


class Failure(Exception):
    """What to tell, and the exit status."""

    def __init__(self, words, status=EXIT_BAD):
        super().__init__(words)
        self.status = status


def number(kind, least, most):
    """A type for argparse that says what is allowed."""

    def parse(text):
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"'{text}': a number from {least} to {most} is allowed")
        return value

    return parse


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, epilog=EPILOG,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", metavar="BUILD_DIR", help="where vpmm-pairs was built, with the exporter")
    parser.add_argument("--driver", choices=("sim", "cuda"), default="sim",
                        help="the simulated GPU (default), or a real one")
    parser.add_argument("--rate", metavar="N", type=number(float, 1, 20000), default=1000,
                        help="scrapes a second (default 1000)")
    parser.add_argument("--rounds", metavar="N", type=number(int, 1, 10000), default=11,
                        help="runs of each kind (default 11, about 15 s)")
    parser.add_argument("--threads", metavar="T", type=number(int, 1, 1024), default=1,
                        help="measured threads (default 1)")
    parser.add_argument("--pattern", choices=("pair", "window", "handoff"), default="pair",
                        help="of vpmm-pairs (default pair); see its --help")
    parser.add_argument("--limit", metavar="R", type=number(float, 0.5, 1000), default=1.02,
                        help="the largest ratio that is well (default 1.02)")
    parser.add_argument("--least", metavar="R", type=number(float, 0, 1), default=0.9,
                        help="of the rate, for the ratio to say anything (default 0.9)")
    return parser.parse_args()


# ---- the scraper ----


class Scraper:
    """Asks at the rate for as long as the program runs."""

    def __init__(self, port, rate):
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        self.interval = 1 / rate
        self.seen = []  # when the pool was shown

    def scrape(self):
        """False: the connection is no more; the next call opens a new one."""
        try:
            self.connection.request("GET", "/metrics")
            reply = self.connection.getresponse()
            body = reply.read()
        except (OSError, http.client.HTTPException):
            self.connection.close()
            return False
        if reply.status != 200:
            raise Failure(f"the exporter answers {reply.status} {reply.reason}: {body.decode(errors='replace')}")
        if b'pool="pairs"' in body:
            self.seen.append(time.monotonic())
        return True

    def run(self, program):
        due = time.monotonic()
        while True:
            if not self.scrape() and program.poll() is not None:
                break
            due += self.interval
            time.sleep(max(0, due - time.monotonic()))
        self.connection.close()

    def rate(self):
        if len(self.seen) < 2:
            return 0
        return (len(self.seen) - 1) / (self.seen[-1] - self.seen[0])


# ---- runs ----


def metrics_port(program):
    """The port that the program prints first; a program that ends without it has said why."""
    words = []
    for line in program.stderr:
        found = re.match(r"metrics: port (\d+) of ", line)
        if found:
            return int(found.group(1))
        words.append(line)
    raise Failure("".join(words).strip() or "vpmm-pairs does not say where its metrics are", EXIT_USAGE)


def run_pairs(arguments, scraped):
    """(ns a pair, scrapes a second or None)"""
    command = [os.path.join(arguments.build, "vpmm-pairs"), "--driver", arguments.driver,
               "--threads", str(arguments.threads), "--pattern", arguments.pattern, "--no-p99", "--json", "-"]
    if scraped:
        command += ["--metrics-port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        try:
            rate = None
            if scraped:
                scraper = Scraper(metrics_port(program), arguments.rate)
                scraper.run(program)
            out, words = program.communicate()
        except BaseException:
            program.kill()
            raise
    if program.returncode != 0:
        raise Failure(f"{' '.join(command)} ends with {program.returncode}:\n{words.strip()}",
                      EXIT_USAGE if program.returncode == EXIT_USAGE else EXIT_BAD)
    if scraped:
        rate = scraper.rate()
    return json.loads(out)["ns_per_pair"], rate


def run_rounds(arguments):
    """ns a pair without, ns a pair with, scrapes a second; an item a round"""
    without, scraped, rates = [], [], []
    for i in range(arguments.rounds):
        for with_scrapes in (False, True) if i % 2 == 0 else (True, False):
            ns, rate = run_pairs(arguments, with_scrapes)
            (scraped if with_scrapes else without).append(ns)
            if with_scrapes:
                rates.append(rate)
    return without, scraped, rates


# ---- what it comes to ----


def spread(values):
    """The median, and the quartiles where there are enough."""
    words = f"{statistics.median(values):9.1f}"
    if len(values) >= 4:
        low, _, high = statistics.quantiles(values, n=4)
        words += f"  ({low:.1f} to {high:.1f})"
    return words


def report(arguments, without, scraped, rates):
    """Prints the figures; true if all is well."""
    ratio = statistics.median(scraped) / statistics.median(without)
    achieved = statistics.median(rates)
    print(f"--driver {arguments.driver} --threads {arguments.threads} --pattern {arguments.pattern}, "
          f"{arguments.rounds} rounds: medians (quartiles)")
    print(f"ns a pair, without metrics {spread(without)}")
    print(f"ns a pair, scraped         {spread(scraped)}")
    print(f"ratio                      {ratio:11.3f}  (limit {arguments.limit:g})")
    print(f"scrapes a second           {achieved:9.1f}  (worst round {min(rates):.1f}, asked for {arguments.rate:g})")
    enough = max(rates) > 0 and achieved >= arguments.least * arguments.rate
    if not max(rates):
        print("FAILED: the pool was not scraped twice in a round: raise --rate")
    elif not enough:
        print(f"FAILED: the scraper achieved less than {arguments.least:.0%} of the rate: free a core, or lower --rate")
    elif ratio > arguments.limit:
        print("FAILED: the ratio is above the limit: see whether the quartiles are further apart than that, and --help")
    return enough and ratio <= arguments.limit


def main():
    arguments = parse_arguments()
    program = os.path.join(arguments.build, "vpmm-pairs")
    try:
        if not os.access(program, os.X_OK):
            raise Failure(f"{program} is not there: build it with  cmake -S . -B {arguments.build} && "
                          f"cmake --build {arguments.build}", EXIT_USAGE)
        return 0 if report(arguments, *run_rounds(arguments)) else EXIT_BAD
    except Failure as failure:
        print(f"scrapes.py: {failure}", file=sys.stderr)
        return failure.status
    except KeyboardInterrupt:
        return EXIT_BAD


if __name__ == "__main__":
    sys.exit(main())
