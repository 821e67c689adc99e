#!/usr/bin/env python3
"""One summary, in ctest's words, of the runs whose JUnit files (and ctest's own words, in NAME.log) lie in a folder: what was skipped
and why, what did not pass at the first try, what took longest, what failed, the count.

    test_summary.py FOLDER [FAILURE]...     a FAILURE is a sentence about a run that has no results at all
"""

import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path


def reasons(text):
    """The lines in which a test says what it left out."""
    said = [line.strip() for line in text.splitlines() if re.match(r"\s*(SKIP|skipped|note: no )", line)]
    return said[:5] or ["the test gave no reason"]


def failed_tries(log):
    """The tests that have failed at least once, by what ctest printed."""
    text = log.read_text(errors="replace") if log.exists() else ""
    return set(re.findall(r"^ *(?:\d+/\d+ )?Test +#\d+: (\S+) \.*\*\*\*(?!Skipped|Not Run)", text, re.MULTILINE))


def seconds(log):
    """How long a run took, by what ctest printed: its tests ran beside each other."""
    text = log.read_text(errors="replace") if log.exists() else ""
    return sum(float(s) for s in re.findall(r"^Total Test time \(real\) = +([0-9.]+) sec", text, re.MULTILINE))


def main():
    folder, failures = Path(sys.argv[1]), list(sys.argv[2:])
    total, times, skipped, partly, again, failed = 0, {}, [], [], [], [(sentence, "") for sentence in failures]
    for file in sorted(folder.glob("*.xml")):
        tries = failed_tries(file.with_suffix(".log"))
        for case in ElementTree.parse(file).getroot().iter("testcase"):
            name = f"{file.stem}/{case.get('name')}"
            output = case.findtext("system-out") or ""
            status = case.get("status")
            times[name] = float(case.get("time") or 0)
            if status == "disabled":
                continue
            total += 1
            if case.find("failure") is not None or status == "fail":
                message = case.find("failure")
                failed.append((name, (message.get("message") if message is not None else "") or "Failed"))
            elif case.find("skipped") is not None or status == "notrun":
                skipped.append((name, reasons(output)))
            elif re.search(r"^SKIP  ", output, re.MULTILINE):
                partly.append((name, [line for line in output.splitlines() if line.startswith("SKIP  ")][:10]))
            if case.get("name") in tries and status == "run":
                again.append((name, file.with_suffix(".log")))
    if skipped or partly:
        print("\nThe following tests were left out, in whole or in part:")
        for name, lines in skipped + partly:
            print(f"\t{name}")
            for line in lines:
                print(f"\t\t{line[:200]}")
    if again:
        print("\nThe following tests did not pass at the first try, a defect of theirs or of what they test:")
        for name, log in again:
            print(f"\t{name}: the first is in {log}")
    slowest = sorted(times, key=times.get, reverse=True)[:15]
    if sum(times.values()) > 600:
        print("\nThe slowest:")
        for name in slowest:
            print(f"\t{times[name]:7.1f} s  {name}")
    if failed:
        print("\nThe following tests FAILED:")
        for name, message in failed:
            print(f"\t{name}{f' ({message})' if message else ''}")
    if total == 0:
        print("\nNo tests were found!!!")
        return 1
    bad = len(failed)
    out_of = total + len(failures)
    print(f"\nTotal Test time (real) = {sum(map(seconds, folder.glob('*.log'))):7.2f} sec")
    print(f"\n{int(100 * (out_of - bad) / out_of)}% tests passed, {bad} tests failed out of {out_of}"
          + (f" ({len(skipped)} skipped)" if skipped else ""))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
