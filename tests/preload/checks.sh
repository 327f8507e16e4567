#!/usr/bin/env bash
set -euo pipefail

usage() {
  cat <<'EOT'
usage: tests/preload/checks.sh BUILD_DIR [CASE]

Runs programs that know the driver alone (program.c) under libvpmm_preload.so, over a libcuda.so.1 that is the simulated
GPU (cuda.c): linked with it, and by dlopen in each way that entries can be asked for. Then what it must not touch:
programs without CUDA, RTLD_NEXT of other libraries, the symbols that it exports. With CASE, one of the cases alone.

Exit status: 0 all of it holds; 1 a line says what does not; 2 wrong usage.
EOT
}

case ${1:-} in
"") usage >&2 && exit 2 ;;
-h | --help) usage && exit 0 ;;
esac
build=$(cd "$1" && pwd)
only=${2:-}
here=$build/tests/preload
preload=$build/libvpmm_preload.so
map=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)/lib/preload/symbols.map
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=0

# A sanitizer's runtime comes first, where the library is built with it. Pools and the simulator live until the process
# ends, so what they hold is no leak.
export ASAN_OPTIONS=${ASAN_OPTIONS:+$ASAN_OPTIONS:}detect_leaks=0
# A child of a process with threads makes a pool of its own, with its thread.
export TSAN_OPTIONS=${TSAN_OPTIONS:+$TSAN_OPTIONS:}die_after_fork=0
runtime=$(ldd "$preload" | awk '/lib[at]san/ { print $3 }')

# check <what> [<variable>=<value>...] <command>...: under the preload; what it says is shown where it fails.
check() {
  local status=0
  timeout --kill-after=5 300 env LD_LIBRARY_PATH="$here" LD_PRELOAD="${runtime:+$runtime:}$preload" "${@:2}" \
    >"$work/said" 2>&1 </dev/null || status=$?
  if [ "$status" -eq 0 ]; then
    echo "ok: $1"
  else
    echo "FAILED: $1: exit status $status"
    tail -n 20 "$work/said"
    failed=1
  fi
}

declare -A settings=(
  [memory]=FAKE_MEMORY=67108864
  [kept]=FAKE_MEMORY=67108864
  [race_for_memory]=FAKE_MEMORY=67108864
  [full]=FAKE_MEMORY=67108864
  [other_device]="FAKE_DEVICES=2 VPMM_DEVICE=1"
  [reset_beside]=FAKE_DEVICES=2
  [left_alone]=VPMM_CAPTURES=on
  [destroyed_in_capture]=VPMM_STREAMS=trusted
  [unused]="FAKE_MEMORY=67108864 FAKE_STEPPED=1 VPMM_CACHE_BYTES=0"
  [refused]=VPMM_PAGE_SIZE=odd
  [small_async]=VPMM_SMALL=async
  [dependencies]="FAKE_STEPPED=1 VPMM_CACHE_BYTES=0"
  [at_once]="VPMM_PRELOAD_SYNC=on FAKE_STEPPED=1"
  [first_beside_capture]=VPMM_PRELOAD_SYNC=on
  [given_threshold]="VPMM_DECAY_MS=50 VPMM_CAPTURES=off VPMM_RELEASE_THRESHOLD=1G"
  [created]=VPMM_DECAY_MS=never
  [unreleased_memory]=VPMM_DECAY_MS=never
  [trimmed]=VPMM_DECAY_MS=never
  [freed_for_all]="VPMM_CAPTURES=on VPMM_DECAY_MS=never"
  [peers]=VPMM_PRELOAD_SYNC=on
  [stream_of_another]="FAKE_DEVICES=2 FAKE_MEMORY=67108864"
  [stream_of_unserved]="FAKE_DEVICES=2 VPMM_DECAY_MS=never"
  [threshold]="VPMM_DECAY_MS=50 VPMM_CAPTURES=off"
  [reset_unserved]=FAKE_DEVICES=2
  [reset_unserved_beside_first]=FAKE_DEVICES=2
  [threshold_beside_first]="VPMM_DECAY_MS=50 VPMM_CAPTURES=off"
)
cases=(serve drivers capture beside_capture left_behind left_alone recaptured joined unreleased unreleased_unasked
  pools opened_first small_async pool_of_location shared context first_beside_capture inactive created given_threshold
  freed_for_all unreleased_memory peers stream_of_another stream_of_unserved questions threshold dependencies
  constructor constructor_thread memory full trimmed kept race_for_memory other_device reset_beside
  destroyed_in_capture destroyed_and_followed released_wholly released_after_reset refused failing short reset streams
  default_stream threads at_once unused fork fork_beside fork_beside_first threshold_beside_first reset_beside_first
  reset_unserved reset_unserved_beside_first reset_on_host unserved child names)

for name in "${cases[@]}"; do
  [ -z "$only" ] || [ "$only" = "$name" ] || continue
  # shellcheck disable=SC2086 # words
  check "$name, linked" ${settings[$name]:-} "$here/preload_linked" linked "$name"
  for way in dlsym asked asked_v1 threads; do
    # shellcheck disable=SC2086 # words
    check "$name, by $way" ${settings[$name]:-} "$here/preload_loaded" "$way" "$name"
  done
done

# traces <what> <variable>=<value>... <command>...: leaves one file, $work/requests.PID.0.csv, which can be replayed.
traces() {
  rm -f "$work"/requests.*
  check "$1" VPMM_PRELOAD_TRACE="$work/requests" "${@:2}"
  local all=("$work"/requests.*) of_device_0=("$work"/requests.*.0.csv)
  if [ ${#all[@]} -ne 1 ] || [ ! -e "${of_device_0[0]}" ]; then
    echo "FAILED: $1: no trace, or several"
    failed=1
  elif [ -x "$build/vpmm-replay" ] && ! "$build/vpmm-replay" "$work"/requests.* >"$work/said" 2>&1; then
    echo "FAILED: $1: its trace cannot be replayed"
    cat "$work/said"
    failed=1
  fi
}

# wrote <what> <lines>: the trace's, but for the times.
wrote() {
  if ! diff <(tr ' ' '\n' <<<"op,id,bytes,stream $2") <(cut -d, -f1-4 "$work"/requests.*) >"$work/said"; then
    echo "FAILED: $1: the trace is another one"
    cat "$work/said"
    failed=1
  fi
}

if [ -z "$only" ] || [ "$only" = traced ]; then
  begin="a,0,1000,1 a,1,3145728,2 f,0,1000,2 f,1,3145728,1 a,2,5000,1 f,2,5000,0 a,3,2097152,3"
  end="a,5,2097152,1 f,5,2097152,1 a,6,700,1"
  traces "traced, by asked" "$here/preload_loaded" asked traced
  wrote "traced, by asked" "$begin a,4,2097152,4 f,3,2097152,5 f,4,2097152,4 $end"
  traces "traced, by threads" "$here/preload_loaded" threads traced
  wrote "traced, by threads" "$begin a,4,2097152,3 f,3,2097152,4 f,4,2097152,5 $end"
  traces "traced, of a pool of the driver's" VPMM_PAGE_SIZE=odd "$here/preload_loaded" asked refused
  traces "traced, synchronous" VPMM_PRELOAD_SYNC=on FAKE_STEPPED=1 "$here/preload_loaded" asked at_once
  traces "traced, over resets" "$here/preload_loaded" asked reset
  if [ "$(($(grep -c '^a' "$work"/requests.*) - $(grep -c '^f' "$work"/requests.*)))" -ne 1 ]; then
    echo "FAILED: traced, over resets: but for what ended with the last one, each allocation has its free"
    failed=1
  fi
  traces "traced, with a child" "$here/preload_loaded" asked child
  wrote "traced, with a child" "a,0,1000,1 f,0,1000,1"
  traces "traced, of many threads" "$here/preload_loaded" asked threads
fi
# says <what> <expected> <variable>=<value>... <command>...: a line of what it says.
says() {
  check "$1" "${@:3}"
  if ! grep -qE "$2" "$work/said" || [ "$(grep -c '^vpmm: ' "$work/said")" -ne 1 ]; then
    echo "FAILED: $1: not said: $2"
    cat "$work/said"
    failed=1
  fi
}

if [ -z "$only" ] || [ "$only" = unserved ]; then
  says "that nothing was served is said, linked" '^vpmm: served 0 mallocs, .* 0 frees; left to the driver 0$' \
    VPMM_PRELOAD_VERBOSE=on "$here/preload_linked" linked unserved
  for way in dlsym asked asked_v1 threads; do
    says "that nothing was served is said, by $way" '^vpmm: served 0 mallocs' \
      VPMM_PRELOAD_VERBOSE=on "$here/preload_loaded" "$way" unserved
  done
fi
if [ -z "$only" ] || [ "$only" = child ]; then
  says "a child says nothing of its parent's" 'vpmm: served 1 mallocs' \
    VPMM_PRELOAD_VERBOSE=1 "$here/preload_loaded" asked child
fi
[ -z "$only" ] || exit "$failed"
check "left_behind, of work that goes on" FAKE_STEPPED=1 "$here/preload_loaded" asked left_behind
check "memory, without captures" FAKE_MEMORY=67108864 VPMM_CAPTURES=off "$here/preload_loaded" asked memory
check "questions, without captures" VPMM_CAPTURES=off "$here/preload_loaded" asked questions

served='^vpmm: served 24 mallocs, 0 synchronous mallocs, 24 frees'
says "what was served is said" "$served; left to the driver 1, 1 without a size, 1 frees of the driver.s memory\$" \
  VPMM_PRELOAD_VERBOSE=1 "$here/preload_loaded" asked serve
says "what was captured is said" 'left to the driver 1, 1 captured, 1 frees' \
  VPMM_PRELOAD_VERBOSE=yes "$here/preload_loaded" asked capture
says "why nothing was is said" 'left to the driver 2, 2 on a device without a pool of vpmm.s, .*VPMM_PAGE_SIZE' \
  VPMM_PRELOAD_VERBOSE=1 VPMM_PAGE_SIZE=odd "$here/preload_loaded" asked refused

says "why a trace has ended is said" 'VPMM_PRELOAD_TRACE=/dev/null/none: Not a directory' \
  VPMM_PRELOAD_VERBOSE=1 VPMM_PRELOAD_TRACE=/dev/null/none "$here/preload_loaded" asked serve

check "without CUDA" LD_LIBRARY_PATH= "$here/preload_loaded" none without_cuda
check "RTLD_NEXT of other libraries" "$here/preload_next"
if [ -z "$runtime" ]; then # these programs are not built for it
  # shellcheck disable=SC2016 # for the inner shell
  for command in 'true' 'test "$(echo a | tr a b)" = b' 'ls / | sort >/dev/null & wait'; do
    check "bash -c '$command'" bash -c "$command"
    [ ! -s "$work/said" ] || { echo "FAILED: bash said something" && cat "$work/said" && failed=1; }
  done
  check "python3, with threads and ctypes" /usr/bin/python3 -c 'import ctypes, subprocess, threading
t = threading.Thread(target=ctypes.CDLL(None).getpid); t.start(); t.join(); subprocess.check_call(["true"])'
fi

exported() {
  nm -D --defined-only --format=just-symbols "$preload" | sort
}
if diff <(exported) <(sed -nE 's/^ +([A-Za-z_0-9]+);$/\1/p' "$map" | sort); then
  echo "ok: what is exported"
else
  echo "FAILED: what is exported is not what symbols.map says"
  failed=1
fi
if ldd "$preload" | grep -q cuda; then
  echo "FAILED: it is linked with CUDA"
  failed=1
fi
exit "$failed"
