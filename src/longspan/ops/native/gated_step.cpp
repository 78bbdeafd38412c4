// One token of the recurrence with decay and delta rule for every row and head. Plain C interface.
// P = Diag(alpha) S, S' = P + k (beta (v - P^T k))^T, o = scale S'^T q = scale (P^T q + (q.k) beta (v - P^T k)):
// one pass reads P^T k and P^T q together, one writes S', by when the head's state is in the cache.
#include "gated.h"

namespace {

struct Token {
    const float *q, *k, *v, *alpha;  // alpha by channel
    float beta;
    bool delta;
};

// Per head of queries and keys, E a constant where it is a usual size, else 0.
template <long E>
void advance(float* state, const Token& token, float* out, float* error, long keys, long values, float scale) {
    const long width = E ? E : values;
    if (token.delta) {
        for (long e = 0; e < width; ++e) out[e] = error[e] = 0.0f;
        float both = 0.0f;
        for (long d = 0; d < keys; ++d) {
            const float k = token.alpha[d] * token.k[d], q = token.alpha[d] * token.q[d];
            const float* s = state + d * width;
            for (long e = 0; e < width; ++e) {
                error[e] += k * s[e];
                out[e] += q * s[e];
            }
            both += token.k[d] * token.q[d];
        }
        for (long e = 0; e < width; ++e) {
            error[e] = token.beta * (token.v[e] - error[e]);
            out[e] = scale * (out[e] + both * error[e]);
        }
        for (long d = 0; d < keys; ++d) {
            float* s = state + d * width;
            for (long e = 0; e < width; ++e) s[e] = token.alpha[d] * s[e] + token.k[d] * error[e];
        }
        return;
    }
    for (long e = 0; e < width; ++e) out[e] = 0.0f;
    for (long d = 0; d < keys; ++d) {
        float* s = state + d * width;
        for (long e = 0; e < width; ++e) {
            s[e] = token.alpha[d] * s[e] + token.k[d] * token.v[e];
            out[e] += token.q[d] * s[e];
        }
    }
    for (long e = 0; e < width; ++e) out[e] *= scale;
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
        float alpha[limit], error[limit];
        const float* source = decay == by_channel ? log_decay + row * keys : log_decay + row;
        for (long d = 0; d < keys; d += W) {
            vec g = vec{};
            if (decay == by_head) g = splat(*source);
            if (decay == by_channel) std::memcpy(&g, source + d, sizeof(float) * (keys - d < W ? keys - d : W));
            g = fading(g);
            store(alpha + d, g);
        }
        const long head = row / shared * keys;
        const Token token{q + head, k + head, v + row * values, alpha, beta ? beta[row] : 0.0f, beta != nullptr};
        float *s = state + row * keys * values, *o = out + row * values;
        switch (values) {
            case 32: advance<32>(s, token, o, error, keys, values, scale); break;
            case 64: advance<64>(s, token, o, error, keys, values, scale); break;
            case 128: advance<128>(s, token, o, error, keys, values, scale); break;
            default: advance<0>(s, token, o, error, keys, values, scale);
        }
    }
    return 0;
}
