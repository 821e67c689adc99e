"""Programs whose memory the service cannot reach, so that a thread of each program copies what is not mapped.

Why it cannot: it is another unprivileged user; the programs are not dumpable (their files may be executed and not read); Yama
lets only a parent in; or its configuration says so. There, a limit of file sizes also keeps every page out of the memory
window, so that nothing at all is mapped.
"""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import perftest
import pingpong
from harness import OTHER_UID, Failure, Program, Service, Side, Skip, TempFolder, as_user, free_port, need, run, wait_until

SERVICE_UID = 4242
SAID = "a thread of the program copies"
YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")


ITERATIONS = 200  # each takes several changes of thread


def cases():
    yield pingpong, pingpong.Case("rc", size=1, validate=True, iterations=ITERATIONS)
    yield pingpong, pingpong.Case("rc", size=100_001, validate=True, events=True, iterations=50)
    yield pingpong, pingpong.Case("uc", size=100, validate=True, iterations=ITERATIONS)
    yield pingpong, pingpong.Case("ud", size=8, validate=True, iterations=ITERATIONS)
    yield pingpong, pingpong.Case("srq", size=1, validate=True, iterations=ITERATIONS)
    for verb in perftest.VERBS:
        yield perftest, perftest.Case(verb, "lat", iterations=ITERATIONS)
    for size in (100, 65537, 1 << 20):  # within a page, over its end, and many at once; all sizes take two thirds of the whole test's time
        yield perftest, perftest.Case("write", "bw", size=size, iterations=5)
        yield perftest, perftest.Case("read", "bw", size=size, iterations=5)
    yield perftest, perftest.Case("atomic", "bw", qps=16, iterations=ITERATIONS)
    yield perftest, perftest.Case("send", "bw", bidirectional=True, qps=16, iterations=ITERATIONS)


@dataclass
class CopiedSide(Side):
    limited: bool = False

    def command(self, program):
        return super().command((["prlimit", f"--fsize={1 << 30}"] if self.limited else []) + list(program))


@dataclass(frozen=True)
class Way:
    name: str
    service_uid: int | None = None
    uids: tuple = (None, None)
    config: dict | None = None
    limited: bool = False
    unreadable: bool = False  # the programs' files
    yama: bool = False        # only where it closes the way


WAYS = (
    Way("nothing is mapped", config={"process_memory": "guest"}, limited=True),
    Way("the service is another user", service_uid=SERVICE_UID, uids=(None, OTHER_UID)),
    Way("the programs are not dumpable", service_uid=OTHER_UID, uids=(OTHER_UID, OTHER_UID), unreadable=True),
    Way("Yama's ptrace scope", service_uid=OTHER_UID, uids=(OTHER_UID, OTHER_UID), yama=True),
)


class World:
    """A service for one way, and the sides of its pairs."""

    def __init__(self, build, way):
        if way.service_uid is not None and os.geteuid() != 0:
            raise Skip("a service of another user needs root")
        if way.yama and (not YAMA.exists() or YAMA.read_text().strip() == "0"):
            raise Skip("no Yama here, or its ptrace scope is 0")
        self.way = way
        self.programs = self._unreadable_programs() if way.unreadable else None
        self.service = Service(build, uid=way.service_uid, config=way.config)
        self.build = build

    @staticmethod
    def _unreadable_programs():
        folder = TempFolder(mode=0o755)
        for program in {case.program for _, case in cases()}:
            if found := shutil.which(program):
                shutil.copy2(found, folder.path / program)
                (folder.path / program).chmod(0o711)
        return folder

    def side(self, number):
        env = {**self.service.environment(), "VRDMA_PARTIAL_PAGES": "stay"}  # what is left to be copied is small
        if self.programs:
            env["PATH"] = f"{self.programs.path}:{env['PATH']}"
        return CopiedSide(self.build, uid=self.way.uids[number], env=env, limited=self.way.limited)

    def run_case(self, kind, case):
        need(case.program)
        figures = kind.run_case(case, (self.side(0), self.side(1)))
        self.service.check()
        return figures

    def shown(self):
        """A program registers a byte and waits for its peer: `vrdma show` says who copies it."""
        need("ibv_rc_pingpong")
        side, port = self.side(0), free_port()
        server = Program(side.command(["ibv_rc_pingpong", "-s", "1", "-p", str(port)]), env=side.env, name="server")
        try:
            paths = []

            def registered():
                code, text = run([*as_user(self.way.uids[0]), self.build.vrdma, "show", "mrs", "--json"], 20, env=side.env)
                if code != 0:
                    raise Failure(f"vrdma show left with {code}: {text}")
                paths[:] = [(mr["path"], mr["unmapped_by"]) for mr in json.loads(text)]
                return bool(paths)
            wait_until(registered, 20, "a registration is shown", [server])
            if paths != [("guest-copy", "guest-copy")]:
                raise Failure(f"it is shown as {paths}")
            if SAID not in self.service.program.output():
                raise Failure(f"the service's log does not say it\n{self.service.program.says()}")
        finally:
            server.stop()
        return "path guest-copy"

    def close(self):
        code, said = self.service.stop()
        if self.programs:
            self.programs.remove()
        if code != 0:
            raise Failure(f"vrdmad left with {code}\n{said}")
