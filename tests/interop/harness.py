"""The interoperability harness: processes with deadlines, a private vrdmad, pairs of programs, and the tally.

Standard library only. Everything started here runs in a session of its own, is waited for under a deadline and is
killed by its own process group, also when the harness is interrupted. Nothing is ever found or killed by name.
"""

import ctypes
import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

SKIPPED_EXIT_CODE = 77  # what ctest takes as "skipped"
PATIENCE = float(os.environ.get("VRDMA_TEST_PATIENCE", "1"))  # multiplies every deadline: sanitizers, slow machines
PR_SET_PDEATHSIG = 1


class Failure(Exception):
    """A case failed; the text says why and carries what the programs said."""


class Skip(Exception):
    """A case cannot run here; the text says what is missing."""


def _die_with_harness():
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


# ---------------------------------------------------------------------------------------------------- processes

def let_go(holder, seconds):
    """Ends a process that lives until its input does. False: it had to be killed."""
    holder.stdin.close()
    holder.stdout.close()
    try:
        holder.wait(seconds)
        return True
    except subprocess.TimeoutExpired:
        holder.kill()
        holder.wait()
        return False


class Program:
    """A started program: its output goes to a file, so that it can never block on us."""

    alive = []  # every one not yet reaped, for clean_up()

    def __init__(self, command, env=None, cwd=None, pass_fds=(), terminal=False, name=None, stdin=subprocess.DEVNULL):
        self.command = [str(part) for part in command]
        self.name = name or self.command[0]
        self.output_file = tempfile.TemporaryFile()
        self.terminal = None
        stdout = self.output_file
        if terminal:  # programs that never flush write whole lines to a terminal only
            self.terminal, stdout = os.openpty()
        try:
            self.process = subprocess.Popen(self.command, stdin=stdin, stdout=stdout, stderr=stdout,
                                            env=env, cwd=cwd, pass_fds=pass_fds, start_new_session=True,
                                            preexec_fn=_die_with_harness)
        except OSError as error:
            raise Failure(f"cannot start {' '.join(self.command)}: {error}") from error
        finally:
            if terminal:
                os.close(stdout)
        Program.alive.append(self)

    @property
    def pid(self):
        return self.process.pid

    @property
    def returncode(self):
        return self.process.returncode

    def output(self):
        if self.terminal is not None:
            while select.select([self.terminal], [], [], 0)[0]:
                try:
                    chunk = os.read(self.terminal, 65536)
                except OSError:  # EIO: nobody holds the other end any more
                    break
                if not chunk:
                    break
                self.output_file.write(chunk)
        self.output_file.flush()
        return os.pread(self.output_file.fileno(), 1 << 22, 0).decode(errors="replace")

    def running(self):
        return self.process.poll() is None

    def wait(self, seconds):
        """The exit code, or None when the deadline passes."""
        try:
            return self.process.wait(max(0.01, seconds))
        except subprocess.TimeoutExpired:
            return None

    def stop(self, grace_s=2.0):
        """Ends the program and whatever it started in its session; returns its exit code."""
        if self.running():
            self._signal(signal.SIGTERM)
            if self.wait(grace_s) is None:
                self.kill()
        self._signal(signal.SIGKILL)  # what it left behind in its group
        self.output()
        if self.terminal is not None:
            os.close(self.terminal)
            self.terminal = None
        if self in Program.alive:
            Program.alive.remove(self)
        return self.process.returncode

    def kill(self):
        """At once, with what it started in its session."""
        self._signal(signal.SIGKILL)
        self.process.wait()

    def _signal(self, number):
        try:
            os.killpg(self.process.pid, number)  # a session leader's pid is its group's id until the group is empty
        except (ProcessLookupError, PermissionError):
            pass

    def says(self):
        text = self.output().strip()
        return f"--- {self.name}: {' '.join(self.command)}\n" + "\n".join("    " + line for line in text.splitlines()[-40:])


def clean_up():
    for program in list(Program.alive):
        program.stop(grace_s=0.2)
    for folder in list(TempFolder.alive):
        folder.remove()


def clean_up_on_signals():
    """Turns signals that end us into SystemExit, so that every `finally` runs."""
    def leave(number, _frame):
        raise SystemExit(128 + number)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, leave)


def exit_code_of(test, what):
    """A test program's exit code, and how long it took: test() returns it, or raises Failure, or Skip where `what` cannot be had here.
    Whatever happens, nothing that was started is left."""
    clean_up_on_signals()
    begun = time.monotonic()
    try:
        return test()
    except Skip as reason:
        print(f"SKIP  {what}: {reason}")
        return SKIPPED_EXIT_CODE
    except Failure as reason:
        print(f"FAIL  {reason}")
        return 1
    finally:
        print(f"{time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
        clean_up()


def run(command, seconds, env=None, cwd=None, name=None):
    """Runs a program to its end: (exit code, output). Raises Failure at the deadline."""
    program = Program(command, env=env, cwd=cwd, name=name)
    try:
        code = program.wait(seconds * PATIENCE)
        if code is None:
            program.stop()
            raise Failure(f"no end after {seconds * PATIENCE:.0f} s\n{program.says()}")
        return code, program.output()
    finally:
        program.stop()


def wait_until(condition, seconds, what, programs=()):
    """Waits for condition() to be true while all `programs` run."""
    deadline = time.monotonic() + seconds * PATIENCE
    while True:
        if condition():
            return
        for program in programs:
            if not program.running():
                raise Failure(f"{program.name} ended with {program.returncode} before {what}\n{program.says()}")
        if time.monotonic() > deadline:
            raise Failure(f"waited {seconds * PATIENCE:.0f} s in vain: {what}\n" + "\n".join(p.says() for p in programs))
        time.sleep(0.005)


class TempFolder:
    alive = []

    def __init__(self, mode=0o755, owner=None):
        self.path = Path(tempfile.mkdtemp(prefix="vrdma-interop."))
        os.chmod(self.path, mode)
        if owner is not None:
            os.chown(self.path, owner, owner)
        TempFolder.alive.append(self)

    def remove(self):
        shutil.rmtree(self.path, ignore_errors=True)
        if self in TempFolder.alive:
            TempFolder.alive.remove(self)


# ---------------------------------------------------------------------------------------------------- ports

_given_ports = set()


def free_port():
    """A TCP port that nobody listens on and that this run has not given out before."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        if port not in _given_ports:
            _given_ports.add(port)
            return port


def listening(pid, port):
    """Whether a socket listens on `port` in the network namespace of `pid`."""
    wanted = f":{port:04X}"
    for table in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            columns = line.split()
            if columns[1].endswith(wanted) and columns[3] == "0A":  # TCP_LISTEN
                return True
    return False


# ---------------------------------------------------------------------------------------------------- what was built

@dataclass
class Build:
    """Where the two commands and the library are."""
    vrdma: Path
    vrdmad: Path
    library: Path

    @staticmethod
    def at(folder, vrdmad=None):
        folder = Path(folder).resolve()
        build = Build(folder / "bin/vrdma", Path(vrdmad).resolve() if vrdmad else folder / "bin/vrdmad", folder / "lib/libvrdma.so")
        for path in (build.vrdma, build.vrdmad, build.library):
            if not path.exists():
                raise SystemExit(f"{path} does not exist: build it first (cmake --build --preset release --target run_targets)")
        return build

    def staged(self, folder):
        """A copy in a folder that any user can reach; the build tree may lie under a home that is closed to others."""
        (folder / "bin").mkdir()
        (folder / "lib").mkdir()
        shutil.copy2(self.vrdma, folder / "bin/vrdma")
        shutil.copy2(self.vrdmad, folder / "bin/vrdmad")
        shutil.copy2(self.library, folder / "lib/libvrdma.so")
        for name in ("libibverbs.so.1", "libibverbs.so"):
            (folder / "lib" / name).symlink_to("libvrdma.so")
        for path in [folder, *folder.rglob("*")]:
            if not path.is_symlink():
                path.chmod(0o755)
        return Build(folder / "bin/vrdma", folder / "bin/vrdmad", folder / "lib/libvrdma.so")


class Service:
    """A private vrdmad on a socket in a folder of its own."""

    def __init__(self, build, arguments=(), uid=None, config=None):
        self.build, self.arguments, self.user, self.config = build, list(arguments), as_user(uid), config
        self.folder = TempFolder(mode=0o755, owner=uid)
        if config is not None:
            (self.folder.path / "vrdmad.json").write_text(json.dumps(config))
            self.arguments += ["--config", self.folder.path / "vrdmad.json"]
        self.socket = self.folder.path / "vrdmad.sock"
        self.program = None
        self.start()

    def start(self):
        ready_read, ready_write = os.pipe()
        try:
            self.program = Program([*self.user, self.build.vrdmad, "--socket", self.socket, "--foreground", "--ready-fd", ready_write,
                                    *self.arguments], pass_fds=(ready_write,), name="vrdmad")
        finally:
            os.close(ready_write)
        try:
            if not select.select([ready_read], [], [], 20 * PATIENCE)[0] or os.read(ready_read, 1) == b"":
                self.program.stop()
                raise Failure(f"vrdmad did not come up\n{self.program.says()}")
        finally:
            os.close(ready_read)

    def check(self):
        """Raises Failure when the service has died; a new one stands in for it afterwards."""
        if self.program.running():
            return
        said = self.program.says()
        code = self.program.stop()
        self.start()
        raise Failure(f"vrdmad died with {code}\n{said}")

    def kill(self):
        self.program.process.kill()
        self.program.process.wait()

    def stop(self):
        code = self.program.stop(grace_s=10.0)
        said = self.program.says()
        self.folder.remove()
        return code, said

    def show(self, what=None):
        """What `vrdma show WHAT --json` says of it; all of it without WHAT."""
        program = Program([self.build.vrdma, "show", *([what] if what else []), "--json"], env=self.environment())
        code = program.wait(30 * PATIENCE)
        text = program.output()
        program.stop()
        if code != 0:
            raise Failure(f"vrdma show ended with {code}: {text}")
        return json.loads(text)

    def why_not_direct(self):
        """Why two processes of this machine may not be direct, as the service has said; None where it has not refused any."""
        refused = re.search(r"stay mediated: (.*)", self.program.output())
        return refused and refused[1].strip()

    def environment(self, **more):
        env = dict(os.environ, VRDMA_SOCKET=str(self.socket), LC_ALL="C")
        env.pop("LD_PRELOAD", None)
        env.update({key: str(value) for key, value in more.items()})
        return env


def listener_pid(path):
    """The process that listens on a unix socket, from the socket's own credentials; None if nobody does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return None
        credentials = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        return int.from_bytes(credentials[:4], sys.byteorder) or None


# ---------------------------------------------------------------------------------------------------- users

OTHER_UID = 64321  # has no entry in passwd, as in many containers


def as_user(uid):
    """The words before a command that run it as another user. Root only."""
    if uid is None or uid == os.geteuid():
        return []
    if not shutil.which("setpriv"):
        raise Skip("setpriv is not installed (package util-linux)")
    return ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--"]


@dataclass
class Side:
    """How one program of a pair is started: as whom, and in front of what."""
    build: Build
    uid: int | None = None
    link_layer: str | None = None
    env: dict = field(default_factory=lambda: dict(os.environ))  # of the process that is started
    address: str = "127.0.0.1"  # where the peer finds this side's TCP socket

    def start(self, program, name):
        return Program(self.command(program), env=self.env, name=name)

    def run(self, program, seconds):
        """To its end, as harness.run()."""
        return run(self.command(program), seconds, env=self.env)

    # Overridden by sides that are elsewhere.
    def free_port(self):
        return free_port()

    def listening(self, program, port):
        return listening(program.pid, port)

    def address_of(self, server):
        """Where a program of this side finds the TCP socket of one of that side."""
        return server.address

    def command(self, program):
        layer = ["--link-layer", self.link_layer] if self.link_layer else []
        return [*as_user(self.uid), self.build.vrdma, "run", *layer, "--", *program]


# ---------------------------------------------------------------------------------------------------- pairs

# What a program prints when it did not do its work but may still leave with 0.
BAD_WORDS = re.compile(r"invalid data|Failed status|Completion with error|Did not get Message|Couldn't |Failed to |"
                       r"Unable to |Segmentation|Assertion|vrdma: cannot", re.IGNORECASE)


@dataclass
class PairResult:
    server: str
    client: str
    seconds: float


def run_pair(server_side, client_side, server_command, client_command, port, seconds, server_stays=False,
             bad_words=BAD_WORDS):
    """Starts a server, waits until it listens, starts its client; both must end with 0 before the deadline.

    With server_stays the server serves for ever (qperf) and is stopped after the client.
    """
    started = time.monotonic()
    deadline = started + seconds * PATIENCE
    server = server_side.start(server_command, "server")
    client = None
    try:
        wait_until(lambda: server_side.listening(server, port), min(seconds, 30), f"the server listens on port {port}", [server])
        client = client_side.start(client_command, "client")
        client_code = client.wait(deadline - time.monotonic())
        server_code = 0
        if client_code is not None and not server_stays:
            # Once the client has left, its server has nothing to wait for.
            server_code = server.wait(min(deadline - time.monotonic(), 15 * PATIENCE))
        both = f"\n{server.says()}\n{client.says()}"
        if client_code is None:
            raise Failure(f"the client did not end in {seconds * PATIENCE:.0f} s{both}")
        if client_code != 0:
            raise Failure(f"the client left with {client_code}{both}")
        if server_code is None:
            raise Failure(f"the server did not end after its client had{both}")
        if server_code != 0:
            raise Failure(f"the server left with {server_code}{both}")
        for program in (server, client):
            if found := bad_words.search(program.output()):
                raise Failure(f"the {program.name} says \"{found.group(0)}\"{both}")
        return PairResult(server.output(), client.output(), time.monotonic() - started)
    finally:
        if client:
            client.stop()
        server.stop()


# ---------------------------------------------------------------------------------------------------- the tally

class Tally:
    def __init__(self, stop_at_failure=False):
        self.passed, self.failed, self.skipped = [], [], []
        self.stop_at_failure = stop_at_failure

    def case(self, name, function):
        """Runs one case: function() returns a short text of figures, or raises Failure or Skip."""
        started = time.monotonic()
        try:
            figures = function() or ""
        except Skip as reason:
            self.skipped.append(name)
            print(f"SKIP  {name}: {reason}", flush=True)
        except Failure as reason:
            self.failed.append(name)
            print(f"FAIL  {name}: {reason}", flush=True)
            if self.stop_at_failure:
                raise SystemExit(self.finish()) from None
        else:
            self.passed.append(name)
            print(f"ok    {name}  {figures}  ({time.monotonic() - started:.1f} s)", flush=True)

    def finish(self):
        for name in self.failed:
            print(f"failed: {name}")
        print(f"{len(self.passed)} passed, {len(self.failed)} failed, {len(self.skipped)} skipped", flush=True)
        if self.failed:
            return 1
        return 0 if self.passed else SKIPPED_EXIT_CODE


def check_suite(code, client, server):
    """Raises Failure unless the conformance suite's client has passed some cases and failed none."""
    passed = re.search(r"^(\d+) passed, 0 failed", client.output(), re.MULTILINE)
    if code != 0 or not passed or int(passed[1]) == 0:
        lines = client.output().splitlines()
        failed = [line for at, first in enumerate(lines) if first.startswith("FAIL") for line in lines[at:at + 4]]
        raise Failure("\n".join([f"the suite ended with {code}", *failed, client.says(), server.says()]))


def drawn(items, count, source):
    """So many of the items, in their order; all of them without a count."""
    items = list(items)
    if not count or count >= len(items):
        return items
    return [items[number] for number in sorted(source.sample(range(len(items)), count))]


def need(*programs):
    for program in programs:
        if not shutil.which(program):
            raise Skip(f"{program} is not installed")
