"""What vrdma-guestd says of flags that make no sense; with a device it is in tests/vm."""
import unittest

from support import BIN, TestCase, needs_full_device


class Guestd(TestCase):
    def guestd(self, *arguments, **keywords):
        return self.run_program(BIN / "vrdma-guestd", *arguments, **keywords)

    def test_a_device_that_is_none_is_refused_with_the_reason(self):
        """An ordinary file was mapped, and waited for in vain."""
        file = self.folder / "file"
        file.write_bytes(bytes(1 << 20))
        self.assert_refuses(self.guestd("--device", file), 2, f"{file} is no device", "another --device")
        missing = self.guestd("--device", self.folder / "none")
        self.assert_refuses(missing, 2, "No such file", "another --device")
        self.assertNotIn("as root", missing.stderr)

    @needs_full_device
    def test_what_cannot_be_printed_is_told(self):
        for flag in ("--help", "--version"):
            with open("/dev/full", "w") as full:
                self.assert_refuses(self.guestd(flag, stdout=full), 1, "cannot write to standard output", "No space left")


if __name__ == "__main__":
    unittest.main()
