"""vrdma show and metrics: what is shown of whom to whom, as text, as JSON and for Prometheus."""
import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import unittest

from support import BIN, NOBODY, TestCase, as_nobody, attach, needs_full_device, needs_root, readable_copy


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
            for command in ("--help", "--version", ("show", "--help")):
                self.assert_refuses(self.vrdma(*([command] if isinstance(command, str) else command), stdout=full), 1, "standard output", "No space left")
            for command in ("--help", "--version", "--check"):
                self.assertEqual(self.vrdmad(command, stdout=full).returncode, 1, command)

    def test_a_closed_output_is_said_and_nothing_goes_into_the_services_socket(self):
        """Fails where descriptor 1 is free for the socket: code 0, and the service hangs up on what it is told."""
        with self.service("--log-level", "debug"):
            for command in "show", "metrics", "container", "--version":
                with self.subTest(command):
                    said = self.run_program("sh", "-c", 'exec "$@" >&-', "sh", BIN / "vrdma", command, env={"VRDMA_SOCKET": self.socket})
                    self.assert_refuses(said, 1, "standard output", "Bad file descriptor")
            look = "for fd in 0 1 2; do if [ -e /proc/$$/fd/$fd ]; then exit 1$fd; fi; done"
            said = self.run_program("sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", BIN / "vrdma", "run", "--", "sh", "-c", look, env={"VRDMA_SOCKET": self.socket})
            self.assertEqual(said.returncode, 0, "the command of `vrdma run` finds its descriptors closed")

    def test_a_service_that_is_stopped_is_not_waited_for_for_ever(self):
        with self.service() as process:
            process.send_signal(signal.SIGSTOP)
            result = self.vrdma("show", "--socket", self.socket)
            process.send_signal(signal.SIGCONT)
            self.assert_refuses(result, 1, self.socket, "did not answer")


if __name__ == "__main__":
    unittest.main()
