"""Linear maps whose weights are blocks of few bits."""

from typing import Any

import torch
from torch import Tensor

from ..._utils.spec import known
from ..arguments import describe
from ..backends import choose_backend, is_forced, log_backend
from ..custom_ops import register
from ..operands import same_device, transformed
from . import composed, native
from .formats import FORMATS, Blocks
from .operands import ACTIVATIONS, OP, Map
from .packing import Packed, pack, rows, shapes

__all__ = ["Blocks", "Packed", "pack", "quantized_linear"]


def quantized_linear(
    x: Tensor, weight: Packed | Blocks, bias: Tensor | None = None, *, activations: str = "int16"
) -> Tensor:
    r"""Linear map $y = W x + b$ with a weight in blocks of few bits, such as those of GGUF files.

    Activations are rounded to integers in blocks of 32 adjacent channels,

    $$
    x_i \approx s \, \mathrm{round}(x_i / s), \quad s = \max_j |x_j| / L
    $$

    with L = 32639 for ``int16`` and 127 for ``int8``. Sums within a block are exact, and sums of blocks are float32, in
    a fixed order: an output has the same bits for any number of threads and whatever rows are computed with it. The
    gradient of x ignores the rounding, and the weight has none.

    Args:
        x: (...,K) floating-point.
        weight: (N,K), from ``longspan.ops.quantized.pack``, or blocks, which each call packs again.
        bias: (N,) or None.
        activations: ``"int16"``, with an error of about 2e-5 of the output; ``"int8"``, with one of 5e-3; or
            ``"float32"``, which does not round them.

    Returns:
        The output (...,N) in x's dtype. A row of x with infinity or NaN gives no finite output.

    Raises:
        ValueError: shapes, devices or dtypes do not fit, or ``activations`` is unknown.

    Example:
        >>> import torch, longspan
        >>> from longspan.ops.quantized import formats, pack
        >>> weight, x = torch.randn(48, 64), torch.randn(3, 64)
        >>> y = longspan.quantized_linear(x, pack(formats.quantize(weight, "Q8_0")))
        >>> float((y - x @ weight.T).norm() / y.norm()) < 0.01
        True

    References:
        The blocks are those of ggml, github.com/ggml-org/ggml, docs/gguf.md.
    """
    known(activations, ACTIVATIONS, "kind of activations")
    weight = pack(weight) if isinstance(weight, Blocks) else weight
    check_packed(weight)
    if not x.is_floating_point() or not x.dim() or x.shape[-1] != weight.inputs:
        raise ValueError(f"x must be a floating-point tensor (..., K) = (..., {weight.inputs}), not {describe(x)}")
    if bias is not None and (bias.shape != (weight.outputs,) or not bias.is_floating_point()):
        raise ValueError(f"bias must be a floating-point tensor (N,) = ({weight.outputs},), not {describe(bias)}")
    same_device(x=x, weight=weight.quants, bias=bias)
    return multiply(Map(x, bias, *weight, activations))


def check_packed(weight: Packed) -> None:
    """Raise ValueError unless the tensors of a packed weight have the shapes of its sizes."""
    known(weight.format, FORMATS, "format of blocks")
    block, expected = FORMATS[weight.format].block, shapes(weight.format, weight.outputs, weight.inputs)
    if weight.inputs % block:
        raise ValueError(f"{weight.inputs} inputs are not a multiple of {block}, the block of {weight.format}")
    tensors = weight.quants, weight.scales, weight.factors
    for name, tensor, shape in zip(Packed._fields, tensors, expected, strict=False):
        if tensor.shape != shape or tensor.dtype != torch.uint8:
            raise ValueError(f"{name} of the packed weight must be uint8 {shape}, not {describe(tensor)}")


def multiply(r: Map) -> Tensor:
    """``quantized_linear`` without checks."""
    grows = torch.is_grad_enabled() and (r.x.requires_grad or (r.bias is not None and r.bias.requires_grad))
    if torch.compiler.is_compiling() or grows:
        return _forward(*r)
    if not is_forced() and (y := native.step(r)) is not None:
        log_backend(OP, "native")
        return y
    return composed.attend(r) if transformed() else _computed(*r)


def _computed(*fields: Any) -> Tensor:
    r = Map(*fields)
    name = choose_backend(OP, ("reference", "torch", "native"), {"native": native.why_not(r)})
    return {"native": native.attend, "torch": composed.attend, "reference": composed.reference}[name](r)


def _shapes(x: Tensor, *fields: Any) -> Tensor:
    return x.new_empty(*x.shape[:-1], Map(x, *fields).outputs)


def _transposed(grad: Tensor, *fields: Any) -> Tensor:
    weight = Packed(*fields)
    reason = native.why_not(Map(grad, None, *weight, "float32"))
    name = choose_backend(f"{OP}'s gradient", ("reference", "torch", "native"), {"native": reason})
    read = native.dequantized if name == "native" else rows
    return composed.transposed(grad, weight, read).to(grad.dtype)


_WEIGHT = "Tensor quants, Tensor scales, Tensor factors, str format, int outputs, int inputs"
_forward = register(
    "quantized_linear", _computed, _shapes, f"(Tensor x, Tensor? bias, {_WEIGHT}, str activations) -> Tensor"
)
_backward = register(
    "quantized_linear_transposed",
    _transposed,
    lambda grad, *fields: grad.new_empty(*grad.shape[:-1], Packed(*fields).inputs),
    f"(Tensor grad, {_WEIGHT}) -> Tensor",
)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.weight = inputs[-7:-1] if len(inputs) == len(Map._fields) else inputs[-6:]


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    dx = _backward(grad, *ctx.weight) if ctx.needs_input_grad[0] else None
    dbias = grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
    return dx, dbias, *[None] * 7


def _second(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return _forward(grad, None, *ctx.weight, "float32"), *[None] * 6


_forward.register_autograd(_gradients, setup_context=_keep)
_backward.register_autograd(_second, setup_context=_keep)
