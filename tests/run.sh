#!/usr/bin/env bash
set -euo pipefail

usage() {
  cat <<'EOF'
usage: tests/run.sh [--help] [--quick]

Builds vpmm and runs every test, on a Debian 12 or 13, or an Ubuntu 24.04 machine. What is missing is installed with
apt-get (as root, or with sudo); cuda.h is fetched if there is none. No GPU and no driver are needed: the tests run on
the simulated GPU.

  1  gcc, release                          every test, some a second time with front caches, the examples, the replay
                                           program on tests/traces, the server example's metrics as Prometheus and its
                                           tools see them, programs outside of this tree that use it as installed,
                                           and the images, where they can be built
  2  gcc, AddressSanitizer and UBSan       the same, but for these last three; with the library's assertions
  3  gcc, ThreadSanitizer                  tests/tsan/tsan_*.c, the programs and the preload; with assertions
  4  clang, release                        every test

The PyTorch back end's tests on the simulated GPU are a part of 1 where VPMM_TORCH_INCLUDE names the headers of a
PyTorch with CUDA (.../site-packages/torch/include, or include of a libtorch).

In 1 each scenario of test_schedules*.c is played in up to 5,000 orders and some at random, and test_faults.c plays all
settings; in 2 and 4 it is up to 400 of these orders, but for the explorer's own tests, and a seventeenth of the
settings.

--quick runs 1 alone. The last line is "N passed, N failed", over all runs; the exit status is 0 if none failed.
Everything is built under build/, or under $VPMM_BUILD_DIR; logs are in its logs folder.
EOF
}

quick=
for argument in "$@"; do
  case $argument in
  -h | --help)
    usage
    exit 0
    ;;
  --quick) quick=1 ;;
  *)
    usage >&2
    exit 2
    ;;
  esac
done

# shellcheck source=tests/setup.sh
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

# The caller's settings are not the tests'.
torch_include=${VPMM_TORCH_INCLUDE:-}
for variable in "${!VPMM_@}"; do
  unset "$variable"
done
export VPMM_BUILD_DIR=$build # for the scripts that this one runs

test_limit=3600 # seconds, for one program, which hangs if it takes longer; there is no limit for the whole

passed=0
failed=0
logs=$build/logs

# failure <message> [<log>]: what the log says of the tests or checks that failed, else its end.
failure() {
  failed=$((failed + 1))
  say "FAILED: $1"
  if [ $# -gt 1 ] && [ -f "$2" ]; then
    { grep -E '^\[(----|FAIL)' "$2" || grep -A 20 '^FAILED' "$2" || cat "$2"; } | sed 's/^/    /' | tail -n 60
    say "  whole log: $2"
  fi
}

# stage <name> <title>: logs of the stage go to $logs/<name>. Each sanitizer writes to sanitizer.<pid> there, and any
# such file is a failure: a leak reported in a Criterion test leaves its exit status at 0.
stage() {
  stage=$1
  say "== $2"
  rm -rf "${logs:?}/$stage"
  mkdir -p "$logs/$stage"
  local to=log_path=$logs/$stage/sanitizer
  export ASAN_OPTIONS="$to:detect_leaks=1:detect_stack_use_after_return=1"
  export UBSAN_OPTIONS="$to:print_stacktrace=1"
  export TSAN_OPTIONS="$to:second_deadlock_stack=1:history_size=4"
}

stage_end() {
  local report
  for report in "$logs/$stage"/sanitizer*; do
    [ -e "$report" ] || continue
    failure "$stage: a sanitizer reported" "$report"
  done
}

# make_stage <cmake argument>...: 1 if the stage cannot go on.
make_stage() {
  if build_tree "$stage" "$logs/$stage/build.log" -DVPMM_WERROR=ON "$@"; then
    if grep -q 'warning: ' "$logs/$stage/build.log"; then
      failure "$stage: the compiler warned" "$logs/$stage/build.log"
    else
      passed=$((passed + 1)) # a build without warnings is a result too
    fi
    return 0
  fi
  failure "$stage: the build failed" "$logs/$stage/build.log"
  return 1
}

# ThreadSanitizer and AddressSanitizer of older compilers do not bear with 32 bits of address randomisation.
fixed_addresses=()
if setarch "$(uname -m)" -R true >/dev/null 2>&1; then
  fixed_addresses=(setarch "$(uname -m)" -R)
fi

# run_program <log> <program> [<argument>...]: its exit status; 124 if it ran too long.
run_program() {
  local log=$1
  shift
  timeout --kill-after=10 "$test_limit" "${fixed_addresses[@]}" "$@" >"$log" 2>&1 </dev/null
}

# list_tests <program>: a line for each test that it has, also of those that macros make; one that is not among those
# that ran is a failure. In the C locale a test's line is "|-- name" or "`-- name". What leaks here is Criterion's.
list_tests() {
  LC_ALL=C ASAN_OPTIONS=$ASAN_OPTIONS:detect_leaks=0 "${fixed_addresses[@]}" "$1" --list 2>/dev/null </dev/null |
    sed -nE 's/^[|`]-- //p'
}

# Criterion 2.4.1 leaks 48 bytes of its own now and then when it runs tests side by side. Where leaks are looked for,
# programs run side by side instead, each with one test at a time.
criterion_jobs=$cores
criterion_programs=1

# criterion_log <source> [<what is special about this run>]
criterion_log() { echo "$logs/$stage/$(basename "$1" .c)${2:+-$2}.log"; }

# start_criterion_tests <what is special about this run> <source>...: runs them in the background. What a program's exit
# status was stands in <log>.status once it has ended. The shell that starts them is $criterion_starter.
start_criterion_tests() {
  local special=$1 source
  shift
  for source in "$@"; do
    rm -f "$(criterion_log "$source" "$special").status"
  done
  {
    for source in "$@"; do
      [ "$(jobs -pr | wc -l)" -lt "$criterion_programs" ] || wait -n || true # 127: it has ended by now
      run_criterion_program "$source" "$special" &
    done
    wait
  } &
  criterion_starter=$!
}

# await_status <file>: 1 if nobody writes it any more.
await_status() {
  while [ ! -f "$1" ]; do
    if ! kill -0 "$criterion_starter" 2>/dev/null; then
      [ -f "$1" ] # it may have been written before the shell ended
      return
    fi
    sleep 0.1
  done
}

run_criterion_program() {
  local log program status=0
  log=$(criterion_log "$1" "$2")
  program=$build/$stage/tests/$(basename "$1" .c)
  run_program "$log" "$program" --verbose=1 --jobs "$criterion_jobs" --color=never || status=$?
  echo "$status" >"$log.new" && mv "$log.new" "$log.status"
}

# judge_criterion_test <source> <what is special about this run>: once it has ended.
judge_criterion_test() {
  local source=$1 name log program expected tested good skipped status
  name=$(basename "$source" .c)${2:+, $2}
  log=$(criterion_log "$source" "$2")
  program=$build/$stage/tests/$(basename "$source" .c)
  if ! await_status "$log.status"; then
    failure "$stage: $name: the shell that starts the tests ended before it did" "$log"
    return
  fi
  status=$(cat "$log.status")
  if [ ! -x "$program" ]; then
    failure "$stage: $name was not built"
    return
  fi
  expected=$(list_tests "$program" | wc -l || true) # 0, where it cannot say
  tested=$(sed -nE 's/.*Synthesis: Tested: ([0-9]+) .*/\1/p' "$log" | tail -n 1)
  good=$(sed -nE 's/.*Synthesis: .*Passing: ([0-9]+) .*/\1/p' "$log" | tail -n 1)
  tested=${tested:-0}
  good=${good:-0}
  skipped=$(grep -cE '^\[SKIP\]' "$log" || true)
  passed=$((passed + good))
  if [ "$good" -lt "$tested" ]; then
    failure "$stage: $name: $((tested - good)) of $tested tests failed" "$log"
    failed=$((failed + tested - good - 1))
  elif [ "$tested" -eq 0 ] || [ "$expected" -eq 0 ] || [ $((tested + skipped)) -lt "$expected" ]; then
    failure "$stage: $name ran $tested tests and skipped $skipped, and lists $expected" "$log"
  elif [ "$status" -ne 0 ]; then
    failure "$stage: $name passed $good tests, then ended with status $status" "$log"
  else
    say "$name: $good tests$([ "$skipped" -eq 0 ] || echo ", $skipped skipped, by name in $log")"
  fi
}

# run_criterion_tests <what is special about this run> <source>...
run_criterion_tests() {
  local special=$1 source
  start_criterion_tests "$@"
  shift
  for source in "$@"; do
    judge_criterion_test "$source" "$special"
  done
}

# run_check <title> <program> [<argument>...]: one test, passed if the program ends with 0.
run_check() {
  local name=$1 log=$logs/$stage/${1// /-}.log status=0
  shift
  if [ ! -x "$1" ]; then
    failure "$stage: $name was not built"
    return
  fi
  run_program "$log" "$@" || status=$?
  if [ "$status" -ne 0 ]; then
    failure "$stage: $name ended with status $status" "$log"
  else
    passed=$((passed + 1))
    say "$name"
  fi
}

# The programs, each of which audits itself.
run_programs() {
  local trace pattern
  for trace in "$root"/tests/traces/*.csv; do
    [ -f "$trace" ] || continue
    run_check "vpmm-replay $(basename "$trace" .csv)" "$build/$stage/vpmm-replay" --verify --lag 16 "$trace"
  done
  for pattern in pair window handoff; do
    run_check "vpmm-pairs $pattern" "$build/$stage/vpmm-pairs" --pattern "$pattern" --threads 4 --pairs 2000
  done
  run_check vpmm-virtual "$root/tests/virtual_checks.py" "$build/$stage"
  run_check vpmm-stress "$root/tests/stress_checks.py" "$build/$stage"
  run_check vpmm-fragment "$build/$stage/vpmm-fragment" --bytes 128M --large 96M --each 8M
  run_check vpmm-server "$build/$stage/vpmm-server" --driver sim --seconds 3
}

run_plain_tests() {
  local source found=0
  for source in "$root"/tests/tsan/tsan_*.c; do
    [ -f "$source" ] || continue
    found=1
    run_check "$(basename "$source" .c)" "$build/$stage/tests/$(basename "$source" .c)"
  done
  [ "$found" -eq 1 ] || failure "$stage: there is no tests/tsan/tsan_*.c"
}

# What others' programs make of the metrics: a line of its log for each check.
run_metrics_checks() {
  local log=$logs/$stage/metrics_checks.log good bad
  if [ ! -x "$build/$stage/vpmm-server" ]; then
    failure "$stage: vpmm-server was not built"
    return
  fi
  run_program "$log" /usr/bin/python3 "$root/tests/exporter/metrics_checks.py" "$build/$stage/vpmm-server" "$build" || true
  good=$(grep -c '^ok ' "$log" || true)
  bad=$(grep -c '^FAILED ' "$log" || true)
  passed=$((passed + good))
  if [ "$bad" -gt 0 ] || ! grep -q '^ok server_is_well' "$log"; then
    failure "$stage: the metrics: $bad checks failed" "$log"
    [ "$bad" -eq 0 ] || failed=$((failed + bad - 1))
  else
    say "the metrics by Prometheus, its tools and Grafana's types: $good checks$(sed -n 's/^skipped /; skipped /p' "$log" | tr -d '\n')"
  fi
}

# Debian's prometheus comes with a service, where there is a service manager; the tests run their own.
install_prometheus() {
  if is_installed prometheus; then return; fi
  install_missing prometheus
  if [ -d /run/systemd/system ]; then
    as_root systemctl disable --now prometheus || die "the service prometheus, installed just now, cannot be stopped"
  fi
}

# What holds whatever the pool's settings are holds with front caches too: the tests' default is to have none.
cached_tests=(pool/test_model.c pool/test_slab.c pool/test_faults.c pool/test_limits.c sim/test_race_detector.c)

# test_faults sets caches itself, so that all of its settings once more would be the same once more.
few_settings=2/17

run_cached_tests() {
  VPMM_TEST_CACHE_BYTES=67108864 VPMM_TEST_SETTINGS=$few_settings \
    run_criterion_tests cached "${cached_tests[@]/#/$root/tests/}"
}

# Each model is a test, and so are the programs in C++; under sanitizers there are none.
run_models() {
  local model program=$build/$stage/tests/relacy_handovers
  [ "$stage" != asan ] || return 0
  run_check "attributes from C++" "$build/$stage/tests/cpp_attributes"
  run_check "ownership in C++" "$build/$stage/tests/cpp_ownership"
  run_check "per-thread default streams in C++" "$build/$stage/tests/cpp_per_thread"
  if [ -x "$build/$stage/tests/cpp_memory_resource" ]; then
    run_check "a memory resource of CCCL's" "$build/$stage/tests/cpp_memory_resource"
  else
    say "a memory resource of CCCL's: left out, CCCL or libcudart_static.a is not there"
  fi
  run_check relacy "$program" --list
  while read -r model; do
    run_check "relacy $model" "$program" "$model"
  done < <("$program" --list 2>/dev/null)
}

# Where images cannot be built, and its last line says why, that is no failure.
run_image_check() {
  local status=0
  run_program "$logs/$stage/image.log" "$root/tests/image.sh" || status=$?
  case $status in
  0) passed=$((passed + 1)) && say images ;;
  77) say "image: $(tail -n 1 "$logs/$stage/image.log")" ;;
  *) failure "$stage: image: exit status $status" "$logs/$stage/image.log" ;;
  esac
}

# PyTorch's headers are enough for it.
run_torch_tests() {
  if [ -z "$torch_include" ]; then
    say "the PyTorch back end: left out, VPMM_TORCH_INCLUDE does not say where PyTorch's headers are"
    return
  fi
  run_check "the PyTorch back end" "$root/lib/torch/tests/simulated/run.sh" "$build/$stage" "$torch_include" \
    "$cuda_include_dir"
}

# A line of its log for each check.
run_preload_checks() {
  local log=$logs/$stage/preload_checks.log good bad
  run_program "$log" "$root/tests/preload/checks.sh" "$build/$stage" || true
  good=$(grep -c '^ok: ' "$log" || true)
  bad=$(grep -c '^FAILED: ' "$log" || true)
  passed=$((passed + good))
  if [ "$bad" -gt 0 ] || ! grep -q '^ok: what is exported' "$log"; then
    failure "$stage: the preload: $bad checks failed" "$log"
    [ "$bad" -eq 0 ] || failed=$((failed + bad - 1))
  else
    say "the preload: $good checks"
  fi
}

run_every_test() {
  run_criterion_tests "" "$root"/tests/*/test_*.c
  run_plain_tests
  run_models
  run_programs
  run_check vpmm-quickstart "$build/$stage/vpmm-quickstart" --sim
  run_preload_checks
}

finish() {
  printf '%d passed, %d failed\n' "$passed" "$failed"
  [ "$failed" -eq 0 ] && [ "$passed" -gt 0 ] || exit 1
  exit 0
}

install_missing gcc=build-essential make=build-essential clang=clang cmake=cmake pkg-config=pkg-config \
  g++=build-essential libck-dev libcriterion-dev libmicrohttpd-dev libgnutls28-dev zlib1g-dev libcrypt-dev \
  relacy-dev perl=perl python3=python3 python3-prometheus-client
install_prometheus
need_cuda_h

stage gcc "gcc, release"
run_check layers "$root/tests/layers.sh"
make_stage -DCMAKE_C_COMPILER=gcc && {
  run_every_test
  run_cached_tests
  run_metrics_checks
  run_check "mutations can be made" "$root/tests/mutations.sh" --check
  run_torch_tests
  run_check install "$root/tests/install.sh" "$build/$stage"
  run_image_check
  # That it works; what it measures means nothing beside other work.
  run_check "vpmm-pairs scraped" "$root/stress/scrapes.py" "$build/$stage" --rate 50 --rounds 3 --limit 1000 --least 0
}
stage_end
[ -z "$quick" ] || finish

# The first build has played as many orders as any, and all settings of test_faults.
export VPMM_TEST_SCHEDULES=200 VPMM_TEST_SETTINGS=$few_settings

stage asan "gcc, AddressSanitizer and UBSan"
criterion_jobs=1
criterion_programs=$cores
make_stage -DCMAKE_C_COMPILER=gcc -DVPMM_SANITIZE=address -DVPMM_DEBUG_CHECKS=ON -DVPMM_DEBUG_WALKS=ON && {
  run_every_test
  run_cached_tests
}
criterion_jobs=$cores
criterion_programs=1
stage_end

stage tsan "gcc, ThreadSanitizer"
if make_stage -DCMAKE_C_COMPILER=gcc -DVPMM_SANITIZE=thread -DVPMM_DEBUG_CHECKS=ON; then
  run_plain_tests
  export VPMM_VA_SIZE=128G # ThreadSanitizer leaves 1 TiB of address space
  run_programs
  run_preload_checks
  unset VPMM_VA_SIZE
fi
stage_end

stage clang "clang, release"
make_stage -DCMAKE_C_COMPILER=clang && run_every_test
stage_end

finish
