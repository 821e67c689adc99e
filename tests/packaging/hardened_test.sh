#!/bin/bash
# hardened_test.sh PROGRAM...: each is placed at random, has its relocations done and made read-only before it runs, and guards its stack.
# (No `grep -q`, which would end readelf by SIGPIPE.)
set -euo pipefail
command -v readelf >/dev/null || { echo "SKIP  readelf is missing (apt-get install binutils)"; exit 77; }
code=0
for program in "$@"; do
    has() { grep "$2" <<<"$1" >/dev/null || { echo "FAILED: $program $3"; code=1; }; }
    dynamic=$(readelf -W --dynamic "$program") symbols=$(readelf -W --dyn-syms "$program")
    has "$dynamic" 'FLAGS_1.* PIE' "is no position-independent executable"
    has "$dynamic" 'FLAGS.* \(BIND_\)\?NOW' "looks libc's functions up as it calls them (-z now)"
    has "$(readelf -W --segments "$program")" GNU_RELRO "has no read-only relocations (-z relro)"
    has "$symbols" __stack_chk_fail "does not guard its stack (-fstack-protector-strong)"
done
exit $code
