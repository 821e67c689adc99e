"""Inside a virtual machine: runs programs for shell.py on the host, many at a time, until it is told to end.

    shell_server.py TOKEN

One TCP connection is one request, a line of JSON with the machine's token. A program's output, its pid and its end go back as frames
(kind, length, bytes); what comes in on the connection are signals for it, a byte each. A connection that is closed ends its program,
with all that it has started.
"""
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path

PORT = 4999
FRAME = struct.Struct(">cI")
REQUEST_SECONDS, SEND_SECONDS = 30, 60
REQUEST_BYTES = 1 << 20
TCP_LISTEN = "0A"


def listening(port):
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            columns = line.split()
            if columns[1].endswith(f":{port:04X}") and columns[3] == TCP_LISTEN:
                return True
    return False


def send(connection, kind, data):
    connection.sendall(FRAME.pack(kind, len(data)) + data)


def kill_group(pid, number):
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        pass


def run(connection, request):
    try:
        program = subprocess.Popen(request["command"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                   start_new_session=True, cwd="/tmp", env={**os.environ, **request["env"]})
    except OSError as error:
        send(connection, b"e", f"cannot start {' '.join(request['command'])}: {error}".encode())
        return
    ended = os.pidfd_open(program.pid)
    output = program.stdout.fileno()
    os.set_blocking(output, False)

    def pass_on():
        """All that it has said so far; False when nobody can say any more."""
        while True:
            try:
                data = os.read(output, 65536)
            except BlockingIOError:
                return True
            if not data:
                return False
            send(connection, b"o", data)
    try:
        send(connection, b"p", str(program.pid).encode())
        sources = [ended, output, connection]
        while True:
            ready = select.select(sources, [], [])[0]
            if ended in ready:  # its last words are in the pipe; whoever else holds that is not waited for
                if output in sources:
                    pass_on()
                send(connection, b"x", str(program.wait()).encode())
                return
            if output in ready and not pass_on():
                sources.remove(output)
            if connection in ready:
                numbers = connection.recv(64)
                if not numbers:
                    return
                for number in numbers:
                    kill_group(program.pid, number)
    finally:
        kill_group(program.pid, signal.SIGKILL)
        program.wait()
        program.stdout.close()
        os.close(ended)


def serve(connection, token, leave):
    with connection:
        try:
            connection.settimeout(REQUEST_SECONDS)
            line = b""
            while not line.endswith(b"\n") and len(line) < REQUEST_BYTES:
                if not (data := connection.recv(65536)):
                    return
                line += data
            request = json.loads(line)
            if request["token"] != token:
                return
            connection.settimeout(SEND_SECONDS)
            if request["do"] == "run":
                run(connection, request)
            elif request["do"] == "listening":
                send(connection, b"x", b"0" if listening(request["port"]) else b"1")
            elif request["do"] == "leave":
                send(connection, b"x", b"0")
                leave.set()
        except (OSError, ValueError, KeyError) as error:
            print(f"request: {error!r}", flush=True)


def main():
    leave = threading.Event()
    listener = socket.create_server(("", PORT), backlog=64)

    def accept():
        while True:
            connection = listener.accept()[0]
            threading.Thread(target=serve, args=(connection, sys.argv[1], leave), daemon=True).start()
    threading.Thread(target=accept, daemon=True).start()
    print("serving", flush=True)
    leave.wait()


if __name__ == "__main__":
    main()
