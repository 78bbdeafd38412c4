// Softmax attention over listed blocks of keys: out_i = sum_j p_ij v_j, p_ij = exp(s_ij - lse_i), s_ij = scale q_i k_j
// or cap tanh(scale q_i k_j / cap), with a running maximum over the blocks.
#include "blocks.h"

namespace {

template <class T>
struct Forward {
    const Sizes& sizes;
    const Blocks& blocks;
    Tensor<const T> q, k, v;
    Tensor<T> out;
    float* lse;  // (B, H, N)
    float scale, cap;
    Gates gates;

    long units() const { return sizes.batch * sizes.heads * sizes.blocks; }
    long scratch() const {
        const Sizes& s = sizes;
        const long size = blocks.size;
        return size * (2 * s.kp() + 2 * s.vp() + size) + s.kp() * size + 2 * whole_vectors(size);
    }

    void run(long unit, Scratch scratch) const {
        const long row = unit / sizes.blocks, u = unit % sizes.blocks;
        const long batch = row / sizes.heads, head = row % sizes.heads, size = blocks.size;
        const long kp = sizes.kp(), vp = sizes.vp();
        const auto [begin, rows, skip] = span(sizes, size, u);
        float *query = scratch.take(size * kp), *key = scratch.take(size * kp), *value = scratch.take(size * vp);
        float *sum = scratch.take(size * vp), *logits = scratch.take(size * size), *turned = scratch.take(kp * size);
        float *top = scratch.take(whole_vectors(size)), *below = scratch.take(whole_vectors(size));
        const long asked = sizes.start() + begin;  // the token of the first query
        read(Rows<const T>(q, batch, head), begin, rows, sizes.keys, query, kp);
        scale_rows(query, rows, kp, scale);
        std::memset(sum, 0, sizeof(float) * rows * vp);
        for (long i = 0; i < rows; ++i) top[i] = NEVER, below[i] = 0.0f;
        const Rows<const T> keys(k, batch, sizes.group(head)), values(v, batch, sizes.group(head));
        for (long e = blocks.offsets[u]; e < blocks.offsets[u + 1]; ++e) {
            const long first = blocks.keys[e] * size, cols = std::min(size, sizes.tokens - first);
            const long width = whole_vectors(cols);
            if (gates.out_of_reach(row, sizes.tokens, asked, first + cols - 1)) continue;
            read_turned(keys, first, cols, sizes.keys, kp, size, key, turned);
            read(values, first, cols, sizes.values, value, vp);
            gemm<false>(rows, width, sizes.keys, query, kp, 1, turned, size, logits, size);
            if (cap > 0.0f) cap_rows(logits, rows, width, size, cap);
            gates.add(row, sizes.tokens, asked, rows, first, cols, logits, size);
            if (blocks.mask(e, skip) || width > cols) hide(logits, rows, cols, width, size, blocks.mask(e, skip), size);
            for (long i = 0; i < rows; ++i) weigh(logits + i * size, width, top[i], below[i], sum + i * vp, vp);
            gemm<true>(rows, vp, cols, logits, size, 1, value, vp, sum, vp);
        }
        for (long i = 0; i < rows; ++i) {
            const vec by = splat(below[i] > 0.0f ? 1.0f / below[i] : 0.0f);
            for (long j = 0; j < vp; j += W) store(sum + i * vp + j, load(sum + i * vp + j) * by);
            lse[row * sizes.queries + begin + i] = below[i] > 0.0f ? top[i] + std::log(below[i]) : -INFINITY;
        }
        write(sum, vp, Rows<T>(out, batch, head), begin, rows, sizes.values);
    }
};

}  // namespace

// sizes: B, key heads, heads, N, D, E, blocks of queries, M, tokens of a block. q (B,H,N,D), the last N of M tokens, k
// (B,G,M,D), v (B,G,M,E), out (B,H,N,E), of type 0 float or 1 bfloat16, with 4 strides each, in this order; lse (B,H,N)
// float, contiguous. Blocks and gates as in blocks.h; a cap of 0 disables it. Returns 0, or 1 if memory runs out.
extern "C" int longspan_pattern_forward(const void* q, const void* k, const void* v, void* out, float* lse,
                                        const std::int64_t* offsets, const std::int64_t* keys,
                                        const std::int64_t* tiles, const std::uint8_t* masks, const double* sums,
                                        const float* reach, const long* strides,
                                        const long* sizes, int type, float scale, float cap, int threads) {
    const Sizes all{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6], sizes[7]};
    const Blocks blocks{offsets, keys, tiles, masks, sizes[8]};
    const auto pass = [&](auto element) {
        using T = decltype(element);
        return each_unit(Forward<T>{all, blocks, {static_cast<const T*>(q), strides}, {static_cast<const T*>(k), strides + 4},
                                  {static_cast<const T*>(v), strides + 8}, {static_cast<T*>(out), strides + 12}, lse,
                                  scale, cap, {sums, reach}},
                       threads);
    };
    return type == 0 ? pass(float{}) : pass(bfloat16{});
}
