"""Programs of all kinds under vrdma run: preloaded, sanitized, static, with verbs of their own; and those that cannot be run."""
import errno
import os
import pathlib
import platform
import shutil
import sys
import unittest

from support import TestCase


# Has the kernel answer the system call of that number by that errno, and becomes the program.
FORBIDDING = """
import ctypes, os, struct, sys
number, error, *program = sys.argv[1:]
load, equal, answer, allow = (0x20, 0, 0, 0), (0x15, 0, 1, int(number)), (0x06, 0, 0, 0x50000 | int(error)), (0x06, 0, 0, 0x7fff0000)
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in (load, equal, answer, allow)))
class Filter(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_void_p)]
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 22, 38
libc = ctypes.CDLL(None)
if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 or libc.prctl(PR_SET_SECCOMP, 2, ctypes.byref(Filter(4, ctypes.addressof(code)))) != 0:
    sys.exit("no filter can be installed here")
os.execvp(program[0], program)
"""
CALLS = {"x86_64": {"eventfd2": 290, "madvise": 28, "epoll_ctl": 233}, "aarch64": {"eventfd2": 19, "madvise": 233, "epoll_ctl": 21}}


class Programs(TestCase):
    @unittest.skipUnless(platform.machine() in CALLS, "other numbers of system calls")
    def test_a_call_that_a_filter_of_seccomp_forbids_is_named(self):
        with self.service():
            for call, number in CALLS[platform.machine()].items():
                for error in (errno.ENOSYS, errno.EPERM):
                    with self.subTest(call, error=error):
                        result = self.run_under(sys.executable, "-c", FORBIDDING, str(number), str(error), "ibv_devinfo")
                        self.assert_refuses(result, 1, f"seccomp) keeps {call} from this program")

    def test_a_command_that_preloads_something_itself_sees_the_device(self):
        other = next(line.split()[2] for line in self.run_program("ldd", sys.executable).stdout.splitlines() if "libm.so" in line)
        with self.service():
            result = self.vrdma("run", "--", "env", f"LD_PRELOAD={other}", "ibv_devinfo", env={"VRDMA_SOCKET": self.socket})
        self.assertEqual((result.returncode, result.stderr), (0, ""))
        self.assertIn("vrdma0", result.stdout)

    @unittest.skipUnless(shutil.which("rstream"), "rdmacm-utils are not installed")
    def test_a_command_whose_preload_puts_the_library_behind_libc_is_told(self):
        other = next(line.split()[2] for line in self.run_program("ldd", sys.executable).stdout.splitlines() if "libm.so" in line)
        with self.service():
            result = self.vrdma("run", "--", "env", f"LD_PRELOAD={other}", "rstream", "-s", "127.0.0.1", env={"VRDMA_SOCKET": self.socket})
        self.assertIn("LD_PRELOAD=$LD_PRELOAD:", result.stderr)
        self.assertNotIn("ENOSYS", result.stderr)

    def test_the_library_has_the_development_packages_name_too(self):
        with self.service():
            result = self.vrdma("run", "--", sys.executable, "-c", "import ctypes; count = ctypes.c_int(); "
                                "ctypes.CDLL('libibverbs.so').ibv_get_device_list(ctypes.byref(count)); print(count.value)",
                                env={"VRDMA_SOCKET": self.socket, "LD_LIBRARY_PATH": "/nowhere"})
        self.assertEqual((result.returncode, result.stderr, result.stdout), (0, "", "1\n"))

    def built(self, source, *flags):
        """A C program of that main(), which has opened the device before; skipped where it cannot be built."""
        program, file = self.folder / "program", self.folder / "program.c"
        file.write_text("""
            #include <infiniband/verbs.h>
            #include <pthread.h>
            #include <stdio.h>
            #include <stdlib.h>
            #include <string.h>
            #include <sys/wait.h>
            #include <unistd.h>
            static struct ibv_context* open_device(void) {
              int count = 0;
              struct ibv_device** list = ibv_get_device_list(&count);
              struct ibv_context* context = count == 1 ? ibv_open_device(list[0]) : 0;
              ibv_free_device_list(list);
              return context;
            }
            static int exit_code_of_a_child(void) {
              int status = 0;
              const pid_t child = fork();
              if (child == 0) exit(0);
              return waitpid(child, &status, 0) == child ? status : -1;
            }
            """ + source)
        if not shutil.which("gcc") or self.run_program("gcc", "-g", *flags, file, "-o", program, "-libverbs", "-pthread").returncode != 0:
            self.skipTest(f"no gcc with {' '.join(flags) or 'libibverbs-dev'}")
        return program

    def test_programs_with_an_address_sanitizer_run(self):
        """g++'s runtime is a library that wants to be the first; its own order is nobody's concern here. What a fork's child lets go of is no leak."""
        program = self.built("""
            int main(void) {
              struct ibv_context* context = open_device();
              return context == 0 || exit_code_of_a_child() != 0 || ibv_close_device(context) != 0 || exit_code_of_a_child() != 0;
            }""", "-fsanitize=address")
        with self.service():
            for options in ({}, {"ASAN_OPTIONS": "detect_leaks=1"}):
                result = self.vrdma("run", "--", program, env={"VRDMA_SOCKET": self.socket, **options})
                self.assertEqual((result.returncode, result.stderr), (0, ""))

    def test_programs_with_a_thread_sanitizer_run(self):
        """Threads that open the device at the same time: what is made at the first use is no race."""
        program = self.built("""
            static pthread_barrier_t all;
            static void* work(void* unused) {
              pthread_barrier_wait(&all);
              struct ibv_context* context = open_device();
              if (context != 0 && ibv_close_device(context) == 0) return 0;
              return (void*)1;
            }
            int main(void) {
              pthread_t threads[8];
              long failed = 0;
              void* result;
              pthread_barrier_init(&all, 0, 8);
              for (int i = 0; i < 8; ++i) pthread_create(&threads[i], 0, work, 0);
              for (int i = 0; i < 8; ++i) failed |= (pthread_join(threads[i], &result), (long)result);
              return (int)failed;
            }""", "-fsanitize=thread")
        with self.service():
            result = self.vrdma("run", "--", program, env={"VRDMA_SOCKET": self.socket})
            if "unexpected memory mapping" in result.stderr:
                self.skipTest("this kernel's addresses are none for ThreadSanitizer")
            self.assertEqual((result.returncode, result.stderr), (0, ""))

    @unittest.skipUnless(shutil.which("valgrind"), "valgrind is not installed")
    def test_programs_under_memcheck_run(self):
        """Its leak check reads all that it takes for memory: not a whole sparse arena, nor in a fork's child, where that is not mapped."""
        program = self.built("""
            #include <valgrind/memcheck.h>
            int main(void) {
              struct ibv_context* context = open_device();
              if (context == 0 || exit_code_of_a_child() != 0) return 1;
              struct ibv_cq* cq = ibv_create_cq(context, 16, 0, 0, 0);
              if (cq == 0) return 2;
              VALGRIND_DO_QUICK_LEAK_CHECK;
              FILE* const maps = fopen("/proc/self/smaps", "r");
              char line[512];
              int ours = 0;
              long kib, all = 0;
              while (fgets(line, sizeof(line), maps)) {
                if (strchr(line, '-') && strstr(line, " rw-s ")) ours = strstr(line, "memfd:vrdma") != 0;
                if (ours && sscanf(line, "Rss: %ld", &kib) == 1) all += kib, ours = 0;
              }
              fclose(maps);
              printf("%ld\\n", all);
              return ibv_destroy_cq(cq) != 0 || ibv_close_device(context) != 0;
            }""")
        with self.service("--direct", "auto"):
            run = lambda *command: self.vrdma("run", "--", "valgrind", "--error-exitcode=9", *command, env={"VRDMA_SOCKET": self.socket})
            result = run("--leak-check=full", "ibv_devices")
            self.assertEqual(result.returncode, 0, result.stderr)  # nothing of ours is even possibly lost
            result = run(program)
            self.assertEqual(result.returncode, 0, result.stderr)
            self.assertLess(int(result.stdout), 16 << 10, "KiB of sparse memory have come into being")

    def test_a_command_that_cannot_be_run_is_named(self):
        with self.service():
            self.assert_refuses(self.run_under("no-such-command"), 127, "no-such-command", "No such file")
            self.assert_refuses(self.run_under(self.folder), 126, str(self.folder), "Permission denied")
            script = self.folder / "script"
            script.write_text("#!/bin/sh\n")
            self.assert_refuses(self.run_under(script), 126, str(script), "Permission denied")
            script.chmod(0o755)
            for first_line in ("#!/no/such/shell", "#! /no/such/shell -e"):
                script.write_text(first_line + "\n")
                self.assert_refuses(self.run_under(script), 127, str(script), "interpreter /no/such/shell is not there")

    def test_a_program_that_cannot_load_the_library_is_noted(self):
        program = self.folder / "program"
        elf = bytearray(pathlib.Path("/bin/true").resolve().read_bytes())
        first, size, count = (int.from_bytes(elf[at:at + length], "little") for at, length in ((32, 8), (54, 2), (56, 2)))
        headers = [first + i * size for i in range(count)]
        interpreter = next(at for at in headers if int.from_bytes(elf[at:at + 4], "little") == 3)
        loader = int.from_bytes(elf[interpreter + 8:interpreter + 16], "little")  # where its path is

        def note(changed, mode=0o755, owner=None):
            program.unlink(missing_ok=True)
            program.write_bytes(changed)
            if owner is not None:
                os.chown(program, owner, -1)
            program.chmod(mode)
            return self.run_under(program).stderr
        with self.service():
            self.assertEqual(note(elf), "")
            static, other = bytearray(elf), bytearray(elf)
            static[interpreter:interpreter + 4] = bytes(4)
            other[4] = 1
            self.assertRegex(note(static), f"{program} is linked statically.*does not see vrdma0")
            self.assertRegex(note(other), "is a 32-bit program")
            foreign = bytearray(elf)
            foreign[loader + 1:loader + 4] = b"non"
            self.assertIn(f"cannot run {program}: its interpreter /non", note(foreign))
            if os.geteuid() == 0:
                self.assertRegex(note(elf, 0o4755, 64321), "is a set-user-ID.*put \"vrdma run\" inside")

    @unittest.skipUnless(shutil.which("cc"), "no C compiler here")
    def test_a_program_with_verbs_of_its_own_is_noted(self):
        # As one that is linked with libibverbs.a, and else dynamic.
        source, program = self.folder / "own.c", self.folder / "own"
        with self.service():
            for text, flags, noted in (("void *ibv_get_device_list(int *n) { return n; } int main(void) { return ibv_get_device_list(0) != 0; }", [], True),
                                       ("void *ibv_get_device_list(int *n) { return n; } int main(void) { return ibv_get_device_list(0) != 0; }", ["-rdynamic", "-s"], True),
                                       ("__attribute__((weak)) void *ibv_get_device_list(int *); int main(void) { return ibv_get_device_list == 0; }", [], False),
                                       ("int ibv_get_device_list_of_mine; int main(void) { return ibv_get_device_list_of_mine; }", [], False)):
                source.write_text(text)
                built = self.run_program("cc", "-o", program, source, *flags)
                self.assertEqual(built.returncode, 0, built.stderr)
                with self.subTest(text, flags=flags):
                    result = self.run_under(program)
                    self.assertEqual(result.returncode, 0, result.stderr)
                    (self.assertIn if noted else self.assertNotIn)("has libibverbs (libibverbs.a) inside", result.stderr)


if __name__ == "__main__":
    unittest.main()
