"""Facts about mechanisms, read from their classes or measured, for ``list`` and ``show``."""

import contextlib
import functools
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from .. import patterns
from .._utils import latex
from ..attention import REGISTRY, Attention, build, list_mechanisms
from ..attention.base import own_options
from ..attention.registry import mechanism
from ..attention.specs import parts
from ..modules.feedforward import FeedForward
from ..ops.buckets import tiles
from ..ops.sparse import blockwise
from ..patterns import Pattern
from ..states import nbytes
from . import dispatch

TOKENS = (256, 1024, 4096, 16384, 65536)

STEPWISE = 16  # operations per token from which on a mechanism counts as sequential

LOOKED_AT = 4096  # largest number of tokens whose pairs are enumerated


def mechanisms() -> list[dict[str, Any]]:
    """Each registered mechanism: name, summary, cost, forms and paper (arXiv number)."""
    return [
        {"name": cls.name, "summary": summary(cls), "cost": cls.cost, "forms": forms(cls), "paper": cls.paper}
        for cls in map(mechanism, list_mechanisms())
    ]


def summary(cls: type[Attention]) -> str:
    """The first line of the docstring."""
    return latex.inline(inspect.cleandoc(cls.__doc__ or "").partition("\n")[0])


def forms(attention: type[Attention] | Attention) -> list[str]:
    """The forms that a class or an instance supports: causal, bidirectional, cross, packed, prefix."""
    more = {"segments": "packed", "prefix": "prefix"}
    if "bidirectional" in attention.directions:
        more = {"context": "cross", **more}
    return [*attention.directions, *(form for argument, form in more.items() if argument in attention.supported_args)]


def options(attention: Attention) -> list[dict[str, Any]]:
    """Each option of a mechanism: name, value, default and meaning (from the docstring)."""
    cls = type(attention)
    return [
        {
            "name": name,
            "value": getattr(attention, name),
            "default": p.default,
            "meaning": latex.inline(meaning(cls, name)),
        }
        for name, p in own_options(cls).items()
    ]


def meaning(cls: type[Attention], option: str) -> str:
    """The meaning of an option in the class docstring: after its name and a colon, or a sentence with its name."""
    found = [sentence for paragraph in sentences(cls) for sentence in paragraph]
    for pattern in (rf"^``{option}``:\s*", rf"``{option}``()", rf"\b{option}\b()"):
        for sentence in found:
            if re.search(pattern, sentence):
                return (re.sub(pattern, "", sentence) if pattern[0] == "^" else sentence).replace("``", "")
    return ""


def sentences(cls: type[Attention]) -> list[list[str]]:
    """The sentences of the class docstring after its first line, by paragraph."""
    paragraphs = inspect.cleandoc(cls.__doc__ or "").split("\n\n")[1:]
    # A sentence ends before a capital letter, a formula or the next option, not at the dots of "(..., D)".
    return [re.split(r"(?<=[^.]\.)\s+(?=``|[A-Z$])", " ".join(paragraph.split())) for paragraph in paragraphs]


@dataclass(frozen=True)
class Count:
    """The cost of one layer for one sequence: FLOPs of matrix products, where a multiply-add counts as two."""

    tokens: int
    projections: int
    """FLOPs of the attention's linear projections"""
    mixing: int
    """FLOPs between the projections: the mixing of tokens"""
    feedforward: int
    """FLOPs of the feed-forward network"""
    state: int | None
    """bytes of the recurrent state after these tokens; None without a recurrent state"""
    measured: bool
    """whether the count was measured at this length, not extrapolated from shorter ones"""


def counts(attention: Attention, *, inner: int = 0, tokens: Sequence[int] = TOKENS) -> list[Count]:
    """Count the FLOPs of the parallel form of an attention, and of a feed-forward network.

    PyTorch's FLOP counter watches a call on fake tensors at each length up to 4096. Longer lengths extrapolate the
    quadratic through the three longest counts, which is exact if the cost is a polynomial of degree at most 2 in N.
    Sequential mechanisms and those that depend on their input are counted up to 1024 tokens; the latter run on real
    tensors. Fused softmax kernels count as their matrix products, without the half that a causal mask saves some of
    them. Attention under a pattern counts the products of its blocks.

    Args:
        attention: the layer.
        inner: units of the feed-forward network; 0: 4 dim.
        tokens: the lengths. Lengths above the layer's own limit are replaced by it.

    Returns:
        One ``Count`` for each length, in ascending order.
    """
    network = _feedforward(attention.dim, inner or 4 * attention.dim)
    # The largest length, if the weights depend on it.
    most = getattr(attention, "length", max(tokens))
    measure, longest = _measure(attention, min(256, most))
    rows = []
    for n in sorted({min(n, most) for n in tokens}):
        if n <= longest:
            projections, mixing = measure(n)
        else:
            known = [(m, measure(m)) for m in (longest // 4, longest // 2, longest)]
            projections, mixing = (_continue([(m, found[i]) for m, found in known], n) for i in (0, 1))
        state = _state_bytes(attention, n) if attention.causal and attention.states else None
        rows.append(Count(n, projections, mixing, sum(_flops(network, 1)) * n, state, n <= longest))
    return rows


def _feedforward(dim: int, inner: int) -> FeedForward:
    # The weights are not used, so keep the caller's RNG state.
    with torch.random.fork_rng(devices=[]):
        return FeedForward(dim, inner, "gelu")


def _measure(attention: Attention, few: int) -> tuple[Callable[[int], tuple[int, int]], int]:
    """Return a function from a length to (projections, mixing), and the largest length that it accepts."""
    found: dict[int, tuple[int, int]] = {}
    calls = _calls()
    try:
        with calls:
            found[few] = _flops(attention, few)
        # Counting a sequential mechanism at 4096 tokens would take minutes.
        fake, longest = True, 4096 if calls.made < STEPWISE * few else 1024
    except RuntimeError:
        fake, longest = False, 1024

    def measure(n: int) -> tuple[int, int]:
        if n not in found:
            found[n] = _flops(attention, n, fake=fake)
        return found[n]

    return measure, longest


def _calls() -> Any:
    """A context that counts PyTorch operations in ``made``."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Calls(TorchDispatchMode):
        made = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.made += 1
            return func(*args, **(kwargs or {}))

    return Calls()


def _flops(module: nn.Module, n: int, *, fake: bool = True) -> tuple[int, int]:
    """FLOPs of one call on a sequence of n tokens: inside the module's ``nn.Linear`` parts, and the rest."""
    from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    linears = [name for name, part in module.named_modules() if isinstance(part, nn.Linear)]
    width = getattr(module, "dim", None) or next(module.parameters()).shape[-1]
    # The counter knows the plain form of attention, but not every fused kernel.
    with contextlib.ExitStack() as stack:
        for context in (torch.no_grad(), torch.random.fork_rng(devices=[]), sdpa_kernel(SDPBackend.MATH)):
            stack.enter_context(context)
        if fake:
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            x = torch.zeros(1, n, width)
        else:
            x = torch.randn(1, n, width, generator=torch.Generator().manual_seed(0))

        def sparse(*shapes, **output):
            # Lists of blocks need real tensors.
            with unset_fake_temporarily():
                return blockwise.flops(*shapes, **output)

        formulas = {torch.ops.longspan.pattern_forward: sparse, torch.ops.longspan.buckets_forward: tiles.flops}
        counter = stack.enter_context(FlopCounterMode(display=False, custom_mapping=formulas))
        module(x)
        by_name = counter.get_flop_counts()
        inside = sum(sum(by_name.get(f"{type(module).__name__}.{name}", {}).values()) for name in linears)
        return inside, counter.get_total_flops() - inside


def _continue(points: Sequence[tuple[int, int]], n: int) -> int:
    """The value at n of the polynomial through these points, by Lagrange interpolation in exact fractions."""
    value = Fraction(0)
    for i, (x, y) in enumerate(points):
        term = Fraction(y)
        for j, (other, _) in enumerate(points):
            if j != i:
                term *= Fraction(n - other, x - other)
        value += term
    return round(value)


def _state_bytes(attention: Attention, n: int) -> int:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with torch.no_grad():
        try:
            with FakeTensorMode(allow_non_fake_inputs=True):
                return nbytes(attention.init_state(1, n))
        except RuntimeError:
            # The size of some states is computed from values, such as the look-back of a pattern.
            return nbytes(attention.init_state(1, n))


def is_pattern(text: str) -> bool:
    """Whether the first name in a spec is a pattern, as in ``(band(8) | globals(2)) & causal``."""
    first = re.search(r"\w+", text)
    return first is not None and first[0] in patterns.NAMES


def pattern_of(text: str, dim: int, heads: int) -> Pattern:
    """The pattern of a spec: of a pattern itself, or of an attention (first layer, causal if it has that form).

    Raises ValueError for an attention without a pattern, and for an invalid spec, dim or heads.
    """
    if is_pattern(text):
        return patterns.parse(text)
    ((_, cls),) = parts(text)
    with torch.random.fork_rng(devices=[]):
        attention = build(text, dim, heads, causal="causal" in cls.directions)
    pattern = _pattern(attention)
    if pattern is None:
        having = ", ".join(filter(_has_pattern, list_mechanisms()))
        raise ValueError(
            f"{text} has no pattern to draw: it reads all keys, or its choice depends on more than positions; "
            f"mechanisms with a pattern: {having}"
        )
    return pattern


@functools.cache
def _has_pattern(name: str) -> bool:
    cls = REGISTRY[name]
    with torch.random.fork_rng(devices=[]):
        return _pattern(build(cls.examples[0], 12, 2, causal="causal" in cls.directions)) is not None


def _pattern(attention: Attention) -> Pattern | None:
    """The ``key_pattern`` of an attention, if it has one."""
    return vars(attention).get("key_pattern")


def picture(text: str, dim: int, heads: int, tokens: int | None = None) -> Tensor:
    """``patterns.picture`` of a spec: (heads|1, tokens, tokens) uint8. Arguments and errors as in ``view``."""
    pattern = pattern_of(text, dim, heads)
    return patterns.picture(pattern, _looked_at(tokens, pattern, heads), heads=heads)


def view(text: str, dim: int, heads: int, tokens: int | None = None) -> dict[str, Any]:
    """Facts about the pattern of a spec.

    Args:
        text: a spec of a pattern or an attention.
        dim: width of the attention.
        heads: attention heads.
        tokens: length at which keys are counted, from 1 to 4096; None: ``patterns.picture_size``.

    Returns:
        The pattern as text, its look-back and look-ahead (None: unbounded), whether heads differ, and the smallest,
        mean and largest number of keys per query.

    Raises:
        ValueError: as in ``pattern_of``, and for tokens out of range.
    """
    pattern = pattern_of(text, dim, heads)
    tokens = _looked_at(tokens, pattern, heads)
    keys = pattern.dense(tokens, heads=heads).sum(-1)
    return {
        "pattern": repr(pattern),
        "lookback": pattern.lookback,
        "lookahead": pattern.lookahead,
        "per_head": pattern.per_head,
        "tokens": tokens,
        "keys": {"fewest": int(keys.min()), "mean": float(keys.double().mean()), "most": int(keys.max())},
    }


def _looked_at(tokens: int | None, pattern: Pattern, heads: int) -> int:
    if tokens is None:
        return patterns.picture_size(pattern, heads=heads)
    if not 1 <= tokens <= LOOKED_AT:
        raise ValueError(f"tokens={tokens} must be from 1 to {LOOKED_AT}, since all pairs are enumerated")
    return tokens


def parameters(module: nn.Module) -> int:
    """Number of trainable parameters."""
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


def facts(text: str, dim: int, heads: int, device: str = "cpu", tokens: int | None = None) -> list[dict[str, Any]]:
    """Describe each distinct spec of a stack with plain values, as ``longspan show --json`` prints them.

    Args:
        text: a spec, or several separated by ``;``. Each is built causal if it has that form.
        dim: width of the attention; the feed-forward network has 4 dim inner units.
        heads: attention heads.
        device: the device of the backend report.
        tokens: as in ``view``.

    Raises:
        ValueError: for an invalid spec, size or device.
    """
    described = []
    for part, cls in parts(text):
        with torch.random.fork_rng(devices=[]):
            attention = build(part, dim, heads, causal="causal" in cls.directions)
        authors, title, year = cls.citation
        described.append(
            {
                "spec": part,
                "summary": summary(cls),
                "paper": {"arxiv": cls.paper, "authors": authors, "title": title, "year": year},
                "family": cls.family,
                "equations": list(cls.equations),
                "cost": cls.cost,
                "forms": forms(attention),
                "options": options(attention),
                "dim": dim,
                "heads": heads,
                "causal": attention.causal,
                "parameters": {
                    "attention": parameters(attention),
                    "feedforward": parameters(_feedforward(dim, 4 * dim)),
                },
                "view": None if _pattern(attention) is None else view(part, dim, heads, tokens),
                "backend": dispatch.probe_backends(part, dim, heads, causal=attention.causal, device=device),
                "counts": [vars(count) for count in counts(attention)],
            }
        )
    return described
