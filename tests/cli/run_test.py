"""vrdma run: which service a command gets, what reaches the command, and what it returns and says."""
import contextlib
import os
import re
import resource
import signal
import socket
import unittest

from support import BIN, LIB, TestCase, as_nobody, needs_full_device, needs_root, readable_copy


class Running(TestCase):
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

    def test_a_library_without_any_service_says_so_where_it_was_preloaded(self):
        if os.path.exists("/run/vrdma/vrdmad.sock"):
            self.skipTest("a service runs on this host")
        self.assert_refuses(self.run_program("ibv_devinfo", env={"LD_PRELOAD": str(LIB / "libvrdma.so")}), 255, "/run/vrdma/vrdmad.sock", "ENOENT", "vrdma run")
        # Who only has it for libibverbs is told no more than of an adapter that is not there.
        self.assertNotIn("vrdma:", self.run_program("ibv_devinfo", env={"LD_LIBRARY_PATH": str(LIB)}).stderr)

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

    def test_the_statistics_do_not_speak_for_programs_that_the_command_started(self):
        with self.service():
            def run(*command):
                result = self.vrdma("run", "--stats", "--", *command, env={"VRDMA_SOCKET": self.socket})
                self.assertEqual(result.returncode, 0, result.stderr)
                return result.stderr
            self.assertRegex(run("ibv_devinfo"), r"control requests")
            self.assertRegex(run("sh", "-c", "ibv_devinfo; true"), r"sh \(pid \d+\) did not use RDMA itself")
            never = self.vrdma("run", "--stats", "--", "/nowhere/program", env={"VRDMA_SOCKET": self.socket})
            self.assert_refuses(never, 127, "cannot run /nowhere/program")
            self.assertNotIn("did not use RDMA", never.stderr)

    @needs_full_device
    def test_what_cannot_be_said_does_not_take_the_place_of_the_commands_exit_code(self):
        """Notes, and statistics. Fails by 125 where what is told of them is an error of `vrdma run`."""
        with self.service(), open("/dev/full", "w") as full:
            for command in (("sh", "-c", "exit 7"), ("sh", "-c", "ibv_devinfo; exit 7")):
                self.assertEqual(self.vrdma("run", "--stats", "--", *command, env={"VRDMA_SOCKET": self.socket}, stderr=full).returncode, 7)
            self.assertEqual(self.vrdma("run", "--", "/nowhere/program", env={"VRDMA_SOCKET": self.socket}, stderr=full).returncode, 127)

    def test_arguments_and_streams_are_the_commands_own(self):
        with self.service():
            result = self.run_under("sh", "-c", 'printf "%s|" "$@"; cat >&2', "sh", "--json", "-h", "--", "a b", input="in")
            self.assertEqual((result.stdout, result.stderr), ("--json|-h|--|a b|", "in"))

    def test_bad_usage_is_refused_by_name(self):
        self.assert_refuses(self.vrdma("run", "--link-layer", "token-ring", "--", "true"), 2, "token-ring", "ethernet")
        self.assert_refuses(self.vrdma("run", "--name", "x" * 32, "--", "true"), 2, "31 characters")
        self.assert_refuses(self.vrdma("run"), 2, "command")
        self.assert_refuses(self.vrdma("run", "--bogus", "--", "true"), 2, "expected: --bogus\n")
        self.assert_refuses(self.vrdma("shwo"), 2, "shwo")
        self.assert_refuses(self.vrdma(""), 2, 'expected: ""\n')
        self.assert_refuses(self.vrdma("show", ""), 2, 'object: "" not in')
        self.assert_refuses(self.vrdma("show", "quarks"), 2, "quarks", "qps")
        with self.service():
            self.assert_refuses(self.run_under(""), 127, 'cannot run ""')
            for words in (("show",), ("doctor",), ("metrics",), ("container",), ("direct", "auto"), ("vm", "list")):
                self.assert_refuses(self.vrdma(*words, "--socket", "", env={"VRDMA_SOCKET": self.socket}), 2, "--socket", "names nothing")

    def test_an_answer_that_brings_one_descriptor_too_many_says_so(self):
        with self.service():
            found = set()
            for limit in range(4, 9):
                result = self.vrdma("show", "--socket", self.socket, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit)))
                found.add("raise the limit of open files (ulimit -n)" in result.stderr)
                self.assertNotIn("version", result.stderr)
            self.assertIn(True, found)

    def test_a_program_that_is_not_admitted_is_told_why(self):
        """The service says so and hangs up, before or after the program has asked."""
        with self.service(preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))), contextlib.ExitStack() as waiting:
            for _ in range(32):  # of one user at a time
                connection = waiting.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                connection.connect(self.socket)
            for _ in range(10):
                result = self.run_program("ibv_devinfo", env={"VRDMA_SOCKET": self.socket, "LD_PRELOAD": str(LIB / "libvrdma.so")})
                self.assertIn("EDQUOT", result.stderr)

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


if __name__ == "__main__":
    unittest.main()
