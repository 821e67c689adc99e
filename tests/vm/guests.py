"""A vrdmad, two virtual machines that it serves, and vrdma-guestd in each: what the scenarios of machine_guests.py run in."""
import json
import re
import secrets
import shutil
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import image
import perftest
import shell
from harness import Build, Failure, Service, Side, Skip, TempFolder, run, wait_until
from qmp import Monitor
from shell import MachineSide, Shell, both

HERE = Path(__file__).resolve().parent
MEMORY = "512M"
AGENT_SECONDS = 60
CASE_SECONDS = 150
BUILT = ("bin/vrdma", "bin/vrdmad", "bin/vrdma-guestd", "bin/vrdma-conformance", "tests/vm_talk", "tests/vm_lost", "tests/vm_limits", "lib/libvrdma.so")
INTERRUPT_MODULES = ("vfio_pci", "vfio_iommu_type1")
PROGRAMS = ("busybox", "setpriv", "rping", "ibping", "ibv_devices", "ibv_devinfo", *(f"ibv_{kind}_pingpong" for kind in ("rc", "uc", "ud", "srq")),
            *(f"ib_{verb}_{kind}" for verb in perftest.VERBS for kind in ("lat", "bw")))


@dataclass(frozen=True)
class Carried:
    """What machines take along beside what all of them do."""
    kind: str = "machines"  # of each, one initramfs is cached
    built: tuple = ()       # names in the build folder
    programs: tuple = ()
    files: tuple = ()
    modules: tuple = ()


def boot_image(build, built, more=Carried()):
    """(kernel, initramfs) with the programs of this machine, and those of `built` that the build has to have."""
    programs, built = (*PROGRAMS, *more.programs), (*built, *more.built)
    for program in programs:
        if not shutil.which(program):
            raise Skip(f"{program} is not installed")
    for name in built:
        if not (build / name).exists():
            raise Failure(f"{build / name} does not exist: cmake --build --preset release")
    cache = build / "vm"
    kernel, release = image.kernel(cache)
    modules = image.modules(cache, (*shell.MODULES, *INTERRUPT_MODULES, *more.modules))
    contents = image.Contents(HERE / "init", programs, [*(build / name for name in built), *more.files], shell.SCRIPTS, modules,
                              kind=more.kind if built else "network")
    files = image.initramfs(cache, contents)
    print(f"Linux {release} under TCG", flush=True)
    return kernel, files


def run_cases(tally, guests, name, cases, sides):
    def checked(kind, one):
        try:
            return kind.run_case(one, sides, CASE_SECONDS)
        except Failure as reason:
            guests.check()
            raise Failure(f"{reason}\n{guests.news()}") from None
        finally:
            guests.check()
    for kind, one in cases:
        tally.case(f"{name}: {one.name}", lambda kind=kind, one=one: checked(kind, one))


class Guests:
    """A vrdmad, two machines that it serves, and the agent in each. Other kinds of machines override add(), boot() and what is behind them."""

    def __init__(self, folder, seed, interrupts=False, memory=MEMORY, carried=Carried(), devices=((), ()), first_ram_in=None, plain=False,
                 lasting=False, config=None, private_bar=None):
        """interrupts: the machines have an IOMMU, and their agents sleep in place of polling. memory: of each, as QEMU writes it; devices:
        more arguments for it, of as many machines as there are to be. first_ram_in: the folder for the file that is the first one's RAM.
        plain: nobody can interrupt anybody. lasting: the agents outlive their QEMU, which takes commands at monitor(). config: the service's.
        private_bar: their RAM is QEMU's own, and their device's BAR has so many bytes."""
        self.private_bar, self.told_qemu = private_bar, {}
        self.interrupts, self.memory, self.devices, self.first_ram_in, self.plain, self.lasting = interrupts, memory, devices, first_ram_in, plain, lasting
        self.kernel_words = ("intel_iommu=on",) if interrupts else ()
        self.start(folder, seed, boot_image(folder, BUILT, carried), len(devices), config)

    def start(self, folder, seed, files, count=2, config=None):
        """files: what boot() needs."""
        self.seed, self.files, self.build = seed, files, Build.at(folder)
        self.monitors, self.folder = {}, TempFolder(mode=0o700)
        self.service = Service(self.build, config=config)
        self.env = self.service.environment()
        token = secrets.token_hex(3)
        self.names = [f"{name}-{token}" for name in ("one", "two")[:count]]
        self.added, self.machines, self.agents, self.heard = {}, [], {}, {}
        try:
            for name in self.names:
                self.added[name] = self.add(name)
                self.machines.append(self.boot(name))
            for machine in self.machines:
                self.await_boot(machine)
            self.roots = [MachineSide(self.build, shell=machine) for machine in self.machines]
            for side in self.roots:
                self.start_agent(side)
        except BaseException:
            self.forget()
            raise
        self.host = Side(self.build, env=self.env)

    def add(self, name):
        """What `vrdma vm add` says of it, and QEMU is told besides."""
        memory = ["--private-ram", "--bar", str(self.private_bar)] if self.private_bar else ["--memory", self.memory, *self.ram_elsewhere(name)]
        added = json.loads(self.vrdma("vm", "add", name, "--json", *memory, *(["--plain"] if self.plain else [])))
        self.told_qemu[name] = list(added["qemu"])
        if self.private_bar:
            added["qemu"] += ["-m", self.memory]
        link = Path(added["link"])
        wait_until(link.exists, 20, f"vrdmad serves {link}", [self.service.program])
        if self.interrupts:
            added["qemu"] += added["qemu_interrupts"]
        added["qemu"] += self.devices[self.names.index(name)]
        if self.lasting:
            added["qemu"] += ["-qmp", f"unix:{self.commands(name)},server=on,wait=off"]
        return added

    def boot(self, name):
        return Shell(*self.files, name, self.added[name]["qemu"], kernel_words=self.kernel_words, reboots=True)

    def ram_elsewhere(self, name):
        """Where /dev/shm is small, as in many containers, the RAM is a file of the build."""
        if self.first_ram_in and name == self.names[0]:
            return ["--ram", self.first_ram_in / f"{name}.ram"]
        # Of this test and of another that has not filled its own yet.
        for_four_and_more = 5 * int(self.memory[:-1]) << {"M": 20, "G": 30}[self.memory[-1]]
        if shutil.disk_usage("/dev/shm").free >= for_four_and_more:
            return []
        ram = self.build.vrdma.parent.parent / "vm" / f"{name}.ram"
        return ["--ram", ram]

    def ram_in_maps(self, name):
        """How a line of /proc/PID/maps names its RAM."""
        return self.added[name]["ram"]

    def vrdma(self, *words):
        code, said = run([self.build.vrdma, *words], 30, env=self.env)
        if code != 0:
            raise Failure(f"vrdma {' '.join(words)} left with {code}: {said}")
        return said

    def start_agent(self, side, words=()):
        """words: in front of its own."""
        plain = replace(side, plain=True)
        # It writes a byte to its output once it serves.
        start = plain.start_lasting if self.lasting else plain.start
        agent = start([*words, self.build.vrdma.parent / "vrdma-guestd", "--ready-fd", "1"], "vrdma-guestd")
        self.agents[side.shell.name] = agent
        try:
            wait_until(lambda: "\x01" in agent.output(), AGENT_SECONDS, "vrdma-guestd serves", [agent, self.service.program])
        except Failure as reason:
            raise Failure(f"{reason}\n{self.service.program.says()}") from None

    def commands(self, name):
        return self.folder.path / f"{name}.qmp"

    def monitor(self, side):
        """The monitor of its QEMU, the one that runs now."""
        name = side.shell.name
        if name not in self.monitors or self.monitors[name].qemu is not side.shell.qemu:
            wait_until(self.commands(name).exists, 20, "QEMU has a monitor", [side.shell.qemu])
            self.monitors[name] = Monitor(self.commands(name), side.shell.qemu)
        return self.monitors[name]

    def shown(self):
        """{name: what the service says of the machine}"""
        return {vm["name"]: vm for vm in json.loads(self.vrdma("show", "--json")).get("vms", [])}

    def guests(self):
        return json.loads(self.vrdma("show", "guests", "--json"))

    def moved(self):
        """Whether somebody has sent a megabyte: there is traffic."""
        counters = json.loads(self.vrdma("show", "counters", "--json"))
        return any(guest["counters"].get("sent_bytes", 0) > 1 << 20 for guest in counters["guests"])

    def await_state(self, name, *states):
        wait_until(lambda: self.shown().get(name, {}).get("state") in states, 60, f"{name} is {' or '.join(states)}", [self.service.program])

    def news(self):
        """What the service and the agents have said since they were asked last."""
        text = ""
        for program in (self.service.program, *self.agents.values()):
            said = program.output()
            text += f"--- {program.name}\n{said[self.heard.get(program, 0):][-3000:]}"
            self.heard[program] = len(said)
        return text

    def await_boot(self, shell):
        shell.await_boot(before_another=lambda: self.await_state(shell.name, "waiting"))

    def boot_again(self, side):
        """Its machine has ended, or is ended here without notice: nothing of it is left, and a new one starts."""
        name = side.shell.name
        self.agents[name].stop(grace_s=0)
        side.shell.stop()
        self.await_state(name, "waiting")
        self.await_unmapped(name)
        side.shell = self.machines[self.names.index(name)] = self.boot(name)
        self.await_boot(side.shell)
        self.start_agent(side)

    def await_reboot(self, side, boots):
        """Until its machine has booted so often since QEMU started, and its agent serves again."""
        side.shell.await_boot(boots)
        self.agents[side.shell.name].stop(grace_s=0)
        self.start_agent(side)

    def maps_ram(self, name):
        """Whether the service has the machine's memory mapped."""
        if self.private_bar:
            return self.attached_bars() > sum(vm["state"] == "attached" for other, vm in self.shown().items() if other != name)
        return self.ram_in_maps(name) in Path(f"/proc/{self.service.program.pid}/maps").read_text()

    def attached_bars(self):
        """How many machines lend of their BARs: the service then has them mapped once more than for the link. While there are no programs."""
        maps = Path(f"/proc/{self.service.program.pid}/maps").read_text()
        bars = re.findall(r"\S+ \S+ \S+ \S+ (\d+) +(?:/memfd:vrdma-bar|\S+/link\.bar)\b", maps)
        return sum(count > 1 for count in Counter(bars).values())

    def await_unmapped(self, name):
        wait_until(lambda: not self.maps_ram(name), 20, f"the service has unmapped the memory of {name}")

    def remove(self, name):
        """It has ended, and is to be forgotten with its memory."""
        self.vrdma("vm", "remove", name)
        if "ram" in self.added[name] and self.ram_elsewhere(name):
            Path(self.added[name]["ram"]).unlink()

    def check(self):
        self.service.check()
        for agent in self.agents.values():
            if not agent.running():
                raise Failure(f"vrdma-guestd left with {agent.returncode}\n{agent.says()}")

    def close(self):
        """Everything ends as it should, in order."""
        wait_until(lambda: not self.guests(), 60, "the service has forgotten all guests")
        for name in self.names:
            self.await_state(name, "attached")
            if not self.maps_ram(name):
                raise Failure(f"the memory of {name} is not seen mapped while it is: the test is wrong")
        for name, agent in self.agents.items():
            if (code := agent.stop(grace_s=30)) != 0:
                raise Failure(f"vrdma-guestd left with {code} at SIGTERM\n{agent.says()}")
            self.await_state(name, "connected", "waiting")
        both(self.machines, Shell.leave)
        for name in self.names:
            self.await_state(name, "waiting")
            self.await_unmapped(name)
            self.remove(name)
        wait_until(lambda: not self.shown(), 20, "the service has forgotten the machines")
        left = [path for added in self.added.values() for path in (added.get("ram"), Path(added["link"]).parent) if path and Path(path).exists()]
        if left:
            raise Failure(f"left over: {left}")
        code, said = self.service.stop()
        if code != 0:
            raise Failure(f"vrdmad left with {code}\n{said}")

    def forget(self):
        """However it went, nothing of the machines is left on this one."""
        for machine in self.machines:
            machine.stop()
        for added in self.added.values():
            if "ram" in added:
                Path(added["ram"]).unlink(missing_ok=True)
        self.folder.remove()
