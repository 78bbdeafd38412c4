// One token of one head of linear attention: its features, the sums, the normalizer.
#pragma once
#include "../shared/fetch.h"
#include "maps.h"

namespace {

template <int MAP>
void map_channels(const float* x, float* out, long size) {
    long j = 0;
    for (; j + W <= size; j += W) store(out + j, feature<MAP>(load(x + j)));
    if (j < size) {
        float rest[W] = {};
        std::memcpy(rest, x + j, sizeof(float) * (size - j));
        store(rest, feature<MAP>(load(rest)));
        std::memcpy(out + j, rest, sizeof(float) * (size - j));
    }
}

inline void map_token(int map, const float* x, float* out, long size) {
    switch (map) {
        case elu: return map_channels<elu>(x, out, size);
        case relu: return map_channels<relu>(x, out, size);
        case squared_relu: return map_channels<squared_relu>(x, out, size);
        default: return map_channels<clamped_exp>(x, out, size);
    }
}

// The operands of one token of a head: features of key and query for the matrix and for the normalizer (which differ if the
// former are rotated), and the value.
struct Token {
    const float *k, *q, *plain_k, *plain_q, *v;
};

// state (D, E+1): S += k (v, 1)^T; out = q^T S / (q^T z + eps). E is a constant for common head sizes, else 0.
// ``end``: the end of the states of the same thread.
template <long E>
void advance(float* state, const float* end, const Token& token, float* out, long keys, long values, float eps) {
    const long width = E ? E : values, whole = width / W * W;
    constexpr long held = E ? E / W : 1;
    // Loops over these are unrolled early, or GCC 12 keeps them in memory.
    vec acc[held > 0 ? held : 1], v[held > 0 ? held : 1];
    // Copies, since the compiler cannot know that stores leave ``token`` alone.
    const float *ks = token.k, *qs = token.q, *plain_ks = token.plain_k, *plain_qs = token.plain_q;
    float below = 0.0f;
    if (E) {
#pragma GCC unroll 32
        for (long j = 0; j < held; ++j) acc[j] = vec{}, v[j] = load(token.v + j * W);
    } else {
        for (long e = 0; e < width; ++e) out[e] = 0.0f;
    }
    for (long d = 0; d < keys; ++d, state += width + 1) {
        const float k = ks[d], q = qs[d];
        if (E) {
            fetch_row<E>(upcoming(state, end));
#pragma GCC unroll 32
            for (long j = 0; j < held; ++j) {
                const vec s = load(state + j * W) + k * v[j];
                store(state + j * W, s);
                acc[j] += q * s;
            }
        } else {
            for (long e = 0; e < whole; e += W) {
                const vec s = load(state + e) + k * load(token.v + e);
                store(state + e, s);
                store(out + e, load(out + e) + q * s);
            }
            for (long e = whole; e < width; ++e) {
                const float s = state[e] + k * token.v[e];
                state[e] = s;
                out[e] += q * s;
            }
        }
        const float z = state[width] + plain_ks[d];
        state[width] = z;
        below += plain_qs[d] * z;
    }
    const float scale = 1.0f / divisor(below + eps);
    if (E) {
#pragma GCC unroll 32
        for (long j = 0; j < held; ++j) store(out + j * W, acc[j] * scale);
    } else {
        for (long e = 0; e < width; ++e) out[e] *= scale;
    }
}

inline void advance_head(float* state, const float* end, const Token& token, float* out, long keys, long values,
                         float eps) {
    switch (values) {
        case 32: return advance<32>(state, end, token, out, keys, values, eps);
        case 64: return advance<64>(state, end, token, out, keys, values, eps);
        case 128: return advance<128>(state, end, token, out, keys, values, eps);
        default: return advance<0>(state, end, token, out, keys, values, eps);
    }
}

}  // namespace
