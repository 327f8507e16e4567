#!/usr/bin/env bash
set -euo pipefail

usage() {
  cat <<'EOF'
usage: stress/on_gpu.sh BUILD_DIR TRACE...

On a machine with a GPU: runs the programs that most figures of stress/README.md come from, in BUILD_DIR, with fewer
passes and runs than its tables have, and the tests that need no simulated GPU if they were built. The programs may have
been built elsewhere. About nine minutes on an H200.

  1  vpmm and cuMemAllocAsync in turn, three times: dense, one thread, requests of at least 2 MiB, cold and warm
  2  the same with --verify, with four threads and all sizes, at the traces' own pace, and with one handle a page
  3  all sizes: the traces with all their requests, by both allocators, dense by one, four and sixteen threads and at
     their own pace, and with VPMM_SMALL=async; and what many small requests leave behind when most of them are freed
  4  pairs: what a malloc and a free cost, with 1 and with 16 threads, beside cuMemAllocAsync; of 1 KiB and 128 KiB too
  5  the server example, and the tests with VPMM_TEST_DRIVER=cuda
  6  what 1,000 scrapes a second change in a pair, if there is python3, and the programs were built with the exporter
  7  vpmm-stress, killed in its midst: the device's memory is back where it was, and the next one passes

Exit status 0: every program ended with 0, but for the one that is killed.
EOF
}

if [ $# -lt 2 ]; then
  usage
  [ "${1:-}" = --help ] && exit 0
  exit 2
fi
programs=$(cd "$1" && pwd)
here=$(dirname "${BASH_SOURCE[0]}")
shift
failed=0

# run <title> <command>...
run() {
  local title=$1 status=0
  shift
  echo "== $title"
  timeout --kill-after=10 200 "$@" || status=$?
  if [ "$status" -ne 0 ]; then
    echo "FAILED: $title: exit status $status"
    failed=1
  fi
}

replay=("$programs/vpmm-replay" --driver cuda)
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader || true
for i in 1 2 3; do
  run "dense, cuMemAllocAsync, $i" "${replay[@]}" --allocator async --min-bytes 2M "$@"
  run "dense, vpmm, $i" "${replay[@]}" --min-bytes 2M "$@"
done
run "verified" "${replay[@]}" --verify --min-bytes 2M "$@"
run "verified, four threads, all sizes" "${replay[@]}" --verify --threads 4 "$@"
run "at the traces' own pace" "${replay[@]}" --pace --min-bytes 2M "$@"
run "one handle a page, verified" env VPMM_EXTENT_SIZE=2M "${replay[@]}" --verify --min-bytes 2M "$@"

# With small requests: a line below each row has them alone.
for i in 1 2 3; do
  run "all sizes, dense, cuMemAllocAsync, $i" "${replay[@]}" --allocator async --min-bytes 0 "$@"
  run "all sizes, dense, vpmm, $i" "${replay[@]}" --min-bytes 0 "$@"
done
for allocator in vpmm async; do
  run "four copies at once, $allocator" "${replay[@]}" --allocator "$allocator" --threads 4 "$@"
  run "sixteen copies of half the size, $allocator" "${replay[@]}" --allocator "$allocator" --threads 16 --scale 0.5 "$@"
done
run "all sizes, dense, vpmm with the driver's pool" env VPMM_SMALL=async "${replay[@]}" --min-bytes 0 "$@"
run "all sizes, at the traces' own pace, cuMemAllocAsync" "${replay[@]}" --pace --allocator async --min-bytes 0 "$@"
run "all sizes, at the traces' own pace, vpmm" "${replay[@]}" --pace --min-bytes 0 "$@"
run "what small requests leave behind" "$programs/vpmm-fragment" --driver cuda

# A window of 64 allocations around 64 MiB in each of 16 threads would be more than any GPU has.
pairs=("$programs/vpmm-pairs" --driver cuda)
allocators=vpmm,async
for streams in trusted checked; do
  pairs_with=(env "VPMM_STREAMS=$streams" "${pairs[@]}" --allocator "$allocators")
  run "pairs, $streams streams" "${pairs_with[@]}" --pattern pair --bytes 2M,64M --threads 1,16
  run "pairs, $streams streams, window of 2M" "${pairs_with[@]}" --pattern window --bytes 2M --threads 1,16
  run "pairs, $streams streams, window of 64M" "${pairs_with[@]}" --pattern window --bytes 64M --threads 1
  run "pairs, $streams streams, handoff" "${pairs_with[@]}" --pattern handoff --bytes 2M,64M --threads 16
  run "pairs, $streams streams, small" "${pairs_with[@]}" --pattern pair --bytes 1024,128K --threads 1,16
  run "pairs, $streams streams, small window and handoff" \
    "${pairs_with[@]}" --pattern window,handoff --bytes 1024 --threads 16
  allocators=vpmm # cuMemAllocAsync knows nothing of the setting
done

run "server" "$programs/vpmm-server" --driver cuda --seconds 5
for test in walkthrough streams limits capture defects model slab process; do
  if [ -x "$programs/tests/test_$test" ]; then
    # Fewer operations of the models: on a real device each step takes milliseconds.
    run "test_$test" env VPMM_TEST_DRIVER=cuda VPMM_TEST_OPS=3000 "$programs/tests/test_$test" --jobs 6 --timeout 150
  fi
done

if ! command -v python3 >/dev/null 2>&1; then
  echo "== scrapes: left out, there is no python3"
elif ! "${pairs[@]}" --metrics-port 0 --pairs 1 --no-p99 >/dev/null 2>&1; then
  echo "== scrapes: left out, vpmm-pairs --metrics-port 0 does not run: it was built without the exporter"
else
  run "scrapes" python3 "$here/scrapes.py" "$programs" --driver cuda --rounds 7
fi

used_mib() {
  nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits | awk '{ sum += $1 } END { print sum }'
}

# kill_one: succeeds if the device has handed out no more after the kill than before.
kill_one() {
  local before during after i
  before=$(used_mib)
  "$programs/vpmm-stress" --driver cuda --seconds 60 --threads 16 --streams 32 >/dev/null 2>&1 &
  sleep 8
  during=$(used_mib)
  kill -KILL $!
  wait $! || true
  for ((i = 0; i < 100; i++)); do # the process that squeezes the device ends when it sees that this one has
    after=$(used_mib)
    [ "$after" -gt "$before" ] || break
    sleep 0.1
  done
  echo "MiB of all devices in use before, during and after: $before, $during, $after"
  [ "$during" -gt "$before" ] && [ "$after" -le "$before" ]
}

if ! command -v nvidia-smi >/dev/null 2>&1; then
  echo "== killed: left out, there is no nvidia-smi"
else
  echo "== killed"
  kill_one || { echo "FAILED: killed"; failed=1; }
fi
run "after one that was killed" "$programs/vpmm-stress" --driver cuda --seconds 5 --threads 16 --streams 32
exit "$failed"
