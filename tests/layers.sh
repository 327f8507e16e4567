#!/usr/bin/env bash
# tests/layers.sh: whether each file of lib/ includes only files of its own room and of those below it (lib/README.md).
# Prints each include that does not; exit status 1 if there is one.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

rooms=(base driver space cache remap pool) # from the lowest on; a room may include its own files and lower rooms'
wrong=0

# level_of <room>: its place among the rooms, from 1 on; 0: it is none.
level_of() {
  local i
  for i in "${!rooms[@]}"; do
    if [ "${rooms[i]}" = "$1" ]; then
      echo $((i + 1))
      return
    fi
  done
  echo 0
}

complain() {
  printf '%s\n' "$1"
  wrong=1
}

while IFS=: read -r file included; do
  room=$(basename "$(dirname "$file")")
  level=$(level_of "${included%%/*}")
  if [ "$level" -eq 0 ]; then
    complain "$file includes \"$included\": a file of lib/ is included by its room, as in \"base/atomic.h\""
  elif [ "$level" -gt "$(level_of "$room")" ]; then
    complain "$file includes \"$included\": ${included%%/*} is above $room"
  fi
done < <(grep -oE '^[[:space:]]*#[[:space:]]*include "[^"]+"' "${rooms[@]/#/lib/}" -r | sed -E 's/:[^"]*"([^"]+)"/:\1/')

# The simulator is an archive of its own, PyTorch's back end and the preload are libraries: they stand on the public
# headers alone.
guests=(lib/sim lib/torch/src lib/preload)
for guest in "${guests[@]}"; do
  while IFS=: read -r file included; do
    [ -f "$guest/$included" ] || complain "$file includes \"$included\": $guest uses nothing of the library's inside"
  done < <(grep -oE '^[[:space:]]*#[[:space:]]*include "[^"]+"' -r "$guest" | sed -E 's/:[^"]*"([^"]+)"/:\1/')
done

for room in lib/*/; do
  room=$(basename "$room")
  [[ " ${guests[*]} " == *" lib/$room"[\ /]* ]] || [ "$(level_of "$room")" -gt 0 ] ||
    complain "lib/$room is not among the rooms of tests/layers.sh"
done
exit "$wrong"
