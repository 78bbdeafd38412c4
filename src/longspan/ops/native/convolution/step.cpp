// One token of the causal depth-wise convolution for every row, which advances the state by one. Plain C interface.
#include "token.h"

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

// Some channels of some rows of the batch.
template <class T, class S, int K, bool SILU>
void run(const Step& step, S* state, const T* x, T* out, long from, long to, long channel, long count, float* memory) {
    const long *strides = step.strides, taps = step.taps, rows = step.rows;
    const Convolution call{0, 1, step.channels, taps, rows, 0, nullptr, nullptr, step.weight, strides + 5, step.bias, SILU};
    float *window = memory, *weights = window + (rows + 1) * W;
    call.gather_weights(channel, count, weights, W, (taps + 1) * W);
    for (long b = from; b < to; ++b) {
        const Line<T, S> line{state + b * strides[0] + channel * strides[2], x + b * strides[3] + channel * strides[4],
                              out + b * step.channels + channel, strides[1], strides[2], strides[4], weights, taps, rows};
        convolve_token<K, SILU>(line, count, window);
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
