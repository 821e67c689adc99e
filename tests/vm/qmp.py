"""QEMU's monitor, as a person who runs machines uses it (QEMU Machine Protocol)."""
import json
import socket
import time

from harness import PATIENCE, Failure

ANSWER_SECONDS, JOB_SECONDS = 30, 90


class Monitor:
    def __init__(self, path, qemu):
        self.qemu = qemu
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(ANSWER_SECONDS * PATIENCE)
        deadline = time.monotonic() + ANSWER_SECONDS * PATIENCE
        while True:
            try:
                self.socket.connect(str(path))
                break
            except (FileNotFoundError, ConnectionRefusedError) as error:  # what a QEMU has left behind that has ended
                if time.monotonic() > deadline:
                    raise Failure(f"QEMU's monitor does not answer: {error}") from error
                time.sleep(0.02)
        self.lines = self.socket.makefile("r")
        self.lines.readline()
        self.do("qmp_capabilities")

    def do(self, command, **arguments):
        try:
            self.socket.sendall(json.dumps({"execute": command, "arguments": {key.replace("_", "-"): value for key, value in arguments.items()}}).encode() + b"\n")
            while line := self.lines.readline():
                answer = json.loads(line)
                if "error" in answer:
                    raise Failure(f"QEMU's {command}: {answer['error']['desc']}")
                if "return" in answer:
                    return answer["return"]
        except OSError as error:
            raise Failure(f"QEMU's monitor: {command}: {error}") from error
        raise Failure(f"QEMU ends at {command}\n{self.qemu.says()}")

    def await_answer(self, command, good, what):
        """Asks until the answer is good."""
        deadline = time.monotonic() + JOB_SECONDS * PATIENCE
        while not good(answer := self.do(command)):
            if time.monotonic() > deadline:
                raise Failure(f"waited in vain: {what}; QEMU says {answer}")
            time.sleep(0.02)

    def save(self, path):
        """The machine into a file; it is over when all of it is there."""
        self.do("migrate", uri=f"exec:cat >{path}")
        self.await_answer("query-migrate", lambda now: now.get("status") in ("completed", "failed"), "the machine is saved")
        if (now := self.do("query-migrate"))["status"] != "completed":
            raise Failure(f"the machine is not saved: {now}")

    def job(self, command, **arguments):
        self.do(command, job_id="job", **arguments)
        self.await_answer("query-jobs", lambda jobs: jobs[0]["status"] == "concluded", command)
        error = self.do("query-jobs")[0].get("error")
        self.do("job-dismiss", id="job")
        if error:
            raise Failure(f"QEMU's {command}: {error}")

    def quit(self):
        self.do("quit")
        if self.qemu.wait(ANSWER_SECONDS * PATIENCE) is None:
            raise Failure("QEMU does not quit")
