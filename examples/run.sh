#!/usr/bin/env bash
set -euo pipefail

usage() {
  cat <<'EOF'
usage: examples/run.sh [--help] [ARGUMENT...]

Builds the library and runs the server example (examples/server.c) on the simulated GPU, on a Debian 12 or 13,
or an Ubuntu 24.04 machine, with or without a GPU. What is missing is installed with apt-get (as root, or with sudo);
cuda.h is fetched if there is none. Arguments are passed on to the example instead of "--driver sim".
EOF
}

case ${1:-} in
-h | --help)
  usage
  exit 0
  ;;
esac

# shellcheck source=tests/setup.sh
. "$(dirname "${BASH_SOURCE[0]}")/../tests/setup.sh"

[ $# -gt 0 ] || set -- --driver sim

install_missing gcc=build-essential make=build-essential cmake=cmake pkg-config=pkg-config libck-dev \
  libmicrohttpd-dev libgnutls28-dev zlib1g-dev libcrypt-dev
need_cuda_h

say "building into $build/examples"
log=$build/examples.log
mkdir -p "$build"
if ! build_tree examples "$log" -DVPMM_BUILD_TESTS=OFF; then
  tail -n 40 "$log" >&2
  die "the build failed; the whole log: $log"
fi

cd "$root"
say "running vpmm-server $*"
"$build/examples/vpmm-server" "$@"

cat <<EOF

What to do next
  $build/examples/vpmm-server --help         what else the server example takes, a real GPU among it
  $build/examples/vpmm-quickstart            the smallest program
  $build/examples/vpmm-replay --help         recorded traces on the simulated or a real GPU
  $build/examples/vpmm-stress --help         tries to break it, on the simulated or a real GPU
  cmake --install $build/examples            libvpmm.a, its headers, pkg-config and CMake files
  $root/tests/run.sh                         every test
EOF
