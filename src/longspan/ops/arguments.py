"""Checks of operands, mask, segments and state that operations and modules share."""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import torch
from torch import Tensor

from .operands import check_stored, same_device
from .packed import check_packed
from .tensors import wide_dtype


class StateOptions(TypedDict, total=False):
    """Keyword arguments of ops with a state: which tokens are real, which belong together, the state before them."""

    mask: Tensor | None
    segments: Tensor | None
    cu_seqlens: Tensor | None
    state: Tensor | None


class CallOptions(StateOptions, total=False):
    """The same of public functions, which may also donate the state."""

    donate: bool


def describe(value: Any) -> str:
    """Describe a value in an error message: dtype and shape of a tensor, or the type of anything else."""
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def check_mask(name: str, mask: Any, shape: tuple[int, ...], kept: str = "real tokens") -> None:
    """Raise ValueError unless ``mask`` is a bool tensor of this shape."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or tuple(mask.shape) != shape:
        raise ValueError(f"{name} must be bool {shape}, True on {kept}, not {describe(mask)}")


def check_segments(segments: Any, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless ``segments`` is an int64 tensor of this shape."""
    if not isinstance(segments, Tensor) or segments.dtype != torch.int64 or tuple(segments.shape) != shape:
        raise ValueError(f"segments must be int64 {shape}, one id per token, not {describe(segments)}")


def check_state(state: Any, layout: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raise ValueError unless ``state`` is a tensor of this shape and dtype; ``layout`` names its axes."""
    if not isinstance(state, Tensor) or state.dtype != dtype or tuple(state.shape) != shape:
        raise ValueError(f"state must be {dtype} {layout} = {shape}, not {describe(state)}")


def check_operands(
    shapes: Mapping[str, str],
    like: str,
    *,
    mask: Tensor | None = None,
    segments: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    state: Tensor | None = None,
    **operands: Any,
) -> dict[str, int]:
    """Raise ValueError unless the operands of a call have the shapes of a table.

    Args:
        shapes: For each operand, the names of its axes, such as ``B H N D``, with alternatives after ``|``. An axis has
            the same size in all operands. Those of ``mask`` are a row and its tokens; the first of ``state`` is the
            number of sequences. A table without ``state`` leaves it to the caller, but for its device and its memory.
        like: The operand whose dtype, float32 at least, is that of the state.
        mask: (B,N) bool, or None.
        segments: (B,N) int64, or None.
        cu_seqlens: (S+1,), or None.
        state: The state, or None.
        operands: Floating-point tensors, or None for those that were not given. The first has all axes of the mask.

    Returns:
        The sizes of the axes. ``sequences`` is the number of states.
    """
    sizes: dict[str, int] = {}
    for name, t in operands.items():
        if t is None:
            continue
        layouts = [axes.split() for axes in shapes[name].split("|")]
        plain = isinstance(t, Tensor) and t.is_floating_point()
        ranked = [axes for axes in layouts if plain and len(axes) == t.dim()]
        fitting = [axes for axes in ranked if all(map(lambda axis, n: sizes.get(axis, n) == n, axes, t.shape))]
        if not fitting:
            if ranked and name in ("key", "value"):
                raise misfit(shapes, operands)
            expected = " or ".join(_shape(axes, sizes) for axes in layouts)
            raise ValueError(f"{name} must be a floating-point tensor {expected}, not {describe(t)}")
        sizes.update(zip(fitting[0], t.shape, strict=True))
    same_device(**operands, mask=mask, segments=segments, cu_seqlens=cu_seqlens, state=state)
    check_stored("the state", state)
    batch, tokens = (sizes[axis] for axis in shapes["mask"].split())
    if mask is not None:
        check_mask("mask", mask, (batch, tokens))
    if segments is not None:
        check_segments(segments, (batch, tokens))
    sizes["sequences"] = check_packed(cu_seqlens, batch, tokens, segments)
    if state is not None and "state" in shapes:
        axes = shapes["state"].split()
        shape = (sizes["sequences"], *(sizes[axis] for axis in axes[1:]))
        check_state(state, _shape(axes, {}), shape, wide_dtype(operands[like]))
    return sizes


def misfit(shapes: Mapping[str, str], operands: Mapping[str, Any], rule: str = "") -> ValueError:
    """Return the error for a query, key and value that do not fit each other; ``rule`` is added to the message."""
    names = ("query", "key", "value")
    given = ", ".join(f"{name} {tuple(operands[name].shape)}" for name in names)
    return ValueError(f"{given} do not fit; expected {', '.join(_shape(shapes[n].split(), {}) for n in names)}{rule}")


def _shape(axes: Sequence[str], sizes: Mapping[str, int]) -> str:
    """Write axes as sizes if all are known, as names if none is, else as both: ``(channels, S) = (5, S)``."""
    names, known = (_tuple(found) for found in (axes, [str(sizes.get(axis, axis)) for axis in axes]))
    if all(axis in sizes for axis in axes):
        return known
    return names if names == known else f"{names} = {known}"


def _tuple(items: Sequence[str]) -> str:
    return f"({', '.join(items)}{',' if len(items) == 1 else ''})"
