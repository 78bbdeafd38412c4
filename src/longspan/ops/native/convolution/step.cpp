// One token of the causal depth-wise convolution for every row, whose state moves on by one. Plain C interface.
#include "taps.h"

namespace {

constexpr long BLOCK = 512;  // channels of a unit

struct Step {
    long channels, taps, rows;  // of a state
    const float *weight, *bias;
    const long* strides;  // of the state (batch, row, channel), x (batch, channel) and the weight (channel, tap)
    bool silu;
};

// Four vectors, of which the first two and the last two are zipped: a number moves from place i of all to place 2 i, or to
// 2 i + 1 where it was in the second half. Done log2 W times, four rows of channels come of channels of four rows; done
// twice, the other way round.
inline void zip(vec* a, int times) {
    for (int i = 0; i < times; ++i) {
        const vec b[4] = {zip_low(a[0], a[2]), zip_high(a[0], a[2]), zip_low(a[1], a[3]), zip_high(a[1], a[3])};
        for (int l = 0; l < 4; ++l) a[l] = b[l];
    }
}

// Whole vectors of channels whose four rows lie side by side, with four taps: as caches of other libraries have them.
template <class T, class S>
void beside(const Step& step, S* s, const T* token, T* y, long count, const float* weights) {
    constexpr int turns = W == 16 ? 4 : W == 8 ? 3 : 2;
    for (long c = 0; c < count; c += W) {
        vec rows[4];
        for (int i = 0; i < 4; ++i) rows[i] = load(s + 4 * c + i * W);
        zip(rows, turns);
        for (int i = 0; i < 3; ++i) rows[i] = rows[i + 1];
        rows[3] = load(token + c);
        vec sum = load(weights + 4 * BLOCK + c);
        for (int j = 0; j < 4; ++j) sum += load(weights + j * BLOCK + c) * rows[j];
        store(y + c, step.silu ? sum * sigmoid(sum) : sum);
        zip(rows, 2);
        for (int i = 0; i < 4; ++i) store(s + 4 * c + i * W, rows[i]);
    }
}

// Some channels of the rows of the batch, where the weights are gathered. T: x and out; S: the state.
template <class T, class S, int K>
void run(const Step& step, S* state, const T* x, T* out, long from, long to, long channel, long count, float* weights,
         float* window) {
    const long* strides = step.strides;
    const Convolution call{0, 1, step.channels, step.taps, step.rows, 0, nullptr, nullptr, step.weight, strides + 5,
                           step.bias, step.silu};
    call.gather_weights(channel, count, weights, BLOCK);
    const long rows = step.rows, taps = K ? K : step.taps, old = rows - taps + 1;  // rows that no tap reads
    const bool turned = K == 4 && rows == 4 && strides[1] == 1 && strides[2] == 4 && strides[4] == 1;
    const long whole = turned || (strides[2] == 1 && strides[4] == 1) ? count / W * W : 0;
    for (long b = from; b < to; ++b) {
        S* s = state + b * strides[0] + channel * strides[2];
        const T* token = x + b * strides[3] + channel * strides[4];
        T* y = out + b * step.channels + channel;
        if (turned) beside(step, s, token, y, whole, weights);
        for (long c = 0; c < (turned ? 0 : whole); c += W) {
            const vec now = load(token + c);
            vec sum = load(weights + taps * BLOCK + c);
            for (long r = 0; r + 1 < old; ++r) store(s + r * strides[1] + c, load(s + (r + 1) * strides[1] + c));
            for (long j = 0; j + 1 < taps; ++j) {
                const vec past = load(s + (old + j) * strides[1] + c);
                sum += load(weights + j * BLOCK + c) * past;
                if (old + j > 0) store(s + (old + j - 1) * strides[1] + c, past);
            }
            if (rows > 0) store(s + (rows - 1) * strides[1] + c, now);
            sum += load(weights + (taps - 1) * BLOCK + c) * now;
            store(y + c, step.silu ? sum * sigmoid(sum) : sum);
        }
        if (whole == count) continue;
        // Other layouts by way of a window: channels side by side, the oldest row first, the token last.
        const long some = count - whole, width = whole_vectors(some);
        for (long c = 0; c < some; ++c) {
            const S* column = s + (whole + c) * strides[2];
            for (long r = 0; r < rows; ++r) window[r * BLOCK + c] = widen(column[r * strides[1]]);
            window[rows * BLOCK + c] = widen(token[(whole + c) * strides[4]]);
        }
        float* made = window + (rows + 1) * BLOCK;
        mix<K>(step.silu, window + rows * BLOCK, BLOCK, weights + whole, BLOCK, step.taps, 1, width, made, BLOCK);
        for (long c = 0; c < some; ++c) {
            S* column = s + (whole + c) * strides[2];
            for (long r = 0; r < rows; ++r) narrow(window[(r + 1) * BLOCK + c], column + r * strides[1]);
            narrow(made[c], y + whole + c);
        }
    }
}

template <class T, class S>
int step_rows(const Step& step, S* state, const T* x, T* out, long batch, int threads) {
    const long blocks = (step.channels + BLOCK - 1) / BLOCK;
    // Below this, waking a second thread costs more than it saves.
    const long busy = threads > 1 && batch * step.channels * step.rows >= 65536 ? threads : 1;
    // Few rows are shared out by their channels, many by themselves.
    const long pieces = blocks >= busy ? 1 : busy, units = blocks * pieces;
    bool failed = false;
#pragma omp parallel num_threads(busy) if (busy > 1)
    {
        Memory memory((step.taps + step.rows + 3) * BLOCK);
        if (!memory.ready()) failed = true;
#pragma omp barrier
        if (!failed) {
#pragma omp for schedule(static)
            for (long unit = 0; unit < units; ++unit) {
                const long channel = unit / pieces * BLOCK, piece = unit % pieces;
                const long count = step.channels - channel < BLOCK ? step.channels - channel : BLOCK;
                float *weights = memory.data(), *window = weights + (step.taps + 1) * BLOCK;
                with_taps(step.taps, [&](auto taps) {
                    run<T, S, decltype(taps)::count>(step, state, x, out, batch * piece / pieces,
                                                     batch * (piece + 1) / pieces, channel, count, weights, window);
                });
            }
        }
    }
    return failed;
}

}  // namespace

// state (B,rows,C), overwritten, x (B,C) and weight (C,K) float with 3, 2 and 2 strides, in this order; out (B,C) like x,
// contiguous; bias (C) float or null. sizes: B, C, K, rows. Types: 0 float, 1 bfloat16, 2 float16; a state has x's or 0.
// Returns 0, or 1 where memory is lacking.
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
