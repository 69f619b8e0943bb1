"""`shardroute`, loaded once: a process that has imported the program, of which every command is a fork.

`preloaded_program.py FOLDER` puts a `shardroute` into FOLDER and prints `ready`. Whoever runs that one gets what the real one
does (arguments, folder, environment, standard streams, exit code) without the second that Python takes to import it. The
documents show more than a hundred commands.
"""

import contextlib
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

CLIENT = '''#!{python} -IS
import json, os, socket, sys
said = json.dumps([sys.argv, os.getcwd(), dict(os.environ)]).encode()
with socket.socket(socket.AF_UNIX) as to:
    to.connect({address!r})
    socket.send_fds(to, [len(said).to_bytes(8, "little")], [0, 1, 2])
    to.sendall(said)
    code = to.recv(1)
sys.exit(code[0] if code else 1)
'''


def become_a_command(folder: Path) -> None:
    """Serve for ever; returns in a fork of this process that has taken over what a client is."""
    address = str(folder / "socket")
    server = socket.socket(socket.AF_UNIX)
    server.bind(address)
    server.listen()
    program = folder / "shardroute"
    program.write_text(CLIENT.format(python=sys.executable, address=address))
    program.chmod(0o755)
    print("ready", flush=True)
    while True:
        client, _ = server.accept()
        while _reaped():
            pass
        if os.fork():
            client.close()
            continue
        server.close()
        length, streams, _, _ = socket.recv_fds(client, 8, 3)
        said = b"".join(_parts(client, int.from_bytes(length, "little")))
        command = os.fork()
        if not command:
            client.close()
            _take_over(said, streams)
            return
        _attend(client, command)


def _parts(client: socket.socket, n_bytes: int) -> Iterator[bytes]:
    while n_bytes:
        yield (part := client.recv(n_bytes))
        n_bytes -= len(part)


def _reaped() -> bool:
    """Whether there was a fork that has ended and was not known to have."""
    try:
        return os.waitpid(-1, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return False


def _take_over(said: bytes, streams: list[int]) -> None:
    sys.argv, folder, environment = json.loads(said)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)


def _attend(client: socket.socket, command: int) -> None:
    """Tell the client how the command ended; end the command where the client is gone first. Ends this process."""
    ended = os.pidfd_open(command)
    if ended not in select.select([client, ended], [], [])[0]:
        os.kill(command, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(command, 0)[1])
    with contextlib.suppress(BrokenPipeError):
        client.sendall(bytes([code if code >= 0 else 1]))
    os._exit(0)


if __name__ == "__main__":
    import shardroute.executors.commands  # noqa: F401 - all that a command needs
    from shardroute.executors.cli import main

    become_a_command(Path(sys.argv[1]))
    sys.exit(main())
