"""The operations with a state, one row each: operands from a seed, domains of options, sizes and tolerances.

``laws.py`` states what holds for all of them. A new operation, option or form is a row or a value here.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import longspan
from longspan import backend
from longspan.ops import gated
from longspan.ops.gated import value_channels
from longspan.ops.gated.operands import Recurrence, isolated_call, with_state
from longspan.ops.linear.features import MAPS
from longspan.ops.native.call import available

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Given = dict[str, Tensor]


class Family(NamedTuple):
    """One operation, or one kind of decay of it."""

    name: str
    package: str  # its folder in longspan/ops
    op: str  # what messages call it
    call: Callable[..., tuple[Tensor, Tensor]]  # operands and options by name -> the output and the state
    make: Callable[..., Given]  # (draw, n, sizes, batch, states, shape options) -> operands in float64
    output: str  # the operand in whose shape the output is
    sizes: Mapping[str, tuple[tuple[int, tuple[int, int]], ...]]  # by form: tokens and widths
    rounded: float  # the error of kernels in float32
    exact: float = 1e-12  # the error of the form in torch in float64
    shapes: Mapping[str, tuple[Any, ...]] = {}  # options that change the operands, for ``make``
    options: Mapping[str, tuple[Any, ...]] = {}  # options of the call
    step: tuple[tuple[int, int], ...] = ()  # widths of one token
    clears: bool = False  # whether it has a log decay, of which -inf clears the state
    smallest: Mapping[str, Any] = {}  # shape options and sizes for numerical derivatives
    axis: int = 2  # of tokens
    around: tuple[str, ...] = ("plain", "segments", "mask+segments", "mask+cu_seqlens")  # as in ``packing``

    @property
    def tokens(self) -> tuple[str, ...]:
        """The operands that have tokens."""
        return TOKENS[self.package]

    def operands(
        self,
        n: int,
        sizes: tuple[int, int] | None = None,
        *,
        batch: int = 2,
        states: int | None = None,
        dtype: torch.dtype = torch.float64,
        seed: int = 0,
        **shapes: Any,
    ) -> Given:
        """Operands by name; the state is in float32 at least."""
        generator = torch.Generator().manual_seed(1000 * seed + n)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        chosen = {name: domain[0] for name, domain in self.shapes.items()} | shapes
        sizes = self.sizes["torch"][-1][1] if sizes is None else sizes
        return cast(self.make(draw, n, sizes, batch, states or batch, **chosen), dtype)

    def run(self, form: str, given: Given, **options: Any) -> tuple[Tensor, Tensor]:
        """The output and the state by one form."""
        with backend(form):
            return self.call(given, **options)

    def outcome(self, form: str, given: Given, **options: Any) -> Given:
        """The output, the state, and the gradients of all operands from fixed ones of both."""
        leaves = {name: t.detach().clone().requires_grad_() for name, t in given.items()}
        found = self.run(form, leaves, **options)
        grads = torch.autograd.grad(found, list(leaves.values()), upstream(found, options.get("mask"), self.axis))
        return {"output": found[0].detach(), "end": found[1].detach()} | dict(zip(leaves, grads, strict=True))

    def cut(self, given: Given, begin: int, end: int) -> Given:
        """The operands of some tokens."""
        narrow = (slice(None),) * self.axis + (slice(begin, end),)
        return {name: t[narrow] if name in self.tokens else t for name, t in given.items()}

    def at(self, keep: Tensor, t: Tensor) -> Tensor:
        """``keep`` (B,N), shaped to select tokens of ``t``."""
        rows, n = keep.shape
        return keep.view(rows, *(1,) * (self.axis - 1), n, *(1,) * (t.dim() - self.axis - 1))

    def fill(self, given: Given, where: Tensor, value: float) -> Given:
        """The operands with ``value`` at the tokens of ``where`` (B,N)."""
        return {
            name: t.masked_fill(self.at(where, t), value) if name in self.tokens else t for name, t in given.items()
        }


TOKENS = {
    "gated": ("query", "key", "value", "log_decay", "beta"),
    "general": ("query", "key", "value", "read", "erase", "log_decay"),
    "linear": ("query", "key", "value"),
    "scan": ("x", "log_decay", "dt", "B", "C", "z"),
    "convolution": ("x",),
}


def cast(given: Given, dtype: torch.dtype) -> Given:
    """The operands in another dtype, and the state in float32 at least."""
    wide = torch.promote_types(dtype, torch.float32)
    return {name: t.to(DEVICE, wide if name == "state" else dtype) for name, t in given.items()}


def upstream(outputs: tuple[Tensor, Tensor], mask: Tensor | None, axis: int) -> list[Tensor]:
    """Gradients of the output and the state, of numbers that bfloat16 has; 0 where the output is masked."""
    found = []
    for t in outputs:
        numbers = torch.cos(torch.arange(t.numel(), dtype=torch.float64) * 1.7)
        found.append(numbers.bfloat16().view(t.shape).to(t))
    if mask is not None:
        hidden = ~mask.view(mask.shape[0], *(1,) * (axis - 1), -1, *(1,) * (outputs[0].dim() - axis - 1))
        found[0] = found[0].masked_fill(hidden, 0.0)
    return found


def packing(around: str, n: int, batch: int) -> dict[str, Tensor]:
    """Masks and marks of packed sequences: "mask", "segments", "cu_seqlens", or two of them with "+"."""
    generator, options = torch.Generator().manual_seed(n), {}
    if "mask" in around:
        options["mask"] = torch.rand(batch, n, generator=generator) < 0.7
    if "segments" in around:
        options["segments"] = (torch.rand(batch, n, generator=generator) < 0.1).long().cumsum(1)
    if "cu_seqlens" in around:
        middle = torch.randint(n + 1, (3,), generator=generator).tolist()
        options["cu_seqlens"] = torch.tensor(sorted([0, 0, *middle, middle[0], n]), dtype=torch.int32)
    return {name: t.to(DEVICE) for name, t in options.items()}


SEQUENCES = 6  # of cu_seqlens


def heads(draw, n, sizes, batch, states, *, decay="none", delta=False, repeats=2):
    """Two heads of queries and keys, ``repeats`` heads of values for each."""
    (d, e), values = sizes, 2 * repeats
    given = {"query": draw(batch, 2, n, d), "key": F.normalize(draw(batch, 2, n, d), dim=-1)}
    given["value"] = draw(batch, values, n, e)
    if decay != "none":
        widths = {"head": (), "channel": (d,), "value": (e,)}[decay]
        given["log_decay"] = -draw(batch, values, n, *widths).abs()
    if delta:
        given["beta"] = draw(batch, values, n).sigmoid()
    return given | {"state": draw(states, values, d, e)}


def general(draw, n, sizes, batch, states, *, decay="channel", repeats=2):
    """Reads of length 1, and erasures of 0 to 1 times the reads, as in RWKV-7."""
    given = heads(draw, n, sizes, batch, states, decay=decay, repeats=repeats)
    read = F.normalize(draw(batch, 2, n, sizes[0]), dim=-1)
    return {name: t * 0.6 if name == "log_decay" else t for name, t in given.items()} | {
        "read": read,
        "erase": read * draw(batch, 2, n, sizes[0]).sigmoid(),
    }


def normalized(draw, n, sizes, batch, states):
    """Operands of linear attention; the normalizer of its state is positive."""
    d, e = sizes
    return {
        "query": draw(batch, 2, n, d),
        "key": draw(batch, 2, n, d),
        "value": draw(batch, 2, n, e),
        "state": draw(states, 2, d, e + 1).abs(),
    }


def diagonal(draw, n, sizes, batch, states):
    channels, _ = sizes
    tokens = (batch, n, channels)
    return {"x": draw(*tokens), "log_decay": -draw(*tokens).abs(), "state": draw(states, channels)}


def selective(draw, n, sizes, batch, states, *, bare=False, rates=True):
    """``bare``: only what the scan must have. Without ``rates``, writing decides what is left of a state."""
    (channels, size), tokens = sizes, (batch, n, sizes[0])
    given = {"x": draw(*tokens), "dt": draw(*tokens) * (1 if rates else 0.3) - 1}
    given |= {"A": -0.2 - draw(channels, size).abs()} if rates else {}
    given |= {"B": draw(batch, n, size), "C": draw(batch, n, size), "state": draw(states, channels, size)}
    if not rates:
        given["B"] = given["B"].tanh() / 2
    if bare:
        return given | {"dt": given["dt"].exp()}
    return given | {"D": draw(channels), "z": draw(*tokens), "dt_bias": draw(channels)}


def convolution(draw, n, sizes, batch, states, *, bias=True, more=0):
    """``more``: rows of the state beyond those that the taps read."""
    channels, taps = sizes
    given = {"x": draw(batch, n, channels), "weight": draw(channels, taps) / taps}
    given |= {"bias": draw(channels)} if bias else {}
    return given | {"state": draw(states, taps - 1 + more, channels)}


def call_gated(given: Given, **options: Any) -> tuple[Tensor, Tensor]:
    if "beta" in given:
        return longspan.delta_rule(**given, **options, return_state=True)
    if "log_decay" in given:
        return longspan.decay_attention(**given, **options, return_state=True)
    # The sum without decay has no public function.
    q, k, v = (given[name] for name in ("query", "key", "value"))
    return gated.recur(q, k, v, state=given.get("state"), **options)


def call_by_value(given: Given, donate: bool = False, **options: Any) -> tuple[Tensor, Tensor]:
    # It has no public function either. Attentions keep NaN in its sequence for it.
    q, k, v, log_decay = (given[name] for name in ("query", "key", "value", "log_decay"))
    blank: dict[str, Any] = {"scale": None, "mask": None, "segments": None, "cu_seqlens": None}
    scale, mask, segments, offsets = (blank | options).values()
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    r = Recurrence(q, k, v, log_decay, None, given.get("state"), mask, segments, offsets, scale)  # pyright: ignore[reportArgumentType] (with_state fills it in)
    return isolated_call(value_channels.serve, with_state(r), donate)


def call_selective(given: Given, **options: Any) -> tuple[Tensor, Tensor]:
    softplus = "dt_bias" in given
    return longspan.selective_scan(**{"A": None} | given, **options, softplus=softplus, return_state=True)


def returning(function: Callable[..., Any], given: Given, **options: Any) -> tuple[Tensor, Tensor]:
    return function(**given, **options, return_state=True)


# Odd, prime, below and above a vector, a chunk of 32 and a span of 512 tokens.
HEADS = {
    "torch": ((2, (5, 3)), (29, (5, 3)), (139, (6, 5))),
    "native": ((2, (5, 3)), (29, (17, 33)), (139, (5, 64)), (67, (64, 7)), (1103, (7, 5)), (67, (256, 256))),
    "triton": ((5, (2, 1)), (20, (17, 33)), (70, (5, 3))),
}
SCANS = {
    "torch": ((1, (5, 4)), (67, (3, 2))),
    "native": ((1, (5, 4)), (63, (17, 16)), (131, (70, 5)), *((70, (18, size)) for size in (1, 3, 8, 16, 17, 40, 64))),
}
# A tile of 32 tokens, units of 256 and 512, blocks of 128 and 512 channels.
CONVOLUTIONS = {
    "torch": ((1, (1, 1)), (2, (5, 4)), (29, (37, 2)), (67, (16, 7))),
    "native": (
        *((1, (1, 1)), (2, (5, 4)), (3, (40, 3)), (29, (37, 2)), (67, (131, 4)), (67, (16, 7))),
        *((557, (18, 4)), (9, (1043, 4))),
    ),
    "triton": ((1, (1, 1)), (3, (5, 2)), (67, (37, 4)), (29, (70, 3)), (16, (4, 8))),
}
STEPS = ((5, 3), (7, 23), (17, 64), (11, 119), (64, 128))
SMALL = {"sizes": (2, 2)}


def _gated(decay: str, delta: bool) -> Family:
    names = {True: "delta", False: "decay"}
    op = "the delta rule" if delta else "decay attention" if decay != "none" else "a running sum of outer products"
    return Family(
        f"{names[delta]}-{decay}",
        "gated",
        op,
        call_gated,
        partial(heads, decay=decay, delta=delta),
        "value",
        HEADS,
        rounded=1e-5,
        shapes={"repeats": (2, 1, 3)},
        options={"scale": (0.7, None), "normalize": (None, "l2")},
        step=STEPS,
        clears=decay != "none",
        smallest={"sizes": (2, 2)},
    )


def _general(decay: str) -> Family:
    return Family(
        f"general-{decay}",
        "general",
        "the general delta rule",
        partial(returning, longspan.general_delta_rule),
        partial(general, decay=decay),
        "value",
        {name: sizes for name, sizes in HEADS.items() if name != "triton"},
        rounded=2e-6,
        shapes={"repeats": (2, 1, 3)},
        options={"scale": (0.7, None), "read_before_decay": (False, True)},
        step=STEPS,
        clears=decay != "none",
        smallest={"sizes": (3, 2)},
    )


FAMILIES = {
    family.name: family
    for family in (
        *(_gated(decay, delta) for delta in (False, True) for decay in ("none", "head", "channel")),
        *(_general(decay) for decay in ("none", "head", "channel")),
        Family(
            "decay-value",
            "gated",
            "decay attention",
            call_by_value,
            partial(heads, decay="value"),
            "value",
            HEADS,
            rounded=1e-5,
            shapes={"repeats": (2, 1, 3)},
            options={"scale": (0.7, None)},
            step=STEPS,
            clears=True,
            smallest={"sizes": (2, 2)},
        ),
        Family(
            "linear",
            "linear",
            "linear attention",
            partial(returning, longspan.linear_attention),
            normalized,
            "value",
            HEADS,
            rounded=1e-5,
            exact=1e-11,
            options={"feature_map": tuple(MAPS), "eps": (1e-6, 0.5)},
            step=((1, 1), (7, 5), (32, 32), (13, 64), (251, 128)),
            smallest={"sizes": (2, 2)},
        ),
        Family(
            "diagonal",
            "scan",
            "the diagonal scan",
            partial(returning, longspan.diagonal_scan),
            diagonal,
            "x",
            SCANS,
            rounded=1e-6,
            exact=1e-10,
            step=((5, 1), (21, 1), (150, 1), (700, 1)),
            clears=True,
            smallest={"sizes": (2, 1)},
            axis=1,
        ),
        Family(
            "selective",
            "scan",
            "the selective scan",
            call_selective,
            selective,
            "x",
            SCANS,
            rounded=1e-6,
            exact=1e-10,
            shapes={"bare": (False, True), "rates": (True, False)},
            step=((5, 4), (21, 16), (18, 17), (150, 16), (700, 16)),
            smallest={"sizes": (2, 3)},
            axis=1,
        ),
        Family(
            "convolution",
            "convolution",
            "the causal convolution",
            lambda given, **options: longspan.causal_convolution(**given, **options),
            convolution,
            "x",
            CONVOLUTIONS,
            rounded=1e-5,
            shapes={"bias": (True, False), "more": (0, 2)},
            options={"activation": ("silu", None)},
            # Some vectors and what is left of them, more than a block of channels.
            step=((5, 4), (67, 4), (300, 3), (67, 2), (67, 6), (530, 4), (4105, 4)),
            smallest={"sizes": (2, 3)},
            axis=1,
            # With both, real tokens alone are packed anew, of which a sequence may have none.
            around=("plain", "segments", "mask+segments", "cu_seqlens"),
        ),
    )
}


def has_form(family: Family, form: str) -> bool:
    """Whether the form exists and can run here."""
    return form == "reference" or (form in family.sizes and (form != "native" or available(family.package)))


def limit(family: Family, form: str) -> float:
    return {"native": family.rounded, "triton": TRITON}.get(form, family.exact)


TRITON = 5e-7 if DEVICE == "cpu" else 1e-5


def dtype_of(form: str) -> torch.dtype:
    return torch.float32 if form in ("native", "triton") else torch.float64


def error(found: Tensor, right: Tensor) -> float:
    """The largest difference, relative to the largest number of what is right, or to 1 if it is less."""
    assert found.shape == right.shape
    if not right.numel():
        return 0.0
    size = max(1.0, right.double().abs().max().item())
    worst = (found.double() - right.double()).abs().max().item() / size
    return math.inf if math.isnan(worst) else worst


def assert_close(found: Any, right: Any, tolerance: float) -> None:
    pairs = found.items() if isinstance(found, dict) else enumerate(found)
    right = right if isinstance(right, dict) else dict(enumerate(right))
    errors = {name: error(t, right[name]) for name, t in pairs}
    assert len(errors) == len(right)
    assert all(e <= tolerance for e in errors.values()), errors
