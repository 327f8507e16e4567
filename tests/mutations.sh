#!/usr/bin/env bash
set -euo pipefail

usage() {
  cat <<'EOF'
usage: tests/mutations.sh [--help] [--list | --check] [<part of a name>...]

Breaks the library in one place at a time, as tests/mutations.list says, and runs the tests that are named there until
one fails. Prints a table: the mutation, and the test that turned red; "(no end)" is one that was stopped after 150 s. A
mutation that no test notices survives, and the exit status is 1. One of which the list says why it survives is run and
shown, and may. First each of these tests is run on the library as it is, where it must pass. That takes about two hours
on two cores; tests/run.sh does not run it. With names, only mutations that contain one of them. Everything is made
under build/mutations, or $VPMM_BUILD_DIR/mutations.

--list   prints the names
--check  breaks and builds nothing: it says which mutations cannot be made, because what they replace does not stand
         once where the list says, or a test that they name is not there. tests/run.sh does run this; it takes a second
EOF
}

mode=run
names=()
for argument in "$@"; do
  case $argument in
  -h | --help)
    usage
    exit 0
    ;;
  --list | --check) mode=${argument#--} ;;
  -*)
    usage >&2
    exit 2
    ;;
  *) names+=("$argument") ;;
  esac
done

# shellcheck source=tests/setup.sh
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

table=$root/tests/mutations.list
# mutations <sources> check | tests <name> | apply <name> | survives <name>: see there.
mutations() {
  perl "$root/tests/mutations.pl" "$table" "$@"
}

case $mode in
list)
  sed -n 's/^mutation: //p' "$table"
  exit 0
  ;;
check)
  mutations "$root" check
  exit 0
  ;;
esac

install_missing gcc=build-essential make=build-essential perl=perl cmake=cmake pkg-config=pkg-config \
  libck-dev libcriterion-dev libmicrohttpd-dev libgnutls28-dev zlib1g-dev libcrypt-dev relacy-dev
need_cuda_h

scratch=$build/mutations
source=$scratch/source
mkdir -p "$scratch/logs"

# fresh: the sources as they are; files that have not changed keep their times.
fresh() {
  local file
  mkdir -p "$source"
  (cd "$root" && find CMakeLists.txt include lib exporter examples stress tests -type f) |
    while read -r file; do
      cmp -s "$root/$file" "$source/$file" && continue
      mkdir -p "$source/$(dirname "$file")"
      cp "$root/$file" "$source/$file"
    done
}

# Each time: a test that is new since the last has no target yet.
configure() {
  local tree=$scratch/$1
  shift
  cmake -S "$source" -B "$tree" -DCUDA_INCLUDE_DIR="$cuda_include_dir" "$@" >/dev/null
}

# turns_red <test> <log>: 0 if the test fails, 1 if it passes, 2 if it was not built.
turns_red() {
  local test=$1 log=$2 tree=plain filter=()
  case $test in tsan_*) tree=tsan ;; esac
  [ "${test#*:}" = "$test" ] || filter=(--filter "${test#*:}")
  test=${test%%:*}
  local targets=("$test")
  [ "$test" != preload ] || targets=(vpmm_preload vpmm_constructor preload_linked preload_loaded preload_next)
  cmake --build "$scratch/$tree" --parallel "$cores" --target "${targets[@]}" >"$log" 2>&1 || return 2
  if [ "$tree" = tsan ]; then
    ! timeout 150 setarch "$(uname -m)" -R "$scratch/$tree/tests/$test" >"$log" 2>&1
  elif [ "$test" = preload ]; then
    ! timeout 150 "$source/tests/preload/checks.sh" "$scratch/$tree" ${filter[@]+"${filter[1]}"} >"$log" 2>&1
  elif [[ $test = relacy_handovers || $test = cpp_* ]]; then
    ! timeout 150 "$scratch/$tree/tests/$test" >"$log" 2>&1
  else
    ! timeout 150 "$scratch/$tree/tests/$test" --fail-fast --verbose=1 --jobs "$cores" --color=never "${filter[@]}" >"$log" 2>&1
  fi
}

first_failure() {
  sed -nE 's/^\[FAIL\] [^:]*::([^:]*): .*/\1/p; s/^\[(CRASH|ERR )\].*::([^:]*): .*/\2/p
    s/^([a-z_]*): FAILED.*/\1/p
    s/^FAILED: ([^:]*): .*/\1/p
    $ { /^\[RUN \]|^\[PASS\]|^ok: |schedules of 1/ s/.*/(no end)/p }
    s/.*(WARNING: ThreadSanitizer: [a-z ]*).*/\1/p' "$1" | head -n 1
}

# One mutation against its tests, in order.
run_mutation() {
  local name=$1 tests test status log
  fresh
  mutations "$source" apply "$name" || die "$name"
  tests=$(mutations "$source" tests "$name")
  for test in $tests; do
    log=$scratch/logs/$name.${test%%:*}.log
    status=0
    turns_red "$test" "$log" || status=$?
    if [ "$status" -eq 2 ]; then
      printf '%-52s does not build: %s\n' "$name" "$log"
      return 1
    fi
    if [ "$status" -eq 0 ]; then
      printf '%-52s %s %s\n' "$name" "${test%%:*}" "$(first_failure "$log")"
      return 0
    fi
  done
  if mutations "$source" survives "$name"; then
    printf '%-52s survives, as it may\n' "$name"
    return 0
  fi
  printf '%-52s SURVIVES (%s)\n' "$name" "$tests"
  return 1
}

# Without a mutation: of a test that is red anyway nothing could be said.
run_unbroken() {
  local test log status
  for test in $(mutations "$source" tests "$@" | tr ' ' '\n' | sort -u); do
    log=$scratch/logs/unbroken.${test%%:*}.log
    status=0
    turns_red "$test" "$log" </dev/null || status=$?
    [ "$status" -eq 1 ] || die "$test fails without a mutation: $log"
  done
}

is_wanted() {
  local name
  [ ${#names[@]} -gt 0 ] || return 0
  for name in "${names[@]}"; do
    [[ $1 == *"$name"* ]] && return 0
  done
  return 1
}

mutations "$root" check # a text that the library no longer has is found at once
fresh
configure plain -DCMAKE_BUILD_TYPE=RelWithDebInfo -DVPMM_BUILD_EXAMPLES=OFF -DVPMM_BUILD_STRESS=OFF
configure tsan -DVPMM_SANITIZE=thread -DVPMM_BUILD_EXAMPLES=OFF -DVPMM_BUILD_STRESS=OFF

wanted=()
while read -r name; do
  ! is_wanted "$name" || wanted+=("$name")
done < <(sed -n 's/^mutation: //p' "$table")
[ ${#wanted[@]} -gt 0 ] || die "no mutation's name has that in it: see --list"
run_unbroken "${wanted[@]}"

caught=0
survivors=0
for name in "${wanted[@]}"; do
  if run_mutation "$name" </dev/null; then
    caught=$((caught + 1))
  else
    survivors=$((survivors + 1))
  fi
done
printf '%d caught, %d not\n' "$caught" "$survivors"
[ "$survivors" -eq 0 ]
