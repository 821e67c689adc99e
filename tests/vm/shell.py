"""A virtual machine that lives for many commands, on QEMU's own network, and programs in it as the harness knows programs.

The host is 10.0.2.2 for the machine. Some ports of the host lead into the machine, at the same number: a server in it listens at one of
them, and is found by the host at 127.0.0.1 and by other machines at 10.0.2.2. Programs run by shell_server.py, over one such port.
"""
import json
import secrets
import signal
import socket
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import shell_server
from harness import PATIENCE, Failure, Program, Side, free_port, wait_until
from machine import Machine

HERE = Path(__file__).resolve().parent
MODULES = ("virtio_pci", "virtio_net", "virtio_balloon")
SCRIPTS = (HERE / "shell_server.py",)
HOST = "10.0.2.2"
PORTS = 24  # that lead into a machine: a port is used again only after so many others
FIRST_BOOT_SECONDS, BOOT_SECONDS, ANSWER_SECONDS = 120, 300, 60


class Shell(Machine):
    """Boots; await_boot() before the first command. `arguments` are QEMU's, with the memory."""

    def __init__(self, kernel, initramfs, name, arguments, **more):
        self.name, self.secret = name, secrets.token_hex(16)
        self.port = free_port()
        self.ports = [free_port() for _ in range(PORTS)]
        self.next_port = 0
        forwards = "".join(f",hostfwd=tcp:127.0.0.1:{outside}-:{inside}"
                           for outside, inside in [(self.port, shell_server.PORT), *((port, port) for port in self.ports)])
        network = ["-netdev", f"user,id=net,restrict=off{forwards}", "-device", "virtio-net-pci,netdev=net,romfile="]
        command = ["python3", "-S", str(HERE / "shell_server.py"), self.secret]
        super().__init__(kernel, initramfs, command, [*network, *arguments], memory=(), name=name, **more)

    def await_boot(self, times=1, before_another=lambda: None):
        """Until it has booted so often. A kernel that stands still in its first boot, as one of many does under the emulator, is begun anew
        once, aloud, after before_another()."""
        if times > 1:
            return self.await_serving(times, BOOT_SECONDS)
        try:
            self.await_serving(1, FIRST_BOOT_SECONDS)
        except Failure as reason:
            if not self.qemu.running():
                raise
            print(f"note: begun anew, as {reason}", flush=True)
            self.begin_anew(before_another)
            self.await_serving(1, BOOT_SECONDS)

    def await_serving(self, times, seconds):
        try:
            wait_until(lambda: self.said().count("serving\n") >= times, seconds, f"{self.name} has booted", [self.qemu])
        except Failure as reason:
            raise Failure(f"{reason}\n--- its console\n{self.console_says()}") from None

    def console_says(self):
        return self.console.read_text(errors="replace")[-4000:] if self.console.exists() else ""

    def free_port(self):
        self.next_port += 1
        return self.ports[self.next_port % PORTS]

    def request(self, what, seconds=ANSWER_SECONDS, **more):
        """The connection of a request that was sent."""
        try:
            connection = socket.create_connection(("127.0.0.1", self.port), timeout=seconds * PATIENCE)
            connection.sendall(json.dumps({"token": self.secret, "do": what, **more}).encode() + b"\n")
            return connection
        except OSError as error:
            raise Failure(f"{self.name} takes no request ({error})\n--- its console\n{self.console_says()}") from error

    def asks(self, what, **more):
        """Whether the answer is yes."""
        with self.request(what, **more) as connection, connection.makefile("rb") as stream:
            try:
                return next(_frames(stream), (b"", b""))[1] == b"0"
            except OSError as error:
                raise Failure(f"{self.name} does not answer ({error})\n--- its console\n{self.console_says()}") from error

    def leave(self, seconds=60):
        """Switches it off. Failure where its kernel has complained."""
        if not self.qemu.running():
            self.finish(0)
        self.asks("leave")
        code, _ = self.finish(seconds)
        if code != 0:
            raise Failure(f"{self.name} ended with {code}")

    def kill(self):
        self.qemu.process.kill()
        self.qemu.process.wait()


def _frames(stream):
    while head := stream.read(shell_server.FRAME.size):
        if len(head) < shell_server.FRAME.size:
            return
        kind, size = shell_server.FRAME.unpack(head)
        data = stream.read(size)
        if len(data) < size:
            return
        yield kind, data


class RemoteProgram:
    """A program in a machine, with the interface of harness.Program."""

    def __init__(self, shell, command, env=None, name=None):
        self.shell, self.command = shell, [str(word) for word in command]
        self.name = f"{name or self.command[0]} in {shell.name}"
        self.pid, self.returncode, self.error, self.lost = None, None, None, None
        self._said, self._changed = bytearray(), threading.Condition()
        self.connection = shell.request("run", command=self.command, env=dict(env or {}))
        self.connection.settimeout(None)  # a program may be silent; who waits for it has a deadline
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        Program.alive.append(self)
        with self._changed:
            self._changed.wait_for(lambda: self.pid or self.error or self.lost, ANSWER_SECONDS * PATIENCE)
        if not self.pid:
            self.stop()
            raise Failure(self.error or f"{self.name}: {self.lost or 'it is not started in time'}\n--- the console\n{shell.console_says()}")

    def _read(self):
        try:
            with self.connection.makefile("rb") as stream:
                for kind, data in _frames(stream):
                    with self._changed:
                        if kind == b"p":
                            self.pid = int(data)
                        elif kind == b"o":
                            self._said += data
                        elif kind == b"e":
                            self.error = data.decode()
                        elif kind == b"x":
                            self.returncode = int(data)
                        self._changed.notify_all()
            why = "the connection has ended"
        except OSError as error:
            why = str(error)
        with self._changed:
            if self.returncode is None:
                self.lost = why
            self._changed.notify_all()

    def output(self):
        with self._changed:
            return self._said.decode(errors="replace").replace("\r\n", "\n")

    def running(self):
        with self._changed:
            return self.returncode is None and self.lost is None

    def wait(self, seconds):
        """The exit code, or None when the deadline passes or the machine has gone, which output() then tells."""
        with self._changed:
            self._changed.wait_for(lambda: self.returncode is not None or self.lost, max(0.01, seconds))
            return self.returncode

    def send_signal(self, number):
        try:
            self.connection.sendall(bytes([number]))
        except OSError:
            pass  # its end is on the way, or the machine's

    def stop(self, grace_s=5.0):
        """Ends it with whatever it has started there; returns its exit code."""
        if self.running():
            self.send_signal(signal.SIGTERM)
            if self.wait(grace_s * PATIENCE) is None and self.running():
                self.send_signal(signal.SIGKILL)
                self.wait(ANSWER_SECONDS * PATIENCE)
        try:
            self.connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._reader.join(ANSWER_SECONDS)
        self.connection.close()
        if self in Program.alive:
            Program.alive.remove(self)
        return self.returncode

    def says(self):
        lost = f"\n    ({self.lost})" if self.lost else ""
        text = "\n".join("    " + line for line in self.output().strip().splitlines()[-40:])
        return f"--- {self.name}: {' '.join(self.command)}\n{text}{lost}"


class LastingProgram:
    """A program in a machine that no connection holds: it outlives whoever looks at it, and the QEMU that runs it. The interface is
    harness.Program's, as far as it is used."""
    LOOK_SECONDS = 0.3  # every look is a program there

    def __init__(self, side, command, name):
        self.side, self.command, self.name = side, [str(word) for word in command], f"{name} in {side.shell.name}"
        self.files = f"/tmp/lasting-{secrets.token_hex(4)}"
        self.returncode, self._said, self._looked = None, "", 0.0
        # Who starts it leaves when it has a session of its own. What a shell says of a program that a signal has ended goes nowhere: nobody reads
        # any more what it was started with, and SIGPIPE would end it before it writes the end down.
        inner = f'"$@" >{self.files}.said 2>&1 </dev/null & echo $! >{self.files}.new; mv {self.files}.new {self.files}.pid; wait $!; echo $? >{self.files}.new; mv {self.files}.new {self.files}.end'
        code, said = replace(side, plain=True).run(["sh", "-c", f'busybox setsid sh -c \'{inner}\' sh "$@" >/dev/null 2>&1 & while [ ! -e {self.files}.pid ]; do :; done; cat {self.files}.pid',
                                                    "sh", *side.command(self.command)], ANSWER_SECONDS)
        if code != 0:
            raise Failure(f"{self.name} cannot be started: {code}, {said}")
        self.pid = int(said)

    def _look(self, now=False):
        if self.returncode is not None or not now and time.monotonic() < self._looked + self.LOOK_SECONDS:
            return
        code, said = replace(self.side, plain=True).run(["sh", "-c", f"cat {self.files}.end 2>/dev/null || echo lives; tail -c 3000 {self.files}.said"], ANSWER_SECONDS)
        if code != 0:
            raise Failure(f"{self.name} cannot be looked at: {code}, {said}")
        end, _, self._said = said.partition("\n")
        self.returncode = None if end == "lives" else int(end)
        self._looked = time.monotonic()

    def output(self):
        """Its last words."""
        self._look()
        return self._said

    def running(self):
        self._look()
        return self.returncode is None

    def wait(self, seconds):
        deadline = time.monotonic() + seconds
        while self.running() and time.monotonic() < deadline:
            time.sleep(self.LOOK_SECONDS)
        return self.returncode

    def send_signal(self, number):
        replace(self.side, plain=True).run(["kill", f"-{int(number)}", str(self.pid)], ANSWER_SECONDS)

    def stop(self, grace_s=5.0):
        if self.side.shell.qemu.running() and self.running():
            self.send_signal(signal.SIGTERM)
            if self.wait(grace_s * PATIENCE) is None:
                self.send_signal(signal.SIGKILL)
                self.wait(ANSWER_SECONDS * PATIENCE)
        return self.returncode

    def says(self):
        return f"--- {self.name}: {' '.join(self.command)}\n{self._said}\n    ({'lives' if self.returncode is None else f'ended with {self.returncode}'})"


@dataclass
class MachineSide(Side):
    """Programs of a user in a machine; with `plain` not under vrdma."""
    shell: Shell | None = None
    env: dict = field(default_factory=lambda: {"LC_ALL": "C"})
    plain: bool = False

    def command(self, program):
        return self.as_user(program) if self.plain else super().command(program)

    def as_user(self, program):
        return ["setpriv", f"--reuid={self.uid}", f"--regid={self.uid}", "--clear-groups", "--", *program] if self.uid else list(program)

    def start(self, program, name):
        return RemoteProgram(self.shell, self.command(program), env=self.env, name=name)

    def run(self, program, seconds):
        remote = self.start(program, None)
        try:
            code = remote.wait(seconds * PATIENCE)
            if code is None:
                raise Failure(f"no end after {seconds * PATIENCE:.0f} s\n{remote.says()}")
            return code, remote.output()
        finally:
            remote.stop()

    def start_lasting(self, program, name):
        return LastingProgram(self, program, name)

    def free_port(self):
        return self.shell.free_port()

    def listening(self, _program, port):
        return self.shell.asks("listening", port=port)

    def address_of(self, server):
        return "127.0.0.1" if getattr(server, "shell", None) is self.shell else HOST


def both(shells, step):
    """Does step(shell) for all at once; the first failure is raised after all have ended."""
    failures = []

    def one(shell):
        try:
            step(shell)
        except Failure as reason:
            failures.append(reason)
    threads = [threading.Thread(target=one, args=(shell,)) for shell in shells]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
