"""The arguments of a call, checked once: what came, what would be right."""

from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .._utils.spec import known
from ..ops.backends import refuse_tracing
from ..ops.operands import check_donation, check_stored, same_device
from ..ops.prefix import inside
from ..states.counters import check_counts

# What a record can be asked for; all but those of OWN cost O(N M). Each of OWN is there where the class says so.
RECORDED = ("matrix", "mask", "lse", "carried", "penalty", "statistics", "log_prob")
OWN = {"penalty": "penalty", "statistics": "statistics", "log_prob": "samples"}


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


class Settled(NamedTuple):
    """``segments`` or ``prefix`` that a stack has checked for its layers, in the form that ``attend`` gets."""

    value: Tensor
    isolated: bool = False
    """whether the stack itself keeps what packed sequences hold apart"""


def check(attention: Contract, x: Tensor, state: Any, given: dict[str, Any]) -> None:
    """Raise ValueError for an argument of a wrong kind or shape, or one that this attention does not support."""
    refuse_tracing()
    check_x(attention, attention.dim, x)
    _check_own(attention, x, given)
    batch, segments, prefix = x.shape[0], given.get("segments"), given.get("prefix")
    if (context := given.get("context")) is not None:
        _check_context(attention, context, x, state, segments)
        if (seen := given.get("context_mask")) is not None:
            check_mask("context_mask", seen, tuple(context.shape[:2]))
    elif "context_mask" in given:
        raise ValueError("context_mask= came without context=; a state of cross attention keeps its own mask")
    if "record" in given:
        check_record(given["record"])
    if state is not None:
        check_state(attention, state, batch)
        for leaf in pytree.tree_leaves(state):
            same_device(x=x, state=leaf)
        if isinstance(state, attention.contexts) and segments is not None:
            raise ValueError("segments= packs one sequence's own tokens; a state of cross attention has none")
        if isinstance(state, attention.contexts) and prefix is not None:
            raise ValueError("prefix= counts a sequence's own tokens; a state of cross attention has none")
    if "donate" in given:
        _check_donate(attention, x, state)


def _check_own(attention: Contract, x: Tensor, given: dict[str, Any]) -> None:
    """What is asked of a sequence's own tokens. Values, which a device would be waited for, are looked at once."""
    for name in given:
        if name not in attention.supported_args:
            raise ValueError(
                f"{attention.name} does not support {name}=; it supports: {', '.join(sorted(attention.supported_args))}"
            )
    batch, n = x.shape[:2]
    if (mask := given.get("mask")) is not None:
        check_mask("mask", mask, (batch, n))
    if (segments := given.get("segments")) is not None and not isinstance(segments, Settled):
        check_segments(segments, (batch, n))
        _check_order(segments, mask)
    if (prefix := given.get("prefix")) is not None and not isinstance(prefix, Settled):
        _check_prefix(attention, prefix, given, (batch, n))


def packing_arguments(given: dict[str, Any], n: int) -> dict[str, Any]:
    """What ``attend`` gets for the ``segments`` and the ``prefix`` among arguments that have been checked."""
    found, mask = {}, given.get("mask")
    if (segments := given.get("segments")) is not None:
        found["segments"] = segments.value if isinstance(segments, Settled) else real_segments(segments, mask)
    if (prefix := given.get("prefix")) is not None:
        found["prefix"] = prefix.value if isinstance(prefix, Settled) else inside(prefix, n, mask)
    return found


def validate_for_layers(
    attention: Contract, x: Tensor, given: dict[str, Any], *, isolated: bool = False
) -> dict[str, Any]:
    """Arguments of a stack for all its layers, whose first attention this is: checked here instead of in each layer."""
    given = {name: value for name, value in given.items() if value is not None}
    _check_own(attention, x, given)
    return given | {name: Settled(value, isolated) for name, value in packing_arguments(given, x.shape[1]).items()}


def check_mask(name: str, mask: Tensor, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless ``mask`` is bool of this shape."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or tuple(mask.shape) != shape:
        raise ValueError(f"{name} must be bool {shape}, True on real tokens, not {_what(mask)}")


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
        raise ValueError(f"x must be floating-point (B, N, {dim}), not {_what(x)}")
    weight = weight_of(module)
    if weight is not None and weight.dtype != x.dtype and not torch.is_autocast_enabled(x.device.type):
        raise ValueError(f"x is {x.dtype} and the weights are {weight.dtype}; convert one, or use torch.autocast")


def weight_of(module: nn.Module | Contract) -> Tensor | None:
    """Some floating-point parameter, found quickly: a token step cannot afford the walk of ``parameters()``.

    None where there is none, as in a module whose weights are quantised: its linear maps keep theirs packed, or as
    integers.
    """
    for part in module._modules.values():
        weight = getattr(part, "weight", None)
        if isinstance(weight, Tensor) and weight.is_floating_point():
            return weight
    return next((p for p in module.parameters() if p.is_floating_point()), None)


def check_segments(segments: Tensor, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless ``segments`` is int64 of this shape."""
    if not isinstance(segments, Tensor) or segments.dtype != torch.int64 or tuple(segments.shape) != shape:
        raise ValueError(f"segments must be int64 {shape}, one id per token, not {_what(segments)}")


def _check_order(segments: Tensor, mask: Tensor | None) -> None:
    if torch.compiler.is_compiling():
        return  # the values are not known yet
    falls = segments < real_segments(segments, mask).cummax(1).values
    if mask is not None:
        falls = falls & mask
    if falls.any():
        raise ValueError(f"segments must never decrease along a row; row {int(falls.any(1).nonzero()[0])} does")


def _check_prefix(attention: Contract, prefix: Tensor, given: dict[str, Any], shape: tuple[int, int]) -> None:
    batch, n = shape
    if not isinstance(prefix, Tensor) or prefix.dtype != torch.int64 or tuple(prefix.shape) != (batch,):
        raise ValueError(
            f"prefix must be int64 {(batch,)}, so many leading real tokens of each row, not {_what(prefix)}"
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


def _check_context(attention: Contract, context: Tensor, x: Tensor, state: Any, segments: Tensor | None) -> None:
    if state is not None:
        raise ValueError("context= and state came together; the state of cross attention already keeps its context")
    if segments is not None:
        raise ValueError("segments= packs one sequence's own tokens; with context= give each sequence a row of its own")
    width = getattr(attention, "context_dim", 0) or attention.dim
    if not isinstance(context, Tensor) or context.dim() != 3 or len(context) != len(x) or context.shape[-1] != width:
        raise ValueError(f"context must be ({len(x)}, M, {width}), not {_what(context)}")
    if context.dtype != x.dtype:
        raise ValueError(f"context is {context.dtype} and x is {x.dtype}; they must agree")


def check_state(attention: Contract, state: Any, batch: int) -> None:
    """Raise ValueError unless ``state`` is one of this attention's, for ``batch`` sequences."""
    if not isinstance(state, attention.states + attention.contexts):
        raise ValueError(
            f"{attention.name} cannot continue {_kind(state)}; its states are "
            f"{', '.join(_kind(kind) for kind in attention.states + attention.contexts)}, made by init_state or a call"
        )
    leaves = pytree.tree_leaves(state)
    check_stored("the state", *leaves)
    if leaves[0].shape[0] != batch:
        raise ValueError(f"state is for {len(leaves[0])} sequences, x has {batch}")
    if isinstance(state, attention.contexts):
        return
    if not attention.causal:
        raise ValueError(f"a bidirectional {attention.name} sees whole sequences; it continues states of context= only")
    shapes = _shapes(attention)
    if len(leaves) != len(shapes):
        raise ValueError(
            f"{attention.name} cannot continue {_kind(state)}, a state of {len(leaves)} tensors: with these options "
            f"its own has {len(shapes)}; init_state makes one"
        )
    for leaf, (expected, dtype) in zip(leaves, shapes, strict=True):
        # A dimension that starts at zero grows, so any size fits.
        odd = leaf.dim() != len(expected) or leaf.shape[0] != batch
        if odd or any(e not in (0, s) for s, e in zip(leaf.shape[1:], expected[1:], strict=True)):
            raise ValueError(
                f"state has a part of shape {tuple(leaf.shape)} where {attention.name} with dim={attention.dim}, "
                f"heads={attention.heads} has {(batch, *expected[1:])}; it belongs to an attention of another size"
            )
        # Numbers may have another precision, after autocast for instance; what counts or chooses may not.
        if leaf.dtype != dtype and not (leaf.is_floating_point() and dtype.is_floating_point):
            raise ValueError(f"state has a part of {leaf.dtype} where {attention.name} has {dtype}")
        if dtype == torch.int64 and leaf.dim() == 1:
            check_counts("counter", leaf)


def _shapes(attention: Contract) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shape and type of each part of a new state."""
    found = attention.__dict__.get("_state_shapes")
    if found is None:
        found = [(tuple(leaf.shape), leaf.dtype) for leaf in pytree.tree_leaves(attention.state_sizes())]
        attention.__dict__["_state_shapes"] = found
    return found


def _check_donate(attention: Contract, x: Tensor, state: Any) -> None:
    if state is None:
        raise ValueError("donate=True gives a state away, but no state came")
    for leaf in pytree.tree_leaves(state):
        check_donation(leaf, x=x)
    if not torch.is_grad_enabled():
        return
    if any(t.requires_grad for t in (x, *pytree.tree_leaves(state), *attention.parameters())):
        raise ValueError(
            "donate=True overwrites the state, which gradients still need; use torch.no_grad() or donate=False"
        )


def real_segments(segments: Tensor, mask: Tensor | None) -> Tensor:
    """Ids (B,N) with those of masked tokens replaced by their neighbours', since a masked token does not exist."""
    if mask is None or not segments.shape[1]:
        return segments
    limits = torch.iinfo(torch.int64)
    ids = segments.masked_fill(~mask, limits.min).cummax(1).values
    first = segments.masked_fill(~mask, limits.max).amin(1, keepdim=True)
    return torch.where(ids == limits.min, first, ids)


def _what(value: Any) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _kind(value: Any) -> str:
    cls = value if isinstance(value, type) else type(value)
    return f"{cls.__module__.rsplit('.', 1)[-1]}.{cls.__name__}"
