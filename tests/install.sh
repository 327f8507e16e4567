#!/usr/bin/env bash
set -euo pipefail

usage() {
  cat <<'EOT'
usage: tests/install.sh BUILD_DIR

Installs what is in BUILD_DIR into a folder that is then moved elsewhere, and builds and runs a program outside of this
tree (examples/quickstart.c, on the simulated GPU) in each way that there is: find_package, pkg-config --static,
add_subdirectory and FetchContent, which leave the program's own project as it is; one in C++, one with the exporter
where that is built, one under the preload, and one of two plug-ins that share a libvpmm.so. No archive has a global
symbol without the prefix vpmm_. The preload is also linked with link-time optimisation.

Exit status: 0 all of it works; 1 a line says what does not; 2 wrong usage.
EOT
}

case ${1:-} in
"") usage >&2 && exit 2 ;;
-h | --help) usage && exit 0 ;;
esac
build=$(cd "$1" && pwd)
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=0

# The cuda.h of the build, which is not where programs look for it by themselves.
cuda=$(sed -n 's/^CUDA_INCLUDE_DIR:PATH=//p' "$build/CMakeCache.txt")
export CUDA_PATH=${cuda%/include}

# attempt <what> <command>...: what it says is shown where it fails.
attempt() {
  if "${@:2}" >"$work/said" 2>&1; then
    echo "ok: $1"
  else
    echo "FAILED: $1"
    tail -n 30 "$work/said"
    failed=1
  fi
}

# program <folder> <source> <language> <target> <line>...: an outside program's CMake project, with these lines to find
# vpmm. It links the one target, which brings what it stands on.
program() {
  mkdir -p "$work/$1"
  cp "$2" "$work/$1/"
  {
    echo "cmake_minimum_required(VERSION 3.25)"
    echo "project(outside LANGUAGES C CXX)"
    printf '%s\n' "${@:5}"
    echo "add_executable(outside $(basename "$2"))"
    echo "target_compile_features(outside PRIVATE $3)"
    echo "target_link_libraries(outside PRIVATE $4)"
  } >"$work/$1/CMakeLists.txt"
}

# runs <folder> <argument>...: configured, built and run.
runs() {
  cmake -S "$work/$1" -B "$work/$1/build" -DCMAKE_PREFIX_PATH="$work/moved" &&
    cmake --build "$work/$1/build" --parallel 2 --target outside && "$work/$1/build/outside" "${@:2}"
}

# A program that serves its metrics, of no pool.
write_exporter() {
  cat >"$work/metrics.c" <<'EOT'
#include <vpmm/exporter.h>
int main(void)
{
    vpmm_exporter_config config = vpmm_exporter_config_default();
    vpmm_exporter *exporter;
    config.port = 0;
    return vpmm_exporter_start(&config, &exporter) != VPMM_SUCCESS || vpmm_exporter_stop(exporter) != VPMM_SUCCESS;
}
EOT
}

exporter_by_pkg_config() {
  export PKG_CONFIG_PATH=$work/moved/lib/pkgconfig
  # shellcheck disable=SC2046 # words, as pkg-config gives them
  cc -std=c11 "$work/metrics.c" -o "$work/metrics" $(pkg-config --cflags --libs vpmm_exporter) && "$work/metrics"
}

by_pkg_config() {
  export PKG_CONFIG_PATH=$work/moved/lib/pkgconfig
  # shellcheck disable=SC2046 # words, as pkg-config gives them
  cc -std=c11 "$root/examples/quickstart.c" -o "$work/quickstart" $(pkg-config --static --cflags --libs vpmm_sim vpmm) &&
    "$work/quickstart" --sim
}

# The version that the archive says, the header, pkg-config, the image's label and the Kubernetes job.
one_version() {
  export PKG_CONFIG_PATH=$work/moved/lib/pkgconfig
  local said
  cat >"$work/version.c" <<'EOT'
#include <vpmm/vpmm.h>
int main(void)
{
    return printf("%s %s\n", vpmm_version(), VPMM_VERSION) < 0;
}
EOT
  # shellcheck disable=SC2046 # words, as pkg-config gives them
  cc -std=c11 "$work/version.c" -o "$work/version" $(pkg-config --static --cflags --libs vpmm)
  said=$("$work/version")
  echo "$said"
  [ "$said" = "$(pkg-config --modversion vpmm) $(pkg-config --modversion vpmm)" ] &&
    grep -qx "ARG VERSION=${said#* }" "$root/Dockerfile" && grep -q "image: .*:${said#* }\$" "$root/stress/job.yaml"
}

only_prefixed() {
  local archive names
  for archive in "$work"/moved/lib/*.a; do
    names=$(nm --extern-only --defined-only --format=just-symbols "$archive" | grep -vE '^(vpmm_|$|.*\.o:$)' || true)
    [ -z "$names" ] || { echo "$archive: $names" && return 1; }
  done
}

# What a program takes into its own tree is not in its own installation.
leaves_the_installation() {
  cmake --install "$work/fetched/build" --prefix "$work/taken" && [ ! -e "$work/taken" ]
}

# An outside program under the installed library. Without a driver it runs as it does alone.
preloads() {
  LD_PRELOAD=$work/moved/lib/libvpmm_preload.so "$work/quickstart" --sim
}

# Folders that are not below the prefix, as some distributions have them.
absolute_folders() {
  cmake -S "$root" -B "$work/absolute" -DVPMM_BUILD_TESTS=OFF -DCMAKE_INSTALL_PREFIX=/opt/v \
    -DCMAKE_INSTALL_LIBDIR=/elsewhere/lib -DCMAKE_INSTALL_INCLUDEDIR=/elsewhere/include &&
    grep -qx libdir=/elsewhere/lib "$work/absolute/vpmm.pc" && grep -qx libdir=/elsewhere/lib "$work/absolute/vpmm_sim.pc" &&
    grep -qx includedir=/elsewhere/include "$work/absolute/vpmm.pc"
}

# A distribution's flags: the preload has assembly, which link-time optimisation does not see.
with_lto() {
  cmake -S "$root" -B "$work/lto" -DCMAKE_INTERPROCEDURAL_OPTIMIZATION=ON -DVPMM_BUILD_TESTS=OFF \
    -DCMAKE_BUILD_TYPE=Release -DCUDA_INCLUDE_DIR="$cuda" &&
    cmake --build "$work/lto" --parallel 2 --target vpmm_preload
}

# Where a library of the exporter's is missing, ON says which; AUTO builds the rest.
exporter_on() {
  local options=(-DVPMM_BUILD_TESTS=OFF -DCUDA_INCLUDE_DIR="$cuda")
  PKG_CONFIG_PATH='' PKG_CONFIG_LIBDIR=$work cmake -S "$root" -B "$work/no_exporter" "${options[@]}" &&
    ! PKG_CONFIG_PATH='' PKG_CONFIG_LIBDIR=$work cmake -S "$root" -B "$work/exporter_on" "${options[@]}" \
      -DVPMM_BUILD_EXPORTER=ON >"$work/missing" 2>&1 && grep -q "libmicrohttpd.*not found" "$work/missing"
}

# Either it compiles, or it says what to add to the include path.
memory_resource() {
  local flags=(-std=c++17 -fsyntax-only -I "$work/moved/include" -isystem "$cuda" -x c++ -)
  local program='#include <vpmm/memory_resource.hpp>
    static_assert(sizeof(vpmm::memory_resource) != 0, "");'
  c++ "${flags[@]}" <<<"$program" 2>"$work/errors" || grep '#error.*CCCL' "$work/errors" ||
    { cat "$work/errors" && return 1; }
}

# libvpmm.so, and two plug-ins that have one copy of it between them: one makes the pool, the other one's thread uses it.
shared() {
  cmake -S "$root" -B "$work/so" -DBUILD_SHARED_LIBS=ON -DVPMM_BUILD_TESTS=OFF -DVPMM_BUILD_EXAMPLES=OFF \
    -DVPMM_BUILD_STRESS=OFF -DVPMM_BUILD_PRELOAD=OFF -DVPMM_BUILD_EXPORTER=OFF -DCUDA_INCLUDE_DIR="$cuda" \
    -DCMAKE_INSTALL_LIBDIR=lib && cmake --build "$work/so" --parallel 2 &&
    cmake --install "$work/so" --prefix "$work/shared" && ! find "$work/shared" | grep exporter &&
    ! nm --dynamic --defined-only --format=just-symbols "$work/shared/lib/libvpmm.so" | grep -v '^vpmm_'
}

plug_ins() {
  cat >"$work/plug_in.c" <<'EOT'
#include <vpmm/sim.h>
#include <vpmm/vpmm.h>
vpmm_pool *make(void)
{
    vpmm_pool *pool = NULL;
    vpmm_config config = vpmm_config_default();
    config.driver = vpmm_sim_driver(vpmm_sim_create(NULL));
    return vpmm_pool_create(&config, &pool) == VPMM_SUCCESS ? pool : NULL;
}
int use(vpmm_pool *pool)
{
    CUdeviceptr memory;
    return vpmm_malloc(pool, 1000, NULL, &memory) != VPMM_SUCCESS || vpmm_free(pool, memory, NULL) != VPMM_SUCCESS ||
           vpmm_pool_destroy(pool) != VPMM_SUCCESS;
}
EOT
  cat >"$work/host.c" <<'EOT'
#include <dlfcn.h>
int main(int count, char **path)
{
    void *first = dlopen(path[1], RTLD_NOW | RTLD_LOCAL), *second = dlopen(path[count - 1], RTLD_NOW | RTLD_LOCAL);
    void *(*make)(void) = first ? (void *(*)(void))dlsym(first, "make") : 0;
    int (*use)(void *) = second ? (int (*)(void *))dlsym(second, "use") : 0;
    void *pool = make && use ? make() : 0;
    return pool ? use(pool) : 1;
}
EOT
  local flags
  flags=$(PKG_CONFIG_PATH=$work/shared/lib/pkgconfig pkg-config --cflags --libs vpmm_sim)
  for name in one two; do
    # shellcheck disable=SC2086 # words, as pkg-config gives them
    cc -shared -fPIC "$work/plug_in.c" -o "$work/$name.so" $flags -Wl,-rpath,"$work/shared/lib" || return 1
  done
  cc "$work/host.c" -o "$work/host" -ldl && "$work/host" "$work/one.so" "$work/two.so"
}

cmake --install "$build" --prefix "$work/installed" >"$work/said" || { cat "$work/said" && exit 1; }
[ ! -d "$work/installed/lib64" ] || mv "$work/installed/lib64" "$work/installed/lib"
mv "$work/installed" "$work/moved"

quickstart=$root/examples/quickstart.c
in_tree="add_subdirectory($root vpmm EXCLUDE_FROM_ALL)"
ln -s "$cuda" "$work/toolkit" # what the program's find_package(CUDAToolkit) has found comes before $CUDA_PATH
program package "$quickstart" c_std_11 vpmm::vpmm_sim "set(CUDAToolkit_INCLUDE_DIRS $work/toolkit)" \
  "find_package(vpmm 0.1 REQUIRED)" "if(NOT CUDA_INCLUDE_DIR STREQUAL CUDAToolkit_INCLUDE_DIRS)" \
  "message(FATAL_ERROR \"cuda.h: \${CUDA_INCLUDE_DIR}\")" "endif()"
program cpp "$root/tests/cpp/ownership.cpp" cxx_std_17 vpmm::vpmm_sim "find_package(vpmm REQUIRED)"
cp "$root/tests/cpp/need.hpp" "$work/cpp/"
program tree "$quickstart" c_std_11 vpmm::vpmm_sim "set(CMAKE_UNITY_BUILD ON)" "$in_tree" \
  "if(TARGET relacy_handovers OR CMAKE_BUILD_TYPE)" "message(FATAL_ERROR \"vpmm's tests, or its type of build\")" "endif()" \
  "if(DEFINED BUILD_SHARED_LIBS)" "message(FATAL_ERROR \"vpmm's kind of libraries\")" "endif()"
program fetched "$quickstart" c_std_11 vpmm::vpmm_sim "include(FetchContent)" "FetchContent_Declare(vpmm SOURCE_DIR $root)" \
  "FetchContent_MakeAvailable(vpmm)"

attempt "every global symbol begins with vpmm_" only_prefixed
attempt "pkg-config --static" by_pkg_config
attempt "the preload" preloads
attempt "one version" one_version
attempt "pkg-config of folders elsewhere" absolute_folders
attempt "find_package, and the program's toolkit" runs package --sim
attempt "find_package, in C++" runs cpp
attempt "add_subdirectory" runs tree --sim
attempt "FetchContent" runs fetched --sim
attempt "FetchContent, and what is installed" leaves_the_installation
attempt "a shared library" shared
attempt "one copy for two plug-ins" plug_ins
attempt "memory_resource.hpp, with CCCL or without" memory_resource
attempt "the preload, with link-time optimisation" with_lto
attempt "the exporter, where a library is missing" exporter_on
if [ -e "$work/moved/lib/libvpmm_exporter.a" ]; then
  write_exporter
  program exporter_package "$work/metrics.c" c_std_11 vpmm::vpmm_exporter "find_package(vpmm REQUIRED)"
  program exporter_tree "$work/metrics.c" c_std_11 vpmm::vpmm_exporter "$in_tree"
  attempt "the exporter, pkg-config" exporter_by_pkg_config
  attempt "the exporter, find_package" runs exporter_package
  attempt "the exporter, add_subdirectory" runs exporter_tree
fi
exit "$failed"
