"""What undoing tokens costs: an edit in a long prompt, drafts that are verified in one call, and texts with drafts."""

import importlib.util
import random
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from longspan import Decoder, DecoderConfig, generate, states
from longspan._utils.machine import machine
from longspan._utils.spec import known
from longspan.generation.native_decoder import Engine
from longspan.models import pretrained
from longspan.models.sampling import Sampling
from longspan.serving.pool import Pool

from .._utils.tables import Table, duration
from .case import Figure, Watch
from .guard import Guard, Timing, take_turns
from .options import length, option, rounds
from .worker import timed

DTYPES = ("float32", "bfloat16")
NEW = 8  # tokens of an edit
EDITS = 4  # at most, of models that read the whole prompt before each
AGAIN = "no states"  # the edited text is read from its start


@dataclass(frozen=True)
class Options:
    """The settings of the benchmark."""

    length: int = length(16384, "tokens of the edited prompt")
    rooms: tuple[int, ...] = option((16, 32), "states in the server's cache", "sizes")
    edits: int = rounds(12, "edits at random places")
    drafts: tuple[int, ...] = option((1, 2, 4, 8), "tokens read in one call", "sizes")
    tokens: int = option(200, "tokens of each text", "length")
    rounds: int = rounds(9)
    dtypes: tuple[str, ...] = option(DTYPES, " or ".join(DTYPES), "words", metavar="DTYPE,...")
    dim: int = option(768, "large model: width, in channels")
    depth: int = option(12, "large model: layers")
    heads: int = option(12, "large model: attention heads")

    def large(self, dtype: str) -> Decoder:
        """A decoder with random weights, larger than caches."""
        torch.manual_seed(0)
        config = DecoderConfig(
            dim=self.dim, depth=self.depth, heads=self.heads, attention="gated_deltanet(expand_v=1.0)", positions="none"
        )
        return Decoder(config).eval().to(getattr(torch, dtype))


def run(options: Options, watch: Watch) -> Generator[dict[str, Any], None, None]:
    """Measure; yield the growing result for ``report.collect``. Raises ValueError without the decode engine."""
    text, rows = pretrained.load("text"), []
    for dtype in options.dtypes:
        known(dtype, dict.fromkeys(DTYPES), "dtype")
    if reason := Engine.why_not(text):
        raise ValueError(f"drafts need the decode engine: {reason}")
    parts: list[tuple[str, Callable[[], list[dict[str, Any]]]]] = [
        (f"room for {room} states", partial(_edits, text, room, options)) for room in options.rooms
    ]
    if importlib.util.find_spec("transformers"):
        parts.append(("a model of transformers", partial(_peers, options)))
    parts.append(("the text model with drafts", partial(_texts, "text", text, options)))
    for dtype in options.dtypes:
        parts.append((f"verify in {dtype}", partial(_verify, dtype, options)))
    parts.append(("a large model with drafts", lambda: _texts("large", options.large("float32"), options)))
    for _, part in watch(parts, len(parts), "rewind"):
        rows += part()
        yield {
            "benchmark": "rewind",
            "how": _how(options),
            "machine": machine(),
            "options": asdict(options),
            "rows": list(rows),
        }


def _edits(model: Any, room: int, options: Options) -> list[dict[str, Any]]:
    """The time of edits at random places, with states of the prompt and without."""
    chance = random.Random(0)
    prompt = [chance.randrange(256) for _ in range(options.length)]
    state = model.init_state(1, 0)
    # What a cache has for each state, and the tokens, which it holds once.
    size = room * (states.nbytes(state) + 4 * model.likelihood.size) + 16 * options.length
    shares: dict[str, list[float]] = {f"{room} states": []}
    if room == options.rooms[0]:
        shares[AGAIN] = []
    whole = []
    for edit in range(options.edits):
        place = chance.randrange(1, options.length)
        edited = prompt[:place] + [chance.randrange(256) for _ in range(NEW)]
        pool = Pool(model, slots=1, prefix_bytes=size)
        whole.append(_read(pool, prompt))
        shares[f"{room} states"].append(_read(pool, edited) / whole[-1])
        if AGAIN in shares and edit < 3:
            shares[AGAIN].append(_read(Pool(model, slots=1), edited) / whole[-1])
    return [
        {
            "part": "edit",
            "candidate": name,
            "samples": len(found),
            "whole": fmean(whole),
            "share": fmean(found),
            "worst": max(found),
        }
        for name, found in shares.items()
    ]


def _peers(options: Options) -> list[dict[str, Any]]:
    from .rewind_peers import edits

    return list(edits(options.length, NEW, options.rooms[0], min(EDITS, options.edits)))


def _read(pool: Pool, tokens: list[int]) -> float:
    """Seconds of the processor until a prompt has its first token."""
    begin = time.process_time()
    pool.submit(tokens, max_new_tokens=1, sampling=Sampling(temperature=0.0))
    pool.run()
    return time.process_time() - begin


@torch.no_grad()
def _verify(dtype: str, options: Options) -> list[dict[str, Any]]:
    model = options.large(dtype)
    if reason := Engine.why_not(model):
        raise ValueError(f"drafts need the decode engine: {reason}")
    engine = Engine(model)
    calls: dict[str, Callable[[], object]] = {"step": _stepping(engine)}
    calls |= {f"verify {count}": _verifying(engine, count) for count in options.drafts}
    figures = _timed(calls, options.rounds)
    one = figures["step"].seconds
    return [
        {"part": "verify", "candidate": name, "dtype": dtype, **figure.row(), "steps": figure.seconds / one}
        for name, figure in figures.items()
    ]


def _stepping(engine: Engine) -> Callable[[], object]:
    state: Any = engine.model.init_state(1)
    token = torch.ones(1, 1, dtype=torch.long)

    def step() -> None:
        nonlocal state
        _, state = engine(token, state)

    return step


def _verifying(engine: Engine, count: int) -> Callable[[], object]:
    """Read ``count`` tokens, and undo all of a draft but the first."""
    state: Any = engine.model.init_state(1)
    tokens = torch.arange(count)[None] % 256

    def verify() -> None:
        nonlocal state
        _, state = engine.verify(tokens, state)
        state = states.rewind(state, tokens=count // 2)

    return verify


def _texts(name: str, model: Any, options: Options) -> list[dict[str, Any]]:
    """The time of texts with drafts of several kinds; each text is compared with that without."""
    prompt, rows = torch.tensor([list(b"to be, or not to be, that is the question: to be, or not to")]), []
    for how, temperature in (("greedy", 0.0), ("drawn", 1.0)):
        write = partial(generate, model, prompt, max_new_tokens=options.tokens, temperature=temperature, seed=1)
        plain = write()
        both = torch.cat([prompt, plain], 1)

        def right(tokens: Tensor, count: int, both: Tensor = both) -> Tensor:
            return both[:, tokens.shape[1] : tokens.shape[1] + count]

        def wrong(tokens: Tensor, count: int, right: Any = right) -> Tensor:
            return (right(tokens, count) + 1) % 256

        drafts: dict[str, Any] = {"prompt lookup": "prompt-lookup", "right drafts": right, "wrong drafts": wrong}
        for draft, given in drafts.items():
            if not torch.equal(write(draft=given), plain):
                raise AssertionError(f"{draft} changed the text of {name}")
        figures = _timed(
            {"no drafts": write} | {draft: partial(write, draft=given) for draft, given in drafts.items()},
            max(1, options.rounds // 3),
        )
        for draft, figure in figures.items():
            speed = figures["no drafts"].seconds / figure.seconds
            rows.append(
                {"part": "text", "candidate": draft, "model": name, "text": how, **figure.row(), "speed": speed}
            )
    return rows


def _timed(calls: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, Figure]:
    for call in calls.values():
        call()
    timings: dict[str, Timing] = take_turns(
        {name: partial(timed, call) for name, call in calls.items()}, rounds, Guard()
    )
    return {
        name: Figure(t.seconds, min(t.samples), len(t.samples), 1, t.rejected, t.disturbed)
        for name, t in timings.items()
    }


def _how(options: Options) -> str:
    return (
        f"an edit is {NEW} new tokens at a random place of a prompt of {options.length} tokens that the pool has read "
        f"(pretrained text model, one stream, {options.edits} edits, processor time until the first token, as share of "
        f"the whole prompt's); {AGAIN}: the edited text is read from its start, as transformers does, whose caches "
        f"cannot return to a token of a recurrent layer that they have left; Mamba-2: a small model "
        f"with random weights in a pool, in transformers, and in llama.cpp with its own checkpoints where xllamacpp is "
        f"installed, {EDITS} edits at most; verify: medians of "
        f"{options.rounds} rounds in turns, one sequence, gated delta rule, {options.dim} channels, {options.depth} "
        f"layers, each call undoes half of the tokens of the call before; texts: {options.tokens} tokens, equal to "
        f"those without drafts, right drafts: all tokens are accepted, wrong drafts: none is"
    )


def text(result: dict[str, Any]) -> list[Table]:
    """The tables of a result."""
    rows = result["rows"]
    edits: Table = [["an edit", "of the whole prompt, mean", "worst", "whole prompt"]]
    verify: Table = [["one call", "time", "single steps"]]
    texts: Table = [["text", "time", "speed-up"]]
    for row in rows:
        name = row["candidate"]
        if row["part"] == "edit":
            edits.append([name, f"{row['share']:.3f}", f"{row['worst']:.3f}", duration(row["whole"])])
        elif row["part"] == "verify":
            verify.append([f"{name}, {row['dtype']}", duration(row["seconds"]), f"{row['steps']:.2f}"])
        else:
            what = f"{row['model']}, {row['text']}, {name}"
            texts.append([what, duration(row["seconds"]), f"{row['speed']:.2f}"])
    return [table for table in (edits, texts, verify) if len(table) > 1]
