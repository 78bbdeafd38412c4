// One chunk of the general delta rule, for both passes over a sequence. With G_i the sum of the log decays up to token i of
// the chunk, S the state before it, [a b]_ij = sum_d a_id b_jd e^(G_id - G_jd), and all exponents at most 0 if the log decays
// are:
//   w_i = -(e^G_i r_i)^T S - sum_{j<i} [r k]_ij v_j - sum_{j<i} [r e]_ij w_j
//   o_i = (e^G_i q_i)^T S + sum_{j<=i} [q k]_ij v_j + [q e]_ij w_j
//   S'  = e^G_end S + sum_j (e^(G_end - G_j) k_j) v_j^T + (e^(G_end - G_j) e_j) w_j^T
// If tokens read before the decay, G_(i-1) takes the place of G_i in the rows of r.
// Source: the WY form of Yang et al. 2024 (2406.06484), section 3, by forward substitution, since the state before is known.
#pragma once
#include "../gated/chunk.h"

namespace {

// The arguments of a call: those of the delta rule, and whether tokens read before the decay.
struct General {
    Gates gates;
    bool early;
};

template <class T>
struct Vectors {
    Tensor<const T> q, k, v, r, e;

    static long floats(const Gates& gates) { return C * (4 * gates.kp() + gates.vp()); }  // of Packed
};

// A chunk of one head: queries times scale, keys, reads and erasures (C, kp), values (C, vp); masked tokens are zero.
struct Packed {
    float *q, *k, *v, *r, *e;

    Packed(const Gates& gates, Scratch& scratch)
        : q(scratch.take(C * gates.kp())), k(scratch.take(C * gates.kp())), v(scratch.take(C * gates.vp())),
          r(scratch.take(C * gates.kp())), e(scratch.take(C * gates.kp())) {}
};

template <class T>
void gather_queries(const Vectors<T>& from, const Gates& gates, Tokens at, Packed to) {
    const vec scale = splat(gates.scale);
    pack(gates.of_keys(from.q, at.row), at, gates.keys, gates.mask_of(at.row), to.q, gates.kp(),
         [=](vec x) { return x * scale; });
}
template <class T>
void gather_keys(const Vectors<T>& from, const Gates& gates, Tokens at, Packed to) {
    const std::uint8_t* mask = gates.mask_of(at.row);
    pack(gates.of_keys(from.k, at.row), at, gates.keys, mask, to.k, gates.kp(), same);
    pack(gates.of_keys(from.r, at.row), at, gates.keys, mask, to.r, gates.kp(), same);
    pack(gates.of_keys(from.e, at.row), at, gates.keys, mask, to.e, gates.kp(), same);
}
template <class T>
void gather_values(const Vectors<T>& from, const Gates& gates, Tokens at, Packed to) {
    pack(gates.of(from.v, at.row), at, gates.values, gates.mask_of(at.row), to.v, gates.vp(), same);
}

// One chunk of one head in scratch memory; (C, kp) unless noted.
struct Piece {
    const Gates& gates;
    const bool early;
    long kp, vp, n = 0;
    float *q, *k, *v, *r, *e;          // as in Packed
    float *read, *entering;            // e^G q; e^G r, or that of the token before
    float *left, *gone;                // e^(G_end - G) k and e^(G_end - G) e
    float *alpha, *grown;              // e^(log decay) by channel, and e^G
    float *qk, *qe, *rk, *re, *weight; // the products, and e^(G_i - G_j) by head: (C, C)
    float *whole;                      // e^G_end (kp)
    float *start;                      // e^G by head (C)
    float *turned, *lanes[4];          // (kp or vp, C), (PAIRS, W) each
    float* near;                       // queries or reads of a strip: (STRIP, kp)
    float *w;                          // what the erasures write (C, vp)

    Piece(const General& general, Scratch& scratch)
        : gates(general.gates), early(general.early), kp(gates.kp()), vp(gates.vp()) {
        for (float** p : {&read, &entering, &left, &gone, &alpha, &grown}) *p = scratch.take(C * kp);
        for (float** p : {&qk, &qe, &rk, &re, &weight}) *p = scratch.take(C * C);
        for (float*& p : lanes) p = scratch.take(PAIRS * W);
        w = scratch.take(C * vp), whole = scratch.take(kp), start = scratch.take(C);
        turned = scratch.take(C * (kp > vp ? kp : vp)), near = scratch.take(STRIP * kp);
    }
    static long size(const Gates& gates) {
        const long kp = gates.kp(), vp = gates.vp();
        return C * (6 * kp + vp + 5 * C + 1 + (kp > vp ? kp : vp)) + (STRIP + 1) * kp + 4 * PAIRS * W;
    }

    // Tokens begin ... begin + count of a head, and everything that does not depend on the state; reads: queries too.
    void enter(Packed from, long row, long begin, long count, bool reads) {
        n = count, q = from.q, k = from.k, v = from.v, r = from.r, e = from.e;
        const long batch = row / gates.heads;
        stage(mapping);
        const Rows<const float> decays = gates.of(Tensor<const float>{gates.log_decay, gates.decay_strides}, row);
        switch (gates.decay) {
            case by_head: return weigh(decays, batch, begin, reads);
            case by_channel: return sweep(decays, batch, begin, reads);
            default: return multiply(nullptr, reads);
        }
    }

    // The row of ``factors`` (C, C) by which the products of r_i decay.
    const float* read_factors(const float* factors, long i) const {
        return factors + (early && i > 0 ? i - 1 : i) * C;
    }

    // w_i, given the state s (D, vp) before the chunk, or null for zeros.
    void solve(const float* s) {
        stage(from_state);
        if (s)
            gemm<false>(n, vp, gates.keys, entering, kp, 1, s, vp, w, vp);
        else
            std::memset(w, 0, sizeof(float) * n * vp);
        stage(within_chunk);
        lower_times(n, vp, rk, C, v, vp, w, vp);
        stage(solving);
        for (long first = 0; first < n; first += STRIP) {
            const long end = first + STRIP < n ? first + STRIP : n;
            gemm<true>(end - first, vp, first, re + first * C, C, 1, w, vp, w + first * vp, vp);
            for (long i = first; i < end; ++i)
                for (long j = 0; j < vp; j += W) {
                    vec acc = load(w + i * vp + j);
                    for (long p = first; p < i; ++p) acc += re[i * C + p] * load(w + p * vp + j);
                    store(w + i * vp + j, vec{} - acc);
                }
        }
    }

    // The state after the chunk, given that before it.
    void advance(float* s) const {
        stage(updating);
        if (gates.decay != no_decay)
            for (long d = 0; d < gates.keys; ++d) scale_row(s + d * vp, s + d * vp, whole[d], vp);
        gemm<true>(gates.keys, vp, n, left, 1, kp, v, vp, s, vp);
        gemm<true>(gates.keys, vp, n, gone, 1, kp, w, vp, s, vp);
    }

    // left_j and gone_j, j < i, of the strip that begins at ``first`` advance from token i - 1 to token i, where they start as
    // k_i and e_i.
    void decay_keys(long first, long i) {
        for (long j = first; j < i; ++j) {
            scale_row(left + j * kp, left + j * kp, alpha + i * kp, kp);
            scale_row(gone + j * kp, gone + j * kp, alpha + i * kp, kp);
        }
        std::memcpy(left + i * kp, k + i * kp, sizeof(float) * kp);
        std::memcpy(gone + i * kp, e + i * kp, sizeof(float) * kp);
    }

   private:
    // The products from matrix products, times factors (C, C) if there are any.
    void multiply(const float* factors, bool reads) {
        stage(scoring);
        if (gates.decay == no_decay) read = q, entering = r, left = k, gone = e;
        transpose(k, kp, turned, C, whole_vectors(n), kp);
        if (reads) lower_product(n, gates.keys, q, kp, turned, C, qk, C);
        lower_product(n, gates.keys, r, kp, turned, C, rk, C);
        transpose(e, kp, turned, C, whole_vectors(n), kp);
        if (reads) lower_product(n, gates.keys, q, kp, turned, C, qe, C);
        lower_product(n, gates.keys, r, kp, turned, C, re, C);
        for (long i = 0; i < n; ++i) {
            const float* row = factors ? factors + i * C : nullptr;
            if (reads) {
                finish_row(qk + i * C, row, i, n, i + 1);
                finish_row(qe + i * C, row, i, n, i + 1);
            }
            row = factors ? read_factors(factors, i) : nullptr;
            finish_row(rk + i * C, row, i, n, i);
            finish_row(re + i * C, row, i, n, i);
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
            scale_row(entering + i * kp, r + i * kp, read_start(i), kp);
            scale_row(left + i * kp, k + i * kp, leaving[i], kp);
            scale_row(gone + i * kp, e + i * kp, leaving[i], kp);
        }
        for (long j = 0; j < kp; j += W) store(whole + j, splat(start[n - 1]));
    }

    // With a decay per channel, strip by strip, as in ``gated``: before token i of a strip, left_j is e^(G_i - G_j) k_j for the
    // keys of the strip, and e^(G - G_j) k_j with G before the strip for earlier ones. At the end it belongs to the last token.
    void sweep(Rows<const float> decays, long batch, long begin, bool reads) {
        ::read(decays, begin, n, gates.keys, alpha, kp);
        for (long i = 0; gates.mask && i < n; ++i)
            if (gates.hidden(batch, begin + i)) std::memset(alpha + i * kp, 0, sizeof(float) * kp);
        for (long d = 0; d < kp; d += W) {
            vec g = splat(1.0f);
            for (long at = d; at < n * kp; at += kp) {
                const vec before = g, rate = fading(load(alpha + at));
                store(alpha + at, rate);
                g *= rate;
                store(grown + at, g);
                if (reads) store(read + at, load(q + at) * g);
                store(entering + at, load(r + at) * (early ? before : g));
            }
        }
        stage(scoring);
        for (long first = 0; first < n; first += STRIP) {
            const long end = first + STRIP < n ? first + STRIP : n;
            if (first) {
                products(first, end, left, reads ? qk : nullptr, rk);
                products(first, end, gone, reads ? qe : nullptr, re);
            }
            for (long i = first, pair = 0; i < end; pair += i + 1 - first, ++i) {
                if (early) dots(r, first, i, i, pair, lanes[0], lanes[1]);
                decay_keys(first, i);
                if (!early) dots(r, first, i, i, pair, lanes[0], lanes[1]);
                if (reads) dots(q, first, i, i + 1, pair, lanes[2], lanes[3]);
            }
            finish_strip(lanes[0], first, end, 0, n, rk);
            finish_strip(lanes[1], first, end, 0, n, re);
            if (reads) {
                finish_strip(lanes[2], first, end, 1, n, qk);
                finish_strip(lanes[3], first, end, 1, n, qe);
            }
            decay_rows(alpha, kp, first, end, left, first);
            decay_rows(alpha, kp, first, end, gone, first);
        }
        std::memcpy(whole, grown + (n - 1) * kp, sizeof(float) * kp);
    }

    // A strip's rows of the products of queries (unless null) and reads with keys or erasures before the strip; further
    // columns are overwritten later.
    void products(long first, long end, const float* keys, float* queried, float* looked) const {
        transpose(keys, kp, turned, C, whole_vectors(first), kp);
        const auto multiply = [&](const float* x, bool before, float* out) {
            since(alpha, kp, first, end, x, near, before);
            gemm<false>(end - first, whole_vectors(first), gates.keys, near, kp, 1, turned, C, out + first * C, C);
        };
        if (queried) multiply(q, false, queried);
        multiply(r, early, looked);
    }

    // The lanes of the products of row i of x with left_j and gone_j, first <= j < end, from ``pair`` on.
    void dots(const float* x, long first, long i, long end, long pair, float* with_left, float* with_gone) const {
        for (long j = first; j < end; ++j, ++pair) {
            store(with_left + pair * W, dot_lanes(x + i * kp, left + j * kp, kp));
            store(with_gone + pair * W, dot_lanes(x + i * kp, gone + j * kp, kp));
        }
    }

   public:
    // The share of the state before the chunk that token i reads, by head.
    float read_start(long i) const { return !early ? start[i] : i > 0 ? start[i - 1] : 1.0f; }
};

}  // namespace
