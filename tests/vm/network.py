"""The harness of virtual machines itself: what programs in them say, how they end, and TCP between all of them. Nothing of vrdma."""
import re
import secrets
from dataclasses import replace

from guests import MEMORY, boot_image
from harness import Failure, Side, wait_until
from shell import MachineSide, Shell

USER = 64321


def network(tally, folder):
    kernel, files = boot_image(folder, ())
    machines = [Shell(kernel, files, name, ["-m", MEMORY]) for name in ("one", "two")]
    for machine in machines:
        machine.await_boot()
    sides = [MachineSide(build=None, shell=machine, plain=True) for machine in machines]
    host = Side(build=None)
    host.command = lambda program: list(program)

    def talk(server, client):
        """Bytes of a client that arrive at a server, by programs that know nothing of all this."""
        port, text = server.free_port(), secrets.token_hex(20000)
        code = ("import socket, sys; listener = socket.create_server(('', {0})); connection = listener.accept()[0]\n"
                "while data := connection.recv(65536): sys.stdout.write(data.decode())").format(port)
        serving = server.start(["python3", "-S", "-c", code], "server")
        talking = None
        try:
            wait_until(lambda: server.listening(serving, port), 60, "the server listens", [serving])
            code = f"import socket; socket.create_connection(('{client.address_of(server)}', {port})).sendall(b'{text}')"
            talking = client.start(["python3", "-S", "-c", code], "client")
            if talking.wait(60) != 0 or serving.wait(60) != 0:
                raise Failure(f"{serving.says()}\n{talking.says()}")
            if serving.output() != text:
                raise Failure(f"{len(serving.output())} characters of {len(text)} arrive, or others")
        finally:
            for program in (talking, serving):
                if program:
                    program.stop()

    def commands():
        one, two = sides
        code, said = one.run(["sh", "-c", "printf 'a\\0b'; id -u >&2; exit 3"], 60)
        if (code, said) != (3, "a\0b0\n"):
            raise Failure(f"{code}, {said!r}")
        code, said = replace(two, uid=USER).run(["sh", "-c", "id -u; kill -9 $$"], 60)
        if (code, said) != (-9, f"{USER}\n"):
            raise Failure(f"{code}, {said!r}")
        try:
            one.run(["no-such-program"], 60)
        except Failure as reason:
            if "cannot start no-such-program" not in str(reason):
                raise
        else:
            raise Failure("a program that is not there is started")
        long = [one.start(["sh", "-c", f"echo {number}; trap 'echo term; exit 5' TERM; while :; do sleep 0.1; done"], None) for number in range(3)]
        try:
            wait_until(lambda: [program.output() for program in long] == ["0\n", "1\n", "2\n"], 60, "three programs run at once", long)
            if one.run(["echo", "beside"], 60) != (0, "beside\n"):
                raise Failure("a fourth does not run beside them")
            if long[0].stop() != 5 or not long[0].output().endswith("term\n"):
                raise Failure(f"SIGTERM does not arrive:\n{long[0].says()}")
        finally:
            for program in long:
                program.stop()
        # With its connection a program ends, and what it has started.
        sleeper = one.start(["sh", "-c", "sleep 4321 & echo started; wait"], None)
        wait_until(lambda: "started" in sleeper.output(), 60, "it has started another", [sleeper])
        sleeper.stop(grace_s=0)
        wait_until(lambda: "4321" not in one.run(["ps", "-o", "args"], 60)[1], 60, "both have ended")

    def lasting():
        for ended, code in ((["sh", "-c", "echo over; exit 7"], 7), (["sleep", "1000"], 128 + 15)):
            program = sides[0].start_lasting(ended, "program")
            if code > 128:
                program.send_signal(15)
            wait_until(lambda program=program: not program.running(), 60, "it has ended", [program])
            if program.returncode != code:
                raise Failure(f"{program.returncode}, not {code}\n{program.says()}")

    def network_settings():
        _, said = sides[0].run(["ip", "addr", "show", "eth0"], 60)
        if "10.0.2.15/24" not in said:
            raise Failure(said)
        return re.search(r"mtu \d+", said).group(0)

    def killed():
        program = sides[1].start(["sleep", "1000"], "sleep")
        machines[1].kill()
        if program.wait(30) is not None or program.running():
            raise Failure("a program of a machine that was killed goes on, or ends by itself")
        program.stop()
        try:
            sides[1].start(["true"], None).stop()
        except Failure as reason:
            if "two" in str(reason):
                return
        raise Failure("a machine that was killed takes a request")
    tally.case("eth0", network_settings)
    tally.case("commands, users, signals and ends", commands)
    tally.case("the end of a program that no connection holds, by itself and by a signal", lasting)
    for name, server, client in (("machine to machine", *sides), ("the other way", *reversed(sides)), ("host to machine", sides[0], host),
                                 ("machine to host", host, sides[1]), ("within a machine", sides[0], sides[0])):
        tally.case(f"TCP, {name}", lambda server=server, client=client: talk(server, client))
    tally.case("the first switches itself off", machines[0].leave)
    tally.case("the second is killed", killed)
    machines[1].stop()
