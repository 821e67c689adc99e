"""Where the harness is (tests/interop, beside this folder in the source and where it is installed), and what is used of it."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent / "tests"
sys.path[:0] = [str(TESTS / "interop"), str(TESTS / "hosts")]  # tests/vm has names of its own: machines.py adds it

import figures  # noqa: E402,F401
from harness import (OTHER_UID, PATIENCE, SKIPPED_EXIT_CODE, Build, Failure, PairResult, Program, Service, Side, Skip, TempFolder,  # noqa: E402,F401
                     clean_up, clean_up_on_signals, exit_code_of, free_port, listening, run, run_pair, wait_until)
