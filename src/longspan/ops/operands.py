"""Operands of operations: negated views, masked content, donated memory, freed storage, transforms of torch."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

TRANSFORMED = "transforms of torch.func and forward-mode derivatives only follow the operations of torch"


def materialize_neg(*tensors: Tensor | None) -> Sequence[Any]:
    """Resolve lazily negated views.

    A kernel would read the memory without the sign, and ``Tensor.copy_`` loses it in half precision.
    """
    return [t if t is None else t.resolve_neg() for t in tensors]


def contiguous(*tensors: Tensor | None) -> Sequence[Any]:
    """Return contiguous tensors; None for None."""
    return [t if t is None else t.contiguous() for t in tensors]


def zero_masked(mask: Tensor | None, *tensors: Tensor | None) -> Sequence[Any]:
    """Set tensors (B,H,N,...) to 0 at masked tokens, mask (B,N), so that NaN there reaches no sum or gradient."""
    if mask is None:
        return tensors
    away = ~mask[:, None, :, None]
    return [t if t is None else t.masked_fill(away if t.dim() == 4 else away[..., 0], 0.0) for t in tensors]


def exporting() -> bool:
    """Return whether ``torch.export`` makes its program. ``is_exporting`` is True under torch.compile of torch 2.11."""
    return getattr(torch.compiler, "_is_exporting_flag", False)


def in_onnx() -> bool:
    """Return whether ``torch.onnx.export`` makes its graph, which may contain only what ONNX has operators for."""
    # Before torch 2.8 this cannot be known, and no operator of another domain can be written.
    return exporting() and hasattr(torch.onnx, "ops") and torch.onnx.is_in_onnx_export()


def transformed() -> bool:
    """Return whether a transform of ``torch.func`` (grad, vjp, jvp, vmap) or ``torch.autograd.forward_ad`` is active.

    Transforms follow the operations of torch one by one, so only forms made of such operations may run. The tracing of
    torch.compile does not count, that of torch.onnx.export does.
    """
    return in_onnx() if torch.compiler.is_compiling() else _transforms()


def followed() -> bool:
    """Return whether a compiler or a transform follows the call, so that memory and values cannot be inspected."""
    return torch.compiler.is_compiling() or _transforms()


def _transforms() -> bool:
    return forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None  # pyright: ignore[reportAttributeAccessIssue] (a part of torch._C without stubs)


def unreadable(tensors: Sequence[Tensor]) -> str:
    """Return why no kernel may read these tensors, on any device; empty if it may."""
    if exporting():
        return "they are not part of an exported program"
    # Subclasses with ``__torch_dispatch__``, such as fake tensors, may have no memory.
    if not torch.compiler.is_compiling() and (
        torch._C._len_torch_dispatch_stack()
        or any(type(t).__torch_dispatch__ is not Tensor.__torch_dispatch__ for t in tensors)  # pyright: ignore[reportAttributeAccessIssue] (torch's stubs lack it)
    ):
        return "they are invisible to the dispatch mode or tensor subclass that follows the operations of torch"
    return TRANSFORMED if transformed() else ""


def needs_autograd(*tensors: Tensor) -> bool:
    """Return whether autograd or a transform records operations on these tensors, which rules out in-place work."""
    return transformed() or any(t.requires_grad for t in tensors)


def double_backward(
    function: Callable[..., Any], inputs: Sequence[Tensor | None], grads: Sequence[Tensor], **options: Any
) -> list[Tensor | None]:
    """Return gradients of ``function(*inputs, **options)``, which are differentiable where gradients are enabled.

    Backward passes call it for higher derivatives, and where kernels of the backward pass are missing.

    Args:
        function: Computes the outputs from plain operations of torch.
        inputs: Tensors or None.
        grads: The gradients of the outputs.
        options: Passed on to ``function``.

    Returns:
        The gradient of each input; None for an input that is None or requires no gradient.
    """
    higher = torch.is_grad_enabled()
    with torch.enable_grad():
        # Views, since one input may have been computed from another: gradients must not flow through that.
        views = [t if t is None else t.view_as(t) for t in inputs]
        wanted = [t for t in views if t is not None and t.requires_grad]
        # An output may depend on no input that requires a gradient, such as the state on the queries.
        made = function(*views, **options)
        made = (made,) if isinstance(made, Tensor) else made
        passed = [(out, grad) for out, grad in zip(made, grads, strict=True) if out.requires_grad]
        if not passed:
            return [t if t is None or not t.requires_grad else torch.zeros_like(t) for t in views]
        outputs, above = zip(*passed, strict=True)
        found = iter(
            torch.autograd.grad(outputs, wanted, above, create_graph=higher, allow_unused=True, materialize_grads=True)
        )
    return [next(found) if t is not None and t.requires_grad else None for t in inputs]


def with_higher_derivatives(y: Tensor, plain: Callable[..., Tensor], *operands: Tensor | None) -> Tensor:
    """Return y (...) with derivatives of every order; y itself can be differentiated once.

    Args:
        y: The output of a kernel.
        plain: Computes y from plain operations of torch.
        operands: Tensors or None, the arguments of ``plain``.
    """
    found: Any = _Higher.apply(y, plain, *operands)
    return found


class _Higher(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(y: Tensor, plain: Callable[..., Tensor], *operands: Tensor | None) -> Tensor:
        return y.view_as(y)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, ctx.plain, *operands = inputs
        ctx.save_for_backward(*operands)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        operands = ctx.saved_tensors
        if not torch.is_grad_enabled():
            return (*grads, *[None] * (1 + len(operands)))
        return None, None, *double_backward(lambda *t: ctx.plain(*t).to(grads[0].dtype), operands, grads)


def mark_overwritten(*tensors: Tensor) -> None:
    """Increment the autograd version of tensors that a kernel has changed in place.

    A backward pass that has saved one of them then raises an error instead of computing wrong gradients.
    """
    torch.autograd.graph.increment_version(tensors)


def same_device(**tensors: Tensor | None) -> None:
    """Raise ValueError unless all tensors that are not None are on one device."""
    given = {name: t for name, t in tensors.items() if t is not None}
    first, *others = given
    for name in others:
        if given[name].device != given[first].device:
            raise ValueError(
                f"{first} is on {given[first].device} and {name} on {given[name].device}; move one of them"
            )


def check_donation(state: Tensor, **others: Tensor | None) -> None:
    """Raise ValueError if a donated state shares memory with another operand, or with itself."""
    if followed():
        return
    begin, end = _range(state)
    if end - begin < state.nbytes and begin < end:
        raise ValueError("donate=True overwrites the state, parts of which share memory; pass a clone")
    for name, other in others.items():
        if other is not None:
            if type(other) is Tensor and other.layout is torch.strided:
                # Most operands; this runs once per token and layer.
                first = other.data_ptr()
                if first >= end or (other.is_contiguous() and first + other.nbytes <= begin):
                    continue
            first, last = _range(other)
            if first < end and begin < last:
                raise ValueError(f"donate=True overwrites the state, which shares memory with {name}; pass a clone")


def check_scale(scale: Any) -> None:
    """Raise ValueError unless ``scale`` is a finite number or None."""
    if scale is not None and not (isinstance(scale, int | float) and -math.inf < scale < math.inf):
        raise ValueError(f"scale={scale!r} must be a finite number, or None for 1 / sqrt(D)")


def check_eps(eps: Any) -> None:
    """Raise ValueError unless ``eps`` is a finite number >= 0."""
    if not (isinstance(eps, int | float) and 0 <= eps < math.inf):
        raise ValueError(f"eps={eps!r} is added to the denominator and must be a finite number >= 0")


def in_memory(x: Tensor) -> bool:
    """Return whether a tensor has memory: not on the meta device, not fake tensors and similar subclasses."""
    own_rules = type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__  # pyright: ignore[reportAttributeAccessIssue] (torch's stubs lack it)
    return x.layout == torch.strided and not x.is_meta and not own_rules


def stored(x: Tensor) -> bool:
    """Return whether the storage of a plain tensor holds all of its elements, so that reading them is safe.

    ``x.untyped_storage().resize_(0)`` frees the memory and keeps the shape. Always True if there is no storage to
    check: while a compiler traces, inside transforms of ``torch.func``, and for tensor subclasses.
    """
    return followed() or holds(x)


def holds(x: Tensor) -> bool:
    """Return ``stored`` for a call that nothing follows."""
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
    """Raise ValueError if the storage of a tensor was freed or is too small for its shape."""
    if followed():
        return
    for x in tensors:
        if x is not None and not holds(x):
            raise ValueError(
                f"{name} has a tensor {tuple(x.shape)} whose storage holds {x.untyped_storage().nbytes()} bytes, not "
                f"all of its elements: the memory was freed; restore it, or start from a new state"
            )


def overlap(*tensors: Tensor) -> bool:
    """Return whether any two of these contiguous tensors share memory."""
    ranges = sorted(_range(t) for t in tensors if t.numel())
    return any(end > begin for (_, end), (begin, _) in pairwise(ranges))


def _range(x: Tensor) -> tuple[int, int]:
    """Return the address range of a tensor, as far as it is known; strided tensors may leave gaps in it."""
    # Plain tensors first: this runs several times per token and layer. Their address is 0 without memory.
    plain = type(x) is Tensor and x.layout == torch.strided
    if not plain and (not in_memory(x) or not x.numel()):
        return 0, 0
    if not (begin := x.data_ptr()) or x.is_contiguous():
        return begin, begin + (x.nbytes if begin else 0)
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return begin, begin + (last + 1) * x.element_size()
