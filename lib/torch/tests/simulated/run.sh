#!/usr/bin/env bash
# run.sh: the back end on the simulated GPU, with threads in no order. It needs PyTorch's headers (of a PyTorch with
# CUDA), CUDA's, and a build of vpmm; neither a GPU nor PyTorch's libraries. Where the exporter is built the metrics of
# its pools are scraped meanwhile, with curl.
set -euo pipefail

usage="usage: run.sh BUILD_DIR TORCH_INCLUDE [CUDA_INCLUDE [SEED...]]

  BUILD_DIR      where vpmm was built. If with -DVPMM_SANITIZE, say the same in CXXFLAGS: -fsanitize=thread, or for
                 address -fsanitize=address,undefined
  TORCH_INCLUDE  .../site-packages/torch/include
  CUDA_INCLUDE   default /usr/local/cuda/include
  SEED           default 1 and 2: with an odd one history is recorded, with an even one none"
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
run() { # with a port that is free at this moment: others take some meanwhile
  if [ ${#exporter[@]} -gt 0 ]; then
    port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
    export VPMM_TORCH_METRICS=127.0.0.1:$port
  fi
  timeout 600 "$work/random" 4 1000 "$1"
}
"${CXX:-g++}" "${flags[@]}" -isystem "$torch" -isystem "$cuda" -I"$here/../../../../include" -o "$work/random" \
  "$here"/*.cpp "$here"/../../src/*.cpp -Wl,--wrap=vpmm_pool_create -L"$build" "${exporter[@]}" -lvpmm_sim -lvpmm -lpthread -ldl
for seed in "${seeds[@]}"; do
  echo "seed $seed"
  run "$seed"
  VPMM_PAGE_SIZE=2M run "$seed"
  LEFT_MIB=200 run "$seed" # of a device that is full at most times
done
