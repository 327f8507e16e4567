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
  [threshold]="VPMM_DECAY_MS=50 VPMM_CAPTURES=off"
  [reset_unserved]=FAKE_DEVICES=2
  [threshold_beside_first]="VPMM_DECAY_MS=50 VPMM_CAPTURES=off"
)
cases=(serve drivers capture beside_capture left_behind left_alone recaptured joined unreleased pools
  pool_of_location shared context first_beside_capture inactive created given_threshold freed_for_all
  unreleased_memory peers stream_of_another questions threshold dependencies constructor constructor_thread memory
  full trimmed kept race_for_memory other_device reset_beside destroyed_in_capture destroyed_and_followed
  released_wholly released_after_reset refused failing short reset streams default_stream threads at_once unused fork
  fork_beside fork_beside_first threshold_beside_first reset_beside_first reset_unserved reset_on_host child names)

for name in "${cases[@]}"; do
  [ -z "$only" ] || [ "$only" = "$name" ] || continue
  # shellcheck disable=SC2086 # words
  check "$name, linked" ${settings[$name]:-} "$here/preload_linked" linked "$name"
  for way in dlsym asked asked_v1 threads; do
    # shellcheck disable=SC2086 # words
    check "$name, by $way" ${settings[$name]:-} "$here/preload_loaded" "$way" "$name"
  done
done
[ -z "$only" ] || exit "$failed"
check "left_behind, of work that goes on" FAKE_STEPPED=1 "$here/preload_loaded" asked left_behind
check "memory, without captures" FAKE_MEMORY=67108864 VPMM_CAPTURES=off "$here/preload_loaded" asked memory
check "questions, without captures" VPMM_CAPTURES=off "$here/preload_loaded" asked questions

# says <what> <expected> <variable>=<value>... <command>...: a line of what it says.
says() {
  check "$1" "${@:3}"
  if ! grep -qE "$2" "$work/said" || [ "$(grep -c '^vpmm: ' "$work/said")" -ne 1 ]; then
    echo "FAILED: $1: not said: $2"
    cat "$work/said"
    failed=1
  fi
}

served='^vpmm: served 24 mallocs, 0 synchronous mallocs, 24 frees'
says "what was served is said" "$served; left to the driver 1, 1 without a size, 1 frees of the driver.s memory\$" \
  VPMM_PRELOAD_VERBOSE=1 "$here/preload_loaded" asked serve
says "what was captured is said" 'left to the driver 1, 1 captured, 1 frees' \
  VPMM_PRELOAD_VERBOSE=yes "$here/preload_loaded" asked capture
says "why nothing was is said" 'left to the driver 2, 2 on a device without a pool of vpmm.s, .*VPMM_PAGE_SIZE' \
  VPMM_PRELOAD_VERBOSE=1 VPMM_PAGE_SIZE=odd "$here/preload_loaded" asked refused

says "a child says nothing of its parent's" 'vpmm: served 1 mallocs' \
  VPMM_PRELOAD_VERBOSE=1 "$here/preload_loaded" asked child

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
