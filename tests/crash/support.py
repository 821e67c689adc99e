"""A private vrdmad, pairs of crash_client, and what the service says of itself."""
import contextlib
import json
import os
import pathlib
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import time

PATIENCE_S = 60 * float(os.environ.get("VRDMA_TEST_PATIENCE", "1"))
SHOW_REQUEST = 6
HEAD = struct.Struct("<QIIIIIi")  # RecordHead (tag, control, word), context, port, sequence, status


class Failure(Exception):
    pass


def eventually(what, condition):
    """The condition's first true value; Failure when it does not come."""
    deadline = time.monotonic() + PATIENCE_S
    pause = 0.0005
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise Failure(f"never happened: {what}")
        time.sleep(pause)
        pause = min(pause * 1.5, 0.02)


def state_of(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


class Service:
    """vrdmad at a socket in a folder of its own; killed and started again at the same path as often as a test likes."""

    def __init__(self, program, config=None, preexec=None):
        self.program, self.config, self.preexec = program, config, preexec
        self.folder = tempfile.mkdtemp(prefix="vrdma-crash-")
        os.chmod(self.folder, 0o755)
        self.path = os.path.join(self.folder, "vrdmad.sock")
        self.log = open(os.path.join(self.folder, "log"), "ab")
        self.process = None

    def start(self, crash_at=None):
        arguments = [self.program, "--socket", self.path, "--log-level", "info"]
        if self.config is not None:
            config = os.path.join(self.folder, "vrdmad.json")
            pathlib.Path(config).write_text(json.dumps(self.config))
            arguments += ["--config", config]
        environment = {k: v for k, v in os.environ.items() if k not in ("LD_PRELOAD", "VRDMA_CRASH_AT")}
        if crash_at:
            environment["VRDMA_CRASH_AT"] = crash_at
        reader, writer = os.pipe()
        try:
            self.process = subprocess.Popen(arguments + ["--ready-fd", str(writer)], pass_fds=[writer], env=environment,
                                            stderr=self.log, stdin=subprocess.DEVNULL, preexec_fn=self.preexec)
        finally:
            os.close(writer)
        with os.fdopen(reader, "rb") as ready:
            if ready.read(1) != b"\1":
                raise Failure(f"vrdmad did not start:\n{self.log_text()}")
        return self

    @property
    def pid(self):
        return self.process.pid

    def log_text(self):
        return pathlib.Path(self.folder, "log").read_text(errors="replace")[-2000:]

    def check_alive(self):
        if self.process.poll() is not None:
            raise Failure(f"vrdmad ended with {self.process.returncode}:\n{self.log_text()}")

    def kill(self):
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait()

    def close(self):
        self.kill()
        self.log.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self):
        return self.start()

    def __exit__(self, kind, *_):
        if kind is not None:
            print(f"vrdmad ended with {self.process.poll()} and said:\n{self.log_text()}", flush=True)
        self.close()

    def show(self):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
            asking.settimeout(PATIENCE_S)
            asking.connect(self.path)
            asking.send(HEAD.pack(0, SHOW_REQUEST, 0, 0, 0, 1, 0))
            packet, ancillary, _, _ = asking.recvmsg(4096, socket.CMSG_SPACE(4))
            status = HEAD.unpack(packet[:HEAD.size])[-1]
            if status != 0 or not ancillary:
                raise Failure(f"vrdmad does not say what it has: {os.strerror(status)}")
            with os.fdopen(struct.unpack("i", ancillary[0][2][:4])[0], "rb") as file:
                file.seek(0)
                return json.loads(file.read())

    def leftovers(self):
        """What the service still holds for guests; empty when all have left."""
        shown = self.show()
        left = [f"guest {guest['name']} of pid {guest['pid']}" for guest in shown["guests"]]
        for name in ("regions", "queue_pairs", "multicast_groups"):
            if shown["counters"][name] != 0:
                left.append(f"{shown['counters'][name]} {name}")
        for tenant in shown["tenants"]:
            left += [f"tenant {tenant['uid']}: {tenant[name]} {name}"
                     for name in ("guests", "objects", "registered_bytes", "queue_bytes") if tenant[name] != 0]
        return left

    def expect_empty(self):
        try:
            eventually("the service has freed everything", lambda: not self.leftovers())
        except Failure as failure:
            raise Failure(f"{failure}: {self.leftovers()}") from None


class Client:
    """One crash_client. Its standard output starts with "ready" once it is connected."""

    def __init__(self, program, library, service, peer, crash_at=None, user=None, unmapped=False, **options):
        environment = dict(os.environ, LD_PRELOAD=str(library), VRDMA_SOCKET=service.path)
        environment.pop("VRDMA_CRASH_AT", None)
        if crash_at:
            environment["VRDMA_CRASH_AT"] = crash_at
        arguments = [program, "--peer-fd", str(peer.fileno())]
        for key, value in options.items():
            arguments += [f"--{key}", str(value)]
        if unmapped:  # a limit below the size of the memory window: all its memory is reached through the process
            arguments = ["prlimit", f"--fsize={1 << 30}", *arguments]
        self.said = ""  # of its outcome, by early_result()
        self.process = subprocess.Popen(arguments, pass_fds=[peer.fileno()], env=environment, stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, user=user)

    @property
    def pid(self):
        return self.process.pid

    def tell_stopped(self):
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write("s")
            self.process.stdin.flush()

    def early_result(self):
        """The outcome of one that may say it before its peer's end, and then goes on; result() is still to be asked."""
        for line in self.process.stdout:
            if line.startswith("done "):
                self.said = line
                return line.strip()[5:]
            if not line.startswith("ready"):
                raise Failure(f"a client says {line.strip()!r}")
        raise Failure(f"a client ended with {self.process.wait()} before it said its outcome")

    def result(self):
        """The outcome of an orderly end; Failure for any other. A client that hangs is ended by its own watchdog."""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        out = self.said + self.process.stdout.read()
        code = self.process.wait()
        last = out.strip().rsplit("\n", 1)[-1]
        if code == -signal.SIGALRM:
            raise Failure(f"a client hangs (watchdog): {out.strip()!r}")
        if code != 0 or not last.startswith("done "):
            raise Failure(f"a client ended with {code}: {out.strip()!r}")
        return last[5:]

    def kill(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()


class World:
    """What the command line says: where programs are."""

    def __init__(self, client, library, vrdmad):
        self.client, self.library, self.vrdmad = client, library, vrdmad

    @contextlib.contextmanager
    def pair(self, service, first, second):
        """Two clients with options of their own, connected to each other; killed at the end whatever happens."""
        ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        clients = []
        try:
            for end, options in zip(ends, (first, second)):
                clients.append(Client(self.client, self.library, service, end, **options))
            for end in ends:
                end.close()
            yield clients
        finally:
            for end in ends:
                end.close()
            for client in clients:
                client.kill()

    def check_new_pair(self, service, workload="send"):
        both = {"workload": workload, "role": "pair", "messages": 100}
        with self.pair(service, both, both) as clients:
            outcomes = []
            for client in clients:
                try:
                    outcomes.append(client.result())
                except Failure as failure:
                    outcomes.append(str(failure))
            if outcomes != ["complete", "complete"]:
                raise Failure(f"a new pair: {' and '.join(outcomes)}")
