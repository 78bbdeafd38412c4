// One token of the general delta rule for one row and head.
// P = Diag(alpha) S, u = P^T r or S^T r, S' = P + k v^T - e u^T, o = scale S'^T q = scale (P^T q + (q.k) v - (q.e) u):
// one pass reads u and P^T q together, one writes S', a few columns at a time, which stay in the cache in between.
#pragma once
#include "../gated/chunk.h"
#include "../shared/fetch.h"

namespace {

namespace general {

constexpr long limit = 1024;
struct Token {
    const float *q, *k, *v, *e;
    float *state, *out;
    const float* end;                              // of the states of the same thread
    float alpha[limit], asks[limit], looks[limit]; // alpha per channel; what reads P^T q and u from S
    float qk, qe;                                  // q.k and q.e
    // Copies of operands in half precision, and the output before rounding.
    float own_q[limit], own_k[limit], own_v[limit], own_r[limit], own_e[limit], own_out[limit];
};

// Columns from ``e`` on while NV vectors of them fit; -> the next column.
template <int NV>
long columns(const Token& token, long e, long keys, long width, float scale) {
    for (; e + NV * W <= width; e += NV * W) {
        vec o[NV] = {}, u[NV] = {}, v[NV];
        float* s = token.state + e;
        for (long d = 0; d < keys; ++d, s += width) {
            const vec ask = splat(token.asks[d]), look = splat(token.looks[d]);
            fetch_row<NV * W>(upcoming(s, token.end));
#pragma GCC unroll 16
            for (int j = 0; j < NV; ++j) {
                const vec row = in_register(load(s + j * W));
                o[j] += ask * row;
                u[j] += look * row;
            }
        }
#pragma GCC unroll 16
        for (int j = 0; j < NV; ++j) {
            v[j] = load(token.v + e + j * W);
            store(token.out + e + j * W, (o[j] + token.qk * v[j] - token.qe * u[j]) * scale);
        }
        s = token.state + e;
        for (long d = 0; d < keys; ++d, s += width) {
            const vec alpha = splat(token.alpha[d]), k = splat(token.k[d]), gone = splat(token.e[d]);
#pragma GCC unroll 16
            for (int j = 0; j < NV; ++j) store(s + j * W, alpha * load(s + j * W) + k * v[j] - gone * u[j]);
        }
    }
    return e;
}

// One of the remaining columns.
inline void column(const Token& token, long e, long keys, long width, float scale) {
    float u = 0.0f, o = 0.0f;
    const float v = token.v[e];
    for (long d = 0; d < keys; ++d) {
        u += token.looks[d] * token.state[d * width + e];
        o += token.asks[d] * token.state[d * width + e];
    }
    token.out[e] = (o + token.qk * v - token.qe * u) * scale;
    for (long d = 0; d < keys; ++d) {
        float& s = token.state[d * width + e];
        s = token.alpha[d] * s + token.k[d] * v - token.e[d] * u;
    }
}

// The first ``count`` numbers, padded with zeros to a vector.
inline vec first(const float* x, long count) {
    if (count >= W) return load(x);
    vec out = vec{};
    std::memcpy(&out, x, sizeof(float) * count);
    return out;
}

// alpha, and the vectors that read.
inline void prepare(Token& token, const float* r, const float* gates, int decay, bool early, long keys) {
    const vec head = decay == by_head ? fading(splat(*gates)) : splat(1.0f);
    vec qk = vec{}, qe = vec{};
    for (long d = 0; d < keys; d += W) {
        const vec alpha = decay == by_channel ? fading(first(gates + d, keys - d)) : head;
        const vec q = first(token.q + d, keys - d), read = first(r + d, keys - d);
        store(token.alpha + d, alpha);
        store(token.asks + d, alpha * q);
        store(token.looks + d, early ? read : alpha * read);
        qk += q * first(token.k + d, keys - d);
        qe += q * first(token.e + d, keys - d);
    }
    token.qk = sum(qk), token.qe = sum(qe);
}

}  // namespace general

}  // namespace
