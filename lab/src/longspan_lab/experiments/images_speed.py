"""How fast trained decoders generate: whole images, and one token by the number of those before it."""

from dataclasses import replace
from functools import partial

import torch

from longspan.generation.native_decoder import Engine
from longspan.generation.sampling import generate
from longspan.models.decoder import Decoder
from longspan.ops.buffers import reuse_pages
from longspan.states import nbytes

from ..bench import case, decoders, throughput, worker
from ..bench.attention import ROOM
from ..bench.candidates import Sampler
from . import paper
from .experiment import Row, Track

RECOMPUTED = ", prefix recomputed"
FEW = 4  # batch size of recomputation: more images are not faster
POSITIONS = 5  # positions at which recomputation is timed
WARM = 16  # tokens


def images(models: dict[str, Decoder], length: int, batch: int, rounds: int, track: Track) -> Row:
    """Whole images of ``length`` tokens, generated with a state, and, where that grows or the publication has none, by
    recomputing the prefix.

    -> by candidate: ``seconds`` for ``images``, hence ``images_per_second``; ``rejected`` and ``disturbed``: samples
    taken while the machine was busy, and discarded or kept. All candidates take turns. Recomputation
    is timed at some positions, for few images, and integrated.
    """
    reuse_pages()  # as generate does
    samplers: dict[str, Sampler] = {}
    at = throughput.positions(length, min(POSITIONS, length))
    again = [name for name, model in models.items() if grows(model) or paper.recomputed(name)]
    for name, model in models.items():
        throughput.consume(generate(model, max_new_tokens=min(WARM, length), batch=batch, seed=0, stream=True))
        samplers[name] = partial(_whole, model, length, batch)
    few = min(FEW, batch)
    for name in again:
        for position in at:
            call = throughput.recomputer(models[name], few, position)
            call()
            samplers[f"{name} {position}"] = partial(worker.timed, call)
    figures, _ = case.take(samplers, rounds, f"images, {batch} at once", track, warm=False)
    seconds = {name: figures[name].seconds for name in models}
    counts = dict.fromkeys(models, batch)
    for name in again:
        steps = [figures[f"{name} {position}"].seconds for position in at]
        seconds[name + RECOMPUTED], counts[name + RECOMPUTED] = throughput.integrate(at, steps, length), few
    return {
        "seconds": seconds,
        "images": counts,
        "images_per_second": {name: counts[name] / seconds[name] for name in seconds},
        "rejected": sum(figure.rejected for figure in figures.values()),
        "disturbed": sum(figure.disturbed for figure in figures.values()),
    }


def token(models: dict[str, Decoder], tokens: int, batch: int, rounds: int, track: Track) -> Row:
    """One token of ``batch`` sequences when ``tokens`` were read before, by each model's fastest way, without drawing.

    -> by attention: ``seconds``; ``bytes`` of the states that these tokens need; ``left_out``: why there is no time.
    """
    reuse_pages()
    samplers: dict[str, Sampler] = {}
    held: dict[str, int] = {}
    left_out: dict[str, str] = {}
    for name, model in models.items():
        held[name] = batch * state_bytes(model, tokens)
        needed = decoders.cache_megabytes(model, batch, tokens + decoders.AHEAD)
        if needed > ROOM * case.available():
            left_out[name] = f"its states would need {needed:,.0f} MB of memory, and {case.available():,.0f} are free"
            continue
        longer = extended(model, tokens + decoders.AHEAD)
        step = decoders.stepping(decoders.Name(name, not Engine.why_not(longer), False), longer)
        state = throughput.state_at(longer, batch, tokens, tokens + decoders.AHEAD)
        samplers[name] = decoders.sampler(step, state, tokens)
    figures, _ = case.take(samplers, rounds, f"token {tokens} of {batch}", track)
    found = {name: figure.seconds for name, figure in figures.items()}
    return {"seconds": found, "bytes": held, "left_out": left_out}


def state_bytes(model: Decoder, tokens: int) -> int:
    """Bytes of the state of one sequence of that length."""
    return nbytes(model.init_state(1, tokens).layers)


def grows(model: Decoder) -> bool:
    """Whether the state grows with the length."""
    return state_bytes(model, 2) > state_bytes(model, 1)


def extended(model: Decoder, length: int) -> Decoder:
    """The model with its learned positions repeated up to ``length``, for timing only."""
    config = model.config
    if config.positions != "learned" or config.length >= length:
        return model
    with torch.random.fork_rng(devices=[]):
        other = Decoder(replace(config, length=length))
    weights = model.state_dict()
    name = "embedding.table.weight"
    weights[name] = weights[name].repeat(-(-length // config.length), 1)[:length]
    other.load_state_dict(weights)
    return other.eval()


def _whole(model: Decoder, length: int, batch: int, repeat: int) -> float:
    runs: list[float] = [throughput.whole(model, length, batch) for _ in range(repeat)]
    return sum(runs) / repeat
