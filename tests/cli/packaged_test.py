"""What a package brings beside its programs: manual pages."""
import pathlib
import re
import unittest

ROOT = pathlib.Path(__file__).parents[2]


class Packaged(unittest.TestCase):
    def test_man_k_finds_each_manual_page(self):
        """lexgrog(1) indexes a page by the one word behind the first .Nm; "vrdma run" is none to it."""
        for page in sorted((ROOT / "docs/man").iterdir()):
            with self.subTest(page.name):
                name = re.match(r'\.Dd .*\n\.Dt .*\n\.Os\n\.Sh NAME\n\.Nm (.*)\n\.Nd .', page.read_text())
                self.assertTrue(name)
                self.assertEqual(name[1], page.stem)


if __name__ == "__main__":
    unittest.main()
