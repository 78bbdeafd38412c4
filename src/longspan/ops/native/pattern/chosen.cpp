// Softmax attention in which each query chooses blocks of keys: out_i = sum_j p_ij v_j over the keys of its blocks up to its
// own position, and the gradients. The queries of a block are gathered, so that a block of keys is read once per head.
#include "blocks.h"

namespace {

constexpr long TILE = 64;   // queries that are gathered together
constexpr long SPAN = 128;  // keys of a block that are read together

struct Choice {
    long batch, heads, groups, queries, tokens, keys, values, size, picks, choosers;
    const std::int64_t *at, *blocks;  // (B,N) positions; (B,choosers,N,picks) numbers of blocks, negative for none
    float scale;
    long kp() const { return whole_vectors(keys); }
    long vp() const { return whole_vectors(values); }
    long count() const { return (tokens + size - 1) / size; }
    long shared() const { return heads / groups; }
    long rows() const { return shared() * queries; }  // queries that read one head of keys
    long units() const { return batch * groups; }
    const std::int64_t* of(long batch, long head, long token) const {
        return blocks + ((batch * choosers + head / (heads / choosers)) * queries + token) * picks;
    }
    long visits() const { return rows() * picks + count() + 1; }  // floats, which hold 32-bit numbers
};

// The rows that visit each block, in ascending order: rows[e] for e in begin[c] ... begin[c + 1].
struct Visits {
    std::int32_t *begin, *rows;

    Visits(const Choice& choice, long unit, Scratch& scratch)
        : begin(reinterpret_cast<std::int32_t*>(scratch.take(choice.count() + 1))),
          rows(reinterpret_cast<std::int32_t*>(scratch.take(choice.rows() * choice.picks))) {
        const long count = choice.count();
        std::memset(begin, 0, sizeof(std::int32_t) * (count + 1));
        each(choice, unit, [&](long block, long) { ++begin[block]; });
        for (long c = 0, total = 0; c <= count; ++c) total += begin[c], begin[c] = static_cast<std::int32_t>(total);
        // Filled from the end, after which begin[c] is the start of a block.
        for (long row = choice.rows() - 1; row >= 0; --row)
            one(choice, unit, row, [&](long block, long of) { rows[--begin[block]] = static_cast<std::int32_t>(of); });
    }

    template <class F>
    static void one(const Choice& choice, long unit, long row, F use) {
        const long batch = unit / choice.groups, head = unit % choice.groups * choice.shared() + row / choice.queries;
        const long token = row % choice.queries, last = choice.at[batch * choice.queries + token];
        const std::int64_t* blocks = choice.of(batch, head, token);
        for (long s = 0; s < choice.picks; ++s)
            if (blocks[s] >= 0 && blocks[s] < choice.count() && blocks[s] * choice.size <= last) use(blocks[s], row);
    }
    template <class F>
    static void each(const Choice& choice, long unit, F use) {
        for (long row = 0; row < choice.rows(); ++row) one(choice, unit, row, use);
    }
};

// Keys ``first`` ... ``first + cols`` and the rows that visit them.
struct KeyPart {
    long first, cols, width;
};

template <class F>
void each_part(const Choice& choice, const Visits& visits, F use) {
    for (long c = 0; c < choice.count(); ++c)
        for (long first = c * choice.size, end = std::min(first + choice.size, choice.tokens); first < end; first += SPAN)
            if (visits.begin[c] < visits.begin[c + 1]) {
                const long cols = std::min(SPAN, end - first);
                use(c, KeyPart{first, cols, whole_vectors(cols)});
            }
}

// Rows of one unit, gathered into out (n, ld).
template <class T>
void gather(const Choice& choice, Tensor<const T> t, long unit, const std::int32_t* rows, long n, long width, float* out, long ld) {
    for (long i = 0; i < n; ++i) {
        const long head = unit % choice.groups * choice.shared() + rows[i] / choice.queries;
        read_row(Rows<const T>(t, unit / choice.groups, head), rows[i] % choice.queries, width, out + i * ld, ld, same);
    }
}

// Logits of a tile of rows: NEVER after the position of a query, and beyond the last key.
inline void hide_later(const Choice& choice, long unit, const std::int32_t* rows, long n, KeyPart part, float* x) {
    const std::int64_t* at = choice.at + unit / choice.groups * choice.queries;
    for (long i = 0; i < n; ++i)
        for (long j = std::max(0L, std::min(part.cols, at[rows[i] % choice.queries] - part.first + 1)); j < part.width; ++j)
            x[i * SPAN + j] = NEVER;
}

template <class T>
struct Forward {
    const Choice& choice;
    Tensor<const T> q, k, v;
    Tensor<T> out;
    float* lse;  // (B,H,N)

    long units() const { return choice.units(); }
    long scratch() const {
        const Choice& c = choice;
        return c.visits() + c.rows() * c.vp() + 2 * whole_vectors(c.rows()) + TILE * (c.kp() + c.vp() + SPAN) +
               SPAN * (2 * c.kp() + c.vp());
    }

    void run(long unit, Scratch scratch) const {
        const long kp = choice.kp(), vp = choice.vp(), rows = choice.rows(), batch = unit / choice.groups;
        float *sum = scratch.take(rows * vp), *top = scratch.take(whole_vectors(rows)), *below = scratch.take(whole_vectors(rows));
        float *query = scratch.take(TILE * kp), *read_value = scratch.take(TILE * vp), *logits = scratch.take(TILE * SPAN);
        float *key = scratch.take(SPAN * kp), *turned = scratch.take(SPAN * kp), *value = scratch.take(SPAN * vp);
        const Visits visits(choice, unit, scratch);
        std::memset(sum, 0, sizeof(float) * rows * vp);
        for (long i = 0; i < rows; ++i) top[i] = NEVER, below[i] = 0.0f;
        const Rows<const T> keys(k, batch, unit % choice.groups), values(v, batch, unit % choice.groups);
        each_part(choice, visits, [&](long c, KeyPart part) {
            read_turned(keys, part.first, part.cols, choice.keys, kp, SPAN, key, turned);
            read(values, part.first, part.cols, choice.values, value, vp);
            for (long e = visits.begin[c]; e < visits.begin[c + 1]; e += TILE) {
                const long n = std::min<long>(TILE, visits.begin[c + 1] - e);
                const std::int32_t* at = visits.rows + e;
                gather(choice, q, unit, at, n, choice.keys, query, kp);
                scale_rows(query, n, kp, choice.scale);
                gemm<false>(n, part.width, choice.keys, query, kp, 1, turned, SPAN, logits, SPAN);
                hide_later(choice, unit, at, n, part, logits);
                for (long i = 0; i < n; ++i)
                    weigh(logits + i * SPAN, part.width, top[at[i]], below[at[i]], sum + at[i] * vp, vp);
                gemm<false>(n, vp, part.cols, logits, SPAN, 1, value, vp, read_value, vp);
                for (long i = 0; i < n; ++i) add_row(sum + at[i] * vp, read_value + i * vp, vp);
            }
        });
        for (long i = 0; i < rows; ++i) {
            const long head = unit % choice.groups * choice.shared() + i / choice.queries, token = i % choice.queries;
            scale_rows(sum + i * vp, 1, vp, below[i] > 0.0f ? 1.0f / below[i] : 0.0f);
            write(sum + i * vp, vp, Rows<T>(out, batch, head), token, 1, choice.values);
            lse[(batch * choice.heads + head) * choice.queries + token] =
                below[i] > 0.0f ? top[i] + std::log(below[i]) : -INFINITY;
        }
    }
};

template <class T>
struct Backward {
    const Choice& choice;
    Tensor<const T> q, k, v, out, grad;
    Tensor<T> dq, dk, dv;
    const float* lse;  // (B,H,N)

    long units() const { return choice.units(); }
    long scratch() const {
        const Choice& c = choice;
        return c.visits() + c.rows() * c.kp() + whole_vectors(c.rows()) + TILE * (2 * c.kp() + 2 * c.vp() + 2 * SPAN) +
               (2 * SPAN + c.tokens) * (c.kp() + c.vp());
    }

    void run(long unit, Scratch scratch) const {
        const long kp = choice.kp(), vp = choice.vp(), rows = choice.rows();
        const long batch = unit / choice.groups, group = unit % choice.groups;
        float *sum = scratch.take(rows * kp), *delta = scratch.take(whole_vectors(rows));
        float *query = scratch.take(TILE * kp), *found = scratch.take(TILE * kp), *up = scratch.take(TILE * vp);
        float *output = scratch.take(TILE * vp), *p = scratch.take(TILE * SPAN), *ds = scratch.take(TILE * SPAN);
        float *key = scratch.take(SPAN * kp), *key_turned = scratch.take(SPAN * kp), *value = scratch.take(SPAN * vp);
        float* value_turned = scratch.take(SPAN * vp);
        float *dkeys = scratch.take(choice.tokens * kp), *dvalues = scratch.take(choice.tokens * vp);
        const Visits visits(choice, unit, scratch);
        std::memset(sum, 0, sizeof(float) * rows * kp);
        std::memset(dkeys, 0, sizeof(float) * choice.tokens * kp);
        std::memset(dvalues, 0, sizeof(float) * choice.tokens * vp);
        for (long i = 0; i < rows; ++i) {
            const std::int32_t row = static_cast<std::int32_t>(i);
            gather(choice, grad, unit, &row, 1, choice.values, up, vp);
            gather(choice, out, unit, &row, 1, choice.values, output, vp);
            delta[i] = ::sum(dot_lanes(up, output, vp));
        }
        const Rows<const T> keys(k, batch, group), values(v, batch, group);
        const float* logs = lse + (batch * choice.heads + group * choice.shared()) * choice.queries;  // by row
        each_part(choice, visits, [&](long c, KeyPart part) {
            read_turned(keys, part.first, part.cols, choice.keys, kp, SPAN, key, key_turned);
            read_turned(values, part.first, part.cols, choice.values, vp, SPAN, value, value_turned);
            for (long e = visits.begin[c]; e < visits.begin[c + 1]; e += TILE) {
                const long n = std::min<long>(TILE, visits.begin[c + 1] - e);
                const std::int32_t* at = visits.rows + e;
                gather(choice, q, unit, at, n, choice.keys, query, kp);
                scale_rows(query, n, kp, choice.scale);
                gather(choice, grad, unit, at, n, choice.values, up, vp);
                gemm<false>(n, part.width, choice.keys, query, kp, 1, key_turned, SPAN, p, SPAN);
                hide_later(choice, unit, at, n, part, p);
                gemm<false>(n, part.width, choice.values, up, vp, 1, value_turned, SPAN, ds, SPAN);
                for (long i = 0; i < n; ++i)
                    slopes(p + i * SPAN, ds + i * SPAN, part.width, logs[at[i]], delta[at[i]], 0.0f);
                gemm<true>(part.cols, vp, n, p, 1, SPAN, up, vp, dvalues + part.first * vp, vp);
                gemm<true>(part.cols, kp, n, ds, 1, SPAN, query, kp, dkeys + part.first * kp, kp);
                gemm<false>(n, kp, part.cols, ds, SPAN, 1, key, kp, found, kp);
                for (long i = 0; i < n; ++i) add_row(sum + at[i] * kp, found + i * kp, kp);
            }
        });
        scale_rows(sum, rows, kp, choice.scale);
        for (long r = 0; r < choice.shared(); ++r)
            write(sum + r * choice.queries * kp, kp, Rows<T>(dq, batch, group * choice.shared() + r), 0, choice.queries,
                  choice.keys);
        write(dkeys, kp, Rows<T>(dk, batch, group), 0, choice.tokens, choice.keys);
        write(dvalues, vp, Rows<T>(dv, batch, group), 0, choice.tokens, choice.values);
    }
};

inline Choice choice_of(const long* sizes, const std::int64_t* at, const std::int64_t* blocks, float scale) {
    return {sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6], sizes[7], sizes[8], sizes[9], at, blocks, scale};
}

}  // namespace

// sizes: B, H, G, N, M, D, E, keys of a block, blocks per query, heads that choose. q (B,H,N,D) at the positions at (B,N), k
// (B,G,M,D), v (B,G,M,E), out (B,H,N,E), of type 0 float or 1 bfloat16, with 4 strides each, in this order; lse (B,H,N) float,
// at and blocks int64, contiguous. Returns 0, or 1 if memory runs out.
extern "C" int longspan_chosen_forward(const void* q, const void* k, const void* v, void* out, float* lse,
                                       const std::int64_t* at, const std::int64_t* blocks, const long* strides,
                                       const long* sizes, int type, float scale, int threads) {
    const Choice choice = choice_of(sizes, at, blocks, scale);
    const auto pass = [&](auto element) {
        using T = decltype(element);
        const auto read = [&](const void* data, long i) { return Tensor<const T>{static_cast<const T*>(data), strides + 4 * i}; };
        return each_unit(Forward<T>{choice, read(q, 0), read(k, 1), read(v, 2), {static_cast<T*>(out), strides + 12}, lse}, threads);
    };
    return type == 0 ? pass(float{}) : pass(bfloat16{});
}

// As longspan_chosen_forward, which gave out and lse; strides of q, k, v, out, grad, dq, dk, dv.
extern "C" int longspan_chosen_backward(const void* q, const void* k, const void* v, const void* out, const void* grad,
                                        void* dq, void* dk, void* dv, const float* lse, const std::int64_t* at,
                                        const std::int64_t* blocks, const long* strides, const long* sizes, int type,
                                        float scale, int threads) {
    const Choice choice = choice_of(sizes, at, blocks, scale);
    const auto pass = [&](auto element) {
        using T = decltype(element);
        const auto read = [&](const void* data, long i) { return Tensor<const T>{static_cast<const T*>(data), strides + 4 * i}; };
        const auto write = [&](void* data, long i) { return Tensor<T>{static_cast<T*>(data), strides + 4 * i}; };
        return each_unit(Backward<T>{choice, read(q, 0), read(k, 1), read(v, 2), read(out, 3), read(grad, 4), write(dq, 5),
                                     write(dk, 6), write(dv, 7), lse},
                         threads);
    };
    return type == 0 ? pass(float{}) : pass(bfloat16{});
}
