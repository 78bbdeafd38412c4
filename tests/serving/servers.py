"""Servers in threads for tests through a real socket, and gates that let their models step one by one."""

import contextlib
import functools
import json
import threading
import time

import httpx
import torch
import uvicorn
from pools import Wrapped, alone, decoder, spoiled

from longspan.serving import Pool, Sessions
from longspan.serving.connection import protocol
from longspan.serving.server import Server
from longspan.serving.state_adapters import StateAdapters
from longspan.serving.text import Bytes


def until(holds, seconds=60):
    """Wait until a condition holds."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


def text_of(tokens):
    """The text of bytes."""
    return bytes(tokens).decode("utf-8", "replace")


def events(lines):
    """The events of a whole stream, from its lines."""
    found = [line[6:] for line in lines if line.startswith("data: ")]
    assert found[-1] == "[DONE]"
    return [json.loads(line) for line in found[:-1]]


class Running:
    """A server in a thread, whose free slots are NaN.

    Args:
        model: A small decoder by default.
        codec: True for text as bytes, False for none, or a codec.
        name: The model's name in requests.
        pool: Options of the pool.
        folder: Where sessions are kept, None for memory.
        limit: Bytes of all sessions.
        adapters: The folder of state adapters, None for none.
        options: Options of the server.
    """

    def __init__(
        self, model=None, *, codec=True, name="tiny", pool=None, folder=None, limit=1 << 30, adapters=None, **options
    ):
        self.model = decoder() if model is None else model
        self.pool = spoiled(Pool(self.model, **({"slots": 8, "queue": 8} | (pool or {}))))
        self.store = Sessions(self.pool, folder, limit=limit)
        self.codec = {True: Bytes(), False: None}[codec] if isinstance(codec, bool) else codec
        found = {"sessions": self.store, "adapters": StateAdapters(self.pool, adapters)} | options
        self.server = Server(self.pool, name=name, codec=self.codec, **found)
        http = protocol(self.server.limits)
        config = uvicorn.Config(self.server.app, port=0, http=http, ws="none", log_level="error", lifespan="off")
        self.http = uvicorn.Server(config)
        self.http.install_signal_handlers = lambda: None
        self.thread = threading.Thread(target=self.http.run, daemon=True)
        self.thread.start()
        until(lambda: self.http.started)
        self.port = self.http.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if "client" in self.__dict__:
            self.client.close()
        self.http.should_exit = True
        self.thread.join(10)
        self.server.close()

    @functools.cached_property
    def client(self):
        """A client of the interface that keeps its connection."""
        return httpx.Client(timeout=60, base_url=f"{self.url}/v1", verify=False)  # no time for certificates

    def send(self, content, kind="application/json"):
        """POST bytes as a completion, in a connection that ends with the answer."""
        headers = {"content-type": kind}
        url = f"{self.url}/v1/completions"
        return httpx.post(url, content=content, headers=headers, timeout=60, verify=False)

    def post(self, **body):
        return self.send(json.dumps(body).encode())

    def pieces(self, **body):
        """The choices of a whole stream, in its order."""
        return [event["choices"][0] for event in events(self.post(**body, stream=True).text.splitlines())]

    def metric(self, name):
        lines = httpx.get(f"{self.url}/metrics", verify=False).text.splitlines()
        (found,) = [line for line in lines if line.startswith(f"{name} ")]
        return float(found.split()[1])

    def alone(self, prompt, n):
        """The n most likely tokens after a text or tokens, drawn without a server."""
        return alone(self.model, prompt.encode() if isinstance(prompt, str) else prompt, n)

    def settle(self):
        """Wait until the server is done with all that clients have sent, who have closed their connections."""
        # Connections are accepted in order, so those before this one have been.
        assert httpx.get(f"{self.url}/healthz", verify=False).status_code == 200
        state = self.http.server_state
        until(lambda: not (state.connections or state.tasks))
        until(lambda: self.pool.idle)


class Gate:
    """Lets the model's thread of a server step only when the test does; a context manager that ends with ``release``.

    The server must be idle at the beginning.
    """

    def __init__(self, running):
        self._pool, self._step = running.pool, running.pool.step
        self._semaphore, self.open, self.done = threading.Semaphore(0), False, 0
        running.pool.step = self._gated

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.release()
        del self._pool.step  # which hides the method

    def _gated(self):
        if not self.open:
            self._semaphore.acquire()
        try:
            return self._step()
        finally:
            self.done += 1

    def step(self, n=1):
        """Run n steps."""
        for _ in range(n):
            before = self.done
            self._semaphore.release()
            until(lambda before=before: self.done > before)

    def release(self):
        self.open = True
        self._semaphore.release()


@contextlib.contextmanager
def gated(*args, **options):
    """A server and its gate."""
    with Running(*args, **options) as running, Gate(running) as gate:
        yield running, gate


class Scripted(Wrapped):
    """A model that gives these bytes, whatever it reads; the prompt is empty."""

    def __init__(self, model, text):
        super().__init__(model)
        self._text, self.likelihood, self.levels = text, self, 256

    def __call__(self, tokens, state, **options):
        outputs, after = self._model(tokens, state, **options)
        outputs[:, :, 0] = after.position[:, None].to(outputs.dtype)
        return outputs, after

    def log_probs(self, outputs):
        places = [int(place) - 1 for place in outputs[:, 0]]
        tokens = torch.tensor([self._text[place % len(self._text)] for place in places])
        return torch.nn.functional.one_hot(tokens, 256).float().log()


@contextlib.contextmanager
def scripted(running, text):
    """The server, while its model gives these bytes."""
    running.pool.model = Scripted(running.model, text)
    try:
        yield running
    finally:
        until(lambda: running.pool.idle)
        running.pool.model = running.model
