# shellcheck shell=bash
# setup.sh - what tests/run.sh and examples/run.sh share: the packages they need, cuda.h, and the builds.
#
# Sourced, not run. Sets:
#   root    the repository
#   build   where everything goes that is made: $VPMM_BUILD_DIR, or build/ in the repository
#   cores   how many jobs run at once

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
build=$(realpath -m "${VPMM_BUILD_DIR:-$root/build}")
cores=$(nproc 2>/dev/null || echo 2)

say() { printf '[%4ds] %s\n' "$SECONDS" "$*"; }

die() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# as_root <command>...: runs it as root, or answers 1 if that cannot be.
as_root() {
  if [ "$(id -u)" -eq 0 ]; then
    "$@"
  elif command -v sudo >/dev/null 2>&1; then
    sudo "$@"
  else
    return 1
  fi
}

is_installed() {
  [ "$(dpkg-query -W -f='${Status}' "$1" 2>/dev/null)" = "install ok installed" ]
}

# install_missing <need>...: a need is a package, or command=package where any such command will do.
install_missing() {
  local need missing=()
  for need in "$@"; do
    case $need in
    *=*) command -v "${need%%=*}" >/dev/null 2>&1 || missing+=("${need#*=}") ;;
    *) ! command -v dpkg-query >/dev/null 2>&1 || is_installed "$need" || missing+=("$need") ;;
    esac
  done
  [ ${#missing[@]} -gt 0 ] || return 0
  mapfile -t missing < <(printf '%s\n' "${missing[@]}" | sort -u)
  command -v apt-get >/dev/null 2>&1 || die "these Debian packages' like are missing: ${missing[*]}"
  say "installing ${missing[*]}"
  if ! as_root apt-get -qq update; then
    die "missing packages; as root: apt-get install ${missing[*]}"
  fi
  as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends "${missing[@]}" >/dev/null ||
    die "apt-get could not install ${missing[*]}"
}

# Prints the directory of a cuda.h that is there already.
find_cuda_h() {
  local dir
  for dir in "${CUDA_INCLUDE_DIR:-}" "${CUDA_PATH:+$CUDA_PATH/include}" "${CUDA_HOME:+$CUDA_HOME/include}" \
    /usr/local/cuda/include /usr/local/cuda-*/include /usr/include "$build/cache/usr/include"; do
    if [ -n "$dir" ] && [ -f "$dir/cuda.h" ]; then
      printf '%s\n' "$dir"
      return 0
    fi
  done
  return 1
}

# Takes cuda.h alone out of the distribution's nvidia-cuda-dev (installed, that is 2.8 GB of libraries which nothing
# here uses). A sources file and package lists of its own: the machine's are not touched, and root is not needed.
fetch_cuda_h() {
  local cache=$build/cache id suite uri keyring components apt
  command -v apt-get >/dev/null 2>&1 || die "cuda.h is not found: install the CUDA Toolkit's headers and set CUDA_INCLUDE_DIR"
  id=$(. /etc/os-release && echo "$ID")
  suite=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
  case $id in
  debian)
    uri=http://deb.debian.org/debian
    components="contrib non-free"
    keyring=/usr/share/keyrings/debian-archive-keyring.gpg
    ;;
  ubuntu)
    uri=http://archive.ubuntu.com/ubuntu
    [ "$(dpkg --print-architecture)" = amd64 ] || uri=http://ports.ubuntu.com/ubuntu-ports
    components="multiverse"
    keyring=/usr/share/keyrings/ubuntu-archive-keyring.gpg
    ;;
  *) die "cuda.h is not found: install the CUDA Toolkit's headers and set CUDA_INCLUDE_DIR" ;;
  esac

  # The mirror that this machine uses already, if it can be told.
  local mirror
  # shellcheck disable=SC2016 # apt-get expands $(REPO_URI)
  mirror=$(apt-get indextargets --format '$(REPO_URI)' "Release: $suite" "Component: main" 2>/dev/null | head -n 1 || true)
  uri=${mirror:-$uri}

  say "fetching cuda.h: nvidia-cuda-dev from $uri ($components), about 800 MB, once"
  mkdir -p "$cache/apt/sources" "$cache/apt/lists/partial" "$cache/apt/archives/partial"
  cat >"$cache/apt/sources/nvidia.sources" <<EOF
Types: deb
URIs: $uri
Suites: $suite
Components: $components
Signed-By: $keyring
EOF
  apt=(apt-get -qq -o "Dir::Etc::sourcelist=/dev/null" -o "Dir::Etc::sourceparts=$cache/apt/sources"
    -o "Dir::State::lists=$cache/apt/lists" -o "Dir::Cache=$cache/apt" -o "APT::Sandbox::User=root")
  "${apt[@]}" update || die "apt-get update failed for $uri $suite $components"
  rm -f "$cache"/apt/nvidia-cuda-dev_*.deb
  (cd "$cache/apt" && "${apt[@]}" download nvidia-cuda-dev) || die "nvidia-cuda-dev could not be downloaded from $uri"
  dpkg-deb --fsys-tarfile "$cache"/apt/nvidia-cuda-dev_*.deb | tar -x -C "$cache" ./usr/include/cuda.h
  rm -rf "$cache/apt"
  [ -f "$cache/usr/include/cuda.h" ] || die "nvidia-cuda-dev from $uri has no /usr/include/cuda.h"
}

# Sets cuda_include_dir.
need_cuda_h() {
  find_cuda_h >/dev/null || fetch_cuda_h
  cuda_include_dir=$(find_cuda_h)
  say "cuda.h: $cuda_include_dir"
}

# build_tree <name> <log> <cmake argument>...: configures and builds $build/<name>.
build_tree() {
  local tree=$build/$1 log=$2
  shift 2
  mkdir -p "$tree"
  {
    cmake -S "$root" -B "$tree" -DCUDA_INCLUDE_DIR="$cuda_include_dir" "$@" &&
      cmake --build "$tree" --parallel "$cores"
  } >"$log" 2>&1
}
