"""Validation of the arguments of a call."""

import sys
from collections.abc import Iterable, Iterator
from enum import Enum
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from .._utils.spec import known
from ..modules.quantized import Quantized
from ..ops.arguments import check_mask, check_segments, describe
from ..ops.backends import refuse_tracing
from ..ops.operands import check_donation, check_stored
from ..ops.prefix import inside
from ..states.counters import check_counts
from ..states.utils import tensors

# Keys of a record. All but those of OWN cost O(N M); OWN maps each to the class attribute that enables it.
RECORDED = ("matrix", "mask", "lse", "carried", "penalty", "statistics", "log_prob")
OWN = {"penalty": "penalty", "statistics": "statistics", "log_prob": "samples"}


class Trusted(Enum):
    """What a caller inside this library guarantees to the attentions that it calls."""

    CHECKED = "the arguments are validated, in the form that ``checked_arguments`` returns"
    ISOLATED = "also, packed sequences are separated, so that NaN and infinity stay in their sequence"


class Contract(Protocol):
    """The properties of an attention that decide which arguments a call may have."""

    name: ClassVar[str]
    dim: int
    heads: int
    causal: bool
    supported_args: Any
    states: tuple[type, ...]
    contexts: ClassVar[tuple[type, ...]]
    _modules: dict[str, Any]

    def state_sizes(self) -> Any: ...

    def parameters(self) -> Iterator[nn.Parameter]: ...


def checked_arguments(attention: Contract, x: Tensor, state: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Validate the arguments of a call, and return them in the form that ``attend`` expects.

    Args:
        attention: The attention.
        x: (B,N,dim) input.
        state: A state, or None.
        given: The other arguments of the call that are not None, by name.

    Returns:
        The arguments by name. ``segments`` have the ids of real neighbors at masked tokens, ``prefix`` is bool (B,N),
        and masked tokens of ``context`` are zero.

    Raises:
        ValueError: For an argument of a wrong type, shape or value, or one that the attention does not support.
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
        raise ValueError("context_mask= needs context=; a state of cross attention includes its mask")
    if "record" in given:
        check_record(given["record"])
    if state is not None:
        check_state(attention, state, x)
        if isinstance(state, attention.contexts):
            for name in ("segments", "prefix"):
                if name in given:
                    raise ValueError(f"{name}= does not apply to a state of cross attention")
    if "donate" in given:
        check_donated(x, state, attention)
    return found


def check_supported(attention: Contract, given: Iterable[str]) -> None:
    """Raise ValueError for an argument that the attention does not support."""
    for name in given:
        if name not in attention.supported_args:
            raise ValueError(
                f"{attention.name} does not support {name}=; it supports: {', '.join(sorted(attention.supported_args))}"
            )


def check_tokens(attention: Contract, x: Tensor, given: dict[str, Any]) -> dict[str, Tensor]:
    """Validate mask, ``segments`` and ``prefix``, and return the latter two in the form that ``attend`` expects.

    This is the only place that reads values, which waits for the device, except for calls with one token that have no
    ``prefix``. The result is valid for every attention of a stack.

    Args:
        attention: The attention.
        x: (B,N,dim) input.
        given: The arguments by name.

    Raises:
        ValueError: For one of a wrong type, shape or value.
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
    """Raise ValueError unless ``record`` is a dict whose keys, if any, can be recorded."""
    if not isinstance(record, dict):
        raise ValueError(f"record must be a dict to write into, not {type(record).__name__}")
    for name in record:
        known(str(name), dict.fromkeys(RECORDED), "entry of a record")


def requested_outputs(attention: Contract, record: dict[str, Any]) -> dict[str, Any]:
    """Return the record for ``attend``: the keys ``"matrix"`` and those of OWN that are wanted and available."""
    names = record or RECORDED
    whole = {"matrix": None} if any(name not in OWN for name in names) else {}
    return whole | {name: None for name, fact in OWN.items() if getattr(attention, fact) and name in names}


def fill_record(record: dict[str, Any], recorded: dict[str, Any]) -> None:
    """Copy recorded values to ``record``: those of its keys, or all if it is empty."""
    found = {name: recorded[name] for name in record or recorded if recorded.get(name) is not None}
    record.clear()
    record.update(found)


def check_x(module: nn.Module | Contract, dim: int, x: object) -> None:
    """Raise ValueError unless x is (B,N,dim) in the dtype of the weights (any floating point under autocast)."""
    if not isinstance(x, Tensor) or x.dim() != 3 or x.shape[-1] != dim or not x.is_floating_point():
        raise ValueError(f"x must be floating-point (B, N, {dim}), not {describe(x)}")
    weight = weight_of(module)
    if weight is not None and weight.dtype != x.dtype and not torch.is_autocast_enabled(x.device.type):
        raise ValueError(f"x is {x.dtype} and the weights are {weight.dtype}; convert one, or use torch.autocast")


def weight_of(module: nn.Module | Contract) -> Tensor | None:
    """Return a floating-point parameter of a module, or None if all weights are quantized.

    It looks at direct children first, since walking all parameters would slow down single-token steps.
    """
    for part in module._modules.values():
        # Only the dtype and the device are needed, which compilers can read from this tensor.
        weight = part.like if isinstance(part, Quantized) else getattr(part, "weight", None)
        if isinstance(weight, Tensor) and weight.is_floating_point():
            return weight
    return next((p for p in module.parameters() if p.is_floating_point()), None)


def refuse_parts(module: nn.Module) -> None:
    """Raise ValueError for weights in parts at the time of a call, whose heads would have too few channels."""
    sharded = sys.modules["torch.distributed.tensor"].DTensor
    # Names are made only where they are needed: this runs once per token and layer.
    if _any_weight(module, sharded):
        name = next(name for name, weight in module.named_parameters() if isinstance(weight, sharded))
        raise ValueError(
            f"{type(module).__name__}.{name} is in parts during the call; tensor parallelism (parallelize_module) "
            "is not supported; use fully_shard, and call the module to which it was applied"
        )


def _any_weight(module: nn.Module, kind: type) -> bool:
    """Whether a parameter of the module or of its parts is of a type."""
    for weight in module._parameters.values():
        if isinstance(weight, kind):
            return True
    return any(_any_weight(part, kind) for part in module._modules.values() if part is not None)


def check_width(x: Tensor, width: int) -> None:
    """Raise ValueError unless the last axis of a projection has ``width`` channels, as with tensor parallelism."""
    if x.shape[-1] != width:
        raise ValueError(
            f"a projection has {x.shape[-1]} channels, but the module needs {width}; tensor parallelism "
            "(parallelize_module) is not supported; use fully_shard"
        )


def _check_order(segments: Tensor, real: Tensor, mask: Tensor | None) -> None:
    if torch.compiler.is_compiling() or segments.shape[1] <= 1:
        return  # values are unknown while a compiler traces; a single token cannot decrease
    falls = segments < real.cummax(1).values
    if mask is not None:
        falls = falls & mask
    if falls.any():
        raise ValueError(f"segments must never decrease along a row; row {int(falls.any(1).nonzero()[0])} does")


def _check_prefix(attention: Contract, prefix: object, given: dict[str, Any], shape: tuple[int, int]) -> None:
    batch, n = shape
    if not isinstance(prefix, Tensor) or prefix.dtype != torch.int64 or tuple(prefix.shape) != (batch,):
        raise ValueError(
            f"prefix must be int64 {(batch,)}, the number of leading real tokens per row, not {describe(prefix)}"
        )
    if not attention.causal:
        raise ValueError(f"a bidirectional {attention.name} sees whole sequences already; prefix= is for causal=True")
    for other in ("segments", "context"):
        if other in given:
            raise ValueError(f"prefix= and {other}= cannot be combined; a prefix begins a row of one sequence")
    if torch.compiler.is_compiling():
        return  # values are unknown while a compiler traces
    mask = given.get("mask")
    real = torch.full_like(prefix, n) if mask is None else mask.sum(1)
    if (odd := (prefix < 0) | (prefix > real)).any():
        row = int(odd.nonzero()[0])
        raise ValueError(
            f"prefix[{row}]={int(prefix[row])} must lie between 0 and the row's {int(real[row])} real tokens"
        )


def _check_context(attention: Contract, context: object, x: Tensor, state: Any, given: dict[str, Any]) -> None:
    if state is not None:
        raise ValueError("context= and state cannot be combined; a state of cross attention includes its context")
    if "segments" in given:
        raise ValueError("segments= and context= cannot be combined; put each sequence in a separate row")
    width = getattr(attention, "context_dim", 0) or attention.dim
    if not isinstance(context, Tensor) or context.dim() != 3 or len(context) != len(x) or context.shape[-1] != width:
        raise ValueError(f"context must be ({len(x)}, M, {width}), not {describe(context)}")
    if context.dtype != x.dtype:
        raise ValueError(f"context is {context.dtype} and x is {x.dtype}; they must have the same dtype")


def check_state(attention: Contract, state: Any, x: Tensor) -> None:
    """Raise ValueError unless ``state`` belongs to this attention, for the rows of x (B,N,dim), on the device of x.

    Every call checks its state, since the caller may have changed, resized or freed its tensors.
    """
    if not isinstance(state, attention.states + attention.contexts):
        raise ValueError(
            f"{attention.name} cannot continue {_kind(state)}; its states are "
            f"{', '.join(_kind(kind) for kind in attention.states + attention.contexts)}, from init_state or a call"
        )
    leaves, batch = tensors(state), x.shape[0]
    check_stored("the state", *leaves)
    if leaves and leaves[0].dim() and leaves[0].shape[0] != batch:
        raise ValueError(f"state is for {len(leaves[0])} sequences, x has {batch}")
    for leaf in leaves:
        if leaf.device != x.device:
            raise ValueError(f"x is on {x.device} and state on {leaf.device}; move one of them")
    if isinstance(state, attention.contexts):
        return
    if not attention.causal:
        raise ValueError(f"a bidirectional {attention.name} sees whole sequences; it accepts only states of context=")
    expected = _parts(attention)
    if len(leaves) != len(expected):
        raise ValueError(
            f"{attention.name} cannot continue {_kind(state)} with {len(leaves)} tensors: with these options its state "
            f"has {len(expected)}; init_state returns one"
        )
    for leaf, (shape, dtype) in zip(leaves, expected, strict=True):
        if not leaf.dim() or leaf.shape[0] != batch or not _fits(leaf.shape[1:], shape):
            raise ValueError(
                f"state has a tensor of shape {tuple(leaf.shape)}, but {attention.name} with dim={attention.dim}, "
                f"heads={attention.heads} needs {(batch, *shape)}; use a state of an attention of the same size"
            )
        # Floating-point precision may differ, for example after autocast; integers and booleans may not.
        if leaf.dtype != dtype and not (leaf.is_floating_point() and dtype.is_floating_point):
            raise ValueError(f"state has a tensor of {leaf.dtype}, but {attention.name} needs {dtype}")
        if dtype == torch.int64 and leaf.dim() == 1:
            check_counts("counter", leaf)


def _fits(shape: torch.Size, expected: torch.Size) -> bool:
    """Whether one row of a state's tensor has this shape. A dimension that starts at zero may have any size."""
    # Size by size while a compiler traces: comparing whole shapes would fix sizes that must stay free.
    if not torch.compiler.is_compiling() and shape == expected:
        return True
    return len(shape) == len(expected) and all(e in (0, s) for s, e in zip(shape, expected, strict=True))


def _parts(attention: Contract) -> list[tuple[torch.Size, torch.dtype]]:
    """Shape without the batch, and dtype, of each tensor of a new state."""
    found = attention.__dict__.get("_state_parts")
    if found is None:
        found = [(leaf.shape[1:], leaf.dtype) for leaf in tensors(attention.state_sizes())]
        attention.__dict__["_state_parts"] = found
    return found


def check_donated(x: Tensor, state: Any, module: nn.Module | Contract) -> None:
    """Raise ValueError unless a call with x may overwrite ``state``."""
    if state is None:
        raise ValueError("donate=True needs a state")
    leaves = tensors(state)
    for leaf in leaves:
        check_donation(leaf, x=x)
    if torch.is_grad_enabled() and any(t.requires_grad for t in (x, *leaves, *module.parameters())):
        raise ValueError(
            "donate=True overwrites the state, which gradients still need; use torch.no_grad() or donate=False"
        )


def real_segments(segments: Tensor, mask: Tensor | None) -> Tensor:
    """Return ids (B,N) in which masked tokens have the id of a real neighbor."""
    if mask is None or not segments.shape[1]:
        return segments
    limits = torch.iinfo(torch.int64)
    ids = segments.masked_fill(~mask, limits.min).cummax(1).values
    first = segments.masked_fill(~mask, limits.max).amin(1, keepdim=True)
    return torch.where(ids == limits.min, first, ids)


def _kind(value: Any) -> str:
    cls = value if isinstance(value, type) else type(value)
    return f"{cls.__module__.rsplit('.', 1)[-1]}.{cls.__name__}"
