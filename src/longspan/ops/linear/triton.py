"""Linear attention in Triton: causal and bidirectional sequences, forward and backward, and one token."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import triton
from ..buffers import fresh_like
from ..custom_ops import kernel, register
from ..operands import mark_overwritten
from ..triton import tiles
from .composed import composed
from .operands import LinearOperands

MAPS = {"elu": 0, "relu": 1, "squared_relu": 2, "exp": 3}  # as in the kernels
FAR = 2**31 // tiles.LONGEST  # elements: the kernels add up strides of one span in 32 bits
PREFIX = 1024  # numbers of a state that one program of ``prefix_kernel`` sums


def why_not(r: LinearOperands) -> str:
    """Return why the kernels cannot serve these operands; empty if they can."""
    if reason := triton.why_not(r.q, r.k, r.v, r.state, r.mask, r.segments):
        return reason
    if r.segments is not None and not r.causal:
        return "they take packed sequences with causal attention only"
    if any(max(t.stride()[2:]) >= FAR for t in r[:3]):
        return f"they take tokens and channels that are less than {FAR} elements apart"
    return ""


def _kernels() -> Any:
    """Import the kernels, and Triton with them, on first use. Launches have parameters that no type declares."""
    from ..triton import linear

    return linear


@functools.cache
def _capability(device: torch.device) -> int:
    """Return the compute capability of a GPU, times 10; that of an H100 where kernels are interpreted."""
    major, minor = torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)
    return 10 * major + minor


def constants(kernel: str, d: int, e: int, dtype: torch.dtype, capability: int) -> dict[str, Any]:
    """Return the sizes, precision and launch options of a kernel in ``tiles.SPLIT``."""
    tile = tiles.tile(kernel, d, e, dtype, capability)
    blocks = {"D": tiles.power_of_two(d), "E": tiles.power_of_two(e)}
    split = tiles.SPLIT[kernel]
    blocks[split] = min(blocks[split], tile.block)
    return {
        "D": d,
        "E": e,
        "C": tile.chunk,
        "BD": blocks["D"],
        "BE": blocks["E"],
        "HALF": dtype == torch.bfloat16,
        "PRECISION": _precision(dtype),
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }


def step_constants(d: int, e: int, feature_map: str) -> dict[str, Any]:
    """Return the sizes and launch options of ``step_kernel``."""
    return {
        "D": d,
        "E": e,
        "MAP": MAPS[feature_map],
        "BD": tiles.power_of_two(d),
        "BE": tiles.power_of_two(e),
        "num_warps": 4 if d * e <= 64 * 64 else 8,
    }


def _precision(dtype: torch.dtype) -> str:
    # float16 is multiplied as float32, but one TF32 product would lose digits that float16 has.
    if dtype == torch.float16 and not triton.interpreted():
        return "tf32x3"
    return triton.precision(dtype)


def _launch(
    kernel: str, q: Tensor, v: Tensor, pairs: int, tokens: int, feature_map: str, **flags: bool
) -> tuple[tuple[int], dict[str, Any]]:
    """Return the grid of a kernel, a program per block of channels, span and head, and its constants."""
    found = constants(kernel, q.shape[-1], v.shape[-1], v.dtype, _capability(q.device))
    split = tiles.SPLIT[kernel]
    found |= {"SPAN": tiles.span(tokens, pairs), "MAP": MAPS[feature_map], **flags}
    blocks, spans = -(-found[split] // found["B" + split]), tiles.spans(tokens, pairs)
    return (blocks * spans * pairs,), found


def _strides(t: Tensor | None) -> tuple[int, ...]:
    """Return the strides of a mask or of segments (B,N); zeros for None."""
    return (0, 0) if t is None else t.stride()


def _size(q: Tensor, v: Tensor) -> int:
    return q.shape[-1] * (v.shape[-1] + 1)


def _prefix(
    parts: Tensor, given: Tensor | None, end: Tensor, segments: Tensor | None, n: int, *, causal: bool, reverse: bool
) -> None:
    """Run ``prefix_kernel`` on parts (B,H,spans,D(E+1))."""
    kernels = _kernels()
    batch, heads, spans, size = parts.shape
    strides = (0, 0, 0, 0) if given is None else given.stride()
    span = tiles.span(n, batch * heads)
    sizes = {"D": end.shape[-2], "E": end.shape[-1] - 1, "SPAN": span, "BLOCK": PREFIX}
    kernels.prefix_kernel[(-(-size // PREFIX) * batch * heads,)](
        *(parts, given, end, segments, n, spans, heads, (strides, _strides(segments))),
        **sizes,
        CAUSAL=causal,
        REVERSE=reverse,
    )


def _forward(r: LinearOperands, keeps: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """o (B,H,N,E), the last state (B,H,D,E+1), denominators (B,H,N), the states before the spans (B,H,spans,D(E+1)).

    Without ``causal`` there are no states of spans. The last result is what the type of o lost, if the backward pass
    needs it.
    """
    q, k, v, state, mask, segments, feature_map, eps, causal, _ = r
    fine = keeps and v.dtype != torch.float32
    kernels = _kernels()
    o, end, below = _outputs(q, v)
    (batch, heads, n, _), m = q.shape, k.shape[2]
    rest = _rest(o, fine)
    pairs = batch * heads
    spans = tiles.spans(m, pairs)
    starts = end.new_empty(batch, heads, spans, _size(q, v))
    edges = _strides(mask), _strides(segments)
    with torch.cuda.device_of(q):
        grid, options = _launch("sums", q, v, pairs, m, feature_map)
        strides = k.stride(), v.stride(), *edges
        kernels.sums_kernel[grid](k, v, starts, mask, segments, m, spans, heads, strides, **options)
        _prefix(starts, state, end, segments, m, causal=causal, reverse=False)
        states = spans
        if not causal:
            starts, states, spans = end, 1, tiles.spans(n, pairs)
        grid, options = _launch("outputs", q, v, pairs, n, feature_map, CAUSAL=causal)
        kernels.outputs_kernel[grid](
            *(q, k, v, o, rest if fine else None, below, starts, mask, segments, n, spans, states, heads, eps),
            (q.stride(), k.stride(), v.stride(), o.stride(), *edges),
            **options,
        )
    return o, end, below, starts if causal else end.new_empty(batch, heads, 0, _size(q, v)), rest


def _backward(
    r: LinearOperands, grads: Sequence[Tensor], kept: Sequence[Tensor], needed: Sequence[bool]
) -> list[Tensor | None]:
    q, k, v, _, mask, segments, feature_map, _, causal, _ = r
    (grad, grad_end), (o, end, below, starts, rest) = grads, kept
    # Without causality the queries read the sum over all keys, which is the last state.
    starts = starts if causal else end
    kernels = _kernels()
    dq, dk, dv = fresh_like(q), fresh_like(k), fresh_like(v)
    first, weights = _state(q, v), torch.empty_like(below)
    (batch, heads, n, _), m = q.shape, k.shape[2]
    pairs = batch * heads
    spans = tiles.spans(n, pairs)
    ends = first.new_empty(batch, heads, spans, _size(q, v))
    edges = _strides(mask), _strides(segments)
    with torch.cuda.device_of(q):
        grid, options = _launch("grad_sums", q, v, pairs, n, feature_map)
        kernels.grad_sums_kernel[grid](
            *(q, o, rest if rest.numel() else None, grad, below, weights, ends, segments, n, spans, heads),
            (q.stride(), o.stride(), grad.stride(), _strides(segments)),
            **options,
        )
        _prefix(ends, grad_end, first, segments, n, causal=causal, reverse=True)
        states = spans if causal else 1
        read, shared = (q, k, v, grad, below, weights), (q.stride(), k.stride(), v.stride(), grad.stride())
        grid, options = _launch("grad_q", q, v, pairs, n, feature_map, CAUSAL=causal)
        kernels.grad_q_kernel[grid](
            *(*read, starts, dq, mask, segments, n, spans, states, heads),
            (*shared, dq.stride(), *edges),
            **options,
        )
        if not causal:
            ends, spans = first, tiles.spans(m, pairs)
        sizes = (m, spans, states, heads)
        grid, options = _launch("grad_k", q, v, pairs, m, feature_map, CAUSAL=causal)
        kernels.grad_k_kernel[grid](
            *(*read, ends, dk, mask, segments, *sizes, (*shared, dk.stride(), *edges)), **options
        )
        grid, options = _launch("grad_v", q, v, pairs, m, feature_map, CAUSAL=causal)
        kernels.grad_v_kernel[grid](
            *(q, k, grad, below, ends, dv, mask, segments, *sizes),
            (q.stride(), k.stride(), grad.stride(), dv.stride(), *edges),
            **options,
        )
    return [dq, dk, dv, first]


def _shapes(r: LinearOperands, keeps: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    o, end, below = _outputs(r.q, r.v)
    spans = tiles.spans(r.k.shape[2], r.q.shape[0] * r.q.shape[1]) if r.causal else 0
    starts = end.new_empty(*r.q.shape[:2], spans, _size(r.q, r.v))
    return o, end, below, starts, _rest(o, keeps and r.v.dtype != torch.float32)


attend = kernel(
    "triton_linear",
    LinearOperands,
    _forward,
    _backward,
    shapes=_shapes,
    again=composed,
    inputs=4,
    kept=3,
    saves=2,
)
"""Linear attention in Triton, causal or not.

Time is O(N (D E + C (D + E))). Beyond inputs, output and gradients, memory is that of one state per span of tokens,
which the backward pass keeps, and in 16 bits that of a second output: the digits that the output lost, as gradients of
queries need them. Results are the same bits in every run.
"""


def _outputs(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate o (B,H,N,E), the last state (B,H,D,E+1) and the denominators (B,H,N).

    o has the layout of v if N = M; else the heads of a token are adjacent, so that merging them is a view.
    """
    (batch, heads, n, _), e = q.shape, v.shape[-1]
    o = fresh_like(v) if v.shape[2] == n else v.new_empty(batch, n, heads, e).transpose(1, 2)
    return o, _state(q, v), q.new_empty(batch, heads, n, dtype=torch.float32)


def _rest(o: Tensor, fine: bool) -> Tensor:
    """Allocate what the type of o loses, in the layout of o: bfloat16, since float16 has no such small numbers."""
    return torch.empty_like(o, dtype=torch.bfloat16) if fine else o.new_empty(0, dtype=torch.bfloat16)


def _state(q: Tensor, v: Tensor) -> Tensor:
    return q.new_empty(*q.shape[:2], q.shape[-1], v.shape[-1] + 1, dtype=torch.float32)


def step(r: LinearOperands, donate: bool) -> tuple[Tensor, Tensor] | None:
    """One token in one launch: its feature map, the sums and the normalizer, in one pass over the state.

    q, k (B,H,1,D) before the feature map, v (B,H,1,E), state (B,H,D,E+1) in float32, any strides -> o (B,H,1,E) in v's
    dtype, state, updated in place with ``donate``. Returns None for operands that the kernel does not serve, and where
    gradients are needed.
    """
    q, k, v, state, _, _, feature_map, eps, *_ = r
    if (
        state is None
        or feature_map not in MAPS
        or not q.dim() == k.dim() == v.dim() == state.dim() == 4
        or q.shape[2] != 1
    ):
        return None
    batch, heads, _, keys = shape = q.shape
    values = v.shape[3]
    if k.shape != shape or v.shape != (batch, heads, 1, values) or state.shape != (batch, heads, keys, values + 1):
        return None
    if triton.why_not(q, k, v, state) or _negated(q, k, v, state):
        return None
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad or state.requires_grad):
        return None
    if torch.compiler.is_compiling():
        if donate:
            return _step_op(q, k, v, state, feature_map, eps), state
        return _fresh_step_op(q, k, v, state, feature_map, eps)
    if not donate:
        return _fresh_step(q, k, v, state, feature_map, eps)
    out = _step(q, k, v, state, feature_map, eps)
    mark_overwritten(state)
    return out, state


def _negated(*tensors: Tensor) -> bool:
    # Dynamo cannot trace is_neg; the operations of torch.compile get tensors without lazy signs.
    return not torch.compiler.is_compiling() and any(t.is_neg() for t in tensors)


def _step(q: Tensor, k: Tensor, v: Tensor, state: Tensor, feature_map: str, eps: float) -> Tensor:
    """Return o and update the state."""
    return _launch_step(q, k, v, state, state, feature_map, eps)


def _fresh_step(q: Tensor, k: Tensor, v: Tensor, state: Tensor, feature_map: str, eps: float) -> tuple[Tensor, Tensor]:
    """Return o and a new state."""
    after = _state(q, v)
    return _launch_step(q, k, v, state, after, feature_map, eps), after


def _launch_step(q: Tensor, k: Tensor, v: Tensor, state: Tensor, after: Tensor, feature_map: str, eps: float) -> Tensor:
    kernels = _kernels()
    (batch, heads, _, d), e, o = q.shape, v.shape[-1], torch.empty_like(v)
    strides = [(t.stride(0), t.stride(1), t.stride(3)) for t in (q, k, v, o)]
    with torch.cuda.device_of(q):
        kernels.step_kernel[(batch * heads,)](
            *(q, k, v, state, after, o, heads, eps),
            (*strides[:3], state.stride(), after.stride(), strides[3]),
            **step_constants(d, e, feature_map),
        )
    return o


_step_op = register("triton_linear_step", _step, lambda q, k, v, *_: torch.empty_like(v), mutates="state")
_fresh_step_op = register(
    "triton_linear_fresh_step", _fresh_step, lambda q, k, v, *_: (torch.empty_like(v), _state(q, v))
)
