"""How fast a decoder generates: steps timed at several positions and integrated, or whole runs."""

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch

from longspan.generation.sampling import generate
from longspan.models.decoder import Decoder, DecoderState
from longspan.ops.buffers import reuse_pages
from longspan.states.kv_cache import KeyValues

from .guard import Guard, Timing, interleave


def state_at(model: Decoder, batch: int, position: int, capacity: int) -> DecoderState:
    """A state as large as the one after ``position`` tokens, made of random numbers: timing does not need true ones.

    Every slot is written, since memory that was never touched would be read faster than a real cache. The sequences
    and heads share their numbers, which are many: drawing each would take longer than the timing.
    """
    fresh = model.init_state(batch, capacity)
    return move(DecoderState(fresh.position, tuple(_filled(layer) for layer in fresh.layers)), position)


def _filled(state: Any) -> Any:
    if not isinstance(state, KeyValues):
        return state
    keys, values = (t.copy_(torch.randn_like(t[:1, :1]).expand_as(t)) for t in (state.keys, state.values))
    return state._replace(keys=keys, values=values)


def move(state: DecoderState, position: int) -> DecoderState:
    """The same memory, with ``position`` tokens in use."""
    at = torch.full_like(state.position, position)
    layers = tuple(s._replace(length=at.clone()) if isinstance(s, KeyValues) else s for s in state.layers)
    return DecoderState(at, layers)


def stepper(model: Decoder, state: DecoderState, position: int) -> Callable[[], None]:
    """A call that generates one token per sequence at ``position``, sampling included, always at the same position."""
    tokens = torch.zeros(len(state.position), 1, dtype=torch.long)

    @torch.no_grad()
    def step() -> None:
        outputs, _ = model(tokens, move(state, position), donate=True)
        model.likelihood.sample(outputs[:, 0])

    return step


def recomputer(model: Decoder, batch: int, position: int) -> Callable[[], None]:
    """A call that generates the token at ``position`` without a state: the whole prefix is read again."""
    tokens = torch.zeros(batch, position + 1, dtype=torch.long)

    @torch.no_grad()
    def recompute() -> None:
        outputs, _ = model(tokens)
        model.likelihood.sample(outputs[:, -1])

    return recompute


def positions(length: int, count: int = 9) -> list[int]:
    """``count`` positions from the first to the last of ``length``, evenly spread."""
    return sorted({round(i * (length - 1) / (count - 1)) for i in range(count)})


def integrate(at: Sequence[int], seconds: Sequence[float], length: int) -> float:
    """Seconds of ``length`` steps, one per position, from those timed at a few: straight lines between them.

    >>> integrate([0, 3], [1.0, 4.0], 4)
    10.0
    """
    total = seconds[-1]
    for (a, x), (b, y) in pairwise(zip(at, seconds, strict=True)):
        # Positions a ... b-1 of the line from (a, x) to (b, y).
        total += sum(x + (y - x) * (i - a) / (b - a) for i in range(a, b))
    assert at[0] == 0
    assert at[-1] == length - 1
    return total


def by_position(
    models: dict[str, Decoder], length: int, batch: int, rounds: int, tick: Callable[[], None] = lambda: None
) -> dict[str, dict[int, Timing]]:
    """Time one step of each model at each of 9 positions, interleaved -> model -> position -> timing.

    Models whose name ends with ``recompute`` read their prefix again, at batch 1; the others keep a state.
    """
    reuse_pages()  # as generate does
    at = positions(length)
    states = {
        name: state_at(model, batch, 0, length) for name, model in models.items() if not name.endswith("recompute")
    }
    found: dict[str, dict[int, Timing]] = {name: {} for name in models}
    guard = Guard()
    for position in at:
        candidates = {
            name: stepper(model, states[name], position) if name in states else recomputer(model, 1, position)
            for name, model in models.items()
        }
        for name, timing in interleave(candidates, rounds, guard).items():
            found[name][position] = timing
        tick()
    return found


def whole(model: Decoder, length: int, batch: int) -> float:
    """Seconds to generate ``batch`` sequences of ``length`` tokens with ``generate``."""
    begin = time.perf_counter()
    consume(generate(model, max_new_tokens=length, batch=batch, seed=0, stream=True))
    return time.perf_counter() - begin


@torch.no_grad()
def whole_recomputed(model: Decoder, length: int, batch: int) -> float:
    """Seconds to generate them when every token reads its whole prefix again."""
    begin = time.perf_counter()
    tokens = torch.full((batch, 1), model.start)
    for _ in range(length):
        token = model.likelihood.sample(model(tokens)[0][:, -1])
        tokens = torch.cat([tokens, token[:, None]], 1)
    return time.perf_counter() - begin


def consume(items: Iterable[object]) -> None:
    """Run an iterator to its end."""
    for _ in items:
        pass
