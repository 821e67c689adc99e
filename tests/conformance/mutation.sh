#!/bin/bash
# Proves that the suite can fail: runs it over a provider with one defect at a time (saboteur.cpp).
# usage: mutation.sh BUILD_DIR PROVIDER_LIBRARY [GLOB]     (a running service must be reachable, as for the suite itself)
# exit: 0 every defect was noticed, 1 some were not
set -u
build=$1
provider=$2
glob=${3:-*}
source=$(dirname "$0")/saboteur.cpp
# What fails without any defect proves nothing.
except=()
while read -r name; do except+=(--except "$name"); done < <(
  LD_PRELOAD="$provider" timeout 300 "$build/bin/vrdma-conformance" --seed 11 | awk '/^FAIL/ { print $2 }')
[[ ${#except[@]} -eq 0 ]] || echo "failing already, left out: ${except[*]//--except/}"
unnoticed=0
total=0
for defect in $(grep -o '\(is\|lost\)([^)]*"[a-z-]*")' "$source" | grep -o '"[a-z-]*"' | tr -d '"' | sort -u); do
  # shellcheck disable=SC2053
  [[ $defect == $glob ]] || continue
  total=$((total + 1))
  output=$(CONFORMANCE_SABOTAGE=$defect LD_PRELOAD="$build/lib/conformance_saboteur.so:$provider" \
           timeout 300 "$build/bin/vrdma-conformance" --seed 11 --timeout-scale 0.15 --fail-fast "${except[@]}" 2>&1)
  status=$?
  if [[ $status -eq 1 ]]; then
    printf 'noticed    %-40s by %s\n' "$defect" "$(grep -m1 '^FAIL' <<<"$output" | awk '{print $2}')"
  else
    printf 'UNNOTICED  %-40s exit %s: %s\n' "$defect" "$status" "$(tail -1 <<<"$output")"
    unnoticed=$((unnoticed + 1))
  fi
done
echo "$total defects, $unnoticed unnoticed"
[[ $total -gt 0 && $unnoticed -eq 0 ]]
