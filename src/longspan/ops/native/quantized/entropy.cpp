// The cross-entropy of rows times a weight in blocks of few bits, and its gradient, in one pass over the weight. Plain C
// interface.
//
// A tile of the weight at a time becomes numbers, which all rows multiply twice: to logits, and with the exponentials of
// these to the gradient. Sums of a row are relative to the largest logit so far, as in attention by blocks.
#include <cmath>
#include <cstdlib>
#include <type_traits>

#include "../shared/gemm.h"
#include "product.h"

namespace {

using namespace quantized;

constexpr long ROWS = 48;          // rows that are multiplied together
constexpr long PANEL = 64;         // columns of a product that lie together
constexpr long NUMBERS = 1 << 18;  // of the weight in a tile, which should stay in the caches
constexpr float LOWEST = -3e38f;

// What a row has found so far.
struct Row {
    float largest = LOWEST, picked = 0.0f;  // the largest logit and that of the target
    double total = 0.0, sum = 0.0;          // of e^(logit - largest), and of logits
};

// The operands of a call.
struct Call {
    Weight w;
    const float* bias;
    const std::int64_t* target;
    float *pulled, *even;  // (rows, K): sums of rows of the weight, by probability and of all; null if not needed
    long rows;
    float cap;  // 0: none

    long inputs() const { return w.inputs; }
    long width() const {
        const long found = NUMBERS / w.inputs / PANEL * PANEL, all = (w.outputs + PANEL - 1) / PANEL * PANEL;
        return found < PANEL ? PANEL : found < all ? found : all;
    }
};

// Numbers in the order in which products read them, one or two at a time.
inline void numbers(const float* x, long count, float* out) { std::memcpy(out, x, sizeof(float) * count); }
inline void interleaved(const float* rows, long, long count, float* out) { numbers(rows, count, out); }
#if defined(__AVX512BF16__)
inline void numbers(const float* x, long count, pair* out) { narrowed(x, count, reinterpret_cast<bfloat16*>(out)); }
// Of two rows in turn.
inline void interleaved(const float* rows, long step, long count, pair* out) {
    for (long i = 0; i < count; i += W) {
        const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)load(rows + step + i), (__m512)load(rows + i));
        const __m512i low = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(both));
        const __m512i high = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(both, 1));
        _mm512_storeu_si512(out + i, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
    }
}
#endif

// E: float, or a pair of bfloat16.
template <class E>
struct Pass : Call {
    static constexpr long AT_ONCE = std::is_same<E, float>::value ? 1 : 2;
    const E* x;             // (rows, K / AT_ONCE)
    E *columns, *by_input;  // panels of outputs, (K / AT_ONCE, PANEL) each; panels of inputs, (width / AT_ONCE, PANEL) each
    Row* found;

    // Sixteen rows of the weight from row ``at`` of the tile on; ``scratch`` has room for 32 K floats.
    void read(long begin, long at, float* scratch) const {
        const long K = inputs(), depth = K / AT_ONCE, group = (begin + at) / GROUP;
        if (group < w.groups())
            numbers_of(w, group, scratch);
        else
            std::memset(scratch, 0, sizeof(float) * GROUP * K);
        E* const rows = reinterpret_cast<E*>(scratch + GROUP * K);
        numbers(scratch, GROUP * K, rows);
        E* const panel = columns + at / PANEL * PANEL * depth + at % PANEL;
        for (long r = 0; r < GROUP; r += W)
            for (long i = 0; i < depth; i += W)
                transpose_square(reinterpret_cast<const float*>(rows + r * depth + i), depth,
                                 reinterpret_cast<float*>(panel + i * PANEL + r), PANEL);
        if (!pulled) return;
        for (long i = 0; i < K; i += PANEL)
            for (long r = 0; r < GROUP; r += AT_ONCE)
                interleaved(scratch + r * K + i, K, K - i < PANEL ? K - i : PANEL,
                            by_input + (i * width() + (at + r) * PANEL) / AT_ONCE);
    }

    // Logits (padded) of a row -> its exponentials, and ``level`` what the sum of all rows of the weight takes.
    void exponentials(float* logits, long begin, long count, long padded, long row, float* level) const {
        Row& own = found[row];
        if (bias)
            for (long i = 0; i < count; ++i) logits[i] += bias[begin + i];
        if (cap)
            for (long i = 0; i < padded; i += W) {
                const vec bent = 2.0f * sigmoid(load(logits + i) * (2.0f / cap)) - 1.0f;
                store(logits + i, bent * cap);
                store(level + i, 1.0f - bent * bent);
            }
        else if (even)
            for (long i = 0; i < padded; ++i) level[i] = 1.0f;
        for (long i = count; i < padded; ++i) logits[i] = LOWEST;
        vec most = splat(own.largest), all{};
        for (long i = 0; i < padded; i += W) {
            const vec z = load(logits + i);
            most = pick(z > most, z, most);
            if (i + W <= count) all += z;
        }
        own.sum += sum(all);
        for (long i = count / W * W; i < count; ++i) own.sum += logits[i];
        float largest = own.largest;
        for (long i = 0; i < W; ++i) largest = most[i] > largest ? most[i] : largest;
        if (largest > own.largest) {
            const float factor = std::exp(own.largest - largest);
            own.total *= factor, own.largest = largest;
            if (pulled)
                for (long i = 0; i < inputs(); i += W)
                    store(pulled + row * inputs() + i, load(pulled + row * inputs() + i) * factor);
        }
        const long place = target[row] - begin;
        const bool here = 0 <= place && place < count;
        if (here) own.picked = logits[place];
        vec total{};
        for (long i = 0; i < padded; i += W) {
            const vec p = exponential(load(logits + i) - largest);
            total += p;
            store(logits + i, cap ? p * load(level + i) : p);
        }
        own.total += sum(total);
        // What the target pulls is added in full precision, since little of it may be left.
        if (here) logits[place] = 0.0f;
    }

    // All of some rows and a tile: ``logits`` and ``level`` (ROWS, width), ``halves`` the same as E.
    void multiply(long first, long count, long begin, float* logits, float* level, E* halves) const {
        const long K = inputs(), depth = K / AT_ONCE, step = width(), left = w.outputs - begin;
        const long real = left < step ? left : step, padded = (real + PANEL - 1) / PANEL * PANEL;
        for (long i = 0; i < padded; i += PANEL)
            gemm<false>(count, PANEL, depth, x + first * depth, depth, 1, columns + i * depth, PANEL, logits + i, step);
        for (long r = 0; r < count; ++r)
            exponentials(logits + r * step, begin, real, padded, first + r, level + r * step);
        if (pulled) add(first, count, padded, logits, pulled, halves);
        if (even) add(first, count, padded, level, even, halves);
    }

    // sums += factors times the tile
    void add(long first, long count, long padded, const float* factors, float* sums, E* halves) const {
        const long K = inputs(), step = width();
        for (long r = 0; r < count; ++r) numbers(factors + r * step, padded, halves + r * step / AT_ONCE);
        for (long i = 0; i < K; i += PANEL)
            gemm<true>(count, K - i < PANEL ? K - i : PANEL, padded / AT_ONCE, halves, step / AT_ONCE, 1,
                       by_input + i * step / AT_ONCE, PANEL, sums + first * K + i, K);
    }

    void finish(long row, float* out) const {
        const Row& own = found[row];
        const double total = own.largest + std::log(own.total);
        out[0] = static_cast<float>(total), out[1] = own.picked;
        out[2] = static_cast<float>(own.sum / w.outputs);
        const float factor = static_cast<float>(1.0 / own.total);
        if (pulled)
            for (long i = 0; i < inputs(); ++i) pulled[row * inputs() + i] *= factor;
    }
};

float* memory(long floats) { return static_cast<float*>(std::aligned_alloc(64, (sizeof(float) * floats + 63) / 64 * 64)); }

template <class E>
int run(const Call& call, const void* x, float* out, int threads) {
    Pass<E> pass{call, static_cast<const E*>(x), nullptr, nullptr, nullptr};
    const long step = pass.width(), K = pass.inputs(), rows = pass.rows;
    pass.columns = reinterpret_cast<E*>(memory(step * K)), pass.by_input = reinterpret_cast<E*>(memory(step * (K + PANEL)));
    pass.found = static_cast<Row*>(std::malloc(sizeof(Row) * rows));
    int failed = !pass.columns || !pass.by_input || !pass.found;
    if (!failed) {
        for (long r = 0; r < rows; ++r) pass.found[r] = Row{};
#pragma omp parallel num_threads(threads) if (threads > 1)
        {
            float *const scratch = memory(2 * GROUP * K), *const own = memory(3 * ROWS * step);
            if (!scratch || !own)
#pragma omp atomic write
                failed = 1;
#pragma omp barrier
            for (long begin = 0; begin < pass.w.outputs && !failed; begin += step) {
                const long left = (pass.w.outputs - begin + PANEL - 1) / PANEL * PANEL, height = left < step ? left : step;
#pragma omp for schedule(dynamic)
                for (long at = 0; at < height; at += GROUP) pass.read(begin, at, scratch);
#pragma omp for schedule(dynamic)
                for (long first = 0; first < rows; first += ROWS)
                    pass.multiply(first, rows - first < ROWS ? rows - first : ROWS, begin, own, own + ROWS * step,
                                  reinterpret_cast<E*>(own + 2 * ROWS * step));
            }
            std::free(scratch), std::free(own);
        }
        for (long r = 0; r < rows && !failed; ++r) pass.finish(r, out + 3 * r);
    }
    std::free(pass.columns), std::free(pass.by_input), std::free(pass.found);
    return failed;
}

}  // namespace

// Whether the products of this library multiply numbers in bfloat16.
extern "C" int longspan_quantized_halves() {
#if defined(__AVX512BF16__)
    return 1;
#else
    return 0;
#endif
}

// x (M, K), contiguous, float, or bfloat16 if ``halves``; bias (N) or null; target (M), 0 to N-1. out (M, 3): the logarithm of
// the sum of e^logits, the logit of the target, the mean of the logits. pulled (M, K), zeros or
// null, becomes the sum of rows of the weight times their probabilities, without the target; even, zeros or null, that of all rows
// of the weight; both times the slope of the cap. sizes: M, K, N, format. Returns 0, or 1 if memory runs out.
extern "C" int longspan_quantized_entropy(const void* x, const std::uint8_t* quants, const std::uint8_t* scales,
                                          const void* factors, const float* bias, const std::int64_t* target, float* out,
                                          float* pulled, float* even, const long* sizes, float cap, int halves, int threads) {
    const Weight w{quants, scales, static_cast<const float16*>(factors), sizes[1], sizes[2], static_cast<int>(sizes[3]), 0};
    const Call call{w, bias, target, pulled, even, sizes[0], cap};
#if defined(__AVX512BF16__)
    if (halves) return run<pair>(call, x, out, threads);
#else
    if (halves) return 1;
#endif
    return run<float>(call, x, out, threads);
}
