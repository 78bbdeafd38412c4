"""What enters an operation: views with another sign, masked content, memory that is given away, transforms of torch."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

TRANSFORMED = "a transform of torch.func, or a forward-mode derivative, follows the operations of torch alone"


def materialize_neg(*tensors: Tensor | None) -> Sequence[Any]:
    """The same numbers, where none is a view whose sign is still to be changed.

    A kernel would read the memory as it is, and torch's own ``copy_`` loses the sign of such a view in half precision.
    """
    return [t if t is None else t.resolve_neg() for t in tensors]


def zero_masked(mask: Tensor | None, *tensors: Tensor | None) -> Sequence[Any]:
    """Tensors (B,H,N,...) with 0 at masked tokens, mask (B,N): what they held, NaN too, reaches no sum or gradient."""
    if mask is None:
        return tensors
    away = ~mask[:, None, :, None]
    return [t if t is None else t.masked_fill(away if t.dim() == 4 else away[..., 0], 0.0) for t in tensors]


def transformed() -> bool:
    """Whether a transform of ``torch.func`` (grad, vjp, jvp, vmap) or ``torch.autograd.forward_ad`` is at work.

    They follow the operations of torch one by one, so that only forms made of these alone may run. A compiler's own
    tracing is none of them.
    """
    if torch.compiler.is_compiling():
        return False
    return forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None  # type: ignore[attr-defined]


def needs_autograd(*tensors: Tensor) -> bool:
    """Whether operations on these are recorded, by autograd or a transform, so that none may work in place."""
    return transformed() or any(t.requires_grad for t in tensors)


def double_backward(
    function: Callable, inputs: Sequence[Tensor | None], grads: Sequence[Tensor], **options: Any
) -> list[Tensor | None]:
    """Gradients that have gradients: of ``function(*inputs, **options)``, which plain operations compute, by ``grads``.

    -> for each of ``inputs`` its gradient, None for one that is not there or needs none.
    """
    # Views, since one of them may have been computed from another: what comes by way of that is not its gradient here.
    views = [t if t is None else t.view_as(t) for t in inputs]
    wanted = [t for t in views if t is not None and t.requires_grad]
    # An output that comes of none of these, such as a state that no query enters, has no gradient to pass on.
    made = function(*views, **options)
    made = (made,) if isinstance(made, Tensor) else made
    passed = [(out, grad) for out, grad in zip(made, grads, strict=True) if out.requires_grad]
    if not passed:
        return [t if t is None or not t.requires_grad else torch.zeros_like(t) for t in views]
    outputs, above = zip(*passed, strict=True)
    found = iter(
        torch.autograd.grad(outputs, wanted, above, create_graph=True, allow_unused=True, materialize_grads=True)
    )
    return [next(found) if t is not None and t.requires_grad else None for t in inputs]


def mark_overwritten(*tensors: Tensor) -> None:
    """Tell autograd that a kernel has changed these, as torch's own operations in place do.

    A backward pass that has saved one of them raises then, where it would be wrong in silence.
    """
    torch.autograd.graph.increment_version(tensors)


def same_device(**tensors: Tensor | None) -> None:
    """Raise ValueError unless those that there are live on one device."""
    given = {name: t for name, t in tensors.items() if t is not None}
    first, *others = given
    for name in others:
        if given[name].device != given[first].device:
            raise ValueError(
                f"{first} is on {given[first].device} and {name} on {given[name].device}; move one of them"
            )


def check_donation(state: Tensor, **others: Tensor | None) -> None:
    """Raise ValueError where a state that may be overwritten shares memory with what is still to be read, or itself."""
    if transformed() or torch.compiler.is_compiling():
        return
    begin, end = _range(state)
    if end - begin < state.nbytes and begin < end:
        raise ValueError("donate=True overwrites the state, parts of which share memory; give a clone of it")
    for name, other in others.items():
        if other is not None:
            first, last = _range(other)
            if first < end and begin < last:
                raise ValueError(f"donate=True overwrites the state, which shares memory with {name}; give a clone")


def check_scale(scale: Any) -> None:
    """Raise ValueError unless this is a finite number, or None."""
    if scale is not None and not (isinstance(scale, int | float) and -math.inf < scale < math.inf):
        raise ValueError(f"scale={scale!r} must be a finite number, or None for 1 / sqrt(D)")


def check_eps(eps: Any) -> None:
    """Raise ValueError unless this is a finite number that is not negative."""
    if not (isinstance(eps, int | float) and 0 <= eps < math.inf):
        raise ValueError(f"eps={eps!r} is added to the denominator and must be a finite number >= 0")


def in_memory(x: Tensor) -> bool:
    """Whether its numbers lie somewhere: not for the meta device, nor for fake tensors and others with own rules."""
    own_rules = type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__  # type: ignore[attr-defined]
    return x.layout == torch.strided and not x.is_meta and not own_rules


def stored(x: Tensor) -> bool:
    """Whether the storage of a plain tensor still holds all of its elements, so that reading them is safe.

    ``x.untyped_storage().resize_(0)`` frees the memory and leaves the shape as it was. Always True where there is no
    storage to look at: while a compiler traces, inside transforms of ``torch.func``, and for other kinds of tensors.
    """
    return _unreadable() or _holds(x)


def _unreadable() -> bool:
    """Whether no storage can be looked at."""
    return torch.compiler.is_compiling() or transformed()


def _holds(x: Tensor) -> bool:
    if type(x) not in (Tensor, torch.nn.Parameter):
        return True
    if not in_memory(x) or not x.numel():
        return True
    if x.is_contiguous():
        last = x.numel()
    else:
        last = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.untyped_storage().nbytes() >= (x.storage_offset() + last) * x.element_size()


def check_stored(name: str, *tensors: Tensor | None) -> None:
    """Raise ValueError for a tensor whose storage was freed or is too small for its shape."""
    if _unreadable():
        return
    for x in tensors:
        if x is not None and not _holds(x):
            raise ValueError(
                f"{name} has a tensor {tuple(x.shape)} whose storage holds {x.untyped_storage().nbytes()} bytes, not "
                f"all of its elements: the memory was freed; restore it, or start from a new state"
            )


def overlap(*tensors: Tensor) -> bool:
    """Whether two of some contiguous tensors share memory."""
    ranges = sorted(_range(t) for t in tensors if t.numel())
    return any(end > begin for (_, end), (begin, _) in pairwise(ranges))


def _range(x: Tensor) -> tuple[int, int]:
    """Where its numbers lie, in bytes, as far as that is known; in between there may be others."""
    if not in_memory(x) or not x.numel():
        return 0, 0
    begin = x.data_ptr()
    if x.is_contiguous():
        return begin, begin + x.nbytes
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return begin, begin + (last + 1) * x.element_size()
