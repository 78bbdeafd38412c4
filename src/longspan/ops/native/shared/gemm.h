// Small matrix products in the caches, a few rows and vectors of columns at a time in registers.
#pragma once
#include "vec.h"

namespace {

#define LONGSPAN_INLINE inline __attribute__((always_inline))

#if defined(__AVX512F__)
constexpr int COLUMNS = 4;  // vectors of columns in one tile
constexpr int tile_rows(int columns) { return columns >= 3 ? 6 : 8; }
#elif defined(__AVX2__)
constexpr int COLUMNS = 2;
constexpr int tile_rows(int columns) { return columns == 2 ? 6 : 8; }
#else
constexpr int COLUMNS = 4;
constexpr int tile_rows(int columns) { return columns >= 3 ? 6 : 8; }
#endif

// sum + a b, where a tells how their bits are read.
inline vec plus_product(vec sum, vec a, vec b, float) { return sum + a * b; }

#if defined(__AVX512BF16__)
// Two adjacent numbers of a sum in bfloat16. A product of pairs is the sum of two products, in float.
struct pair {
    std::uint32_t bits;
};
inline vec load(const pair* p) { return load(reinterpret_cast<const float*>(p)); }
inline vec splat(pair x) { return (vec)_mm512_set1_epi32(static_cast<int>(x.bits)); }
inline vec plus_product(vec sum, vec a, vec b, pair) {
    return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}
#endif

// c[i, :] (+)= sum_p a(i, p) b[p, :] for ROWS rows and NV vectors of columns; a(i, p) = a[i * ai + p * ap].
template <int ROWS, int NV, bool ADD, class A, class B>
LONGSPAN_INLINE void tile(long depth, const A* a, long ai, long ap, const B* b, long bp, float* c, long ci) {
    vec acc[ROWS][NV];
    for (int i = 0; i < ROWS; ++i)
        for (int j = 0; j < NV; ++j) acc[i][j] = ADD ? load(c + i * ci + j * W) : vec{};
    for (long p = 0; p < depth; ++p) {
        vec x[NV];
        for (int j = 0; j < NV; ++j) x[j] = load(b + p * bp + j * W);
        for (int i = 0; i < ROWS; ++i) {
            const vec y = splat(a[i * ai + p * ap]);
            for (int j = 0; j < NV; ++j) acc[i][j] = plus_product(acc[i][j], y, x[j], A{});
        }
    }
    for (int i = 0; i < ROWS; ++i)
        for (int j = 0; j < NV; ++j) store(c + i * ci + j * W, acc[i][j]);
}

template <int ROWS, int NV, bool ADD, class A, class B>
void last_rows(long rows, long depth, const A* a, long ai, long ap, const B* b, long bp, float* c, long ci) {
    if constexpr (ROWS > 0) {
        if (rows == ROWS)
            tile<ROWS, NV, ADD>(depth, a, ai, ap, b, bp, c, ci);
        else
            last_rows<ROWS - 1, NV, ADD>(rows, depth, a, ai, ap, b, bp, c, ci);
    }
}

template <int NV, bool ADD, class A, class B>
void columns(long rows, long depth, const A* a, long ai, long ap, const B* b, long bp, float* c, long ci) {
    constexpr int ROWS = tile_rows(NV);
    long i = 0;
    for (; i + ROWS <= rows; i += ROWS) tile<ROWS, NV, ADD>(depth, a + i * ai, ai, ap, b, bp, c + i * ci, ci);
    last_rows<ROWS - 1, NV, ADD>(rows - i, depth, a + i * ai, ai, ap, b, bp, c + i * ci, ci);
}

template <int NV, bool ADD, class A>
void last_columns(long count, long rows, long depth, const A* a, long ai, long ap, const A* b, long bp, float* c,
                  long ci) {
    if constexpr (NV > 0) {
        if (count == NV)
            columns<NV, ADD>(rows, depth, a, ai, ap, b, bp, c, ci);
        else
            last_columns<NV - 1, ADD>(count, rows, depth, a, ai, ap, b, bp, c, ci);
    }
}

// c (rows, width) (+)= a (rows, depth) b (depth, width); width is a multiple of W. b's and c's rows lie bp and ci apart.
template <bool ADD, class A>
void gemm(long rows, long width, long depth, const A* a, long ai, long ap, const A* b, long bp, float* c, long ci) {
    long j = 0;
    for (; j + COLUMNS * W <= width; j += COLUMNS * W)
        columns<COLUMNS, ADD>(rows, depth, a, ai, ap, b + j, bp, c + j, ci);
    last_columns<COLUMNS - 1, ADD>((width - j) / W, rows, depth, a, ai, ap, b + j, bp, c + j, ci);
}

constexpr long STRIP = 8;  // rows of a triangle that are processed together

// The lower triangle of a b, n by n, zeros above its diagonal up to the next whole vector.
inline void lower_product(long n, long depth, const float* a, long ai, const float* b, long bp, float* c, long ci) {
    for (long i = 0; i < n; i += STRIP) {
        const long rows = n - i < STRIP ? n - i : STRIP, width = whole_vectors(i + rows);
        gemm<false>(rows, width, depth, a + i * ai, ai, 1, b, bp, c + i * ci, ci);
    }
}

// c (n, width) += a b, where a (n, n) is zero above its diagonal.
inline void lower_times(long n, long width, const float* a, long ai, const float* b, long bp, float* c, long ci) {
    for (long i = 0; i < n; i += STRIP) {
        const long rows = n - i < STRIP ? n - i : STRIP;
        gemm<true>(rows, width, i + rows, a + i * ai, ai, 1, b, bp, c + i * ci, ci);
    }
}

// c (n, width) += a^T b, where a (n, n) is zero above its diagonal.
inline void upper_times(long n, long width, const float* a, long ai, const float* b, long bp, float* c, long ci) {
    for (long i = 0; i < n; i += STRIP) {
        const long rows = n - i < STRIP ? n - i : STRIP;
        gemm<true>(rows, width, n - i, a + i * ai + i, 1, ai, b + i * bp, bp, c + i * ci, ci);
    }
}

}  // namespace
