"""The options of sampling: one table for ``generate``, requests, the command line and the playground.

The command line prints these options without torch, so the functions here import it.
"""

import inspect
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, TypeVar, cast

from .._utils.typecheck import check_fields

if TYPE_CHECKING:
    from torch import Tensor

F = TypeVar("F", bound=Callable[..., Any])

LARGEST = 3.4028234663852886e38  # the largest float32: at such a temperature all tokens are equally likely


def _option(default: float, low: float, high: float, title: str, description: str) -> Any:
    """A field of ``Sampling``: its default, the bounds in requests and on the command line, its title and meaning."""
    return field(default=default, metadata={"low": low, "high": high, "title": title, "description": description})


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. The options apply in this order.

    Args:
        **options: See ``OPTIONS``.
        seed: Token i of a stream depends on its seed and i, not on other streams or on its place in the batch.

    Raises:
        ValueError: For a value of another type, a temperature that is negative or not finite, top_k < 0, top_p outside
            (0, 1], and a seed of more than 64 bits.
    """

    temperature: float = _option(
        1.0,
        0.0,
        1e6,
        "Temperature",
        "sharpens the distribution below 1 and flattens it above; 0 takes the most likely token",
    )
    top_k: int | None = _option(
        0, 0, 2**31, "Top k (0: all)", "samples from the k most likely tokens; 0 samples from all"
    )
    top_p: float = _option(
        1.0,
        1e-9,
        1.0,
        "Top p (1: all)",
        "samples from the most likely tokens whose probabilities reach this sum; 1 samples from all",
    )
    seed: int = 0

    def __post_init__(self):
        if isinstance(self.temperature, int | float) and LARGEST < self.temperature < math.inf:
            object.__setattr__(self, "temperature", LARGEST)
        object.__setattr__(self, "top_k", 0 if self.top_k is None else self.top_k)
        check_fields(self)
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature={self.temperature} must be a finite number >= 0; 0 takes the mode")
        if (self.top_k or 0) < 0:
            raise ValueError(f"top_k={self.top_k} must be >= 0; 0 keeps all tokens")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be in (0, 1]; 1 keeps all tokens")

    def restricts(self, levels: float = math.inf) -> bool:
        """Return whether the options keep fewer than all of ``levels`` tokens."""
        return 0 < (self.top_k or 0) < levels or self.top_p < 1


class SamplingOptions(TypedDict, total=False):
    """The options of ``Sampling`` as keyword arguments, without the seed."""

    temperature: float
    top_k: int | None
    top_p: float


Ways = Sampling | Sequence[Sampling]


def keep_likely(ordered: "Tensor", ways: Ways) -> tuple["Tensor", "Tensor"]:
    """Return which tokens the options keep, and the probabilities from which they follow.

    Args:
        ordered: (..., V) scores, the most likely token first: log-probabilities up to a constant per row.
        ways: The options of all rows, or of each row of scores (B,V).

    Returns:
        Two tensors (..., V): True for the tokens that are kept, at least the first one, and the probabilities at the
        temperature of those that top_k keeps.
    """
    import torch

    top_k, temperature, top_p = (
        values_of(ways, value, ordered)
        for value in (
            lambda way: way.top_k or math.inf,
            lambda way: way.temperature,
            # In float32 the first tokens may reach 1 although others have a share.
            lambda way: way.top_p if way.top_p < 1 else math.inf,
        )
    )
    places = torch.arange(ordered.shape[-1], device=ordered.device)
    ordered = ordered.masked_fill(places >= top_k, -math.inf)
    # The best score is 0, so that no quotient of it overflows.
    shares = ((ordered - ordered[..., :1]) / temperature).softmax(-1)
    # A token is kept while the mass before it is below top_p, so the first one always is.
    return (ordered > -math.inf) & ~(shares.cumsum(-1) - shares >= top_p), shares


def values_of(ways: Ways, value: Callable[[Sampling], float], like: "Tensor") -> "float | Tensor":
    """Return a value of the options as a number, or as a column (B,1) with that of each row.

    It is in the range of normal numbers of ``like``: a processor may read a smaller one as 0, and quotients of 0 and of
    infinity are not numbers.
    """
    import torch

    limits = torch.finfo(like.dtype)
    if isinstance(ways, Sampling):
        return float(min(max(value(ways), limits.tiny), limits.max))
    column = torch.tensor([float(value(way)) for way in ways], dtype=like.dtype, device=like.device)[:, None]
    return column.clamp(limits.tiny, limits.max)


class Option(NamedTuple):
    """An option of ``Sampling``, as requests, the command line and the playground offer it."""

    name: str
    default: float
    low: float
    high: float
    title: str
    description: str

    @property
    def kind(self) -> type:
        """``int`` or ``float``."""
        return type(self.default)

    @property
    def sentence(self) -> str:
        """The description as a sentence."""
        return f"{self.description[0].upper()}{self.description[1:]}."


OPTIONS = tuple(Option(one.name, cast(float, one.default), **one.metadata) for one in fields(Sampling) if one.metadata)


def with_sampling_options(call: F) -> F:
    """Show the options in place of ``**options``, in the signature and in the docstring of a function."""
    signature = inspect.signature(call)
    own = [one for one in signature.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
    kinds = SamplingOptions.__annotations__
    own += [
        inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=one.default, annotation=kinds[one.name])
        for one in OPTIONS
    ]
    call.__dict__["__signature__"] = signature.replace(parameters=own)
    call.__doc__ = _with_options(call.__doc__)
    return call


def _with_options(text: str | None) -> str:
    """Replace the line ``**options: ...`` of a docstring by the options."""
    return re.sub(
        r"^( *)\*\*options: .*$",
        lambda line: "\n".join(f"{line[1]}{one.name}: {one.sentence}" for one in OPTIONS),
        text or "",
        flags=re.MULTILINE,
    )


Sampling.__doc__ = _with_options(Sampling.__doc__)
