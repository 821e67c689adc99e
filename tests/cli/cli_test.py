"""vrdma and vrdmad when something is wrong: what they say, what they return. Needs python3 only; parts need root and skip aloud."""
import contextlib
import errno
import fcntl
import json
import os
import pathlib
import pty
import re
import resource
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
import unittest

from support import BIN, LIB, MAJOR, MINOR, NOBODY, WATCHDOG_S, TestCase, as_nobody, attach, readable_copy, reply_to

needs_root = unittest.skipUnless(os.geteuid() == 0, "needs root to become another user")
needs_full_device = unittest.skipUnless(os.path.exists("/dev/full"), "no /dev/full here")


class Configuration(TestCase):
    def check(self, text):
        file = self.folder / "vrdmad.json"
        file.write_text(text)
        return self.vrdmad("--config", file, "--check"), str(file)

    def test_a_missing_file_is_named(self):
        self.assert_refuses(self.vrdmad("--config", "/nowhere/vrdmad.json", "--check"), 2, "/nowhere/vrdmad.json", "No such file", "check the path")

    @needs_root
    def test_an_unreadable_file_is_named(self):
        file = self.folder / "secret.json"
        file.write_text("{}")
        file.chmod(0o600)
        program = readable_copy(self.folder) / "vrdmad"
        self.assert_refuses(self.run_program(*as_nobody(program, "--config", file, "--check")), 2, str(file), "Permission denied", "permissions")

    def test_a_folder_in_place_of_the_file_is_refused(self):
        self.assert_refuses(self.vrdmad("--config", self.folder, "--check"), 2, str(self.folder), "is a folder")

    def test_a_value_that_makes_no_sense_is_refused_with_the_files_name(self):
        result, file = self.check('{"shards": 0}')
        self.assert_refuses(result, 2, file, '"shards" is 0')

    def test_a_link_layer_has_two_names(self):
        for name in ("ib", "infiniband"):
            self.assertEqual(self.check(json.dumps({"link_layer": name}))[0].returncode, 0)

    def test_broken_json_says_where(self):
        result, file = self.check('{"shards": 1,')
        self.assert_refuses(result, 2, file, "not valid JSON", "line 1")

    def test_an_unknown_key_is_named_with_the_known_ones(self):
        result, file = self.check('{"sokcet": "/tmp/x"}')
        self.assert_refuses(result, 2, file, 'unknown key "sokcet"', "known are", "socket_mode")
        result, file = self.check('{"quota": {"guest": 1}}')
        self.assert_refuses(result, 2, file, 'unknown key "guest" in "quota"', "registered_bytes")

    def test_an_hca_that_makes_no_sense(self):
        for text, *words in (('{"hca": 1}', '"hca"'), ('{"hca": {"ports": 1}}', "ports"), ('{"hca": {"port": 300}}', '"port" of "hca" is 300', "from 1 to 254"),
                             ('{"hca": {"mtu": 1500}}', '"mtu" of "hca" is 1500', "256, 512, 1024, 2048 or 4096"), ('{"hca": {"mtu": 0}}', '"mtu" of "hca" is 0'),
                             ('{"hca": {"ack_timeout": 32}}', '"ack_timeout" of "hca" is 32', "from 0 to 31"), ('{"hca": {"device": 1}}', "device")):
            with self.subTest(text):
                result, file = self.check(text)
                self.assertEqual(result.returncode, 2)
                for word in (*words, str(file)):
                    self.assertIn(word, result.stderr)
        for text in ('{"hca": {}}', '{"hca": true}', '{"hca": false}', '{"hca": {"device": "rxe0", "port": 1, "gid_index": 0, "mtu": 1024, "ack_timeout": 18}}'):
            with self.subTest(text):
                self.assertEqual(self.check(text)[0].returncode, 0)

    def test_partitions_and_an_etcd_that_make_no_sense(self):
        for text, *words in (('{"partitions": ["0x8001"]}', '"partitions" must be a JSON object'),
                             ('{"partitions": {"0x8000": ["1"]}}', '"0x8000" in "partitions" is no P_Key', '"0x8001"'),
                             ('{"partitions": {"0x8001": "1"}}', '"0x8001" in "partitions" must be a list'),
                             ('{"partitions": {"0x8001": ["me"]}}', '"me" in "0x8001" of "partitions" is no member', '"b/1000"'),
                             ('{"partitions": {"0x8001": ["b/1"]}}', 'there is no host "b"'),
                             ('{"partitions": {"0x8001": ["1"]}, "hosts": {"address": "127.0.0.1"}}', 'vrdma host partition'),
                             ('{"hosts": {"address": "127.0.0.1", "seed": "127.0.0.2", "etcd": {"endpoints": ["http://127.0.0.1:1"]}}}', '"etcd" and "peers" or "seed"'),
                             ('{"hosts": {"address": "127.0.0.1", "etcd": {}}}', 'no "endpoints"'),
                             ('{"hosts": {"address": "127.0.0.1", "etcd": {"endpoints": ["10.0.0.1"]}}}', '"10.0.0.1" in "endpoints"', "http://HOST:PORT"),
                             ('{"hosts": {"address": "127.0.0.1", "etcd": {"endpoints": ["http://127.0.0.1:1"], "key_file": "k"}}}', '"certificate_file" and "key_file"')):
            result, file = self.check(text)
            self.assert_refuses(result, 2, *words)
        result, _ = self.check('{"partitions": {"0x8001": ["0", "*/1"], "0xffff": ["*"]}}')
        self.assertEqual(result.returncode, 0, result.stderr)

    def test_hosts_that_cannot_meet(self):
        secret = self.folder / "secret"
        secret.write_bytes(b"s" * 32)
        secret.chmod(0o600)

        def remote(second=None, **own):
            hosts = [{"name": "a", "address": "10.0.0.1", "lids": "1-99"}, {"name": "b", "address": "10.0.0.2", "lids": "100-200", **(second or {})}]
            return self.check(json.dumps({"remote": {"name": "a", "address": "10.0.0.1", "secret_file": str(secret), "hosts": hosts, **own}}))[0]
        result = remote()
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assert_refuses(remote({"address": "10.0.0.1"}), 2, "hosts a and b are both at 10.0.0.1:28251")
        self.assert_refuses(remote({"address": "fd00::2"}), 2, "10.0.0.1 (IPv4)", "host b fd00::2 (IPv6)")
        self.assert_refuses(remote(address="10.0.0.3"), 2, "10.0.0.3:28251", "10.0.0.1:28251")
        for more in ({"seed": "fd00::2"}, {"peers": [{"name": "b", "address": "fd00::2"}]}):
            self.assert_refuses(self.check(json.dumps({"hosts": {"address": "10.0.0.1", **more}}))[0], 2, "10.0.0.1 (IPv4)", "fd00::2 (IPv6)")
        # What the start says of files, this says, too.
        secret.chmod(0o644)
        self.assert_refuses(remote(), 2, str(secret), "others may read it", "chmod 0600")
        secret.chmod(0o600)
        secret.write_text("short")
        self.assert_refuses(remote(), 2, str(secret), "fewer than 32 bytes")
        secret.unlink()
        self.assert_refuses(remote(), 2, str(secret), "No such file")
        self.assert_refuses(self.check(json.dumps({"hosts": {"address": "10.0.0.1", "folder": str(self.folder / "none")}}))[0], 2, str(self.folder / "none"), "vrdma host init")

    def test_a_key_given_twice_and_what_lies_behind_a_nul_are_refused(self):
        result, file = self.check('{"lid_first": 1, "quota": {"guests": 1, "objects": 2, "guests": 3}}')
        self.assert_refuses(result, 2, file, '"guests" is given twice')
        result, file = self.check('{"lid_first": 1, /* one of many */ "lid_first": 2}')
        self.assert_refuses(result, 2, file, '"lid_first" is given twice')
        result, file = self.check('{}\0{"lid_first": 0}')
        self.assert_refuses(result, 2, file, "NUL")

    def test_a_wrong_type_is_named_with_its_value(self):
        for text, *words in (('{"shards": "two"}', '"shards" is "two"', "whole number"),
                             ('{"shards": -1}', '"shards" is -1', "whole number"),
                             ('{"shards": 1.5}', '"shards" is 1.5', "whole number"),
                             ('{"socket": 7}', '"socket" is 7', "string"),
                             ('{"active_mtu": 99999999999999}', '"active_mtu" is 99999999999999', "whole number from 0 to 4294967295"),
                             ('{"quota": []}', '"quota" must be a JSON object', "array"),
                             ('{"socket_mode": 666}', '"socket_mode" is 666', '"0660"'),
                             ('{"socket_mode": "0888"}', '"socket_mode" is "0888"', '"0660"'),
                             ('[]', "must be a JSON object", "array")):
            with self.subTest(text):
                result, file = self.check(text)
                self.assert_refuses(result, 2, file, *words)

    def test_a_value_out_of_range_says_what_is_allowed(self):
        for text, *words in (('{"link_layer": "token ring"}', '"token ring"', "infiniband", "ethernet"),
                             ('{"active_mtu": 1500}', "1500", "256, 512, 1024, 2048 or 4096"),
                             ('{"direct": "always"}', '"always"', '"mediated" or "auto"'),
                             ('{"shards": 0}', '"shards" is 0', "1 to 32"), ('{"shards": 33}', '"shards" is 33', "1 to 32"),
                             ('{"arena_bytes": 4097}', "4097", "multiple of 4096"),
                             ('{"lid_first": 0}', '"lid_first" 0', "1 to 49150"),
                             ('{"lid_first": 4294967295, "lid_count": 1}', "4294967295", "1 to 49150"),
                             ('{"lid_first": 49151, "lid_count": 1}', "49151"),
                             ('{"log_level": "loud"}', '"loud"', "trace, debug, info")):
            with self.subTest(text):
                result, _ = self.check(text)
                self.assert_refuses(result, 2, *words)

    def test_comments_and_every_known_key_are_accepted(self):
        result, _ = self.check("""{
            // a comment
            "socket": "/run/vrdma/vrdmad.sock", "socket_mode": "0660", "link_layer": "ethernet", "shards": 1, "log_file": "",
            "log_level": "warn", "arena_bytes": 1073741824, "lid_first": 16, "lid_count": 32, "active_mtu": 1024, "idle_exit_s": 0,
            "direct": "auto", "quota": {"guests": 4, "objects": 100, "registered_bytes": 1048576, "queue_bytes": 1048576}}""")
        self.assertEqual((result.returncode, result.stdout), (0, "the configuration is good\n"), result.stderr)

    def test_the_packaged_configuration_is_good(self):
        packaged = pathlib.Path(__file__).parents[2] / "packaging" / "vrdmad.json"
        result = self.vrdmad("--config", packaged, "--check")
        self.assertEqual(result.returncode, 0, result.stderr)

    def test_an_unknown_flag_is_a_usage_error(self):
        self.assert_refuses(self.vrdmad("--sokcet", "/tmp/x"), 2, "vrdmad:", "--sokcet", "--help")

    def test_an_empty_flag_is_refused_not_replaced_by_the_default(self):
        for flag, *words in (("--socket", '"socket" is empty'), ("--link-layer", '"link_layer" is ""'), ("--log-level", '"log_level" is ""'), ("--direct", '"direct" is ""'),
                             ("--config", "check the path")):
            with self.subTest(flag):
                self.assert_refuses(self.vrdmad("--check", flag, ""), 2, *words)


class Listening(TestCase):
    def test_a_socket_in_use_is_not_taken_over(self):
        with self.service():
            self.assert_refuses(self.vrdmad("--socket", self.socket), 1, self.socket, "in use", "--socket")
            self.assertEqual(self.vrdma("show", "--socket", self.socket).returncode, 0)

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

    def test_a_hangup_that_is_ignored_does_not_end_the_service(self):
        with self.service(preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)) as process:
            process.send_signal(signal.SIGHUP)
            self.assertEqual(self.vrdma("show", "--socket", self.socket).returncode, 0)
        self.assertIn("SIGTERM: leaving", self.service_said)

    def test_a_file_that_is_no_socket_survives(self):
        file = self.folder / "precious"
        file.write_text("data")
        self.assert_refuses(self.vrdmad("--socket", file), 1, str(file), "not a socket", "remove it")
        self.assertEqual(file.read_text(), "data")
        self.assert_refuses(self.vrdma("show", "--socket", file), 1, str(file), "not a socket of vrdmad")
        self.assertIn("not a socket of vrdmad", self.vrdma("doctor", "--socket", file).stdout)

    @needs_root
    def test_a_file_of_somebody_elses_is_not_called_a_service(self):
        program = readable_copy(self.folder)
        file = self.folder / "precious"
        file.write_text("data")
        self.assert_refuses(self.run_program(*as_nobody(program / "vrdmad", "--socket", file)), 1, str(file), "not a socket")
        self.assert_refuses(self.run_program(*as_nobody(program / "vrdma", "show", "--socket", file)), 1, str(file), "not a socket of vrdmad")
        with self.service():
            os.chmod(self.socket, 0o600)
            self.assert_refuses(self.run_program(*as_nobody(program / "vrdmad", "--socket", self.socket)), 1, self.socket, "no permission there")

    def test_a_path_that_is_too_long_is_refused_with_the_limit(self):
        path = str(self.folder / ("x" * 120))
        self.assert_refuses(self.vrdmad("--socket", path), 1, path, "File name too long", "107")
        self.assert_refuses(self.vrdma("show", "--socket", path), 1, path, "File name too long", "107")

    def test_a_folder_that_cannot_be_made_is_named(self):
        file = self.folder / "file"
        file.write_text("")
        self.assert_refuses(self.vrdmad("--socket", file / "s.sock"), 1, str(file), "Not a directory", "--socket")

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


class Versions(TestCase):
    def test_the_service_refuses_another_major_and_names_both(self):
        with self.service():
            guest, status, body = attach(self.socket, major=99, minor=3)
            guest.close()
            self.assertEqual(status, errno.EPROTONOSUPPORT)
            self.assertEqual(int.from_bytes(body[0:2], "little"), MAJOR)
        self.assertIn("99.3", self.service_said)
        self.assertIn(f"{MAJOR}.{MINOR}", self.service_said)

    def test_the_service_accepts_a_newer_minor(self):
        with self.service():
            guest, status, _ = attach(self.socket, minor=41)
            guest.close()
            self.assertEqual(status, 0)

    def test_the_service_refuses_what_is_not_a_guest(self):
        with self.service():
            guest, status, _ = attach(self.socket, magic=0x12345678)
            guest.close()
            self.assertEqual(status, errno.EPROTO)

    def test_a_program_under_a_service_of_another_major_is_told(self):
        def refuse(packet):  # its version, in the reply of an attach
            return reply_to(packet, errno.EPROTONOSUPPORT, bytes([MAJOR + 1, 0, 0, 0]) + bytes(200))
        with self.counterfeit(refuse):
            result = self.vrdma("run", "--", "ibv_devinfo", env={"VRDMA_SOCKET": self.socket})
            self.assertNotEqual(result.returncode, 0)
            self.assertIn(self.socket, result.stderr)
            self.assertIn(f"speaks version {MAJOR + 1}.", result.stderr)
            self.assertIn("libvrdma", result.stderr)
            result = self.vrdma("doctor", "--socket", self.socket)
            self.assertEqual(result.returncode, 1, result.stdout)
            self.assertIn("of one version", result.stdout)

    def test_show_says_when_the_service_is_not_one(self):
        for answer in (lambda packet: None, lambda packet: b"x", lambda packet: reply_to(packet, errno.EOPNOTSUPP)):
            with self.counterfeit(answer):
                self.assert_refuses(self.vrdma("show", "--socket", self.socket), 1, self.socket, "did not answer", "version")
            os.unlink(self.socket)


class Running(TestCase):
    def run_under(self, *command, **keywords):
        return self.vrdma("run", "--", *command, env={"VRDMA_SOCKET": self.socket}, **keywords)

    def test_a_missing_service_is_named(self):
        self.assert_refuses(self.run_under("true"), 125, self.socket, "No such file", "start vrdmad")
        self.assert_refuses(self.vrdma("show", "--socket", self.socket), 1, self.socket, "No such file", "start vrdmad", "vrdma run")
        self.assert_refuses(self.vrdma("metrics", "--socket", self.socket), 1, self.socket)

    def test_every_place_that_was_tried_is_named(self):
        result = self.vrdma("show")
        if result.returncode == 0:
            self.skipTest("a service runs on this host")
        self.assert_refuses(result, 1, self.environment["XDG_RUNTIME_DIR"], "/run/vrdma/vrdmad.sock")

    def test_a_library_without_its_service_says_so(self):
        result = self.run_program("ibv_devinfo", env={"LD_PRELOAD": str(BIN.parent / "lib" / "libvrdma.so"), "VRDMA_SOCKET": self.socket})
        self.assert_refuses(result, 255, self.socket, "ENOENT", "vrdma run")

    @needs_root
    def test_a_socket_that_does_not_admit_us_is_named(self):
        programs = readable_copy(self.folder)
        config = self.folder / "vrdmad.json"
        config.write_text('{"socket_mode": "0600"}')
        with self.service("--config", str(config)):
            result = self.run_program(*as_nobody(programs / "vrdma", "show", "--socket", self.socket))
            self.assert_refuses(result, 1, self.socket, "Permission denied", "socket_mode")

    def test_exit_codes_are_those_of_the_command(self):
        with self.service():
            for script, code in (("exit 0", 0), ("exit 7", 7), ("kill -9 $$", 128 + 9), ("kill -SEGV $$", 128 + 11)):
                with self.subTest(script):
                    self.assertEqual(self.run_under("sh", "-c", script).returncode, code)

    def test_the_exit_code_arrives_where_children_are_ignored(self):
        with self.service():
            ignoring = lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN)
            self.assertEqual(self.run_under("sh", "-c", "exit 42", preexec_fn=ignoring).returncode, 42)
            result = self.run_under("grep", "SigIgn", "/proc/self/status", preexec_fn=ignoring)
            ignored = int(re.search(r"SigIgn:\s*([0-9a-f]+)", result.stdout)[1], 16)
            self.assertTrue(ignored >> (signal.SIGCHLD - 1) & 1, "the command has what we were started with")

    def test_a_relative_socket_serves_a_program_that_changes_its_folder(self):
        with self.service():
            result = self.vrdma("run", "--", "sh", "-c", "cd / && ibv_devinfo", env={"VRDMA_SOCKET": os.path.basename(self.socket)},
                                cwd=self.folder)
            self.assertEqual(result.returncode, 0, result.stderr)
            self.assertIn("vrdma0", result.stdout)
            deep = self.folder / ("x" * 60) / ("y" * 60)  # where the absolute path is too long for a socket
            deep.mkdir(parents=True)
            result = self.vrdma("run", "--", "ibv_devinfo", env={"VRDMA_SOCKET": "../../" + os.path.basename(self.socket)}, cwd=deep)
            self.assertEqual(result.returncode, 0, result.stderr)

    def test_an_installation_folder_with_a_blank_or_a_colon_works(self):
        for name in ("my programs", "a:b", "$LIB"):
            folder = self.folder / name
            folder.mkdir()
            program = readable_copy(folder) / "vrdma"
            with self.subTest(name), self.service():
                for _ in range(2):
                    result = self.run_program(program, "run", "--", "ibv_devinfo", env={"VRDMA_SOCKET": self.socket})
                    self.assertEqual((result.returncode, result.stderr), (0, ""))
                    self.assertIn("vrdma0", result.stdout)
        private = self.folder / "a blank"
        private.mkdir()
        self.assert_refuses(self.run_program(program, "run", "--", "true", env={"XDG_RUNTIME_DIR": str(private)}), 125, str(program.parents[1]),
                            str(private), "LD_PRELOAD", "XDG_RUNTIME_DIR")

    def test_a_command_that_preloads_something_itself_sees_the_device(self):
        other = next(line.split()[2] for line in self.run_program("ldd", sys.executable).stdout.splitlines() if "libm.so" in line)
        with self.service():
            result = self.vrdma("run", "--", "env", f"LD_PRELOAD={other}", "ibv_devinfo", env={"VRDMA_SOCKET": self.socket})
        self.assertEqual((result.returncode, result.stderr), (0, ""))
        self.assertIn("vrdma0", result.stdout)

    @unittest.skipUnless(shutil.which("rstream"), "rdmacm-utils are not installed")
    def test_a_command_whose_preload_puts_the_library_behind_libc_is_told(self):
        other = next(line.split()[2] for line in self.run_program("ldd", sys.executable).stdout.splitlines() if "libm.so" in line)
        with self.service():
            result = self.vrdma("run", "--", "env", f"LD_PRELOAD={other}", "rstream", "-s", "127.0.0.1", env={"VRDMA_SOCKET": self.socket})
        self.assertIn("LD_PRELOAD=$LD_PRELOAD:", result.stderr)
        self.assertNotIn("ENOSYS", result.stderr)

    def test_the_library_has_the_development_packages_name_too(self):
        with self.service():
            result = self.vrdma("run", "--", sys.executable, "-c", "import ctypes; count = ctypes.c_int(); "
                                "ctypes.CDLL('libibverbs.so').ibv_get_device_list(ctypes.byref(count)); print(count.value)",
                                env={"VRDMA_SOCKET": self.socket, "LD_LIBRARY_PATH": "/nowhere"})
        self.assertEqual((result.returncode, result.stderr, result.stdout), (0, "", "1\n"))

    def test_the_statistics_do_not_speak_for_programs_that_the_command_started(self):
        with self.service():
            def run(*command):
                result = self.vrdma("run", "--stats", "--", *command, env={"VRDMA_SOCKET": self.socket})
                self.assertEqual(result.returncode, 0, result.stderr)
                return result.stderr
            self.assertRegex(run("ibv_devinfo"), r"control requests")
            self.assertRegex(run("sh", "-c", "ibv_devinfo; true"), r"sh \(pid \d+\) did not use RDMA itself")

    def built(self, source, *flags):
        """A C program of that main(), which has opened the device before; skipped where it cannot be built."""
        program, file = self.folder / "program", self.folder / "program.c"
        file.write_text("""
            #include <infiniband/verbs.h>
            #include <pthread.h>
            #include <stdio.h>
            #include <stdlib.h>
            #include <string.h>
            #include <sys/wait.h>
            #include <unistd.h>
            static struct ibv_context* open_device(void) {
              int count = 0;
              struct ibv_device** list = ibv_get_device_list(&count);
              struct ibv_context* context = count == 1 ? ibv_open_device(list[0]) : 0;
              ibv_free_device_list(list);
              return context;
            }
            static int exit_code_of_a_child(void) {
              int status = 0;
              const pid_t child = fork();
              if (child == 0) exit(0);
              return waitpid(child, &status, 0) == child ? status : -1;
            }
            """ + source)
        if not shutil.which("gcc") or self.run_program("gcc", "-g", *flags, file, "-o", program, "-libverbs", "-pthread").returncode != 0:
            self.skipTest(f"no gcc with {' '.join(flags) or 'libibverbs-dev'}")
        return program

    def test_programs_with_an_address_sanitizer_run(self):
        """g++'s runtime is a library that wants to be the first; its own order is nobody's concern here. What a fork's child lets go of is no leak."""
        program = self.built("""
            int main(void) {
              struct ibv_context* context = open_device();
              return context == 0 || exit_code_of_a_child() != 0 || ibv_close_device(context) != 0 || exit_code_of_a_child() != 0;
            }""", "-fsanitize=address")
        with self.service():
            for options in ({}, {"ASAN_OPTIONS": "detect_leaks=1"}):
                result = self.vrdma("run", "--", program, env={"VRDMA_SOCKET": self.socket, **options})
                self.assertEqual((result.returncode, result.stderr), (0, ""))

    def test_programs_with_a_thread_sanitizer_run(self):
        """Threads that open the device at the same time: what is made at the first use is no race."""
        program = self.built("""
            static pthread_barrier_t all;
            static void* work(void* unused) {
              pthread_barrier_wait(&all);
              struct ibv_context* context = open_device();
              if (context != 0 && ibv_close_device(context) == 0) return 0;
              return (void*)1;
            }
            int main(void) {
              pthread_t threads[8];
              long failed = 0;
              void* result;
              pthread_barrier_init(&all, 0, 8);
              for (int i = 0; i < 8; ++i) pthread_create(&threads[i], 0, work, 0);
              for (int i = 0; i < 8; ++i) failed |= (pthread_join(threads[i], &result), (long)result);
              return (int)failed;
            }""", "-fsanitize=thread")
        with self.service():
            result = self.vrdma("run", "--", program, env={"VRDMA_SOCKET": self.socket})
            if "unexpected memory mapping" in result.stderr:
                self.skipTest("this kernel's addresses are none for ThreadSanitizer")
            self.assertEqual((result.returncode, result.stderr), (0, ""))

    @unittest.skipUnless(shutil.which("valgrind"), "valgrind is not installed")
    def test_programs_under_memcheck_run(self):
        """Its leak check reads all that it takes for memory: not a whole sparse arena, nor in a fork's child, where that is not mapped."""
        program = self.built("""
            #include <valgrind/memcheck.h>
            int main(void) {
              struct ibv_context* context = open_device();
              if (context == 0 || exit_code_of_a_child() != 0) return 1;
              struct ibv_cq* cq = ibv_create_cq(context, 16, 0, 0, 0);
              if (cq == 0) return 2;
              VALGRIND_DO_QUICK_LEAK_CHECK;
              FILE* const maps = fopen("/proc/self/smaps", "r");
              char line[512];
              int ours = 0;
              long kib, all = 0;
              while (fgets(line, sizeof(line), maps)) {
                if (strchr(line, '-') && strstr(line, " rw-s ")) ours = strstr(line, "memfd:vrdma") != 0;
                if (ours && sscanf(line, "Rss: %ld", &kib) == 1) all += kib, ours = 0;
              }
              fclose(maps);
              printf("%ld\\n", all);
              return ibv_destroy_cq(cq) != 0 || ibv_close_device(context) != 0;
            }""")
        with self.service("--direct", "auto"):
            run = lambda *command: self.vrdma("run", "--", "valgrind", "--error-exitcode=9", *command, env={"VRDMA_SOCKET": self.socket})
            result = run("--leak-check=full", "ibv_devices")
            self.assertEqual(result.returncode, 0, result.stderr)  # nothing of ours is even possibly lost
            result = run(program)
            self.assertEqual(result.returncode, 0, result.stderr)
            self.assertLess(int(result.stdout), 16 << 10, "KiB of sparse memory have come into being")

    def test_a_command_that_cannot_be_run_is_named(self):
        with self.service():
            self.assert_refuses(self.run_under("no-such-command"), 127, "no-such-command", "No such file")
            self.assert_refuses(self.run_under(self.folder), 126, str(self.folder), "Permission denied")
            script = self.folder / "script"
            script.write_text("#!/bin/sh\n")
            self.assert_refuses(self.run_under(script), 126, str(script), "Permission denied")
            script.chmod(0o755)
            for first_line in ("#!/no/such/shell", "#! /no/such/shell -e"):
                script.write_text(first_line + "\n")
                self.assert_refuses(self.run_under(script), 127, str(script), "interpreter /no/such/shell is not there")

    def test_a_program_that_cannot_load_the_library_is_noted(self):
        program = self.folder / "program"
        elf = bytearray(pathlib.Path("/bin/true").resolve().read_bytes())
        first, size, count = (int.from_bytes(elf[at:at + length], "little") for at, length in ((32, 8), (54, 2), (56, 2)))
        headers = [first + i * size for i in range(count)]
        interpreter = next(at for at in headers if int.from_bytes(elf[at:at + 4], "little") == 3)
        loader = int.from_bytes(elf[interpreter + 8:interpreter + 16], "little")  # where its path is

        def note(changed, mode=0o755, owner=None):
            program.unlink(missing_ok=True)
            program.write_bytes(changed)
            if owner is not None:
                os.chown(program, owner, -1)
            program.chmod(mode)
            return self.run_under(program).stderr
        with self.service():
            self.assertEqual(note(elf), "")
            static, other = bytearray(elf), bytearray(elf)
            static[interpreter:interpreter + 4] = bytes(4)
            other[4] = 1
            self.assertRegex(note(static), f"{program} is linked statically.*does not see vrdma0")
            self.assertRegex(note(other), "is a 32-bit program")
            foreign = bytearray(elf)
            foreign[loader + 1:loader + 4] = b"non"
            self.assertIn(f"cannot run {program}: its interpreter /non", note(foreign))
            if os.geteuid() == 0:
                self.assertRegex(note(elf, 0o4755, 64321), "is a set-user-ID.*put \"vrdma run\" inside")

    @unittest.skipUnless(shutil.which("cc"), "no C compiler here")
    def test_a_program_with_verbs_of_its_own_is_noted(self):
        # As one that is linked with libibverbs.a, and else dynamic.
        source, program = self.folder / "own.c", self.folder / "own"
        with self.service():
            for text, flags, noted in (("void *ibv_get_device_list(int *n) { return n; } int main(void) { return ibv_get_device_list(0) != 0; }", [], True),
                                       ("void *ibv_get_device_list(int *n) { return n; } int main(void) { return ibv_get_device_list(0) != 0; }", ["-rdynamic", "-s"], True),
                                       ("__attribute__((weak)) void *ibv_get_device_list(int *); int main(void) { return ibv_get_device_list == 0; }", [], False),
                                       ("int ibv_get_device_list_of_mine; int main(void) { return ibv_get_device_list_of_mine; }", [], False)):
                source.write_text(text)
                built = self.run_program("cc", "-o", program, source, *flags)
                self.assertEqual(built.returncode, 0, built.stderr)
                with self.subTest(text, flags=flags):
                    result = self.run_under(program)
                    self.assertEqual(result.returncode, 0, result.stderr)
                    (self.assertIn if noted else self.assertNotIn)("has libibverbs (libibverbs.a) inside", result.stderr)

    def test_a_signal_reaches_the_command(self):
        with self.service():
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
                with self.subTest(number.name):
                    process = subprocess.Popen(
                        [BIN / "vrdma", "run", "--", "sh", "-c",
                         f"trap 'exit 42' {number.name[3:]}; echo ready; while :; do sleep 0.01; done"],
                        env=dict(self.environment, VRDMA_SOCKET=self.socket), stdout=subprocess.PIPE)
                    self.assertEqual(process.stdout.readline(), b"ready\n")
                    process.send_signal(number)
                    self.assertEqual(process.wait(60), 42)
                    process.stdout.close()

    def popen_under(self, *command, **keywords):
        """The running `vrdma run`, and the process id of its command, which prints that first (and of others that are to end with the test)."""
        process = subprocess.Popen([BIN / "vrdma", "run", "--", *command], env=dict(self.environment, VRDMA_SOCKET=self.socket), stdout=subprocess.PIPE, text=True, **keywords)
        self.addCleanup(lambda: (process.stdout.close(), process.poll() is None and process.kill(), process.wait(WATCHDOG_S)))
        program, *others = map(int, process.stdout.readline().split())

        def end():
            for pid in (program, *others):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.addCleanup(end)
        return process, program, *others

    @staticmethod
    def state_of(pid):
        """As in proc(5): R, S, T …; Z also for one that is gone."""
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return "Z"

    def test_a_terminal_that_hangs_up_ends_the_command(self):
        """The kernel tells the leader of the session alone: `vrdma run`, where a terminal was opened for it."""
        with self.service():
            process, terminal = pty.fork()
            if process == 0:
                os.execve(BIN / "vrdma", ["vrdma", "run", "--", "sh", "-c", "echo $$; exec sleep 1000"], dict(self.environment, VRDMA_SOCKET=self.socket))
            pidfd = os.pidfd_open(process)
            program = 0
            try:
                with os.fdopen(terminal, "rb", buffering=0) as master:
                    text = b""
                    while not text.endswith(b"\n"):
                        text += master.read(1)
                    program = int(text)
                self.assertTrue(select.select([pidfd], [], [], WATCHDOG_S)[0], "it goes on without its terminal")
                self.assertEqual(self.state_of(program), "Z")
            finally:
                os.close(pidfd)
                for pid in filter(None, (program, process)):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                status = os.waitpid(process, 0)[1]
            self.assertEqual(os.waitstatus_to_exitcode(status), 128 + signal.SIGHUP)

    def test_a_run_that_is_killed_takes_the_command_along(self):
        with self.service():
            process, program, started = self.popen_under("sh", "-c", "sleep 1000 >&- & echo $$ $!; exec sleep 1000")
            process.kill()
            self.wait_until(lambda: self.state_of(program) == "Z", "the command of a `vrdma run` that was killed goes on")
            self.assertNotEqual(self.state_of(started), "Z", "what the command has started itself is no concern of ours")

    def test_signals_of_all_kinds_reach_the_command(self):
        script = """if True:
            import os, signal, sys
            wanted = {int(number) for number in sys.argv[1:]}
            signal.pthread_sigmask(signal.SIG_BLOCK, wanted)
            print(os.getpid(), flush=True)
            while wanted:
                got = signal.sigwaitinfo(wanted)
                wanted.remove(got.si_signo)
                print(got.si_signo, flush=True)"""
        wanted = [signal.SIGABRT, signal.SIGPIPE, signal.SIGXCPU, signal.SIGPROF, signal.SIGIO, signal.SIGRTMIN, signal.SIGRTMAX]
        with self.service():
            process, _ = self.popen_under(sys.executable, "-c", script, *(str(int(number)) for number in wanted))
            for number in wanted:
                process.send_signal(number)
                self.assertTrue(select.select([process.stdout], [], [], WATCHDOG_S)[0], f"{number!r} does not arrive")
                self.assertEqual(process.stdout.readline(), f"{int(number)}\n")
            self.assertEqual(process.wait(WATCHDOG_S), 0)

    def test_a_command_stops_and_goes_on_with_its_run(self):
        with self.service():
            # A group that somebody could continue, as a shell's job: else nobody may stop it by SIGTSTP.
            process, program = self.popen_under("sh", "-c", "echo $$; exec sleep 1000", preexec_fn=lambda: os.setpgid(0, 0))
            for _ in range(2):
                process.send_signal(signal.SIGTSTP)
                self.wait_until(lambda: self.state_of(program) == self.state_of(process.pid) == "T", "not both have stopped")
                process.send_signal(signal.SIGCONT)
                self.wait_until(lambda: "T" not in (self.state_of(program), self.state_of(process.pid)), "not both go on")
            process.terminate()
            self.assertEqual(process.wait(WATCHDOG_S), 128 + signal.SIGTERM)

    def test_an_alarm_that_was_set_before_reaches_the_command(self):
        """`perl -e 'alarm 60; exec @ARGV' vrdma run …`: a timer outlives exec, not fork."""
        with self.service():
            for after_s in (1, 5, 25):  # it may come before there is a command, which is nobody's fault
                with contextlib.suppress(ValueError):
                    process, _ = self.popen_under("sh", "-c", "echo $$; exec sleep 1000", preexec_fn=lambda: signal.alarm(after_s))
                    self.assertEqual(process.wait(WATCHDOG_S), 128 + signal.SIGALRM)
                    break
            else:
                self.fail("no command was started")

    def test_arguments_and_streams_are_the_commands_own(self):
        with self.service():
            result = self.run_under("sh", "-c", 'printf "%s|" "$@"; cat >&2', "sh", "--json", "-h", "--", "a b", input="in")
            self.assertEqual((result.stdout, result.stderr), ("--json|-h|--|a b|", "in"))

    def test_bad_usage_is_refused_by_name(self):
        self.assert_refuses(self.vrdma("run", "--link-layer", "token-ring", "--", "true"), 2, "token-ring", "ethernet")
        self.assert_refuses(self.vrdma("run", "--name", "x" * 32, "--", "true"), 2, "31 characters")
        self.assert_refuses(self.vrdma("run"), 2, "command")
        self.assert_refuses(self.vrdma("shwo"), 2, "shwo")
        self.assert_refuses(self.vrdma("show", "quarks"), 2, "quarks", "qps")

    def stop_private_service(self, *socket):
        pid = json.loads(self.vrdma("show", "--json", *(("--socket", *socket) if socket else ())).stdout)["service"]["pid"]
        pidfd = os.pidfd_open(pid)
        os.kill(pid, signal.SIGTERM)
        self.assertTrue(select.select([pidfd], [], [], 60)[0], "the private service did not leave")
        os.close(pidfd)

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

    def test_container_prints_the_options_of_an_engine(self):
        inside = ["--env=LD_PRELOAD=/usr/lib/vrdma/libvrdma.so", "--env=VRDMA_SOCKET=/run/vrdma/s.sock"]
        library = BIN.parent / "lib"
        with self.service():
            said = self.vrdma("container", "--socket", self.socket, "--link-layer", "ethernet", "--name", "x")
            self.assertEqual((said.returncode, said.stderr), (0, ""))
            self.assertEqual(said.stdout.split(), [f"--mount=type=bind,source={self.socket},target=/run/vrdma/s.sock,readonly",
                                                   f"--mount=type=bind,source={library},target=/usr/lib/vrdma,readonly", *inside,
                                                   "--env=VRDMA_LINK_LAYER=ethernet", "--env=VRDMA_NAME=x"])
            said = self.vrdma("container", "--format", "nspawn", env={"VRDMA_SOCKET": self.socket})
            self.assertEqual(said.stdout.split(), [f"--bind-ro={self.socket}:/run/vrdma/s.sock", f"--bind-ro={library}:/usr/lib/vrdma",
                                                   *(word.replace("--env", "--setenv") for word in inside)])
        devices = json.loads(self.vrdma("container", "--format", "cdi").stdout)  # no service answers
        self.assertEqual([device["name"] for device in devices["devices"]], ["vrdma0", "ib", "ethernet"])
        self.assertEqual(devices["containerEdits"]["mounts"][0]["hostPath"], "/run/vrdma/vrdmad.sock")
        self.assert_refuses(self.vrdma("container", "--socket", self.socket), 1, self.socket, "start vrdmad")
        self.assert_refuses(self.vrdma("container", "--format", "cdi", "--socket", "/a,b/c.sock"), 1, "/a,b/c.sock", "comma")
        self.assert_refuses(self.vrdma("container", "--format", "cdi", "--link-layer", "ib"), 1, "either link layer")
        self.assert_refuses(self.vrdma("container", "--format", "pod"), 2, "pod", "nspawn")
        self.assert_refuses(self.vrdma("container", "--format", "cdi", "--name", "a b"), 1, "a b", "--name without")
        private = self.vrdma("container")  # whose socket comes and goes
        self.assertIn(f"source={self.environment['XDG_RUNTIME_DIR']}/vrdma,target=/run/vrdma,readonly", private.stdout)
        self.assertIn("only processes of your user", private.stderr)
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

    def test_a_program_that_is_not_admitted_is_told_why(self):
        """The service says so and hangs up, before or after the program has asked."""
        with self.service(preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))), contextlib.ExitStack() as waiting:
            for _ in range(32):  # of one user at a time
                connection = waiting.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                connection.connect(self.socket)
            for _ in range(10):
                result = self.run_program("ibv_devinfo", env={"VRDMA_SOCKET": self.socket, "LD_PRELOAD": str(LIB / "libvrdma.so")})
                self.assertIn("EDQUOT", result.stderr)

    def test_no_private_service_is_started_with_seconds_to_live(self):
        vrdma, environment = self.user()
        result = self.run_program(*vrdma, "run", "--", "true", env=environment, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (20, 20)))
        self.assert_refuses(result, 125, "ulimit -Ht", "20 s")

    def test_a_service_that_has_used_up_its_processor_time_says_so(self):
        with self.service() as process:
            process.send_signal(signal.SIGXCPU)
            self.assertEqual(process.wait(WATCHDOG_S), 0)
        self.assertIn("ulimit -t", self.service_said)

    def test_the_link_layer_is_each_guests_own(self):
        def link_layer(*options):
            result = self.vrdma("run", *options, "--", "ibv_devinfo")
            self.assertEqual(result.returncode, 0, result.stderr)
            return re.search(r"link_layer:\s+(\w+)", result.stdout)[1]

        self.assertEqual([link_layer("--link-layer", "ethernet"), link_layer(), link_layer("--link-layer", "ib"), link_layer("--link-layer", "infiniband")],
                         ["Ethernet", "InfiniBand", "InfiniBand", "InfiniBand"])
        self.stop_private_service()

    def test_a_variable_that_means_nothing_is_told_once(self):
        with self.service():
            result = self.vrdma("run", "--", "ibv_devinfo", env={"VRDMA_SOCKET": self.socket, "VRDMA_LINK_LAYER": "token-ring", "VRDMA_PARTIAL_PAGES": "perhaps",
                                                                 "VRDMA_PRIVATE_PAGES": "move"})
            self.assertEqual(result.returncode, 0, result.stderr)
            self.assertEqual(result.stderr.splitlines(), ['vrdma: VRDMA_LINK_LAYER is "token-ring", which means nothing: it must be ib or ethernet',
                                                          'vrdma: VRDMA_PARTIAL_PAGES is "perhaps", which means nothing: it must be move or stay',
                                                          'vrdma: VRDMA_PRIVATE_PAGES is "move", which means nothing: it must be stay, or not there'])

    def test_a_device_that_does_not_open_for_want_of_descriptors_says_so(self):
        library = BIN.parent / "lib/libvrdma.so"
        with self.service():
            opened = False
            for limit in range(4, 32):
                result = self.run_program("ibv_devinfo", env={"VRDMA_SOCKET": self.socket, "LD_PRELOAD": str(library)},
                                          preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit)))
                opened = result.returncode == 0 and "vrdma0" in result.stdout
                if not opened and "error while loading shared libraries" not in result.stderr and "cannot be preloaded" not in result.stderr:
                    self.assertIn("vrdma: cannot", result.stderr, limit)
                    self.assertIn("EMFILE", result.stderr, limit)
                if opened:
                    break
            self.assertTrue(opened)

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


class Showing(TestCase):
    def show(self, *arguments):
        result = self.vrdma("show", "--socket", self.socket, *arguments)
        self.assertEqual(result.returncode, 0, result.stderr)
        return result.stdout

    def test_every_object_prints_text_and_json(self):
        with self.service():
            guest, status, _ = attach(self.socket, b"ada")
            self.assertEqual(status, 0)
            for kind in ("devices", "guests", "qps", "cqs", "mrs", "srqs", "routes", "hca", "cache", "counters"):
                with self.subTest(kind):
                    self.show(kind)
                    json.loads(self.show(kind, "--json"))
            self.assertIn("name ada ", self.show("guests"))
            device = json.loads(self.show("devices", "--json"))[0]
            self.assertEqual(device["physical_hca_available"], False)
            self.assertEqual(device["qp_types"], ["RC", "UC", "UD", "XRC"])
            self.assertEqual((device["state"], device["active_mtu"], device["link_layer"]), ("ACTIVE", 4096, "InfiniBand"))
            for word in ("node_guid", "active_mtu 4096", "srq yes", "physical_hca_available no", "link_layer InfiniBand", "max_qp "):
                self.assertIn(word, self.show("devices"))
            guest.close()

    def test_ethernet_shows_roce(self):
        with self.service("--link-layer", "ethernet"):
            guest, _, _ = attach(self.socket)
            device = json.loads(self.show("devices", "--json"))[0]
            self.assertEqual(device["roce_versions"], ["v1", "v2"])
            self.assertEqual([gid["type"] for gid in device["gids"]], ["RoCE v1", "RoCE v2"] * 2)
            guest.close()

    def test_paths_show_the_link_layer_that_the_service_gives(self):
        link_layer = "/sys/class/infiniband/vrdma0/ports/1/link_layer"
        look = ["sh", "-c", f"cat {link_layer}; ls /dev/infiniband"]  # of programs that have not opened the device
        with self.service("--link-layer", "ethernet"):
            env = {"VRDMA_SOCKET": self.socket}
            self.assertEqual(self.vrdma("run", "--", *look, env=env).stdout, "Ethernet\nrdma_cm\nuverbs0\n")
            self.assertEqual(self.vrdma("run", "--link-layer", "ib", "--", *look, env=env).stdout, "InfiniBand\nrdma_cm\numad0\nuverbs0\n")
            # A library that `vrdma run` has told nothing asks when it is read.
            self.assertEqual(self.run_program("cat", link_layer, env={**env, "LD_PRELOAD": str(BIN.parent / "lib/libvrdma.so")}).stdout, "Ethernet\n")
        with self.service():
            env = {"VRDMA_SOCKET": self.socket, "VRDMA_SERVED_LINK_LAYER": "ethernet"}  # another service's
            self.assertEqual(self.vrdma("run", "--", *look, env=env).stdout, "InfiniBand\nrdma_cm\numad0\nuverbs0\n")

    def test_a_hostile_name_breaks_neither_service_nor_terminal(self):
        with self.service():
            guest, status, _ = attach(self.socket, b"\xff\xfe\x1b[31m evil\n\"\\{x=1}\x7f\xc3")
            self.assertEqual(status, 0)
            name = json.loads(self.show("--json"))["guests"][0]["name"]
            self.assertRegex(name, r"^[!-~]+$")
            self.assertEqual(len(self.show("guests").splitlines()), 1)
            for output in (self.show("guests"), self.vrdma("metrics", "--socket", self.socket).stdout):
                self.assertNotIn("\x1b", output)
            guest.close()
        self.assertNotIn("\x1b", self.service_said)

    @needs_root
    def test_others_see_what_is_theirs(self):
        programs = readable_copy(self.folder)
        with self.service():
            guest, _, _ = attach(self.socket, b"of-root")
            as_other = self.run_program(*as_nobody(programs / "vrdma", "show", "--socket", self.socket, "--json"))
            self.assertEqual(as_other.returncode, 0, as_other.stderr)
            seen = json.loads(as_other.stdout)
            for key in ("guests", "routes", "departed", "tenants"):
                self.assertEqual(seen[key], [], key)
            self.assertEqual([g["name"] for g in json.loads(self.show("--json"))["guests"]], ["of-root"])
            mine = self.run_program(*as_nobody(programs / "vrdma", "run", "--name", "of-nobody", "--", programs / "vrdma", "show", "--json"),
                                    env={"VRDMA_SOCKET": self.socket})
            self.assertEqual(mine.returncode, 0, mine.stderr)
            guest.close()

    @needs_root
    def test_who_is_not_mapped_by_the_services_user_namespace_sees_nothing_of_others_like_it(self):
        # To it they have all one uid, the overflow id. Without the distinction the other user's guest is shown, and made mediated.
        wrapper = self.folder / "namespace"
        wrapper.mkdir()
        (wrapper / "vrdmad").write_text(f"#!/bin/sh\nexec unshare --user --map-root-user -- {BIN / 'vrdmad'} \"$@\"\n")
        (wrapper / "vrdmad").chmod(0o755)
        if self.run_program("unshare", "--user", "--map-root-user", "true").returncode != 0:
            self.skipTest("no user namespaces here")
        programs = readable_copy(self.folder)
        env = {"VRDMA_SOCKET": self.socket}

        def as_user(uid, *command):
            return ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", *map(str, command)]
        with self.service("--direct", "auto", program=wrapper / "vrdmad"):
            other = subprocess.Popen(as_user(4711, programs / "vrdma", "run", "--name", "of-other", "--", "ibv_asyncwatch"),
                                     env=dict(self.environment, **env), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            try:
                self.wait_until(lambda: json.loads(self.show("guests", "--json")), "a program of a user who is not mapped is no guest", every_s=0.1)
                shown = self.run_program(*as_user(4712, programs / "vrdma", "show", "--json"), env=env)
                self.assertIn("does not map this user", self.run_program(*as_user(4712, programs / "vrdma", "doctor"), env=env).stdout)
                seen = json.loads(shown.stdout)
                for key in ("guests", "routes", "departed", "tenants"):
                    self.assertEqual(seen[key], [], key)
                self.assertIn("cannot tell this user from others", shown.stderr)
                self.assert_refuses(self.run_program(*as_user(4712, programs / "vrdma", "direct", "mediated"), env=env), 1, "cannot tell this user from others")
                guests = json.loads(self.show("guests", "--json"))  # of the namespace's root
                self.assertEqual([(guest["name"], guest["uid"]) for guest in guests], [("of-other", NOBODY)])
                one = str(guests[0]["guest"])
                self.assert_refuses(self.run_program(*as_user(4712, programs / "vrdma", "direct", "mediated", "--guest", one), env=env), 1, f"no guest {one}")
            finally:
                other.kill()
                other.communicate()
        self.assertEqual(self.service_said.count("may be several users"), 1, self.service_said)

    @contextlib.contextmanager
    def pair(self, *command):
        """Server and client of that, until the end of the block."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        programs = []

        def start(*more):
            programs.append(subprocess.Popen([str(BIN / "vrdma"), "run", "--", *command, "-p", str(port), *more], env=dict(self.environment, VRDMA_SOCKET=self.socket),
                                             stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True))

        def listens():
            return any(f":{port:04X} " in line and " 0A " in line for file in ("tcp", "tcp6") for line in pathlib.Path(f"/proc/net/{file}").read_text().splitlines())

        try:
            start()
            self.wait_until(listens, "the server listens")
            start("localhost")
            yield
        finally:
            for program in programs:
                os.killpg(program.pid, signal.SIGKILL)
                program.wait()

    @unittest.skipUnless(shutil.which("ibv_rc_pingpong"), "no ibv_rc_pingpong here")
    def test_completions_that_programs_write_themselves_are_counted(self):
        def completions():
            modes = [qp["mode"] for qp in json.loads(self.show("qps", "--json"))]
            counts = [cq["completions"] for cq in json.loads(self.show("cqs", "--json"))]
            return counts if modes == ["direct"] * 2 and min(counts, default=0) > 1000 else None

        with self.service("--direct", "auto"), self.pair("ibv_rc_pingpong", "-n", "1000000000"):
            before = self.wait_until(completions, "completions of direct connections are shown")
            self.wait_until(lambda: (now := completions()) and all(a > b for a, b in zip(now, before)), "more of them are")

    @unittest.skipUnless(shutil.which("ib_send_bw"), "no perftest here")
    def test_groups_are_shown_as_text_and_as_json(self):
        with self.service(), self.pair("ib_send_bw", "-c", "UD", "-g", "-D", "1000"):
            self.wait_until(lambda: "mgid" in self.show("routes"), "a group is shown")
            self.assertTrue([route for route in json.loads(self.show("routes", "--json")) if "mgid" in route])

    def test_metrics_are_prometheus_text(self):
        with self.service("--shards", "2"):
            guest, _, _ = attach(self.socket, b'quo"te\\d')
            text = self.vrdma("metrics", "--socket", self.socket).stdout
            guest.close()
        typed, finished = {}, set()
        current = None
        sample = re.compile(r'^([a-z_]+)(\{[a-z_]+="(?:[^"\\\n]|\\[\\"n])*"(?:,[a-z_]+="(?:[^"\\\n]|\\[\\"n])*")*\})? -?\d+$')
        for line in text.splitlines():
            if line.startswith("# TYPE "):
                _, _, name, kind = line.split()
                self.assertNotIn(name, typed)
                typed[name] = kind
                self.assertEqual(kind == "counter", name.endswith("_total"), name)
            elif not line.startswith("# HELP "):
                match = sample.match(line)
                self.assertTrue(match, line)
                self.assertIn(match[1], typed)
                if match[1] != current:
                    self.assertNotIn(match[1], finished, "samples of one name stand together")
                    finished.add(match[1])
                    current = match[1]
        self.assertIn("vrdma_guests", typed)
        for what in ("turns", "sleeps", "doorbells"):  # of each, not their sum
            self.assertEqual(re.findall(rf'vrdma_shard_{what}_total{{shard="(\d)"}}', text), ["0", "1"])
        self.assertIn('name="quo\\"te\\\\d"', text)

    @needs_full_device
    def test_a_full_disk_is_said(self):
        with self.service(), open("/dev/full", "w") as full:
            for command in ("show", "container"):
                self.assert_refuses(self.vrdma(command, "--socket", self.socket, stdout=full), 1, "standard output", "No space left")
            self.assert_refuses(self.vrdma("container", "--format", "cdi", stdout=full), 1, "standard output", "No space left")

    def test_a_service_that_is_stopped_is_not_waited_for_for_ever(self):
        with self.service() as process:
            process.send_signal(signal.SIGSTOP)
            result = self.vrdma("show", "--socket", self.socket)
            process.send_signal(signal.SIGCONT)
            self.assert_refuses(result, 1, self.socket, "did not answer")


@unittest.skipUnless(shutil.which("bwrap"), "no bwrap here")
class WithoutProc(TestCase):
    def test_programs_run_and_doctor_says_what_it_costs(self):
        sandbox = ["bwrap", "--ro-bind", "/", "/", "--dev", "/dev", "--tmpfs", "/proc", "--bind", self.folder, self.folder]
        if self.run_program(*sandbox, "true").returncode != 0:
            self.skipTest("bwrap cannot make a sandbox here")
        with self.service():
            env = {"VRDMA_SOCKET": self.socket}
            result = self.run_program(*sandbox, BIN / "vrdma", "run", "--", "ibv_devinfo", env=env)
            self.assertEqual((result.returncode, result.stderr), (0, ""))
            self.assertIn("vrdma0", result.stdout)
            report = json.loads(self.run_program(*sandbox, BIN / "vrdma", "doctor", "--json", env=env).stdout)
            found = {finding["subject"]: finding["level"] for finding in report["findings"]}
            self.assertEqual((found["self-test"], found["proc"]), ("ok", "note"), report)


class Doctor(TestCase):
    def doctor(self, **keywords):
        result = self.vrdma("doctor", "--json", **keywords)
        report = json.loads(result.stdout)
        for finding in report["findings"]:
            self.assertIn(finding["level"], ("ok", "note", "problem"))
            self.assertTrue(finding["subject"] and finding["what"])
            if finding["level"] == "problem":
                self.assertTrue(finding["remedy"], finding)
        self.assertEqual(result.returncode, 1 if report["problems"] else 0)
        return {finding["subject"]: finding for finding in report["findings"]}

    def test_a_working_machine_has_no_problem(self):
        with self.service():
            found = self.doctor(env={"VRDMA_SOCKET": self.socket})
            self.assertEqual([f for f in found.values() if f["level"] == "problem"], [])
            self.assertEqual(found["self-test"]["level"], "ok")
            self.assertIn(self.socket, found["service"]["what"])
            guests = json.loads(self.vrdma("show", "--socket", self.socket, "guests", "--json").stdout)
            self.assertEqual(guests, [], "its guest is gone when it is done")

    def test_a_missing_service_is_a_problem_where_one_was_named(self):
        found = self.doctor(env={"VRDMA_SOCKET": self.socket})
        self.assertEqual(found["service"]["level"], "problem")
        self.assertIn(self.socket, found["service"]["what"])

    def test_a_limit_of_file_sizes_makes_a_program_slower_and_a_service_useless(self):
        def limit():
            resource.setrlimit(resource.RLIMIT_FSIZE, (100 << 10, 100 << 10))
        with self.service():
            found = self.doctor(env={"VRDMA_SOCKET": self.socket}, preexec_fn=limit)
            self.assertEqual((found["file-size"]["level"], found["self-test"]["level"]), ("note", "ok"))
            self.assertIn("ulimit -f", found["file-size"]["remedy"])
        with self.service(preexec_fn=limit):
            found = self.doctor(env={"VRDMA_SOCKET": self.socket})
            self.assertEqual(found["self-test"]["level"], "problem")
            self.assertIn("ulimit -f", found["self-test"]["remedy"])

    def test_no_size_of_files_at_all_ends_nobody_without_a_word(self):
        # A memfd larger than the limit is SIGXFSZ for who does not ignore it.
        def limit():
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        with self.service():
            found = self.doctor(env={"VRDMA_SOCKET": self.socket}, preexec_fn=limit)
            self.assertEqual((found["memfd"]["level"], found["file-size"]["level"], found["self-test"]["level"]), ("ok", "note", "ok"))
        self.assert_refuses(self.vrdmad("--socket", self.socket, preexec_fn=limit), 1, "ulimit -f")

    def test_a_service_in_another_pid_namespace_is_told_from_one_without_rights(self):
        sandbox = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc"]
        if self.run_program(*sandbox, "true").returncode != 0:
            self.skipTest("no user and pid namespaces here")
        inside = self.folder / "vrdmad"
        inside.write_text(f"#!/bin/sh\nexec {' '.join(sandbox)} {BIN / 'vrdmad'} \"$@\"\n")
        inside.chmod(0o755)
        ready_read, ready_write = os.pipe()
        with os.fdopen(ready_read, "rb") as ready:
            process = subprocess.Popen([str(inside), "--socket", self.socket, "--ready-fd", str(ready_write)], pass_fds=[ready_write],
                                       env=self.environment, stderr=subprocess.DEVNULL)
            os.close(ready_write)
            try:
                self.assertEqual(ready.read(1), b"\x01", "vrdmad did not come up")
                found = self.doctor(env={"VRDMA_SOCKET": self.socket})
                self.assertEqual(found["self-test"]["level"], "ok")
                self.assertIn("another pid namespace", found["copies"]["remedy"])
            finally:
                process.kill()  # unshare's, with which vrdmad goes
                process.wait(WATCHDOG_S)

    def test_a_service_under_a_limit_of_memory_is_noted(self):
        for root, limit in ((pathlib.Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"), (pathlib.Path("/sys/fs/cgroup"), "memory.max")):
            group = root / f"vrdma-test-{os.getpid()}"
            with contextlib.suppress(OSError):
                group.mkdir()
                self.addCleanup(group.rmdir)  # when the service has left
                if (group / limit).exists():
                    break
        else:
            self.skipTest("no control group with a limit of memory can be made here")
        (group / limit).write_text(str(1 << 30))
        with self.service(preexec_fn=lambda: (group / "cgroup.procs").write_text(str(os.getpid()))):
            report = json.loads(self.vrdma("doctor", "--json", "--socket", self.socket).stdout)
            noted = [finding for finding in report["findings"] if str(group) in finding["what"]]
            self.assertEqual([finding["level"] for finding in noted], ["note"], report)
            self.assertIn("1024 MiB", noted[0]["what"])

    def test_no_private_service_is_started_under_limits_that_it_could_not_serve_with(self):
        for which, bytes_, option in ((resource.RLIMIT_FSIZE, 100 << 10, "ulimit -Hf"), (resource.RLIMIT_AS, 900 << 20, "ulimit -Hv")):
            with self.subTest(option):
                self.assert_refuses(self.vrdma("run", "--", "true", preexec_fn=lambda: resource.setrlimit(which, (bytes_, bytes_))), 125, option, f"{bytes_ >> 10} KiB")
                self.assertFalse(pathlib.Path(self.environment["XDG_RUNTIME_DIR"], "vrdma", "vrdmad.sock").exists())

    def test_a_limit_of_address_space_is_a_problem_that_a_program_is_told(self):
        def limit():
            resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
        with self.service():
            found = self.doctor(env={"VRDMA_SOCKET": self.socket}, preexec_fn=limit)
            self.assertEqual((found["self-test"]["level"], found["addresses"]["level"]), ("problem", "problem"))
            self.assertIn("ulimit -v", found["addresses"]["remedy"])
            result = self.vrdma("run", "--", "ibv_devinfo", env={"VRDMA_SOCKET": self.socket}, preexec_fn=limit)
            self.assert_refuses(result, 1, self.socket, "ENOMEM", "ulimit -v")

    def test_it_says_whether_there_is_an_hca_for_other_hosts(self):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        (self.folder / "secret").write_text("0123456789abcdef" * 4)
        (self.folder / "secret").chmod(0o600)
        hosts = [{"name": f"h{i}", "address": f"127.0.0.{i + 1}", "port": port, "lids": f"{i * 1000 + 1}-{i * 1000 + 1000}"} for i in (0, 1)]
        config = {"remote": {"name": "h0", "address": "127.0.0.1", "port": port, "secret_file": str(self.folder / "secret"), "hosts": hosts}}
        file = self.folder / "vrdmad.json"
        for hca in (None, {"device": "not-there"}):
            file.write_text(json.dumps(config if hca is None else {**config, "hca": hca}))
            with self.subTest(hca), self.service("--config", file):
                found = self.doctor(env={"VRDMA_SOCKET": self.socket})["hca"]
                shown = json.loads(self.vrdma("show", "--socket", self.socket, "hca", "--json").stdout)
                route = json.loads(self.vrdma("show", "--socket", self.socket, "routes", "--json").stdout)[0]
                self.assertEqual(route["via"], "tcp")
                if hca is None:
                    self.assertIn("this host has", found["what"])
                    self.assertEqual((shown, route["why"]), (None, "only-carrier"))
                else:
                    self.assertEqual((found["level"], shown["state"]), ("note", "none"))
                    self.assertIn(shown["why"], found["what"])
                    self.assertIn("no HCA here", route["why"])

    def test_a_host_that_is_none_is_refused_with_what_to_ask(self):
        self.assert_refuses(self.vrdma("doctor", "--folder", self.folder), 2, "--folder", "host")
        with self.service():
            for host, *words in (("nobody", "nor a numeric address", "vrdma show hosts", "vrdma show routes"), ("127.0.0.1", "ca.pem", "vrdma host init", "--folder")):
                result = self.vrdma("doctor", host, "--folder", self.folder / "none", "--socket", self.socket)
                self.assertEqual(result.returncode, 1)
                for word in words:
                    self.assertIn(word, result.stdout)

    def test_few_open_files_are_noted(self):
        def limit():
            resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
        with self.service():
            found = self.doctor(env={"VRDMA_SOCKET": self.socket}, preexec_fn=limit)
            self.assertEqual(found["open-files"]["level"], "note")
            self.assertIn("200", found["open-files"]["what"])


class ListedHosts(TestCase):
    """Two hosts of a "remote" section, at addresses of the loopback device."""

    def setUp(self):
        super().setUp()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]

    def flags(self, number, secret=b"s" * 32, **lids):
        """Of the vrdmad of host h0 or h1, which has its own idea of who has which LIDs."""
        lids = {"h0": "1-1000", "h1": "1001-2000", **lids}
        hosts = [{"name": name, "address": f"127.0.0.{i + 1}", "port": self.port, "lids": lids[name]} for i, name in enumerate(("h0", "h1"))]
        file, secret_file = self.folder / f"h{number}.json", self.folder / f"h{number}.secret"
        secret_file.write_bytes(secret)
        secret_file.chmod(0o600)
        file.write_text(json.dumps({"remote": {**{key: hosts[number][key] for key in ("name", "address", "port")}, "secret_file": str(secret_file), "hosts": hosts}}))
        return "--config", file, "--vm-folder", self.folder / f"h{number}.vm"

    def both_say(self, others_flags, *words):
        """What `vrdma doctor` says of the other host on each of the two, once it has these words; and `vrdma show routes` then."""
        sockets, said = [self.socket, str(self.folder / "other.sock")], []
        with self.service(*self.flags(0)):
            self.socket = sockets[1]
            with self.service(*others_flags):
                for number, path in enumerate(sockets):
                    end = time.monotonic() + WATCHDOG_S
                    result = None
                    while result is None or not all(word in result.stdout for word in words):
                        self.assertLess(time.monotonic(), end, result and result.stdout + result.stderr)
                        time.sleep(0.05)
                        result = self.vrdma("doctor", f"h{1 - number}", "--socket", path)
                    said.append((result, self.vrdma("show", "routes", "--socket", path).stdout))
        return said

    def test_whose_lists_differ_are_told(self):
        differs = "h0 has LIDs 3001-4000 by the configuration of h1, 1-1000 by that of h0", "h0 has LIDs 1-1000 by the configuration of h0, 3001-4000 by that of h1"
        for said, (result, routes) in zip(differs, self.both_say(self.flags(1, h0="3001-4000"), "by the configuration of")):
            self.assertEqual(result.returncode, 1, result.stdout)
            self.assertIn(said, result.stdout)
            self.assertIn("the same LIDs on all hosts", result.stdout)
            self.assertIn(f'disagreement "{said}"', routes)
        self.assertEqual(self.service_said.count(differs[0]), 1, self.service_said)  # by h0, which ended last

    def test_whose_lists_agree_have_no_problem(self):
        for result, routes in self.both_say(self.flags(1), "of programs go to"):
            self.assertEqual(result.returncode, 0, result.stdout)
            self.assertNotIn("disagreement", routes)

    def test_whose_secrets_differ_are_told(self):
        for result, _ in self.both_say(self.flags(1, secret=b"x" * 32), "does not have this host's secret"):
            self.assertEqual(result.returncode, 1, result.stdout)
            self.assertIn('copy "secret_file"', result.stdout)
            self.assertNotIn("nft", result.stdout)

    def test_a_log_says_that_a_host_comes_and_goes(self):
        log = self.folder / "h0.log"

        def until(*words):
            end = time.monotonic() + WATCHDOG_S
            while not all(word in (said := log.read_text()) for word in words):
                self.assertLess(time.monotonic(), end, said)
                time.sleep(0.05)

        with self.service(*self.flags(0), "--log-file", log):
            self.socket = str(self.folder / "other.sock")
            with self.service(*self.flags(1)):
                until("host h1 is there")
            until("host h1 has gone")


if __name__ == "__main__":
    unittest.main()
