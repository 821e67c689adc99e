"""Programs on two hosts, each with a vrdmad of its own, joined by a network that can fail (network.py). Every case is one line."""

import argparse
import json
import os
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "interop"))
import harness  # noqa: E402
from harness import Build, Failure, Program, Service, Skip, TempFolder, wait_until  # noqa: E402
from network import Network, why_not  # noqa: E402

PORT = 28251


class Host(Service):
    """A vrdmad in a namespace."""

    def __init__(self, build, network, index, secret, lids=1000):
        self.network, self.index = network, index
        everybody = [{"name": f"h{i}", "address": address, "port": PORT, "lids": f"{i * lids + 1}-{(i + 1) * lids}"}
                     for i, address in enumerate(network.addresses)]
        remote = {"name": f"h{index}", "address": network.addresses[index], "port": PORT, "secret_file": str(secret), "hosts": everybody}
        super().__init__(build, config={"remote": remote})

    @property
    def user(self):
        return self.network.run_in(self.index, [])

    @user.setter
    def user(self, _):
        pass

    @property
    def address(self):
        return self.network.addresses[self.index]

    def start_program(self, words, link_layer="ib", name=None):
        return Program(self.network.run_in(self.index, [self.build.vrdma, "run", "--link-layer", link_layer, "--", *words]),
                       env=self.environment(), name=name or f"{words[0]} on h{self.index}")

    def show(self, what=None):
        program = Program([self.build.vrdma, "show", *([what] if what else []), "--json"], env=self.environment())
        code = program.wait(30 * harness.PATIENCE)
        text = program.output()
        program.stop()
        if code != 0:
            raise Failure(f"vrdma show ended with {code}: {text}")
        return json.loads(text)

    def reaches(self, other):
        return any(route["via"] == "tcp" and route["host"] == f"h{other.index}" and route["state"] == "connected" for route in self.show("routes"))
