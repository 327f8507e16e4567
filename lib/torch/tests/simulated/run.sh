#!/usr/bin/env bash
# run.sh: the back end on the simulated GPU: each case alone, all of them in orders of their own, and threads in no
# order. It needs PyTorch's headers (of a PyTorch with CUDA), CUDA's, and a build of vpmm; neither a GPU nor PyTorch's
# libraries. Where the exporter is built the metrics of its pools are scraped meanwhile, with curl.
set -euo pipefail

usage="usage: run.sh BUILD_DIR TORCH_INCLUDE [CUDA_INCLUDE [SEED...]]

  BUILD_DIR      where vpmm was built. If with -DVPMM_SANITIZE, say the same in CXXFLAGS: -fsanitize=thread, or for
                 address -fsanitize=address,undefined
  TORCH_INCLUDE  .../site-packages/torch/include
  CUDA_INCLUDE   default /usr/local/cuda/include
  SEED           default 1 and 2, of the cases' order and of the threads. With an odd one the threads' history is
                 recorded, with an even one none

CASES=\"NAME ...\" runs these cases of cases.cpp, each alone, and nothing else. A name that there is not lists them."
if [ $# -lt 2 ] || [ "$1" = --help ]; then
  printf '%s\n' "$usage"
  [ "${1-}" = --help ] && exit 0 || exit 2
fi
build=$(realpath "$1") torch=$(realpath "$2") cuda=${3:-/usr/local/cuda/include}
seeds=("${@:4}")
[ $# -ge 4 ] || seeds=(1 2) # with recorded history, and without
here=$(dirname "$(realpath "$0")")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

read -ra flags <<<"-std=c++17 -O1 -g -Wall -Wextra -Wno-unused-parameter ${CXXFLAGS-}"
if grep -q 'parseArgs(const std::optional' "$torch/c10/cuda/CUDAAllocatorConfig.h"; then
  flags+=(-DSETTINGS_ARE_CUDAS) # up to PyTorch 2.9
fi
exporter=()
if [ -e "$build/libvpmm_exporter.a" ]; then
  flags+=(-DVPMM_TORCH_EXPORTER)
  exporter=(-lvpmm_exporter -lmicrohttpd -lgnutls -lz -lcrypt)
fi
with_metrics() { # on a port that is free at this moment: others take some meanwhile
  if [ ${#exporter[@]} -gt 0 ]; then
    port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
    local -x VPMM_TORCH_METRICS=127.0.0.1:$port
  fi
  timeout 600 "$work/simulated" "$@"
}
alone() {
  for name in "$@"; do
    timeout 600 "$work/simulated" cases "$name" || { echo "$name failed, alone" >&2 && exit 1; }
  done
}
"${CXX:-g++}" "${flags[@]}" -isystem "$torch" -isystem "$cuda" -I"$here/../../../../include" -o "$work/simulated" \
  "$here"/*.cpp "$here"/../../src/*.cpp -Wl,--wrap=vpmm_pool_create,--wrap=pthread_mutex_lock -L"$build" \
  "${exporter[@]}" -lvpmm_sim -lvpmm -lpthread -ldl
if [ -n "${CASES-}" ]; then
  read -ra names <<<"$CASES"
  alone "${names[@]}"
  exit
fi
mapfile -t names < <("$work/simulated" cases --list)
[ ${#names[@]} -gt 0 ] # else it could not list them
echo "${#names[@]} cases, each alone"
alone "${names[@]}"
for seed in "${seeds[@]}"; do
  echo "seed $seed"
  with_metrics cases --shuffled "$seed"
  with_metrics 4 1000 "$seed"
  VPMM_PAGE_SIZE=2M with_metrics 4 1000 "$seed"
  LEFT_MIB=200 with_metrics 4 1000 "$seed" # of a device that is full at most times
done
