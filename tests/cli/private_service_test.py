"""The service that vrdma run starts where there is none: its life, its folder, and the limits that it inherits."""
import contextlib
import errno
import fcntl
import json
import os
import pathlib
import resource
import select
import shutil
import signal
import socket
import subprocess
import time
import unittest

from support import BIN, LIB, NOBODY, WATCHDOG_S, TestCase, as_nobody, attach, needs_root, readable_copy


class PrivateService(TestCase):
    def test_a_private_service_starts_serves_and_leaves_its_log(self):
        result = self.vrdma("run", "--", "ibv_devinfo")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn("vrdma0", result.stdout)
        log = pathlib.Path(self.environment["XDG_RUNTIME_DIR"]) / "vrdma" / "vrdmad.log"
        self.stop_private_service()
        self.assertIn("SIGTERM: leaving", log.read_text())

    def test_who_starts_as_the_private_service_leaves_has_one_all_the_same(self):
        self.assertEqual(self.vrdma("run", "--", "true", env={"VRDMA_TEST_IDLE_EXIT_S": "1"}).returncode, 0)
        log = pathlib.Path(self.environment["XDG_RUNTIME_DIR"]) / "vrdma" / "vrdmad.log"
        # Looked for often, to come while it is leaving.
        self.wait_until(lambda: "leaving" in log.read_text(), "the private service does not leave as idle", every_s=0.001)
        result = self.vrdma("run", "--", "ibv_devinfo")
        self.assertEqual((result.returncode, result.stderr), (0, ""))
        self.assertIn("vrdma0", result.stdout)
        self.stop_private_service()

    def test_a_private_service_stays_while_somebody_connects_or_starts_one(self):
        self.assertEqual(self.vrdma("run", "--", "true", env={"VRDMA_TEST_IDLE_EXIT_S": "2"}).returncode, 0)
        folder = pathlib.Path(self.environment["XDG_RUNTIME_DIR"]) / "vrdma"
        with open(folder / "lock", "r+") as lock:  # as `vrdma run` while it looks for a service
            fcntl.flock(lock, fcntl.LOCK_EX)
            time.sleep(4)  # longer than the seconds after which it would leave
            self.assertTrue((folder / "vrdmad.sock").is_socket())
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as waiting:
                waiting.connect(str(folder / "vrdmad.sock"))
                fcntl.flock(lock, fcntl.LOCK_UN)
                self.assertEqual(self.vrdma("show", "--json").returncode, 0)
                time.sleep(3)
                self.assertTrue((folder / "vrdmad.sock").is_socket(), "it left while somebody was connected")
        self.stop_private_service()

    def test_a_private_service_of_a_sandbox_is_not_for_programs_outside(self):
        # It would see none of their processes, and end with the sandbox.
        sandbox = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]
        if self.run_program(*sandbox, "true").returncode != 0:
            self.skipTest("no user and pid namespaces here")
        folder = pathlib.Path(self.environment["XDG_RUNTIME_DIR"]) / "vrdma"
        beside = folder / f"pid-{os.stat('/proc/self/ns/pid').st_ino}" / "vrdmad.sock"
        inside = [BIN / "vrdma", "run", "--", "sh", "-c", "echo up; read line"]
        with subprocess.Popen([str(word) for word in [*sandbox, *inside]], env=self.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
            try:
                self.assertEqual(program.stdout.readline(), "up\n")
                self.assert_refuses(self.vrdma("show"), 1, str(folder / "vrdmad.sock"), "another pid namespace", "vrdma run")
                self.assertIn("another pid namespace", self.vrdma("doctor").stdout)
                shown = self.vrdma("run", "--", BIN / "vrdma", "show", "--json")
                self.assertEqual(json.loads(shown.stdout)["service"]["socket"], str(beside), shown.stderr)
                self.assertEqual(self.vrdma("run", "--", "ibv_devinfo").returncode, 0)
                second = self.run_program(*sandbox, BIN / "vrdma", "run", "--", BIN / "vrdma", "show", "--json")  # neither is for another sandbox
                self.assertNotIn(json.loads(second.stdout)["service"]["socket"], (str(folder / "vrdmad.sock"), str(beside)), second.stderr)
            finally:
                program.stdin.close()
        self.assertEqual(json.loads(self.vrdma("show", "--json").stdout)["service"]["socket"], str(beside))  # and stays for who comes now
        self.assertEqual(json.loads(self.vrdma("run", "--", BIN / "vrdma", "show", "--json").stdout)["service"]["socket"], str(beside))
        self.stop_private_service()
        self.assertEqual(self.vrdma("run", "--", "true").returncode, 0)
        below = self.run_program(*sandbox, BIN / "vrdma", "run", "--", BIN / "vrdma", "show", "--json")  # which it sees, and does not end with
        self.assertEqual(json.loads(below.stdout)["service"]["socket"], str(folder / "vrdmad.sock"), below.stderr)
        self.stop_private_service()

    def test_a_private_service_offers_direct_mode_or_is_another_one(self):
        folder = pathlib.Path(self.environment["XDG_RUNTIME_DIR"]) / "vrdma" / "mediated"
        inner = [BIN / "vrdma", "run", "--mediated", "--", BIN / "vrdma", "show", "--json"]  # the same service again
        result = self.vrdma("run", "--mediated", "--", *inner)
        self.assertEqual(result.returncode, 0, result.stderr)
        service = json.loads(result.stdout)["service"]
        self.assertEqual((service["socket"], service["direct"]), (str(folder / "vrdmad.sock"), "mediated"))
        shown = json.loads(self.vrdma("show", "--json").stdout)  # no other answers
        self.assertEqual(shown["service"]["socket"], str(folder / "vrdmad.sock"))
        self.assert_refuses(self.vrdma("direct", "mediated", env={"VRDMA_SOCKET": str(folder / "vrdmad.sock")}), 1, "offers no direct mode", "--direct auto")
        plain = self.vrdma("run", "--", BIN / "vrdma", "show", "--json")
        self.assertEqual(json.loads(plain.stdout)["service"]["direct"], "auto")
        said = self.vrdma("direct", "mediated")
        self.assertEqual((said.returncode, said.stdout), (0, "0 guests: through the service, from the next message on\n"), said.stderr)
        self.assertEqual(self.vrdma("direct", "auto").returncode, 0)
        self.assert_refuses(self.vrdma("direct", "auto", "--guest", "77"), 1, "no guest 77", "vrdma show guests")
        self.assert_refuses(self.vrdma("direct", "always"), 2, "always", "mediated")
        self.assert_refuses(self.vrdma("run", "--mediated", "--", "true", env={"VRDMA_SOCKET": self.socket}), 125, "VRDMA_SOCKET", self.socket, "unset it")
        self.stop_private_service(str(folder / "vrdmad.sock"))
        self.stop_private_service()

    def test_a_private_service_has_neither_processors_nor_folder_of_the_first_program(self):
        processors = os.sched_getaffinity(0)
        if len(processors) < 2:
            self.skipTest("one processor")
        result = self.vrdma("run", "--", BIN / "vrdma", "show", "--json", cwd=self.folder,
                            preexec_fn=lambda: os.sched_setaffinity(0, {min(processors)}))
        self.assertEqual(result.returncode, 0, result.stderr)
        pid = json.loads(result.stdout)["service"]["pid"]
        self.assertGreaterEqual(os.sched_getaffinity(pid), processors)
        self.assertEqual(os.readlink(f"/proc/{pid}/cwd"), "/")
        self.stop_private_service()

    def test_a_private_service_is_not_scheduled_as_the_first_program_is(self):
        def modest():
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
            os.nice(3)
        result = self.vrdma("run", "--", BIN / "vrdma", "show", "--json", preexec_fn=modest)
        self.assertEqual(result.returncode, 0, result.stderr)
        pid = json.loads(result.stdout)["service"]["pid"]
        self.assertEqual(os.sched_getscheduler(pid), os.SCHED_OTHER)
        if os.getpriority(os.PRIO_PROCESS, pid) > os.getpriority(os.PRIO_PROCESS, 0):  # it might not
            self.assertRegex(self.vrdma("doctor").stdout, rf"note +scheduling +vrdmad runs at niceness {os.getpriority(os.PRIO_PROCESS, pid)}")
        self.stop_private_service()

    @needs_root
    def test_a_service_that_is_nicer_than_its_programs_is_noted(self):
        with self.service(preexec_fn=lambda: os.nice(3)) as service:
            found = json.loads(self.vrdma("doctor", "--json", "--socket", self.socket).stdout)["findings"]
            self.assertIn(f"niceness {os.getpriority(os.PRIO_PROCESS, service.pid)}", [one["what"] for one in found if one["subject"] == "scheduling"][0])

    def user(self):
        """vrdma, and the environment, of who may raise no hard limit."""
        if os.geteuid() != 0:
            return [BIN / "vrdma"], self.environment
        runtime = self.folder / "nobodys"
        runtime.mkdir(mode=0o700)
        os.chown(runtime, NOBODY, NOBODY)
        return as_nobody(readable_copy(self.folder) / "vrdma"), {"XDG_RUNTIME_DIR": str(runtime)}

    def test_who_starts_a_private_service_with_few_open_files_and_who_comes_later_is_told(self):
        if resource.getrlimit(resource.RLIMIT_NOFILE)[1] <= 256:
            self.skipTest("256 open files are all that there are")
        few = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
        vrdma, environment = self.user()
        run = lambda **keywords: self.run_program(*vrdma, "run", "--", "true", env=environment, **keywords)
        path = environment["XDG_RUNTIME_DIR"] + "/vrdma/vrdmad.sock"
        first, second, third = run(preexec_fn=few), run(), run(preexec_fn=few)
        self.addCleanup(self.stop_private_service, path)
        self.assertEqual((first.returncode, second.returncode, third.returncode), (0, 0, 0), first.stderr + second.stderr + third.stderr)
        self.assertRegex(first.stderr, "may have 256 open files, as is the limit here .*ulimit -Hn")
        self.assertRegex(second.stderr, "may have 256 open files, as was the limit where it was started")
        self.assertEqual(third.stderr, "")
        with contextlib.ExitStack() as attached:
            for count in range(64):
                guest, status, _ = attach(path)
                attached.enter_context(guest)
                if status != 0:
                    break
            self.assertEqual(status, errno.EDQUOT)
            self.assertGreaterEqual(count, 16, "a private service keeps most of its descriptors for others")
        self.assertRegex(pathlib.Path(path).with_name("vrdmad.log").read_text(), "limit is 256, that of the first program")

    def test_no_private_service_is_started_with_seconds_to_live(self):
        vrdma, environment = self.user()
        result = self.run_program(*vrdma, "run", "--", "true", env=environment, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (20, 20)))
        self.assert_refuses(result, 125, "ulimit -Ht", "20 s")

    def test_no_private_service_is_started_under_limits_that_it_could_not_serve_with(self):
        for which, bytes_, option in ((resource.RLIMIT_FSIZE, 100 << 10, "ulimit -Hf"), (resource.RLIMIT_AS, 900 << 20, "ulimit -Hv")):
            with self.subTest(option):
                self.assert_refuses(self.vrdma("run", "--", "true", preexec_fn=lambda: resource.setrlimit(which, (bytes_, bytes_))), 125, option, f"{bytes_ >> 10} KiB")
                self.assertFalse(pathlib.Path(self.environment["XDG_RUNTIME_DIR"], "vrdma", "vrdmad.sock").exists())

    def test_a_private_service_that_cannot_start_says_why(self):
        long = self.folder / ("x" * 100)
        long.mkdir()
        self.assert_refuses(self.vrdma("run", "--", "true", env={"XDG_RUNTIME_DIR": str(long)}), 125, str(long), "File name too long", "107", "XDG_RUNTIME_DIR")
        private = pathlib.Path(self.environment["XDG_RUNTIME_DIR"]) / "vrdma"
        private.mkdir(mode=0o700)
        (private / "vrdmad.log").mkdir()
        result = self.vrdma("run", "--", "true")
        self.assert_refuses(result, 125, "cannot open the log", str(private / "vrdmad.log"))
        self.assertEqual(len(result.stderr.splitlines()), 1, result.stderr)

    def test_a_private_service_that_starts_slowly_is_waited_for(self):
        installed, go = self.folder / "bin", self.folder / "go"
        installed.mkdir()
        shutil.copy(BIN / "vrdma", installed)
        (self.folder / "lib").symlink_to(LIB)
        os.mkfifo(go)
        (installed / "vrdmad").write_text(f'#!/bin/sh\nread go < {go}\nexec {BIN}/vrdmad "$@"\n')
        (installed / "vrdmad").chmod(0o755)
        process = subprocess.Popen([installed / "vrdma", "run", "--", "true"], env=self.environment, stderr=subprocess.PIPE, text=True)
        self.addCleanup(lambda: (process.stderr.close(), process.poll() is None and process.kill(), process.wait(WATCHDOG_S)))
        self.assertTrue(select.select([process.stderr], [], [], WATCHDOG_S)[0], "it waits without a word")
        said = process.stderr.readline()
        self.assertIn("waiting for the private service", said)
        self.assertIn(str(pathlib.Path(self.environment["XDG_RUNTIME_DIR"]) / "vrdma" / "vrdmad.log"), said)
        go.write_text("\n")
        self.assertEqual(process.wait(WATCHDOG_S), 0, process.stderr.read())
        self.stop_private_service()

    def test_a_private_folder_where_nothing_can_be_written_is_not_to_be_removed(self):
        folder = pathlib.Path(self.environment["XDG_RUNTIME_DIR"]) / "vrdma"
        folder.mkdir(mode=0o700)
        sandbox = ["bwrap", "--dev-bind", "/", "/", "--ro-bind", self.environment["XDG_RUNTIME_DIR"], self.environment["XDG_RUNTIME_DIR"]]
        if self.run_program(*sandbox, "true").returncode != 0:
            self.skipTest("bwrap cannot make a sandbox here")
        result = self.run_program(*sandbox, BIN / "vrdma", "run", "--", "true")
        self.assert_refuses(result, 125, str(folder), "Read-only", "XDG_RUNTIME_DIR", "VRDMA_SOCKET")
        self.assertNotIn("remove", result.stderr)

    def test_who_waits_for_another_run_is_told_for_which(self):
        folder = pathlib.Path(self.environment["XDG_RUNTIME_DIR"]) / "vrdma"
        folder.mkdir(mode=0o700)
        with open(folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            process = subprocess.Popen([BIN / "vrdma", "run", "--", "true"], env=self.environment, stderr=subprocess.PIPE, text=True)
            self.addCleanup(lambda: (process.stderr.close(), process.poll() is None and process.kill(), process.wait(WATCHDOG_S)))
            self.assertTrue(select.select([process.stderr], [], [], WATCHDOG_S)[0], "it waits without a word")
            self.assertRegex(process.stderr.readline(), rf"waiting for {folder}/lock, which process {os.getpid()} holds")
        self.assertEqual(process.wait(WATCHDOG_S), 0)
        self.stop_private_service()

    def test_a_umask_that_leaves_nothing_is_the_programs_alone(self):
        folder = pathlib.Path(self.environment["XDG_RUNTIME_DIR"]) / "vrdma"
        result = self.vrdma("run", "--", "sh", "-c", "umask", preexec_fn=lambda: os.umask(0o777))
        self.assertEqual((result.returncode, result.stdout.strip()), (0, "0777"), result.stderr)
        self.assertEqual([(folder / name).stat().st_mode & 0o777 for name in (".", "lock", "vrdmad.log")], [0o700, 0o600, 0o600])
        self.stop_private_service()
        folder.chmod(0)  # as another version left it
        self.assertEqual(self.vrdma("run", "--", "true").returncode, 0)
        self.assertEqual(folder.stat().st_mode & 0o777, 0o700)
        self.stop_private_service()

    def test_a_private_folder_of_somebody_elses_making_is_not_used(self):
        folder = pathlib.Path(self.environment["XDG_RUNTIME_DIR"]) / "vrdma"
        folder.mkdir()
        folder.chmod(0o777)
        self.assert_refuses(self.vrdma("run", "--", "true"), 125, str(folder), "only you can write")

    def connected(self, command, env=None):
        """Whether the command connects to who listens in the private folder. And what it said."""
        folder = pathlib.Path(self.environment["XDG_RUNTIME_DIR"]) / "vrdma"
        (folder / "vrdmad.sock").unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(str(folder / "vrdmad.sock"))
            (folder / "vrdmad.sock").chmod(0o777)
            listener.listen()
            listener.setblocking(False)
            # Who does connect is not answered for five seconds, or for ever.
            process = subprocess.Popen([str(word) for word in command], env=dict(self.environment, **(env or {})), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                       stderr=subprocess.PIPE, text=True)
            try:
                came = lambda: bool(select.select([listener], [], [], 0)[0])
                self.wait_until(lambda: came() or process.poll() is not None, f"{command} neither connects nor ends")
                return came(), "" if process.poll() is None else process.stderr.read()
            finally:
                process.kill()
                process.stderr.close()
                process.wait(WATCHDOG_S)

    def test_who_listens_where_others_could_write_is_not_connected_to(self):
        # As below /tmp, where the names of private folders are anybody's to take: a service may have its programs' memory read and written.
        folder = pathlib.Path(self.environment["XDG_RUNTIME_DIR"]) / "vrdma"
        folder.mkdir(mode=0o700)
        commands = [[BIN / "vrdma", *words] for words in (("show",), ("doctor",), ("run", "--", "true"))]
        library = {"LD_PRELOAD": str(LIB / "libvrdma.so")}
        self.assertTrue(self.connected(commands[0])[0], "not even in a folder of ours")
        self.assertTrue(self.connected(["ibv_devinfo"], library)[0], "the library does not look there")

        def assert_passed_over(command, env=None):
            came, said = self.connected(command, env)
            self.assertFalse(came, f"{command} connected: {said}")
            return said

        def assert_all_pass_over():
            for command in commands:
                said = assert_passed_over(command)
            assert_passed_over(["ibv_devinfo"], library)
            if not os.path.exists("/run/vrdma/vrdmad.sock"):  # which would serve it
                self.assertIn("only you can write", said)

        folder.chmod(0o777)
        assert_all_pass_over()
        folder.chmod(0o700)
        if os.geteuid() == 0:
            os.chown(folder, NOBODY, NOBODY)
            assert_all_pass_over()
            os.chown(folder, 0, 0)
            os.chown(folder.parent, NOBODY, NOBODY)  # after su, or sudo -E
            assert_passed_over(["ibv_devinfo"], library)
            os.chown(folder.parent, 0, 0)
        elsewhere = folder.rename(folder.with_name("elsewhere"))
        folder.symlink_to(elsewhere)
        assert_all_pass_over()

    def test_a_service_that_a_user_starts_in_the_private_folder_is_found_whatever_the_umask(self):
        self.socket = str(pathlib.Path(self.environment["XDG_RUNTIME_DIR"]) / "vrdma" / "vrdmad.sock")
        with self.service(preexec_fn=lambda: os.umask(0o002)):
            result = self.vrdma("show", "--json")
            self.assertEqual(result.returncode, 0, result.stderr)
            self.assertEqual(json.loads(result.stdout)["service"]["socket"], self.socket)

    @needs_root
    def test_a_private_folder_of_somebody_elses_is_none_of_root_of_a_user_namespace(self):
        # Whose uid is 0, as that of the machine's root, whose folder that is.
        command = ["setpriv", "--reuid=4711", "--regid=4711", "--clear-groups", "unshare", "--user", "--map-root-user", "sh", "-c"]
        if self.run_program(*command, "true").returncode != 0:
            self.skipTest("no user namespaces here for users")
        programs = readable_copy(self.folder)
        of_root = pathlib.Path("/tmp/vrdma-0")
        with contextlib.suppress(FileExistsError):
            of_root.mkdir(mode=0o700)
            self.addCleanup(lambda: any(of_root.iterdir()) or of_root.rmdir())  # unless it is in use by now
        result = self.run_program(*command, f"stat -Lc %i /proc/self/ns/user; exec {programs / 'vrdma'} run -- {programs / 'vrdma'} show --json",
                                  env={"XDG_RUNTIME_DIR": ""})
        self.assertEqual(result.returncode, 0, result.stderr)
        inode, shown = result.stdout.split("\n", 1)
        service = json.loads(shown)["service"]
        folder = pathlib.Path(f"/tmp/vrdma-0-user-{inode}")
        self.addCleanup(shutil.rmtree, folder)
        self.assertEqual(service["socket"], str(folder / "vrdmad.sock"))
        self.assertEqual(folder.stat().st_uid, 4711)
        pidfd = os.pidfd_open(service["pid"])
        signal.pidfd_send_signal(pidfd, signal.SIGTERM)
        self.assertTrue(select.select([pidfd], [], [], WATCHDOG_S)[0], "the private service did not leave")
        os.close(pidfd)


if __name__ == "__main__":
    unittest.main()
