// The product of rows of activations with a weight in blocks of few bits. Plain C interface.
#include <cstdlib>

#include "product.h"

namespace {

constexpr long ROWS = 64;  // rows whose prepared activations stay in the caches

using namespace quantized;

}  // namespace

// x (M, K) float, contiguous, times the weight (N, K) in groups, as product.h describes, plus bias (N) or null -> out (M, N).
// sizes: M, K, N, format, activations. Returns 0, or 1 if memory runs out.
extern "C" int longspan_quantized_forward(const float* x, const std::uint8_t* quants, const std::uint8_t* scales,
                                          const void* factors, const float* bias, float* out, const long* sizes,
                                          int threads) {
    const long rows = sizes[0];
    const Weight w{quants,   scales,   static_cast<const float16*>(factors),
                   sizes[1], sizes[2], static_cast<int>(sizes[3]), static_cast<int>(sizes[4])};
    const long cells = w.cells(), most = rows < ROWS ? rows : ROWS;
    Cell* prepared = static_cast<Cell*>(std::aligned_alloc(64, (sizeof(Cell) * most * cells + 64) / 64 * 64));
    if (!prepared) return 1;
#pragma omp parallel num_threads(threads) if (threads > 1)
    for (long first = 0; first < rows; first += ROWS) {
        const long count = rows - first < ROWS ? rows - first : ROWS;
#pragma omp for schedule(static)
        for (long i = 0; i < count * cells; ++i)
            prepare(x + first * w.inputs + i * CELL, w.format, w.activations, prepared + i);
#pragma omp for schedule(static)
        for (long group = 0; group < w.groups(); ++group) {
            alignas(64) float result[ROWS * GROUP];
            multiply(w, group, prepared, count, result);
            const long begin = group * GROUP, width = w.outputs - begin < GROUP ? w.outputs - begin : GROUP;
            for (long r = 0; r < count; ++r)
                for (long j = 0; j < width; ++j)
                    out[(first + r) * w.outputs + begin + j] = result[r * GROUP + j] + (bias ? bias[begin + j] : 0.0f);
        }
    }
    std::free(prepared);
    return 0;
}

// Rows of the weight from ``begin``, a multiple of GROUP, to ``end`` as numbers -> out (rows, K). sizes: begin, end, K, N, format.
// Returns 0, or 1 if memory runs out.
extern "C" int longspan_quantized_rows(const std::uint8_t* quants, const std::uint8_t* scales, const void* factors, float* out,
                                       const long* sizes, int threads) {
    const long begin = sizes[0], end = sizes[1], inputs = sizes[2];
    const Weight w{quants, scales, static_cast<const float16*>(factors), inputs, sizes[3], static_cast<int>(sizes[4]), 0};
    int failed = 0;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (long first = begin; first < end; first += GROUP) {
        float* to = out + (first - begin) * inputs;
        if (end - first >= GROUP) {
            numbers_of(w, first / GROUP, to);
            continue;
        }
        float* whole = static_cast<float*>(std::aligned_alloc(64, sizeof(float) * GROUP * inputs));
        if (!whole) {
            failed = 1;
            continue;
        }
        numbers_of(w, first / GROUP, whole);
        std::memcpy(to, whole, sizeof(float) * (end - first) * inputs);
        std::free(whole);
    }
    return failed;
}
