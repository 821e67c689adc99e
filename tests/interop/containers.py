"""Programs in containers of podman's, started as docs/containers.md says: by a device of CDI, or by what `vrdma container` prints.

The image is this machine's own root, or an older Debian, below an overlay that goes with the container. Each side has a net namespace
of its own (sandbox.NetNamespaces). What podman keeps is in a folder of the test's, but for the device's specification, which it reads
in one place only: there the test has a file and a kind of device of its own.
"""

import json
import os
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from harness import Failure, Side, Skip, TempFolder, listening, run, wait_until
from sandbox import ADDRESSES, NetNamespaces

# Of 2021: glibc 2.31, rdma-core 33.
OLDER_SUITE, OLDER_PACKAGES = "bullseye", ("ibverbs-utils", "perftest", "rdmacm-utils")
SPECIFICATIONS = Path("/var/run/cdi")
RUNTIMES = ("runc", "crun")
SECONDS = 300  # after which podman ends a container, whatever has become of the test


class World:
    """podman as it works on this machine, and two net namespaces. `root`: of the image."""

    def __init__(self, build, service, root="/"):
        if os.geteuid() != 0:
            raise Skip("net namespaces for the containers need root")
        if not shutil.which("podman"):
            raise Skip("podman is not installed")
        self.build, self.root = build, root
        self.state = TempFolder(mode=0o700)
        self.specification = SPECIFICATIONS / f"vrdma-test-{os.getpid()}.json"
        self.kind = f"vrdma/test{os.getpid()}"
        self.net = NetNamespaces()
        try:
            self.podman = self._podman()
            self._specify(service)
        except BaseException:
            self.close()
            raise

    def _podman(self):
        why = []
        settings = self.state.path / "containers.conf"  # its locks would else stay in /dev/shm
        settings.write_text('[engine]\nlock_type = "file"\n')
        for runtime in RUNTIMES:
            if not shutil.which(runtime):
                continue
            words = ["env", f"CONTAINERS_CONF={settings}", "podman", "--root", self.state.path / "root", "--runroot", self.state.path / "run", "--tmpdir", self.state.path / "tmp", "--cgroup-manager", "cgroupfs",
                     "--events-backend", "none", "--runtime", runtime]
            code, said = run([*words, *self.run_words(0), "true"], 60)
            if code == 0:
                return words
            why.append(f"{runtime}: {said.strip()}")
        raise Skip(f"no container starts here: {'; '.join(why) or 'no runtime is installed'}")

    def _specify(self, service):
        code, said = run([self.build.vrdma, "container", "--format", "cdi", "--socket", service.socket], 30)
        if code != 0:
            raise Failure(f"vrdma container ended with {code}: {said}")
        specification = json.loads(said)
        if specification["kind"] != "vrdma/hca":
            raise Failure(f"the device is of the kind {specification['kind']}, not vrdma/hca as documented")
        SPECIFICATIONS.mkdir(parents=True, exist_ok=True)
        self.specification.write_text(json.dumps(dict(specification, kind=self.kind)))

    def run_words(self, number, *more):
        # Limits of one's own: podman raises them otherwise, which takes a capability.
        limits = [word for name in ("nofile", "nproc") for word in ("--ulimit", f"{name}=1024:1024")]
        return ["run", "--rm", "--timeout", SECONDS, *limits, "--network", f"ns:/proc/{self.net.holders[number].pid}/ns/net", *more, "--rootfs", f"{self.root}:O"]

    def close(self):
        # A container outlives the podman that has started it.
        if hasattr(self, "podman"):
            subprocess.run([str(word) for word in (*self.podman, "rm", "--all", "--force", "--time", 0)], stdin=subprocess.DEVNULL, capture_output=True, timeout=60)
        self.specification.unlink(missing_ok=True)
        self.net.close()
        self.state.remove()

    def by_device(self, name):
        return ["--device", f"{self.kind}={name}"]

    def by_options(self, service, *options):
        code, said = run([self.build.vrdma, "container", *options], 30, env=service.environment())
        if code != 0 or said.count("\n") != 1:
            raise Failure(f"vrdma container ended with {code}: {said}")
        return said.split()

    def side(self, number, options):
        return ContainerSide(self.build, address=ADDRESSES[number], world=self, number=number, options=options)


@dataclass
class ContainerSide(Side):
    world: World | None = None
    number: int = 0
    options: list = field(default_factory=list)

    def command(self, program):
        layer = ["--env", f"VRDMA_LINK_LAYER={self.link_layer}"] if self.link_layer else []
        # A first process that ends by SIGTERM, where the program itself, as the first of its pid namespace, would be spared.
        return [str(word) for word in (*self.world.podman, *self.world.run_words(self.number, *self.options, *layer), "timeout", SECONDS, *program)]

    def listening(self, program, port):
        return listening(self.world.net.holders[self.number].pid, port)


def is_one(side):
    """Otherwise whatever runs in it has shown nothing."""
    for name in ("pid", "mnt", "net", "ipc", "uts"):
        code, said = side.run(["readlink", f"/proc/self/ns/{name}"], 30)
        if code != 0 or said.strip() == os.readlink(f"/proc/self/ns/{name}"):
            raise Failure(f"the container shares the {name} namespace, or cannot say ({code}): {said}")
    code, said = side.run(["sh", "-c", "ls /run/vrdma; touch /usr/lib/vrdma/here"], 30)
    if code == 0 or not said.startswith("vrdmad.sock\n") or "Read-only file system" not in said:
        raise Failure(f"the container has more than the service's socket, or may write beside the library ({code}): {said}")


def link_layer(side, expected):
    code, said = side.run(["ibv_devinfo"], 60)
    if code != 0 or f"link_layer:\t\t{expected}" not in said:
        raise Failure(f"ibv_devinfo does not show a port of {expected} ({code}):\n{said}")


def named(side, service, name):
    """The guest has its name while the container runs."""
    program = side.start(["ibv_rc_pingpong"], "server")
    try:
        wait_until(lambda: any(guest["name"] == name for guest in service.show("guests")), 30, f"a guest called {name}", [program])
    finally:
        program.stop()



def direct_inside(service, side):
    """Two programs of one container move their data themselves, as two of the host do: they could reach each other's memory anyway."""
    before = service.show()["counters"]["direct_links"]
    code, said = side.run(["sh", "-c", "ib_write_lat -n 200 >/dev/null & sleep 1; ib_write_lat -n 200 localhost && wait $!"], 120)
    if code != 0:
        raise Failure(f"the pair ended with {code}:\n{said}")
    if service.show()["counters"]["direct_links"] == before:
        if why := service.why_not_direct():
            raise Skip(f"processes of a container cannot be direct here: {why}")
        raise Failure("no connection of it could be direct: see mediated_because in vrdma show qps --json")
