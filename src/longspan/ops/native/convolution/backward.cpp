// The gradients of forward.cpp: with dz the gradient before the activation, dx_t = sum_j w_j dz_(t+K-1-j) and
// dw_j = sum_t dz_t x_(t-K+1+j), both within a sequence. z is recomputed.
#include "taps.h"

namespace {

constexpr long BLOCK = 128, PART = 512, TILE = 32;  // channels and tokens of a unit; tokens processed together

// K: the number of taps, or 0 for any.
template <class T, int K>
struct Pass {
    const Convolution& call;
    Tensor<const T> x, grad;
    Tensor<T> dx;
    const float *first, *grad_last;  // (states, rows, C); first may be null
    float* grad_first;               // like first; already holds its contribution from the last state
    float* sums;                     // (B parts, K + 1, C): the shares of dw and of db

    long taps() const { return K ? K : call.taps; }
    long scratch() const { return (4 * call.taps + 3 * TILE + 2 * call.reach() + 2) * BLOCK; }

    void run(long b, long from, long to, long channel, long count, float* sums, Scratch scratch) const {
        const long reach = call.reach(), taps = this->taps(), width = whole_vectors(count);
        float *weights = scratch.take((taps + 1) * BLOCK), *totals = scratch.take((taps + 1) * BLOCK);
        float *window = scratch.take((TILE + 2 * reach) * BLOCK), *dz = scratch.take((TILE + reach) * BLOCK);
        float* made = scratch.take(TILE * BLOCK);
        stage(reading);
        call.gather_weights(channel, count, weights, width);
        std::memset(totals, 0, sizeof(float) * (taps + 1) * width);
        const Rows<const T> rows = channels_of(x, b, channel), grads = channels_of(grad, b, channel);
        const long ahead = reach > call.rows ? reach : call.rows;
        for (long t = from, stop; t < to; t = stop) {
            const Sequence s = call.at(b, t, (t + TILE < to ? t + TILE : to) + ahead);
            stop = s.end < to ? s.end : to;
            if (stop > t + TILE) stop = t + TILE;
            const long seen = s.end < stop + reach ? s.end : stop + reach;  // outputs beyond do not depend on these tokens
            stage(reading);
            gather(call, rows, s, first, channel, count, t - reach, seen, window, width);
            read_tokens(grads, t, seen - t, count, dz, width);
            stage(mapping);
            if (call.silu) undo_silu(window, weights, seen - t, width, dz);
            std::memset(dz + (seen - t) * width, 0, sizeof(float) * (stop + reach - seen) * width);
            stage(convolving);
            turn(weights, dz, stop - t, width, made);
            stage(states);
            if (s.last >= 0)
                for (long i = s.end - call.rows > t ? s.end - call.rows : t; i < stop; ++i)
                    add(state(grad_last, s.last, call.rows - s.end + i) + channel, count, made + (i - t) * width);
            stage(writing);
            write_tokens(made, width, channels_of(dx, b, channel), t, stop - t, count);
            stage(states);
            if (grad_first && s.first >= 0 && t == s.start) {
                // As if there were tokens before the first.
                for (long i = 1; i <= reach; ++i) {
                    turn_row(weights, dz - i * width, i, width, made);
                    add(made, count, state(grad_first, s.first, call.rows - i) + channel);
                }
            }
            stage(summing);
            total(window, dz, stop - t, width, totals);
        }
        for (long j = 0; j <= taps; ++j)
            std::memcpy(sums + j * call.channels + channel, totals + j * width, sizeof(float) * count);
    }

    template <class F>
    F* state(F* states, long number, long row) const {
        return states + (number * call.rows + row) * call.channels;
    }

    static void add(const float* x, long count, float* out) {
        for (long c = 0; c < count; ++c) out[c] += x[c];
    }

    // Adds the contribution of some tokens to the gradients of the taps, followed by that of the bias.
    void total(const float* window, const float* dz, long n, long width, float* totals) const {
        constexpr long together = K ? K : 1;  // the number of independent sums
        for (long c = 0; c < width; c += W) {
            vec all = load(totals + taps() * width + c);
            for (long i = 0; i < n; ++i) all += load(dz + i * width + c);
            store(totals + taps() * width + c, all);
            for (long j = 0; j < taps(); j += together) {
                vec sums[together];
                for (long l = 0; l < together; ++l) sums[l] = load(totals + (j + l) * width + c);
                for (long i = 0; i < n; ++i) {
                    const vec slope = load(dz + i * width + c);
                    for (long l = 0; l < together; ++l) sums[l] += slope * load(window + (i + j + l) * width + c);
                }
                for (long l = 0; l < together; ++l) store(totals + (j + l) * width + c, sums[l]);
            }
        }
    }

    // dz *= silu'(z) = s (1 + z (1 - s)), s = sigmoid(z).
    void undo_silu(const float* window, const float* weights, long n, long width, float* dz) const {
        for (long i = 0; i < n; ++i)
            for (long c = 0; c < width; c += W) {
                vec z = load(weights + taps() * width + c);
                for (long j = 0; j < taps(); ++j)
                    z += load(weights + j * width + c) * load(window + (i + j) * width + c);
                const vec s = sigmoid(z);
                store(dz + i * width + c, load(dz + i * width + c) * (s * (1.0f + z * (1.0f - s))));
            }
    }

    void turn(const float* weights, const float* dz, long n, long width, float* out) const {
        for (long i = 0; i < n; ++i) turn_row(weights, dz + i * width, 0, width, out + i * width);
    }

    // One row of dx from that row of dz and later ones, of which the first ``skip`` are missing.
    void turn_row(const float* weights, const float* dz, long skip, long width, float* out) const {
        for (long c = 0; c < width; c += W) {
            vec total = vec{};
            for (long j = skip; j < taps(); ++j)
                total += load(weights + (taps() - 1 - j) * width + c) * load(dz + j * width + c);
            store(out + c, total);
        }
    }

    // The gradient of state number s, the first of a sequence shorter than the state, from the last state.
    void begin(long s) const {
        stage(states);
        std::memset(state(grad_first, s, 0), 0, sizeof(float) * call.rows * call.channels);
        const Sequence sequence = call.of_last(s);
        const long kept = sequence.first < 0 ? 0 : call.rows - (sequence.end - sequence.start);
        if (kept > 0)
            std::memcpy(state(grad_first, s, call.rows - kept), state(grad_last, s, 0),
                        sizeof(float) * kept * call.channels);
    }
};

template <class T, int K>
int backward(const Pass<T, K>& pass, int threads) {
    const Convolution& call = pass.call;
    const long parts = (call.tokens + PART - 1) / PART, blocks = (call.channels + BLOCK - 1) / BLOCK;
    const long units = call.batch * parts * blocks;
    bool failed = false;
#pragma omp parallel num_threads(threads) if (threads > 1 && units > 1)
    {
        stage(states);
        Memory memory(pass.scratch());
        if (!memory.ready()) failed = true;
        stage(waiting);
#pragma omp barrier
        if (!failed) {
#pragma omp for schedule(static)
            for (long s = 0; s < (pass.grad_first ? call.sequences : 0); ++s) {
                pass.begin(s);
                stage(waiting);
            }
#pragma omp for schedule(dynamic)
            for (long unit = 0; unit < units; ++unit) {
                const long channel = unit % blocks * BLOCK, part = unit / blocks, from = part % parts * PART;
                pass.run(part / parts, from, from + PART < call.tokens ? from + PART : call.tokens, channel,
                         call.channels - channel < BLOCK ? call.channels - channel : BLOCK,
                         pass.sums + part * (call.taps + 1) * call.channels, memory.scratch());
                stage(waiting);
            }
        }
        stage(waiting);
    }
    return failed;
}

}  // namespace

// How many tokens share one set of sums.
extern "C" long longspan_convolution_part() { return PART; }

// Arguments as in forward.cpp; x, grad, dx of one type and weight, with 4, 4, 4 and 2 strides; grad_last, grad_first (null
// if first is) like first; sums (B parts,K+1,C), parts of longspan_convolution_part() tokens: the shares of the
// gradients of the weight, tap by tap, and of the bias.
extern "C" int longspan_convolution_backward(const void* x, const void* grad, void* dx, const float* weight,
                                             const float* bias, const float* first, const float* grad_last,
                                             float* grad_first, float* sums, const std::int64_t* segments,
                                             const std::int64_t* offsets, const long* strides, const long* sizes, int silu,
                                             int type, int threads) {
    const Convolution call{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], segments,
                           offsets,  weight,   strides + 12, bias,  silu != 0};
    const auto pass = [&](auto element) {
        using T = decltype(element);
        return with_taps(call.taps, [&](auto taps) {
            const Pass<T, decltype(taps)::count> work{call,
                                                      {static_cast<const T*>(x), strides},
                                                      {static_cast<const T*>(grad), strides + 4},
                                                      {static_cast<T*>(dx), strides + 8},
                                                      first,
                                                      grad_last,
                                                      grad_first,
                                                      sums};
            return backward(work, threads);
        });
    };
    return type == 0 ? pass(float{}) : type == 1 ? pass(bfloat16{}) : pass(float16{});
}
