// One token of the causal depth-wise convolution for every row, which advances the state by one. Plain C interface.
#include "taps.h"

namespace {

// Channels of a unit: with many rows mostly whole rows, so that memory is read and written in long runs; with few rows a
// number that keeps the gathered weights small.
constexpr long MANY = 8, BLOCK = 4096, FEW_BLOCK = 512;

struct Step {
    long channels, taps, rows;  // of a state
    const float *weight, *bias;
    const long* strides;  // of the state (batch, row, channel), x (batch, channel) and the weight (channel, tap)
    bool silu;
};

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
    if constexpr (sizeof(S) == 2)
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
            std::memcpy(&word, s + 4 * l, sizeof word);
            word = word >> 16 | static_cast<std::uint64_t>(token[l].bits) << 48;
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

// Some channels of some rows of the batch.
template <class T, class S, int K, bool SILU>
void run(const Step& step, S* state, const T* x, T* out, long from, long to, long channel, long count, float* memory) {
    const long *strides = step.strides, taps = step.taps, rows = step.rows;
    const Convolution call{0, 1, step.channels, taps, rows, 0, nullptr, nullptr, step.weight, strides + 5, step.bias, SILU};
    float *window = memory, *weights = window + (rows + 1) * W;
    call.gather_weights(channel, count, weights, W, (taps + 1) * W);
    const bool turned = K == 4 && rows == 4 && strides[1] == 1 && strides[2] == 4 && strides[4] == 1;
    const bool plain = K > 0 && rows == K - 1 && strides[2] == 1 && strides[4] == 1;
    const long whole = turned || plain ? count / W * W : 0;
    for (long b = from; b < to; ++b) {
        const Line<T, S> line{state + b * strides[0] + channel * strides[2], x + b * strides[3] + channel * strides[4],
                              out + b * step.channels + channel, strides[1], strides[2], strides[4], weights, taps, rows};
        if (turned) beside<SILU>(line, whole);
        if constexpr (K > 0)
            if (plain) apart<K, SILU>(line, whole);
        anyhow<SILU>(line, whole, count, window);
    }
}

template <class T, class S>
int step_rows(const Step& step, S* state, const T* x, T* out, long batch, int threads) {
    const long most = batch < MANY ? FEW_BLOCK : BLOCK, block = step.channels < most ? step.channels : most;
    const long blocks = (step.channels + block - 1) / block;
    // Below this, waking a second thread costs more than it saves.
    const long busy = threads > 1 && batch * step.channels * step.rows >= 65536 ? threads : 1;
    // Threads share few rows by channels, many rows by rows.
    const long pieces = blocks >= busy ? 1 : busy, units = blocks * pieces;
    bool failed = false;
#pragma omp parallel num_threads(busy) if (busy > 1)
    {
        Memory memory((step.rows + 1) * W + (step.taps + 1) * (block + W));
        if (!memory.ready()) failed = true;
#pragma omp barrier
        if (!failed) {
#pragma omp for schedule(static)
            for (long unit = 0; unit < units; ++unit) {
                const long channel = unit / pieces * block, piece = unit % pieces;
                const long count = step.channels - channel < block ? step.channels - channel : block;
                with_taps(step.taps, [&](auto taps) {
                    constexpr int K = decltype(taps)::count;
                    const auto some = step.silu ? run<T, S, K, true> : run<T, S, K, false>;
                    some(step, state, x, out, batch * piece / pieces, batch * (piece + 1) / pieces, channel, count,
                         memory.data());
                });
            }
        }
    }
    return failed;
}

}  // namespace

// state (B,rows,C), overwritten, x (B,C) and weight (C,K) float with 3, 2 and 2 strides, in this order; out (B,C) like x,
// contiguous; bias (C) float or null. sizes: B, C, K, rows. Types: 0 float, 1 bfloat16, 2 float16; a state has x's or 0.
// Returns 0, or 1 if memory runs out.
extern "C" int longspan_convolution_step(void* state, const void* x, const float* weight, const float* bias, void* out,
                                         const long* strides, const long* sizes, int silu, int type, int state_type,
                                         int threads) {
    const Step step{sizes[1], sizes[2], sizes[3], weight, bias, strides, silu != 0};
    const auto run = [&](auto element, auto kept) {
        using T = decltype(element);
        using S = decltype(kept);
        return step_rows(step, static_cast<S*>(state), static_cast<const T*>(x), static_cast<T*>(out), sizes[0], threads);
    };
    if (type == 0) return run(float{}, float{});
    if (type == 1) return state_type == 0 ? run(bfloat16{}, float{}) : run(bfloat16{}, bfloat16{});
    return state_type == 0 ? run(float16{}, float{}) : run(float16{}, float16{});
}
