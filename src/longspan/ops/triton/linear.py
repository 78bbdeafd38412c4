# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportPossiblyUnboundVariable=false
# Triton compiles these functions from their source, where parameters have no types that pyright knows.
"""Triton kernels of normalized linear attention: sums over spans of tokens, outputs, gradients, and one token.

The tokens of a head are cut into spans of SPAN tokens, and spans into chunks of C. One program computes a span, or a
block of its channels, chunk after chunk:

1. ``sums_kernel``: what each span adds to the state, P_l = sum_j phi(k_j) [v_j, 1].
2. ``prefix_kernel``: the state before each span, S_l = S_(l-1) + P_(l-1), and the last state.
3. ``outputs_kernel``: A = tril(phi(q) phi(k)^T), d = A 1 + phi(q) z + eps, o = (A v + phi(q) S) / d per chunk, after
   which S += phi(k)^T v and z += sum phi(k).

The gradients, with w = -(do . o) and c = 1 / d, repeat this: ``grad_sums_kernel`` adds (c phi(q))^T [do, w] per span,
``prefix_kernel`` sums from the end, which gives the gradient [R, r] of the state after each span, and then

    dphi(q) = c (tril(do v^T + w 1^T) phi(k) + do S^T + w z^T)
    dphi(k) = tril(c (do v^T + w 1^T))^T phi(q) + v R^T + 1 r^T
    dv = tril(c phi(q) phi(k)^T)^T do + phi(k) R

c multiplies results, never do, which so enters products without another rounding.

Without CAUSAL all queries read the sum over all keys, and the terms with tril are missing.

For bfloat16 inputs (HALF) products multiply bfloat16 numbers. One rounding of features, states or scores would
double the error of the results: in dphi(q) and r two terms almost cancel. So a computed operand enters as two numbers,
the rounded one and what it lost, and costs one more product (``product``). For the same reason w needs the digits of o
that its type loses: the outputs kernel stores them as ``rest`` for the gradients. Other inputs are multiplied as
float32, since features in float16 can overflow.

A state of a span is stored as S (D,E), then z (D), so that rows of S are aligned. z, denominators and w are float32.
Where a product needs an operand transposed, it is loaded transposed: Triton 3.4 to 3.7 miscompiles some products with
a transposed result of a product on Hopper. No program adds to the memory of another, so results are the same bits in
every run.

``n`` is the number of tokens, ``spans`` that of spans in a buffer of states, ``heads`` H; ``strides`` are those of the
tensors, in their order. ``mask`` (B,N) and ``segments`` (B,N) may be None.
"""

import triton
import triton.language as tl

from . import interpreted

WIDE = tl.constexpr(interpreted())


@triton.jit
def phi(x, MAP: tl.constexpr):
    """Return the feature map number MAP of ``ops/linear/triton.py``. NaN stays NaN, which tl.maximum would not keep."""
    if MAP == 0:
        return tl.where(x < 0.0, tl.exp(x), x + 1.0)
    elif MAP == 1:
        return tl.where(x < 0.0, 0.0, x)
    elif MAP == 2:
        positive = tl.where(x < 0.0, 0.0, x)
        return positive * positive
    else:
        return tl.exp(tl.where(x > 30.0, 30.0, x))


@triton.jit
def slope(x, MAP: tl.constexpr):
    """Return the derivative of ``phi``, as torch defines it at the kinks."""
    if MAP == 0:
        return tl.where(x < 0.0, tl.exp(x), 1.0)
    elif MAP == 1:
        return tl.where(x > 0.0, 1.0, 0.0)
    elif MAP == 2:
        return tl.where(x > 0.0, 2.0 * x, 0.0)
    else:
        return tl.where(x > 30.0, 0.0, tl.exp(x))


@triton.jit
def nearest(x):
    """Round float32 to the nearest bfloat16, in float32. The interpreter cuts digits off where a GPU rounds."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def operand(x, HALF: tl.constexpr):
    """Round to the type of operands. WIDE: keep it in float32, since the interpreter cannot multiply bfloat16."""
    if HALF and WIDE:
        return nearest(x.to(tl.float32))
    elif HALF:
        return x.to(tl.bfloat16)
    else:
        return x.to(tl.float32)


@triton.jit
def product(x, y, total, FINE_X: tl.constexpr, FINE_Y: tl.constexpr, HALF: tl.constexpr, PRECISION: tl.constexpr):
    """Return total + x y, in float32. FINE_X, FINE_Y: x, y are computed and have more digits than bfloat16."""
    high_x, high_y = operand(x, HALF), operand(y, HALF)
    if HALF and FINE_Y:
        total = tl.dot(high_x, operand(y - high_y.to(tl.float32), HALF), total)
    if HALF and FINE_X:
        total = tl.dot(operand(x - high_x.to(tl.float32), HALF), high_y, total)
    return tl.dot(high_x, high_y, total, input_precision=PRECISION)


@triton.jit
def stored(y, like):
    """Round a result to the type of the tensor ``like``."""
    if WIDE and like.dtype.element_ty == tl.bfloat16:
        y = nearest(y)
    return y.to(like.dtype.element_ty)


@triton.jit
def moved(x, strides, b, h, first):
    """Return x (B,H,N,D) at token ``first`` of a row and head."""
    return x + (b * strides[0] + h * strides[1] + first * strides[2])


@triton.jit
def rows(x, strides, at_n, at_d, keep, D: tl.constexpr):
    """Load tokens (C,D) of x, 0 where not ``keep``."""
    at = x + at_n[:, None] * strides[2] + at_d[None, :] * strides[3]
    return tl.load(at, mask=keep[:, None] & (at_d[None, :] < D), other=0.0)


@triton.jit
def columns(x, strides, at_n, at_d, keep, D: tl.constexpr):
    """Load tokens of x transposed (D,C), 0 where not ``keep``."""
    at = x + at_d[:, None] * strides[3] + at_n[None, :] * strides[2]
    return tl.load(at, mask=keep[None, :] & (at_d[:, None] < D), other=0.0)


@triton.jit
def store_rows(x, strides, at_n, at_d, y, there, D: tl.constexpr):
    """Store tokens y (C,D) in x."""
    at = x + at_n[:, None] * strides[2] + at_d[None, :] * strides[3]
    tl.store(at, y, mask=there[:, None] & (at_d[None, :] < D))


@triton.jit
def feature_rows(x, at_d, keep, D: tl.constexpr, MAP: tl.constexpr):
    """Map tokens (C,D). phi(0) is not 0, so what was not loaded is cleared again."""
    return tl.where(keep[:, None] & (at_d[None, :] < D), phi(x.to(tl.float32), MAP), 0.0)


@triton.jit
def feature_columns(x, at_d, keep, D: tl.constexpr, MAP: tl.constexpr):
    """``feature_rows`` of transposed tokens (D,C)."""
    return tl.where(keep[None, :] & (at_d[:, None] < D), phi(x.to(tl.float32), MAP), 0.0)


@triton.jit
def place(spans, heads, BLOCKS: tl.constexpr):
    """Return the block of channels, span, (row, head), row and head of this program."""
    at = tl.program_id(0)
    span = (at // BLOCKS) % spans
    pair = (at // BLOCKS // spans).to(tl.int64)
    return at % BLOCKS, span, pair, pair // heads, pair % heads


@triton.jit
def state_at(pair, span, states, CAUSAL: tl.constexpr):
    """Return the number of the state of a span; without CAUSAL, of the only one of a row and head."""
    if CAUSAL:
        return pair * states + span
    else:
        return pair * states


@triton.jit
def s_at(at_d, at_e, E: tl.constexpr, CAUSAL: tl.constexpr):
    """Return the places of S (D,E) in a state of a span, or of the caller, (D,E+1), without CAUSAL."""
    return at_d * (E if CAUSAL else E + 1) + at_e


@triton.jit
def z_at(at_d, D: tl.constexpr, E: tl.constexpr, CAUSAL: tl.constexpr):
    """Return the places of z (D,), as ``s_at``."""
    if CAUSAL:
        return D * E + at_d
    else:
        return at_d * (E + 1) + E


@triton.jit
def kept(mask, mask_strides, b, first, at_n, left):
    """Return which keys count: those before the end, and real by the mask."""
    keep = at_n < left
    if mask is not None:
        at = mask + (b * mask_strides[0] + first * mask_strides[1]) + at_n * mask_strides[1]
        keep = keep & (tl.load(at, mask=keep, other=0) != 0)
    return keep


@triton.jit
def id_at(segments, segments_strides, b, token, n):
    """Return the segment of a token; before the first and after the last token, that of the first and last."""
    segments += b * segments_strides[0]
    return tl.load(segments + tl.minimum(tl.maximum(token, 0), n - 1).to(tl.int64) * segments_strides[1])


@triton.jit
def ids_of(segments, segments_strides, b, first, at_n, n):
    """Return the segments of the tokens ``first`` + at_n, as ``id_at``."""
    segments += b * segments_strides[0]
    return tl.load(segments + tl.minimum(first + at_n, n - 1).to(tl.int64) * segments_strides[1])


@triton.jit
def inverse(below, at_n, there):
    """Return 1 / d, and 0 where d is 0: such queries have no gradient."""
    d = tl.load(below + at_n, mask=there, other=1.0)
    return tl.where(d == 0.0, 0.0, 1.0 / tl.where(d == 0.0, 1.0, d))


@triton.jit(do_not_specialize=["n", "spans", "heads"])
def sums_kernel(
    k,
    v,
    parts,
    mask,
    segments,
    n,
    spans,
    heads,
    strides,
    D: tl.constexpr,
    E: tl.constexpr,
    MAP: tl.constexpr,
    SPAN: tl.constexpr,
    C: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
    HALF: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """parts (B,H,spans,[S|z]): the sum over the keys of each span; with segments, of those of its last segment."""
    k_strides, v_strides, mask_strides, segments_strides = strides
    block, span, pair, b, h = place(spans, heads, (E + BE - 1) // BE)
    first, left = span.to(tl.int64) * SPAN, n - span * SPAN
    at_d, at_e = tl.arange(0, BD), block * BE + tl.arange(0, BE)
    k = moved(k, k_strides, b, h, first)
    v = moved(v, v_strides, b, h, first)
    if segments is not None:
        last = id_at(segments, segments_strides, b, span * SPAN + SPAN - 1, n)
    s, z = tl.zeros([BD, BE], tl.float32), tl.zeros([BD], tl.float32)
    for i in range(0, SPAN // C):
        at_n = i * C + tl.arange(0, C)
        keep = kept(mask, mask_strides, b, first, at_n, left)
        if segments is not None:
            keep = keep & (ids_of(segments, segments_strides, b, span * SPAN, at_n, n) == last)
        fk = feature_columns(columns(k, k_strides, at_n, at_d, keep, D), at_d, keep, D, MAP)
        x = rows(v, v_strides, at_n, at_e, keep, E)
        s = product(fk, x, s, MAP != 1, False, HALF, PRECISION)
        z += tl.sum(fk, 1)
    parts += (pair * spans + span) * (D * E + D)
    tl.store(parts + at_d[:, None] * E + at_e[None, :], s, mask=(at_d[:, None] < D) & (at_e[None, :] < E))
    if block == 0:
        tl.store(parts + D * E + at_d, z, mask=at_d < D)


@triton.jit(do_not_specialize=["n", "spans", "heads"])
def prefix_kernel(
    parts,
    given,
    end,
    segments,
    n,
    spans,
    heads,
    strides,
    D: tl.constexpr,
    E: tl.constexpr,
    SPAN: tl.constexpr,
    CAUSAL: tl.constexpr,
    REVERSE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Turn the sums of spans into running sums, in place, from the state ``given`` (B,H,D,E+1), or from 0 for None.

    parts[l] becomes the state before span l, or after it with REVERSE, which sums from the last span. Without CAUSAL,
    only ``end`` (B,H,D,E+1) is computed, the state after all spans.
    """
    given_strides, segments_strides = strides
    SIZE: tl.constexpr = D * E + D
    BLOCKS: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    at = (tl.program_id(0) % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    pair = (tl.program_id(0) // BLOCKS).to(tl.int64)
    b, h = pair // heads, pair % heads
    there = at < SIZE
    # S is stored first, then z, which is the last column of a state of the caller.
    at_d, at_e = tl.where(at < D * E, at // E, at - D * E), tl.where(at < D * E, at % E, E)
    s = tl.zeros([BLOCK], tl.float32)
    if given is not None:
        given = moved(given, given_strides, b, h, 0) + at_d * given_strides[2] + at_e * given_strides[3]
        s += tl.load(given, mask=there, other=0.0)
    parts += pair * spans * SIZE
    # The first span to add, and the step to the next one. A loop over a range that is known at run time only does not
    # run in the interpreter with numpy 2.4.
    span, step = tl.zeros([], tl.int64), 1
    if REVERSE:
        span, step = span + spans - 1, -1
    part = tl.load(parts + span * SIZE + at, mask=there, other=0.0)
    done = 0
    while done < spans:
        # Loaded before the store, so that both take place at the same time.
        follows = tl.load(parts + (span + step) * SIZE + at, mask=at < tl.where(done + 1 < spans, SIZE, 0), other=0.0)
        if CAUSAL:
            tl.store(parts + span * SIZE + at, s, mask=there)
        if segments is not None:
            before = id_at(segments, segments_strides, b, span * SPAN - 1, n)
            last = id_at(segments, segments_strides, b, span * SPAN + SPAN - 1, n)
            s = tl.where(before == last, s, 0.0)
        s += part
        part = follows
        span += step
        done += 1
    tl.store(end + pair * SIZE + at_d * (E + 1) + at_e, s, mask=there)


@triton.jit(do_not_specialize=["n", "spans", "states", "heads"])
def outputs_kernel(
    q,
    k,
    v,
    o,
    rest,
    below,
    starts,
    mask,
    segments,
    n,
    spans,
    states,
    heads,
    eps,
    strides,
    D: tl.constexpr,
    E: tl.constexpr,
    MAP: tl.constexpr,
    CAUSAL: tl.constexpr,
    SPAN: tl.constexpr,
    C: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
    HALF: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """o (B,H,N,E) and the denominators ``below`` (B,H,N) from ``starts``, the states before spans or the sum.

    ``rest``, if not None, gets what the type of o loses, in the layout of o.
    """
    q_strides, k_strides, v_strides, o_strides, mask_strides, segments_strides = strides
    block, span, pair, b, h = place(spans, heads, (E + BE - 1) // BE)
    first, left = span.to(tl.int64) * SPAN, n - span * SPAN
    at_c, at_d, at_e = tl.arange(0, C), tl.arange(0, BD), block * BE + tl.arange(0, BE)
    q = moved(q, q_strides, b, h, first)
    k = moved(k, k_strides, b, h, first)
    v = moved(v, v_strides, b, h, first)
    o = moved(o, o_strides, b, h, first)
    if rest is not None:
        rest = moved(rest, o_strides, b, h, first)
    below += pair * n + first
    starts += state_at(pair, span, states, CAUSAL) * (D * E + D)
    s_mask = (at_d[:, None] < D) & (at_e[None, :] < E)
    s = tl.load(starts + s_at(at_d[:, None], at_e[None, :], E, CAUSAL), mask=s_mask, other=0.0)
    z = tl.load(starts + z_at(at_d, D, E, CAUSAL), mask=at_d < D, other=0.0)
    for i in range(0, SPAN // C):
        at_n = i * C + at_c
        there = at_n < left
        fq = feature_rows(rows(q, q_strides, at_n, at_d, there, D), at_d, there, D, MAP)
        read = fq
        if segments is not None:
            ids = ids_of(segments, segments_strides, b, span * SPAN, at_n, n)
            before = id_at(segments, segments_strides, b, span * SPAN + i * C - 1, n)
            read = tl.where((ids == before)[:, None], fq, 0.0)
        d = tl.sum(read * z[None, :], 1) + eps
        total = tl.zeros([C, BE], tl.float32)
        total = product(read, s, total, MAP != 1, True, HALF, PRECISION)
        if CAUSAL:
            keep = kept(mask, mask_strides, b, first, at_n, left)
            fk = feature_columns(columns(k, k_strides, at_n, at_d, keep, D), at_d, keep, D, MAP)
            x = rows(v, v_strides, at_n, at_e, keep, E)
            meet = at_c[:, None] >= at_c[None, :]
            if segments is not None:
                meet = meet & (ids[:, None] == ids[None, :])
            a = product(fq, fk, tl.zeros([C, C], tl.float32), MAP != 1, MAP != 1, HALF, PRECISION)
            a = tl.where(meet, a, 0.0)
            d += tl.sum(a, 1)
            total = product(a, x, total, True, False, HALF, PRECISION)
            if segments is not None:
                last = id_at(segments, segments_strides, b, span * SPAN + i * C + C - 1, n)
                fk = tl.where((ids == last)[None, :], fk, 0.0)
                s = tl.where(before == last, s, 0.0)
                z = tl.where(before == last, z, 0.0)
            s = product(fk, x, s, MAP != 1, False, HALF, PRECISION)
            z += tl.sum(fk, 1)
        y = tl.where(d[:, None] == 0.0, 0.0, total / tl.where(d == 0.0, 1.0, d)[:, None])
        out = stored(y, o)
        at = at_n[:, None] * o_strides[2] + at_e[None, :] * o_strides[3]
        y_mask = there[:, None] & (at_e[None, :] < E)
        tl.store(o + at, out, mask=y_mask)
        if rest is not None:
            tl.store(rest + at, stored(y - out.to(tl.float32), rest), mask=y_mask)
        if block == 0:
            tl.store(below + at_n, d, mask=there)


@triton.jit(do_not_specialize=["n", "spans", "heads"])
def grad_sums_kernel(
    q,
    o,
    rest,
    g,
    below,
    weights,
    parts,
    segments,
    n,
    spans,
    heads,
    strides,
    D: tl.constexpr,
    E: tl.constexpr,
    MAP: tl.constexpr,
    SPAN: tl.constexpr,
    C: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
    HALF: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """parts (B,H,spans,[S|z]): sums of c phi(q) [do, w] over the queries of a span that read its first state.

    ``g`` is the gradient of o. ``weights`` (B,H,N) become w.
    """
    q_strides, o_strides, g_strides, segments_strides = strides
    block, span, pair, b, h = place(spans, heads, (D + BD - 1) // BD)
    first, left = span.to(tl.int64) * SPAN, n - span * SPAN
    at_d, at_e = block * BD + tl.arange(0, BD), tl.arange(0, BE)
    q = moved(q, q_strides, b, h, first)
    o = moved(o, o_strides, b, h, first)
    if rest is not None:
        rest = moved(rest, o_strides, b, h, first)
    g = moved(g, g_strides, b, h, first)
    below += pair * n + first
    weights += pair * n + first
    if segments is not None:
        before = id_at(segments, segments_strides, b, span * SPAN - 1, n)
    s, z = tl.zeros([BD, BE], tl.float32), tl.zeros([BD], tl.float32)
    for i in range(0, SPAN // C):
        at_n = i * C + tl.arange(0, C)
        there = at_n < left
        above = rows(g, g_strides, at_n, at_e, there, E)
        y = rows(o, o_strides, at_n, at_e, there, E).to(tl.float32)
        if rest is not None:
            y += rows(rest, o_strides, at_n, at_e, there, E).to(tl.float32)
        w = -tl.sum(above.to(tl.float32) * y, 1)
        if block == 0:
            tl.store(weights + at_n, w, mask=there)
        reads = there
        if segments is not None:
            reads = there & (ids_of(segments, segments_strides, b, span * SPAN, at_n, n) == before)
        fq = feature_columns(columns(q, q_strides, at_n, at_d, reads, D), at_d, reads, D, MAP)
        fq *= inverse(below, at_n, there)[None, :]
        s = product(fq, above, s, True, False, HALF, PRECISION)
        z += tl.sum(fq * w[None, :], 1)
    parts += (pair * spans + span) * (D * E + D)
    tl.store(parts + at_d[:, None] * E + at_e[None, :], s, mask=(at_d[:, None] < D) & (at_e[None, :] < E))
    tl.store(parts + D * E + at_d, z, mask=at_d < D)


@triton.jit(do_not_specialize=["n", "spans", "states", "heads"])
def grad_q_kernel(
    q,
    k,
    v,
    g,
    below,
    weights,
    starts,
    dq,
    mask,
    segments,
    n,
    spans,
    states,
    heads,
    strides,
    D: tl.constexpr,
    E: tl.constexpr,
    MAP: tl.constexpr,
    CAUSAL: tl.constexpr,
    SPAN: tl.constexpr,
    C: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
    HALF: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dq (B,H,N,D) from the states ``starts``, forward in time: S^T (E,D) in registers."""
    q_strides, k_strides, v_strides, g_strides, dq_strides, mask_strides, segments_strides = strides
    block, span, pair, b, h = place(spans, heads, (D + BD - 1) // BD)
    first, left = span.to(tl.int64) * SPAN, n - span * SPAN
    at_c, at_d, at_e = tl.arange(0, C), block * BD + tl.arange(0, BD), tl.arange(0, BE)
    q = moved(q, q_strides, b, h, first)
    k = moved(k, k_strides, b, h, first)
    v = moved(v, v_strides, b, h, first)
    g = moved(g, g_strides, b, h, first)
    dq = moved(dq, dq_strides, b, h, first)
    below += pair * n + first
    weights += pair * n + first
    starts += state_at(pair, span, states, CAUSAL) * (D * E + D)
    s_mask = (at_d[None, :] < D) & (at_e[:, None] < E)
    s = tl.load(starts + s_at(at_d[None, :], at_e[:, None], E, CAUSAL), mask=s_mask, other=0.0)
    z = tl.load(starts + z_at(at_d, D, E, CAUSAL), mask=at_d < D, other=0.0)
    for i in range(0, SPAN // C):
        at_n = i * C + at_c
        there = at_n < left
        above = rows(g, g_strides, at_n, at_e, there, E)
        w = tl.load(weights + at_n, mask=there, other=0.0)
        change = product(above, s, w[:, None] * z[None, :], False, True, HALF, PRECISION)
        if segments is not None:
            ids = ids_of(segments, segments_strides, b, span * SPAN, at_n, n)
            before = id_at(segments, segments_strides, b, span * SPAN + i * C - 1, n)
            change = tl.where((ids == before)[:, None], change, 0.0)
        if CAUSAL:
            keep = kept(mask, mask_strides, b, first, at_n, left)
            fk = feature_rows(rows(k, k_strides, at_n, at_d, keep, D), at_d, keep, D, MAP)
            x = columns(v, v_strides, at_n, at_e, keep, E)
            meet = at_c[:, None] >= at_c[None, :]
            if segments is not None:
                meet = meet & (ids[:, None] == ids[None, :])
            a = product(above, x, tl.zeros([C, C], tl.float32), False, False, HALF, PRECISION)
            a = tl.where(meet, a + w[:, None], 0.0)
            change = product(a, fk, change, True, MAP != 1, HALF, PRECISION)
            if segments is not None:
                last = id_at(segments, segments_strides, b, span * SPAN + i * C + C - 1, n)
                fk = tl.where((ids == last)[:, None], fk, 0.0)
                s = tl.where(before == last, s, 0.0)
                z = tl.where(before == last, z, 0.0)
            s = product(x, fk, s, False, MAP != 1, HALF, PRECISION)
            z += tl.sum(fk, 0)
        x = rows(q, q_strides, at_n, at_d, there, D).to(tl.float32)
        change *= inverse(below, at_n, there)[:, None]
        y = stored(change * slope(x, MAP), dq)
        store_rows(dq, dq_strides, at_n, at_d, y, there, D)


@triton.jit(do_not_specialize=["n", "spans", "states", "heads"])
def grad_k_kernel(
    q,
    k,
    v,
    g,
    below,
    weights,
    ends,
    dk,
    mask,
    segments,
    n,
    spans,
    states,
    heads,
    strides,
    D: tl.constexpr,
    E: tl.constexpr,
    MAP: tl.constexpr,
    CAUSAL: tl.constexpr,
    SPAN: tl.constexpr,
    C: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
    HALF: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dk (B,H,N,D) from the gradients ``ends`` of the states after spans, back in time: R^T (E,D) in registers."""
    q_strides, k_strides, v_strides, g_strides, dk_strides, mask_strides, segments_strides = strides
    block, span, pair, b, h = place(spans, heads, (D + BD - 1) // BD)
    first, left = span.to(tl.int64) * SPAN, n - span * SPAN
    at_c, at_d, at_e = tl.arange(0, C), block * BD + tl.arange(0, BD), tl.arange(0, BE)
    q = moved(q, q_strides, b, h, first)
    k = moved(k, k_strides, b, h, first)
    v = moved(v, v_strides, b, h, first)
    g = moved(g, g_strides, b, h, first)
    dk = moved(dk, dk_strides, b, h, first)
    below += pair * n + first
    weights += pair * n + first
    ends += state_at(pair, span, states, CAUSAL) * (D * E + D)
    r_mask = (at_d[None, :] < D) & (at_e[:, None] < E)
    r = tl.load(ends + s_at(at_d[None, :], at_e[:, None], E, CAUSAL), mask=r_mask, other=0.0)
    u = tl.load(ends + z_at(at_d, D, E, CAUSAL), mask=at_d < D, other=0.0)
    for j in range(0, SPAN // C):
        i = SPAN // C - 1 - j
        at_n = i * C + at_c
        there = at_n < left
        keep = kept(mask, mask_strides, b, first, at_n, left)
        x = rows(v, v_strides, at_n, at_e, keep, E)
        change = tl.zeros([C, BD], tl.float32) + u[None, :]
        change = product(x, r, change, False, True, HALF, PRECISION)
        if segments is not None:
            ids = ids_of(segments, segments_strides, b, span * SPAN, at_n, n)
            before = id_at(segments, segments_strides, b, span * SPAN + i * C - 1, n)
            last = id_at(segments, segments_strides, b, span * SPAN + i * C + C - 1, n)
            change = tl.where((ids == last)[:, None], change, 0.0)
        if CAUSAL:
            fq = feature_rows(rows(q, q_strides, at_n, at_d, there, D), at_d, there, D, MAP)
            above = columns(g, g_strides, at_n, at_e, there, E)
            c = inverse(below, at_n, there)
            w = tl.load(weights + at_n, mask=there, other=0.0)
            meet = at_c[:, None] <= at_c[None, :]
            if segments is not None:
                meet = meet & (ids[:, None] == ids[None, :])
            a = product(x, above, tl.zeros([C, C], tl.float32), False, False, HALF, PRECISION)
            a = tl.where(meet, (a + w[None, :]) * c[None, :], 0.0)
            change = product(a, fq, change, True, MAP != 1, HALF, PRECISION)
            if segments is not None:
                fq = tl.where((ids == before)[:, None], fq, 0.0)
                r = tl.where(before == last, r, 0.0)
                u = tl.where(before == last, u, 0.0)
            fq *= c[:, None]
            r = product(above, fq, r, False, True, HALF, PRECISION)
            u += tl.sum(fq * w[:, None], 0)
        x = rows(k, k_strides, at_n, at_d, keep, D).to(tl.float32)
        y = stored(tl.where(keep[:, None], change * slope(x, MAP), 0.0), dk)
        store_rows(dk, dk_strides, at_n, at_d, y, there, D)


@triton.jit(do_not_specialize=["n", "spans", "states", "heads"])
def grad_v_kernel(
    q,
    k,
    g,
    below,
    ends,
    dv,
    mask,
    segments,
    n,
    spans,
    states,
    heads,
    strides,
    D: tl.constexpr,
    E: tl.constexpr,
    MAP: tl.constexpr,
    CAUSAL: tl.constexpr,
    SPAN: tl.constexpr,
    C: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
    HALF: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dv (B,H,N,E) from the gradients ``ends`` of the states after spans, back in time: R (D,E) in registers."""
    q_strides, k_strides, g_strides, dv_strides, mask_strides, segments_strides = strides
    block, span, pair, b, h = place(spans, heads, (E + BE - 1) // BE)
    first, left = span.to(tl.int64) * SPAN, n - span * SPAN
    at_c, at_d, at_e = tl.arange(0, C), tl.arange(0, BD), block * BE + tl.arange(0, BE)
    q = moved(q, q_strides, b, h, first)
    k = moved(k, k_strides, b, h, first)
    g = moved(g, g_strides, b, h, first)
    dv = moved(dv, dv_strides, b, h, first)
    below += pair * n + first
    ends += state_at(pair, span, states, CAUSAL) * (D * E + D)
    r_mask = (at_d[:, None] < D) & (at_e[None, :] < E)
    r = tl.load(ends + s_at(at_d[:, None], at_e[None, :], E, CAUSAL), mask=r_mask, other=0.0)
    for j in range(0, SPAN // C):
        i = SPAN // C - 1 - j
        at_n = i * C + at_c
        there = at_n < left
        keep = kept(mask, mask_strides, b, first, at_n, left)
        fk = feature_rows(rows(k, k_strides, at_n, at_d, keep, D), at_d, keep, D, MAP)
        change = product(fk, r, tl.zeros([C, BE], tl.float32), MAP != 1, True, HALF, PRECISION)
        if segments is not None:
            ids = ids_of(segments, segments_strides, b, span * SPAN, at_n, n)
            before = id_at(segments, segments_strides, b, span * SPAN + i * C - 1, n)
            last = id_at(segments, segments_strides, b, span * SPAN + i * C + C - 1, n)
            change = tl.where((ids == last)[:, None], change, 0.0)
        if CAUSAL:
            fq = feature_columns(columns(q, q_strides, at_n, at_d, there, D), at_d, there, D, MAP)
            above = rows(g, g_strides, at_n, at_e, there, E)
            c = inverse(below, at_n, there)
            meet = at_c[:, None] <= at_c[None, :]
            if segments is not None:
                meet = meet & (ids[:, None] == ids[None, :])
            a = product(fk, fq, tl.zeros([C, C], tl.float32), MAP != 1, MAP != 1, HALF, PRECISION)
            a = tl.where(meet, a * c[None, :], 0.0)
            change = product(a, above, change, True, False, HALF, PRECISION)
            if segments is not None:
                fq = tl.where((ids == before)[None, :], fq, 0.0)
                r = tl.where(before == last, r, 0.0)
            fq *= c[None, :]
            r = product(fq, above, r, True, False, HALF, PRECISION)
        y = stored(tl.where(keep[:, None], change, 0.0), dv)
        store_rows(dv, dv_strides, at_n, at_e, y, there, E)


@triton.jit(do_not_specialize=["heads"])
def step_kernel(
    q,
    k,
    v,
    state,
    after,
    o,
    heads,
    eps,
    strides,
    D: tl.constexpr,
    E: tl.constexpr,
    MAP: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
):
    """One token: o (B,H,E) and the state after it (B,H,D,E+1), which may be ``state`` itself. A program per head."""
    q_strides, k_strides, v_strides, state_strides, after_strides, o_strides = strides
    pair = tl.program_id(0).to(tl.int64)
    b, h = pair // heads, pair % heads
    at_d, at_e = tl.arange(0, BD), tl.arange(0, BE)
    in_d, in_e = at_d < D, at_e < E
    _, _, state_d, state_e = state_strides
    _, _, after_d, after_e = after_strides
    state = moved(state, state_strides, b, h, 0)
    after = moved(after, after_strides, b, h, 0)
    xq = tl.load(moved(q, q_strides, b, h, at_d), mask=in_d, other=0.0).to(tl.float32)
    xk = tl.load(moved(k, k_strides, b, h, at_d), mask=in_d, other=0.0).to(tl.float32)
    x = tl.load(moved(v, v_strides, b, h, at_e), mask=in_e, other=0.0).to(tl.float32)
    inside = in_d[:, None] & in_e[None, :]
    s = tl.load(state + at_d[:, None] * state_d + at_e[None, :] * state_e, mask=inside, other=0.0)
    z = tl.load(state + at_d * state_d + E * state_e, mask=in_d, other=0.0)
    # Several threads load the same numbers: all must have them before one of them stores.
    tl.debug_barrier()
    fq, fk = tl.where(in_d, phi(xq, MAP), 0.0), tl.where(in_d, phi(xk, MAP), 0.0)
    s += fk[:, None] * x[None, :]
    z += fk
    d = tl.sum(fq * z, 0) + eps
    total = tl.sum(fq[:, None] * s, 0)
    y = tl.where(d == 0.0, 0.0, total / tl.where(d == 0.0, 1.0, d))
    tl.store(moved(o, o_strides, b, h, at_e), stored(y, o), mask=in_e)
    tl.store(after + at_d[:, None] * after_d + at_e[None, :] * after_e, s, mask=inside)
    tl.store(after + at_d * after_d + E * after_e, z, mask=in_d)
