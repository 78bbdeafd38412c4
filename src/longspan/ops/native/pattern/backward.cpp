// The gradients of softmax attention over listed blocks of keys: p_ij = exp(s_ij - lse_i), then
// dS_ij = p_ij (dO_i v_j - dO_i o_i) ds_ij / d(scale q_i k_j), dq = scale dS k, dk = scale dS^T q, dv = p^T dO.
#include "blocks.h"

namespace {

template <class T>
struct Backward {
    const Sizes& sizes;
    const Blocks& blocks;
    Tensor<const T> q, k, v, out, grad;
    Tensor<T> dq, dk, dv;
    const float* lse;  // (B, H, N)
    float scale, cap;
    Gates gates;
    double* dsums;  // (B, H, M), zero before; null without gates

    long units() const { return sizes.batch * sizes.groups; }
    long scratch() const {
        const Sizes& s = sizes;
        const long size = blocks.size;
        return s.tokens * (s.kp() + s.vp()) + size * (4 * s.kp() + 4 * s.vp() + 2 * size) + 4 * whole_vectors(size);
    }

    // All heads that share one head of keys and values, to whose gradients they add.
    void run(long unit, Scratch scratch) const {
        const long batch = unit / sizes.groups, group = unit % sizes.groups, shared = sizes.heads / sizes.groups;
        float *keys = scratch.take(sizes.tokens * sizes.kp()), *values = scratch.take(sizes.tokens * sizes.vp());
        std::memset(keys, 0, sizeof(float) * sizes.tokens * sizes.kp());
        std::memset(values, 0, sizeof(float) * sizes.tokens * sizes.vp());
        for (long head = group * shared; head < (group + 1) * shared; ++head)
            for (long u = 0; u < sizes.blocks; ++u) block(batch, head, u, keys, values, scratch);
        write(keys, sizes.kp(), Rows<T>(dk, batch, group), 0, sizes.tokens, sizes.keys);
        write(values, sizes.vp(), Rows<T>(dv, batch, group), 0, sizes.tokens, sizes.values);
    }

    void block(long batch, long head, long u, float* dkeys, float* dvalues, Scratch scratch) const {
        const long size = blocks.size, kp = sizes.kp(), vp = sizes.vp(), group = sizes.group(head);
        const auto [begin, rows, skip] = span(sizes, size, u);
        float *query = scratch.take(size * kp), *key = scratch.take(size * kp), *key_turned = scratch.take(kp * size);
        float *sum = scratch.take(size * kp), *up = scratch.take(size * vp), *value = scratch.take(size * vp);
        float *value_turned = scratch.take(vp * size), *output = scratch.take(size * vp);
        float *p = scratch.take(size * size), *ds = scratch.take(size * size);
        float *delta = scratch.take(whole_vectors(size)), *logs = scratch.take(whole_vectors(size));
        double* column = reinterpret_cast<double*>(scratch.take(2 * whole_vectors(size)));
        const long row = batch * sizes.heads + head, asked = sizes.start() + begin;
        read(Rows<const T>(q, batch, head), begin, rows, sizes.keys, query, kp);
        scale_rows(query, rows, kp, scale);
        read(Rows<const T>(grad, batch, head), begin, rows, sizes.values, up, vp);
        read(Rows<const T>(out, batch, head), begin, rows, sizes.values, output, vp);
        for (long i = 0; i < rows; ++i) {
            delta[i] = ::sum(dot_lanes(up + i * vp, output + i * vp, vp));
            logs[i] = lse[row * sizes.queries + begin + i];
        }
        std::memset(sum, 0, sizeof(float) * rows * kp);
        const Rows<const T> keys(k, batch, group), values(v, batch, group);
        for (long e = blocks.offsets[u]; e < blocks.offsets[u + 1]; ++e) {
            const long first = blocks.keys[e] * size, cols = std::min(size, sizes.tokens - first);
            const long width = whole_vectors(cols);
            if (gates.out_of_reach(row, sizes.tokens, asked, first + cols - 1)) continue;
            read_turned(keys, first, cols, sizes.keys, kp, size, key, key_turned);
            read_turned(values, first, cols, sizes.values, vp, size, value, value_turned);
            gemm<false>(rows, width, sizes.keys, query, kp, 1, key_turned, size, p, size);
            if (cap > 0.0f) cap_rows(p, rows, width, size, cap);
            gates.add(row, sizes.tokens, asked, rows, first, cols, p, size);
            if (blocks.mask(e, skip) || width > cols) hide(p, rows, cols, width, size, blocks.mask(e, skip), size);
            gemm<false>(rows, width, sizes.values, up, vp, 1, value_turned, size, ds, size);
            for (long i = 0; i < rows; ++i) slopes(p + i * size, ds + i * size, width, logs[i], delta[i], cap);
            if (dsums) {
                double* own = dsums + row * sizes.tokens;
                take(ds, rows, cols, size, own + first, own + asked, column);
            }
            gemm<true>(cols, vp, rows, p, 1, size, up, vp, dvalues + first * vp, vp);
            gemm<true>(cols, kp, rows, ds, 1, size, query, kp, dkeys + first * kp, kp);
            gemm<true>(rows, kp, cols, ds, size, 1, key, kp, sum, kp);
        }
        scale_rows(sum, rows, kp, scale);
        write(sum, kp, Rows<T>(dq, batch, head), begin, rows, sizes.keys);
    }

    // The logits of a key fall with its sum, and those of a query rise with its own. The gradients of a row add up to zero,
    // but for their rounding, which the sums over later tokens would collect.
    static void take(const float* ds, long rows, long cols, long size, double* of_keys, double* of_queries, double* column) {
        for (long j = 0; j < cols; ++j) column[j] = 0.0;
        for (long i = 0; i < rows; ++i, ds += size) {
            double lanes[W] = {};
            for (long j = 0; j < cols; ++j) column[j] += ds[j];
            for (long j = 0; j < cols; j += W)
                for (long l = 0; l < W; ++l) lanes[l] += ds[j + l];
            for (long l = 0; l < W; ++l) of_queries[i] += lanes[l];
        }
        for (long j = 0; j < cols; ++j) of_keys[j] -= column[j];
    }
};

}  // namespace

// As longspan_pattern_forward, which gave out and lse; out, grad (B,H,N,E), dq (B,H,N,D), dk (B,G,M,D), dv (B,G,M,E); strides
// of q, k, v, out, grad, dq, dk, dv. lse and out may be those of a softmax over more keys than these blocks have.
extern "C" int longspan_pattern_backward(const void* q, const void* k, const void* v, const void* out, const void* grad,
                                         void* dq, void* dk, void* dv, const float* lse, const std::int64_t* offsets,
                                         const std::int64_t* keys, const std::int64_t* tiles,
                                         const std::uint8_t* masks, const double* sums, const float* reach, double* dsums,
                                         const long* strides, const long* sizes, int type,
                                         float scale, float cap, int threads) {
    const Sizes all{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6], sizes[7]};
    const Blocks blocks{offsets, keys, tiles, masks, sizes[8]};
    const auto pass = [&](auto element) {
        using T = decltype(element);
        const auto read = [&](const void* data, long i) { return Tensor<const T>{static_cast<const T*>(data), strides + 4 * i}; };
        const auto write = [&](void* data, long i) { return Tensor<T>{static_cast<T*>(data), strides + 4 * i}; };
        return each_unit(Backward<T>{all, blocks, read(q, 0), read(k, 1), read(v, 2), read(out, 3), read(grad, 4),
                                    write(dq, 5), write(dk, 6), write(dv, 7), lse, scale, cap, {sums, reach}, dsums},
                        threads);
    };
    return type == 0 ? pass(float{}) : pass(bfloat16{});
}
