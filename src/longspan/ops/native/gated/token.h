// One token of the recurrence with decay and delta rule for some rows and heads:
// P = Diag(alpha) S, S' = P + k (beta (v - P^T k))^T, o = scale S'^T q = scale (P^T q + (q.k) beta (v - P^T k)):
// one pass reads P^T k and P^T q together, one writes S'. The second is combined with the first of the next columns, so
// that loads overlap with computation.
#pragma once
#include "../shared/fetch.h"
#include "chunk.h"

namespace {

namespace gated {

constexpr long limit = 1024;  // channels of a head

struct Token {
    const float *q, *k, *v;
    float *state, *out;
    const float* end;  // of the states of the same thread
    float alpha[limit], decayed_q[limit], decayed_k[limit];  // alpha per channel of the keys, or of the values
    float beta, both;                                        // both: q.k
    // Copies of operands that are in half precision or normalized, and the output before rounding.
    float own_q[limit], own_k[limit], own_v[limit], own_out[limit];
};

// NV vectors of columns whose state has been read but not written; the key writes x.
template <int NV>
struct Pending {
    const Token* token;
    float* state;
    vec x[NV];
};

// Writes the columns that ``old`` has read, and reads the token's state from column ``e`` on; either may be missing. Without
// FADES all alpha are 1, and are not multiplied.
template <int NV, bool FADES, bool WRITE, bool READ>
void both_passes(const Pending<NV>& old, Pending<NV>& now, const Token* token, long e, long keys, long width, float scale) {
    vec o[NV] = {}, seen[NV] = {}, x[NV];
    float* before = WRITE ? old.state : nullptr;
    float* s = READ ? token->state + e : nullptr;
    const float* end = READ ? token->end : nullptr;
    if (WRITE)
#pragma GCC unroll 16
        for (int j = 0; j < NV; ++j) x[j] = old.x[j];
    for (long d = 0; d < keys; ++d) {
        if (READ) {
            const vec k = splat(token->decayed_k[d]), q = splat(token->decayed_q[d]);
            fetch_row<NV * W>(upcoming(s, end));
#pragma GCC unroll 16
            for (int j = 0; j < NV; ++j) {
                const vec row = in_register(load(s + j * W));
                seen[j] += k * row;
                o[j] += q * row;
            }
            s += width;
        }
        if (WRITE) {
            const vec alpha = splat(old.token->alpha[d]), k = splat(old.token->k[d]);
#pragma GCC unroll 16
            for (int j = 0; j < NV; ++j) {
                const vec row = load(before + j * W);
                store(before + j * W, (FADES ? alpha * row : row) + k * x[j]);
            }
            before += width;
        }
    }
    if (!READ) return;
    now.token = token, now.state = token->state + e;
#pragma GCC unroll 16
    for (int j = 0; j < NV; ++j) {
        now.x[j] = token->beta * (load(token->v + e + j * W) - seen[j]);
        store(token->out + e + j * W, (o[j] + token->both * now.x[j]) * scale);
    }
}

// The delta rule on columns from ``e`` on while e + NV W fits, after the pending ones; -> the next column.
template <int NV, bool FADES>
long delta_columns(Pending<NV>& pending, const Token* token, long e, long keys, long width, float scale) {
    for (; e + NV * W <= width; e += NV * W) {
        Pending<NV> now;
        if (pending.token) both_passes<NV, FADES, true, true>(pending, now, token, e, keys, width, scale);
        else both_passes<NV, FADES, false, true>(pending, now, token, e, keys, width, scale);
        pending = now;
    }
    return e;
}

template <int NV, bool FADES>
void finish(Pending<NV>& pending, long keys, long width) {
    if (pending.token) both_passes<NV, FADES, true, false>(pending, pending, nullptr, 0, keys, width, 0.0f);
    pending.token = nullptr;
}

// The same without the delta rule, in one pass. BY_VALUE: alpha is that of the columns.
template <int NV, bool BY_VALUE>
long plain_columns(const Token& token, long e, long keys, long width, float scale) {
    for (; e + NV * W <= width; e += NV * W) {
        vec o[NV] = {}, v[NV], left[NV];
#pragma GCC unroll 16
        for (int j = 0; j < NV; ++j) {
            v[j] = load(token.v + e + j * W);
            if (BY_VALUE) left[j] = load(token.alpha + e + j * W);
        }
        float* s = token.state + e;
        const float* end = token.end;
        for (long d = 0; d < keys; ++d, s += width) {
            const vec alpha = splat(BY_VALUE ? 0.0f : token.alpha[d]), k = splat(token.k[d]), q = splat(token.q[d]);
            fetch_row<NV * W>(upcoming(s, end));
#pragma GCC unroll 16
            for (int j = 0; j < NV; ++j) {
                const vec row = (BY_VALUE ? left[j] : alpha) * load(s + j * W) + k * v[j];
                store(s + j * W, row);
                o[j] += q * row;
            }
        }
#pragma GCC unroll 16
        for (int j = 0; j < NV; ++j) store(token.out + e + j * W, o[j] * scale);
    }
    return e;
}

// One of the remaining columns.
inline void column(const Token& token, long e, long keys, long width, float scale, bool delta, bool by_value) {
    float seen = 0.0f, o = 0.0f, x = token.v[e];
    for (long d = 0; delta && d < keys; ++d) {
        seen += token.decayed_k[d] * token.state[d * width + e];
        o += token.decayed_q[d] * token.state[d * width + e];
    }
    if (delta) {
        x = token.beta * (x - seen);
        o += token.both * x;
    }
    for (long d = 0; d < keys; ++d) {
        float& s = token.state[d * width + e];
        s = token.alpha[by_value ? e : d] * s + token.k[d] * x;
        if (!delta) o += token.q[d] * s;
    }
    token.out[e] = o * scale;
}

// The first ``count`` numbers, padded with zeros to a vector.
inline vec first(const float* x, long count) {
    if (count >= W) return load(x);
    vec out = vec{};
    std::memcpy(&out, x, sizeof(float) * count);
    return out;
}

// alpha, and the vectors with which the delta rule reads.
inline void prepare(Token& token, const float* gates, int decay, const float* beta, long keys, long values) {
    if (decay == by_value) {
        for (long e = 0; e < values; e += W) store(token.alpha + e, fading(first(gates + e, values - e)));
        return;
    }
    const vec head = decay == by_head ? fading(splat(*gates)) : splat(1.0f);
    vec both = vec{};
    for (long d = 0; d < keys; d += W) {
        const vec alpha = decay == by_channel ? fading(first(gates + d, keys - d)) : head;
        store(token.alpha + d, alpha);
        if (!beta) continue;
        const vec q = first(token.q + d, keys - d), k = first(token.k + d, keys - d);
        store(token.decayed_q + d, alpha * q);
        store(token.decayed_k + d, alpha * k);
        both += q * k;
    }
    if (beta) token.beta = *beta, token.both = sum(both);
}

// Rows are heads of sequences, adjacent in the state. The other operands of a sequence begin ``between`` numbers after those
// of the one before, and its log decays ``decays_between``, which is 0 for decays that all sequences share. out may be v.
template <class T>
struct Step {
    float* state;
    const T *q, *k, *v;
    const float *log_decay, *beta;
    T* out;
    long heads, shared, keys, values;  // ``shared``: consecutive heads of values with the same queries and keys
    int decay;
    bool normalize;
    float scale;
    long between = 0, decays_between = 0;
};

// x / sqrt(|x|^2 + 1e-6), in ``out``.
inline const float* normalized(const float* x, long size, float* out) {
    vec lanes = vec{};
    for (long d = 0; d < size; d += W) {
        const vec part = first(x + d, size - d);
        lanes += part * part;
    }
    const float factor = 1.0f / std::sqrt(sum(lanes) + 1e-6f);
    for (long d = 0; d < size; ++d) out[d] = x[d] * factor;
    return out;
}

// Rows from ... to, NV vectors of columns at a time, then single ones.
template <int NV, bool FADES, class T>
void run(const Step<T>& step, long from, long to) {
    const long keys = step.keys, values = step.values;
    Token tokens[2];  // the one whose columns are pending, and the next
    Pending<NV> pending{};
    for (long row = from; row < to; ++row) {
        Token& token = tokens[row % 2];
        const long sequence = row / step.heads, h = row % step.heads, begin = sequence * step.between;
        const long head = begin + h / step.shared * keys, at = begin + h * values;
        token.q = widened(step.q + head, keys, token.own_q), token.k = widened(step.k + head, keys, token.own_k);
        if (step.normalize) {
            token.q = normalized(token.q, keys, token.own_q);
            token.k = normalized(token.k, keys, token.own_k);
        }
        token.v = widened(step.v + at, values, token.own_v), token.out = room(step.out + at, token.own_out);
        token.state = step.state + row * values * keys, token.end = step.state + to * values * keys;
        const float* gates = nullptr;
        if (step.decay != no_decay)
            gates = step.log_decay + sequence * step.decays_between +
                    h * (step.decay == by_channel ? keys : step.decay == by_value ? values : 1);
        prepare(token, gates, step.decay, step.beta ? step.beta + begin + h : nullptr, keys, values);
        long e = 0;
        if (step.beta) {
            e = delta_columns<NV, FADES>(pending, &token, e, keys, values, step.scale);
            Pending<1> single{};
            e = delta_columns<1, FADES>(single, &token, e, keys, values, step.scale);
            finish<1, FADES>(single, keys, values);
        } else if (step.decay == by_value) {
            e = plain_columns<NV, true>(token, e, keys, values, step.scale);
            e = plain_columns<1, true>(token, e, keys, values, step.scale);
        } else {
            e = plain_columns<NV, false>(token, e, keys, values, step.scale);
            e = plain_columns<1, false>(token, e, keys, values, step.scale);
        }
        for (; e < values; ++e) column(token, e, keys, values, step.scale, step.beta != nullptr, step.decay == by_value);
        narrowed(token.out, values, step.out + at);
    }
    finish<NV, FADES>(pending, keys, values);
}

template <int NV, class T>
void run(const Step<T>& step, long from, long to) {
    if (step.decay == no_decay)
        run<NV, false>(step, from, to);
    else
        run<NV, true>(step, from, to);
}

// Rows from ... to, with as many columns at a time as suit their number.
template <class T>
void step_rows(const Step<T>& step, long from, long to) {
    // If registers suffice, whole rows of the common 64 or 128 columns, since adjacent memory loads faster. The delta rule
    // needs two sums per column.
    constexpr int narrow = 32 / W, wide = W >= 8 ? 64 / W : narrow, widest = W == 16 ? 128 / W : wide;
    if (W == 8 && step.beta)
        run<narrow>(step, from, to);
    else if (step.values % (widest * W) == 0)
        run<widest>(step, from, to);
    else if (step.values % (wide * W) == 0)
        run<wide>(step, from, to);
    else
        run<narrow>(step, from, to);
}

}  // namespace gated

}  // namespace
