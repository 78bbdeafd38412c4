// Diagonal recurrences h_t = a_t h_(t-1) + u_t: code that the scans share. A sequence is read in tiles of tokens; the
// backward pass starts from the states before each tile, which the forward pass saves.
#pragma once
#include "../convolution/taps.h"

namespace {

constexpr long TILE = 64;   // tokens of a tile
constexpr long BLOCK = 64;  // channels of a unit

// A tensor (B,1,N,channels) of type 0 float, 1 bfloat16, 2 float16, with four strides; data may be null.
struct Operand {
    void* data;
    const long* strides;
    int type;

    // Calls f with rows of channels of one row of the batch, from ``channel`` on.
    template <class F>
    void rows(long b, long channel, F f) const {
        if (type == 0)
            f(channels_of(Tensor<float>{static_cast<float*>(data), strides}, b, channel));
        else if (type == 1)
            f(channels_of(Tensor<bfloat16>{static_cast<bfloat16*>(data), strides}, b, channel));
        else
            f(channels_of(Tensor<float16>{static_cast<float16*>(data), strides}, b, channel));
    }
};

template <class T>
Rows<const T> constant(Rows<T> rows) {
    const long strides[4] = {0, 0, rows.token, rows.channel};
    return Rows<const T>(Tensor<const T>{rows.data, strides}, 0, 0);
}

// Tokens begin ... begin + n of ``count`` channels into out (n, ld), zeros beyond the channels.
inline void read_tile(Operand t, long b, long channel, long begin, long n, long count, float* out, long ld) {
    t.rows(b, channel, [&](auto rows) { read_tokens(constant(rows), begin, n, count, out, ld); });
}

inline void write_tile(const float* x, long ld, Operand t, long b, long channel, long begin, long n, long count) {
    t.rows(b, channel, [&](auto rows) { write_tokens(x, ld, rows, begin, n, count); });
}

// Some tokens of one row, and the number of the state before and after them.
struct Span {
    long row, begin, end, state;
    long tiles() const { return (end - begin + TILE - 1) / TILE; }
};

struct Scan {
    long batch, tokens, channels, sequences;
    const std::uint8_t* mask;      // (B, N), may be null
    const std::int64_t* segments;  // (B, N), may be null
    const std::int64_t* offsets;   // (sequences + 1): where the sequences of the one row begin; may be null

    Span sequence(long s) const {
        if (offsets) return {0, offsets[s], offsets[s + 1], s};
        return {s, 0, tokens, s};
    }
    // The place of the first tile of a sequence among all tiles; with offsets there are at most N / TILE + sequences.
    long first_tile(long s) const {
        return offsets ? offsets[s] / TILE + s : s * ((tokens + TILE - 1) / TILE);
    }
    long blocks() const { return (channels + BLOCK - 1) / BLOCK; }
    long count(long channel) const { return channels - channel < BLOCK ? channels - channel : BLOCK; }

    bool real(long row, long t) const { return !mask || mask[row * tokens + t]; }
    // Whether the state is cleared before token t.
    bool fresh(long row, long t) const { return starts_anew(segments ? segments + row * tokens : nullptr, t); }

    // Calls run(sequence, channel) for every block of channels of every sequence.
    template <class F>
    void each_unit(F run) const {
        const long units = sequences * blocks();
#pragma omp for schedule(dynamic)
        for (long unit = 0; unit < units; ++unit) {
            run(sequence(unit / blocks()), unit % blocks() * BLOCK);
            stage(waiting);
        }
    }
};

// min(x, most); NaN stays NaN.
inline vec at_most(float most, vec x) {
#if defined(__AVX512F__)
    return (vec)_mm512_min_ps(_mm512_set1_ps(most), (__m512)x);
#elif defined(__AVX2__) && defined(__F16C__)
    return (vec)_mm256_min_ps(_mm256_set1_ps(most), (__m256)x);
#else
    return pick(x > splat(most), splat(most), x);
#endif
}

// e^x, at least e^-86 and at most e^88.
inline vec decay(vec x) { return exponential(at_most(88.0f, x)); }

// Allocates scratch memory for each thread and calls run(scratch) in it. Returns whether the memory ran out.
template <class F>
int in_threads(long floats, int threads, F run) {
    bool failed = false;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        stage(states);
        Memory memory(floats);
        if (!memory.ready()) {
#pragma omp atomic write
            failed = true;
        }
        stage(waiting);
#pragma omp barrier
        if (!failed) run(memory.scratch());
        stage(waiting);
    }
    return failed;
}

}  // namespace

// How many tokens lie between saved states. Weak, since every source of the family has it.
extern "C" __attribute__((weak, used, visibility("default"))) long longspan_scan_tile();
extern "C" long longspan_scan_tile() { return TILE; }
