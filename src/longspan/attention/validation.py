"""The arguments of a call, checked once: what came, what would be right."""

from collections.abc import Iterable, Iterator
from enum import Enum
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from .._utils.spec import known
from ..ops.arguments import check_mask, check_segments, describe
from ..ops.backends import refuse_tracing
from ..ops.operands import check_donation, check_stored
from ..ops.prefix import inside
from ..states.counters import check_counts
from ..states.utils import tensors

# What a record can be asked for; all but those of OWN cost O(N M). Each of OWN is there where the class says so.
RECORDED = ("matrix", "mask", "lse", "carried", "penalty", "statistics", "log_prob")
OWN = {"penalty": "penalty", "statistics": "statistics", "log_prob": "samples"}


class Trusted(Enum):
    """What a caller that is part of this library has done for the attentions that it calls."""

    CHECKED = "the arguments have been checked, and are in the form that ``checked_arguments`` returns"
    ISOLATED = "that, and packed sequences are kept apart, so that NaN and infinity stay in theirs"


class Contract(Protocol):
    """The facts of an attention that decide which arguments a call may have."""

    name: ClassVar[str]
    dim: int
    heads: int
    causal: bool
    supported_args: Any
    states: ClassVar[tuple[type, ...]]
    contexts: ClassVar[tuple[type, ...]]
    _modules: dict[str, Any]

    def state_sizes(self) -> Any: ...

    def parameters(self) -> Iterator[nn.Parameter]: ...


def checked_arguments(attention: Contract, x: Tensor, state: Any, given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of one call in the form that ``_forward`` takes.

    ``segments`` get the ids of real neighbors at masked tokens, ``prefix`` becomes bool (B,N), and masked tokens of
    ``context`` become zeros. Raises ValueError for an argument of a wrong kind or shape, or one that this attention
    does not support.
    """
    refuse_tracing()
    check_x(attention, attention.dim, x)
    check_supported(attention, given)
    found = given | check_tokens(attention, x, given)
    if (context := given.get("context")) is not None:
        _check_context(attention, context, x, state, given)
        if (seen := given.get("context_mask")) is not None:
            check_mask("context_mask", seen, tuple(context.shape[:2]))
            found["context"] = context.masked_fill(~seen[..., None], 0.0)
    elif "context_mask" in given:
        raise ValueError("context_mask= came without context=; a state of cross attention keeps its own mask")
    if "record" in given:
        check_record(given["record"])
    if state is not None:
        check_state(attention, state, x)
        if isinstance(state, attention.contexts):
            for name, what in {"segments": "packs", "prefix": "counts"}.items():
                if name in given:
                    raise ValueError(f"{name}= {what} a sequence's own tokens; a state of cross attention has none")
    if "donate" in given:
        check_donated(x, state, attention)
    return found


def check_supported(attention: Contract, given: Iterable[str]) -> None:
    """Raise ValueError for an argument that this attention does not support."""
    for name in given:
        if name not in attention.supported_args:
            raise ValueError(
                f"{attention.name} does not support {name}=; it supports: {', '.join(sorted(attention.supported_args))}"
            )


def check_tokens(attention: Contract, x: Tensor, given: dict[str, Any]) -> dict[str, Tensor]:
    """``segments`` and ``prefix`` of ``given`` in the form that ``_forward`` takes, for any attention of a stack.

    Raises ValueError for them, or a mask, of a wrong kind or shape. Values, for which a device is waited for, are
    looked at here alone.
    """
    found: dict[str, Tensor] = {}
    shape, mask = (x.shape[0], x.shape[1]), given.get("mask")
    if mask is not None:
        check_mask("mask", mask, shape)
    if (segments := given.get("segments")) is not None:
        check_segments(segments, shape)
        found["segments"] = real_segments(segments, mask)
        _check_order(segments, found["segments"], mask)
    if (prefix := given.get("prefix")) is not None:
        _check_prefix(attention, prefix, given, shape)
        found["prefix"] = inside(prefix, shape[1], mask)
    return found


def check_record(record: Any) -> None:
    """Raise ValueError unless ``record`` is a dict that is empty or names what a call can tell."""
    if not isinstance(record, dict):
        raise ValueError(f"record must be a dict to write into, not {type(record).__name__}")
    for name in record:
        known(str(name), dict.fromkeys(RECORDED), "entry of a record")


def requested_outputs(attention: Contract, record: dict) -> dict[str, Any]:
    """The record that ``attend`` gets, with those of the keys "matrix" and of OWN that it can fill in."""
    names = record or RECORDED
    whole = {"matrix": None} if any(name not in OWN for name in names) else {}
    return whole | {name: None for name, fact in OWN.items() if getattr(attention, fact) and name in names}


def fill_record(record: dict, told: dict) -> None:
    """Fill in what was told, all of it or what the record names."""
    found = {name: told[name] for name in record or told if told.get(name) is not None}
    record.clear()
    record.update(found)


def check_x(module: nn.Module | Contract, dim: int, x: Tensor) -> None:
    """Raise ValueError unless x is (B, N, dim) in the dtype of the module's weights (any under autocast)."""
    if not isinstance(x, Tensor) or x.dim() != 3 or x.shape[-1] != dim or not x.is_floating_point():
        raise ValueError(f"x must be floating-point (B, N, {dim}), not {describe(x)}")
    weight = weight_of(module)
    if weight is not None and weight.dtype != x.dtype and not torch.is_autocast_enabled(x.device.type):
        raise ValueError(f"x is {x.dtype} and the weights are {weight.dtype}; convert one, or use torch.autocast")


def weight_of(module: nn.Module | Contract) -> Tensor | None:
    """Some floating-point parameter, found quickly: a token step cannot afford the walk of ``parameters()``.

    None where there is none, as in a module whose weights are quantized: its linear maps keep theirs packed, or as
    integers.
    """
    for part in module._modules.values():
        weight = getattr(part, "weight", None)
        if isinstance(weight, Tensor) and weight.is_floating_point():
            return weight
    return next((p for p in module.parameters() if p.is_floating_point()), None)


def _check_order(segments: Tensor, real: Tensor, mask: Tensor | None) -> None:
    if torch.compiler.is_compiling():
        return  # the values are not known yet
    falls = segments < real.cummax(1).values
    if mask is not None:
        falls = falls & mask
    if falls.any():
        raise ValueError(f"segments must never decrease along a row; row {int(falls.any(1).nonzero()[0])} does")


def _check_prefix(attention: Contract, prefix: Tensor, given: dict[str, Any], shape: tuple[int, int]) -> None:
    batch, n = shape
    if not isinstance(prefix, Tensor) or prefix.dtype != torch.int64 or tuple(prefix.shape) != (batch,):
        raise ValueError(
            f"prefix must be int64 {(batch,)}, so many leading real tokens of each row, not {describe(prefix)}"
        )
    if not attention.causal:
        raise ValueError(f"a bidirectional {attention.name} sees whole sequences already; prefix= is for causal=True")
    for other in ("segments", "context"):
        if other in given:
            raise ValueError(f"prefix= and {other}= came together; a prefix is the beginning of one sequence's own row")
    if torch.compiler.is_compiling():
        return  # the values are not known yet
    mask = given.get("mask")
    real = torch.full_like(prefix, n) if mask is None else mask.sum(1)
    if (odd := (prefix < 0) | (prefix > real)).any():
        row = int(odd.nonzero()[0])
        raise ValueError(
            f"prefix[{row}]={int(prefix[row])} must lie between 0 and the row's {int(real[row])} real tokens"
        )


def _check_context(attention: Contract, context: Tensor, x: Tensor, state: Any, given: dict[str, Any]) -> None:
    if state is not None:
        raise ValueError("context= and state came together; the state of cross attention already keeps its context")
    if "segments" in given:
        raise ValueError("segments= packs one sequence's own tokens; with context= give each sequence a row of its own")
    width = getattr(attention, "context_dim", 0) or attention.dim
    if not isinstance(context, Tensor) or context.dim() != 3 or len(context) != len(x) or context.shape[-1] != width:
        raise ValueError(f"context must be ({len(x)}, M, {width}), not {describe(context)}")
    if context.dtype != x.dtype:
        raise ValueError(f"context is {context.dtype} and x is {x.dtype}; they must agree")


def check_state(attention: Contract, state: Any, x: Tensor) -> None:
    """Raise ValueError unless ``state`` is one of this attention's, for the rows of x (B,N,dim), on x's device.

    It is looked at in every call, also where this attention has returned it: the caller holds it, and tensors may have
    been changed, resized or freed in between.
    """
    if not isinstance(state, attention.states + attention.contexts):
        raise ValueError(
            f"{attention.name} cannot continue {_kind(state)}; its states are "
            f"{', '.join(_kind(kind) for kind in attention.states + attention.contexts)}, made by init_state or a call"
        )
    leaves, batch = tensors(state), x.shape[0]
    check_stored("the state", *leaves)
    if leaves and leaves[0].dim() and len(leaves[0]) != batch:
        raise ValueError(f"state is for {len(leaves[0])} sequences, x has {batch}")
    for leaf in leaves:
        if leaf.device != x.device:
            raise ValueError(f"x is on {x.device} and state on {leaf.device}; move one of them")
    if isinstance(state, attention.contexts):
        return
    if not attention.causal:
        raise ValueError(f"a bidirectional {attention.name} sees whole sequences; it continues states of context= only")
    expected = _parts(attention)
    if len(leaves) != len(expected):
        raise ValueError(
            f"{attention.name} cannot continue {_kind(state)}, a state of {len(leaves)} tensors: with these options "
            f"its own has {len(expected)}; init_state makes one"
        )
    for leaf, (shape, dtype) in zip(leaves, expected, strict=True):
        if leaf.shape[:1] != (batch,) or (leaf.shape[1:] != shape and not _grown(leaf.shape[1:], shape)):
            raise ValueError(
                f"state has a part of shape {tuple(leaf.shape)} where {attention.name} with dim={attention.dim}, "
                f"heads={attention.heads} has {(batch, *shape)}; it belongs to an attention of another size"
            )
        # Numbers may have another precision, after autocast for instance; what counts or chooses may not.
        if leaf.dtype != dtype and not (leaf.is_floating_point() and dtype.is_floating_point):
            raise ValueError(f"state has a part of {leaf.dtype} where {attention.name} has {dtype}")
        if dtype == torch.int64 and leaf.dim() == 1:
            check_counts("counter", leaf)


def _grown(shape: torch.Size, expected: torch.Size) -> bool:
    """Whether a part has this shape, where a dimension that starts at zero grows."""
    return len(shape) == len(expected) and all(e in (0, s) for s, e in zip(shape, expected, strict=True))


def _parts(attention: Contract) -> list[tuple[torch.Size, torch.dtype]]:
    """Shape of one row and dtype of each part of a new state."""
    found = attention.__dict__.get("_state_parts")
    if found is None:
        found = [(leaf.shape[1:], leaf.dtype) for leaf in tensors(attention.state_sizes())]
        attention.__dict__["_state_parts"] = found
    return found


def check_donated(x: Tensor, state: Any, module: nn.Module | Contract) -> None:
    """Raise ValueError where a state cannot be given away by a call with x to this module."""
    if state is None:
        raise ValueError("donate=True gives a state away, but no state came")
    leaves = tensors(state)
    for leaf in leaves:
        check_donation(leaf, x=x)
    if torch.is_grad_enabled() and any(t.requires_grad for t in (x, *leaves, *module.parameters())):
        raise ValueError(
            "donate=True overwrites the state, which gradients still need; use torch.no_grad() or donate=False"
        )


def real_segments(segments: Tensor, mask: Tensor | None) -> Tensor:
    """Ids (B,N) with those of masked tokens replaced by their neighbors', since a masked token does not exist."""
    if mask is None or not segments.shape[1]:
        return segments
    limits = torch.iinfo(torch.int64)
    ids = segments.masked_fill(~mask, limits.min).cummax(1).values
    first = segments.masked_fill(~mask, limits.max).amin(1, keepdim=True)
    return torch.where(ids == limits.min, first, ids)


def _kind(value: Any) -> str:
    cls = value if isinstance(value, type) else type(value)
    return f"{cls.__module__.rsplit('.', 1)[-1]}.{cls.__name__}"
