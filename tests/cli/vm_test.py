"""vrdma vm: what it writes for the service, prints for people, and refuses. Asks QEMU and libvirt's schema whether they take it."""
import json
import os
import pathlib
import pwd
import secrets
import shutil
import socket
import stat
import subprocess
import tempfile
import threading
import time
import unittest
import xml.etree.ElementTree as xml

from support import BIN, NOBODY, WATCHDOG_S, TestCase, as_nobody, needs_root, readable_copy

SOURCE = pathlib.Path(__file__).resolve().parents[2]
CACHE = pathlib.Path(os.environ.get("VRDMA_CACHE", "build/release/vm")).resolve()
QEMU = "qemu-system-x86_64"


class VmCase(TestCase):
    def setUp(self):
        super().setUp()
        self.environment["VRDMA_SOCKET"] = self.socket
        self.vms = self.folder / "vm"
        self.name = f"t-{secrets.token_hex(6)}"  # its RAM file lies where all tests of this machine have theirs

    def vm(self, *arguments, **keywords):
        return self.vrdma("vm", *arguments, **keywords)

    def add(self, *arguments, name=None):
        name = name or self.name
        self.addCleanup(self.ram(name).unlink, missing_ok=True)
        result = self.vm("add", name, "--json", *arguments)
        self.assertEqual(result.returncode, 0, result.stderr)
        return json.loads(result.stdout)

    @staticmethod
    def ram(name):
        return pathlib.Path(f"/dev/shm/vrdma-vm-{name}.ram")

    def record(self, name=None):
        return json.loads((self.vms / (name or self.name) / "vm.json").read_text())


class Adding(VmCase):
    def test_the_service_finds_what_it_wants_and_nothing_else(self):
        self.add("--memory", "512M", "--tenant", str(os.geteuid()))
        self.assertEqual(self.record(), {"ram": str(self.ram(self.name)), "tenant": os.geteuid(), "vectors": 32})
        self.assertEqual(os.listdir(self.vms / self.name), ["vm.json"])

    def test_a_machine_has_as_many_interrupts_as_when_it_was_added(self):
        words = lambda described: [word for word in described["qemu"] if word.startswith("ivshmem-doorbell")]
        self.assertEqual(words(self.add("--memory", "64M")), ["ivshmem-doorbell,chardev=vrdma,vectors=32,master=on"])
        by_an_older_version = {key: value for key, value in self.record().items() if key != "vectors"}
        (self.vms / self.name / "vm.json").write_text(json.dumps(by_an_older_version))
        described = json.loads(self.vm("show", self.name, "--json").stdout)
        self.assertEqual(words(described), ["ivshmem-doorbell,chardev=vrdma,vectors=2,master=on"])
        self.assertIn("<msi vectors='2'/>", described["libvirt"])
        self.assertIn("value='ivshmem-doorbell.master=on'", described["libvirt"])  # else libvirt cannot save it

    def test_without_interrupts_the_link_is_a_file(self):
        added = self.add("--plain", "--memory", "64M")
        self.assertEqual(self.record(), {"ram": str(self.ram(self.name)), "plain": True})
        self.assertEqual(added["link"], str(self.vms / self.name / "link.bar"))
        self.assertIn("ivshmem-plain,memdev=vrdma", added["qemu"])
        self.assertNotIn("qemu_interrupts", added)
        text = self.vm("show", self.name).stdout
        for line in added["libvirt"].splitlines():
            self.assertIn(line, text)
        said = [argument.get("value") for argument in xml.fromstring(added["libvirt"]).iter("{http://libvirt.org/schemas/domain/qemu/1.0}arg")]
        *arguments, device, action, what = added["qemu"]
        self.assertEqual(said, [*arguments[2:], device + ",addr=0x18"])  # libvirt says -m itself
        # Nobody would tell of a reset.
        self.assertEqual((action, what), ("-action", "reboot=shutdown"))
        self.assertIn("    -action reboot=shutdown\n", text)
        self.assertIn("<on_reboot>destroy</on_reboot>", added["libvirt"])
        self.assertNotIn("reboot", self.vm("show", self.add("--memory", "64M", name=self.name + "-i")["name"]).stdout)

    def test_a_machine_may_have_ram_of_its_own(self):
        added = self.add("--private-ram", "--bar", "64M")
        self.assertEqual(self.record(), {"bar_bytes": 64 << 20, "vectors": 32})
        self.assertFalse(self.ram(self.name).exists())
        self.assertEqual((added["bar_bytes"], added.get("ram")), (64 << 20, None))
        self.assertEqual([word for word in added["qemu"] if word.startswith("-")], ["-chardev", "-device", "-chardev", "-mon"])
        self.assertNotIn("memory", " ".join(added["qemu"]) + added["libvirt"])
        self.assertIn(f" ram private bar {64 << 20} link ", self.vm("list").stdout)
        plain = self.add("--private-ram", "--plain", name="plain")
        self.assertEqual(plain["bar_bytes"], 256 << 20)
        self.assertIn(f"memory-backend-file,id=vrdma,mem-path={plain['link']},size=256M,share=on", plain["qemu"])
        self.assertNotIn("-machine", plain["qemu"])
        self.assertNotIn("-action", plain["qemu"])  # no other kernel has that memory
        self.assertIn("link.bar", self.vm("show", "plain").stdout)
        for wrong in ("63M", "16M", "128G", "0"):
            self.assert_refuses(self.vm("add", "x", "--private-ram", "--bar", wrong), 2, "power of two")
        self.assert_refuses(self.vm("add", "x", "--bar", "64M"), 2, "--private-ram")
        for other in (("--memory", "64M"), ("--ram", "/dev/shm/x"), ("--uml",)):
            self.assert_refuses(self.vm("add", "x", "--private-ram", *other), 2, "--private-ram")
        self.assertEqual(self.vm("remove", self.name).returncode, 0)

    def test_user_mode_linux_brings_its_own_memory(self):
        added = self.add("--uml")
        self.assertEqual(self.record(), {"plain": True})
        self.assertFalse(self.ram(self.name).exists())
        self.assertEqual(added["uml"][:5], ["vrdma", "vm", "uml", self.name, "--"])
        self.assertIn(f"vrdma vm uml {self.name} -- linux.uml", self.vm("show", self.name).stdout)
        self.assert_refuses(self.vm("add", "x", "--uml", "--memory", "64M"), 2, "--memory")
        self.assert_refuses(self.vm("uml", self.name, "--", "true"), 1, "link.bar", "vrdmad")  # no service has made it
        self.add(name="of-qemu")
        self.assert_refuses(self.vm("uml", "of-qemu", "--", "true"), 1, "vrdma vm show of-qemu")

    def test_a_kernel_that_cannot_be_started_is_told_why(self):
        text = self.folder / "text"
        text.write_text("no kernel")
        with self.service():
            self.add("--uml")
            for program, code, word in ((text, 126, "executable"), (self.folder / "nowhere", 127, "check its name")):
                result = self.vm("uml", self.name, "--", program)
                self.assert_refuses(result, code, str(program), word)
                self.assertNotIn("install", result.stderr)
            result = self.vm("uml", self.name, "--", "linux.uml", env={"PATH": str(self.folder)})
            self.assert_refuses(result, 127, "install user-mode-linux")

    def test_the_launcher_leaves_nothing_behind(self):
        """A kernel that is none, but has memory, and a child that outlives it; its end is the launcher's, the child's too."""
        kernel = self.folder / "kernel"
        kernel.write_text("""#!/usr/bin/env python3
import os, subprocess, sys, tempfile
memory = tempfile.TemporaryFile(dir="/dev/shm")
memory.truncate(64 << 20)
child = subprocess.Popen(["sleep", "1000"])
print(child.pid, *sys.argv[1:], flush=True)
sys.stdin.readline()
os._exit(3)
""")
        kernel.chmod(0o755)
        with self.service():
            added = self.add("--uml")
            command = [BIN / "vrdma", "vm", "uml", self.name, "--", kernel, "more"]
            with subprocess.Popen(command, env=self.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as launcher:
                try:
                    child, *words = launcher.stdout.readline().split()
                    self.assertEqual(words, [f"iomem=mmapper,{added['link']}", "noreboot", "more"])
                    self.await_state("connected")
                    launcher.stdin.write("\n")
                    launcher.stdin.flush()
                    self.assertEqual(launcher.wait(WATCHDOG_S), 3)
                finally:
                    launcher.kill()
            self.assertFalse(pathlib.Path(f"/proc/{child}").exists())
            self.await_state("waiting")
            self.assertEqual(self.vm("remove", self.name).returncode, 0)
            self.await_true(lambda: not (self.vms / self.name).exists(), "nothing is left of it")

    def await_state(self, state):
        self.await_true(lambda: json.loads(self.vm("list", "--json").stdout)[0]["state"] == state, state)

    def await_true(self, condition, what):
        until = time.monotonic() + WATCHDOG_S
        while not condition():
            self.assertLess(time.monotonic(), until, what)
            time.sleep(0.01)

    def test_the_tenant_is_left_to_the_service_unless_given(self):
        self.assertIsNone(self.add()["tenant"])
        self.assertNotIn("tenant", self.record())

    def test_the_ram_is_closed_to_others_and_takes_no_memory_yet(self):
        self.add()
        status = self.ram(self.name).stat()
        self.assertEqual((stat.S_IMODE(status.st_mode), status.st_size, status.st_blocks), (0o600, 2 << 30, 0))

    def test_a_ram_that_is_there_must_have_the_size(self):
        ram = self.folder / "ram"
        ram.write_bytes(bytes(1 << 20))
        self.assert_refuses(self.vm("add", self.name, "--ram", ram, "--memory", "64M"), 1, str(ram), str(1 << 20), str(64 << 20))
        self.assertFalse((self.vms / self.name).exists())
        os.truncate(ram, 64 << 20)
        self.assertEqual(self.add("--ram", ram, "--memory", "64M")["memory_bytes"], 64 << 20)

    def test_a_ram_that_has_gone_is_said(self):
        self.add()
        self.ram(self.name).unlink()
        self.assert_refuses(self.vm("show", self.name), 1, str(self.ram(self.name)), "add it again")
        self.assertEqual(json.loads(self.vm("list", "--json").stdout)[0]["memory_bytes"], 0)
        self.assertIn(f"{self.ram(self.name)} (gone: ", self.vm("list").stdout)

    @needs_root
    def test_the_ram_is_the_tenants(self):
        self.add("--tenant", str(NOBODY))
        self.assertEqual(self.ram(self.name).stat().st_uid, NOBODY)

    def test_the_text_says_what_the_json_says(self):
        added = self.add()
        text = self.vm("show", self.name).stdout
        self.assertEqual(json.loads(self.vm("show", self.name, "--json").stdout), added)
        for option, value in zip(added["qemu"][::2], added["qemu"][1::2]):
            self.assertIn(f"{option} {value}", text)
        for word in (*added["qemu_interrupts"], *added["libvirt"].splitlines(), "vrdma-guestd"):
            self.assertIn(word, text)

    def test_a_name_is_given_once(self):
        self.add("--memory", "1G")
        before = self.record()
        self.assert_refuses(self.vm("add", self.name, "--memory", "2G"), 1, f'"{self.name}"', str(self.vms), "another name", "vrdma vm remove")
        self.assertEqual(self.record(), before)

    def test_of_many_at_once_one_gets_the_name(self):
        ram = self.folder / "ram"
        results = []
        threads = [threading.Thread(target=lambda: results.append(self.vm("add", "same", "--ram", ram))) for _ in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WATCHDOG_S)
        self.assertEqual(sorted(result.returncode for result in results), [0] + [1] * 11)
        self.assertEqual(os.listdir(self.vms / "same"), ["vm.json"])
        self.assertTrue(ram.exists())
        for result in results:
            if result.returncode != 0:
                self.assert_refuses(result, 1, '"same"', "another name")

    def test_names_that_are_no_names_are_refused(self):
        for name in ("", ".", "..", ".hidden", "-x", "a/b", "a b", "ä", "x" * 32):
            with self.subTest(name):
                self.assert_refuses(self.vm("add", "--", name), 2, "cannot name a machine")
        self.assertFalse(self.vms.exists())
        self.add("--ram", self.folder / "ram", name="x" * 31)

    def test_memory_that_is_none_is_refused(self):
        for size in ("0", "63M", "1000000001", "3000000T"):
            with self.subTest(size):
                self.assert_refuses(self.vm("add", self.name, "--memory", size), 2, "whole MiB", "64M")
        for size in ("much", "-1", "-1G", "-18446744073642442752", "3.5G", "0x100M", "99999999999999999999", "16E", "16777216T", "1e3", "1Mx", "2GG", "5ib", "1 G"):
            with self.subTest(size):
                self.assert_refuses(self.vm("add", self.name, f"--memory={size}"), 2, f'"{size}" is no size')
        self.assertFalse(self.ram(self.name).exists())
        for number, size in enumerate(("64M", "64Mi", "64mb", "64MiB", "65536k", str(64 << 20), f"{64 << 20}B")):
            self.assertEqual(self.add("--memory", size, name=f"{self.name}-{number}")["memory_bytes"], 64 << 20, size)

    def test_a_ram_that_lies_on_a_disk_is_noted(self):
        folder = tempfile.TemporaryDirectory(dir=BIN)
        self.addCleanup(folder.cleanup)
        ram = pathlib.Path(folder.name) / "ram"
        kind = subprocess.run(["stat", "-f", "-c", "%T", ram.parent], capture_output=True, text=True, timeout=WATCHDOG_S).stdout.strip()
        if kind not in ("ext2/ext3", "xfs", "btrfs", "overlayfs"):
            self.skipTest(f"{ram.parent} is of {kind}")
        result = self.vm("add", self.name, "--ram", ram, "--memory", "64M")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn(f"note: {ram} lies on no tmpfs", result.stderr)
        self.addCleanup(self.ram(self.name + "-2").unlink, missing_ok=True)
        self.assertEqual(self.vm("add", self.name + "-2", "--memory", "64M").stderr, "")

    def test_a_ram_that_somebody_else_serves_is_refused(self):
        mounts = [line.split() for line in pathlib.Path("/proc/self/mounts").read_text().splitlines()]
        served = next((mount[1] for mount in mounts if mount[2].startswith(("fuse.", "nfs", "9p", "cifs")) and os.path.isdir(mount[1]) and os.access(mount[1], os.W_OK)), None)
        if served is None:
            self.skipTest("no FUSE, NFS, 9p or CIFS is mounted here that can be written to")
        ram = pathlib.Path(served, f"vrdma-{self.name}.ram")
        self.addCleanup(ram.unlink, missing_ok=True)
        self.assert_refuses(self.vm("add", self.name, "--ram", ram, "--memory", "64M"), 1, str(ram), "another process or host", "--ram")
        self.assertFalse(ram.exists())

    def test_more_memory_than_there_is_room_for_is_noted(self):
        self.addCleanup(self.ram(self.name).unlink, missing_ok=True)
        result = self.vm("add", self.name, "--memory", "9000000M")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertRegex(result.stderr, r"note: /dev/shm has \d+ MiB left, less than the machine's 9000000: .*--ram")
        other = f"{self.name}-2"
        self.addCleanup(self.ram(other).unlink, missing_ok=True)
        self.assertEqual(self.vm("add", other, "--memory", "9000000M", "--json").stderr, "")  # programs are told in figures

    def test_the_ram_of_another_machine_is_not_taken(self):
        self.ram(self.name).write_text("precious")
        self.addCleanup(self.ram(self.name).unlink)
        self.assert_refuses(self.vm("add", self.name), 1, str(self.ram(self.name)), "--ram")
        self.assertEqual(self.ram(self.name).read_text(), "precious")
        self.assertFalse((self.vms / self.name / "vm.json").exists())

    def test_two_machines_have_no_ram_in_common(self):
        ram = self.folder / "ram"
        self.add("--ram", ram, "--memory", "64M")
        link = self.folder / "link"
        link.hardlink_to(ram)
        for same in (ram, self.folder / "x" / ".." / "ram", link):
            with self.subTest(same):
                self.assert_refuses(self.vm("add", "other", "--ram", same, "--memory", "64M"), 1, str(same.resolve()), f'"{self.name}"', "--ram")
        self.assertFalse((self.vms / "other").exists())
        self.assertEqual(ram.stat().st_size, 64 << 20)

    def test_a_link_in_place_of_the_ram_is_not_followed(self):
        target = self.folder / "precious"
        self.ram(self.name).symlink_to(target)
        self.addCleanup(self.ram(self.name).unlink)
        self.assert_refuses(self.vm("add", self.name), 1, str(self.ram(self.name)))
        self.assertFalse(target.exists())
        target.touch()
        os.truncate(target, 64 << 20)  # nor is one that a person names: the service follows none
        self.assert_refuses(self.vm("add", self.name, "--ram", self.ram(self.name), "--memory", "64M"), 1, "no file that can be")

    def test_a_ram_that_cannot_be_made_is_said(self):
        nowhere = self.folder / "no/where"
        self.assert_refuses(self.vm("add", self.name, "--ram", nowhere), 1, str(nowhere), "No such file", "--ram")

    def test_a_ram_without_a_name_is_not_the_default(self):
        self.addCleanup(self.ram(self.name).unlink, missing_ok=True)
        self.assert_refuses(self.vm("add", self.name, "--ram", ""), 2, "--ram", "names nothing")
        self.assertFalse(self.ram(self.name).exists())

    def test_nobody_is_no_tenant(self):
        self.assert_refuses(self.vm("add", self.name, "--tenant", str(2 ** 32 - 1)), 1, "uid")
        for nobody in ("no-such-user", str(2 ** 32), "-1"):
            self.assert_refuses(self.vm("add", self.name, f"--tenant={nobody}"), 2, "--tenant", "uid")
        self.assertFalse(self.ram(self.name).exists())

    @needs_root
    def test_a_tenant_has_a_name_or_a_number(self):
        self.add("--tenant", pwd.getpwuid(NOBODY).pw_name)
        self.assertEqual((self.record()["tenant"], self.ram(self.name).stat().st_uid), (NOBODY, NOBODY))

    def test_who_is_libvirts_user_is_said_unless_the_machine_is_his(self):
        users = [user.pw_name for user in pwd.getpwall() if user.pw_name in ("libvirt-qemu", "qemu")]
        self.add()
        said = self.vm("show", self.name).stdout
        self.assertEqual("--tenant" in said, bool(users), said)
        if users and os.geteuid() == 0:
            name = f"{self.name}-v"
            self.add("--tenant", next(user for user in ("libvirt-qemu", "qemu") if user in users), name=name)
            self.assertNotIn("--tenant", self.vm("show", name).stdout)

    def test_a_path_that_no_socket_can_have_is_refused(self):
        self.assert_refuses(self.vm("add", self.name, "--vm-folder", self.folder / ("x" * 90)), 1, "107", "--vm-folder")
        self.assertFalse(self.ram(self.name).exists())

    def test_a_folder_that_cannot_be_made_is_named_and_nothing_is_left(self):
        self.assert_refuses(self.vm("add", self.name, "--vm-folder", self.folder / "no/where"), 1, "no/where", "No such file", "vrdmad")
        self.assertFalse(self.ram(self.name).exists())

    @needs_root
    def test_who_may_not_add_is_told(self):
        program = readable_copy(self.folder) / "vrdma"
        self.assert_refuses(self.run_program(*as_nobody(program, "vm", "add", self.name)), 1, "Permission denied", "root")
        self.assertFalse(self.ram(self.name).exists())

    def test_a_path_with_commas_quotes_and_brackets_arrives(self):
        odd = self.folder / "a,b 'c' <d>&\"e\""
        odd.mkdir()
        added = self.add("--vm-folder", odd, "--ram", odd / "r,am")
        self.assertIn(f"mem-path={str(odd / 'r,am').replace(',', ',,')},size", added["qemu"][3])
        self.assertEqual(xml.fromstring(added["libvirt"]).find("devices/shmem/server").get("path"), str(odd / self.name / "ivshmem.sock"))
        text = self.vm("show", self.name, "--vm-folder", odd).stdout
        lines = text.split("\n\n")[2]
        said = self.run_program("bash", "-c", f"printf '%s\\n' {lines.strip()}")
        self.assertEqual(said.stdout.splitlines(), added["qemu"])


class Living(VmCase):
    def test_a_service_that_was_named_and_is_not_there_is_told_from_one_without_machines(self):
        typo = self.folder / "nowhere" / "s.sock"
        self.assert_refuses(self.vm("list", "--socket", typo), 1, str(typo), "No such file", "start vrdmad")
        with self.service():
            self.assertEqual(self.vm("list", "--socket", self.socket, "--json").stdout, "[]\n")

    def test_a_folder_that_was_named_and_is_not_there_is_told_from_one_without_machines(self):
        typo = self.folder / "nowhere"
        self.assert_refuses(self.vm("list", "--vm-folder", typo), 1, str(typo), "--vm-folder")
        typo.mkdir()
        self.assertEqual(self.vm("list", "--json", "--vm-folder", typo).stdout, "[]\n")

    def test_list_show_and_remove(self):
        self.assertEqual(self.vm("list", "--json").stdout, "[]\n")
        self.add()
        self.add("--ram", self.folder / "own", name="a")
        listed = json.loads(self.vm("list", "--json").stdout)
        self.assertEqual([(vm["name"], vm["state"]) for vm in listed], [("a", "not served"), (self.name, "not served")])
        self.assertEqual([line.split()[1] for line in self.vm("list").stdout.splitlines()], ["a", self.name])
        for name in ("a", self.name):
            self.assertEqual(self.vm("remove", name).returncode, 0)
        self.assertEqual(os.listdir(self.vms), [".lock"])
        self.assertFalse(self.ram(self.name).exists())  # we chose it
        self.assertTrue((self.folder / "own").exists())  # the person did
        self.add()  # the name is free again

    def test_a_machine_that_is_not_there_is_named(self):
        for command in ("show", "remove"):
            self.assert_refuses(self.vm(command, "ghost"), 1, '"ghost"', str(self.vms), "vrdma vm list")

    def test_a_registration_that_is_broken_is_named_and_can_be_removed(self):
        self.add()
        (self.vms / self.name / "vm.json").write_text('{"ram": 7}')
        self.assert_refuses(self.vm("show", self.name), 1, "vm.json", "remove the machine")
        self.add("--ram", self.folder / "ram", name="whole")
        listed = self.vm("list", "--json")
        self.assertEqual(([vm["name"] for vm in json.loads(listed.stdout)], listed.returncode), (["whole"], 1))
        self.assertIn(f"{self.name}/vm.json", listed.stderr)
        self.assertEqual(self.vm("remove", "whole").returncode, 0)
        removed = self.vm("remove", self.name)
        self.assertEqual(removed.returncode, 0)
        self.assertIn(f"rm {self.ram(self.name)}", removed.stderr)
        self.ram(self.name).unlink()
        self.assertEqual(self.vm("list", "--json").stdout, "[]\n")
        self.add()

    def test_a_folder_is_found_beside_the_socket_that_is_named(self):
        del self.environment["VRDMA_SOCKET"]
        result = self.vm("add", self.name, "--json", "--socket", self.folder / "deep.sock", "--ram", self.folder / "ram")
        self.assertEqual(json.loads(result.stdout)["link"], str(self.vms / self.name / "ivshmem.sock"))

    def test_a_service_that_runs_serves_it_at_once(self):
        with self.service():
            added = self.add()
            self.assertEqual((added["state"], added["tenant"]), ("waiting", os.geteuid()))
            self.assertTrue(stat.S_ISSOCK(os.stat(added["link"]).st_mode))
            self.assertEqual([vm["name"] for vm in json.loads(self.vrdma("show", "--json").stdout)["vms"]], [self.name])
            self.assertEqual(self.vm("remove", self.name).returncode, 0)

    def test_what_others_could_have_written_is_no_machine(self):
        """The file that vm.json names is read and written as RAM by the service, with all its privileges."""
        self.add()
        own = self.vms / self.name
        served = lambda: [vm["name"] for vm in json.loads(self.vrdma("show", "--json").stdout)["vms"]]
        places = [(self.vms, 0o777), (own, 0o775), (own / "vm.json", 0o664), (self.folder, 0o777)]
        for place, mode in places:
            with self.subTest(place=place.name):
                before = place.stat().st_mode
                place.chmod(mode)
                with self.service():
                    self.assertEqual(served(), [])
                place.chmod(before)
                self.assertRegex(self.service_said, f"{place} is not looked at: .*chmod go-w")
        self.folder.chmod(0o1777)  # as /tmp
        with self.service():
            self.assertEqual(served(), [self.name])
        if os.geteuid() == 0:
            for place, _ in places:
                with self.subTest(of_somebody_else=place.name):
                    os.chown(place, NOBODY, NOBODY)
                    with self.service():
                        self.assertEqual(served(), [])
                    os.chown(place, 0, 0)
                    self.assertRegex(self.service_said, f"{place} is not looked at")

    def test_a_folder_of_machines_that_is_closed_to_others_is_served_at_once(self):
        self.add()
        self.vms.chmod(0o777)
        with self.service():
            self.vms.chmod(0o755)
            self.wait_until(lambda: [vm["name"] for vm in json.loads(self.vrdma("show", "--json").stdout)["vms"]] == [self.name], "it is not served")

    def test_a_machine_is_added_whatever_the_umask(self):
        added = self.vm("add", self.name, "--json", "--ram", self.folder / "ram", preexec_fn=lambda: os.umask(0o002))
        self.assertEqual(added.returncode, 0, added.stderr)
        with self.service():
            self.assertEqual([vm["name"] for vm in json.loads(self.vrdma("show", "--json").stdout)["vms"]], [self.name])

    @needs_root
    def test_of_another_users_machine_it_is_not_said_that_it_is_not_served(self):
        program = readable_copy(self.folder) / "vrdma"
        with self.service():
            self.add()
            self.add("--tenant", str(NOBODY), name=f"{self.name}-n")
            asked = self.run_program(*as_nobody(program, "vm", "list", "--json"))
            states = {vm["name"]: vm["state"] for vm in json.loads(asked.stdout)}
            self.assertEqual(states, {self.name: "unknown (another user's)", f"{self.name}-n": "waiting"})
        states = [vm["state"] for vm in json.loads(self.run_program(*as_nobody(program, "vm", "list", "--json")).stdout)]
        self.assertEqual(states, ["not served"] * 2)  # nobody answers

    def test_a_machine_that_is_removed_while_it_runs_is_noted(self):
        with self.service(), socket.socket(socket.AF_UNIX) as qemu:
            qemu.connect(self.add()["link"])
            state = lambda: json.loads(self.vm("list", "--json").stdout)[0]["state"]
            until = time.monotonic() + WATCHDOG_S
            while state() != "connected" and time.monotonic() < until:
                time.sleep(0.02)
            result = self.vm("remove", self.name)
            self.assertEqual((result.returncode, result.stdout), (0, ""))
            self.assertIn(f"{self.name} runs: it is not found again", result.stderr)  # it has no programs
            self.add()
            result = self.vm("remove", self.name)
            self.assertEqual((result.returncode, result.stderr), (0, ""))

    def test_a_service_with_another_folder_is_said(self):
        with self.service():
            result = self.vm("add", self.name, "--vm-folder", self.folder / "other", "--ram", self.folder / "ram")
        self.assertEqual(result.returncode, 0)
        self.assertIn("does not serve", result.stderr)
        self.assertIn(str(self.folder / "other"), result.stderr)

    def test_bad_usage_is_refused_by_name(self):
        self.assert_refuses(self.vm(), 2, "add, list, show, remove or uml")
        self.assert_refuses(self.vm("frob"), 2, "frob")
        self.assert_refuses(self.vm("add"), 2, "name")


class Others(VmCase):
    """What is printed is for other programs."""

    def test_qemu_takes_the_arguments(self):
        if not shutil.which(QEMU):
            self.skipTest(f"{QEMU} is not installed")
        added = self.add("--memory", "64M")
        with socket.socket(socket.AF_UNIX) as service, socket.socket(socket.AF_UNIX) as monitor:
            monitor.bind(str(pathlib.Path(added["link"]).with_name("monitor.sock")))
            monitor.listen()
            service.bind(added["link"])  # all that QEMU wants of it: version, its own number, the memory
            service.listen()
            service.settimeout(WATCHDOG_S)
            command = [QEMU, "-M", "q35", "-accel", "tcg", "-nodefaults", "-no-user-config", "-display", "none", "-S", "-qmp", "stdio",
                       *added["qemu_interrupts"], *added["qemu"]]
            qemu = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            try:
                connection, _ = service.accept()
                memory = os.memfd_create("bar")
                os.truncate(memory, 1 << 20)
                for number, descriptors in ((0, []), (0, []), (-1, [memory])):
                    socket.send_fds(connection, [number.to_bytes(8, "little", signed=True)], descriptors)
                events = [os.eventfd(0) for _ in range(2)]
                for event in events:
                    socket.send_fds(connection, [(0).to_bytes(8, "little")], [event])
                # It answers only after all devices are there.
                commands = ['{"execute": "qmp_capabilities"}', '{"execute": "query-memory-size-summary"}', '{"execute": "query-pci"}', '{"execute": "quit"}']
                said, complained = qemu.communicate("\n".join(commands) + "\n", timeout=WATCHDOG_S)
                connection.close()
                for descriptor in (memory, *events):
                    os.close(descriptor)
            finally:
                qemu.kill()
                qemu.wait()
        self.assertEqual((qemu.returncode, complained), (0, ""))
        answers = [json.loads(line) for line in said.splitlines()]
        returned = [answer["return"] for answer in answers if "return" in answer]
        self.assertEqual(returned[1]["base-memory"], 64 << 20)
        devices = [(device["id"]["vendor"], device["id"]["device"]) for bus in returned[2] for device in bus["devices"]]
        self.assertIn((0x1af4, 0x1110), devices)
        status = self.ram(self.name).stat()
        self.assertEqual((stat.S_IMODE(status.st_mode), status.st_size), (0o600, 64 << 20))

    def test_a_plain_machine_that_is_reset_ends(self):
        if not shutil.which(QEMU):
            self.skipTest(f"{QEMU} is not installed")
        with self.service():
            added = self.add("--plain", "--memory", "64M")
            command = [QEMU, "-M", "q35", "-accel", "tcg", "-nodefaults", "-no-user-config", "-display", "none", "-S", "-qmp", "stdio", *added["qemu"]]
            commands = ['{"execute": "qmp_capabilities"}', '{"execute": "query-pci"}', '{"execute": "system_reset"}']
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as qemu:
                try:
                    qemu.stdin.write("\n".join(commands) + "\n")
                    qemu.stdin.flush()  # it stays open: QEMU ends by itself
                    self.assertEqual(qemu.wait(WATCHDOG_S), 0)
                    said, complained = qemu.stdout.read(), qemu.stderr.read()
                finally:
                    qemu.kill()
        self.assertEqual(complained, "")
        self.assertIn("SHUTDOWN", said)

    def test_libvirt_takes_the_domain(self):
        for program in ("xmllint", "dpkg"):
            if not shutil.which(program):
                self.skipTest(f"{program} is not installed")
        fetched = subprocess.run(["bash", "-c", '. "$1/scripts/packages.sh" && fetch_libvirt_schemas "$2"', "-", SOURCE, CACHE / "libvirt"],
                                 stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=250)
        if fetched.returncode != 0:
            self.skipTest(fetched.stderr.strip())
        printed = self.add()["libvirt"]
        with_interrupts = printed.replace("<!-- for interrupts: ", "").replace("-->", "")
        self.assertNotEqual(printed, with_interrupts)
        # A domain that is one already, into which ours is merged.
        rest = "<name>x</name><os><type arch='x86_64' machine='q35'>hvm</type></os></domain>"
        for text in (printed, with_interrupts):
            self.assertEqual(self.judged(text.replace("</domain>", rest)), "")
        for wrong in ("ivshmem-doorbell", "<server ", "role='master'", "<qemu:arg "):  # the schema is one that can refuse
            self.assertIn(wrong, printed)
            self.assertNotEqual(self.judged(printed.replace(wrong, wrong[0] + "x" + wrong[1:]).replace("</domain>", rest)), "", wrong)
        plain = self.add("--plain", "--ram", str(self.folder / "ram"), "--memory", "64M", name=self.name + "-plain")["libvirt"]
        self.assertEqual(self.judged(plain.replace("</domain>", rest)), "")
        for words in ((), ("--plain",)):  # whose memory the domain says already
            own = self.add("--private-ram", *words, name=f"{self.name}-own{len(words)}")["libvirt"]
            self.assertEqual(self.judged(own.replace("</domain>", "<memory unit='MiB'>512</memory>" + rest)), "")

    def judged(self, text):
        file = self.folder / "domain.xml"
        file.write_text(text)
        result = self.run_program("xmllint", "--noout", "--relaxng", CACHE / "libvirt/schemas/domain.rng", file)
        return "" if result.returncode == 0 else result.stderr or "refused"

    def test_a_service_in_a_folder_that_is_not_utf_8_is_not_taken_for_one_without_machines(self):
        folder = self.folder / "\udcff"
        folder.mkdir()
        self.socket = str(folder / "s.sock")
        with self.service(errors="replace"):
            for words in (("add", self.name, "--private-ram"), ("list",)):
                self.assert_refuses(self.vrdma("vm", *words, "--socket", self.socket), 1, "not UTF-8", "--vm-folder")

    def test_the_shell_completes_it(self):
        self.add("--ram", self.folder / "ram", name="build1")
        def complete(*words):
            script = f'source {SOURCE}/packaging/vrdma.bash; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _vrdma; printf "%s\\n" "${{COMPREPLY[@]}}"'
            return self.run_program("bash", "-c", script, "-", BIN / "vrdma", *words).stdout.split()
        self.assertEqual(complete("vm", ""), ["add", "list", "show", "uml", "remove", "--help"])
        self.assertEqual(complete("vm", "show", "b"), ["build1"])
        self.assertIn("--memory", complete("vm", "add", "x", "--m"))
        self.assertEqual(complete("vm", "add", "x", "--bar", ""), [])
        self.assertEqual(complete("direct", ""), ["auto", "mediated", "--guest", "--socket", "--help"])
        self.assertEqual(complete("direct", "auto", ""), ["--guest", "--socket", "--help"])
        self.assertEqual(complete("direct", "auto", "-g", ""), [])  # there is no guest
        self.assertEqual(complete("run", "whil"), [])  # a keyword
        self.assertIn("env", complete("run", "en"))
        self.assertEqual(complete("v"), ["vm"])
        self.assertEqual(complete("show", "h"), ["hosts", "hca"])
        self.assertEqual(complete("run", "--link-layer", "=", "e"), ["ethernet"])  # as bash splits it
        self.assertEqual(complete("run", "--link-layer", "="), ["ib", "infiniband", "ethernet"])
        self.assertEqual(complete("run", "--link-layer", "=", "ib", "--st"), ["--stats"])
        (self.folder / "a folder").mkdir()
        self.assertEqual(" ".join(complete("host", "join", str(self.folder / "a f"))), str(self.folder / "a folder"))
        self.assertEqual(complete("host", "partition", ""), ["add", "remove", "list", "--help"])
        self.assertEqual(complete("host", "partition", "add", "--a"), ["--address"])
        self.assertIn("--json", complete("host", "partition", "list", "--"))


if __name__ == "__main__":
    unittest.main()
