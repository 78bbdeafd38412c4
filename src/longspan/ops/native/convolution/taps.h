// The causal depth-wise convolution: y_t = act(b + sum_j w_j x_(t-K+1+j)), channel by channel; code that its passes
// share. The rows of the state precede the first token of a sequence, newest last; without a state these are zeros.
#pragma once
#include "../linear/rows.h"

namespace {

// Zips the first two and the last two of four vectors: number i moves to place 2 i, or to 2 i + 1 from the second half.
// Doing this log2 W times turns channels of four rows into four rows of channels; doing it twice does the reverse.
inline void zip(vec* a, int times) {
    for (int i = 0; i < times; ++i) {
        const vec b[4] = {zip_low(a[0], a[2]), zip_high(a[0], a[2]), zip_low(a[1], a[3]), zip_high(a[1], a[3])};
        for (int l = 0; l < 4; ++l) a[l] = b[l];
    }
}
constexpr int LOG2_W = W == 16 ? 4 : W == 8 ? 3 : 2;

// One sequence. Start and end are exact within the range that the caller needs, and otherwise lie outside of it.
// first, last: the numbers of the states before and after it, -1 for none.
struct Sequence {
    long start, end, first, last;
};

struct Convolution {
    long batch, tokens, channels, taps, rows, sequences;  // K taps; rows of a state, K - 1 at least
    const std::int64_t* segments;                         // (B, N), may be null
    const std::int64_t* offsets;                          // (sequences + 1): where the sequences of the one row begin; may be null
    const float* weight;                                  // (C, K), with strides
    const long* weight_strides;
    const float* bias;  // (C), may be null
    bool silu;

    long reach() const { return taps - 1; }

    // The sequence of token t of row b; tokens from ``until`` on are not needed.
    Sequence at(long b, long t, long until) const {
        if (offsets) {
            long low = 0, high = sequences;  // the last non-empty sequence that begins at t or before
            while (high - low > 1) {
                const long middle = (low + high) / 2;
                (offsets[middle] <= t ? low : high) = middle;
            }
            return {offsets[low], offsets[low + 1], low, low};
        }
        if (!segments) return {0, tokens, b, b};
        const std::int64_t* ids = segments + b * tokens;
        long start = t, end = t + 1;
        while (start > 0 && t - start < reach() && ids[start - 1] == ids[t]) --start;
        while (end < tokens && end < until && ids[end] == ids[t]) ++end;
        return {start, end, start == 0 ? b : -1, end == tokens ? b : -1};
    }

    // The sequence, possibly empty, whose last state has number s; its start is exact, or ``rows`` before its end.
    Sequence of_last(long s) const {
        if (offsets) return {offsets[s], offsets[s + 1], s, s};
        long start = tokens > 0 ? tokens - 1 : 0;
        const std::int64_t* ids = segments ? segments + s * tokens : nullptr;
        while (start > 0 && tokens - start < rows && (!ids || ids[start - 1] == ids[tokens - 1])) --start;
        return {start, tokens, start == 0 ? s : -1, s};
    }

    // Taps of some channels, then the bias, ld apart; the vectors of channels of a tap are ``apart`` from each other (W if
    // they form rows of ld channels). Zeros beyond the channels.
    void gather_weights(long channel, long count, float* out, long ld, long apart = W) const {
        for (long v = 0; v < count; v += W, out += apart) {
            const long from = channel + v, some = count - v < W ? count - v : W;
            const float* w = weight + from * weight_strides[0];
            if (taps == 4 && some == W && weight_strides[0] == 4 && weight_strides[1] == 1) {
                vec quarters[4];
                for (int i = 0; i < 4; ++i) quarters[i] = load(w + i * W);
                zip(quarters, LOG2_W);
                for (int j = 0; j < 4; ++j) store(out + j * ld, quarters[j]);
            } else {
                for (long j = 0; j < taps; ++j)
                    for (long c = 0; c < W; ++c)
                        out[j * ld + c] = c < some ? w[c * weight_strides[0] + j * weight_strides[1]] : 0.0f;
            }
            for (long c = 0; c < W; ++c) out[taps * ld + c] = bias && c < some ? bias[from + c] : 0.0f;
        }
    }
};

// Some channels of the tokens of one row of memory.
template <class T>
Rows<T> channels_of(Tensor<T> t, long b, long channel) {
    Rows<T> rows(t, b, 0);
    rows.data += channel * rows.channel;
    return rows;
}

// Tokens begin ... begin + n, ``count`` channels, into out (n, ld); if tokens are adjacent in memory, squares are transposed.
template <class T>
void read_tokens(Rows<const T> rows, long begin, long n, long count, float* out, long ld) {
    if (rows.channel == 1 || rows.token != 1) return read(rows, begin, n, count, out, ld);
    float square[W * W];
    long i = 0;
    for (; i + W <= n; i += W)
        for (long c = 0; c < ld; c += W) {
            const long some = count - c < W ? count - c : W;
            for (long l = 0; l < W; ++l)
                store(square + l * W, l < some ? load(rows.data + (c + l) * rows.channel + begin + i) : vec{});
            transpose_square(square, W, out + i * ld + c, ld);
        }
    read(rows, begin + i, n - i, count, out + i * ld, ld);
}

template <class T>
void write_tokens(const float* x, long ld, Rows<T> rows, long begin, long n, long count) {
    if (rows.channel == 1 || rows.token != 1) return write(x, ld, rows, begin, n, count);
    float square[W * W];
    long i = 0;
    for (; i + W <= n; i += W)
        for (long c = 0; c < count; c += W) {
            const long some = count - c < W ? count - c : W;
            transpose_square(x + i * ld + c, ld, square, W);
            for (long l = 0; l < some; ++l) store(rows.data + (c + l) * rows.channel + begin + i, load(square + l * W));
        }
    write(x + i * ld, ld, rows, begin + i, n - i, count);
}

// Rows from ... to of a sequence into out (to - from, ld): tokens, preceded by the state or zeros.
template <class T>
void gather(const Convolution& call, Rows<const T> x, const Sequence& s, const float* first, long channel, long count,
            long from, long to, float* out, long ld) {
    for (; from < to && from < s.start; ++from, out += ld) {
        const long row = call.rows + from - s.start;
        std::memset(out, 0, sizeof(float) * ld);
        if (first && s.first >= 0 && row >= 0)
            std::memcpy(out, first + (s.first * call.rows + row) * call.channels + channel, sizeof(float) * count);
    }
    if (from < to) read_tokens(x, from, to - from, count, out, ld);
}

// N tokens of ``width`` channels. Each vector is read once, for all tokens that use it as a tap.
template <int K, int N, bool SILU, class X, class Y>
void mix_rows(const X* x, long x_row, const float* weights, long ld, long width, Y* y, long y_row) {
    for (long c = 0; c < width; c += W) {
        vec sums[N];
        for (int t = 0; t < N; ++t) sums[t] = load(weights + K * ld + c);
        for (int r = 1 - K; r < N; ++r) {
            const vec row = load(x + r * x_row + c);
            for (int t = 0; t < N; ++t)
                if (r >= t + 1 - K && r <= t) sums[t] += load(weights + (r - t + K - 1) * ld + c) * row;
        }
        for (int t = 0; t < N; ++t) store(y + t * y_row + c, SILU ? silu(sums[t]) : sums[t]);
    }
}

// n tokens of ``width`` channels, whole vectors; the rows before x exist. Weights in rows, as written by gather_weights;
// K: the number of taps, or 0 if only ``taps`` has it.
template <int K, bool SILU, class X, class Y>
void mix_taps(const X* x, long x_row, const float* weights, long ld, long taps, long n, long width, Y* y, long y_row) {
    if constexpr (K > 0) {
        // Few tokens at a time, so that memory is read and written along its rows.
        constexpr int N = 4;
        for (; n >= N; n -= N, x += N * x_row, y += N * y_row)
            mix_rows<K, N, SILU>(x, x_row, weights, ld, width, y, y_row);
        for (; n > 0; --n, x += x_row, y += y_row) mix_rows<K, 1, SILU>(x, x_row, weights, ld, width, y, y_row);
    } else {
        const float* bias = weights + taps * ld;
        for (long t = 0; t < n; ++t, y += y_row) {
            const X* oldest = x + (t - taps + 1) * x_row;
            for (long c = 0; c < width; c += W) {
                vec sum = load(bias + c);
                for (long j = 0; j < taps; ++j) sum += load(weights + j * ld + c) * load(oldest + j * x_row + c);
                store(y + c, SILU ? silu(sum) : sum);
            }
        }
    }
}

template <int K, class X, class Y>
void mix(bool silu, const X* x, long x_row, const float* weights, long ld, long taps, long n, long width, Y* y, long y_row) {
    if (silu)
        mix_taps<K, true>(x, x_row, weights, ld, taps, n, width, y, y_row);
    else
        mix_taps<K, false>(x, x_row, weights, ld, taps, n, width, y, y_row);
}

template <long K>
struct Taps {
    static constexpr long count = K;
};

// Calls f with the number of taps as a constant, if it is a common one.
template <class F>
auto with_taps(long taps, F f) {
    switch (taps) {
        case 3: return f(Taps<3>{});
        case 4: return f(Taps<4>{});
        default: return f(Taps<0>{});
    }
}

}  // namespace
