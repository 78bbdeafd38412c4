"""The stages of each mixer that the decode engine supports, on a row of activations per sequence."""

import ctypes
import math
from collections.abc import Callable
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..attention.deltanet import DeltaNet, DeltaNetState
from ..attention.gated_deltanet import GatedDeltaNet, GatedDeltaNetState
from ..attention.gla import GLA, GLAState
from ..attention.kda import KDA, KDAState
from ..attention.linear import Linear, LinearRotaryState, LinearState
from ..attention.retention import Retention, RetentionRotaryState, RetentionState
from ..attention.softmax import Softmax
from ..attention.ssd import SSD, SSDState
from ..modules.norms import HeadNorm
from ..modules.quantized import QuantizedEmbedding, QuantizedLinear
from ..modules.short_conv import ShortConvolution
from ..ops.native import decode
from ..ops.native.call import LARGEST, MAPS
from ..states.kv_cache import KeyValues

GATED = 128  # channels of a gate in one unit of work
Part = tuple[torch.dtype, tuple[int, ...]]
COUNT: Part = torch.int64, ()  # a counter of tokens


class Layout(NamedTuple):
    """The state of a mixer: its class, and dtype and shape of each tensor without the batch; -1 is any size."""

    kind: type
    parts: tuple[Part, ...]


class Heads(NamedTuple):
    """The heads of a recurrence, and the channels of keys and values."""

    values: int
    keys: int
    sizes: tuple[int, int]


class Row:
    """Builds the stages of a branch, such as those of a mixer.

    The activations of a sequence are a row, in which each part has a fixed place, given by its first channel; -1 is
    none.

    Args:
        weights: Keeps the copies of the mixer's weights.
    """

    def __init__(self, weights: decode.Weights):
        self.weights, self.width = weights, 0
        self.stages: list[Any] = []
        self.waits: list[bool] = []
        self.arrays: list[Any] = []  # what structures point to

    def part(self, width: int) -> int:
        """Return the place of a new part."""
        self.width += width
        return self.width - width

    def add(self, stage: Any) -> None:
        """Add a stage, which may run at the same time as others since the last ``wait``."""
        self.stages.append(stage)
        self.waits.append(False)

    def wait(self) -> None:
        """Let the following stages read what the stages so far have written."""
        self.waits[-1] = True

    def branch(
        self,
        out: nn.Linear | QuantizedLinear | None,
        mixed: int,
        before: decode.Norm,
        after: decode.Norm | None = None,
        factor: float = 1.0,
    ) -> decode.Branch:
        """Return the branch whose output is the part ``mixed``, or a map of it; it lives as long as this row."""
        stages = [
            decode.Stage(ctypes.addressof(stage), stage.kind, wait)
            for stage, wait in zip(self.stages, self.waits, strict=True)
        ]
        return decode.Branch(
            before,
            after or decode.Norm(),
            decode.Linear() if out is None else linear_map(self.weights, out),
            self.array(decode.Stage, stages),
            len(stages),
            self.width,
            mixed,
            factor,
        )

    def array(self, kind: Any, items: list[Any]) -> int:
        """Return the address of structures; they live as long as this row."""
        self.arrays.append((kind * len(items))(*items))
        return ctypes.addressof(self.arrays[-1])

    def arrange(self, at: int, order: Tensor) -> int:
        """Copy a part into a new one -> its place; number i of the new one is number ``order[i]`` of the part."""
        # In runs, as long as possible.
        ends = (order.diff() != 1).nonzero()[:, 0] + 1
        size = math.gcd(len(order), *ends.tolist())
        to, places = self.part(len(order)), self.weights.order(order[::size])
        self.add(decode.Arrange(places, at, to, len(order) // size, size))
        return to

    def project(
        self, *maps: nn.Linear | QuantizedLinear | None, start: int = -1, activation: str = "identity"
    ) -> list[int]:
        """Project a part, by default the input of the branch -> the places of the results, which are adjacent."""
        places = [-1 if m is None else self.part(m.out_features) for m in maps]
        given = [(m, place) for m, place in zip(maps, places, strict=True) if m is not None]
        before, kind = None, (decode.ACTIVATIONS | decode.GATES)[activation]
        # Adjacent plain maps become one if they are packed. Quantized ones share the input in the form that they need.
        for alone, found in groupby(given, lambda pair: not self.weights.packs or isinstance(pair[0], QuantizedLinear)):
            run = list(found)
            if not alone:
                packed = self.weights.linear([m.weight for m, _ in run], [m.bias for m, _ in run])
                self.add(decode.Project(packed, start, run[0][1], kind))
            for m, place in run if alone else []:
                mapped = linear_map(self.weights, m)
                how = mapped.format, mapped.activations
                mapped.prepared = isinstance(m, QuantizedLinear) and before == how
                self.add(decode.Project(mapped, start, place, kind))
                before = how if isinstance(m, QuantizedLinear) else before
        return places

    def convolve(self, mix: ShortConvolution | None, at: int, width: int, bias: Tensor | None = None) -> None:
        """The short convolution with silu in place; without a convolution bias and silu."""
        if mix is None:
            self.curve("silu", at, width, bias=bias)
        else:
            self.add(decode.Convolve(self.weights.taps(mix.weight, bias), at, width, mix.width, mix.width - 1, 0, 0))

    def curve(
        self,
        activation: str,
        at: int,
        width: int,
        *,
        bias: Tensor | None = None,
        slope: Tensor | None = None,
        factor: Tensor | None = None,
        to: int = -1,
    ) -> None:
        """factor * activation(slope * (x + bias)), numbers or (width,); in place unless there is ``to``."""
        numbers = [
            None if t is None else self.weights.numbers(t.flatten().expand(width)) for t in (bias, slope, factor)
        ]
        self.add(decode.Curve(*numbers, at, at if to < 0 else to, width, decode.GATES[activation]))

    def scale(self, at: int, width: int, *, by: int | Tensor, size: int, to: int, add: int = -1) -> None:
        """add + x * by, where by is a part or constants, one number for each ``size`` channels."""
        constants = self.weights.numbers(by) if isinstance(by, Tensor) else None
        self.add(decode.Scale(constants, at, by if isinstance(by, int) else -1, add, to, width, size))

    def gate(self, activation: str, at: int, by: int, width: int) -> None:
        """by * activation(x), in place of ``by``."""
        groups = width // GATED if width % GATED == 0 else 1
        size, kind = width // groups, (decode.ACTIVATIONS | decode.GATES)[activation]
        self.add(decode.Gate(at, size, by, groups, size, kind))

    def turn(self, base: float, at: int, heads: int, size: int) -> None:
        """Rotate adjacent heads in place."""
        self.add(decode.Turn(self.rates(base, size), at, heads, size, size))

    def rates(self, base: float, size: int) -> int | None:
        """Return the address of the angles per position, None without rotary positions."""
        if not base:
            return None
        half = size // 2
        # As modules.rotary has them, so that the angles are the same to the last bit.
        return self.weights.numbers(base ** (torch.arange(half, dtype=torch.float32, device="cpu") / -half))

    def recur(
        self,
        query: int,
        key: int,
        value: int,
        *,
        to: int,
        heads: Heads,
        decay: str | None = None,
        log_decay: int | Tensor = -1,
        beta: int = -1,
        normalize: bool = False,
        scale: float | None = None,
    ) -> None:
        """``gated.recur`` for one token; log decays are a part, or constants (H,) that all sequences share."""
        constants = self.weights.numbers(log_decay) if isinstance(log_decay, Tensor) else None
        place = log_decay if isinstance(log_decay, int) else -1
        counts = heads.values, heads.keys, *heads.sizes, decode.DECAYS[decay], normalize
        factor = heads.sizes[0] ** -0.5 if scale is None else scale
        self.add(decode.Recur(constants, query, key, value, place, beta, to, *counts, factor))

    def head_norm(self, norm: HeadNorm, at: int, heads: int, size: int, gate: int = -1) -> None:
        """The norm of each head in place, multiplied by its gate."""
        weight = None if norm.weight is None else self.weights.numbers(norm.weight)
        activation = decode.GATES["identity" if norm.gate == "none" else norm.gate]
        centered = norm.kind == "group"
        self.add(decode.HeadNorm(weight, at, heads, size, size, 0, gate, activation, False, centered, norm.eps))


def linear_map(weights: decode.Weights, m: nn.Linear | QuantizedLinear) -> decode.Linear:
    """Return a linear map of the model."""
    return quantized_map(weights, m, m.bias) if isinstance(m, QuantizedLinear) else weights.linear([m.weight], [m.bias])


def quantized_map(
    weights: decode.Weights, m: QuantizedLinear | QuantizedEmbedding, bias: Tensor | None = None, outputs: int = 0
) -> decode.Linear:
    """Return a map with a quantized weight, or with its first rows; it reads the weight of the module."""
    how, sizes = (m.format, m.activations), (m.inputs, outputs or m.outputs)
    return weights.quantized((m.quants, m.scales, m.factors), how, bias, *sizes)


def _linear(a: Linear, row: Row) -> tuple[int, Layout]:
    size = a.dim // a.heads
    place, *_ = row.project(a.query, a.key, a.value)
    row.wait()
    out, number = row.part(a.dim), MAPS[str(a.feature_map)]
    row.add(decode.LinearAttention(row.rates(a.rotary, size), place, out, a.heads, size, number, a.eps))
    sums = torch.float32, (a.heads, size, size + 1)
    return out, Layout(LinearRotaryState, (sums, COUNT)) if a.rotary else Layout(LinearState, (sums,))


def _softmax(a: Softmax, row: Row) -> tuple[int, Layout]:
    size = a.size
    query, key, value = row.project(a.query, a.key, a.value)
    row.wait()
    if a.query_norm is not None and a.key_norm is not None:
        row.head_norm(a.query_norm, query, a.heads, size)
        row.head_norm(a.key_norm, key, a.groups, size)
        row.wait()
    out, counts = row.part(a.heads * size), (a.heads, a.groups, size)
    row.add(decode.SoftmaxAttention(row.rates(a.rotary, size), query, size, key, value, out, *counts, size**-0.5))
    slots = row.weights.dtype, (a.groups, -1, size)
    return out, Layout(KeyValues, (slots, slots, COUNT))


def _gated_deltanet(a: GatedDeltaNet, row: Row) -> tuple[int, Layout]:
    q, k, v, gate, rate, decay = row.project(a.query, a.key, a.value, a.out_gate, a.rate, a.decay)
    row.wait()
    row.convolve(a.mix, q, sum(a.widths))
    row.curve("sigmoid", rate, a.heads, factor=torch.tensor(2.0) if a.negative else None)
    row.curve("softplus", decay, a.heads, bias=a.dt_bias, factor=-a.a_log.detach().float().exp())
    row.wait()
    heads = Heads(a.heads, a.groups, a.sizes)
    row.recur(q, k, v, to=v, heads=heads, decay="head", log_decay=decay, beta=rate, normalize=True)
    row.head_norm(a.norm, v, a.heads, a.sizes[1], gate)
    return v, _recurrent(GatedDeltaNetState, a.heads, a.sizes, a.convolution, sum(a.widths))


def _deltanet(a: DeltaNet, row: Row) -> tuple[int, Layout]:
    size = a.dim // a.heads
    q, k, v, rate = row.project(a.query, a.key, a.value, a.rate)
    row.wait()
    row.convolve(a.mix, q, 3 * a.dim)
    row.curve("sigmoid", rate, a.heads, factor=torch.tensor(2.0) if a.negative else None)
    row.wait()
    row.recur(q, k, v, to=v, heads=Heads(a.heads, a.heads, (size, size)), beta=rate, normalize=True)
    row.head_norm(a.norm, v, a.heads, size)
    return v, _recurrent(DeltaNetState, a.heads, (size, size), a.convolution, 3 * a.dim)


def _kda(a: KDA, row: Row) -> tuple[int, Layout]:
    size = a.dim // a.heads
    q, k, v, rate, low_decay, low_gate = row.project(a.query, a.key, a.value, a.rate, a.decay[0], a.out_gate[0])  # pyright: ignore[reportArgumentType] (linear maps)
    row.wait()
    (decay,) = row.project(a.decay[1], start=low_decay)  # pyright: ignore[reportArgumentType] (a linear map)
    (gate,) = row.project(a.out_gate[1], start=low_gate)  # pyright: ignore[reportArgumentType] (a linear map)
    row.convolve(a.mix, q, 3 * a.dim)
    row.curve("sigmoid", rate, a.heads)
    row.wait()
    speed = a.a_log.detach().float().exp().expand(a.heads, size)
    if a.lower_bound:
        row.curve("sigmoid", decay, a.dim, bias=a.dt_bias, slope=speed, factor=torch.tensor(a.lower_bound))
    else:
        row.curve("softplus", decay, a.dim, bias=a.dt_bias, factor=-speed)
    row.wait()
    heads = Heads(a.heads, a.heads, (size, size))
    row.recur(q, k, v, to=v, heads=heads, decay="channel", log_decay=decay, beta=rate, normalize=True)
    row.head_norm(a.norm, v, a.heads, size, gate)
    return v, _recurrent(KDAState, a.heads, (size, size), a.convolution, 3 * a.dim)


def _gla(a: GLA, row: Row) -> tuple[int, Layout]:
    q, k, v, gate, low = row.project(a.query, a.key, a.value, a.out_gate, a.decay[0])  # pyright: ignore[reportArgumentType] (linear maps)
    row.wait()
    (decay,) = row.project(a.decay[1], start=low)  # pyright: ignore[reportArgumentType] (a linear map)
    row.wait()
    # log sigmoid(x) = -softplus(-x)
    factor = torch.tensor(-1 / a.temperature)
    row.curve("softplus", decay, a.heads * a.sizes[0], slope=torch.tensor(-1.0), factor=factor)
    row.wait()
    row.recur(q, k, v, to=v, heads=Heads(a.heads, a.heads, a.sizes), decay="channel", log_decay=decay)
    row.head_norm(a.norm, v, a.heads, a.sizes[1], gate)
    return v, Layout(GLAState, ((torch.float32, (a.heads, *a.sizes)),))


def _retention(a: Retention, row: Row) -> tuple[int, Layout]:
    q, k, v, gate = row.project(a.query, a.key, a.value, a.out_gate)
    row.wait()
    if a.rotary:
        row.turn(a.rotary, q, 2 * a.heads, a.sizes[0])
        row.wait()
    decays = torch.tensor(a.log_decay)
    row.recur(q, k, v, to=v, heads=Heads(a.heads, a.heads, a.sizes), decay="head", log_decay=decays)
    row.head_norm(a.norm, v, a.heads, a.sizes[1], gate)
    sums: Part = torch.float32, (a.heads, *a.sizes)
    return v, Layout(RetentionRotaryState, (sums, COUNT)) if a.rotary else Layout(RetentionState, (sums,))


def _ssd(a: SSD, row: Row) -> tuple[int, Layout]:
    width, channels = a.widths[0], sum(a.widths)
    v, k, q, gate, dt = row.project(a.value, a.key, a.query, a.out_gate, a.dt)
    decay, scaled = row.part(a.heads), row.part(width)
    row.wait()
    row.convolve(a.mix, v, channels, bias=a.shift)
    row.curve("softplus", dt, a.heads, bias=a.dt_bias)
    row.curve("identity", dt, a.heads, factor=-a.a_log.detach().float().exp(), to=decay)
    row.wait()
    row.scale(v, width, by=dt, size=a.size, to=scaled)
    row.wait()
    sizes, head = (a.channels, a.size), {"decay": "head", "log_decay": decay, "scale": 1.0}
    row.recur(q, k, scaled, to=scaled, heads=Heads(a.heads, a.key_heads, sizes), **head)
    row.wait()
    row.scale(v, width, by=a.skip, size=a.size, add=scaled, to=scaled)
    row.wait()
    group, weight = width // a.key_heads, row.weights.numbers(a.scale)
    silu, gate_first, centered = decode.GATES["silu"], True, False
    row.add(decode.HeadNorm(weight, scaled, a.key_heads, group, group, group, gate, silu, gate_first, centered, 1e-5))
    return scaled, _recurrent(SSDState, a.heads, sizes, a.convolution, channels)


def low_rank(mixer: nn.Module) -> list[nn.Module]:
    """The products of two linear maps in a mixer."""
    pairs = [mixer.decay] if isinstance(mixer, GLA) else [mixer.decay, mixer.out_gate] if isinstance(mixer, KDA) else []
    maps = (nn.Linear, QuantizedLinear)
    return [p for p in pairs if type(p) is nn.Sequential and len(p) == 2 and all(type(part) in maps for part in p)]


Build = Callable[[Any, Row], tuple[int, Layout]]
MIXERS: dict[type, Build] = {
    Linear: _linear,
    Softmax: _softmax,
    GatedDeltaNet: _gated_deltanet,
    DeltaNet: _deltanet,
    KDA: _kda,
    GLA: _gla,
    Retention: _retention,
    SSD: _ssd,
}
PARTS = (ShortConvolution, HeadNorm)


def _recurrent(kind: type, heads: int, sizes: tuple[int, int], convolution: int, channels: int) -> Layout:
    """The layout of sums and the recent inputs of a convolution."""
    recent = torch.float32, (max(convolution - 1, 0), channels)
    return Layout(kind, ((torch.float32, (heads, *sizes)), recent))


def why_not(name: str, mixer: nn.Module) -> str:
    """Return why the engine does not support the options of a mixer, "" if it does."""
    if isinstance(mixer, Linear) and not isinstance(mixer.feature_map, str):
        return f"{name}'s feature map is a Python callable"
    if getattr(mixer, "rotary_layout", "halves") != "halves":
        return f"{name} rotates interleaved pairs of channels"
    sizes: tuple[int, ...] = getattr(mixer, "sizes", ())
    if isinstance(mixer, SSD):
        sizes = mixer.channels, mixer.size
    elif isinstance(mixer, DeltaNet | KDA):
        sizes = (mixer.dim // mixer.heads,)
    if any(size > LARGEST for size in sizes):
        return f"{name} has heads of more than {LARGEST} channels"
    return ""
