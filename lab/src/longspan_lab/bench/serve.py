"""Load on a pool and on the server: tokens per second, time to the first token, gaps, memory, and the bare step."""

import asyncio
import contextlib
import itertools
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from longspan._utils.machine import machine
from longspan._utils.optional_deps import need
from longspan.ops.buffers import reuse_pages
from longspan.serving import Pool, Sampling
from longspan.serving.pool import Stream

from .._utils.tables import Table, duration
from . import worker
from .candidates import Refused
from .case import Watch
from .guard import Guard, take_turns
from .options import length, option, rounds

POOL, HTTP = "pool", "HTTP"
PERCENT = (50, 99)
STEPS = 8  # timed in a row
LONG = 2000  # tokens of streams that do not end while they are timed
TEXT = "It was a bright cold day in April, and the clocks were striking thirteen. "


@dataclass(frozen=True)
class Options:
    """The settings of the benchmark."""

    model: str = "text"
    streams: tuple[int, ...] = (64, 512, 4096)
    prompt: int = length(32, "tokens of each prompt")
    tokens: int = length(64, "tokens drawn for each stream")
    rounds: int = rounds(5, "samples of a step; with --peer loads of each server")
    http: bool = option(True, "measure the pool only, without a server")


def step_seconds(pool: Pool, rounds: int) -> tuple[float, float]:
    """Median seconds of a full pool's step, and of the bare model step and draw on the same rows, in turns."""
    n, native = pool.live, pool.native
    tokens = torch.zeros(n, 1, dtype=torch.long)
    # The step that the pool makes, without its streams. Both overwrite the rows, whose content does not matter here.
    state = pytree.tree_map(lambda t: t[:n], pool.state)

    @torch.no_grad()
    def bare() -> None:
        nonlocal state
        outputs, state = native(tokens, state) if native is not None else pool.model(tokens, state, donate=True)
        pool.model.likelihood.sample(outputs[:, 0])

    def whole() -> None:
        if pool.step() != pool.slots:
            raise Refused("a stream ended while a full pool was timed")

    candidates = {"pool": whole, "bare": bare}
    found = take_turns({name: partial(_several, call) for name, call in candidates.items()}, rounds, Guard())
    return found["pool"].seconds, found["bare"].seconds


def _several(call: Callable[[], None]) -> float:
    """Seconds of one call of several in a row, after one that warms the caches."""
    call()
    begin = time.perf_counter()
    for _ in range(STEPS):
        call()
    return (time.perf_counter() - begin) / STEPS


def by_pool(model: Any, count: int, options: Options) -> dict[str, Any]:
    """Streams that all arrive at the same time, in this process."""
    # A step is timed several times, and again where the machine was busy.
    pool = Pool(model, slots=count, queue=count, capacity=options.prompt + LONG + 1)
    for i in range(count):
        pool.submit(_prompt(i, options.prompt), max_new_tokens=LONG, sampling=Sampling(seed=i))
    while pool.waiting:
        pool.step()
    whole, bare = step_seconds(pool, options.rounds)
    del pool
    pool = Pool(model, slots=count, queue=count, capacity=options.prompt + options.tokens + 1)
    times: dict[int, list[float]] = {i: [] for i in range(count)}
    places: dict[int, int] = {}

    def listener(stream: Stream, token: int | None) -> None:
        if token is not None:
            times[places[id(stream)]].append(time.perf_counter())

    begin = time.perf_counter()
    for i in range(count):
        (stream,) = pool.submit(
            _prompt(i, options.prompt), max_new_tokens=options.tokens, sampling=Sampling(seed=i), listener=listener
        )
        places[id(stream)] = i
    pool.run()
    row = {"way": POOL, "streams": count, **figures(times.values(), begin)}
    return row | {
        "step": whole,
        "bare_step": bare,
        "part_of_bare": bare / whole,
        "rss_mb": worker.status("VmRSS"),
        "state_mb": sum(t.nbytes for t in pytree.tree_leaves(pool.state)) / 2**20,
    }


def _prompt(i: int, length: int) -> list[int]:
    text = (f"{i} " + TEXT * (length // len(TEXT) + 1)).encode()
    return list(text[:length])


def figures(times: Iterable[list[float]], begin: float) -> dict[str, float]:
    """Rates and percentiles of streams: the times of their tokens, and when all were asked for."""
    streams = [one for one in times if one]
    first = sorted(one[0] - begin for one in streams)
    gaps = sorted(b - a for one in streams for a, b in itertools.pairwise(one))
    seconds = max(one[-1] for one in streams) - begin
    found = {"tokens_per_second": sum(map(len, streams)) / seconds, "seconds": seconds}
    for part in PERCENT:
        found |= {f"first_p{part}": percentile(first, part), f"gap_p{part}": percentile(gaps, part)}
    return found


def percentile(ordered: list[float], part: int) -> float:
    """The value that ``part`` percent of the values do not exceed.

    >>> percentile([1.0, 2.0, 3.0, 4.0], 50)
    2.0
    """
    return ordered[max(0, -(-len(ordered) * part // 100) - 1)] if ordered else float("nan")


def by_http(count: int, options: Options) -> dict[str, Any]:
    """The same through ``longspan serve`` in another process, streaming, one connection for each stream."""
    command = [sys.executable, "-m", "longspan", "serve", options.model, "--port", "0"]
    command += ["--slots", str(count), "--queue", str(count), "--no-playground"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            line = server.stdout.readline()
            port = re.search(r":(\d+)/v1", line)
            if port is None:
                raise Refused(f"the server did not start: {line.strip() or 'it printed nothing'}")
            begin, times = asyncio.run(_ask_all(int(port[1]), count, options))
            if missing := sum(len(one) != options.tokens for one in times):
                raise Refused(f"{missing} of {count} streams did not get {options.tokens} tokens")
            return {"way": HTTP, "streams": count, **figures(times, begin), "rss_mb": memory(server.pid, "VmRSS")}
        finally:
            server.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(60)
            server.kill()


async def _ask_all(port: int, count: int, options: Options) -> tuple[float, list[list[float]]]:
    begin = time.perf_counter()
    return begin, await asyncio.gather(*(_ask(port, i, options) for i in range(count)))


async def _ask(port: int, i: int, options: Options) -> list[float]:
    """Ask for one stream -> the time of each token. A plain client, since a library would take most of the cores."""
    prompt = bytes(_prompt(i, options.prompt)).decode()
    asked = {"prompt": prompt, "max_tokens": options.tokens, "seed": i, "stream": True, "logprobs": 0}
    body = json.dumps(asked).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    times: list[float] = []
    while line := await reader.readline():
        # An event has log-probabilities for each token, also where its bytes form no character yet.
        if line.startswith(b"data: {") and b'"token_logprobs": [' in line and b'"token_logprobs": []' not in line:
            times.append(time.perf_counter())
        elif line.startswith(b"data: [DONE]"):
            break
    writer.close()
    return times


def memory(pid: int, entry: str) -> float:
    """``VmRSS`` (resident now) or ``VmHWM`` (at most so far) of a process, in MB; NaN without /proc."""
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8") as file:
            return next(int(line.split()[1]) / 1024 for line in file if line.startswith(f"{entry}:"))
    except (OSError, StopIteration):
        return float("nan")


def run(model: Any, options: Options, watch: Watch) -> Generator[dict[str, Any], None, None]:
    """Measure a decoder; yield the growing result for ``report.collect``."""
    if options.http:
        need("the benchmark of the server", "starlette", "uvicorn", "prometheus_client")
    reuse_pages()  # as serve does
    rows: list[dict[str, Any]] = []
    left_out: list[dict[str, str]] = []
    ways = (POOL, HTTP) if options.http else (POOL,)
    todo = [(count, way) for count in options.streams for way in ways]
    for count, way in watch(todo, len(todo), "load"):
        try:
            rows.append(by_pool(model, count, options) if way == POOL else by_http(count, options))
        except (Refused, ValueError) as error:
            left_out.append({"candidate": f"{way}, {count} streams", "reason": str(error)})
        yield {
            "benchmark": "serve",
            "how": (
                f"{options.model}: all streams are asked for at the same time, each with a different prompt of "
                f"{options.prompt} tokens and {options.tokens} tokens to draw, and as many slots as streams; pool: "
                f"without HTTP, in one process; HTTP: longspan serve on loopback with one connection for each stream, "
                f"whose client runs on the same cores; first: seconds to the first token; gap: seconds between tokens "
                f"of a stream; step: a full pool's step, and bare: the model's step and a draw for the same rows, "
                f"medians of {options.rounds} in turns; resident memory after the last token"
            ),
            "machine": machine(),
            "options": asdict(options),
            "rows": rows,
            "refused": [],
            "left_out": left_out,
        }


def text(result: dict[str, Any]) -> list[Table]:
    """The tables: load by number of streams, and the step of a full pool."""
    load: Table = [
        ["streams", "way", "tokens/s", *(f"{what} p{part}" for what in ("first", "gap") for part in PERCENT), "MB"]
    ]
    steps: Table = [["streams", "step", "bare step", "bare / step", "state MB"]]
    for row in result["rows"]:
        spans = [duration(row[f"{what}_p{part}"]) for what in ("first", "gap") for part in PERCENT]
        load.append(
            [str(row["streams"]), row["way"], f"{row['tokens_per_second']:,.0f}", *spans, f"{row['rss_mb']:,.0f}"]
        )
        if "step" in row:
            part = f"{100 * row['part_of_bare']:.0f} %"
            sizes = [duration(row["step"]), duration(row["bare_step"]), part, f"{row['state_mb']:,.1f}"]
            steps.append([str(row["streams"]), *sizes])
    return [load, steps]
