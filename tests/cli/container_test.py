"""vrdma container: the options that it prints for each engine."""
import json
import unittest

from support import BIN, TestCase


class Container(TestCase):
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
        self.assert_refuses(self.vrdma("container", "--format", "cdi", "--link-layer", "ib"), 2, "either link layer")
        self.assert_refuses(self.vrdma("container", "--format", "pod"), 2, "pod", "nspawn")
        self.assert_refuses(self.vrdma("container", "--format", "cdi", "--name", "a b"), 2, "a b", "--name without")
        self.assert_refuses(self.vrdma("container", "--format", "cdi", "--name", "\udcff"), 2, "--name is not UTF-8")
        private = self.vrdma("container")  # whose socket comes and goes
        self.assertIn(f"source={self.environment['XDG_RUNTIME_DIR']}/vrdma,target=/run/vrdma,readonly", private.stdout)
        self.assertIn("only processes of your user", private.stderr)
        self.stop_private_service()


if __name__ == "__main__":
    unittest.main()
