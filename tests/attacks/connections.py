"""Many connections to ``longspan serve`` under a low limit of open files: it goes on, and writes no log about them.

They send nothing, a part of a head or of a body, many requests whose answers they do not read, or they hang up. As long
as they are there, ``/healthz`` has status 200 or 503. After them the server serves everyone.
"""

import contextlib
import http.client
import json
import os
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from . import Case

SHORT, LONG = 3, 60
LIMITS = (160, 256, 600, 1024)  # files that the server may open
TOGETHER = 6  # cases of one server
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
BODY = json.dumps({"prompt": "a", "max_tokens": 200, "stream": True}).encode()
KINDS = {
    "idle": b"",
    "head": HEAD,
    "line": b"GET /healthz HTTP/1.1\r\nHost: local",
    "body": HEAD + b"Content-Length: 1000\r\n\r\n{",
    "chunks": HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{",
    "unread": b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n" * 20,
    "streams": HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY,
    "noise": bytes(range(256)) * 4,
}


def cases(seed: int, count: int, folder: Path) -> Iterator[Case]:
    """See the package."""
    dice = random.Random(seed)
    server = None
    try:
        for i in range(count):
            if i % TOGETHER == 0:
                if server is not None:
                    server.close()
                server = Server(LIMITS[i // TOGETHER % len(LIMITS)])
            kind, size, resets = dice.choice(sorted(KINDS)), dice.uniform(0.2, 1.3), dice.random() < 0.5
            label = f"{i}: {kind}, {size:.2f} of {server.limit} files{', reset' if resets else ''}"
            yield label, lambda server=server, kind=kind, size=size, resets=resets: attack(server, kind, size, resets)
    finally:
        if server is not None:
            server.close()


class Server:
    """``longspan serve`` as a process that may open this many files."""

    def __init__(self, limit: int):
        self.limit, self.log = limit, tempfile.TemporaryFile()
        command = [sys.executable, "-m", "longspan", "serve", "text", "--port", "0", "--slots", "4", "--queue", "4"]
        self.process = subprocess.Popen(
            ["sh", "-c", f'ulimit -n {limit}; exec "$@"', "sh", *command],
            stdout=subprocess.PIPE,
            stderr=self.log,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline().decode()
        found = re.search(r":(\d+)/v1", line)
        if found is None:
            raise RuntimeError(f"the server did not start: {self.said()}")
        self.port = int(found[1])

    def said(self) -> str:
        """The log."""
        self.log.seek(0)
        return self.log.read().decode(errors="replace")

    def ask(self, path: str = "/healthz", body: bytes | None = None) -> int:
        """The status of a request; 0 where the server closed the connection before it had sent one."""
        client = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            client.request("POST" if body else "GET", path, body, {"Content-Type": "application/json"})
            answer = client.getresponse()
            answer.read()
            return answer.status
        except (ConnectionError, http.client.HTTPException):
            return 0
        finally:
            client.close()

    def close(self) -> None:
        """End the process."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.log.close()


def attack(server: Server, kind: str, size: float, resets: bool) -> str | None:
    """Hold connections of a kind, as many as this part of the files of the server -> what went wrong."""
    with contextlib.ExitStack() as held:
        for _ in range(int(size * server.limit)):
            one = held.enter_context(socket.socket())
            one.settimeout(30)
            if resets:  # an end that the other side learns of as an error
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            with contextlib.suppress(ConnectionError):
                one.connect(("127.0.0.1", server.port))
                one.sendall(KINDS[kind])
        for _ in range(3):
            try:
                status = server.ask()
            except OSError as error:
                return f"/healthz was not answered: {error!r}; {complaint(server)}"
            # One that is refused may be closed before its request is read.
            if status not in (0, 200, 503):
                return f"/healthz has status {status}"
            if (files := psutil.Process(server.process.pid).num_fds()) >= server.limit:
                return f"the server has {files} open files"
    begin = time.monotonic()
    while (status := server.ask("/v1/completions", b'{"prompt": "a", "max_tokens": 1}')) != 200:
        if time.monotonic() - begin > 60 or server.process.poll() is not None:
            return f"a completion has status {status} after all have left; {complaint(server)}"
        time.sleep(0.05)
    return complaint(server)


def complaint(server: Server) -> str | None:
    """What the log says that it should not."""
    said = server.said()
    if "Traceback" in said or len(said) > 200_000:
        return f"a log of {len(said)} characters: {said[-500:]!r}"
    return None
