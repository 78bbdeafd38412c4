// Softmax attention over keys that each chunk of tokens moves: a query of chunk i reads the keys of chunk j < i through the
// maps M of the chunks between them, which move the query instead, q <- q M^T, on its way back. Source: Yang et al. 2025
// (2505.16381), section 3. The sizes D and E are multiples of 16, and all tensors are contiguous.
#include "blocks.h"

namespace {

constexpr long CHUNK = 64;  // tokens C of a chunk

// rows: sequences times heads of keys; shared: query heads of each.
struct Moved {
    long rows, chunks, shared, keys, values;  // B G, c, R, D, E
    const float *queries, *near;              // (rows,c,R,C,D) at the beginning of the chunk, (rows,c,R,C,C) logits within it
    const float *key, *turned, *value, *value_turned;  // (rows,c,C,D), (rows,c,D,C), (rows,c,C,E), (rows,c,E,C)
    const float *maps, *maps_turned;                   // (rows,c,D,D), M and M^T
    float *out, *lse;                                  // (rows,c,R,C,E), (rows,c,R,C)

    long n() const { return shared * CHUNK; }

    // The logits x (n, CHUNK) of queries (n, D) that have been moved to the end of chunk j.
    void logits(const float* q, long j, float* x) const {
        gemm<false>(n(), CHUNK, keys, q, keys, 1, turned + j * keys * CHUNK, CHUNK, x, CHUNK);
    }
    // The queries at the beginning of chunk j.
    void move(const float* q, long j, float* to) const {
        gemm<false>(n(), keys, keys, q, keys, 1, maps_turned + j * keys * keys, keys, to, keys);
    }
};

struct Forward {
    Moved m;

    long units() const { return m.rows * m.chunks; }
    long scratch() const { return m.n() * (2 * m.keys + CHUNK + 2); }

    void run(long unit, Scratch scratch) const {
        const long row = unit / m.chunks * m.chunks, i = unit, n = m.n();
        float *q = scratch.take(n * m.keys), *moved = scratch.take(n * m.keys), *x = scratch.take(n * CHUNK);
        float *top = scratch.take(n), *below = scratch.take(n), *sum = m.out + i * n * m.values;
        std::memcpy(q, m.queries + i * n * m.keys, sizeof(float) * n * m.keys);
        std::memcpy(x, m.near + i * n * CHUNK, sizeof(float) * n * CHUNK);
        std::memset(sum, 0, sizeof(float) * n * m.values);
        for (long r = 0; r < n; ++r) top[r] = NEVER, below[r] = 0.0f;
        for (long j = i; j >= row; --j) {
            if (j < i) m.logits(q, j, x);
            for (long r = 0; r < n; ++r) weigh(x + r * CHUNK, CHUNK, top[r], below[r], sum + r * m.values, m.values);
            gemm<true>(n, m.values, CHUNK, x, CHUNK, 1, m.value + j * CHUNK * m.values, m.values, sum, m.values);
            if (j < i && j > row) m.move(q, j, moved), std::swap(q, moved);
        }
        for (long r = 0; r < n; ++r) {
            scale_rows(sum + r * m.values, 1, m.values, 1.0f / below[r]);
            m.lse[i * n + r] = top[r] + std::log(below[r]);
        }
    }
};

struct Backward {
    Moved m;
    const float* grad;                              // (rows,c,R,C,E)
    float *dqueries, *dnear, *dkey, *dvalue, *dmaps;  // like their operands

    long units() const { return m.rows; }
    long scratch() const { return m.n() * (m.chunks * m.keys + 2 * m.keys + 2 * CHUNK + 1); }

    void run(long row, Scratch scratch) const {
        const long n = m.n(), begin = row * m.chunks, end = begin + m.chunks;
        float *moved = scratch.take(n * m.chunks * m.keys), *dq = scratch.take(n * m.keys), *next = scratch.take(n * m.keys);
        float *x = scratch.take(n * CHUNK), *ds = scratch.take(n * CHUNK), *delta = scratch.take(n);
        std::memset(dkey + begin * CHUNK * m.keys, 0, sizeof(float) * m.chunks * CHUNK * m.keys);
        std::memset(dvalue + begin * CHUNK * m.values, 0, sizeof(float) * m.chunks * CHUNK * m.values);
        std::memset(dmaps + begin * m.keys * m.keys, 0, sizeof(float) * m.chunks * m.keys * m.keys);
        for (long i = begin; i < end; ++i) {
            const float *up = grad + i * n * m.values, *sum = m.out + i * n * m.values, *log = m.lse + i * n;
            for (long r = 0; r < n; ++r) delta[r] = ::sum(dot_lanes(up + r * m.values, sum + r * m.values, m.values));
            // The logits become weights in x; ``slope`` gets their gradients, and the values theirs.
            const auto weights = [&](long j, float* slope) {
                gemm<false>(n, CHUNK, m.values, up, m.values, 1, m.value_turned + j * m.values * CHUNK, CHUNK, slope, CHUNK);
                for (long r = 0; r < n; ++r) slopes(x + r * CHUNK, slope + r * CHUNK, CHUNK, log[r], delta[r], 0.0f);
                gemm<true>(CHUNK, m.values, n, x, 1, CHUNK, up, m.values, dvalue + j * CHUNK * m.values, m.values);
            };
            std::memcpy(x, m.near + i * n * CHUNK, sizeof(float) * n * CHUNK);
            weights(i, dnear + i * n * CHUNK);
            // The queries at the ends of all earlier chunks, the nearest last.
            const auto at = [&](long j) { return moved + (j - begin) * n * m.keys; };
            if (i > begin) std::memcpy(at(i - 1), m.queries + i * n * m.keys, sizeof(float) * n * m.keys);
            for (long j = i - 1; j > begin; --j) m.move(at(j), j, at(j - 1));
            std::memset(dq, 0, sizeof(float) * n * m.keys);
            for (long j = begin; j < i; ++j) {
                const float* q = at(j);
                if (j > begin) {
                    gemm<true>(m.keys, m.keys, n, dq, 1, m.keys, q, m.keys, dmaps + j * m.keys * m.keys, m.keys);
                    gemm<false>(n, m.keys, m.keys, dq, m.keys, 1, m.maps + j * m.keys * m.keys, m.keys, next, m.keys);
                    std::swap(dq, next);
                }
                m.logits(q, j, x);
                weights(j, ds);
                gemm<true>(CHUNK, m.keys, n, ds, 1, CHUNK, q, m.keys, dkey + j * CHUNK * m.keys, m.keys);
                gemm<true>(n, m.keys, CHUNK, ds, CHUNK, 1, m.key + j * CHUNK * m.keys, m.keys, dq, m.keys);
            }
            std::memcpy(dqueries + i * n * m.keys, dq, sizeof(float) * n * m.keys);
        }
    }
};

}  // namespace

// Operands as in ``Moved``, in its order; sizes: B G, c, R, D, E. Returns 0, or 1 if memory runs out.
extern "C" int longspan_moved_forward(const float* queries, const float* near, const float* turned, const float* value,
                                      const float* maps_turned, float* out, float* lse, const long* sizes, int threads) {
    return each_unit(Forward{{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], queries, near, nullptr, turned, value, nullptr,
                              nullptr, maps_turned, out, lse}},
                     threads);
}

// As longspan_moved_forward, which gave out and lse.
extern "C" int longspan_moved_backward(const float* queries, const float* near, const float* key, const float* turned,
                                       const float* value, const float* value_turned, const float* maps,
                                       const float* maps_turned, float* out, float* lse, const float* grad, float* dqueries,
                                       float* dnear, float* dkey, float* dvalue, float* dmaps, const long* sizes, int threads) {
    return each_unit(Backward{{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], queries, near, key, turned, value, value_turned,
                               maps, maps_turned, out, lse},
                              grad, dqueries, dnear, dkey, dvalue, dmaps},
                     threads);
}
