// One token of the general delta rule for every row and head. Plain C interface.
// P = Diag(alpha) S, u = P^T r or S^T r, S' = P + k v^T - e u^T, o = scale S'^T q = scale (P^T q + (q.k) v - (q.e) u):
// one pass reads u and P^T q together, one writes S', a few columns at a time, which stay in the cache in between.
#include "../shared/fetch.h"
#include "chunk.h"

namespace {

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

template <class T>
struct Step {
    float* state;
    const T *q, *k, *v, *r, *e;
    const float* log_decay;
    T* out;
    long shared, keys, values;
    int decay;
    bool early;
    float scale;
};

template <class T>
void run(const Step<T>& step, long from, long to) {
    const long keys = step.keys, values = step.values;
    Token token;
    for (long row = from; row < to; ++row) {
        const long head = row / step.shared * keys, at = row * values;
        token.q = widened(step.q + head, keys, token.own_q), token.k = widened(step.k + head, keys, token.own_k);
        token.e = widened(step.e + head, keys, token.own_e), token.v = widened(step.v + at, values, token.own_v);
        token.out = room(step.out + at, token.own_out);
        token.state = step.state + at * keys, token.end = step.state + to * values * keys;
        const float* gates = step.decay == by_channel ? step.log_decay + row * keys : step.log_decay + row;
        prepare(token, widened(step.r + head, keys, token.own_r), gates, step.decay, step.early, keys);
        long e = columns<4>(token, 0, keys, values, step.scale);
        e = columns<1>(token, e, keys, values, step.scale);
        for (; e < values; ++e) column(token, e, keys, values, step.scale);
        narrowed(token.out, values, step.out + at);
    }
}

template <class T>
void step_rows(const Step<T>& step, long rows, int threads) {
    // Below this, waking a second thread costs more than it saves.
    const long parts = threads > 1 && rows * step.keys * step.values >= 32768 ? (threads < rows ? threads : rows) : 1;
#pragma omp parallel for num_threads(parts) schedule(static) if (parts > 1)
    for (long part = 0; part < parts; ++part) run(step, rows * part / parts, rows * (part + 1) / parts);
}

}  // namespace

// state (B,H,D,E) float, overwritten; q, k, r, e (B,G,D); v, out (B,H,E), of type 0 float, 1 bfloat16, 2 float16; log_decay
// null, or (B,H) or (B,H,D), float. early: whether to read before the decay. Returns 0, or 1 for a head that is too large.
extern "C" int longspan_general_step(float* state, const void* q, const void* k, const void* v, const void* r, const void* e,
                                     const float* log_decay, void* out, long rows, long shared, long keys, long values,
                                     int decay, int early, int type, float scale, int threads) {
    if (keys > limit || values > limit) return 1;
    const auto run = [&](auto element) {
        using T = decltype(element);
        const Step<T> step{state, static_cast<const T*>(q), static_cast<const T*>(k), static_cast<const T*>(v),
                           static_cast<const T*>(r), static_cast<const T*>(e), log_decay, static_cast<T*>(out), shared, keys,
                           values, decay, early != 0, scale};
        step_rows(step, rows, threads);
    };
    if (type == 0) run(float{});
    else if (type == 1) run(bfloat16{});
    else run(float16{});
    return 0;
}
