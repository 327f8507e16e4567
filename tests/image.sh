#!/usr/bin/env bash
set -euo pipefail

usage() {
  cat <<'EOT'
usage: tests/image.sh [--help]

Builds the Dockerfile's images without a Docker engine (buildah, on a base that debootstrap makes) and runs them on the
simulated GPU as an engine would: as the image's user, without capabilities, the file system read-only but for /tmp.

As root; what is missing is installed with apt-get. It takes about three minutes, and 4 GB under build/, or under
$VPMM_BUILD_DIR, which are given back at the end: buildah's own storage is not touched. The log is image.log there.

Exit status: 0 all is as it should be; 1 it is not; 2 wrong usage; 77 it cannot be tried here, and a line says why.
EOT
}

case ${1:-} in
"") ;;
-h | --help) usage && exit 0 ;;
*) usage >&2 && exit 2 ;;
esac

# shellcheck source=tests/setup.sh
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
log=$build/image.log

skip() { say "skipped: $*" && exit 77; }

# The rest has mounts and processes of its own: they end with it, and nothing is mounted on what is removed here.
if [ -z "${vpmm_image_work:-}" ]; then
  [ "$(id -u)" -eq 0 ] || skip "only root can build images without an engine"
  (install_missing buildah=buildah debootstrap=debootstrap python3=python3 debian-archive-keyring) ||
    skip "buildah or debootstrap is missing and cannot be installed"
  unshare --mount --pid --fork --mount-proc true 2>/dev/null || skip "namespaces are not allowed here"
  need_cuda_h
  work=$build/image # a run that was killed may have left one
  rm -rf "$work" && mkdir -p "$work"
  vpmm_image_work=$work CUDA_INCLUDE_DIR=$cuda_include_dir unshare --mount --pid --fork --kill-child --mount-proc \
    "${BASH_SOURCE[0]}" &
  trap 'kill -KILL $! 2>/dev/null || true; rm -rf "$work" 2>/dev/null || { sleep 1 && rm -rf "$work"; }' EXIT
  status=0
  wait $! || status=$?
  [ "$status" -ne 0 ] && [ "$status" -ne 77 ] || exit "$status"
  tail -n 20 "$log" >&2
  die "not all is as it should be; the whole log: $log"
fi

work=$vpmm_image_work
failed=0
exec {terminal}>&1 >"$log" 2>&1
say() {
  printf '[%4ds] %s\n' "$SECONDS" "$*"
  printf '[%4ds] %s\n' "$SECONDS" "$*" >&"$terminal"
}

check() { if "${@:2}"; then say "ok: $1"; else say "FAILED: $1" && failed=1; fi; } # check <what> <command>...

mkdir -p "$work/tmp" "$work/cache" /var/lib/containers
mount --bind "$work/cache" /var/lib/containers # buildah keeps a cache there, whatever --root is
export TMPDIR=$work/tmp BUILDAH_ISOLATION=chroot
buildah=(buildah --root "$work/storage" --runroot "$work/run" --storage-driver vfs)

# config <field>: of the image, an item a line.
config() { "${buildah[@]}" inspect --type image --format "{{range .Docker.Config.$1}}{{println .}}{{end}}" "$image"; }

# open_image <target>: builds and unpacks it. cuda.h is lent by this machine: the build would fetch 800 MB.
open_image() {
  image=localhost/vpmm-$1
  say "building the target $1"
  "${buildah[@]}" build --format docker --pull-never --build-arg BASE_IMAGE=localhost/base --target "$1" \
    --volume "$CUDA_INCLUDE_DIR:/usr/local/cuda/include:ro" --tag "$image" "$root"
  tree=$("${buildah[@]}" mount "$("${buildah[@]}" from --pull-never "$image")")
  user=$("${buildah[@]}" inspect --type image --format '{{.Docker.Config.User}}' "$image")
  mapfile -t program < <(config Entrypoint | grep .)
  mapfile -t environment < <(config Env | grep .)
  mapfile -t health < <(config Healthcheck.Test | sed '1d;/^$/d')
}

# The first process of a container: <tree> <user:group> <command>...
# shellcheck disable=SC2016 # another bash expands it
first='tree=$1 user=$2
mount --bind "$tree" "$tree"
mount -t proc proc "$tree/proc"
mount --rbind /dev "$tree/dev"
mount -t tmpfs -o mode=1777 tmpfs "$tree/tmp"
mount -o remount,bind,ro "$tree"
exec chroot "$tree" setpriv --reuid "${user%:*}" --regid "${user#*:}" --clear-groups --bounding-set=-all \
  --inh-caps=-all --no-new-privs "${@:3}"'

# inside <command>...: in the image.
inside() {
  timeout --kill-after=10 300 unshare --mount --pid --fork --kill-child --ipc --uts \
    bash -euc "$first" bash "$tree" "$user" env -i "${environment[@]}" "$@"
}

# ends_with <statuses> <words> <argument>...: whether the image's program ends with one of them, and says the words.
ends_with() {
  local status=0
  inside "${program[@]}" "${@:3}" >"$work/answer" 2>&1 || status=$?
  cat "$work/answer" && echo "status $status"
  [[ " $1 " == *" $status "* ]] && grep -qiE "$2" "$work/answer"
}

is_not_root() { [[ $user =~ ^[1-9][0-9]*:[1-9][0-9]*$ ]] && [ "$(inside id -u):$(inside id -g)" = "$user" ]; }
has_no_rights() { [ "$(inside grep -cE '^(Cap(Inh|Prm|Eff|Bnd|Amb):.0+|NoNewPrivs:.1)$' /proc/self/status)" = 6 ]; }
cannot_write() { [[ $(inside touch /x 2>&1) == *"Read-only file system"* ]]; }
has_no_driver() { [ -z "$(find "$tree" -name 'libcuda.so*' -o -name 'libnvidia-*')" ]; }
gives_json() { inside "${program[@]}" --driver sim --seconds 5 --json - | python3 -m json.tool; }
scraped() {
  python3 -c 'import sys, urllib.request as u; sys.exit(b"\nvpmm_" not in u.urlopen(sys.argv[1], timeout=5).read())' \
    "http://$1:$port/metrics"
}
find_program() {
  pid=$job
  until grep -qE '^NSpid:.*[0-9]\s1$' "/proc/$pid/status"; do
    pid=$(cut -d ' ' -f 1 "/proc/$pid/task/$pid/children") && [ -n "$pid" ] || return 1
  done
}
healthy() {
  nsenter --target "$pid" --mount --pid --root --wd --setuid "${user%:*}" --setgid "${user#*:}" "${health[@]}"
}
# ends_on_sigterm <status>
ends_on_sigterm() {
  local status=0 began=$SECONDS
  kill -TERM "$pid" && wait "$job" || status=$?
  say "  ended with status $status after $((SECONDS - began)) s"
  [ "$status" -eq "$1" ] && [ $((SECONDS - began)) -le 10 ]
}

# try_running <option for the port> <status after SIGTERM>: what is seen of the program while it runs, and how it ends.
try_running() {
  port=$((20000 + RANDOM % 10000))
  inside "${program[@]}" --driver sim --seconds 250 "$1" "$port" --metrics-address 0.0.0.0 &
  job=$!
  for _ in {1..60}; do
    if scraped 127.0.0.1; then break; fi
    sleep 0.5
  done
  check "it runs, as the first process" find_program
  check "the metrics are served, and not on 127.0.0.1 alone" scraped 127.0.0.2
  check "the HEALTHCHECK passes" healthy
  check "SIGTERM ends it in 10 seconds, with status $2" ends_on_sigterm "$2"
}

container=$("${buildah[@]}" from scratch)
tree=$("${buildah[@]}" mount "$container")
debootstrap --variant=minbase bookworm "$tree" http://deb.debian.org/debian ||
  skip "debootstrap could not make a base: $(tail -n 1 "$log")"
"${buildah[@]}" run "$container" true || skip "buildah may not chroot here: $(tail -n 1 "$log")"
"${buildah[@]}" commit --rm "$container" localhost/base

for target in stress server; do
  open_image "$target"
  check "the user is $user, a number and not root's" is_not_root
  check "no capability is left, and none can be had" has_no_rights
  check "the file system cannot be written" cannot_write
  check "no part of the driver is inside" has_no_driver
  if [ "$target" = stress ]; then
    check "five seconds on the simulator: status 0, and JSON" gives_json
    check "without a driver: status 77 or 3, and words" ends_with "77 3" 'libcuda|driver' --driver cuda
    try_running --metrics 143
  else
    check "a second on the simulator: status 0" ends_with 0 'workers served' --driver sim --seconds 1
    try_running --metrics-port 0
  fi
done
[ "$failed" -eq 0 ] && say "the images are as they should be"
