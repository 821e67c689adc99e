"""Pairs of verbs_bench around one vrdmad, and the floors beside them: what the rows of speed.py and direct.py call."""

import json
import os
import re
import socket
import time
from pathlib import Path

from paths import PATIENCE, Build, Failure, Program, Service, Side, TempFolder, wait_until

MIB = 1 << 20


def tools_at(build_folder):
    """(build, folder of the measuring programs) of a build tree."""
    return Build.at(build_folder), Path(build_folder).resolve() / "tests"


def used_s(pid):
    return sum(int((task / "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir()) / 1e9


def proportional_kib(pid):
    """Resident memory; of what processes share, to each its part."""
    return int(re.search(r"^Pss:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.M).group(1))


class Bench:
    """What the rows call: floors and pairs of verbs_bench around one vrdmad. `programs`: the folder where these are."""

    def __init__(self, build, programs, seconds):
        self.seconds, self.build, self._for_others = seconds, build, None
        self.program, self.floor_program = programs / "verbs_bench", programs / "vrdma_floor"
        for path in (self.program, self.floor_program):
            if not path.exists():
                raise SystemExit(f"{path} does not exist: build it first (cmake --build --preset release)")
        self.service = Service(self.build)

    def _tools_for(self, uid):
        """The build, and verbs_bench; another user, who may not reach the build folder, has copies."""
        if uid is None:
            return self.build, self.program
        if not self._for_others:
            folder = TempFolder().path
            build, program = self.build.staged(folder), folder / "bin/verbs_bench"
            program.write_bytes(self.program.read_bytes())
            program.chmod(0o755)
            self._for_others = build, program
        return self._for_others

    def floor(self, what, *arguments, seconds=None):
        with_time = [self.floor_program, what, seconds or self.seconds, *arguments]
        return self._figures(Program(with_time, name=f"floor {what}"), what)[0]

    def _side(self, what, client, fd, uid, arguments, prefix=()):
        build, program = self._tools_for(uid)
        side = Side(build, uid=uid, env=self.service.environment())
        command = [program, what, *(["--peer-fd", fd] if fd is not None else []), *(["--client"] if client else []),
                   "--seconds", self.seconds, *arguments]
        return Program([*prefix, *side.command(command)], env=side.env, pass_fds=(fd,) if fd is not None else (),
                       name=f"{what} {'client' if client else 'server'}")

    def pair(self, what, *arguments, uid=None, client=(), server=()):
        """Starts both sides: (server, client)."""
        ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            return tuple(self._side(what, is_client, end.fileno(), uid, [*arguments, *own])
                         for end, is_client, own in zip(ends, (False, True), (server, client)))
        finally:
            for end in ends:
                end.close()

    def measure(self, what, *arguments, **more):
        """The client's figures of a pair that runs to its end."""
        server, client = self.pair(what, *arguments, **more)
        try:
            figures = self._figures(client, what)[0]
            code = server.wait(20 * PATIENCE)
            if code != 0:
                raise Failure(f"the server of {what} left with {code}\n{server.says()}")
            return figures
        except Failure as failure:
            raise Failure(f"{failure}\n{server.says()}") from None
        finally:
            client.stop()
            server.stop()
            self.service.check()

    def alone(self, what, *arguments, prefix=()):
        """All figures of a program without a peer, by their names. `prefix`: words before its command."""
        return {figures["what"]: figures for figures in self._figures(self._side(what, True, None, None, arguments, prefix), what)}

    def _figures(self, program, what):
        try:
            code = program.wait((60 + 10 * self.seconds) * PATIENCE)
            if code != 0:
                raise Failure(f"{what} {'did not end' if code is None else f'left with {code}'}\n{program.says()}")
            lines = [json.loads(line) for line in program.output().splitlines() if line.startswith("{")]
            if not lines:
                raise Failure(f"{what} printed no figures\n{program.says()}")
            return lines
        finally:
            program.stop()

    def beside(self, companions, body):
        """body() while a pair of programs, both of which have said "ready" or have no such word, keeps going."""
        server, client = companions
        try:
            wait_until(lambda: "ready" in client.output(), 30, f"{client.name} is ready", (server, client))
            return body()
        finally:
            for program in (client, server):
                program.stop()

    def pin_service(self, cpus):
        for task in Path(f"/proc/{self.service.program.pid}/task").iterdir():
            os.sched_setaffinity(int(task.name), cpus)

    def service_used_s(self):
        """Processor time of all threads of vrdmad, in nanosecond steps; /proc/PID/stat has steps of 10 ms."""
        return used_s(self.service.program.pid)

    def idle_cost(self):
        """Processor share in per cent over the time, and resident MiB, of vrdmad as it is now."""
        pid, seconds = self.service.program.pid, max(2.0, 5 * self.seconds)

        before, began = self.service_used_s(), time.monotonic()
        time.sleep(seconds)
        percent = 100 * (self.service_used_s() - before) / (time.monotonic() - began)
        resident = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
        return percent, int(resident.group(1)) / 1024
