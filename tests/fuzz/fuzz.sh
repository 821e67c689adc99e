#!/usr/bin/env bash
# fuzz.sh PROGRAM FOUND CORPUS: fuzzes from the seeds in CORPUS (which stay as they are) for VRDMA_FUZZ_SECONDS. What is new goes
# to the folder FOUND, from where the next run goes on; an input that fails is named at the end, with how to run it once more.
#
#   VRDMA_FUZZ_SECONDS  20; a few minutes when the code under it has changed
#   VRDMA_FUZZ_SEED     1; libFuzzer prints it. 0: another each time
set -uo pipefail
program=$1 found=$2 corpus=$3
seconds=${VRDMA_FUZZ_SECONDS:-20}
mkdir -p "$found/corpus"
rm -f "$found"/{crash,leak,oom,timeout}-*
timeout -k 10 $((seconds + 300)) "$program" -seed="${VRDMA_FUZZ_SEED:-1}" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 \
  -max_len=4096 -detect_leaks=1 -print_final_stats=1 -artifact_prefix="$found/" "$found/corpus" "$corpus" 2>&1 | grep -v -e '# Uses:' -e 'recommended dictionary'
status=${PIPESTATUS[0]}
for input in "$found"/{crash,leak,oom,timeout}-*; do
  [ ! -e "$input" ] || echo "FAILED on $input: run  $program $input ; once mended, keep it in $corpus"
done
exit "$status"
