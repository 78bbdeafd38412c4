// The causal depth-wise convolution: y_t = act(b + sum_j w_j x_(t-K+1+j)), channel by channel; what its passes share.
// Before the first token of a sequence lie the rows of its state, if it has one, the newest last, and zeros otherwise.
#pragma once
#include "../linear/rows.h"

namespace {

// Tokens that belong together, as far as anybody asks: start is where they begin, or far enough behind; end likewise.
// first, last: the numbers of the states before and after them, -1 where there is none.
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

    // The sequence of token t of row b; nobody asks for what lies beyond ``until``.
    Sequence at(long b, long t, long until) const {
        if (offsets) {
            long low = 0, high = sequences;  // the last sequence that begins at t or before, and is not empty
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

    // The sequence that state number s is the last one of, empty ones too; its start is exact or ``rows`` before its end.
    Sequence of_last(long s) const {
        if (offsets) return {offsets[s], offsets[s + 1], s, s};
        long start = tokens > 0 ? tokens - 1 : 0;
        const std::int64_t* ids = segments ? segments + s * tokens : nullptr;
        while (start > 0 && tokens - start < rows && (!ids || ids[start - 1] == ids[tokens - 1])) --start;
        return {start, tokens, start == 0 ? s : -1, s};
    }

    // Taps (K, ld) and the bias (ld) of some channels, the latter behind the former; zeros beyond them.
    void gather_weights(long channel, long count, float* out, long ld) const {
        std::memset(out, 0, sizeof(float) * (taps + 1) * ld);
        for (long c = 0; c < count; ++c) {
            const float* from = weight + (channel + c) * weight_strides[0];
            for (long j = 0; j < taps; ++j) out[j * ld + c] = from[j * weight_strides[1]];
        }
        if (bias) std::memcpy(out + taps * ld, bias + channel, sizeof(float) * count);
    }
};

// Some channels of the rows of one sequence of memory.
template <class T>
Rows<T> channels_of(Tensor<T> t, long b, long channel) {
    Rows<T> rows(t, b, 0);
    rows.data += channel * rows.channel;
    return rows;
}

// Tokens begin ... begin + n, ``count`` channels, into out (n, ld); where tokens lie side by side, squares are turned.
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

// Rows from ... to of a sequence into out (to - from, ld): tokens, and before the first one the state or zeros.
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

// n tokens of NV vectors of channels, all taps and what they read next in registers.
template <int K, int NV, bool SILU, class X, class Y>
LONGSPAN_INLINE void mix_columns(const X* x, long x_row, const float* weights, long ld, long n, Y* y, long y_row) {
    vec w[K][NV], bias[NV], past[K][NV];  // the oldest first
    for (int l = 0; l < NV; ++l) {
        for (int j = 0; j < K; ++j) w[j][l] = load(weights + j * ld + l * W);
        for (int j = 1; j < K; ++j) past[j][l] = load(x + (j - K) * x_row + l * W);
        bias[l] = load(weights + K * ld + l * W);
    }
    for (long t = 0; t < n; ++t, x += x_row, y += y_row)
        for (int l = 0; l < NV; ++l) {
            for (int j = 0; j + 1 < K; ++j) past[j][l] = past[j + 1][l];
            past[K - 1][l] = load(x + l * W);
            vec sum = bias[l];
            for (int j = 0; j < K; ++j) sum += w[j][l] * past[j][l];
            store(y + l * W, SILU ? sum * sigmoid(sum) : sum);
        }
}

// n tokens of ``width`` channels, whole vectors; the rows before x are there. Weights as gather_weights leaves them; K: the
// number of taps, or 0 where it is only known as ``taps``.
template <int K, bool SILU, class X, class Y>
void mix_taps(const X* x, long x_row, const float* weights, long ld, long taps, long n, long width, Y* y, long y_row) {
    if constexpr (K > 0) {
        // Few rows at a time, since they may lie a page apart; two vectors, which are a line in half precision.
        constexpr long together = 16;
        constexpr int NV = W == 16 ? 2 : 1;
        for (; n > 0; n -= together, x += together * x_row, y += together * y_row) {
            const long some = n < together ? n : together;
            long c = 0;
            for (; c + NV * W <= width; c += NV * W)
                mix_columns<K, NV, SILU>(x + c, x_row, weights + c, ld, some, y + c, y_row);
            for (; c < width; c += W) mix_columns<K, 1, SILU>(x + c, x_row, weights + c, ld, some, y + c, y_row);
        }
    } else {
        const float* bias = weights + taps * ld;
        for (long t = 0; t < n; ++t, y += y_row) {
            const X* oldest = x + (t - taps + 1) * x_row;
            for (long c = 0; c < width; c += W) {
                vec sum = load(bias + c);
                for (long j = 0; j < taps; ++j) sum += load(weights + j * ld + c) * load(oldest + j * x_row + c);
                store(y + c, SILU ? sum * sigmoid(sum) : sum);
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

// Calls f with the number of taps as a constant, where it is a usual one.
template <class F>
auto with_taps(long taps, F f) {
    switch (taps) {
        case 3: return f(Taps<3>{});
        case 4: return f(Taps<4>{});
        default: return f(Taps<0>{});
    }
}

}  // namespace
