# Parameters of kernels have no types that a checker knows.
# pyright: basic
"""Triton kernels of decay attention with a decay per head: spans of tokens, inside them chunks of C tokens.

With G_i the sum of the log decays of a chunk up to token i, S the state before the chunk, c the scale and g the
gradient of the outputs,

    o_i  = c sum_(j<=i) e^(G_i - G_j) (q_i . k_j) v_j + c e^(G_i) S^T q_i
    S'   = e^(G_C) S + sum_j e^(G_C - G_j) k_j v_j^T
    dq_i = c sum_(j<=i) e^(G_i - G_j) (g_i . v_j) k_j + c e^(G_i) S g_i
    dk_j = c sum_(i>=j) e^(G_i - G_j) (g_i . v_j) q_i + e^(G_C - G_j) R v_j
    dv_j = c sum_(i>=j) e^(G_i - G_j) (q_i . k_j) g_i + e^(G_C - G_j) R^T k_j
    R'   = e^(G_C) R + c sum_i e^(G_i) q_i g_i^T

where R is the gradient of the state after the chunk and R' that of the state before it (Dao and Gu 2024, 2405.21060,
section 6; Yang et al. 2023, 2312.06635, section 4). ``sums_kernel`` computes the writes of each span, ``scan_kernel``
the states before all spans from them, and the other kernels pass over the chunks of a span with the state in registers.

The decay of token t scales every product of a read at i >= t and a write at j < t. Its gradient is the sum of exactly
these: of pairs inside the chunk, of reads of S, of writes to R, and of S with R. So it is no difference of large sums.
The sums G are float64; their differences are formed from two float32 parts.

A border of packed sequences is a log decay that leaves nothing. A masked token has decay 0, and its q, k, v, g are 0.
With ``table`` (spans, 2), spans begin and end where it says, so that each lies in one sequence of cu_seqlens.

Products of two inputs multiply in their type. A state, a decayed key and the like would lose digits in 16 bits:
``mixed`` multiplies them as two bfloat16 numbers each, or with float16, in which they would overflow, as two of TF32.
The interpreter multiplies in float32 (``WIDE``), but rounds as the products on a GPU do.

``sizes`` are the numbers of tokens, heads, heads per key head, channels of keys and of values, and spans; ``gates`` are
the log decay, mask, segments and ``table``, ``units`` what normalizes queries and keys, each of them None where it is
missing; xs are the strides of x. Triton 3.3 does not unpack a tuple that contains None.
"""

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from . import interpreted, precision

SPAN = 256  # tokens between two states that are kept, at most
CHUNK = 64  # tokens whose products are formed at once, at most

LOWEST = tl.constexpr(-800.0)  # a log decay that stands for -inf
WIDE = tl.constexpr(interpreted())


@triton.jit
def rounded(x, TYPE: tl.constexpr):
    """Return float32 x rounded to TYPE, as float32 if WIDE."""
    if WIDE:
        if TYPE == tl.bfloat16:
            # The interpreter would cut the digits off.
            bits = x.to(tl.int32, bitcast=True)
            y = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)
        else:
            y = x.to(TYPE).to(tl.float32)
    else:
        y = x.to(TYPE)
    return y


@triton.jit
def operand(x):
    """Return an input as an operand of ``tl.dot``."""
    if WIDE:
        y = x.to(tl.float32)
    else:
        y = x
    return y


@triton.jit
def short(x):
    """Return float32 x cut to the digits of TF32. A product of x itself would lose the others."""
    return (x.to(tl.int32, bitcast=True) & -0x2000).to(tl.float32, bitcast=True)


@triton.jit
def mixed(x, y, FINE: tl.constexpr):
    """Return the product of two matrices, of which one is an input and the other one computed, in float32."""
    if x.dtype == tl.bfloat16:
        high = rounded(y, x.dtype)
        low = rounded(y - high.to(tl.float32), x.dtype)
        z = tl.dot(operand(x), low) + tl.dot(operand(x), high)
    elif y.dtype == tl.bfloat16:
        high = rounded(x, y.dtype)
        low = rounded(x - high.to(tl.float32), y.dtype)
        z = tl.dot(low, operand(y)) + tl.dot(high, operand(y))
    elif x.dtype == tl.float16:
        high = short(y)
        z = tl.dot(x.to(tl.float32), y - high, input_precision=FINE)
        z += tl.dot(x.to(tl.float32), high, input_precision=FINE)
    elif y.dtype == tl.float16:
        high = short(x)
        z = tl.dot(x - high, y.to(tl.float32), input_precision=FINE)
        z += tl.dot(high, y.to(tl.float32), input_precision=FINE)
    else:
        z = tl.dot(x, y, input_precision=FINE)
    return z


@triton.jit
def rows(x, first, o_c, o_d, strides, real, size):
    """Load the tokens first + o_c as (C,D); 0 where a token is not real."""
    at = x + first * strides[2] + o_c[:, None] * strides[2] + o_d[None, :] * strides[3]
    return tl.load(at, mask=real[:, None] & (o_d[None, :] < size), other=0.0)


@triton.jit
def columns(x, first, o_c, o_d, strides, real, size):
    """Load the tokens first + o_c as (D,C). Transposing what a product has computed fails on some GPUs."""
    at = x + first * strides[2] + o_c[None, :] * strides[2] + o_d[:, None] * strides[3]
    return tl.load(at, mask=real[None, :] & (o_d[:, None] < size), other=0.0)


@triton.jit
def store_rows(x, y, first, o_c, o_d, strides, there, size):
    at = x + first * strides[2] + o_c[:, None] * strides[2] + o_d[None, :] * strides[3]
    y = rounded(y, x.dtype.element_ty).to(x.dtype.element_ty)
    tl.store(at, y, mask=there[:, None] & (o_d[None, :] < size))


@triton.jit
def bounds(table, i_s, n, SPAN: tl.constexpr):
    """Return the first token of a span, int64, and the token after its last."""
    if table is not None:
        begin, stop = tl.load(table + 2 * i_s), tl.load(table + 2 * i_s + 1)
    else:
        begin = i_s.to(tl.int64) * SPAN
        stop = tl.minimum(begin + SPAN, n)
    return begin, stop


@triton.jit
def chunk_gates(gates, strides, b, h, n, first, o_c, stop):
    """Return which tokens of a chunk exist, which are real, and the sums (C,) of log decays up to each, in float64."""
    o_n = first + o_c
    there = o_n < stop
    real = there
    if gates[1] is not None:
        real = there & (tl.load(gates[1] + b * n + o_n, mask=there, other=0) != 0)
    g = tl.zeros(o_c.shape, tl.float32)
    if gates[0] is not None:
        at = gates[0] + (b * strides[0] + h * strides[1]) + o_n * strides[2]
        g = tl.load(at, mask=real, other=0.0).to(tl.float32)
        g = tl.where(g < LOWEST, LOWEST, g)  # NaN stays
    if gates[2] is not None:
        inner = there & (o_n > 0)
        ids = gates[2] + b * n + o_n
        here, before = tl.load(ids, mask=inner, other=0), tl.load(ids - 1, mask=inner, other=0)
        g = tl.where(here != before, LOWEST, g)
    return there, real, tl.cumsum(g.to(tl.float64), 0), tl.sum(g.to(tl.float64), 0)


@triton.jit
def parts(total):
    """Split float64 into float32 and its rounding error."""
    high = total.to(tl.float32)
    return high, (total - high.to(tl.float64)).to(tl.float32)


@triton.jit
def leaving(total, last):
    """Return the remaining share of each token after the chunk."""
    return tl.exp((last - total).to(tl.float32))


@triton.jit
def fading(high_i, low_i, high_j, low_j, earlier):
    """Return e^(G_i - G_j) where token j is i or earlier, else 0, from the parts of G."""
    return tl.exp(tl.where(earlier, (high_i - high_j) + (low_i - low_j), LOWEST))


@triton.jit
def sums_kernel(
    x,
    y,
    gates,
    unit,
    sums,
    wholes,
    sizes,
    scale,
    strides,
    REVERSE: tl.constexpr,
    SPAN: tl.constexpr,
    C: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
    FINE: tl.constexpr,
):
    """sums (BH,NP,D,E): the writes of each span to the state after it, and wholes (BH,NP): what it leaves of a state.

    REVERSE: the gradient of the state before the span from its reads; x are queries, y the gradients of outputs.
    """
    n, H, R, D, E, NP = sizes
    xs, ys, gs = strides
    i_e, i_s, i_bh = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    b, h = i_bh // H, i_bh % H
    o_c, o_d, o_e = tl.arange(0, C), tl.arange(0, BD), i_e * BE + tl.arange(0, BE)
    x += b * xs[0] + h // R * xs[1]
    y += b * ys[0] + h * ys[1]
    if unit is not None:
        unit += (i_bh // R) * n
    begin, stop = bounds(gates[3], i_s, n, SPAN)
    s = tl.zeros([BD, BE], tl.float32)
    all_decays = tl.zeros([1], tl.float64)
    for i in range(0, SPAN // C):
        first = begin + (SPAN // C - 1 - i if REVERSE else i) * C
        _, real, total, last = chunk_gates(gates, gs, b, h, n, first, o_c, stop)
        if REVERSE:
            share = tl.exp(total.to(tl.float32)) * scale
        else:
            share = leaving(total, last)
        if unit is not None:
            share *= tl.load(unit + first + o_c, mask=real, other=0.0)
        xt = columns(x, first, o_c, o_d, xs, real, D).to(tl.float32) * share[None, :]
        yn = rows(y, first, o_c, o_e, ys, real, E)
        s = s * tl.exp(last.to(tl.float32)) + mixed(xt, yn, FINE)
        all_decays += last
    at = sums + (i_bh * NP + i_s) * D * E + o_d[:, None] * E + o_e[None, :]
    tl.store(at, s, mask=(o_d[:, None] < D) & (o_e[None, :] < E))
    if not REVERSE:
        if i_e == 0:
            tl.store(wholes + i_bh * NP + i_s + tl.arange(0, 1), tl.exp(all_decays.to(tl.float32)))


@triton.jit
def scan_kernel(
    sums, wholes, given, found, firsts, NP, H, SIZE, REVERSE: tl.constexpr, PACKED: tl.constexpr, BLOCK: tl.constexpr
):
    """In place: sums (BH,NP,SIZE) become the states before all spans, or from the end the gradients after them.

    The scan begins with ``given`` (SH,SIZE) and ends with ``found``. PACKED: sequence s has the spans from firsts[s]
    to firsts[s + 1] of its only row.
    """
    o, i_sh = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1).to(tl.int64)
    inside = o < SIZE
    if PACKED:
        row, sequence = i_sh % H, i_sh // H
        low, high = tl.load(firsts + sequence), tl.load(firsts + sequence + 1)
    else:
        row, low, high = i_sh, i_sh * 0, i_sh * 0 + NP
    s = tl.load(given + i_sh * SIZE + o, mask=inside, other=0.0)
    i = low
    while i < high:  # the interpreter has no range of a run-time number with numpy >= 2.4
        if REVERSE:
            span = row * NP + high - 1 - (i - low)
        else:
            span = row * NP + i
        at = sums + span * SIZE + o
        part = tl.load(at, mask=inside, other=0.0)
        tl.store(at, s, mask=inside)
        s = s * tl.load(wholes + span) + part
        i += 1
    tl.store(found + i_sh * SIZE + o, s, mask=inside)


@triton.jit
def outputs_kernel(
    q,
    k,
    v,
    o,
    gates,
    units,
    starts,
    sizes,
    scale,
    strides,
    SPAN: tl.constexpr,
    C: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
    PRECISION: tl.constexpr,
    FINE: tl.constexpr,
):
    """The outputs of a span, for BE of the value channels, given the states before all spans."""
    n, H, R, D, E, NP = sizes
    qs, ks, vs, os, gs = strides
    i_e, i_s, i_bh = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    b, h = i_bh // H, i_bh % H
    o_c, o_d, o_e = tl.arange(0, C), tl.arange(0, BD), i_e * BE + tl.arange(0, BE)
    q += b * qs[0] + h // R * qs[1]
    k += b * ks[0] + h // R * ks[1]
    v += b * vs[0] + h * vs[1]
    o += b * os[0] + h * os[1]
    if units[0] is not None:
        unit_q = units[0] + (i_bh // R) * n
        unit_k = units[1] + (i_bh // R) * n
    begin, stop = bounds(gates[3], i_s, n, SPAN)
    at = starts + (i_bh * NP + i_s) * D * E + o_d[:, None] * E + o_e[None, :]
    s = tl.load(at, mask=(o_d[:, None] < D) & (o_e[None, :] < E), other=0.0)
    for i in range(0, SPAN // C):
        first = begin + i * C
        there, real, total, last = chunk_gates(gates, gs, b, h, n, first, o_c, stop)
        high, low = parts(total)
        reading, share = tl.exp(high) * scale, leaving(total, last)
        earlier = o_c[:, None] >= o_c[None, :]
        weight = fading(high[:, None], low[:, None], high[None, :], low[None, :], earlier) * scale
        if units[0] is not None:
            fq = tl.load(unit_q + first + o_c, mask=real, other=0.0)
            fk = tl.load(unit_k + first + o_c, mask=real, other=0.0)
            reading, share, weight = reading * fq, share * fk, weight * fq[:, None] * fk[None, :]
        xq = rows(q, first, o_c, o_d, qs, real, D)
        kt = columns(k, first, o_c, o_d, ks, real, D)
        x = rows(v, first, o_c, o_e, vs, real, E)
        a = tl.dot(operand(xq), operand(kt), input_precision=PRECISION)
        a = tl.where(earlier, a * weight, 0.0)
        y = tl.dot(rounded(a, v.dtype.element_ty), operand(x), input_precision=PRECISION)
        y += mixed(xq, s, FINE) * reading[:, None]
        store_rows(o, y, first, o_c, o_e, os, there, E)
        kept = kt.to(tl.float32) * share[None, :]
        s = s * tl.exp(last.to(tl.float32)) + mixed(kept, x, FINE)


@triton.jit
def values_backward_kernel(
    q,
    k,
    grad,
    dv,
    gates,
    units,
    ends,
    sizes,
    scale,
    strides,
    SPAN: tl.constexpr,
    C: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
    PRECISION: tl.constexpr,
    FINE: tl.constexpr,
):
    """The gradients of the values of a span, for BE of their channels, given those of the states after all spans."""
    n, H, R, D, E, NP = sizes
    qs, ks, os, dvs, gs = strides
    i_e, i_s, i_bh = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    b, h = i_bh // H, i_bh % H
    o_c, o_d, o_e = tl.arange(0, C), tl.arange(0, BD), i_e * BE + tl.arange(0, BE)
    q += b * qs[0] + h // R * qs[1]
    k += b * ks[0] + h // R * ks[1]
    grad += b * os[0] + h * os[1]
    dv += b * dvs[0] + h * dvs[1]
    if units[0] is not None:
        unit_q = units[0] + (i_bh // R) * n
        unit_k = units[1] + (i_bh // R) * n
    begin, stop = bounds(gates[3], i_s, n, SPAN)
    at = ends + (i_bh * NP + i_s) * D * E + o_d[:, None] * E + o_e[None, :]
    r = tl.load(at, mask=(o_d[:, None] < D) & (o_e[None, :] < E), other=0.0)
    for i in range(0, SPAN // C):
        first = begin + (SPAN // C - 1 - i) * C
        there, real, total, last = chunk_gates(gates, gs, b, h, n, first, o_c, stop)
        high, low = parts(total)
        reading, share = tl.exp(high) * scale, leaving(total, last)
        earlier = o_c[:, None] <= o_c[None, :]  # (j,i)
        weight = fading(high[None, :], low[None, :], high[:, None], low[:, None], earlier) * scale
        if units[0] is not None:
            fq = tl.load(unit_q + first + o_c, mask=real, other=0.0)
            fk = tl.load(unit_k + first + o_c, mask=real, other=0.0)
            reading, share, weight = reading * fq, share * fk, weight * fk[:, None] * fq[None, :]
        xk = rows(k, first, o_c, o_d, ks, real, D)
        qt = columns(q, first, o_c, o_d, qs, real, D)
        g = rows(grad, first, o_c, o_e, os, real, E)
        a = tl.dot(operand(xk), operand(qt), input_precision=PRECISION)
        a = tl.where(earlier, a * weight, 0.0)
        y = tl.dot(rounded(a, q.dtype.element_ty), operand(g), input_precision=PRECISION)
        y += mixed(xk, r, FINE) * share[:, None]
        store_rows(dv, y, first, o_c, o_e, dvs, there, E)
        read = qt.to(tl.float32) * reading[None, :]
        r = r * tl.exp(last.to(tl.float32)) + mixed(read, g, FINE)


@triton.jit
def keys_backward_kernel(
    q,
    k,
    v,
    grad,
    dk,
    gates,
    units,
    ddecay,
    ends,
    ahead,
    sizes,
    scale,
    strides,
    SPAN: tl.constexpr,
    C: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
    PRECISION: tl.constexpr,
    FINE: tl.constexpr,
):
    """The gradients of the keys of a span, one per value head, for BD of their channels.

    With ``ddecay`` (D / BD,BH,N) also the part of its gradient from writes, and the gradients of the states after all
    chunks, ``ahead`` (BH,NP,SPAN / C,E,D).
    """
    n, H, R, D, E, NP = sizes
    qs, ks, vs, os, dks, gs = strides
    i_d, i_s, i_bh = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    b, h = i_bh // H, i_bh % H
    o_c, o_d, o_e = tl.arange(0, C), i_d * BD + tl.arange(0, BD), tl.arange(0, BE)
    q += b * qs[0] + h // R * qs[1]
    k += b * ks[0] + h // R * ks[1]
    v += b * vs[0] + h * vs[1]
    grad += b * os[0] + h * os[1]
    dk += b * dks[0] + h * dks[1]
    if units[0] is not None:
        unit_q = units[0] + (i_bh // R) * n
        unit_k = units[1] + (i_bh // R) * n
    begin, stop = bounds(gates[3], i_s, n, SPAN)
    inside = (o_e[:, None] < E) & (o_d[None, :] < D)
    r = tl.load(ends + (i_bh * NP + i_s) * D * E + o_e[:, None] + o_d[None, :] * E, mask=inside, other=0.0)  # (E,D)
    for i in range(0, SPAN // C):
        first = begin + (SPAN // C - 1 - i) * C
        there, real, total, last = chunk_gates(gates, gs, b, h, n, first, o_c, stop)
        high, low = parts(total)
        reading, share = tl.exp(high) * scale, leaving(total, last)
        earlier = o_c[:, None] <= o_c[None, :]  # (j,i)
        weight = fading(high[None, :], low[None, :], high[:, None], low[:, None], earlier) * scale
        if units[0] is not None:
            fq = tl.load(unit_q + first + o_c, mask=real, other=0.0)
            reading, weight = reading * fq, weight * fq[None, :]
        x = rows(v, first, o_c, o_e, vs, real, E)
        gt = columns(grad, first, o_c, o_e, os, real, E)
        xq = rows(q, first, o_c, o_d, qs, real, D)
        a = tl.dot(operand(x), operand(gt), input_precision=PRECISION)
        a = tl.where(earlier, a * weight, 0.0)
        out = mixed(x, r, FINE) * share[:, None]
        y = tl.dot(rounded(a, q.dtype.element_ty), operand(xq), input_precision=PRECISION) + out
        store_rows(dk, y, first, o_c, o_d, dks, there, D)
        if ddecay is not None:
            written = tl.sum(rows(k, first, o_c, o_d, ks, real, D).to(tl.float32) * out, 1)
            if units[0] is not None:
                written *= tl.load(unit_k + first + o_c, mask=real, other=0.0)
            # Token t fades the writes before it.
            fades = tl.sum(tl.where(o_c[:, None] < o_c[None, :], tl.expand_dims(written, 1), 0.0), 0)
            at = ddecay + (i_d * tl.num_programs(2) + i_bh) * n + first + o_c
            tl.store(at, fades, mask=there)
            at = ahead + ((i_bh * NP + i_s) * (SPAN // C) + SPAN // C - 1 - i) * D * E
            tl.store(at + o_e[:, None] * D + o_d[None, :], r, mask=inside)
        read = xq.to(tl.float32) * reading[:, None]
        r = r * tl.exp(last.to(tl.float32)) + mixed(gt, read, FINE)


@triton.jit
def queries_backward_kernel(
    q,
    k,
    v,
    grad,
    dq,
    gates,
    units,
    ddecay,
    starts,
    ahead,
    sizes,
    scale,
    strides,
    SPAN: tl.constexpr,
    C: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
    PRECISION: tl.constexpr,
    FINE: tl.constexpr,
):
    """The gradients of the queries of a span, one per value head, for BD of their channels.

    With ``ddecay``, to which ``keys_backward_kernel`` has written, also what these channels add to its gradient.
    """
    n, H, R, D, E, NP = sizes
    qs, ks, vs, os, dqs, gs = strides
    i_d, i_s, i_bh = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    b, h = i_bh // H, i_bh % H
    o_c, o_d, o_e = tl.arange(0, C), i_d * BD + tl.arange(0, BD), tl.arange(0, BE)
    q += b * qs[0] + h // R * qs[1]
    k += b * ks[0] + h // R * ks[1]
    v += b * vs[0] + h * vs[1]
    grad += b * os[0] + h * os[1]
    dq += b * dqs[0] + h * dqs[1]
    if units[0] is not None:
        unit_q = units[0] + (i_bh // R) * n
        unit_k = units[1] + (i_bh // R) * n
    begin, stop = bounds(gates[3], i_s, n, SPAN)
    inside = (o_e[:, None] < E) & (o_d[None, :] < D)
    s = tl.load(starts + (i_bh * NP + i_s) * D * E + o_e[:, None] + o_d[None, :] * E, mask=inside, other=0.0)  # (E,D)
    for i in range(0, SPAN // C):
        first = begin + i * C
        there, real, total, last = chunk_gates(gates, gs, b, h, n, first, o_c, stop)
        high, low = parts(total)
        whole, share = tl.exp(last.to(tl.float32)), leaving(total, last)
        earlier = o_c[:, None] >= o_c[None, :]
        weight = fading(high[:, None], low[:, None], high[None, :], low[None, :], earlier) * scale
        if units[0] is not None:
            fk = tl.load(unit_k + first + o_c, mask=real, other=0.0)
            share, weight = share * fk, weight * fk[None, :]
        g = rows(grad, first, o_c, o_e, os, real, E)
        vt = columns(v, first, o_c, o_e, vs, real, E)
        xk = rows(k, first, o_c, o_d, ks, real, D)
        a = tl.dot(operand(g), operand(vt), input_precision=PRECISION)
        a = tl.where(earlier, a * weight, 0.0)
        from_read = mixed(g, s, FINE) * (tl.exp(high) * scale)[:, None]
        y = tl.dot(rounded(a, q.dtype.element_ty), operand(xk), input_precision=PRECISION) + from_read
        store_rows(dq, y, first, o_c, o_d, dqs, there, D)
        if ddecay is not None:
            xq = rows(q, first, o_c, o_d, qs, real, D)
            kt = columns(k, first, o_c, o_d, ks, real, D)
            a *= tl.dot(operand(xq), operand(kt), input_precision=PRECISION)
            reads = tl.sum(xq.to(tl.float32) * from_read, 1)
            if units[0] is not None:
                fq = tl.load(unit_q + first + o_c, mask=real, other=0.0)
                a, reads = a * fq[:, None], reads * fq
            # Pairs of a write before t and a read from t on: summed over the writes up to t - 1, then over the reads.
            before = tl.cumsum(tl.where(o_c[:, None] > o_c[None, :], a, 0.0), 1)
            pairs = tl.sum(tl.where(o_c[:, None] > o_c[None, :], before, 0.0), 0)
            fades = tl.sum(tl.where(o_c[:, None] == o_c[None, :] - 1, tl.expand_dims(pairs, 1), 0.0), 0)
            fades += tl.sum(tl.where(o_c[:, None] >= o_c[None, :], tl.expand_dims(reads, 1), 0.0), 0)
            at = ahead + ((i_bh * NP + i_s) * (SPAN // C) + i) * D * E + o_e[:, None] * D + o_d[None, :]
            after = tl.load(at, mask=inside, other=0.0)
            fades += tl.sum(tl.sum(s * after, 1), 0) * whole
            at = ddecay + (i_d * tl.num_programs(2) + i_bh) * n + first + o_c
            fades += tl.load(at, mask=there, other=0.0)
            tl.store(at, tl.where(real, fades, 0.0), mask=there)
        kept = xk.to(tl.float32) * share[:, None]
        s = s * whole + mixed(vt, kept, FINE)


class Call:
    """What the launches of a forward or a backward pass share."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor | None,
        mask: Tensor | None,
        segments: Tensor | None,
        offsets: Tensor | None,
        scale: float,
        normalize: bool,
    ):
        (self.batch, groups, self.n, self.keys), (self.heads, self.values) = q.shape, v.shape[1::2]
        self.q, self.k, self.v, self.scale = q, k, v, scale
        self.rows, self.repeats = self.batch * self.heads, self.heads // groups
        self.span, self.chunk = span_of(self.n), chunk_of(v)
        self.table, self.firsts = (None, None) if offsets is None else packed_spans(offsets, self.n, self.span)
        self.spans = triton.cdiv(self.n, self.span) if self.table is None else len(self.table)
        self.units = (inverse_norm(q), inverse_norm(k)) if normalize else (None, None)
        hidden = None if mask is None else mask.contiguous().view(torch.uint8)
        self.gates = log_decay, hidden, None if segments is None else segments.contiguous(), self.table
        self.gate_strides = (0, 0, 0) if log_decay is None else log_decay.stride()
        self.sizes = self.n, self.heads, self.repeats, self.keys, self.values, self.spans
        self.block_d, self.block_e = (max(16, triton.next_power_of_2(size)) for size in (self.keys, self.values))
        narrow = precision(v.dtype)
        # TF32 holds all digits of float16.
        fine = narrow if v.dtype == torch.float32 or interpreted() else "tf32"
        self.fine, self.precision = {"FINE": fine}, {"PRECISION": narrow}

    def tiles(self, *, keys: bool = False, values: bool = False) -> tuple[int, dict[str, int]]:
        """Return how many blocks the channels of keys or values have, and the options of a launch with such blocks."""
        block = block_of(self.v, max(self.block_d, self.block_e), backward=keys)
        d = min(self.block_d, block) if keys else self.block_d
        e = min(self.block_e, block) if values else self.block_e
        blocks = triton.cdiv(self.keys, d) if keys else triton.cdiv(self.values, e)
        warps = 4 if max(d, e) <= 32 else 8
        return blocks, {"SPAN": self.span, "C": self.chunk, "BD": d, "BE": e, "num_warps": warps, "num_stages": 2}

    def launch(self, kernel: Any, blocks: int, operands: tuple[Tensor, ...], *others: Any, **constants: Any) -> None:
        """Launch a kernel for all spans of all heads: for ``operands`` of any strides, the gates and ``others``."""
        strides = *(x.stride() for x in operands), self.gate_strides
        kernel[(blocks, self.spans, self.rows)](
            *(*operands, self.gates, *others, self.sizes, self.scale, strides), **self.fine, **constants
        )

    def states(self, x: Tensor, y: Tensor, given: Tensor, wholes: Tensor, reverse: bool) -> tuple[Tensor, Tensor]:
        """Return the states before all spans (BH,spans,D,E), or the gradients after them, and what the scan ends with.

        ``given`` (B or S,H,D,E) begins the scan. The forward pass writes ``wholes``, the backward pass reads it.
        """
        sums = torch.empty(self.rows, self.spans, self.keys, self.values, dtype=torch.float32, device=x.device)
        given, found = given.contiguous(), torch.empty_like(given, memory_format=torch.contiguous_format)
        blocks, how = self.tiles(values=True)
        unit = self.units[0 if reverse else 1]
        self.launch(sums_kernel, blocks, (x, y), unit, sums, wholes, REVERSE=reverse, **how)
        size, block, packed = self.keys * self.values, 1024, self.table is not None
        # Triton's types do not know the numbers that it makes constants.
        scan: Any = scan_kernel[(triton.cdiv(size, block), given.shape[0] * self.heads)]
        scan(sums, wholes, given, found, self.firsts, self.spans, self.heads, size, reverse, packed, block)
        return sums, found

    def shared(self, x: Tensor) -> bool:
        """Return whether a gradient of queries or keys is summed or scaled afterwards, and so first in float32."""
        return self.repeats > 1 or self.units[0] is not None

    def gradient(self, x: Tensor) -> Tensor:
        """Allocate the gradient of queries or keys x (B,G,N,D), per value head."""
        if not self.shared(x):
            return torch.empty_like(x)
        return torch.empty(self.batch, self.heads, self.n, self.keys, dtype=torch.float32, device=x.device)

    def summed(self, grad: Tensor, x: Tensor, unit: Tensor | None) -> Tensor:
        """Return the gradient of x (B,G,N,D) from that per value head of the normalized x."""
        if not self.shared(x):
            return grad
        if self.repeats > 1:
            grad = grad.unflatten(1, (x.shape[1], self.repeats)).sum(2)
        if unit is not None:
            unit, hidden = unit[..., None], self.gates[1]
            normed = x.float() * unit
            grad = (grad - normed * (normed * grad).sum(-1, keepdim=True)) * unit
            if hidden is not None:
                grad = grad.masked_fill(hidden[:, None, :, None] == 0, 0.0)
        return grad.to(x.dtype)


def inverse_norm(x: Tensor) -> Tensor:
    """1 / sqrt(|x|^2 + 1e-6) of x (B,G,N,D): (B,G,N) float32."""
    return (x.float().square().sum(-1) + 1e-6).rsqrt().contiguous()


def block_of(x: Tensor, size: int, *, backward: bool) -> int:
    """Return how many channels a program takes, such that few registers spill (tests/gpu/test_triton_decay.py)."""
    hopper = not x.is_cuda or torch.cuda.get_device_capability(x.device)[0] == 9
    return 64 if hopper and x.dtype != torch.float32 and not (backward and size > 64) else 32


def chunk_of(x: Tensor) -> int:
    """Return the tokens of a chunk: half as many in float32, whose three products take many registers."""
    return CHUNK // 2 if x.dtype == torch.float32 and not interpreted() else CHUNK


def span_of(n: int) -> int:
    """Return how many tokens a span has: fewer than ``SPAN`` for short sequences."""
    return min(SPAN, max(CHUNK, triton.next_power_of_2(n)))


def packed_spans(offsets: Tensor, n: int, span: int) -> tuple[Tensor, Tensor]:
    """Cut the sequences of ``offsets`` (S+1,) into spans, without waiting for the device.

    Returns the first token of each span and the one after its last (spans,2), both int64, and the number of the first
    span of each sequence (S+1,). The number of spans is the largest possible one; those at the end may have no tokens.
    """
    firsts = F.pad(((offsets.diff() + span - 1) // span).cumsum(0), (1, 0))
    spans = torch.arange(n // span + len(offsets) - 1, device=offsets.device)
    sequence = (torch.searchsorted(firsts, spans, right=True) - 1).clamp(0, len(offsets) - 2)
    begin = offsets[sequence] + (spans - firsts[sequence]) * span
    stop = torch.minimum(begin + span, offsets[sequence + 1])
    return torch.stack([begin, stop], 1).clamp(0, n).contiguous(), firsts


def forward(call: Call, state: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """o (B,H,N,E), the last state, the states before all spans, and what each span leaves of a state."""
    q, k, v = call.q, call.k, call.v
    o, wholes = torch.empty_like(v), torch.empty(call.rows, call.spans, dtype=torch.float32, device=v.device)
    starts, end = call.states(k, v, state, wholes, reverse=False)
    blocks, how = call.tiles(values=True)
    call.launch(outputs_kernel, blocks, (q, k, v, o), call.units, starts, **call.precision, **how)
    return o, end, starts, wholes


def backward(
    call: Call, grad: Tensor, grad_end: Tensor, starts: Tensor, wholes: Tensor, decays: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """Return the gradients of q, k, v, of log_decay if ``decays``, and of the first state."""
    q, k, v, log_decay = call.q, call.k, call.v, call.gates[0]
    ends, first = call.states(q, grad, grad_end, wholes, reverse=True)

    dv, (blocks, how) = torch.empty_like(v), call.tiles(values=True)
    call.launch(values_backward_kernel, blocks, (q, k, grad, dv), call.units, ends, **call.precision, **how)

    dq, dk, (blocks, how) = call.gradient(q), call.gradient(k), call.tiles(keys=True)
    ddecay = ahead = None
    if decays:
        ddecay = grad_end.new_empty(blocks, call.batch, call.heads, call.n)
        ahead = grad_end.new_empty(call.rows, call.spans, call.span // call.chunk, call.values, call.keys)
    for kernel, into, states in ((keys_backward_kernel, dk, ends), (queries_backward_kernel, dq, starts)):
        others = call.units, ddecay, states, ahead
        call.launch(kernel, blocks, (q, k, v, grad, into), *others, **call.precision, **how)
    dq, dk = call.summed(dq, q, call.units[0]), call.summed(dk, k, call.units[1])
    if ddecay is not None and log_decay is not None:
        ddecay = ddecay.sum(0).to(log_decay.dtype)
    return dq, dk, dv, ddecay, first
