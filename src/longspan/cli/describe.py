"""Facts about mechanisms, taken from their classes or measured: what ``list``, ``show`` and ``cite`` print."""

import contextlib
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

STEPWISE = 16  # operations a token from which on a mechanism goes from token to token

LOOKED_AT = 4096  # tokens up to which all pairs are written out


def mechanisms() -> list[dict[str, Any]]:
    """Each registered mechanism: name, summary, cost, forms, paper (arXiv number)."""
    return [
        {"name": cls.name, "summary": summary(cls), "cost": cls.cost, "forms": forms(cls), "paper": cls.paper}
        for cls in map(mechanism, list_mechanisms())
    ]


def summary(cls: type[Attention]) -> str:
    """The first line of the docstring."""
    return latex.inline(inspect.cleandoc(cls.__doc__ or "").partition("\n")[0])


def forms(attention: type[Attention] | Attention) -> list[str]:
    """Those of causal, bidirectional, cross, packed and prefix that a mechanism has; of an instance, by its options."""
    more = {"segments": "packed", "prefix": "prefix"}
    if "bidirectional" in attention.directions:
        more = {"context": "cross", **more}
    return [*attention.directions, *(form for argument, form in more.items() if argument in attention.supported_args)]


def options(attention: Attention) -> list[dict[str, Any]]:
    """Each option of a mechanism: name, value, default, meaning (the docstring's words)."""
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
    """What the class docstring says of an option: after its name and a colon, or else where its name occurs."""
    said = [sentence for paragraph in sentences(cls) for sentence in paragraph]
    for pattern in (rf"^``{option}``:\s*", rf"``{option}``()", rf"\b{option}\b()"):
        for sentence in said:
            if re.search(pattern, sentence):
                return (re.sub(pattern, "", sentence) if pattern[0] == "^" else sentence).replace("``", "")
    return ""


def sentences(cls: type[Attention]) -> list[list[str]]:
    """The class docstring after its first line, paragraph by paragraph."""
    paragraphs = inspect.cleandoc(cls.__doc__ or "").split("\n\n")[1:]
    # A sentence ends before a capital letter, a formula or the next option; the stops inside "(..., D)" end none.
    return [re.split(r"(?<=[^.]\.)\s+(?=``|[A-Z$])", " ".join(paragraph.split())) for paragraph in paragraphs]


@dataclass(frozen=True)
class Count:
    """What one layer costs for one sequence. FLOPs are those of matrix products, multiply and add counted as two."""

    tokens: int
    projections: int
    """FLOPs of the attention's linear projections"""
    mixing: int
    """FLOPs of what is between them: how tokens reach one another"""
    feedforward: int
    """FLOPs of the feed-forward network"""
    state: int | None
    """bytes of the recurrent state after so many tokens; None where there is none"""
    measured: bool
    """counted at this length; otherwise extrapolated from shorter ones"""


def counts(attention: Attention, *, inner: int = 0, tokens: Sequence[int] = TOKENS) -> list[Count]:
    """Count the FLOPs of an attention's parallel form, and of a feed-forward network with ``inner`` units (0: 4 dim).

    PyTorch's own counter watches a call on tensors without contents, at each length up to 4096; beyond, the quadratic
    through the three longest counts is continued, which is exact wherever time is a polynomial up to N^2. What goes
    from token to token is watched up to 1024; so is what depends on its input, which is run for real. The fused softmax
    kernels count as the products that they stand for, without the half that a causal mask spares some of them;
    attention under a pattern as the products of the blocks that it works off.
    """
    network = _feedforward(attention.dim, inner or 4 * attention.dim)
    # The most tokens of a sequence, where that is a size of the weights.
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
    # Its random weights are for nobody, so the caller's random numbers stay as they are.
    with torch.random.fork_rng(devices=[]):
        return FeedForward(dim, inner, "gelu")


def _measure(attention: Attention, few: int) -> tuple[Callable[[int], tuple[int, int]], int]:
    """-> a function that counts (projections, mixing) for a number of tokens, and the largest number that it is for."""
    found: dict[int, tuple[int, int]] = {}
    calls = _calls()
    try:
        with calls:
            found[few] = _flops(attention, few)
        # Whoever goes from token to token would be watched for minutes.
        fake, longest = True, 4096 if calls.made < STEPWISE * few else 1024
    except RuntimeError:
        fake, longest = False, 1024

    def measure(n: int) -> tuple[int, int]:
        if n not in found:
            found[n] = _flops(attention, n, fake=fake)
        return found[n]

    return measure, longest


def _calls() -> Any:
    """A context that counts PyTorch's operations in ``made``."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Calls(TorchDispatchMode):
        made = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.made += 1
            return func(*args, **(kwargs or {}))

    return Calls()


def _flops(module: nn.Module, n: int, *, fake: bool = True) -> tuple[int, int]:
    """FLOPs of one call on one sequence of n tokens: inside the module's nn.Linear parts, and the rest."""
    from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    linears = [name for name, part in module.named_modules() if isinstance(part, nn.Linear)]
    width = getattr(module, "dim", None) or next(module.parameters()).shape[-1]
    # The counter knows the products of the plain form, but not every fused kernel.
    with contextlib.ExitStack() as stack:
        for context in (torch.no_grad(), torch.random.fork_rng(devices=[]), sdpa_kernel(SDPBackend.MATH)):
            stack.enter_context(context)
        if fake:
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            x = torch.zeros(1, n, width)
        else:
            x = torch.randn(1, n, width, generator=torch.Generator().manual_seed(0))

        def sparse(*shapes, **output):
            # Lists of blocks need tensors with contents.
            with unset_fake_temporarily():
                return blockwise.flops(*shapes, **output)

        formulas = {torch.ops.longspan.pattern_forward: sparse, torch.ops.longspan.buckets_forward: tiles.flops}
        counter = stack.enter_context(FlopCounterMode(display=False, custom_mapping=formulas))
        module(x)
        by_name = counter.get_flop_counts()
        inside = sum(sum(by_name.get(f"{type(module).__name__}.{name}", {}).values()) for name in linears)
        return inside, counter.get_total_flops() - inside


def _continue(points: Sequence[tuple[int, int]], n: int) -> int:
    """The value at n of the polynomial through these points (Lagrange), in exact fractions."""
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
            # A state whose size is found by computing, such as the look-back of a pattern.
            return nbytes(attention.init_state(1, n))


def is_pattern(text: str) -> bool:
    """Whether a spec names a pattern, such as ``(band(8) | globals(2)) & causal``, by its first name."""
    first = re.search(r"\w+", text)
    return first is not None and first[0] in patterns.NAMES


def pattern_of(text: str, dim: int, heads: int) -> Pattern:
    """The pattern of a spec, of a pattern or of an attention (causal where it can be, of a first layer).

    Raises ValueError for an attention without a pattern, and for a spec, dim or heads that are not possible.
    """
    if is_pattern(text):
        return patterns.parse(text)
    ((_, cls),) = parts(text)
    with torch.random.fork_rng(devices=[]):
        attention = build(text, dim, heads, causal="causal" in cls.directions)
    pattern = _pattern(attention)
    if pattern is None:
        having = ", ".join(n for n in list_mechanisms() if _has_pattern(n))
        raise ValueError(
            f"{text} has no pattern to be drawn: it reads all keys, or which ones is no function of positions alone; "
            f"those that have one: {having}"
        )
    return pattern


def _has_pattern(name: str) -> bool:
    cls = REGISTRY[name]
    with torch.random.fork_rng(devices=[]):
        return _pattern(build(cls.examples[0], 12, 2, causal="causal" in cls.directions)) is not None


def _pattern(attention: Attention) -> Pattern | None:
    """What a query of an attention may see: its ``key_pattern``."""
    return vars(attention).get("key_pattern")


def picture(text: str, dim: int, heads: int, tokens: int | None = None) -> Tensor:
    """``patterns.picture`` of a spec: (heads|1, tokens, tokens) uint8. Arguments and errors as in ``view``."""
    pattern = pattern_of(text, dim, heads)
    return patterns.picture(pattern, _looked_at(tokens, pattern, heads), heads=heads)


def view(text: str, dim: int, heads: int, tokens: int | None = None) -> dict[str, Any]:
    """Facts about the pattern of a spec: how far it sees, and how many keys a query sees at a number of tokens.

    ``tokens``: None takes as many as show what the pattern does, ``patterns.picture_size``.

    Raises ValueError as ``pattern_of`` does, and for tokens < 1 or above 4096.
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
        raise ValueError(f"tokens={tokens} must be from 1 to {LOOKED_AT}, since all pairs are looked at")
    return tokens


def parameters(module: nn.Module) -> int:
    """Numbers that are learnt."""
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


def facts(text: str, dim: int, heads: int, device: str = "cpu", tokens: int | None = None) -> list[dict[str, Any]]:
    """All of the above for each distinct spec of a stack, as plain values; what ``longspan show`` prints.

    Attention of width ``dim`` with ``heads`` heads, causal where it has that form; feed-forward network of 4 dim units;
    ``view`` at so many tokens, or its own number, None where there is no pattern.

    Raises ValueError for a spec, a size or a device that is not possible.
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
