"""``longspan serve``: a trained decoder behind OpenAI's completions."""

import signal
import threading
from pathlib import Path
from typing import Any

from .._utils.optional_deps import need
from .parser import Parser, make, natural_int


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
        help="a run, a checkpoint, a pretrained model such as text, or a folder with a config.json of transformers",
    )
    parser.add_argument("--host", type=str, default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=natural_int(65535), default=8000, help="port; 0 takes a free one")
    parser.add_argument("--slots", type=natural_int(1_000_000), default=64, help="streams that run at the same time")
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
    parser.add_argument("--prefix-mb", type=natural_int(10**6), default=0, help="memory for states of known beginnings")
    parser.add_argument(
        "--sessions",
        type=str,
        default="",
        metavar="DIR",
        help="folder that keeps sessions; without it they end with the server",
    )
    parser.add_argument("--session-mb", type=natural_int(10**9), default=1024, help="size of all sessions together")
    parser.add_argument("--max-tokens", type=natural_int(10**9), default=4096, help="largest max_tokens of a request")
    parser.add_argument("--api-key", type=str, default="", help="require the header Authorization: Bearer KEY")
    parser.add_argument("--name", type=str, default="", help="the model's name in requests; by default MODEL")
    parser.add_argument("--no-playground", action="store_true", help="do not serve the page for trying the model at /")
    parser.add_argument("--grace", type=natural_int(86400), default=30, help="seconds for running streams at the end")
    return parser


def run(args: Any) -> int:
    need("longspan serve", "starlette", "uvicorn", "prometheus_client")
    import uvicorn

    from ..ops.buffers import reuse_pages
    from ..serving import Pool, Sessions
    from ..serving.connection import protocol
    from ..serving.server import Limits, Server

    reuse_pages()
    model, codec, grid = _loaded(args.model, args.stop)
    pool = Pool(model, slots=args.slots, queue=args.queue, capacity=args.capacity, prefix_bytes=args.prefix_mb << 20)
    limits = Limits(tokens=args.max_tokens, connections=args.slots + args.queue + 1024)
    sessions = Sessions(pool, Path(args.sessions) if args.sessions else None, limit=args.session_mb << 20)
    server = Server(
        pool,
        name=args.name or args.model,
        codec=codec,
        api_key=args.api_key,
        limits=limits,
        sessions=sessions,
        grid=grid,
        playground=not args.no_playground,
    )
    config = uvicorn.Config(
        server.app,
        http=protocol(limits),
        ws="none",
        host=args.host,
        port=args.port,
        log_level="warning",
        timeout_graceful_shutdown=args.grace,
        lifespan="off",
    )
    http = uvicorn.Server(config)
    _on_signals(server, http)
    try:
        with _announced(http, args, pool):
            http.run()
    finally:
        server.close()
    return 0 if http.started else 2


def _loaded(source: str, stop: str) -> tuple[Any, Any, tuple[int, ...]]:
    """Load a model -> it, what turns its tokens into text or None, and the shape of its images or ()."""
    from ..models import pretrained
    from ..serving import hub
    from ..serving.text import Bytes
    from ..serving.tokenized import Tokenized
    from . import trained

    if not pretrained.is_pretrained_name(source) and hub.is_folder(source):
        return *hub.load(source, stop), ()
    model, name, *_ = trained.model(source, "", "decoder")
    if model.tokenizer:
        return model, Tokenized(model.tokenizer, ends=hub.ends(model.tokenizer, stop)), ()
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


def _announced(http: Any, args: Any, pool: Any) -> Any:
    """Print where the server listens, once it does."""
    import contextlib

    from .. import states

    @contextlib.contextmanager
    def context() -> Any:
        startup = http.startup

        async def then(*given: Any, **more: Any) -> None:
            await startup(*given, **more)
            if http.started:
                port = http.servers[0].sockets[0].getsockname()[1]
                size = states.nbytes(pool.state)
                print(
                    f"{args.model} at http://{args.host}:{port}/v1, {pool.slots} slots of {size // pool.slots:,} bytes",
                    flush=True,
                )

        http.startup = then
        yield

    return context()
