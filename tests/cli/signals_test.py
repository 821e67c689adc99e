"""vrdma run stands between whoever signals it and its command: signals, terminals, stops and alarms reach that."""
import contextlib
import os
import pathlib
import pty
import select
import signal
import subprocess
import sys
import unittest

from support import BIN, WATCHDOG_S, TestCase


class Signals(TestCase):
    def test_a_signal_reaches_the_command(self):
        with self.service():
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
                with self.subTest(number.name):
                    process = subprocess.Popen(
                        [BIN / "vrdma", "run", "--", "sh", "-c",
                         f"trap 'exit 42' {number.name[3:]}; echo ready; while :; do sleep 0.01; done"],
                        env=dict(self.environment, VRDMA_SOCKET=self.socket), stdout=subprocess.PIPE)
                    self.assertEqual(process.stdout.readline(), b"ready\n")
                    process.send_signal(number)
                    self.assertEqual(process.wait(60), 42)
                    process.stdout.close()

    def popen_under(self, *command, **keywords):
        """The running `vrdma run`, and the process id of its command, which prints that first (and of others that are to end with the test)."""
        process = subprocess.Popen([BIN / "vrdma", "run", "--", *command], env=dict(self.environment, VRDMA_SOCKET=self.socket), stdout=subprocess.PIPE, text=True, **keywords)
        self.addCleanup(lambda: (process.stdout.close(), process.poll() is None and process.kill(), process.wait(WATCHDOG_S)))
        program, *others = map(int, process.stdout.readline().split())

        def end():
            for pid in (program, *others):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.addCleanup(end)
        return process, program, *others

    @staticmethod
    def state_of(pid):
        """As in proc(5): R, S, T …; Z also for one that is gone."""
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return "Z"

    def test_a_terminal_that_hangs_up_ends_the_command(self):
        """The kernel tells the leader of the session alone: `vrdma run`, where a terminal was opened for it."""
        with self.service():
            process, terminal = pty.fork()
            if process == 0:
                os.execve(BIN / "vrdma", ["vrdma", "run", "--", "sh", "-c", "echo $$; exec sleep 1000"], dict(self.environment, VRDMA_SOCKET=self.socket))
            pidfd = os.pidfd_open(process)
            program = 0
            try:
                with os.fdopen(terminal, "rb", buffering=0) as master:
                    text = b""
                    while not text.endswith(b"\n"):
                        text += master.read(1)
                    program = int(text)
                self.assertTrue(select.select([pidfd], [], [], WATCHDOG_S)[0], "it goes on without its terminal")
                self.assertEqual(self.state_of(program), "Z")
            finally:
                os.close(pidfd)
                for pid in filter(None, (program, process)):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                status = os.waitpid(process, 0)[1]
            self.assertEqual(os.waitstatus_to_exitcode(status), 128 + signal.SIGHUP)

    def test_a_run_that_is_killed_takes_the_command_along(self):
        with self.service():
            process, program, started = self.popen_under("sh", "-c", "sleep 1000 >&- & echo $$ $!; exec sleep 1000")
            process.kill()
            self.wait_until(lambda: self.state_of(program) == "Z", "the command of a `vrdma run` that was killed goes on")
            self.assertNotEqual(self.state_of(started), "Z", "what the command has started itself is no concern of ours")

    def test_signals_of_all_kinds_reach_the_command(self):
        script = """if True:
            import os, signal, sys
            wanted = {int(number) for number in sys.argv[1:]}
            signal.pthread_sigmask(signal.SIG_BLOCK, wanted)
            print(os.getpid(), flush=True)
            while wanted:
                got = signal.sigwaitinfo(wanted)
                wanted.remove(got.si_signo)
                print(got.si_signo, flush=True)"""
        wanted = [signal.SIGABRT, signal.SIGPIPE, signal.SIGXCPU, signal.SIGPROF, signal.SIGIO, signal.SIGRTMIN, signal.SIGRTMAX]
        with self.service():
            process, _ = self.popen_under(sys.executable, "-c", script, *(str(int(number)) for number in wanted))
            for number in wanted:
                process.send_signal(number)
                self.assertTrue(select.select([process.stdout], [], [], WATCHDOG_S)[0], f"{number!r} does not arrive")
                self.assertEqual(process.stdout.readline(), f"{int(number)}\n")
            self.assertEqual(process.wait(WATCHDOG_S), 0)

    def test_a_command_stops_and_goes_on_with_its_run(self):
        with self.service():
            # A group that somebody could continue, as a shell's job: else nobody may stop it by SIGTSTP.
            process, program = self.popen_under("sh", "-c", "echo $$; exec sleep 1000", preexec_fn=lambda: os.setpgid(0, 0))
            for _ in range(2):
                process.send_signal(signal.SIGTSTP)
                self.wait_until(lambda: self.state_of(program) == self.state_of(process.pid) == "T", "not both have stopped")
                process.send_signal(signal.SIGCONT)
                self.wait_until(lambda: "T" not in (self.state_of(program), self.state_of(process.pid)), "not both go on")
            process.terminate()
            self.assertEqual(process.wait(WATCHDOG_S), 128 + signal.SIGTERM)

    def test_an_alarm_that_was_set_before_reaches_the_command(self):
        """`perl -e 'alarm 60; exec @ARGV' vrdma run …`: a timer outlives exec, not fork."""
        with self.service():
            for after_s in (1, 5, 25):  # it may come before there is a command, which is nobody's fault
                with contextlib.suppress(ValueError):
                    process, _ = self.popen_under("sh", "-c", "echo $$; exec sleep 1000", preexec_fn=lambda: signal.alarm(after_s))
                    self.assertEqual(process.wait(WATCHDOG_S), 128 + signal.SIGALRM)
                    break
            else:
                self.fail("no command was started")


if __name__ == "__main__":
    unittest.main()
