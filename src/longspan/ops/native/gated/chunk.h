// One chunk of the recurrence with decay and delta rule, for both passes over a sequence. With G_i the sum of the log decays
// up to token i of the chunk, S the state before it, and all exponents at most 0 if the log decays are:
//   A_ij = sum_d q_id k_jd e^(G_id - G_jd), j <= i      x_i = beta_i e_i, e_i = v_i - (e^G_i k_i)^T S - sum_{j<i} B_ij x_j
//   B_ij = sum_d k_id k_jd e^(G_id - G_jd), j < i       o_i = (e^G_i q_i)^T S + sum_{j<=i} A_ij x_j, or x_i = v_i
// Source: Yang et al. 2024 (2412.06464), section 3.3, by forward substitution, since the state before is known.
#pragma once
#include <initializer_list>

#include "../linear/rows.h"

namespace {

enum Decay { no_decay, by_head, by_channel, by_value };  // the last only for single tokens

// The arguments of a call that both passes need. Consecutive value heads share a head of queries and keys. A row is one head
// of one sequence, and its tokens are counted from the start of the sequence.
struct Gates {
    long batch, key_heads, heads, tokens, keys, values;
    int decay, delta;
    float scale;
    const std::uint8_t* mask;      // (B, N), may be null
    const std::int64_t* segments;  // (B, N), may be null
    const float *log_decay, *beta;  // with 4 and 3 strides: channels are the last
    const long *decay_strides, *beta_strides;
    const std::int64_t* offsets;  // (batch + 1): the starts of sequences packed into one row of memory; may be null
    bool normalize;               // queries and keys to length 1

    long rows() const { return batch * heads; }
    long kp() const { return whole_vectors(keys); }
    long vp() const { return whole_vectors(values); }
    long key_head(long head) const { return head / (heads / key_heads); }
    long tokens_of(long sequence) const { return offsets ? offsets[sequence + 1] - offsets[sequence] : tokens; }
    // The place of its first token among all tokens, row by row.
    long first_token(long sequence) const { return offsets ? offsets[sequence] : sequence * tokens; }
    template <class T>
    Rows<T> of_head(Tensor<T> t, long sequence, long head) const {
        Rows<T> rows(t, offsets ? 0 : sequence, head);
        if (offsets) rows.data += offsets[sequence] * rows.token;
        return rows;
    }
    template <class T>
    Rows<T> of(Tensor<T> t, long row) const {
        return of_head(t, row / heads, row % heads);
    }
    template <class T>
    Rows<T> of_keys(Tensor<T> t, long row) const {
        return of_head(t, row / heads, key_head(row % heads));
    }
    const std::uint8_t* mask_of(long row) const { return mask ? mask + first_token(row / heads) : nullptr; }
    const std::int64_t* segments_of(long sequence) const {
        return segments ? segments + first_token(sequence) : nullptr;
    }
    bool hidden(long sequence, long token) const { return mask && !mask[first_token(sequence) + token]; }

    // The number of the state before a span of a row, among all states that the forward pass keeps. A packed sequence has
    // room for one more state than whole spans end in it, which is enough for any start.
    long start_of(long row, long span) const;
};

constexpr long SPAN = 16 * C;  // tokens between two states that the forward pass keeps for the backward pass
inline long spans(long tokens) { return (tokens + SPAN - 1) / SPAN; }

inline long Gates::start_of(long row, long span) const {
    const long s = row / heads, head = row % heads;
    if (!offsets) return row * spans(tokens) + span;
    const long room = offsets[s + 1] / SPAN - offsets[s] / SPAN + 1;
    return (offsets[s] / SPAN + s) * heads + head * room + span;
}

// e^x, or 0 if that is below the smallest normal number.
inline vec fading(vec x) {
    x = pick(x > splat(88.0f), splat(88.0f), x);
    return pick(x < splat(-86.0f), vec{}, exponential(x));
}

inline ivec lanes_from(long j) {
    ivec lane;
    for (long i = 0; i < W; ++i) lane[i] = static_cast<std::int32_t>(j + i);
    return lane;
}

// Row i of a lower triangle as written by lower_product, times the row of factors if there is one; zero from column
// ``end`` on.
inline void finish_row(float* row, const float* factors, long i, long n, long end) {
    const long strip = i / STRIP * STRIP + STRIP, width = whole_vectors(strip < n ? strip : n);
    for (long j = 0; j < width; j += W) {
        const vec x = factors ? load(row + j) * load(factors + j) : load(row + j);
        store(row + j, pick(lanes_from(j) < static_cast<std::int32_t>(end), x, vec{}));
    }
}

inline void scale_row(float* out, const float* x, const float* factors, long width) {
    for (long j = 0; j < width; j += W) store(out + j, load(x + j) * load(factors + j));
}
inline void scale_row(float* out, const float* x, float factor, long width) {
    for (long j = 0; j < width; j += W) store(out + j, load(x + j) * factor);
}

template <class T>
struct Operands {
    Tensor<const T> q, k, v;

    static long floats(const Gates& gates) { return C * (2 * gates.kp() + gates.vp() + 2); }  // of an Operand
};

// A chunk of one head: queries times scale and keys (C, kp), values (C, vp); masked tokens are zero. The factors
// of normalized queries and keys (C).
struct Operand {
    float *q, *k, *v, *q_factor, *k_factor;

    Operand(const Gates& gates, Scratch& scratch)
        : q(scratch.take(C * gates.kp())), k(scratch.take(C * gates.kp())), v(scratch.take(C * gates.vp())),
          q_factor(scratch.take(C)), k_factor(scratch.take(C)) {}
};

// x / sqrt(|x|^2 + 1e-6) times ``scale``, row by row.
inline void normalize_rows(float* x, long n, long ld, float scale, float* factors) {
    for (long i = 0; i < n; ++i, x += ld) {
        factors[i] = 1.0f / std::sqrt(sum(dot_lanes(x, x, ld)) + 1e-6f);
        scale_row(x, x, factors[i] * scale, ld);
    }
}
// Their gradients: of normalized rows y, times scale, that of x is factor (grad - y (y . grad)) without the scale.
inline void normalize_rows_back(const float* y, long n, long ld, float scale, const float* factors, float* grad) {
    for (long i = 0; i < n; ++i, y += ld, grad += ld) {
        const float along = scale == 0.0f ? 0.0f : sum(dot_lanes(y, grad, ld)) / (scale * scale);
        for (long j = 0; j < ld; j += W) store(grad + j, (load(grad + j) - load(y + j) * along) * factors[i]);
    }
}

template <class T>
void gather_queries(const Operands<T>& from, const Gates& gates, Tokens at, Operand to) {
    const vec scale = splat(gates.normalize ? 1.0f : gates.scale);
    pack(gates.of_keys(from.q, at.row), at, gates.keys, gates.mask_of(at.row), to.q, gates.kp(),
         [=](vec x) { return x * scale; });
    if (gates.normalize) normalize_rows(to.q, at.n, gates.kp(), gates.scale, to.q_factor);
}
template <class T>
void gather_keys(const Operands<T>& from, const Gates& gates, Tokens at, Operand to) {
    pack(gates.of_keys(from.k, at.row), at, gates.keys, gates.mask_of(at.row), to.k, gates.kp(), same);
    if (gates.normalize) normalize_rows(to.k, at.n, gates.kp(), 1.0f, to.k_factor);
}
template <class T>
void gather_values(const Operands<T>& from, const Gates& gates, Tokens at, Operand to) {
    pack(gates.of(from.v, at.row), at, gates.values, gates.mask_of(at.row), to.v, gates.vp(), same);
}

// Pairs of a query and a key of one strip, rounded up to vectors of all widths.
constexpr long PAIRS = 48;
static_assert(PAIRS >= STRIP * (STRIP + 1) / 2 && PAIRS % 16 == 0);

// Products with decays per channel are computed strip by strip. G is the sum of the log decays up to a token of the chunk;
// alpha (C, ld) holds e^(log decay). A factor e^(G_i - G_j) of a token i of the strip and an earlier one j is the product of
// two numbers up to 1, since the one before the strip lies between them.

// out_i = e^(G_i - G) x_i for the tokens of a strip, with G before it; early: e^(G_(i-1) - G) x_i.
inline void since(const float* alpha, long ld, long first, long end, const float* x, float* out, bool early = false) {
    for (long d = 0; d < ld; d += W) {
        vec passed = splat(1.0f);
        for (long i = first; i < end; ++i) {
            const vec now = passed * load(alpha + i * ld + d);
            store(out + (i - first) * ld + d, (early ? passed : now) * load(x + i * ld + d));
            passed = now;
        }
    }
}

// into_i += e^(G_i - G) x_i, or the same with ``early``, for x (STRIP, ld).
inline void add_since(const float* alpha, long ld, long first, long end, const float* x, float* into, bool early = false) {
    for (long d = 0; d < ld; d += W) {
        vec passed = splat(1.0f);
        for (long i = first; i < end; ++i) {
            const vec now = passed * load(alpha + i * ld + d);
            float* row = into + i * ld + d;
            store(row, load(row) + (early ? passed : now) * load(x + (i - first) * ld + d));
            passed = now;
        }
    }
}

// The first ``rows`` rows of x (C, ld), times the decays of all tokens of a strip.
inline void decay_rows(const float* alpha, long ld, long first, long end, float* x, long rows) {
    for (long d = 0; rows && d < ld; d += W) {
        vec passed = load(alpha + first * ld + d);
        for (long i = first + 1; i < end; ++i) passed *= load(alpha + i * ld + d);
        for (long j = 0; j < rows; ++j) store(x + j * ld + d, load(x + j * ld + d) * passed);
    }
}

// A strip's rows of a product (C, C) of n tokens from the lanes (PAIRS, W) of its pairs j <= i; row i is zero from column
// i + own on.
inline void finish_strip(const float* pairs, long first, long end, long own, long n, float* out) {
    float sums[PAIRS];
    sum_lanes(pairs, (end - first) * (end - first + 1) / 2, sums);
    const float* from = sums;
    for (long i = first; i < end; from += i + 1 - first, ++i) {
        std::memcpy(out + i * C + first, from, sizeof(float) * (i + 1 - first));
        finish_row(out + i * C, nullptr, i, n, i + own);
    }
}

// One chunk of one head in scratch memory; (C, kp) unless noted.
struct Chunk {
    const Gates& gates;
    long kp, vp, n = 0;
    float *q, *k, *v;              // as in Operand
    float *read, *entering, *left; // e^G q, e^G k, e^(G_end - G) k
    float *alpha, *grown;          // e^(log decay) by channel, and e^G: (C, kp)
    float *a, *b, *weight;         // A, B and e^(G_i - G_j) by head: (C, C)
    float *whole;                  // e^G_end (kp)
    float *start, *beta;           // e^G by head, step sizes: (C)
    float *turned, *lanes, *more;  // (kp or vp, C), (PAIRS, W) twice
    float *e, *x;                  // errors and what is written (C, vp)
    float* near;                   // queries or keys of a strip, e^(G_i - G) x_i with G before it: (STRIP, kp)

    Chunk(const Gates& gates, Scratch& scratch) : gates(gates), kp(gates.kp()), vp(gates.vp()) {
        for (float** p : {&read, &entering, &left, &alpha, &grown}) *p = scratch.take(C * kp);
        for (float** p : {&e, &x}) *p = scratch.take(C * vp);
        for (float** p : {&a, &b, &weight}) *p = scratch.take(C * C);
        for (float** p : {&lanes, &more}) *p = scratch.take(PAIRS * W);
        whole = scratch.take(kp), start = scratch.take(C), beta = scratch.take(C);
        turned = scratch.take(C * (kp > vp ? kp : vp)), near = scratch.take(STRIP * kp);
    }
    static long size(const Gates& gates) {
        const long kp = gates.kp(), vp = gates.vp();
        return C * (5 * kp + 2 * vp + 3 * C + 2 + (kp > vp ? kp : vp)) + (STRIP + 1) * kp + 2 * PAIRS * W;
    }

    // Tokens begin ... begin + count of a head, and everything that does not depend on the state; reads: queries too.
    void enter(Operand operand, long row, long begin, long count, bool reads) {
        n = count, q = operand.q, k = operand.k, v = operand.v;
        const long batch = row / gates.heads;
        stage(mapping);
        if (gates.delta) {
            const Rows<const float> rates = gates.of(Tensor<const float>{gates.beta, gates.beta_strides}, row);
            for (long i = 0; i < n; ++i) beta[i] = rates.data[(begin + i) * rates.token];
        }
        for (long i = 0; gates.mask && i < n; ++i)
            if (gates.hidden(batch, begin + i)) beta[i] = 0.0f;
        const Rows<const float> decays = gates.of(Tensor<const float>{gates.log_decay, gates.decay_strides}, row);
        switch (gates.decay) {
            case by_head: return weigh(decays, batch, begin, reads);
            case by_channel: return sweep(decays, batch, begin, reads);
            default: return multiply(nullptr, reads);
        }
    }

    // e_i and x_i, given the state s (D, vp) before the chunk, or null for zeros.
    void solve(const float* s) {
        if (!gates.delta) {
            x = v;
            return;
        }
        float* seen = e;
        stage(from_state);
        if (s)
            gemm<false>(n, vp, gates.keys, entering, kp, 1, s, vp, seen, vp);
        else
            std::memset(seen, 0, sizeof(float) * n * vp);
        stage(solving);
        for (long first = 0; first < n; first += STRIP) {
            const long end = first + STRIP < n ? first + STRIP : n;
            gemm<true>(end - first, vp, first, b + first * C, C, 1, x, vp, seen + first * vp, vp);
            for (long i = first; i < end; ++i) {
                float* row = seen + i * vp;
                for (long j = 0; j < vp; j += W) {
                    vec acc = load(row + j);
                    for (long p = first; p < i; ++p) acc += b[i * C + p] * load(x + p * vp + j);
                    const vec error = load(v + i * vp + j) - acc;
                    store(row + j, error);
                    store(x + i * vp + j, error * beta[i]);
                }
            }
        }
    }

    // The state after the chunk, given that before it.
    void advance(float* s) const {
        stage(updating);
        if (gates.decay != no_decay)
            for (long d = 0; d < gates.keys; ++d) scale_row(s + d * vp, s + d * vp, whole[d], vp);
        gemm<true>(gates.keys, vp, n, left, 1, kp, x, vp, s, vp);
    }

   private:
    // A and B from matrix products, times factors (C, C) if there are any.
    void multiply(const float* factors, bool reads) {
        stage(scoring);
        if (gates.decay == no_decay) read = q, entering = left = k;
        transpose(k, kp, turned, C, whole_vectors(n), kp);
        if (reads) lower_product(n, gates.keys, q, kp, turned, C, a, C);
        if (gates.delta) lower_product(n, gates.keys, k, kp, turned, C, b, C);
        for (long i = 0; i < n; ++i) {
            const float* row = factors ? factors + i * C : nullptr;
            if (reads) finish_row(a + i * C, row, i, n, i + 1);
            if (gates.delta) finish_row(b + i * C, row, i, n, i);
        }
    }

    void weigh(Rows<const float> decays, long batch, long begin, bool reads) {
        vec sum[C / W] = {};
        float total = 0.0f;
        for (long i = 0; i < n; ++i) {
            const float g = gates.hidden(batch, begin + i) ? 0.0f : decays.data[(begin + i) * decays.token];
            total += g;
            start[i] = total;
            // G_i - G_j grows by one term per row, so there is no cancellation.
            for (long j = 0; j < C; j += W) {
                const ivec lane = lanes_from(j);
                vec& s = sum[j / W];
                s = pick(lane < static_cast<std::int32_t>(i), s + g, vec{});
                store(weight + i * C + j, pick(lane > static_cast<std::int32_t>(i), vec{}, fading(s)));
            }
        }
        for (long i = 0; i < n; i += W) store(start + i, fading(load(start + i)));
        multiply(weight, reads);
        stage(mapping);
        const float* leaving = weight + (n - 1) * C;
        for (long i = 0; i < n; ++i) {
            if (reads) scale_row(read + i * kp, q + i * kp, start[i], kp);
            if (gates.delta) scale_row(entering + i * kp, k + i * kp, start[i], kp);
            scale_row(left + i * kp, k + i * kp, leaving[i], kp);
        }
        for (long j = 0; j < kp; j += W) store(whole + j, splat(start[n - 1]));
    }

    // With a decay per channel, A and B are products of matrices for the keys before a strip, where left_j is e^(G - G_j) k_j
    // with G before it. Within the strip keys decay token by token; before token i, left_j is e^(G_i - G_j) k_j. At the end
    // left belongs to the last token.
    void sweep(Rows<const float> decays, long batch, long begin, bool reads) {
        ::read(decays, begin, n, gates.keys, alpha, kp);
        for (long i = 0; gates.mask && i < n; ++i)
            if (gates.hidden(batch, begin + i)) std::memset(alpha + i * kp, 0, sizeof(float) * kp);
        for (long d = 0; d < kp; d += W) {
            vec g = splat(1.0f);
            for (long at = d; at < n * kp; at += kp) {
                const vec rate = fading(load(alpha + at));
                store(alpha + at, rate);
                g *= rate;
                store(grown + at, g);
                if (reads) store(read + at, load(q + at) * g);
                if (gates.delta) store(entering + at, load(k + at) * g);
            }
        }
        stage(scoring);
        for (long first = 0; first < n; first += STRIP) {
            const long end = first + STRIP < n ? first + STRIP : n;
            if (first) {
                transpose(left, kp, turned, C, whole_vectors(first), kp);
                if (reads) since(alpha, kp, first, end, q, near), products(first, end, a);
                if (gates.delta) since(alpha, kp, first, end, k, near), products(first, end, b);
            }
            for (long i = first, pair = 0; i < end; ++i) {
                decay_keys(first, i);
                for (long j = first; j <= i; ++j, ++pair) {
                    const float* key = left + j * kp;
                    if (reads) store(lanes + pair * W, dot_lanes(q + i * kp, key, kp));
                    if (gates.delta) store(more + pair * W, dot_lanes(k + i * kp, key, kp));
                }
            }
            if (reads) finish_strip(lanes, first, end, 1, n, a);
            if (gates.delta) finish_strip(more, first, end, 0, n, b);
            decay_rows(alpha, kp, first, end, left, first);
        }
        std::memcpy(whole, grown + (n - 1) * kp, sizeof(float) * kp);
    }

    // A strip's rows of A or B in the columns before it, from ``near`` and ``turned``; further columns are overwritten later.
    void products(long first, long end, float* out) const {
        gemm<false>(end - first, whole_vectors(first), gates.keys, near, kp, 1, turned, C, out + first * C, C);
    }

   public:
    // left_j, j < i, of the strip that begins at ``first`` advances from token i - 1 to token i, where left_i = k_i starts.
    void decay_keys(long first, long i) {
        for (long j = first; j < i; ++j) scale_row(left + j * kp, left + j * kp, alpha + i * kp, kp);
        std::memcpy(left + i * kp, k + i * kp, sizeof(float) * kp);
    }
};

inline void load_state(const float* state, long keys, long values, long ld, float* s) {
    for (long d = 0; d < keys; ++d) {
        std::memcpy(s + d * ld, state + d * values, sizeof(float) * values);
        for (long e = values; e < ld; ++e) s[d * ld + e] = 0.0f;
    }
}

inline void save_state(const float* s, long keys, long values, long ld, float* state) {
    for (long d = 0; d < keys; ++d) std::memcpy(state + d * values, s + d * ld, sizeof(float) * values);
}

}  // namespace
