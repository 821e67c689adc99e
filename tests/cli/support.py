"""What the tests of the command line share: programs under a time limit, a service, a counterfeit service, a raw guest."""
import array
import contextlib
import json
import os
import pathlib
import re
import select
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import threading
import time
import unittest

BIN = pathlib.Path(os.environ.get("VRDMA_BIN", "build/release/bin")).resolve()
LIB = pathlib.Path(os.environ.get("VRDMA_LIB", "build/release/lib")).resolve()
WATCHDOG_S = 60
NOBODY = 65534

HEAD = struct.Struct("<QIIIIIi")  # RecordHead (tag, control, word), source context and port, sequence, status
ATTACH = struct.Struct("<IHHII32s")
REPLY_BIT = 1 << 16
MAGIC = 0x4D445256
MAJOR, MINOR = (int(re.search(rf"version_{part} = (\d+);", (pathlib.Path(__file__).parents[2] / "include/vrdma/control.hpp").read_text())[1])
                for part in ("major", "minor"))
REQUEST_ATTACH, REQUEST_SHOW = 1, 6

needs_root = unittest.skipUnless(os.geteuid() == 0, "needs root to become another user")
needs_full_device = unittest.skipUnless(os.path.exists("/dev/full"), "no /dev/full here")


class TestCase(unittest.TestCase):
    """A folder of its own that others may enter, a clean environment, and nothing left running."""

    def wait_until(self, condition, what, every_s=0.02):
        deadline = time.monotonic() + WATCHDOG_S
        while not (found := condition()):
            self.assertLess(time.monotonic(), deadline, what)
            time.sleep(every_s)
        return found

    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="vrdma-cli-"))
        self.folder.chmod(0o755)
        self.addCleanup(shutil.rmtree, self.folder)
        self.socket = str(self.folder / "s.sock")
        private = self.folder / "run"
        private.mkdir(mode=0o700)
        self.environment = {"PATH": os.environ["PATH"], "XDG_RUNTIME_DIR": str(private), "HOME": str(self.folder)}

    def run_program(self, *arguments, env=None, **keywords):
        environment = dict(self.environment, **(env or {}))
        if "input" not in keywords:
            keywords.setdefault("stdin", subprocess.DEVNULL)
        return subprocess.run([str(a) for a in arguments], env=environment, text=True, timeout=WATCHDOG_S,
                              **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **keywords})

    def vrdma(self, *arguments, **keywords):
        return self.run_program(BIN / "vrdma", *arguments, **keywords)

    def vrdmad(self, *arguments, **keywords):
        return self.run_program(BIN / "vrdmad", *arguments, **keywords)

    def run_under(self, *command, **keywords):
        return self.vrdma("run", "--", *command, env={"VRDMA_SOCKET": self.socket}, **keywords)

    def assert_refuses(self, result, code, *words):
        """The exit code, and one sentence on standard error with all the words: what failed, with which value, what to do."""
        self.assertEqual(result.returncode, code, result.stderr + (result.stdout or ""))
        for word in words:
            self.assertIn(word, result.stderr)
        self.assertNotIn("terminate called", result.stderr)

    @contextlib.contextmanager
    def service(self, *arguments, program=BIN / "vrdmad", **keywords):
        """A vrdmad that is ready; it must end by SIGTERM with code 0."""
        ready_read, ready_write = os.pipe()
        with os.fdopen(ready_read, "rb") as ready:
            process = subprocess.Popen([str(program), "--socket", self.socket, "--ready-fd", str(ready_write), *arguments],
                                       pass_fds=[ready_write], env=self.environment, text=True,
                                       **{"stderr": subprocess.PIPE, **keywords})
            os.close(ready_write)
            try:
                if ready.read(1) != b"\x01":  # ends when it has died, too
                    process.kill()
                    self.fail("vrdmad did not come up: " + (process.communicate()[1] or ""))
                yield process
                process.terminate()
                self.service_said = process.communicate(timeout=WATCHDOG_S)[1]
                self.assertEqual(process.returncode, 0, self.service_said)
            finally:
                if process.poll() is None:
                    process.kill()
                    process.communicate()

    def stop_private_service(self, *socket):
        """That of self.environment, or the one at this socket."""
        pid = json.loads(self.vrdma("show", "--json", *(("--socket", *socket) if socket else ())).stdout)["service"]["pid"]
        pidfd = os.pidfd_open(pid)
        os.kill(pid, signal.SIGTERM)
        self.assertTrue(select.select([pidfd], [], [], WATCHDOG_S)[0], "the private service did not leave")
        os.close(pidfd)

    @contextlib.contextmanager
    def counterfeit(self, answer):
        """Something else that listens at the socket: answer(packet) → bytes to send, or None to hang up."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(self.socket)
        listener.listen()

        def talk(connection):
            with connection, contextlib.suppress(OSError):
                while packet := connection.recv(65536):
                    reply = answer(packet)
                    if reply is None:
                        return
                    connection.send(reply)

        def serve():
            with contextlib.suppress(OSError):  # the listener is shut down
                while True:
                    threading.Thread(target=talk, args=(listener.accept()[0],), daemon=True).start()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            listener.close()
            thread.join(WATCHDOG_S)


def reply_to(packet, status=0, body=b""):
    _, control, _, _, _, sequence, _ = HEAD.unpack_from(packet)
    return HEAD.pack(0, control | REPLY_BIT, len(body), 2, 28249, sequence, status) + body


def attach_packet(name=b"", major=MAJOR, minor=0, magic=MAGIC):
    return HEAD.pack(0, REQUEST_ATTACH, ATTACH.size, 0, 0, 7, 0) + ATTACH.pack(magic, major, minor, 0, os.getpid(), name)


def status_of(packet):
    return HEAD.unpack_from(packet)[6]


def attach(path, name=b"", major=MAJOR, minor=0, magic=MAGIC):
    """A raw guest: its socket (keep it open to stay attached), the reply's status and body."""
    guest = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    guest.settimeout(WATCHDOG_S)
    guest.connect(path)
    guest.send(attach_packet(name, major, minor, magic))
    packet, ancillary, _, _ = guest.recvmsg(65536, socket.CMSG_SPACE(8 * 4))
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            for fd in array.array("i", data):
                os.close(fd)
    return guest, status_of(packet), packet[HEAD.size:]


def as_nobody(*command):
    return ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", *map(str, command)]


def readable_copy(folder):
    """The programs and the library where an unprivileged user can reach them, as in the build tree."""
    for part, source in (("bin", BIN), ("lib", LIB)):
        (folder / part).mkdir()
        for file in source.iterdir():
            if file.name in ("vrdma", "vrdmad", "libvrdma.so", "libibverbs.so.1", "libibverbs.so"):
                shutil.copy2(file, folder / part / file.name)
    return folder / "bin"
