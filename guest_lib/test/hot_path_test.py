#!/usr/bin/env python3
"""hot_path_test.py LIBRARY: what carries a message out, in direct mode, has no `rep stos` or `rep movs` but in the copies themselves.

What such an instruction has stored no load can have before it has reached its cache line, and all stores before it, the payload's in the
peer's line among them (docs/performance.md, "Copies that wait for stores"). Compilers use it to clear or copy a small object where they take
a branch for a rare one. 77: there is no objdump here.
"""

import re
import shutil
import subprocess
import sys

HOT = re.compile(r"carry_out|Datagram(Path|Sender)::(deliver|record|carry_out)|::record\(\)|push_to_peer|Ports::complete|poll_cq\(|::drain\(|post_send|post_recv")
COPIES = re.compile(r"copy_body|copy_any|copy_through|grh", re.IGNORECASE)


def main():
    if not shutil.which("objdump"):
        print("skipped: there is no objdump (package binutils)")
        return 77
    listing = subprocess.run(["objdump", "-d", "-C", "--no-show-raw-insn", sys.argv[1]], check=True, capture_output=True, text=True, timeout=120).stdout
    function, looked_at, found = "", set(), []
    for line in listing.splitlines():
        if head := re.match(r"^[0-9a-f]+ <(.*)>:$", line):
            function = head[1]
        elif HOT.search(function) and not COPIES.search(function):
            looked_at.add(function)
            if re.search(r"\srep (stos|movs)", line):
                found.append(f"{function}: {line.strip()}")
    print(f"{len(looked_at)} functions")
    if not any("carry_out_as" in name for name in looked_at):
        print("FAIL: carry_out_as is not among them: has it another name now?")
        return 1
    for each in found:
        print(f"FAIL: {each}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
