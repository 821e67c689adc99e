#!/bin/bash
# Proves that the suite can fail: gives the provider one defect at a time (saboteur.cpp) and expects the test that
# mutations.txt names to fail, and to pass again without the defect.
# usage: mutation.sh BUILD_DIR PROVIDER_LIBRARY [GLOB]     (a service must be reachable, as for the suite itself)
# exit: 0 every defect was noticed, 1 some were not
set -u
build=$1
provider=$2
glob=${3:-*}
here=$(dirname "$0")
suite() { timeout 120 "$build/bin/vrdma-conformance" --seed 11 --timeout-scale 0.3 --filter "$1" >/dev/null 2>&1; }
unnoticed=0
total=0
while IFS='|' read -r defect test; do
  # shellcheck disable=SC2053
  [[ $defect == \#* || $defect != $glob ]] && continue
  total=$((total + 1))
  CONFORMANCE_SABOTAGE=$defect LD_PRELOAD="$build/lib/conformance_saboteur.so:$provider" suite "$test"
  with=$?
  CONFORMANCE_SABOTAGE=none LD_PRELOAD="$build/lib/conformance_saboteur.so:$provider" suite "$test"
  without=$?
  if [[ $with -eq 1 && $without -eq 0 ]]; then
    echo "noticed    $defect by $test"
  else
    echo "UNNOTICED  $defect by $test (exit $with with the defect, $without without)"
    unnoticed=$((unnoticed + 1))
  fi
done <"$here/mutations.txt"
echo "$total defects, $unnoticed unnoticed"
[[ $total -gt 0 && $unnoticed -eq 0 ]]
