// The causal depth-wise convolution over whole sequences. Source: So et al. 2021 (2109.08668), section 3; the silu and the
// bias as in Gu and Dao 2023 (2312.00752), section 3.4.
#include "taps.h"

namespace {

constexpr long BLOCK = 512, PART = 256, TILE = 32;  // channels and tokens of a unit; tokens gathered at a time

// K: the number of taps, or 0 for any.
template <class T, int K>
struct Pass {
    const Convolution& call;
    Tensor<const T> x;
    Tensor<T> out;
    const float* first;  // (states, rows, C), may be null

    long scratch() const { return (call.taps + 1 + call.reach() + 2 * TILE) * BLOCK; }

    void run(long b, long from, long to, long channel, long count, Scratch scratch) const {
        float *weights = scratch.take((call.taps + 1) * BLOCK), *window = scratch.take((call.reach() + TILE) * BLOCK);
        float* made = scratch.take(TILE * BLOCK);
        const long reach = call.reach(), width = whole_vectors(count);
        stage(reading);
        call.gather_weights(channel, count, weights, width);
        const Rows<const T> rows = channels_of(x, b, channel);
        const Rows<T> outs = channels_of(out, b, channel);
        // Whole vectors are read and written without a copy, once enough tokens of the sequence precede them.
        const bool direct = rows.channel == 1 && outs.channel == 1 && count % W == 0;
        for (long t = from, stop; t < to; t = stop) {
            const Sequence s = call.at(b, t, to);
            stop = s.end < to ? s.end : to;
            if (direct && t - s.start >= reach) {
                stage(convolving);
                mix<K>(call.silu, rows.data + t * rows.token, rows.token, weights, width, call.taps, stop - t, width,
                    outs.data + t * outs.token, outs.token);
                continue;
            }
            if (direct && stop > s.start + reach) stop = s.start + reach;
            if (stop > t + TILE) stop = t + TILE;
            stage(reading);
            gather(call, rows, s, first, channel, count, t - reach, stop, window, width);
            stage(convolving);
            mix<K>(call.silu, window + reach * width, width, weights, width, call.taps, stop - t, width, made, width);
            stage(writing);
            write_tokens(made, width, outs, t, stop - t, count);
        }
    }

    // The state number s after its sequence.
    void finish(long s, float* last, Scratch scratch) const {
        stage(states);
        const Sequence sequence = call.of_last(s);
        float *window = scratch.take(BLOCK), *out = last + s * call.rows * call.channels;
        for (long token = sequence.end - call.rows; token < sequence.end; ++token, out += call.channels)
            for (long channel = 0; channel < call.channels; channel += BLOCK) {
                const long count = call.channels - channel < BLOCK ? call.channels - channel : BLOCK;
                gather(call, channels_of(x, call.offsets ? 0 : s, channel), sequence, first, channel, count, token, token + 1,
                       window, whole_vectors(count));
                std::memcpy(out + channel, window, sizeof(float) * count);
            }
    }
};

template <class T, int K>
int forward(const Pass<T, K>& pass, float* last, int threads) {
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
#pragma omp for schedule(static) nowait
            for (long s = 0; s < call.sequences; ++s) pass.finish(s, last, memory.scratch());
            stage(waiting);
#pragma omp for schedule(dynamic)
            for (long unit = 0; unit < units; ++unit) {
                const long channel = unit % blocks * BLOCK, from = unit / blocks % parts * PART;
                const long count = call.channels - channel < BLOCK ? call.channels - channel : BLOCK, whole = count / W * W;
                const long b = unit / blocks / parts, to = from + PART < call.tokens ? from + PART : call.tokens;
                if (whole) pass.run(b, from, to, channel, whole, memory.scratch());
                if (whole < count) pass.run(b, from, to, channel + whole, count - whole, memory.scratch());
                stage(waiting);
            }
        }
        stage(waiting);
    }
    return failed;
}

}  // namespace

// x, out (B,1,N,C) of type 0 float, 1 bfloat16, 2 float16, and weight (C,K) float, with 4, 4 and 2 strides, in this order;
// bias (C) or null, first (states,rows,C) or null, last (states,rows,C): float, contiguous; segments (B,N) or null; offsets
// (states+1) or null. sizes: B, N, C, K, rows, states. Returns 0, or 1 if memory runs out.
extern "C" int longspan_convolution_forward(const void* x, void* out, const float* weight, const float* bias,
                                            const float* first, float* last, const std::int64_t* segments,
                                            const std::int64_t* offsets, const long* strides, const long* sizes, int silu,
                                            int type, int threads) {
    const Convolution call{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], segments,
                           offsets,  weight,   strides + 8, bias,   silu != 0};
    const auto pass = [&](auto element) {
        using T = decltype(element);
        return with_taps(call.taps, [&](auto taps) {
            const Pass<T, decltype(taps)::count> work{
                call, {static_cast<const T*>(x), strides}, {static_cast<T*>(out), strides + 4}, first};
            return forward(work, last, threads);
        });
    };
    return type == 0 ? pass(float{}) : type == 1 ? pass(bfloat16{}) : pass(float16{});
}
