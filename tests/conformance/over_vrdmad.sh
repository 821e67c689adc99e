#!/usr/bin/env bash
# The conformance suite over a service of its own: over_vrdmad.sh BUILD LINK_LAYER [arguments of vrdma-conformance]
# VRDMAD_CONFIG: the service's configuration, as JSON text. FILE_KIB_MAX: a limit of file sizes for the suite; below that of the
# memory window (128 TiB) no page moves there, and all private memory is reached through the process. NEEDS_GIB: memory that must be
# available. Where there are no huge pages and we may reserve some, there are four while the whole suite runs: with --filter there are none, so
# that only who runs the whole one has to keep others from it.
set -euo pipefail
build=$1 link_layer=$2
shift 2
if [ -n "${NEEDS_GIB:-}" ] && [ "$(awk '/^MemAvailable:/ { print int($2 / 1048576) }' /proc/meminfo)" -lt "$NEEDS_GIB" ]; then
  echo "SKIP  $*: less than $NEEDS_GIB GiB of memory available"
  exit 77
fi
folder=$(mktemp -d)
service=
huge_pages=/proc/sys/vm/nr_hugepages
lent=0
[[ " $* " == *" --filter "* ]] || [ "$(cat $huge_pages 2>/dev/null)" != 0 ] || ! echo 4 2>/dev/null >$huge_pages || lent=1
cleanup() {
  [ "$lent" = 0 ] || echo 0 >$huge_pages
  [ -z "$service" ] || kill "$service" 2>/dev/null || true
  [ -z "$service" ] || wait "$service" 2>/dev/null || true
  rm -rf "$folder"
}
trap cleanup EXIT
mkfifo "$folder/ready"
echo "${VRDMAD_CONFIG:-{\}}" >"$folder/vrdmad.json"
"$build/bin/vrdmad" --config "$folder/vrdmad.json" --socket "$folder/vrdmad.sock" --log-level warn --ready-fd 3 3>"$folder/ready" &
service=$!
read -r -n 1 -t 20 _ <"$folder/ready" || { echo "vrdmad did not come up"; exit 1; }
gid=()
[ "$link_layer" = ib ] || gid=(--gid-index 3)
[ -z "${FILE_KIB_MAX:-}" ] || ulimit -f "$FILE_KIB_MAX"
VRDMA_SOCKET=$folder/vrdmad.sock "$build/bin/vrdma" run --link-layer "$link_layer" -- \
  "$build/bin/vrdma-conformance" --dev vrdma0 "${gid[@]}" "$@"
