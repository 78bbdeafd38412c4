// Softmax attention to keys that each query chooses: what the forms for blocks and for single tokens share.
#pragma once
#include "blocks.h"

namespace {

struct Choice {
    long batch, heads, groups, queries, tokens, keys, values, size, picks, choosers;
    const std::int64_t *at, *blocks;  // (B,N) positions; (B,choosers,N,picks) numbers of blocks, negative for none
    float scale;

    Choice(const long* sizes, const std::int64_t* at, const std::int64_t* blocks, float scale)
        : batch(sizes[0]), heads(sizes[1]), groups(sizes[2]), queries(sizes[3]), tokens(sizes[4]), keys(sizes[5]),
          values(sizes[6]), size(sizes[7]), picks(sizes[8]), choosers(sizes[9]), at(at), blocks(blocks), scale(scale) {}

    long kp() const { return whole_vectors(keys); }
    long vp() const { return whole_vectors(values); }
    long count() const { return (tokens + size - 1) / size; }
    long shared() const { return heads / groups; }
    // Calls use(block) for the blocks of a query that have a token up to its position.
    template <class F>
    void each(long batch, long head, long token, F use) const {
        const long last = at[batch * queries + token];
        const std::int64_t* own = blocks + ((batch * choosers + head / (heads / choosers)) * queries + token) * picks;
        for (long s = 0; s < picks; ++s)
            if (own[s] >= 0 && own[s] < count() && own[s] * size <= last) use(own[s]);
    }
};

// The operands of a pass, of one element type: q (B,H,N,D), k (B,G,M,D), v (B,G,M,E), out (B,H,N,E), and backward grad,
// dq, dk, dv, with 4 strides each, in this order; lse (B,H,N) float, contiguous.
template <class T>
struct Operands {
    void* const* data;
    const long* strides;
    float* lse;
    Rows<const T> in(long i, long batch, long head) const {
        return Rows<const T>(Tensor<const T>{static_cast<const T*>(data[i]), strides + 4 * i}, batch, head);
    }
    Rows<T> out(long i, long batch, long head) const {
        return Rows<T>(Tensor<T>{static_cast<T*>(data[i]), strides + 4 * i}, batch, head);
    }
};
enum Operand { Q, K, V, OUT, GRAD, DQ, DK, DV };

// Runs a pass on operands of type 0 float or 1 bfloat16. Returns 0, or 1 if memory runs out.
template <template <class> class Pass, class... More>
int run_pass(const Choice& choice, void* const* data, const long* strides, float* lse, int type, int threads, More... more) {
    if (type == 0) return each_unit(Pass<float>{choice, {data, strides, lse}, more...}, threads);
    return each_unit(Pass<bfloat16>{choice, {data, strides, lse}, more...}, threads);
}

}  // namespace
