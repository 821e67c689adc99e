"""vrdma doctor: what it calls good, a note or a problem, and the remedy."""
import contextlib
import json
import os
import pathlib
import resource
import shutil
import socket
import subprocess
import unittest

from support import BIN, WATCHDOG_S, TestCase


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
                    self.assertEqual((shown, route["why"]), ({}, "only-carrier"))
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

    def test_a_host_to_which_no_route_leads_is_not_one_whose_firewall_is_silent(self):
        subnet = self.folder / "subnet"
        self.assertEqual(self.vrdma("host", "init", "one", "--folder", subnet).returncode, 0)
        in_a_network_of_its_own = ["unshare", "--user", "--map-root-user", "--net", "sh", "-c", 'ip route add unreachable 203.0.113.1 && exec "$@"', "-"]
        doctor = [BIN / "vrdma", "doctor", "--folder", subnet, "--socket", self.socket]
        with self.service():
            said = self.run_program(*doctor, "255.255.255.255").stdout  # nobody's route leads a connection there
            self.assertIn("ip route get 255.255.255.255", said)
            self.assertNotIn("nft", said)
            if self.run_program(*in_a_network_of_its_own, "true").returncode != 0:
                self.skipTest("no user and network namespaces here, or no ip")
            self.assertIn("ip neigh show 203.0.113.1", self.run_program(*in_a_network_of_its_own, *doctor, "203.0.113.1").stdout)

    def test_a_runtime_folder_with_too_long_a_name_is_not_called_one_that_does_not_admit_us(self):
        folder = self.folder / ("x" * 100)
        folder.mkdir(mode=0o700)
        said = self.vrdma("doctor", env={"XDG_RUNTIME_DIR": str(folder)}).stdout
        self.assertRegex(said, r"note +service +\S+/vrdmad.sock is too long for a socket")
        self.assertNotIn("does not admit us", said)

    def test_under_vrdma_itself_vrdma0_is_no_device_of_the_kernel(self):
        with self.service():
            result = self.vrdma("run", "--", BIN / "vrdma", "doctor", "--json", env={"VRDMA_SOCKET": self.socket})
        found = {finding["subject"]: finding for finding in json.loads(result.stdout)["findings"]}
        self.assertEqual((found["devices"]["level"], found["devices"]["remedy"]), ("ok", ""), found["devices"])

    def test_few_open_files_are_noted(self):
        def limit():
            resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
        with self.service():
            found = self.doctor(env={"VRDMA_SOCKET": self.socket}, preexec_fn=limit)
            self.assertEqual(found["open-files"]["level"], "note")
            self.assertIn("200", found["open-files"]["what"])


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


if __name__ == "__main__":
    unittest.main()
