#!/usr/bin/env bash
set -euo pipefail

usage() {
  cat <<'EOT'
usage: stress/instructions.sh BUILD_DIR [LIMIT [BYTES]]

Counts the instructions of a malloc and free pair: vpmm-pairs of BUILD_DIR under valgrind's callgrind on the simulated
GPU, with N and with 2 N pairs; the difference over N is one pair's, free of start, warm-up and end. For
VPMM_STREAMS=trusted and checked, and with 0 and 1,000 further streams known to the pool. Other VPMM_* settings are
taken from the environment. There is no reaper: valgrind runs one thread at a time, so that one that allocates all the
time looks idle to it.

  total    all instructions within vpmm_malloc and vpmm_free
  library  without those of the simulated driver and what it calls: what runs on a real GPU beside the driver's own

BYTES is what is allocated: 2M by default; 1K is a slice of a slab.

Exit status: 0 the library's are at most LIMIT (default 240) in each case; 1 more; 2 wrong usage, or it cannot be run.
A build with a sanitizer cannot: valgrind does not run it.
EOT
}

case ${1:-} in
--help | -h)
  usage
  exit 0
  ;;
esac
if [ $# -lt 1 ] || [ $# -gt 3 ] || [[ ! ${2:-240} =~ ^[0-9]+$ ]]; then
  usage >&2
  exit 2
fi
program=$1/vpmm-pairs
limit=${2:-240}
bytes=${3:-2M}
pairs=10000 # N: many more than caches and windows need to fill

stop() {
  echo "instructions.sh: $*" >&2
  exit 2
}

[ -x "$program" ] || stop "$program is not there: build it with  cmake -S . -B $1 && cmake --build $1"
command -v valgrind >/dev/null 2>&1 || stop "valgrind is missing; as root:  apt-get install valgrind"

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# count <pairs> <streams known>: prints "<total> <simulator>". Collection is on within the two calls alone. A driver
# call enters the simulator by a trampoline, slot_<n>_<entry>, and by nothing else, so the inclusive costs of the calls
# of trampolines are all that the simulator took, with what it calls of libc.
count() {
  local out=$scratch/$1.$2
  valgrind --tool=callgrind --callgrind-out-file="$out" --compress-strings=no --compress-pos=no \
    --toggle-collect=vpmm_malloc --toggle-collect=vpmm_free \
    "$program" --bytes "$bytes" --pairs "$1" --streams-known "$2" --no-p99 >"$out.log" 2>&1 || {
    cat "$out.log" >&2
    return 1
  }
  awk '
    /^totals:/ { total = $2 }
    /^cfn=/ { driver = /^cfn=slot_[0-9]+_/ }
    cost { if (driver) simulator += $NF; cost = 0; next }
    /^calls=/ { cost = 1 } # the line after it holds what they cost
    END {
      if (total == 0 || simulator == 0) exit 1 # the names have changed
      printf "%.0f %.0f\n", total, simulator
    }' "$out" || {
    echo "the profile has no vpmm_malloc, or no trampoline of the simulator in it" >&2
    return 1
  }
}

export VPMM_REAPER=off
failed=0
printf '%-8s %7s %8s %8s\n' streams known total library
for streams in trusted checked; do
  for known in 0 1000; do
    export VPMM_STREAMS=$streams
    once=$(count "$pairs" "$known") || stop "no count for VPMM_STREAMS=$streams and $known streams"
    twice=$(count $((2 * pairs)) "$known") || stop "no count for VPMM_STREAMS=$streams and $known streams"
    read -r total_1 simulator_1 <<<"$once"
    read -r total_2 simulator_2 <<<"$twice"
    total=$(((total_2 - total_1) / pairs))
    library=$((total - (simulator_2 - simulator_1) / pairs))
    verdict=
    if [ "$library" -gt "$limit" ]; then
      verdict="  above $limit"
      failed=1
    fi
    printf '%-8s %7d %8d %8d%s\n' "$streams" "$known" "$total" "$library" "$verdict"
  done
done
exit "$failed"
