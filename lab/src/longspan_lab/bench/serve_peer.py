"""``longspan serve`` and another server on the same folder of a recurrent model: the same greedy requests, in turn."""

import asyncio
import contextlib
import importlib
import importlib.metadata
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from longspan._utils.machine import machine
from longspan._utils.optional_deps import need
from longspan._utils.spec import known
from longspan.serving import hub

from .._utils.tables import Table, duration
from . import hybrids, serve
from .candidates import Refused
from .case import Watch

OURS = "longspan"
START = 300.0  # seconds until a server listens
LIMIT = 1800.0  # seconds of one load
WARM = 2  # tokens of the streams before those that are measured


@dataclass(frozen=True)
class Options:
    """The settings of the comparison."""

    peer: str = "transformers"
    model: str = "mamba2"
    """a folder of a model, or a name of ``hybrids.MODELS``, whose folder with random weights is made"""
    streams: tuple[int, ...] = (1, 8, 64)
    prompt: int = 32
    """tokens of each prompt"""
    tokens: int = 64
    """tokens drawn for each stream"""
    rounds: int = 5
    """loads of each server, of which the one with the median time is reported"""


class Peer(NamedTuple):
    """Another server with the interface of OpenAI's completions."""

    modules: tuple[str, ...]
    install: str
    ways: dict[str, Callable[[str], list[str]]]
    """name -> the command that serves a folder and prints its address; the first one has to start"""


def _transformers(folder: str) -> list[str]:
    return [
        *(sys.executable, "-m", "transformers.cli.transformers", "serve", folder),
        *("--device", "cpu", "--host", "127.0.0.1", "--port", "0"),
    ]


PEERS = {
    "transformers": Peer(
        modules=("transformers", "fastapi", "uvicorn", "openai", "pydantic"),
        install='pip install "transformers[serving]"',
        ways={
            "transformers": _transformers,
            "transformers, continuous batching": lambda folder: [*_transformers(folder), "--continuous-batching"],
        },
    )
}


class Prompt(NamedTuple):
    """A text, and the number of its tokens."""

    text: str
    tokens: int


class Answer(NamedTuple):
    """What a server sent for one request."""

    times: list[float]
    """of the events that have text"""
    text: str
    prompt: int
    """tokens of the prompt, as the server counts them"""
    tokens: int
    """tokens drawn, as the server counts them"""


class NotStarted(Refused):
    """A server ended, or did not listen in time."""


def run(options: Options, watch: Watch) -> Generator[dict[str, Any], None, None]:
    """Measure both servers; yield the growing result for ``report.collect``.

    Raises:
        ImportError: A package is missing; the message says what to install.
        ValueError: The model is not known, or a server does not start.
    """
    peer = PEERS[known(options.peer, PEERS, "peer")]
    if missing := [name for name in peer.modules if find_spec(name) is None]:
        raise ImportError(f"missing for --peer {options.peer}: {', '.join(missing)}; {peer.install}", name=missing[0])
    need("longspan serve", "starlette", "uvicorn", "prometheus_client", "tokenizers")
    with tempfile.TemporaryDirectory() as made:
        folder, about = options.model, f"the folder {options.model}"
        if not hub.is_foreign(folder):
            folder = make_folder(options.model, made)
            about = f"{hybrids.MODELS[options.model][2]}, in float32 with random weights and a token for each character"
        yield from _compared(peer, folder, about, options, watch)


def make_folder(name: str, folder: str) -> str:
    """Write a model of ``hybrids.MODELS`` with random weights and a tokenizer of characters; return the folder.

    Every token is a character, so each event of a stream has the text of one token, whatever a model draws. Prompts are
    ASCII, whose other characters are unknown to a small vocabulary.

    Raises:
        ValueError: The name is not known.
    """
    known(name, hybrids.MODELS, "model", "; or a folder with a config.json of transformers")
    model = hybrids.model(name, "float32", small=False)
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    ascii, others = range(ord(" "), ord("~") + 1), range(0x20000, 0x2A6E0)  # the latter are ideographs
    letters = [chr(code) for code in (*ascii, *others)][: model.config.vocab_size]
    tokenizer = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(letters)}, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")  # pyright: ignore[reportAttributeAccessIssue] (missing in the stubs)
    tokenizer.decoder = decoders.Fuse()  # pyright: ignore[reportAttributeAccessIssue] (missing in the stubs)
    importlib.import_module("transformers.utils.logging").disable_progress_bar()
    model.save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False).save_pretrained(folder)
    return folder


def prompts(folder: str, count: int, length: int) -> list[Prompt]:
    """Return different texts of about this number of tokens, and their exact numbers.

    Raises:
        ValueError: The folder has no tokenizer.json.
    """
    from tokenizers import Tokenizer

    path = Path(folder) / hub.TOKENIZER
    if not path.is_file():
        raise ValueError(f"{folder} has no {hub.TOKENIZER}, by which both servers read text")
    tokenizer = Tokenizer.from_file(str(path))
    found = []
    for i in range(count):
        # Each repetition has at least one token.
        ids = tokenizer.encode(f"{i} " + serve.TEXT * length, add_special_tokens=False).ids[:length]
        text = tokenizer.decode(ids)
        found.append(Prompt(text, len(tokenizer.encode(text).ids)))
    return found


def _compared(
    peer: Peer, folder: str, about: str, options: Options, watch: Watch
) -> Generator[dict[str, Any], None, None]:
    rows: list[dict[str, Any]] = []
    left_out: dict[str, str] = {}
    ours: dict[int, list[str]] = {}
    required = (OURS, next(iter(peer.ways)))
    todo = [(count, way) for count in options.streams for way in (OURS, *peer.ways)]
    for count, way in watch(todo, len(todo), "load"):
        # One that fails for fewer streams is not tried with more.
        if way not in left_out:
            asked = prompts(folder, count, options.prompt)
            command = _ours(folder, asked, options) if way == OURS else peer.ways[way](folder)
            try:
                row, texts = measured(way, command, asked, options)
                ours.setdefault(count, texts)
                same = sum(a == b for a, b in zip(texts, ours[count], strict=True)) if OURS not in left_out else None
                rows.append(row | {"equal_texts": same})
            except NotStarted as error:
                if way in required:
                    raise ValueError(f"{error}; {peer.install}" if way != OURS else str(error)) from error
                left_out[way] = str(error)
            except Refused as error:
                left_out[way] = f"{count} stream{'s' * (count > 1)}: {error}"
        yield {
            "benchmark": "serve_peer",
            "how": (
                f"{about}; each server in turn, started for each number of streams, over HTTP on loopback, with a "
                f"client that runs on the same cores; all streams are asked for at the same time, each with a "
                f"different prompt of {options.prompt} tokens and {options.tokens} tokens to draw greedily, after "
                f"{WARM} tokens of each as a warm-up; the load with the median time of {options.rounds}; tokens by the "
                f"servers' counts; first: seconds to the first token; gap: seconds between events of a stream with "
                f"text; MB: peak resident memory of the server; equal texts: streams with the text that longspan draws"
            ),
            "machine": machine() | _versions(peer),
            "options": asdict(options),
            "rows": rows,
            "refused": [],
            "left_out": [{"candidate": way, "reason": reason} for way, reason in left_out.items()],
        }


def _versions(peer: Peer) -> dict[str, str]:
    found = {}
    for name in peer.modules[:2]:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _ours(folder: str, asked: list[Prompt], options: Options) -> list[str]:
    count, longest = str(len(asked)), max(prompt.tokens for prompt in asked) + options.tokens
    return [
        *(sys.executable, "-m", "longspan", "serve", folder, "--port", "0", "--no-playground"),
        *("--slots", count, "--queue", count, "--capacity", str(longest + 1), "--max-tokens", str(options.tokens)),
    ]


def measured(way: str, command: list[str], asked: list[Prompt], options: Options) -> tuple[dict[str, Any], list[str]]:
    """Start a server, ask for all streams several times; return the row of the median load, and its texts.

    Raises:
        NotStarted: The server ended, or did not listen in time.
        Refused: A request failed, or did not get its tokens.
    """
    with served(way, command) as server:
        _asked(server, asked, min(WARM, options.tokens))
        loads = [_asked(server, asked, options.tokens) for _ in range(options.rounds)]
        seconds = [max(answer.times[-1] for answer in answers) - begin for begin, answers in loads]
        begin, answers = loads[seconds.index(statistics.median_low(seconds))]
        row = {"way": way, "streams": len(asked), **serve.figures((answer.times for answer in answers), begin)}
        row["tokens_per_second"] = sum(answer.tokens for answer in answers) / row["seconds"]
        return row | {"peak_mb": serve.memory(server.process.pid, "VmHWM")}, [answer.text for answer in answers]


class Server(NamedTuple):
    """A server that runs."""

    process: subprocess.Popen
    port: int
    log: Path


@contextlib.contextmanager
def served(way: str, command: list[str]) -> Iterator[Server]:
    """Run a server until the block ends.

    Raises:
        NotStarted: The server ended, or did not listen in time; the message has the error that it printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        # The folder is local, so a hub need not be reached.
        environment = os.environ | {"HF_HUB_OFFLINE": "1"}
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        try:
            deadline = time.monotonic() + START
            while not (address := re.search(r"http://127\.0\.0\.1:(\d+)", _read(log))):
                if process.poll() is not None:
                    raise NotStarted(f"the server {way} ended with code {process.returncode}{_error(log)}")
                if time.monotonic() > deadline:
                    raise NotStarted(f"the server {way} did not listen within {START:.0f} seconds{_error(log)}")
                time.sleep(0.05)
            yield Server(process, int(address[1]), log)
        finally:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
            process.kill()
            process.wait()


def _read(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")


def _error(log: Path) -> str:
    """The last error in the log of a server, for the end of a message."""
    lines = [line.strip() for line in _read(log).splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(\w+\.)*\w*(Error|Exception)\b|error: ", line)]
    return f": {(errors or lines)[-1]}" if lines else ", and printed nothing"


def _asked(server: Server, asked: list[Prompt], tokens: int) -> tuple[float, list[Answer]]:
    """Ask for all streams at the same time; return when, and the answers."""

    async def together() -> tuple[float, list[Answer]]:
        begin = time.perf_counter()
        return begin, await asyncio.gather(*(_ask(server.port, prompt.text, tokens) for prompt in asked))

    try:
        begin, answers = asyncio.run(asyncio.wait_for(together(), LIMIT))
    except TimeoutError as error:
        raise Refused(f"the server did not answer within {LIMIT:.0f} seconds; its log{_error(server.log)}") from error
    except (Refused, OSError) as error:
        raise Refused(f"{error}; the server's log{_error(server.log)}") from error
    for prompt, answer in zip(asked, answers, strict=True):
        if (answer.prompt, answer.tokens) != (prompt.tokens, tokens):
            raise Refused(
                f"a stream read {answer.prompt} tokens and drew {answer.tokens}, not {prompt.tokens} and {tokens}"
            )
        if not answer.times:
            raise Refused("a stream has no text")
    return begin, answers


async def _ask(port: int, prompt: str, tokens: int) -> Answer:
    """Ask for one stream. Events are read first and parsed at the end, to leave the cores to the server."""
    asked = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}
    body = json.dumps(asked | {"stream_options": {"include_usage": True}}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        status = (await reader.readline()).split()
        if status[1:2] != [b"200"]:
            text = (await reader.read()).partition(b"\r\n\r\n")[2].decode(errors="replace")
            code = status[1].decode() if status[1:] else "none"
            raise Refused(f"status {code}: {' '.join(text.split())[:200]}")
        lines = []
        while line := await reader.readline():
            if line.startswith(b"data: {"):
                lines.append((time.perf_counter(), line))
    finally:
        writer.close()
    return _answer(lines)


def _answer(lines: list[tuple[float, bytes]]) -> Answer:
    times, pieces, usage = [], [], {}
    for at, line in lines:
        event = json.loads(line[len(b"data: ") :])
        if event.get("error"):
            raise Refused(f"an error in a stream: {str(event['error'])[:200]}")
        usage = event.get("usage") or usage
        if piece := "".join(choice.get("text") or "" for choice in event.get("choices", ())):
            times.append(at)
            pieces.append(piece)
    return Answer(times, "".join(pieces), usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0))


def text(result: dict[str, Any]) -> list[Table]:
    """The table of both servers by number of streams."""
    head = ["streams", "server", "tokens/s"]
    head += [f"{what} p{part}" for what in ("first", "gap") for part in serve.PERCENT]
    table: Table = [[*head, "peak MB", "equal texts"]]
    for row in result["rows"]:
        spans = [duration(row[f"{what}_p{part}"]) for what in ("first", "gap") for part in serve.PERCENT]
        same = "-" if row["equal_texts"] is None else f"{row['equal_texts']}/{row['streams']}"
        rate = f"{row['tokens_per_second']:,.0f}"
        table.append([str(row["streams"]), row["way"], rate, *spans, f"{row['peak_mb']:,.0f}", same])
    return [table]
