"""``longspan serve``: a trained decoder behind OpenAI's completions."""

import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any, NamedTuple

from .._utils.optional_deps import need
from .parser import Parser, make, natural_int, positive_int


def parser() -> Parser:
    parser = make(
        "serve",
        "Serve a trained model over HTTP with the interface of OpenAI's completions: /v1/completions with streaming, "
        "/v1/models, /v1/sessions, /healthz, /readyz and /metrics, and a page for trying the model at /. Each stream "
        "has its state in a slot of a pool, and one decode step advances all streams. MODEL may also be a folder of a "
        "recurrent model of transformers or flash-linear-attention with its tokenizer.json. After SIGTERM, running "
        "streams finish; a second signal stops immediately.",
        "longspan serve text",
        "longspan serve runs/book --port 8080 --slots 256 --prefix-mb 512",
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a run, a checkpoint, a pretrained model such as text, a GGUF file, or a folder with a config.json of "
        "transformers",
    )
    parser.add_argument("--host", type=str, default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=natural_int(65535), default=8000, help="port; 0 takes a free one")
    parser.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="a name of this server in requests, as that of a proxy; repeatable. A server on loopback serves no other "
        "names than localhost and loopback addresses, which keeps web pages away; '*' serves any",
    )
    parser.add_argument(
        "--allow-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="an origin of web pages that may use this server, such as https://example.org; repeatable; '*' is any",
    )
    parser.add_argument("--slots", type=positive_int(1_000_000), default=64, help="streams that run at the same time")
    parser.add_argument("--queue", type=natural_int(1_000_000), default=128, help="streams that may wait for a slot")
    parser.add_argument(
        "--capacity", type=natural_int(10**9), default=0, help="tokens of a stream, for models with a KV cache"
    )
    parser.add_argument(
        "--stop",
        type=str,
        default="",
        metavar="TOKEN",
        help="a token of the tokenizer that ends a stream; by default <|endoftext|>, or what the folder's configs name",
    )
    parser.add_argument("--weights", choices=("int8", "int4"), help="round the weights of the model to 8 or 4 bits")
    parser.add_argument("--prefix-mb", type=natural_int(10**6), default=0, help="memory for states of known beginnings")
    parser.add_argument(
        "--checkpoint-every",
        type=positive_int(10**9),
        default=256,
        metavar="N",
        help="tokens of a text between these states; a prompt has them at least 256 tokens apart",
    )
    parser.add_argument(
        "--draft-tokens",
        type=natural_int(64),
        default=4,
        metavar="N",
        help='most tokens that a request with "draft": "prompt-lookup" drafts at a time; 0 refuses drafts',
    )
    parser.add_argument(
        "--sessions",
        type=str,
        default="",
        metavar="DIR",
        help="folder that keeps sessions; without it they end with the server",
    )
    parser.add_argument("--session-mb", type=natural_int(10**9), default=1024, help="size of all sessions together")
    parser.add_argument(
        "--allow-state-upload", action="store_true", help="let clients make sessions from files of states"
    )
    parser.add_argument(
        "--adapters",
        type=str,
        default="",
        metavar="DIR",
        help="folder of state adapters NAME.safetensors, which requests and sessions name; /v1/adapters loads others",
    )
    parser.add_argument("--max-tokens", type=positive_int(10**9), default=4096, help="largest max_tokens of a request")
    parser.add_argument(
        "--api-key", type=str, default=None, metavar="KEY", help="require the header Authorization: Bearer KEY"
    )
    parser.add_argument("--name", type=str, default="", help="the model's name in requests; by default MODEL")
    parser.add_argument("--no-playground", action="store_true", help="do not serve the page for trying the model at /")
    parser.add_argument("--grace", type=natural_int(86400), default=30, help="seconds for running streams at the end")
    return parser


def run(args: Any) -> int:
    need("longspan serve", "starlette", "uvicorn", "prometheus_client")
    from ..serving.connection import bound

    if args.api_key == "":
        raise ValueError("--api-key is empty, as from a variable that is not set; pass a key, or leave the option out")
    # Whatever is wrong with the address shows before the model is loaded.
    sockets = bound(args.host, args.port)
    try:
        return _serve(args, sockets)
    finally:
        for one in sockets:
            one.close()


def _serve(args: Any, sockets: list[socket.socket]) -> int:
    import uvicorn

    from ..ops.buffers import reuse_pages
    from ..serving import Pool, Sessions
    from ..serving.connection import affordable, protocol
    from ..serving.server import Limits, Server
    from ..serving.state_adapters import StateAdapters

    access = _access(args, sockets)
    reuse_pages()
    model, codec, grid, _ = loaded(args.model, args.stop, args.weights)
    pool = Pool(
        model,
        slots=args.slots,
        queue=args.queue,
        capacity=args.capacity,
        prefix_bytes=args.prefix_mb << 20,
        checkpoint_every=args.checkpoint_every,
        draft_tokens=args.draft_tokens,
    )
    sessions = Sessions(pool, Path(args.sessions) if args.sessions else None, limit=args.session_mb << 20)
    adapters = StateAdapters(pool, Path(args.adapters) if args.adapters else None)
    files = affordable(args.slots + args.queue + 1024)
    limits = Limits(tokens=args.max_tokens, connections=files.connections, state_upload=args.allow_state_upload)
    server = Server(
        pool,
        name=args.name or args.model,
        codec=codec,
        access=access,
        limits=limits,
        sessions=sessions,
        adapters=adapters,
        grid=grid,
        playground=not args.no_playground,
    )
    config = uvicorn.Config(
        server.app,
        http=protocol(limits),
        ws="none",
        backlog=files.backlog,
        log_level="warning",
        timeout_graceful_shutdown=args.grace,
        lifespan="off",
    )
    http = uvicorn.Server(config)
    _on_signals(server, http)
    try:
        with _announced(http, args, pool, sockets):
            http.run(sockets)
    finally:
        server.close()
    return 0 if http.started else 2


def _access(args: Any, sockets: list[socket.socket]) -> Any:
    """Return who may use the server; one line on stderr where everyone may."""
    from ..serving.guard import Access, is_loopback

    local = all(is_loopback(one.getsockname()[0]) for one in sockets)
    hosts = (args.host, *args.allow_host) if local or args.allow_host else None
    access = Access(args.api_key or "", hosts, tuple(args.allow_origin))
    if not local and not access.api_key:
        print(
            f"longspan: {args.host} may be reached from other machines, and without --api-key everyone there can use "
            "the model and read, continue and delete sessions",
            file=sys.stderr,
            flush=True,
        )
    return access


class Loaded(NamedTuple):
    """A model, and what belongs to it."""

    model: Any
    codec: Any
    """what turns its tokens into text, or None"""
    grid: tuple[int, ...]
    """the shape of its images, or ()"""
    adapter: Any = None
    """the ``FrozenStates`` from which its sequences start, or None"""


def loaded(source: str, stop: str, weights: str | None = None, adapter: str = "") -> Loaded:
    """Load a model.

    Args:
        source: As the commands name it.
        stop: A token of the tokenizer that ends a stream, or "".
        weights: The kind to which its weights are rounded, as ``longspan.quantize`` does; None leaves them.
        adapter: What ``longspan finetune`` has written for it, or "".
    """
    found = Loaded(*_loaded(source, stop))
    if adapter:
        from ..finetune import adapted

        found = found._replace(adapter=adapted(found.model, adapter))
    if weights:
        from ..models.quantization import quantize

        quantize(found.model, weights)
    return found


def _loaded(source: str, stop: str) -> tuple[Any, Any, tuple[int, ...]]:
    from ..models import pretrained
    from ..serving import hub
    from ..serving.text import Bytes
    from ..serving.tokenized import Tokenized
    from . import trained

    if hub.is_foreign(source):
        return *hub.load(source, stop), ()
    model, name, *_ = trained.model(source, "", "decoder")
    if model.tokenizer:
        ends, forms = hub.ends(model.tokenizer, stop), pretrained.forms(source)
        return model, Tokenized(model.tokenizer, ends=ends, forms=forms), ()
    if stop:
        raise ValueError(f"--stop {stop!r} requires a model with a tokenizer; {source} has none")
    kind = trained.kind(name)
    return model, Bytes() if kind == "text" else None, trained.SHAPES[kind][0]


def _on_signals(server: Any, http: Any) -> None:
    """Stop accepting requests at the first SIGTERM or SIGINT, and exit immediately at the second."""

    def end(number: int, frame: Any) -> None:
        http.force_exit = http.should_exit
        http.should_exit = server.closing = True

    # uvicorn installs its handlers in ``run``; these come with the same rule and also refuse new streams.
    http.install_signal_handlers = lambda: None
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, end)
        http.capture_signals = _nothing


def _nothing() -> Any:
    import contextlib

    return contextlib.nullcontext()


def _announced(http: Any, args: Any, pool: Any, sockets: list[socket.socket]) -> Any:
    """Print where the server listens, once it does."""
    import contextlib

    from .. import states
    from ..serving.connection import BACKLOG

    @contextlib.contextmanager
    def context() -> Any:
        startup = http.startup

        async def then(*given: Any, **more: Any) -> None:
            await startup(*given, **more)
            if http.started:
                # Connections that wait take no file, so more may wait than are accepted together.
                for one in sockets:
                    one.listen(BACKLOG)
                port = sockets[0].getsockname()[1]
                host = f"[{args.host}]" if ":" in args.host else args.host
                size = states.nbytes(pool.state)
                print(
                    f"{args.model} at http://{host}:{port}/v1, {pool.slots} slots of {size // pool.slots:,} bytes",
                    flush=True,
                )

        http.startup = then
        yield

    return context()
