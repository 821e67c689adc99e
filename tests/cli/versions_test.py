"""Libraries and services of different versions, and what is no service at all: who refuses whom, and what a person is told."""
import errno
import os
import unittest

from support import MAJOR, MINOR, TestCase, attach, reply_to


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


if __name__ == "__main__":
    unittest.main()
