// One token of the recurrence with decay and delta rule for every row and head. Plain C interface.
// P = Diag(alpha) S, S' = P + k (beta (v - P^T k))^T, o = scale S'^T q = scale (P^T q + (q.k) beta (v - P^T k)):
// one pass reads P^T k and P^T q together, one writes S', by when the head's state is in the cache.
#include "gated.h"

namespace {

struct Token {
    const float *q, *k, *v, *alpha;  // alpha by channel
    const float *decayed_q, *decayed_k;
    float beta, both, scale;  // both: q.k
    bool delta;
};

// NV vectors of columns from ``e`` on of a head's state (keys, width), and as many outputs.
template <int NV>
void columns(float* state, long width, const Token& token, long e, float* out, long keys) {
    vec o[NV] = {}, x[NV];
    if (token.delta) {
        vec seen[NV] = {};
        const float* s = state + e;
        for (long d = 0; d < keys; ++d, s += width)
            for (int j = 0; j < NV; ++j) {
                const vec row = load(s + j * W);
                seen[j] += token.decayed_k[d] * row;
                o[j] += token.decayed_q[d] * row;
            }
        for (int j = 0; j < NV; ++j) {
            x[j] = token.beta * (load(token.v + e + j * W) - seen[j]);
            o[j] += token.both * x[j];
        }
    } else {
        for (int j = 0; j < NV; ++j) x[j] = load(token.v + e + j * W);
    }
    float* s = state + e;
    for (long d = 0; d < keys; ++d, s += width)
        for (int j = 0; j < NV; ++j) {
            const vec row = token.alpha[d] * load(s + j * W) + token.k[d] * x[j];
            store(s + j * W, row);
            // The state of the next head, which is there by when its turn comes.
            __builtin_prefetch(s + keys * width + j * W, 1);
            if (!token.delta) o[j] += token.q[d] * row;
        }
    for (int j = 0; j < NV; ++j) store(out + e + j * W, o[j] * token.scale);
}

// One column of what is left.
inline void column(float* state, long width, const Token& token, long e, float* out, long keys) {
    float seen = 0.0f, o = 0.0f, x = token.v[e];
    for (long d = 0; token.delta && d < keys; ++d) {
        seen += token.decayed_k[d] * state[d * width + e];
        o += token.decayed_q[d] * state[d * width + e];
    }
    if (token.delta) {
        x = token.beta * (x - seen);
        o += token.both * x;
    }
    for (long d = 0; d < keys; ++d) {
        const float s = token.alpha[d] * state[d * width + e] + token.k[d] * x;
        state[d * width + e] = s;
        if (!token.delta) o += token.q[d] * s;
    }
    out[e] = o * token.scale;
}

}  // namespace

// state (B,H,D,E), overwritten; q, k (B,G,D); v, out (B,H,E); log_decay null, or (B,H) or (B,H,D); beta null, or (B,H).
// Returns 0, or 1 for a head that is too large.
extern "C" int longspan_gated_step(float* state, const float* q, const float* k, const float* v, const float* log_decay,
                                   const float* beta, float* out, long rows, long shared, long keys, long values,
                                   int decay, float scale, int threads) {
    constexpr long limit = 1024;
    if (keys > limit || values > limit) return 1;
    // Below this, waking a second thread costs more than it saves.
    const bool parallel = threads > 1 && rows * keys * values > 65536;
#pragma omp parallel for num_threads(threads) schedule(static) if (parallel)
    for (long row = 0; row < rows; ++row) {
        float alpha[limit], decayed_q[limit], decayed_k[limit];
        const float *gates = decay == by_channel ? log_decay + row * keys : log_decay + row;
        for (long d = 0; d < keys; d += W) {
            vec g = vec{};
            if (decay == by_head) g = splat(*gates);
            if (decay == by_channel) std::memcpy(&g, gates + d, sizeof(float) * (keys - d < W ? keys - d : W));
            store(alpha + d, fading(g));
        }
        const long head = row / shared * keys;
        Token token{q + head, k + head, v + row * values, alpha, decayed_q, decayed_k, 0.0f, 0.0f, scale, beta != nullptr};
        if (beta) {
            token.beta = beta[row];
            for (long d = 0; d < keys; ++d) {
                decayed_q[d] = alpha[d] * token.q[d];
                decayed_k[d] = alpha[d] * token.k[d];
                token.both += token.q[d] * token.k[d];
            }
        }
        float *s = state + row * keys * values, *o = out + row * values;
        constexpr long block = 64 / W < 8 ? 64 / W : 8;
        long e = 0;
        for (; e + block * W <= values; e += block * W) columns<block>(s, values, token, e, o, keys);
        for (; e + W <= values; e += W) columns<1>(s, values, token, e, o, keys);
        for (; e < values; ++e) column(s, values, token, e, o, keys);
    }
    return 0;
}
