// Stick-breaking attention and its gradients: out_i = sum_{j<i} A_ij v_j with A_ij = b_ij prod_{j<l<i} (1 - b_il) and
// b_ij = sigmoid(scale q_i k_j), from the nearest key on. Keys after which less than 2^-24 of a stick is left are not read.
#include "../shared/softplus.h"
#include "blocks.h"

namespace {

constexpr long TILE = 64;           // queries, and keys, of a tile
constexpr float BROKEN = 16.6355f;  // 24 log 2: minus the logarithm of what is left

// The tiles of one block of queries, the nearest keys first.
template <class T>
struct Stick {
    const Sizes& sizes;
    Tensor<const T> q, k;
    float scale;

    long blocks() const { return (sizes.tokens + TILE - 1) / TILE - sizes.start() / TILE; }

    // Minus the logarithms of the weights of a tile into x (TILE,TILE) and of 1 - b into falls; used: that of the stick so far, by row.
    void weights(long rows, Span at, long first, long cols, const float* query, const float* turned, float* x, float* falls,
                 float* used) const {
        const long width = whole_vectors(cols);
        gemm<false>(rows, width, sizes.keys, query, sizes.kp(), 1, turned, TILE, x, TILE);
        for (long i = 0; i < rows; ++i) {
            float *row = x + i * TILE, *fall = falls + i * TILE;
            // Keys before the query alone; the others take nothing and break nothing.
            const long seen = std::max(0L, std::min(cols, sizes.start() + at.begin + i - first));
            for (long j = 0; j < width; j += W) store(fall + j, softplus(load(row + j)));
            for (long j = seen; j < width; ++j) fall[j] = 0.0f, row[j] = NEVER;
            float gone = used[i];
            for (long j = seen - 1; j >= 0; --j) row[j] -= gone += fall[j];
            used[i] = gone;
        }
    }

    static bool broken(const float* used, long rows) {
        for (long i = 0; i < rows; ++i)
            if (!(used[i] > BROKEN)) return false;
        return true;
    }
};

inline vec weight_of(vec x) { return pick(x == splat(NEVER), vec{}, exponential(x)); }

template <class T>
struct Forward {
    Stick<T> stick;
    Tensor<const T> v;
    Tensor<float> out;

    long units() const { return stick.sizes.batch * stick.sizes.heads * stick.blocks(); }
    long scratch() const { return TILE * (3 * stick.sizes.kp() + 2 * stick.sizes.vp() + 2 * TILE + 1); }

    void run(long unit, Scratch scratch) const {
        const Sizes& sizes = stick.sizes;
        const long row = unit / stick.blocks(), u = unit % stick.blocks(), batch = row / sizes.heads, head = row % sizes.heads;
        const long kp = sizes.kp(), vp = sizes.vp();
        const Span at = span(sizes, TILE, u);
        float *query = scratch.take(TILE * kp), *key = scratch.take(TILE * kp), *turned = scratch.take(TILE * kp);
        float *value = scratch.take(TILE * vp), *sum = scratch.take(TILE * vp), *x = scratch.take(TILE * TILE);
        float *falls = scratch.take(TILE * TILE), *used = scratch.take(TILE);
        read(Rows<const T>(stick.q, batch, head), at.begin, at.rows, sizes.keys, query, kp);
        scale_rows(query, at.rows, kp, stick.scale);
        std::memset(sum, 0, sizeof(float) * at.rows * vp);
        std::memset(used, 0, sizeof(float) * TILE);
        const Rows<const T> keys(stick.k, batch, sizes.group(head)), values(v, batch, sizes.group(head));
        for (long c = sizes.start() / TILE + u; c >= 0 && !Stick<T>::broken(used, at.rows); --c) {
            const long first = c * TILE, cols = std::min(TILE, sizes.tokens - first), width = whole_vectors(cols);
            read_turned(keys, first, cols, sizes.keys, kp, TILE, key, turned);
            read(values, first, cols, sizes.values, value, vp);
            stick.weights(at.rows, at, first, cols, query, turned, x, falls, used);
            for (long i = 0; i < at.rows; ++i)
                for (long j = 0; j < width; j += W) store(x + i * TILE + j, weight_of(load(x + i * TILE + j)));
            gemm<true>(at.rows, vp, cols, x, TILE, 1, value, vp, sum, vp);
        }
        write(sum, vp, Rows<float>(out, batch, head), at.begin, at.rows, sizes.values);
    }
};

// With u_ij = A_ij (dO_i v_j), the gradient of logit ij is u_ij (1 - b_ij) - b_ij sum_{l<j} u_il, and sum_l u_il = dO_i o_i.
template <class T>
struct Backward {
    Stick<T> stick;
    Tensor<const T> v;
    Tensor<const float> out, grad;
    Tensor<T> dq, dk, dv;

    long units() const { return stick.sizes.batch * stick.sizes.groups; }
    long scratch() const {
        const Sizes& s = stick.sizes;
        return s.tokens * (s.kp() + s.vp()) + TILE * (4 * s.kp() + 4 * s.vp() + 3 * TILE + 2);
    }

    void run(long unit, Scratch scratch) const {
        const Sizes& sizes = stick.sizes;
        const long batch = unit / sizes.groups, group = unit % sizes.groups, shared = sizes.heads / sizes.groups;
        float *dkeys = scratch.take(sizes.tokens * sizes.kp()), *dvalues = scratch.take(sizes.tokens * sizes.vp());
        std::memset(dkeys, 0, sizeof(float) * sizes.tokens * sizes.kp());
        std::memset(dvalues, 0, sizeof(float) * sizes.tokens * sizes.vp());
        for (long head = group * shared; head < (group + 1) * shared; ++head)
            for (long u = 0; u < stick.blocks(); ++u) block(batch, head, u, dkeys, dvalues, scratch);
        write(dkeys, sizes.kp(), Rows<T>(dk, batch, group), 0, sizes.tokens, sizes.keys);
        write(dvalues, sizes.vp(), Rows<T>(dv, batch, group), 0, sizes.tokens, sizes.values);
    }

    void block(long batch, long head, long u, float* dkeys, float* dvalues, Scratch scratch) const {
        const Sizes& sizes = stick.sizes;
        const long kp = sizes.kp(), vp = sizes.vp(), group = sizes.group(head);
        const Span at = span(sizes, TILE, u);
        float *query = scratch.take(TILE * kp), *key = scratch.take(TILE * kp), *turned = scratch.take(TILE * kp);
        float *sum = scratch.take(TILE * kp), *value = scratch.take(TILE * vp), *value_turned = scratch.take(TILE * vp);
        float *up = scratch.take(TILE * vp), *output = scratch.take(TILE * vp), *x = scratch.take(TILE * TILE);
        float *falls = scratch.take(TILE * TILE), *ds = scratch.take(TILE * TILE), *used = scratch.take(TILE);
        float* left = scratch.take(TILE);  // the sum of u over the keys that are not read yet
        read(Rows<const T>(stick.q, batch, head), at.begin, at.rows, sizes.keys, query, kp);
        scale_rows(query, at.rows, kp, stick.scale);
        read(Rows<const float>(grad, batch, head), at.begin, at.rows, sizes.values, up, vp);
        read(Rows<const float>(out, batch, head), at.begin, at.rows, sizes.values, output, vp);
        for (long i = 0; i < at.rows; ++i) left[i] = ::sum(dot_lanes(up + i * vp, output + i * vp, vp));
        std::memset(sum, 0, sizeof(float) * at.rows * kp);
        std::memset(used, 0, sizeof(float) * TILE);
        const Rows<const T> keys(stick.k, batch, group), values(v, batch, group);
        for (long c = sizes.start() / TILE + u; c >= 0 && !Stick<T>::broken(used, at.rows); --c) {
            const long first = c * TILE, cols = std::min(TILE, sizes.tokens - first), width = whole_vectors(cols);
            read_turned(keys, first, cols, sizes.keys, kp, TILE, key, turned);
            read_turned(values, first, cols, sizes.values, vp, TILE, value, value_turned);
            stick.weights(at.rows, at, first, cols, query, turned, x, falls, used);
            gemm<false>(at.rows, width, sizes.values, up, vp, 1, value_turned, TILE, ds, TILE);
            for (long i = 0; i < at.rows; ++i) slopes(x + i * TILE, ds + i * TILE, falls + i * TILE, cols, left[i]);
            gemm<true>(cols, vp, at.rows, x, 1, TILE, up, vp, dvalues + first * vp, vp);
            gemm<true>(cols, kp, at.rows, ds, 1, TILE, query, kp, dkeys + first * kp, kp);
            gemm<true>(at.rows, kp, cols, ds, TILE, 1, key, kp, sum, kp);
        }
        scale_rows(sum, at.rows, kp, stick.scale);
        write(sum, kp, Rows<T>(dq, batch, head), at.begin, at.rows, sizes.keys);
    }

    // One row: x becomes weights, ds the gradients of the logits; falls are -log(1 - b), 0 for keys that are not seen.
    static void slopes(float* x, float* ds, float* falls, long cols, float& left) {
        for (long j = 0; j < whole_vectors(cols); j += W) {
            const vec weight = weight_of(load(x + j)), rest = exponential(vec{} - load(falls + j));
            store(x + j, weight);
            store(ds + j, load(ds + j) * weight);
            store(falls + j, rest);
        }
        for (long j = cols - 1; j >= 0; --j) {
            left -= ds[j];
            ds[j] = ds[j] * falls[j] - (1.0f - falls[j]) * left;
        }
    }
};

}  // namespace

// sizes: B, key heads, heads, N, D, E, M. q (B,H,N,D), the last N of M tokens, k (B,G,M,D), v (B,G,M,E), of type 0 float or
// 1 bfloat16, and out (B,H,N,E) float, with 4 strides each, in this order. Returns 0, or 1 if memory runs out.
extern "C" int longspan_stick_forward(const void* q, const void* k, const void* v, float* out, const long* strides,
                                      const long* sizes, int type, float scale, int threads) {
    const Sizes all{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], 0, sizes[6]};
    const auto pass = [&](auto element) {
        using T = decltype(element);
        const auto read = [&](const void* data, long i) { return Tensor<const T>{static_cast<const T*>(data), strides + 4 * i}; };
        return each_unit(Forward<T>{{all, read(q, 0), read(k, 1), scale}, read(v, 2), {out, strides + 12}}, threads);
    };
    return type == 0 ? pass(float{}) : pass(bfloat16{});
}

// As longspan_stick_forward, which gave out; grad is float as out is; strides of q, k, v, out, grad, dq, dk, dv.
extern "C" int longspan_stick_backward(const void* q, const void* k, const void* v, const float* out, const float* grad,
                                       void* dq, void* dk, void* dv, const long* strides, const long* sizes, int type,
                                       float scale, int threads) {
    const Sizes all{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], 0, sizes[6]};
    const auto pass = [&](auto element) {
        using T = decltype(element);
        const auto read = [&](const void* data, long i) { return Tensor<const T>{static_cast<const T*>(data), strides + 4 * i}; };
        const auto write = [&](void* data, long i) { return Tensor<T>{static_cast<T*>(data), strides + 4 * i}; };
        return each_unit(Backward<T>{{all, read(q, 0), read(k, 1), scale}, read(v, 2), {out, strides + 12}, {grad, strides + 16},
                                     write(dq, 5), write(dk, 6), write(dv, 7)},
                         threads);
    };
    return type == 0 ? pass(float{}) : pass(bfloat16{});
}
