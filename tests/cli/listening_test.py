"""A vrdmad's socket, log and end: whose they are, who is told, and what is said where something is in the way."""
import contextlib
import errno
import json
import os
import resource
import signal
import socket
import subprocess
import time
import unittest

from support import BIN, WATCHDOG_S, TestCase, as_nobody, attach, needs_full_device, needs_root, readable_copy, status_of


class Listening(TestCase):
    def test_a_socket_in_use_is_not_taken_over(self):
        with self.service():
            self.assert_refuses(self.vrdmad("--socket", self.socket), 1, self.socket, "in use", "--socket")
            self.assertEqual(self.vrdma("show", "--socket", self.socket).returncode, 0)

    def test_who_attaches_again_and_again_does_not_fill_the_log(self):
        with open(self.folder / "log", "w+") as log, self.service("--log-level", "info", stderr=log):
            began = time.monotonic()
            for _ in range(1000):
                attach(self.socket)[0].close()
            lasted = time.monotonic() - began
            log.seek(0)
            said = log.read()
        self.assertIn("attached as context", said)
        # Some in each second of the clock, the first and the last of which may be begun.
        self.assertLessEqual(said.count("attached as context"), 20 * (int(lasted) + 2))
        self.assertLessEqual(said.count(") left\n"), 20 * (int(lasted) + 3))  # it looks later

    def test_a_service_manager_is_told_once_programs_can_attach(self):
        for name in str(self.folder / "manager.sock"), f"\0vrdma-cli-test-{os.getpid()}":
            with self.subTest(name), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
                manager.bind(name)
                manager.settimeout(WATCHDOG_S)
                service = subprocess.Popen([str(BIN / "vrdmad"), "--socket", self.socket, "--log-level", "error"],
                                           env=dict(self.environment, NOTIFY_SOCKET=name.replace("\0", "@")))
                try:
                    self.assertEqual(manager.recv(512).decode(), f"READY=1\nSTATUS=serves {self.socket}\n")
                    self.assertEqual(self.vrdma("show", "--socket", self.socket).returncode, 0)
                finally:
                    service.terminate()
                    self.assertEqual(service.wait(WATCHDOG_S), 0)

    def test_a_service_manager_of_its_parents_is_left_alone(self):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
            manager.bind(str(self.folder / "manager.sock"))
            self.environment["NOTIFY_SOCKET"] = manager.getsockname()
            with self.service():
                manager.setblocking(False)
                self.assertRaises(BlockingIOError, manager.recv, 512)

    def passed(self, listener, *arguments, **more):
        """vrdmad as a service manager starts it with a socket: as descriptor 3."""
        return subprocess.Popen(["sh", "-c", 'exec 3<&0 </dev/null; LISTEN_PID=$$ LISTEN_FDS=1 exec "$@"', "sh", str(BIN / "vrdmad"), "--log-level", "error", *arguments],
                                stdin=listener, env=self.environment, **more)

    def test_a_service_managers_socket_serves_one_service_after_another(self):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(self.socket)
            listener.listen()
            for _ in range(2):
                early = subprocess.Popen([str(BIN / "vrdma"), "show", "--socket", self.socket], env=self.environment, stdout=subprocess.DEVNULL)
                service = self.passed(listener, "--socket", "/nowhere/vrdmad.sock")
                try:
                    self.assertEqual(early.wait(WATCHDOG_S), 0)
                    shown = json.loads(self.vrdma("show", "--socket", self.socket, "--json").stdout)
                    self.assertEqual(shown["service"]["socket"], self.socket)
                finally:
                    service.terminate()
                    self.assertEqual(service.wait(WATCHDOG_S), 0)
                self.assertTrue(os.path.exists(self.socket))

    def test_another_kind_of_socket_is_refused(self):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(self.socket)
            listener.listen()
            service = self.passed(listener, stderr=subprocess.PIPE, text=True)
            _, said = service.communicate(timeout=WATCHDOG_S)
            self.assertNotEqual(service.returncode, 0)
            self.assertIn("ListenSequentialPacket=", said)

    def test_the_journal_is_told_priorities_and_nothing_that_it_knows(self):
        said = self.folder / "journal"
        for is_ours in (True, False):
            with self.subTest(is_ours), said.open("w") as stream:
                status = os.fstat(stream.fileno())
                self.environment["JOURNAL_STREAM"] = f"{status.st_dev}:{status.st_ino + (0 if is_ours else 1)}"
                with self.service(stderr=stream):
                    pass
                self.run_program(BIN / "vrdmad", "--direct", "never", stderr=stream)
                first, *_, last = said.read_text().splitlines()
                self.assertRegex(first, r"^<6>vrdmad \S+ serves " if is_ours else r"^\[[^<]*\] \[info\] vrdmad \S+ serves ")
                self.assertTrue(last.startswith("<3>vrdmad: configuration" if is_ours else "vrdmad: configuration"), last)

    def test_a_socket_left_over_is_replaced(self):
        with self.service() as process:
            process.kill()
            process.wait()
            self.assertTrue(os.path.exists(self.socket))
            with self.service():
                self.assertEqual(self.vrdma("show", "--socket", self.socket).returncode, 0)
            process.returncode = 0  # killed on purpose
        self.assertFalse(os.path.exists(self.socket))

    def test_who_leaves_lets_the_socket_be_that_another_service_has_put_there(self):
        with self.service() as first:
            os.unlink(self.socket)
            with self.service():
                first.terminate()
                self.assertEqual(first.wait(WATCHDOG_S), 0)
                self.assertEqual(self.vrdma("show", "--socket", self.socket).returncode, 0)
        self.assertFalse(os.path.exists(self.socket))

    def test_who_is_idle_and_has_lost_its_socket_leaves_and_lets_another_services_be(self):
        with self.service("--idle-exit", "1") as first:
            guest, status, _ = attach(self.socket)
            self.assertEqual(status, 0)
            os.unlink(self.socket)
            with self.service():
                guest.close()
                self.assertEqual(first.wait(WATCHDOG_S), 0)
                self.assertEqual(self.vrdma("show", "--socket", self.socket).returncode, 0)

    def test_a_hangup_ends_the_service_and_leaves_no_socket(self):
        with self.service() as process:
            process.send_signal(signal.SIGHUP)
            process.wait(WATCHDOG_S)
        self.assertIn("SIGHUP: leaving", self.service_said)
        self.assertFalse(os.path.exists(self.socket))

    def test_who_reads_the_log_may_leave_before_the_service(self):
        """`vrdmad 2>&1 | tee`, a terminal that is closed. Fails where SIGPIPE ends it: by signal 13, and its socket stays."""
        for when in "before it serves", "while it serves":
            with self.subTest(when):
                ready, ready_write = os.pipe()
                log, log_write = os.pipe()
                if when == "before it serves":
                    os.close(log)
                service = subprocess.Popen([str(BIN / "vrdmad"), "--socket", self.socket, "--ready-fd", str(ready_write)],
                                           env=self.environment, pass_fds=[ready_write], stderr=log_write)
                for end in ready_write, log_write:
                    os.close(end)
                try:
                    with os.fdopen(ready, "rb") as serves:
                        self.assertEqual(serves.read(1), b"\x01")
                    if when == "while it serves":
                        os.close(log)
                    attach(self.socket)[0].close()
                    self.assertEqual(self.vrdma("show", "--socket", self.socket).returncode, 0)
                finally:
                    service.terminate()
                    service.wait(WATCHDOG_S)
                self.assertEqual(service.returncode, 0)
                self.assertFalse(os.path.exists(self.socket))

    def test_a_hangup_that_is_ignored_does_not_end_the_service(self):
        with self.service(preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)) as process:
            process.send_signal(signal.SIGHUP)
            self.assertEqual(self.vrdma("show", "--socket", self.socket).returncode, 0)
        self.assertIn("SIGTERM: leaving", self.service_said)

    def test_a_file_that_is_no_socket_survives(self):
        file = self.folder / "precious"
        file.write_text("data")
        self.assert_refuses(self.vrdmad("--socket", file), 2, str(file), "not a socket", "remove it")
        self.assertEqual(file.read_text(), "data")
        self.assert_refuses(self.vrdma("show", "--socket", file), 1, str(file), "not a socket of vrdmad")
        self.assertIn("not a socket of vrdmad", self.vrdma("doctor", "--socket", file).stdout)

    @needs_root
    def test_a_file_of_somebody_elses_is_not_called_a_service(self):
        program = readable_copy(self.folder)
        file = self.folder / "precious"
        file.write_text("data")
        self.assert_refuses(self.run_program(*as_nobody(program / "vrdmad", "--socket", file)), 2, str(file), "not a socket")
        self.assert_refuses(self.run_program(*as_nobody(program / "vrdma", "show", "--socket", file)), 1, str(file), "not a socket of vrdmad")
        with self.service():
            os.chmod(self.socket, 0o600)
            self.assert_refuses(self.run_program(*as_nobody(program / "vrdmad", "--socket", self.socket)), 1, self.socket, "no permission there")

    def test_a_path_that_is_too_long_is_refused_with_the_limit(self):
        path = str(self.folder / ("x" * 120))
        self.assert_refuses(self.vrdmad("--socket", path), 2, path, "File name too long", "107")
        self.assert_refuses(self.vrdma("show", "--socket", path), 1, path, "File name too long", "107")

    def test_a_folder_that_cannot_be_made_is_named(self):
        file = self.folder / "file"
        file.write_text("")
        self.assert_refuses(self.vrdmad("--socket", file / "s.sock"), 1, str(file), "Not a directory", "--socket")

    def as_uid(self, uid):
        """A connection that the service takes for one of that user's."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        os.seteuid(uid)
        try:
            connection.connect(self.socket)  # blocks while the queue of those who are yet to be accepted is full; with a time limit that is EAGAIN
        finally:
            os.seteuid(0)
        connection.settimeout(WATCHDOG_S)
        return connection

    @needs_root
    def test_root_gets_in_whoever_has_taken_all_descriptors(self):
        """Quotas are of a uid, and /etc/subuid gives a user thousands."""
        limit = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
        with self.service(preexec_fn=limit), contextlib.ExitStack() as held:
            for uid in range(20001, 20007):
                for _ in range(32):  # all that one may have; three users' would be all that there are
                    held.enter_context(self.as_uid(uid))
            refused = held.enter_context(self.as_uid(20007))
            self.assertIn(status_of(refused.recv(65536)), (errno.EDQUOT, errno.EMFILE))
            guest, status, _ = attach(self.socket)
            held.enter_context(guest)
            self.assertEqual(status, 0)
            # And where even those are taken nobody waits for an answer.
            for _ in range(24):
                last = held.enter_context(self.as_uid(0))
            self.assertIn(status_of(last.recv(65536)), (errno.EDQUOT, errno.EMFILE))

    @needs_root
    def test_no_permission_is_said(self):
        program = readable_copy(self.folder) / "vrdmad"
        self.assert_refuses(self.run_program(*as_nobody(program, "--socket", self.socket)), 1, self.socket, "Permission denied", "another user")

    @needs_full_device
    def test_a_full_disk_for_the_log_does_not_stop_the_service(self):
        with self.service("--log-file", "/dev/full"):
            for _ in range(3):
                guest, status, _ = attach(self.socket)
                self.assertEqual(status, 0)
                guest.close()
        self.assertEqual(self.service_said.count("cannot write the log"), 1, self.service_said)
        self.assertIn("No space left on device", self.service_said)

    def test_a_log_that_is_truncated_goes_on_from_its_beginning(self):
        log = self.folder / "log"
        with self.service("--log-file", log):
            guest, status, _ = attach(self.socket)
            self.assertEqual(status, 0)
            guest.close()
            self.wait_until(lambda: b" left\n" in log.read_bytes(), "the guest has left")
            os.truncate(log, 0)
        self.assertRegex(log.read_bytes(), rb"^\[[^\0]* SIGTERM: leaving\n$")

    def test_a_log_that_cannot_be_opened_is_named(self):
        file = self.folder / "file"
        file.write_text("")
        self.assert_refuses(self.vrdmad("--socket", self.socket, "--log-file", file / "log"), 2, str(file / "log"), "--log-file")

    def test_a_service_that_has_used_up_its_processor_time_says_so(self):
        with self.service() as process:
            process.send_signal(signal.SIGXCPU)
            self.assertEqual(process.wait(WATCHDOG_S), 0)
        self.assertIn("ulimit -t", self.service_said)


if __name__ == "__main__":
    unittest.main()
