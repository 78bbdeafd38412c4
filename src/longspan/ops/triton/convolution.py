# pyright: basic, reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# Triton compiles these functions from their source, where parameters have no types that pyright knows.
r"""The causal depth-wise convolution in Triton.

With z the sum before the activation, and rows of the state in the places before the first token of a sequence,

$$
z_t = b + \sum_{j=1}^{K} w_j x_{t-K+j}, \quad
\bar z_t = \bar y_t \, \mathrm{act}'(z_t), \quad
\bar x_p = \sum_{i=0}^{K-1} w_{K-i} \bar z_{p+i}, \quad
\bar w_j = \sum_t \bar z_t x_{t-K+j}
$$

where p is the place of a token or of a row of the state. The backward pass recomputes z, so only inputs are kept. All
sums are in float32. Gradients of the weights are sums over blocks of tokens, which the caller adds up in a fixed order.

A block reads up to 2 K - 1 shifted copies of its tokens, all but one from the cache. A block that lies inside of one
sequence takes a shorter form (``EDGE`` is False) that needs neither borders nor states.

x (B,N,C) has any strides; states (S,R,C), ids of segments (B,N), bias (C,) and weights are contiguous. Weights are
(K,C) for sequences, so that a thread reads those of its channels at once.
"""

import triton
import triton.language as tl

PLAIN, SEGMENTS, PACKED = 0, 1, 2  # values of KIND: how sequences are marked


@triton.jit
def _owner(offsets, t, sequences, STEPS: tl.constexpr):
    """The last sequence that begins at token t or before; STEPS halvings reach one of ``sequences``."""
    low = t * 0
    high = low + sequences
    for _ in tl.static_range(STEPS):
        middle = (low + high) // 2
        begun = tl.load(offsets + middle) <= t
        low = tl.where(begun, middle, low)
        high = tl.where(begun, high, middle)
    return low


@triton.jit
def _row(
    x,
    state,
    ids,
    place,
    start,
    mine,
    opens,
    channel,
    tokens,
    channels,
    rows,
    x_n,
    x_c,
    KIND: tl.constexpr,
    EDGE: tl.constexpr,
):
    """Inputs (T,C) at places (T,) of sequences: tokens, or rows of the state before ``start``; else 0.

    ``mine`` is the id of the segment, ``opens`` is true if the state belongs to it.
    """
    inside = place < tokens
    if EDGE:
        inside &= place >= start
    if EDGE and KIND == 1:
        inside &= tl.load(ids + place, mask=inside, other=0) == mine
    known = (channel < channels)[None, :]
    at = place.to(tl.int64)[:, None] * x_n + channel[None, :] * x_c
    value = tl.load(x + at, mask=inside[:, None] & known, other=0.0).to(tl.float32)
    if EDGE:
        row = place - start + rows
        before = (place < start) & (row >= 0) & opens
        past = state + row.to(tl.int64)[:, None] * channels + channel[None, :]
        value += tl.load(past, mask=before[:, None] & known, other=0.0).to(tl.float32)
    return value


@triton.jit
def _tap(weight, channel, channels, J: tl.constexpr):
    """The weights (C,) of tap J."""
    return tl.load(weight + J * channels + channel, mask=channel < channels, other=0.0).to(tl.float32)


@triton.jit
def _sum(
    x,
    state,
    ids,
    weight,
    bias,
    place,
    start,
    mine,
    opens,
    channel,
    tokens,
    channels,
    rows,
    x_n,
    x_c,
    SHIFT: tl.constexpr,
    KIND: tl.constexpr,
    EDGE: tl.constexpr,
    K: tl.constexpr,
    BIAS: tl.constexpr,
    T: tl.constexpr,
    C: tl.constexpr,
):
    """z (T,C) of the tokens at ``place`` + SHIFT."""
    z = tl.zeros([T, C], tl.float32)
    if BIAS:
        z += tl.load(bias + channel, mask=channel < channels, other=0.0).to(tl.float32)[None, :]
    for J in tl.static_range(K):
        # Equal shifts are equal expressions, so that the compiler loads each shifted block once.
        row = _row(
            x,
            state,
            ids,
            place + (SHIFT + J - (K - 1)),
            start,
            mine,
            opens,
            channel,
            tokens,
            channels,
            rows,
            x_n,
            x_c,
            KIND,
            EDGE,
        )
        z += _tap(weight, channel, channels, J)[None, :] * row
    return z


@triton.jit
def _slope(
    x,
    grad,
    state,
    ids,
    weight,
    bias,
    place,
    start,
    end,
    mine,
    opens,
    channel,
    tokens,
    channels,
    rows,
    x_n,
    x_c,
    grad_n,
    grad_c,
    SHIFT: tl.constexpr,
    KIND: tl.constexpr,
    EDGE: tl.constexpr,
    K: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    T: tl.constexpr,
    C: tl.constexpr,
):
    """The gradient (T,C) of z of the tokens at ``place`` + SHIFT; 0 for those outside of the sequence."""
    token = place + SHIFT
    heard = token < tokens
    if EDGE:
        heard &= (token >= start) & (token < end)
    if EDGE and KIND == 1:
        heard &= tl.load(ids + token, mask=heard, other=0) == mine
    heard = heard[:, None] & (channel < channels)[None, :]
    at = token.to(tl.int64)[:, None] * grad_n + channel[None, :] * grad_c
    slope = tl.load(grad + at, mask=heard, other=0.0).to(tl.float32)
    if SILU:
        z = _sum(
            x,
            state,
            ids,
            weight,
            bias,
            place,
            start,
            mine,
            opens,
            channel,
            tokens,
            channels,
            rows,
            x_n,
            x_c,
            SHIFT,
            KIND,
            EDGE,
            K,
            BIAS,
            T,
            C,
        )
        share = tl.sigmoid(z)
        slope = tl.where(heard, slope * share * (1.0 + z * (1.0 - share)), 0.0)
    return slope


@triton.jit
def _shared(
    ids, offsets, first, tokens, sequences, T: tl.constexpr, K: tl.constexpr, KIND: tl.constexpr, STEPS: tl.constexpr
):
    """Whether all places that a block of tokens from ``first`` on needs are tokens of one sequence; where it ends.

    ``ids`` are those of the row. Segments but the last one of a row end at some token; here all end with the row.
    """
    oldest = first - (K - 1)
    newest = tl.minimum(first + T + K - 2, tokens - 1)
    shared = oldest >= 0
    end = tokens
    if KIND == 1:
        shared &= tl.load(ids + tl.maximum(oldest, 0)) == tl.load(ids + newest)
    if KIND == 2:
        owner = _owner(offsets, newest, sequences, STEPS)
        shared &= tl.load(offsets + owner).to(tl.int32) <= oldest
        end = tl.load(offsets + owner + 1).to(tl.int32)
    return shared, end


@triton.jit
def _borders(state, ids, offsets, b, t, tokens, channels, rows, sequences, KIND: tl.constexpr, STEPS: tl.constexpr):
    """For tokens t (T,) of a row: their sequence's start and end, id, whether the state is its, and that state."""
    start = t * 0
    end = start + tokens
    mine = start
    opens = start == 0
    past = state + (start + b).to(tl.int64)[:, None] * rows * channels
    if KIND == 1:
        mine = tl.load(ids + tl.minimum(t, tokens - 1))
        opens = mine == tl.load(ids)
    if KIND == 2:
        owner = _owner(offsets, t, sequences, STEPS)
        start = tl.load(offsets + owner).to(tl.int32)
        end = tl.load(offsets + owner + 1).to(tl.int32)
        past = state + owner.to(tl.int64)[:, None] * rows * channels
    return start, end, mine, opens, past


@triton.jit
def _outputs(
    x,
    y,
    state,
    ids,
    weight,
    bias,
    t,
    start,
    mine,
    opens,
    channel,
    tokens,
    channels,
    rows,
    x_n,
    x_c,
    y_n,
    y_c,
    KIND: tl.constexpr,
    EDGE: tl.constexpr,
    K: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    T: tl.constexpr,
    C: tl.constexpr,
):
    z = _sum(
        x,
        state,
        ids,
        weight,
        bias,
        t,
        start,
        mine,
        opens,
        channel,
        tokens,
        channels,
        rows,
        x_n,
        x_c,
        0,
        KIND,
        EDGE,
        K,
        BIAS,
        T,
        C,
    )
    if SILU:
        z *= tl.sigmoid(z)
    at = t.to(tl.int64)[:, None] * y_n + channel[None, :] * y_c
    tl.store(y + at, z.to(y.dtype.element_ty), mask=(t < tokens)[:, None] & (channel < channels)[None, :])


@triton.jit
def forward(
    x,
    y,
    weight,
    bias,
    state,
    ids,
    offsets,
    tokens,
    channels,
    rows,
    sequences,
    x_b,
    x_n,
    x_c,
    y_b,
    y_n,
    y_c,
    KIND: tl.constexpr,
    STEPS: tl.constexpr,
    K: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    T: tl.constexpr,
    C: tl.constexpr,
):
    """y of T tokens and C channels: programs (B * blocks of tokens, blocks of channels)."""
    blocks = tl.cdiv(tokens, T)
    b = (tl.program_id(0) // blocks).to(tl.int64)
    first = tl.program_id(0) % blocks * T
    t = first + tl.arange(0, T)
    channel = tl.program_id(1) * C + tl.arange(0, C)
    x += b * x_b
    y += b * y_b
    ids += b * tokens
    shared, _last = _shared(ids, offsets, first, tokens, sequences, T, K, KIND, STEPS)
    if shared:
        _outputs(
            x,
            y,
            state,
            ids,
            weight,
            bias,
            t,
            0,
            0,
            True,
            channel,
            tokens,
            channels,
            rows,
            x_n,
            x_c,
            y_n,
            y_c,
            KIND,
            False,
            K,
            BIAS,
            SILU,
            T,
            C,
        )
    else:
        start, _, mine, opens, past = _borders(
            state, ids, offsets, b, t, tokens, channels, rows, sequences, KIND, STEPS
        )
        _outputs(
            x,
            y,
            past,
            ids,
            weight,
            bias,
            t,
            start,
            mine,
            opens,
            channel,
            tokens,
            channels,
            rows,
            x_n,
            x_c,
            y_n,
            y_c,
            KIND,
            True,
            K,
            BIAS,
            SILU,
            T,
            C,
        )


@triton.jit
def _own(x, state, ids, offsets, line, tokens, channels, rows, x_b, KIND: tl.constexpr):
    """For rows of the states, ``line`` (T,) of S * R: the row, and start, end, x, ids and state of its sequence."""
    s = line // rows
    start = s * 0
    end = start + tokens
    from_row = s.to(tl.int64)
    if KIND == 2:
        start = tl.load(offsets + s).to(tl.int32)
        end = tl.load(offsets + s + 1).to(tl.int32)
        from_row = from_row * 0
    past = state + s.to(tl.int64)[:, None] * rows * channels
    return line % rows, start, end, x + from_row[:, None] * x_b, ids + from_row * tokens, past


@triton.jit
def ends(
    x,
    state,
    last,
    ids,
    offsets,
    tokens,
    channels,
    rows,
    sequences,
    x_b,
    x_n,
    x_c,
    KIND: tl.constexpr,
    T: tl.constexpr,
    C: tl.constexpr,
):
    """The states after the last token: programs (blocks of S * R rows, blocks of channels)."""
    line = tl.program_id(0) * T + tl.arange(0, T)
    channel = tl.program_id(1) * C + tl.arange(0, C)
    real = line < sequences * rows
    line = tl.where(real, line, 0)
    row, start, end, x_of, ids_of, past = _own(x, state, ids, offsets, line, tokens, channels, rows, x_b, KIND)
    mine = start
    opens = start >= 0
    if KIND == 1:
        mine = tl.load(ids_of + tokens - 1)
        opens = mine == tl.load(ids_of)
    value = _row(
        x_of, past, ids_of, end - rows + row, start, mine, opens, channel, tokens, channels, rows, x_n, x_c, KIND, True
    )
    at = line.to(tl.int64)[:, None] * channels + channel[None, :]
    tl.store(last + at, value.to(last.dtype.element_ty), mask=real[:, None] & (channel < channels)[None, :])


@triton.jit
def _inputs_gradient(
    x,
    grad,
    after,
    state,
    ids,
    weight,
    bias,
    place,
    start,
    end,
    mine,
    opens,
    closes,
    channel,
    tokens,
    channels,
    rows,
    x_n,
    x_c,
    grad_n,
    grad_c,
    KIND: tl.constexpr,
    EDGE: tl.constexpr,
    K: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    T: tl.constexpr,
    C: tl.constexpr,
):
    """The gradient (T,C) of the inputs at ``place``, where ``after`` is that of the sequence's last state.

    ``closes`` is true if that state belongs to the segment.
    """
    found = tl.zeros([T, C], tl.float32)
    for ahead in tl.static_range(K):
        slope = _slope(
            x,
            grad,
            state,
            ids,
            weight,
            bias,
            place,
            start,
            end,
            mine,
            opens,
            channel,
            tokens,
            channels,
            rows,
            x_n,
            x_c,
            grad_n,
            grad_c,
            ahead,
            KIND,
            EDGE,
            K,
            BIAS,
            SILU,
            T,
            C,
        )
        found += _tap(weight, channel, channels, K - 1 - ahead)[None, :] * slope
    if EDGE:
        row = place - end + rows
        kept = (row >= 0) & (place < end) & closes
        at = row.to(tl.int64)[:, None] * channels + channel[None, :]
        known = kept[:, None] & (channel < channels)[None, :]
        found += tl.load(after + at, mask=known, other=0.0).to(tl.float32)
    return found


@triton.jit
def _tokens_backward(
    x,
    grad,
    dx,
    sums,
    after,
    state,
    ids,
    weight,
    bias,
    t,
    start,
    end,
    mine,
    opens,
    closes,
    channel,
    tokens,
    channels,
    rows,
    x_n,
    x_c,
    grad_n,
    grad_c,
    dx_n,
    dx_c,
    KIND: tl.constexpr,
    EDGE: tl.constexpr,
    K: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    T: tl.constexpr,
    C: tl.constexpr,
):
    found = _inputs_gradient(
        x,
        grad,
        after,
        state,
        ids,
        weight,
        bias,
        t,
        start,
        end,
        mine,
        opens,
        closes,
        channel,
        tokens,
        channels,
        rows,
        x_n,
        x_c,
        grad_n,
        grad_c,
        KIND,
        EDGE,
        K,
        BIAS,
        SILU,
        T,
        C,
    )
    slope = _slope(
        x,
        grad,
        state,
        ids,
        weight,
        bias,
        t,
        start,
        end,
        mine,
        opens,
        channel,
        tokens,
        channels,
        rows,
        x_n,
        x_c,
        grad_n,
        grad_c,
        0,
        KIND,
        EDGE,
        K,
        BIAS,
        SILU,
        T,
        C,
    )
    known = channel < channels
    at = t.to(tl.int64)[:, None] * dx_n + channel[None, :] * dx_c
    tl.store(dx + at, found.to(dx.dtype.element_ty), mask=(t < tokens)[:, None] & known[None, :])
    for J in tl.static_range(K):
        row = _row(
            x, state, ids, t + (J - (K - 1)), start, mine, opens, channel, tokens, channels, rows, x_n, x_c, KIND, EDGE
        )
        tl.store(sums + J * channels + channel, tl.sum(slope * row, 0), mask=known)
    tl.store(sums + K * channels + channel, tl.sum(slope, 0), mask=known)


@triton.jit
def backward(
    x,
    grad,
    dx,
    sums,
    after,
    weight,
    bias,
    state,
    ids,
    offsets,
    tokens,
    channels,
    rows,
    sequences,
    x_b,
    x_n,
    x_c,
    grad_b,
    grad_n,
    grad_c,
    dx_b,
    dx_n,
    dx_c,
    KIND: tl.constexpr,
    STEPS: tl.constexpr,
    K: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    T: tl.constexpr,
    C: tl.constexpr,
):
    """dx of T tokens and C channels, and their sums for weights and bias: (B * blocks of tokens, K + 1, C)."""
    blocks = tl.cdiv(tokens, T)
    b = (tl.program_id(0) // blocks).to(tl.int64)
    first = tl.program_id(0) % blocks * T
    t = first + tl.arange(0, T)
    channel = tl.program_id(1) * C + tl.arange(0, C)
    x += b * x_b
    grad += b * grad_b
    dx += b * dx_b
    ids += b * tokens
    sums += tl.program_id(0).to(tl.int64) * (K + 1) * channels
    shared, end = _shared(ids, offsets, first, tokens, sequences, T, K, KIND, STEPS)
    # Not among the tokens that the last state keeps.
    if shared & (first + T <= end - rows):
        _tokens_backward(
            x,
            grad,
            dx,
            sums,
            after,
            state,
            ids,
            weight,
            bias,
            t,
            0,
            0,
            0,
            True,
            True,
            channel,
            tokens,
            channels,
            rows,
            x_n,
            x_c,
            grad_n,
            grad_c,
            dx_n,
            dx_c,
            KIND,
            False,
            K,
            BIAS,
            SILU,
            T,
            C,
        )
    else:
        start, ending, mine, opens, past = _borders(
            state, ids, offsets, b, t, tokens, channels, rows, sequences, KIND, STEPS
        )
        closes = start >= 0
        if KIND == 1:
            closes = mine == tl.load(ids + tokens - 1)
        ahead = _borders(after, ids, offsets, b, t, tokens, channels, rows, sequences, KIND, STEPS)[4]
        _tokens_backward(
            x,
            grad,
            dx,
            sums,
            ahead,
            past,
            ids,
            weight,
            bias,
            t,
            start,
            ending,
            mine,
            opens,
            closes,
            channel,
            tokens,
            channels,
            rows,
            x_n,
            x_c,
            grad_n,
            grad_c,
            dx_n,
            dx_c,
            KIND,
            True,
            K,
            BIAS,
            SILU,
            T,
            C,
        )


@triton.jit
def starts(
    x,
    grad,
    first,
    after,
    weight,
    bias,
    state,
    ids,
    offsets,
    tokens,
    channels,
    rows,
    sequences,
    x_b,
    x_n,
    x_c,
    grad_b,
    grad_n,
    grad_c,
    KIND: tl.constexpr,
    K: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    T: tl.constexpr,
    C: tl.constexpr,
):
    """The gradients of the first states: programs (blocks of S * R rows, blocks of channels)."""
    line = tl.program_id(0) * T + tl.arange(0, T)
    channel = tl.program_id(1) * C + tl.arange(0, C)
    real = line < sequences * rows
    line = tl.where(real, line, 0)
    row, start, end, x_of, ids_of, past = _own(x, state, ids, offsets, line, tokens, channels, rows, x_b, KIND)
    _, _, _, grad_of, _, ahead = _own(grad, after, ids, offsets, line, tokens, channels, rows, grad_b, KIND)
    mine = start
    opens = start >= 0
    closes = opens
    if KIND == 1:
        mine = tl.load(ids_of)
        closes = mine == tl.load(ids_of + tokens - 1)
    found = _inputs_gradient(
        x_of,
        grad_of,
        ahead,
        past,
        ids_of,
        weight,
        bias,
        start - rows + row,
        start,
        end,
        mine,
        opens,
        closes,
        channel,
        tokens,
        channels,
        rows,
        x_n,
        x_c,
        grad_n,
        grad_c,
        KIND,
        True,
        K,
        BIAS,
        SILU,
        T,
        C,
    )
    at = line.to(tl.int64)[:, None] * channels + channel[None, :]
    tl.store(first + at, found.to(first.dtype.element_ty), mask=real[:, None] & (channel < channels)[None, :])


@triton.jit
def step(
    x,
    y,
    weight,
    bias,
    state,
    after,
    channels,
    rows,
    x_b,
    x_c,
    state_b,
    state_r,
    state_c,
    after_b,
    after_r,
    after_c,
    weight_c,
    weight_k,
    bias_c,
    K: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    """One token and its state, which ``after`` may share memory with: programs (B, blocks of channels)."""
    b = tl.program_id(0).to(tl.int64)
    row, channel = tl.arange(0, R), tl.program_id(1) * C + tl.arange(0, C)
    known = channel < channels
    token = tl.load(x + b * x_b + channel * x_c, mask=known, other=0.0)
    at = (state + b * state_b) + row[:, None] * state_r + channel[None, :] * state_c
    past = tl.load(at, mask=(row < rows)[:, None] & known[None, :], other=0.0)
    tap = row - rows + K - 1
    used = (tap >= 0) & (row < rows)
    weights = tl.load(
        weight + channel[None, :] * weight_c + tap[:, None] * weight_k, mask=used[:, None] & known[None, :], other=0.0
    ).to(tl.float32)
    # Rows that no tap reads may hold infinity.
    read = tl.where(used[:, None], past.to(tl.float32), 0.0)
    newest = tl.load(weight + channel * weight_c + (K - 1) * weight_k, mask=known, other=0.0).to(tl.float32)
    z = tl.sum(weights * read, 0) + newest * token.to(tl.float32)
    if BIAS:
        z += tl.load(bias + channel * bias_c, mask=known, other=0.0).to(tl.float32)
    if SILU:
        z *= tl.sigmoid(z)
    tl.store(y + b * channels + channel, z.to(y.dtype.element_ty), mask=known)
    # In place, row r is overwritten by what row r + 1 holds: all threads must have read it.
    tl.debug_barrier()
    into = (after + b * after_b) + row[:, None] * after_r + channel[None, :] * after_c
    tl.store(into - after_r, past, mask=((row > 0) & (row < rows))[:, None] & known[None, :])
    last = (after + b * after_b) + (rows - 1) * after_r + channel * after_c
    # A state without rows keeps nothing.
    tl.store(last, token.to(after.dtype.element_ty), mask=channel < channels * tl.minimum(rows, 1))
