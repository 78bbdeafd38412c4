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

A block reads up to 2 K - 1 shifted copies of its tokens, all but one from the cache.

x (B,N,C) has any strides; states (S,R,C), ids of segments (B,N), bias (C,) and weights are contiguous. Weights are
(K,C) for sequences, so that neighboring channels are adjacent in memory. ``ids`` is None without segments, ``offsets``
without packed sequences, ``bias`` without a bias.

Operands of the functions are tuples. Triton 3.3 neither assigns nor unpacks one that contains None.

* ``inputs``: x and the state, at the rows of the tokens, ids of segments, the strides of tokens and channels of x,
* ``grads``: gradients of outputs and of the last state, at the same rows, and the strides of the former,
* ``taps``: weights and bias,
* ``sequence``: for each place the start and end of its sequence, its id, whether the state before and the one after it
  belong to it; None in a block inside of one sequence, which needs neither borders nor states,
* ``sizes``: the numbers of tokens, channels, rows of a state and sequences.
"""

import triton
import triton.language as tl


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
def _row(inputs, sequence, place, channel, sizes):
    """Inputs (T,C) at places (T,) of sequences: tokens, or rows of the state before the first one; else 0."""
    tokens, channels, rows, _ = sizes
    inside = place < tokens
    if sequence is not None:
        start, _, mine, opens, _ = sequence
        inside &= place >= start
        if inputs[2] is not None:
            inside &= tl.load(inputs[2] + place, mask=inside, other=0) == mine
    known = (channel < channels)[None, :]
    at = place.to(tl.int64)[:, None] * inputs[3] + channel[None, :] * inputs[4]
    value = tl.load(inputs[0] + at, mask=inside[:, None] & known, other=0.0).to(tl.float32)
    if sequence is not None:
        row = place - start + rows
        before = (place < start) & (row >= 0) & opens
        past = inputs[1] + row.to(tl.int64)[:, None] * channels + channel[None, :]
        value += tl.load(past, mask=before[:, None] & known, other=0.0).to(tl.float32)
    return value


@triton.jit
def _tap(weight, channel, channels, J: tl.constexpr):
    """The weights (C,) of tap J."""
    return tl.load(weight + J * channels + channel, mask=channel < channels, other=0.0).to(tl.float32)


@triton.jit
def _sum(inputs, taps, sequence, place, channel, sizes, SHIFT: tl.constexpr, K: tl.constexpr):
    """z (T,C) of the tokens at ``place`` + SHIFT."""
    z = tl.zeros([place.shape[0], channel.shape[0]], tl.float32)
    if taps[1] is not None:
        z += tl.load(taps[1] + channel, mask=channel < sizes[1], other=0.0).to(tl.float32)[None, :]
    for J in tl.static_range(K):
        # Equal shifts are equal expressions, so that the compiler loads each shifted block once.
        row = _row(inputs, sequence, place + (SHIFT + J - (K - 1)), channel, sizes)
        z += _tap(taps[0], channel, sizes[1], J)[None, :] * row
    return z


@triton.jit
def _slope(
    inputs, grads, taps, sequence, place, channel, sizes, SHIFT: tl.constexpr, K: tl.constexpr, SILU: tl.constexpr
):
    """The gradient (T,C) of z of the tokens at ``place`` + SHIFT; 0 for those outside of the sequence."""
    token = place + SHIFT
    heard = token < sizes[0]
    if sequence is not None:
        start, end, mine, _, _ = sequence
        heard &= (token >= start) & (token < end)
        if inputs[2] is not None:
            heard &= tl.load(inputs[2] + token, mask=heard, other=0) == mine
    heard = heard[:, None] & (channel < sizes[1])[None, :]
    at = token.to(tl.int64)[:, None] * grads[2] + channel[None, :] * grads[3]
    slope = tl.load(grads[0] + at, mask=heard, other=0.0).to(tl.float32)
    if SILU:
        z = _sum(inputs, taps, sequence, place, channel, sizes, SHIFT, K)
        share = tl.sigmoid(z)
        slope = tl.where(heard, slope * share * (1.0 + z * (1.0 - share)), 0.0)
    return slope


@triton.jit
def _shared(ids, offsets, first, sizes, T: tl.constexpr, K: tl.constexpr, STEPS: tl.constexpr):
    """Whether all places that a block of tokens from ``first`` on needs are tokens of one sequence; where it ends.

    ``ids`` are those of the row. Segments but the last one of a row end at some token; here all end with the row.
    """
    oldest = first - (K - 1)
    newest = tl.minimum(first + T + K - 2, sizes[0] - 1)
    shared = oldest >= 0
    end = sizes[0]
    if ids is not None:
        shared &= tl.load(ids + tl.maximum(oldest, 0)) == tl.load(ids + newest)
    if offsets is not None:
        owner = _owner(offsets, newest, sizes[3], STEPS)
        shared &= tl.load(offsets + owner).to(tl.int32) <= oldest
        end = tl.load(offsets + owner + 1).to(tl.int32)
    return shared, end


@triton.jit
def _borders(ids, offsets, b, t, sizes, STEPS: tl.constexpr):
    """For tokens t (T,) of a row: their ``sequence``, and the number of its state."""
    start = t * 0
    end = start + sizes[0]
    mine = start
    opens = start == 0
    closes = opens
    owner = start + b
    if ids is not None:
        mine = tl.load(ids + tl.minimum(t, sizes[0] - 1))
        opens = mine == tl.load(ids)
        closes = mine == tl.load(ids + sizes[0] - 1)
    if offsets is not None:
        owner = _owner(offsets, t, sizes[3], STEPS)
        start = tl.load(offsets + owner).to(tl.int32)
        end = tl.load(offsets + owner + 1).to(tl.int32)
    return (start, end, mine, opens, closes), owner


@triton.jit
def _state(states, owner, sizes):
    """States (T,1) of sequences ``owner`` (T,)."""
    return states + owner.to(tl.int64)[:, None] * sizes[2] * sizes[1]


@triton.jit
def _outputs(y, y_n, y_c, inputs, taps, sequence, t, channel, sizes, K: tl.constexpr, SILU: tl.constexpr):
    z = _sum(inputs, taps, sequence, t, channel, sizes, 0, K)
    if SILU:
        z *= tl.sigmoid(z)
    at = t.to(tl.int64)[:, None] * y_n + channel[None, :] * y_c
    tl.store(y + at, z.to(y.dtype.element_ty), mask=(t < sizes[0])[:, None] & (channel < sizes[1])[None, :])


@triton.jit
def forward(
    x,
    y,
    taps,
    state,
    ids,
    offsets,
    sizes,
    strides,
    STEPS: tl.constexpr,
    K: tl.constexpr,
    SILU: tl.constexpr,
    T: tl.constexpr,
    C: tl.constexpr,
):
    """y of T tokens and C channels: programs (B * blocks of tokens, blocks of channels)."""
    blocks = tl.cdiv(sizes[0], T)
    b = (tl.program_id(0) // blocks).to(tl.int64)
    first = tl.program_id(0) % blocks * T
    t = first + tl.arange(0, T)
    channel = tl.program_id(1) * C + tl.arange(0, C)
    x_strides, y_strides = strides
    x_b, x_n, x_c = x_strides
    y_b, y_n, y_c = y_strides
    x += b * x_b
    y += b * y_b
    if ids is not None:
        ids += b * sizes[0]
    shared, _ = _shared(ids, offsets, first, sizes, T, K, STEPS)
    if shared:
        _outputs(y, y_n, y_c, (x, None, ids, x_n, x_c), taps, None, t, channel, sizes, K, SILU)
    else:
        sequence, owner = _borders(ids, offsets, b, t, sizes, STEPS)
        past = _state(state, owner, sizes)
        _outputs(y, y_n, y_c, (x, past, ids, x_n, x_c), taps, sequence, t, channel, sizes, K, SILU)


@triton.jit
def _own(offsets, line, sizes):
    """For rows of the states, ``line`` (T,) of S * R: the row, its sequence and that one's row of x, start and end."""
    owner = line // sizes[2]
    start = owner * 0
    end = start + sizes[0]
    from_row = owner.to(tl.int64)
    if offsets is not None:
        start = tl.load(offsets + owner).to(tl.int32)
        end = tl.load(offsets + owner + 1).to(tl.int32)
        from_row = from_row * 0
    return line % sizes[2], owner, from_row, start, end


@triton.jit
def ends(x, state, last, ids, offsets, sizes, x_strides, T: tl.constexpr, C: tl.constexpr):
    """The states after the last token: programs (blocks of S * R rows, blocks of channels)."""
    line = tl.program_id(0) * T + tl.arange(0, T)
    channel = tl.program_id(1) * C + tl.arange(0, C)
    x_b, x_n, x_c = x_strides
    real = line < sizes[3] * sizes[2]
    line = tl.where(real, line, 0)
    row, owner, from_row, start, end = _own(offsets, line, sizes)
    mine = start
    opens = start >= 0
    if ids is not None:
        ids += from_row * sizes[0]
        mine = tl.load(ids + sizes[0] - 1)
        opens = mine == tl.load(ids)
    x = x + from_row[:, None] * x_b
    past, sequence = _state(state, owner, sizes), (start, end, mine, opens, opens)
    value = _row((x, past, ids, x_n, x_c), sequence, end - sizes[2] + row, channel, sizes)
    at = line.to(tl.int64)[:, None] * sizes[1] + channel[None, :]
    tl.store(last + at, value.to(last.dtype.element_ty), mask=real[:, None] & (channel < sizes[1])[None, :])


@triton.jit
def _inputs_gradient(inputs, grads, taps, sequence, place, channel, sizes, K: tl.constexpr, SILU: tl.constexpr):
    """The gradient (T,C) of the inputs at ``place``."""
    found = tl.zeros([place.shape[0], channel.shape[0]], tl.float32)
    for ahead in tl.static_range(K):
        slope = _slope(inputs, grads, taps, sequence, place, channel, sizes, ahead, K, SILU)
        found += _tap(taps[0], channel, sizes[1], K - 1 - ahead)[None, :] * slope
    if sequence is not None:
        _, end, _, _, closes = sequence
        row = place - end + sizes[2]
        kept = (row >= 0) & (place < end) & closes
        at = row.to(tl.int64)[:, None] * sizes[1] + channel[None, :]
        known = kept[:, None] & (channel < sizes[1])[None, :]
        found += tl.load(grads[1] + at, mask=known, other=0.0).to(tl.float32)
    return found


@triton.jit
def _tokens_backward(results, inputs, grads, taps, sequence, t, channel, sizes, K: tl.constexpr, SILU: tl.constexpr):
    dx, dx_n, dx_c, sums = results
    found = _inputs_gradient(inputs, grads, taps, sequence, t, channel, sizes, K, SILU)
    slope = _slope(inputs, grads, taps, sequence, t, channel, sizes, 0, K, SILU)
    known = channel < sizes[1]
    at = t.to(tl.int64)[:, None] * dx_n + channel[None, :] * dx_c
    tl.store(dx + at, found.to(dx.dtype.element_ty), mask=(t < sizes[0])[:, None] & known[None, :])
    for J in tl.static_range(K):
        row = _row(inputs, sequence, t + (J - (K - 1)), channel, sizes)
        tl.store(sums + J * sizes[1] + channel, tl.sum(slope * row, 0), mask=known)
    tl.store(sums + K * sizes[1] + channel, tl.sum(slope, 0), mask=known)


@triton.jit
def backward(
    x,
    grad,
    dx,
    sums,
    after,
    taps,
    state,
    ids,
    offsets,
    sizes,
    strides,
    STEPS: tl.constexpr,
    K: tl.constexpr,
    SILU: tl.constexpr,
    T: tl.constexpr,
    C: tl.constexpr,
):
    """dx of T tokens and C channels, and their sums for weights and bias: (B * blocks of tokens, K + 1, C)."""
    blocks = tl.cdiv(sizes[0], T)
    b = (tl.program_id(0) // blocks).to(tl.int64)
    first = tl.program_id(0) % blocks * T
    t = first + tl.arange(0, T)
    channel = tl.program_id(1) * C + tl.arange(0, C)
    x_strides, grad_strides, dx_strides = strides
    x_b, x_n, x_c = x_strides
    grad_b, grad_n, grad_c = grad_strides
    dx_b, dx_n, dx_c = dx_strides
    x += b * x_b
    grad += b * grad_b
    dx += b * dx_b
    if ids is not None:
        ids += b * sizes[0]
    sums += tl.program_id(0).to(tl.int64) * (K + 1) * sizes[1]
    shared, end = _shared(ids, offsets, first, sizes, T, K, STEPS)
    # Not among the tokens that the last state keeps.
    if shared & (first + T <= end - sizes[2]):
        _tokens_backward(
            (dx, dx_n, dx_c, sums),
            (x, None, ids, x_n, x_c),
            (grad, None, grad_n, grad_c),
            taps,
            None,
            t,
            channel,
            sizes,
            K,
            SILU,
        )
    else:
        sequence, owner = _borders(ids, offsets, b, t, sizes, STEPS)
        _tokens_backward(
            (dx, dx_n, dx_c, sums),
            (x, _state(state, owner, sizes), ids, x_n, x_c),
            (grad, _state(after, owner, sizes), grad_n, grad_c),
            taps,
            sequence,
            t,
            channel,
            sizes,
            K,
            SILU,
        )


@triton.jit
def starts(
    x,
    grad,
    first,
    after,
    taps,
    state,
    ids,
    offsets,
    sizes,
    strides,
    K: tl.constexpr,
    SILU: tl.constexpr,
    T: tl.constexpr,
    C: tl.constexpr,
):
    """The gradients of the first states: programs (blocks of S * R rows, blocks of channels)."""
    line = tl.program_id(0) * T + tl.arange(0, T)
    channel = tl.program_id(1) * C + tl.arange(0, C)
    x_strides, grad_strides = strides
    x_b, x_n, x_c = x_strides
    grad_b, grad_n, grad_c = grad_strides
    real = line < sizes[3] * sizes[2]
    line = tl.where(real, line, 0)
    row, owner, from_row, start, end = _own(offsets, line, sizes)
    mine = start
    opens = start >= 0
    closes = opens
    if ids is not None:
        ids += from_row * sizes[0]
        mine = tl.load(ids)
        closes = mine == tl.load(ids + sizes[0] - 1)
    found = _inputs_gradient(
        (x + from_row[:, None] * x_b, _state(state, owner, sizes), ids, x_n, x_c),
        (grad + from_row[:, None] * grad_b, _state(after, owner, sizes), grad_n, grad_c),
        taps,
        (start, end, mine, opens, closes),
        start - sizes[2] + row,
        channel,
        sizes,
        K,
        SILU,
    )
    at = line.to(tl.int64)[:, None] * sizes[1] + channel[None, :]
    tl.store(first + at, found.to(first.dtype.element_ty), mask=real[:, None] & (channel < sizes[1])[None, :])


@triton.jit
def step(
    x,
    y,
    taps,
    state,
    after,
    channels,
    rows,
    strides,
    K: tl.constexpr,
    SILU: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    """One token and its state, which ``after`` may share memory with: programs (B, blocks of channels)."""
    b = tl.program_id(0).to(tl.int64)
    x_strides, state_strides, after_strides, weight_strides, bias_c = strides
    x_b, x_c = x_strides
    state_b, state_r, state_c = state_strides
    after_b, after_r, after_c = after_strides
    weight_c, weight_k = weight_strides
    row, channel = tl.arange(0, R), tl.program_id(1) * C + tl.arange(0, C)
    known = channel < channels
    token = tl.load(x + b * x_b + channel * x_c, mask=known, other=0.0)
    at = (state + b * state_b) + row[:, None] * state_r + channel[None, :] * state_c
    past = tl.load(at, mask=(row < rows)[:, None] & known[None, :], other=0.0)
    tap = row - rows + K - 1
    used = (tap >= 0) & (row < rows)
    weights = tl.load(
        taps[0] + channel[None, :] * weight_c + tap[:, None] * weight_k, mask=used[:, None] & known[None, :], other=0.0
    ).to(tl.float32)
    # Rows that no tap reads may hold infinity.
    read = tl.where(used[:, None], past.to(tl.float32), 0.0)
    newest = tl.load(taps[0] + channel * weight_c + (K - 1) * weight_k, mask=known, other=0.0).to(tl.float32)
    z = tl.sum(weights * read, 0) + newest * token.to(tl.float32)
    if taps[1] is not None:
        z += tl.load(taps[1] + channel * bias_c, mask=known, other=0.0).to(tl.float32)
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
