// One token of the causal depth-wise convolution for one row of the batch, which advances its state by one.
#pragma once
#include "taps.h"

namespace {

// Some channels of one row of the batch. Passed by value, since the compiler must assume that stores change memory.
// T: x and out; S: the state.
template <class T, class S>
struct Line {
    S* state;
    const T* token;
    T* y;
    long row, channel, next;  // strides of rows and channels of the state, and of channels of x
    const float* weights;     // all taps of a vector of channels and its bias, one vector after the other
    long taps, rows;
};

// Stores x, which was read from ``from``, at ``to``. Half precision is copied, since rounding again takes longer and changes
// nothing.
template <class T, class S>
inline void move(const T* from, vec x, S* to) {
    if constexpr (sizeof(S) == 2 && sizeof(T) == 2)
        std::memcpy(to, from, sizeof(S) * W);
    else
        store(to, x);
}

// Whole vectors of adjacent channels, with K - 1 rows of a state.
template <int K, bool SILU, class T, class S>
void apart(const Line<T, S>& line, long count) {
    const auto [s, token, y, row, channel, next, weights, taps, rows] = line;
    const float* w = weights;
    for (long c = 0; c < count; c += W, w += (K + 1) * W) {
        vec past[K], sum = load(w + K * W);
        for (int j = 0; j + 1 < K; ++j) past[j] = load(s + j * row + c);
        past[K - 1] = load(token + c);
        for (int j = 0; j < K; ++j) sum += load(w + j * W) * past[j];
        for (int j = 0; j + 2 < K; ++j) move(s + (j + 1) * row + c, past[j + 1], s + j * row + c);
        move(token + c, past[K - 1], s + (K - 2) * row + c);
        store(y + c, SILU ? silu(sum) : sum);
    }
}

// The four adjacent rows of a vector of channels lose the oldest and get the token, the last of ``rows``.
template <class T, class S>
inline void turn_on(S* s, const T* token, vec* rows) {
    if constexpr (sizeof(S) == 2) {  // four of them are a word, its lowest bits the oldest
        for (int l = 0; l < W; ++l) {
            std::uint64_t word;
            S last;
            if constexpr (sizeof(T) == 2)
                last.bits = token[l].bits;
            else
                narrow(rows[3][l], &last);  // the token, in whose place the output may be
            std::memcpy(&word, s + 4 * l, sizeof word);
            word = word >> 16 | static_cast<std::uint64_t>(last.bits) << 48;
            std::memcpy(s + 4 * l, &word, sizeof word);
        }
    } else {
        zip(rows, 2);
        for (int i = 0; i < 4; ++i) store(s + i * W, rows[i]);
    }
}

// Whole vectors of channels whose four rows are adjacent, with four taps: the layout of other libraries' caches.
template <bool SILU, class T, class S>
void beside(const Line<T, S>& line, long count) {
    const auto [s, token, y, row, channel, next, weights, taps, rows] = line;
    const float* w = weights;
    for (long c = 0; c < count; c += W, w += 5 * W) {
        vec past[4], sum = load(w + 4 * W);
        for (int i = 0; i < 4; ++i) past[i] = load(s + 4 * c + i * W);
        zip(past, LOG2_W);
        for (int i = 0; i < 3; ++i) past[i] = past[i + 1];
        past[3] = load(token + c);
        for (int j = 0; j < 4; ++j) sum += load(w + j * W) * past[j];
        store(y + c, SILU ? silu(sum) : sum);
        turn_on(s + 4 * c, token + c, past);
    }
}

// Channels of any layout, with any number of rows and taps, from c on: a vector at a time, from contiguous copies.
template <bool SILU, class T, class S>
void anyhow(const Line<T, S>& line, long c, long count, float* window) {
    const auto [s, token, y, row, channel, next, weights, taps, rows] = line;
    for (; c < count; c += W) {
        const long some = count - c < W ? count - c : W;
        const bool whole = some == W && channel == 1 && next == 1;
        S* column = s + c * channel;
        if (whole) {
            for (long r = 0; r < rows; ++r) store(window + r * W, load(column + r * row));
            store(window + rows * W, load(token + c));
        } else {
            for (long l = 0; l < some; ++l) {
                for (long r = 0; r < rows; ++r) window[r * W + l] = widen(column[l * channel + r * row]);
                window[rows * W + l] = widen(token[(c + l) * next]);
            }
        }
        const float *w = weights + c * (taps + 1), *oldest = window + (rows + 1 - taps) * W;
        vec sum = load(w + taps * W);
        for (long j = 0; j < taps; ++j) sum += load(w + j * W) * load(oldest + j * W);
        if (SILU) sum = silu(sum);
        if (whole) {
            for (long r = 0; r < rows; ++r) store(column + r * row, load(window + (r + 1) * W));
            store(y + c, sum);
        } else {
            for (long l = 0; l < some; ++l) {
                for (long r = 0; r < rows; ++r) narrow(window[(r + 1) * W + l], column + l * channel + r * row);
                narrow(sum[l], y + c + l);
            }
        }
    }
}

// Some channels of a row with K taps, or 0 for any number; ``window`` has room for ``rows`` + 1 vectors.
template <int K, bool SILU, class T, class S>
void convolve_token(const Line<T, S>& line, long count, float* window) {
    const bool turned = K == 4 && line.rows == 4 && line.row == 1 && line.channel == 4 && line.next == 1;
    const bool plain = K > 0 && line.rows == K - 1 && line.channel == 1 && line.next == 1;
    const long whole = turned || plain ? count / W * W : 0;
    if (turned) beside<SILU>(line, whole);
    if constexpr (K > 0)
        if (plain) apart<K, SILU>(line, whole);
    anyhow<SILU>(line, whole, count, window);
}

}  // namespace
