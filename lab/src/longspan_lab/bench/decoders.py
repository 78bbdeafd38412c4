"""Whole decoders as subjects: ``SPEC[@plain|@engine][@bf16]``, one token at a time."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from longspan._utils.spec import known
from longspan.generation.native_decoder import Engine
from longspan.models.config import DecoderConfig
from longspan.models.decoder import Decoder, DecoderState
from longspan.states import nbytes

from .throughput import move
from .worker import Function, Makers, Task, timed

AHEAD = 32  # steps from one position before the state is moved back to it
SHAPE = ("dim", "depth", "heads", "feedforward", "vocab", "prenorm")

Step = Callable[[Tensor, DecoderState], tuple[Tensor, DecoderState]]
"""tokens (B,1), state -> outputs (B,1,vocab), state; the state may be overwritten"""


@dataclass(frozen=True)
class Name:
    """A candidate's name, read."""

    spec: str
    engine: bool
    half: bool


def read(text: str) -> Name:
    """Read a candidate's name. Raises ValueError for a suffix that is not known; the model is built later."""
    spec, *suffixes = text.split("@")
    for suffix in suffixes:
        known(suffix, dict.fromkeys(("plain", "engine", "bf16")), "suffix of a candidate")
    if len(set(suffixes)) < len(suffixes) or {"plain", "engine"} <= set(suffixes):
        raise ValueError(f"candidate {text!r} must have exactly one of @plain and @engine")
    return Name(spec, "engine" in suffixes, "bf16" in suffixes)


def config(name: Name, task: Task) -> DecoderConfig:
    """The decoder of a candidate at the sizes of a task."""
    return DecoderConfig(attention=name.spec, positions="none", **{field: task[field] for field in SHAPE})


def build(name: Name, task: Task, weights: dict[str, Tensor] | None = None) -> Decoder:
    """A decoder with these weights, or with those that training would start from."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model = Decoder(config(name, task)).eval()
    if weights is not None:
        model.load_state_dict(weights)
    return model.to(torch.bfloat16) if name.half else model


def stepping(name: Name, model: Decoder) -> Step:
    """How the candidate steps. Raises ValueError where it names the engine, which does not serve the model."""
    return Engine(model) if name.engine else lambda tokens, state: model(tokens, state, donate=True)


def makers(text: str) -> Makers:
    """The makers of a candidate. Raises ValueError as ``read`` does."""
    name = read(text)

    def make(task: Task, weights: dict[str, Tensor] | None) -> Callable[[], Function]:
        model = build(name, task, weights)
        step = stepping(name, model)

        def begin() -> Function:
            state = model.init_state(task["batch"], 64)

            def one(tokens: Tensor) -> Tensor:
                nonlocal state
                outputs, state = step(tokens, state)
                return outputs[:, -1]

            return one

        return begin

    return {"model": make}


def sampler(step: Step, state: DecoderState, position: int) -> Callable[[int], float]:
    """Times steps from ``position`` on; the state, which has ``AHEAD`` more slots, is moved back to it now and then."""
    tokens, current = torch.zeros(len(state.position), 1, dtype=torch.long), state
    count = 0

    @torch.no_grad()
    def one() -> None:
        nonlocal current, count
        if count % AHEAD == 0:
            current = move(state, position)
        count += 1
        _, current = step(tokens, current)

    def sample(repeat: int) -> float:
        nonlocal count
        count = 0
        return timed(one, repeat)

    return sample


def cache_megabytes(model: Decoder, batch: int, capacity: int) -> float:
    """MB of a state with that many slots, without making it."""
    few, more = (nbytes(model.init_state(1, slots).layers) for slots in (8, 16))
    return batch * (few + (more - few) / 8 * (capacity - 8)) / 2**20


def random_weights(config: DecoderConfig) -> dict[str, Tensor]:
    """Weights under which every part of a decoder matters to its outputs, unlike those that training starts from."""
    generator = torch.Generator().manual_seed(0)
    found = {}
    for name, tensor in Decoder(config).state_dict().items():
        noise = torch.randn(tensor.shape, generator=generator)
        if tensor.dim() == 2:
            found[name] = noise / (1 if name.startswith("embedding") else math.sqrt(tensor.shape[1]))
        else:
            found[name] = 0.1 * noise + (name.endswith("weight"))
    return found


def bounds(model: Decoder, batch: int) -> dict[str, Callable[[], object]]:
    """What no step can do without: reading the parameters, the products of the linear maps, the state's traffic.

    Their names end in bf16 for a model with such weights.
    """
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    flat = torch.ones(size // 4)
    weights = [m.weight.detach() for m in model.modules() if isinstance(m, torch.nn.Linear)]
    products = [
        (torch.ones(batch, w.shape[1], dtype=w.dtype), w.mT, torch.ones(batch, w.shape[0], dtype=w.dtype))
        for w in weights
    ]
    states = [tensor for layer in model.init_state(batch).layers for tensor in layer if tensor.is_floating_point()]

    def gemm() -> None:
        for x, w, out in products:
            torch.mm(x, w, out=out)

    def state() -> None:
        for tensor in states:
            tensor.mul_(1.0)

    kind = " bf16" if model.head.weight.dtype == torch.bfloat16 else ""
    return {f"parameters{kind}": lambda: flat.sum(), f"gemm{kind}": gemm, f"state{kind}": state}


def shape(config: DecoderConfig) -> dict[str, Any]:
    """The fields of a config that a task has."""
    fields = asdict(config)
    return {field: fields[field] for field in SHAPE}
