"""The cross-entropy of a linear map, a few rows of logits at a time."""

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .._utils.spec import known
from .arguments import describe
from .backends import choose_backend
from .native.call import available
from .quantized import check_packed, multiply, native
from .quantized.composed import transposed
from .quantized.operands import ACTIVATIONS, Map
from .quantized.packing import Packed, select

SERVED = ("reference", "torch", "native")
CHUNK = 2**24  # logits that are in memory at a time: 64 MiB in float32


class _Options(NamedTuple):
    reduction: str
    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float | None
    packed: Packed | None = None  # in place of a weight
    activations: str = "int16"


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor | Packed,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    activations: str = "int16",
    reduction: Literal["mean", "sum", "none"] = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> Tensor:
    r"""``F.cross_entropy(F.linear(hidden, weight, bias), target)``, without all logits in memory.

    It computes 2**24 logits at a time, so that memory does not grow with N: with 248,320 tokens 64 MiB, where all
    logits of 512 positions and their gradient take 1 GiB. Ignored positions take no time. With ``mean`` and ``sum`` the
    gradients are computed in the forward pass, and are there for one backward pass; with ``none`` the backward pass
    computes the logits again.

    CPU kernels read a weight in blocks once for the loss and the gradient, a few rows at a time, and hold no logits.
    With bfloat16 inputs and a processor that multiplies bfloat16, products are sums in float32 of products of
    bfloat16 numbers; the loss and the gradient are then off by about 0.3 % of their norms, 0.8 % at most in the tests.
    A trained bias, ``torch.compile`` and float64 take the form above.

    With $z = \operatorname{cap} \tanh((W h + b) / \operatorname{cap})$, or $z = W h + b$ without a cap, and
    $l = \log \sum_v e^{z_v}$, the loss of a position is

    $$
    (1 - s) (l - z_t) + \frac{s}{V} \sum_v (l - z_v) + \zeta l^2.
    $$

    Args:
        hidden: (..., D), float32, float64, float16 or bfloat16.
        weight: (V,D), of the same dtype, for example that of an output layer or of a token embedding; or one in blocks
            of few bits, from ``longspan.ops.quantized.pack``, which gets no gradient.
        target: (...) int64, 0 to V-1 or ``ignore_index``.
        bias: (V,), of the same dtype.
        activations: With a weight in blocks, as in ``longspan.quantized_linear``.
        reduction: ``mean`` over the positions that are not ignored (NaN if there are none), ``sum``, or ``none``.
        ignore_index: The target of positions without a loss and without a gradient.
        label_smoothing: $s$, from 0 to 1, as in ``F.cross_entropy``.
        z_loss: $\zeta$, at least 0, which keeps the logits near 0.
        softcap: The cap of the logits, above 0; None: no cap.

    Returns:
        The loss in float32, or float64 for float64 operands: (), or (...) with ``none``; there ignored positions are 0.

    Raises:
        ValueError: For shapes, dtypes and devices that do not fit, targets out of range, and options out of range. The
            range of targets is checked on a CPU, and not while the call is being compiled.

    References:
        Wijmans et al. 2024, Cut Your Losses in Large-Vocabulary Language Models (2411.09009); Chowdhery et al. 2022
        (2204.02311), section 5, for the z-loss.

    Example:
        >>> import torch, longspan
        >>> hidden, weight = torch.randn(5, 8), torch.randn(1000, 8)
        >>> loss = longspan.linear_cross_entropy(hidden, weight, torch.tensor([3, 1, 4, 1, -100]))
    """
    packed, dense = (weight, None) if isinstance(weight, Packed) else (None, weight)
    options = _Options(reduction, ignore_index, label_smoothing, z_loss, softcap, packed, activations)
    _check(hidden, dense, target, bias, options)
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        # As F.linear does.
        low = torch.get_autocast_dtype(kind)
        hidden, dense = hidden.to(low), None if dense is None else dense.to(low)
        bias = None if bias is None else bias.to(low)
    rows, labels = hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1)
    real = None
    if not torch.compiler.is_compiling() and bool((found := labels != ignore_index).logical_not().any()):
        real, rows, labels = found, rows[found], labels[found]
    with torch.autocast(kind, enabled=False):
        loss = _Loss.apply(rows, dense, bias, labels, options)
    if reduction != "none":
        return loss
    if real is not None:
        loss = loss.new_zeros(len(real)).masked_scatter(real, loss)
    return loss.view(target.shape)


def _check(hidden: Any, weight: Any, target: Any, bias: Any, options: _Options) -> None:
    if not isinstance(hidden, Tensor) or not hidden.is_floating_point() or hidden.ndim < 1:
        raise ValueError(f"hidden must be a floating-point (..., D), not {describe(hidden)}")
    size, packed = hidden.shape[-1], options.packed
    if packed is not None:
        known(options.activations, ACTIVATIONS, "kind of activations")
        check_packed(packed)
        if packed.inputs != size:
            raise ValueError(f"weight must be (V, {size}), not {(packed.outputs, packed.inputs)} in {packed.format}")
    elif not isinstance(weight, Tensor) or weight.dtype != hidden.dtype or weight.ndim != 2 or weight.shape[1] != size:
        raise ValueError(f"weight must be {hidden.dtype} (V, {size}), not {describe(weight)}")
    levels = _levels(weight, options)
    if bias is not None and (bias.dtype != hidden.dtype or bias.shape != (levels,)):
        raise ValueError(f"bias must be {hidden.dtype} ({levels},), not {describe(bias)}")
    if not isinstance(target, Tensor) or target.dtype != torch.int64 or target.shape != hidden.shape[:-1]:
        raise ValueError(f"target must be int64 {tuple(hidden.shape[:-1])}, one per position, not {describe(target)}")
    held = weight if packed is None else packed.quants
    devices = {str(t.device) for t in (hidden, held, target, bias) if t is not None}
    if len(devices) > 1:
        raise ValueError(
            f"hidden, weight, target and bias must be on one device, not on {' and '.join(sorted(devices))}"
        )
    if options.reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction={options.reduction!r} must be mean, sum or none")
    if not 0 <= options.label_smoothing <= 1:
        raise ValueError(f"label_smoothing={options.label_smoothing} must be from 0 to 1")
    if not options.z_loss >= 0:
        raise ValueError(f"z_loss={options.z_loss} must be at least 0")
    if options.softcap is not None and not options.softcap > 0:
        raise ValueError(f"softcap={options.softcap} must be above 0, or None")
    if target.is_cpu and not torch.compiler.is_compiling() and target.numel():
        found = target[target != options.ignore_index]
        low, high = (int(t) for t in found.aminmax()) if found.numel() else (0, 0)
        if low < 0 or high >= levels:
            raise ValueError(
                f"target ranges from {low} to {high}; it must be from 0 to {levels - 1}, or {options.ignore_index} to "
                "ignore a position"
            )


def _levels(weight: Tensor | None, options: _Options) -> int:
    """Return V."""
    return len(weight) if options.packed is None else options.packed.outputs  # pyright: ignore[reportArgumentType] (one of both is there)


def _chunks(rows: int, levels: int) -> Iterator[slice]:
    step = max(1, CHUNK // max(levels, 1))
    return (slice(start, start + step) for start in range(0, rows, step))


class _Terms(NamedTuple):
    loss: Tensor  # (R,), 0 where ignored
    logits: Tensor  # (R,V)
    total: Tensor  # (R,1), the logarithm of the sum of e^logits
    bent: Tensor | None  # (R,V), the tanh of the cap
    target: Tensor  # (R,1), 0 where ignored
    real: Tensor  # (R,1) bool

    def gradient(self, factor: Tensor, options: _Options) -> Tensor:
        """Return the gradient (R,V) of the sum of factor (R,1) or () times loss. It overwrites the logits."""
        smooth = options.label_smoothing
        slope = self.logits.sub_(self.total).exp_()
        if options.z_loss:
            slope *= 1 + 2 * options.z_loss * self.total
        if smooth:
            slope -= smooth / slope.shape[1]
        slope.scatter_add_(1, self.target, slope.new_full((), smooth - 1).expand(self.target.shape))
        # An ignored position may hold NaN.
        slope = torch.where(self.real, slope.mul_(factor), 0.0)
        return slope if self.bent is None else slope.mul_(self.bent.square_().neg_().add_(1))


def _terms(hidden: Tensor, weight: Any, bias: Tensor | None, target: Tensor, options: _Options) -> _Terms:
    if options.packed is None:
        logits = F.linear(hidden, weight, bias)
    else:
        logits = multiply(Map(hidden, bias, *options.packed, options.activations))
    logits = logits if logits.dtype == torch.float64 else logits.float()
    bent = None
    if options.softcap is not None:
        bent = logits.div_(options.softcap).tanh_()
        logits = bent * options.softcap
    real = (target != options.ignore_index)[:, None]
    target = torch.where(real, target[:, None], 0)
    total = logits.logsumexp(1, keepdim=True)
    loss = total - (1 - options.label_smoothing) * logits.gather(1, target)
    if options.label_smoothing:
        loss = loss - options.label_smoothing * logits.mean(1, keepdim=True)
    if options.z_loss:
        loss = loss + options.z_loss * total.square()
    return _Terms(torch.where(real, loss, 0.0)[:, 0], logits, total, bent, target, real)


class _Gradients:
    """The gradients of hidden, weight and bias that are needed, summed over chunks of rows."""

    def __init__(self, hidden: Tensor, weight: Any, bias: Tensor | None, needed: Any, packed: Packed | None):
        wide, self.packed = torch.promote_types(hidden.dtype, torch.float32), packed
        self.hidden = torch.empty_like(hidden) if needed[0] else None
        self.weight = torch.zeros_like(weight, dtype=wide) if needed[1] else None
        self.bias = torch.zeros_like(bias, dtype=wide) if bias is not None and needed[2] else None

    def add(self, part: slice, slope: Tensor, hidden: Tensor, weight: Any) -> None:
        """Add those of a chunk, from the gradient of its logits."""
        if self.bias is not None:
            self.bias += slope.sum(0)
        slope = slope.to(hidden.dtype)
        if self.hidden is not None and self.packed is not None:
            self.hidden[part] = transposed(slope, self.packed)
        elif self.hidden is not None:
            torch.mm(slope, weight, out=self.hidden[part])
        if self.weight is not None:
            if self.weight.dtype == hidden.dtype:
                self.weight.addmm_(slope.t(), hidden[part])
            else:
                self.weight += slope.t() @ hidden[part]

    def all(self, like: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        weight, bias = (None if t is None else t.to(like.dtype) for t in (self.weight, self.bias))
        return self.hidden, weight, bias


def _in_one_pass(r: Map, target: Tensor, options: _Options, grows: bool) -> tuple[Tensor, Tensor | None]:
    """The losses (R,) by kernels that read a weight in blocks once, and their gradients (R,D) if ``grows``."""
    smooth, cap, levels = options.label_smoothing, options.softcap or 0.0, r.outputs
    found = native.entropy(r, target, cap, pulled=grows, even=grows and smooth > 0)
    loss = found.total - (1 - smooth) * found.picked - smooth * found.mean + options.z_loss * found.total.square()
    if found.pulled is None:
        return loss, None
    # By each logit the loss grows by a p, less s / V, and less 1 - s for that of the target.
    a = 1 + 2 * options.z_loss * found.total
    slope = a * (found.picked - found.total).exp() - (1 - smooth)
    slope = slope * (1 - (found.picked / cap).square()) if cap else slope
    grad = found.pulled.mul_(a[:, None]).addcmul_(select(r.weight, target), slope[:, None])
    grad = grad if found.even is None else grad.sub_(found.even, alpha=smooth / levels)
    return loss, grad


def _one_pass_serves(r: Map, trains_bias: bool) -> bool:
    """Return whether kernels compute the loss in one pass over a weight in blocks."""
    if torch.compiler.is_compiling():
        return False
    reason = native.why_not(r) or ("" if available("quantized/entropy") else "they could not be compiled")
    # It would be a sum over all rows, of exponentials whose total is not known before the end.
    reason = "they have no gradient of a bias" if trains_bias else reason
    return choose_backend("the loss of a quantized output layer", SERVED, {"native": reason}) == "native"


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor | None, bias: Tensor | None, target: Tensor, options: _Options
    ) -> Tensor:
        ctx.options, whole = options, options.reduction == "none"
        loss = hidden.new_empty(len(hidden), dtype=torch.promote_types(hidden.dtype, torch.float32))
        count = (target != options.ignore_index).sum().to(loss.dtype)
        factor = count.reciprocal() if options.reduction == "mean" else torch.ones_like(count)
        if options.packed is not None:
            r = Map(hidden, bias, *options.packed, options.activations)
            if _one_pass_serves(r, ctx.needs_input_grad[2]):
                loss, grad = _in_one_pass(r, target, options, grows=ctx.needs_input_grad[0])
                grad = grad if grad is None or whole else grad.mul_(factor)
                ctx.computed = True
                ctx.save_for_backward(None if grad is None else grad.to(hidden.dtype), None, None)
                return loss if whole else loss.sum() * factor
        # Of one number, the gradients need no second look at the logits.
        grows = any(ctx.needs_input_grad[:3]) and not whole
        found = _Gradients(hidden, weight, bias, ctx.needs_input_grad, options.packed) if grows else None
        for part in _chunks(len(hidden), _levels(weight, ctx.options)):
            terms = _terms(hidden[part], weight, bias, target[part], options)
            loss[part] = terms.loss
            if found:
                found.add(part, terms.gradient(factor, options), hidden, weight)
        ctx.computed = not whole
        if found:
            ctx.save_for_backward(*found.all(hidden))
        else:
            ctx.save_for_backward(hidden, weight, bias, target)
        return loss if whole else loss.sum() * factor

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] (one gradient for each output)
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, ...]:
        if ctx.computed:
            grad = grad[:, None] if grad.dim() else grad
            # In place: the gradient of a large output layer should be there once.
            scaled = torch.mul if torch.compiler.is_compiling() else Tensor.mul_
            return *(None if t is None else scaled(t, grad.to(t.dtype)) for t in ctx.saved_tensors), None, None
        hidden, weight, bias, target = ctx.saved_tensors
        found = _Gradients(hidden, weight, bias, ctx.needs_input_grad, ctx.options.packed)
        for part in _chunks(len(hidden), _levels(weight, ctx.options)):
            terms = _terms(hidden[part], weight, bias, target[part], ctx.options)
            found.add(part, terms.gradient(grad[part, None], ctx.options), hidden, weight)
        return *found.all(hidden), None, None
