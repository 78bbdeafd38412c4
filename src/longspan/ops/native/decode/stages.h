// The stages of which mixers consist. A stage computes on a row of float activations per sequence, whose parts are given by
// their first channels; the step's state is that of the layer. Plain C interface.
#pragma once
#include <cmath>

#include "../convolution/token.h"
#include "../gated/token.h"
#include "../general/token.h"
#include "../linear/token.h"
#include "activations.h"
#include "cached.h"

extern "C" {

// The state of one branch. ``first``: of linear attention the sums (B,H,D,E+1), of softmax the keys (B,G,capacity,D) of the
// model's type, of a recurrence the sums (B,H,D,E). ``second``: of softmax the values, of a convolution its recent inputs
// (B,K-1,C), or (B,C,rows) of the model's type, of mixes the last input (B,d). ``position`` (B): the number of tokens, null if not needed. ``places`` (B): the positions of the
// tokens for rotations, null if they are the same. ``begin`` (B): the first slots of the cache with a token, null for 0.
struct longspan_state {
    void *first, *second;
    const std::int64_t *position, *places, *begin;
    long capacity;
};

// y = W x + b; bias float or null. With the format 0 the weight is packed, with IN_ROWS (out, in), both of the model's type.
// With one of quantized/product.h, weight, scales and factors are those of quantized::Weight; ``prepared``: the activations
// are those of the map before.
struct longspan_linear {
    const void* weight;
    const float* bias;
    long in, out;
    const void *scales, *factors;
    long format, activations, prepared;
};

// A linear map of the part ``from``, or of the branch's input for -1, followed by an activation.
struct longspan_project {
    longspan_linear map;
    long from, to, activation;
};

// Linear attention of queries, keys and values that are adjacent.
struct longspan_linear_attention {
    const float* rates;  // rotary: D/2 angles per position, or null
    long from, to, heads, size, map;
    float eps;
};

// Softmax attention over the cache, to which it adds the token. Queries (H,D) are ``apart`` numbers apart, keys and values
// (G,D) adjacent.
struct longspan_softmax_attention {
    const float* rates;
    long query, apart, key, value, to, heads, groups, size;
    float scale;
};

// Rotates the first ``size`` channels of heads that are ``apart`` numbers apart, in place.
struct longspan_turn {
    const float* rates;
    long at, heads, size, apart;
};

// A causal convolution, in place, followed by silu unless it is ``linear``. The weights are those of longspan_pack_taps. The
// state has ``rows`` inputs: for all channels one after the other, or those of a channel adjacent (``by_channel``).
struct longspan_convolve {
    const float* weights;
    long at, channels, taps, rows, by_channel, linear;
};

// to = factor * activation(slope * (from + bias)), channel by channel; each of the three may be null.
struct longspan_curve {
    const float *bias, *slope, *factor;
    long from, to, width, activation;
};

// to = add + from * by, where ``by`` has one number for each ``size`` channels: those of a part, or constants. Without add
// (-1) the product.
struct longspan_scale {
    const float* constants;
    long from, by, add, to, width, size;
};

// The recurrence with decay and delta rule, for one token. ``decay``: per head or channel, as gated/chunk.h numbers them;
// from a part, or constants. ``beta``: a part, or -1 for no delta rule. The output may replace the values.
struct longspan_recur {
    const float* log_decay;
    long query, key, value, log_decays, beta, to, heads, key_heads, keys, values, decay, normalize;
    float scale;
};

// The norm of groups of channels that are ``apart`` numbers apart, in place: RMS, or after subtracting the mean. weight: null,
// or one number for each channel of a group, in which case groups are ``weight_step`` numbers apart. ``gate``: a part with
// adjacent groups, or -1 for none.
struct longspan_head_norm {
    const float* weight;
    long at, groups, size, apart, weight_step, gate, activation, gate_first, centered;
    float eps;
};

// by *= activation(from), for groups of ``size`` channels: adjacent ones of ``by``, and of ``from`` such that are ``apart``.
struct longspan_gate {
    long from, apart, by, groups, size, activation;
};

// Mixes of the branch's input x with that of the token before, x + (last - x) w, for ``count`` rows of weights, adjacent.
struct longspan_mix {
    const float* weights;
    long to, count;
};

// The part ``at`` is kept for later branches if there is no ``by`` (-1), else it becomes at + (kept - at) * by.
struct longspan_blend {
    long at, by, width;
};

// RWKV-7's recurrence with its group norm and its gate. Constants have one number per channel of all heads. The output must
// not replace another part.
struct longspan_rwkv {
    const float *directions, *shares, *bonus, *weight, *bias;
    long query, key, value, log_decays, rate, gate, to, heads, keys, values;
    float least, eps;  // what is added to a squared length, and to a variance
};

// The part ``from`` in another order: ``count`` runs of ``size`` numbers, of which each has its place in that part.
struct longspan_arrange {
    const std::int64_t* places;
    long from, to, count, size;
};

// The selective scan of Mamba for one token: rates A (C,S), skip D (C), step sizes dt (C), b and c (S), the gate (C).
struct longspan_select {
    const float *rates, *skip;
    long x, dt, b, c, gate, to, channels, size;
};

// A gated feed-forward network. Without a weight of ``value``, ``gate`` has the outputs of both.
struct longspan_expert {
    longspan_linear gate, value, out;
};

// The sum of ``chosen`` of ``count`` experts of the branch's input, those with the largest logits, times the softmax of all
// logits or, if ``normalize``, of theirs. With ``shared`` also of the expert after them, times 1 or the sigmoid of the part
// ``by``, or -1.
struct longspan_experts {
    const longspan_expert* experts;
    long logits, to, count, chosen, normalize, activation, shared, by;
};

// ``what`` is the structure of the kind; ``wait``: all threads wait for its results.
struct longspan_stage {
    const void* what;
    long kind, wait;
};

}  // extern "C"

namespace {

enum Kind { project, linear_attention, softmax_attention, turn, convolve, curve, scale, recur, head_norm, gate, token_mix, blend, rwkv, arrange, select, experts };

constexpr long IN_ROWS = -1;  // the format of a weight that is not packed

template <class S>
const S& of(const longspan_stage& stage) {
    return *static_cast<const S*>(stage.what);
}

// The first n numbers, at most a vector; zeros beyond.
inline vec some(const float* x, long n) { return gated::first(x, n); }
inline void keep_some(float* to, vec x, long n) {
    if (n >= W)
        store(to, x);
    else
        std::memcpy(to, &x, sizeof(float) * n);
}

inline void run_curve(const longspan_curve& how, float* row) {
    for (long c = 0; c < how.width; c += W) {
        const long n = how.width - c;
        vec x = some(row + how.from + c, n);
        if (how.bias) x += some(how.bias + c, n);
        if (how.slope) x *= some(how.slope + c, n);
        x = activate(how.activation, x);
        if (how.factor) x *= some(how.factor + c, n);
        keep_some(row + how.to + c, x, n);
    }
}

inline void run_scale(const longspan_scale& how, float* row) {
    const float* by = how.by >= 0 ? row + how.by : how.constants;
    for (long begin = 0; begin < how.width; begin += how.size, ++by)
        for (long c = begin; c < begin + how.size; c += W) {
            const long n = begin + how.size - c;
            const vec x = *by * some(row + how.from + c, n);
            keep_some(row + how.to + c, how.add >= 0 ? x + some(row + how.add + c, n) : x, n);
        }
}

inline void run_head_norm(const longspan_head_norm& how, float* row, long group) {
    const long size = how.size, before = group * size;
    float* x = row + how.at + group * how.apart;
    const float *gate = how.gate >= 0 ? row + how.gate + before : nullptr, *weight = how.weight;
    if (weight) weight += group * how.weight_step;
    const auto gate_at = [&](long c) { return activate(how.activation, some(gate + c, size - c)); };
    if (gate && how.gate_first)
        for (long c = 0; c < size; c += W) keep_some(x + c, some(x + c, size - c) * gate_at(c), size - c);
    vec lanes = vec{};
    if (how.centered) {
        for (long c = 0; c < size; c += W) lanes += some(x + c, size - c);
        const float mean = sum(lanes) / size;
        for (long c = 0; c < size; c += W) keep_some(x + c, some(x + c, size - c) - mean, size - c);
        lanes = vec{};
    }
    for (long c = 0; c < size; c += W) {
        const vec y = some(x + c, size - c);
        lanes += y * y;
    }
    const float factor = 1.0f / std::sqrt(sum(lanes) / size + how.eps);
    for (long c = 0; c < size; c += W) {
        vec y = some(x + c, size - c) * factor;
        if (weight) y *= some(weight + c, size - c);
        if (gate && !how.gate_first) y *= gate_at(c);
        keep_some(x + c, y, size - c);
    }
}

inline void run_gate(const longspan_gate& how, float* row, long group) {
    const float* x = row + how.from + group * how.apart;
    float* y = row + how.by + group * how.size;
    for (long c = 0; c < how.size; c += W) {
        const long n = how.size - c;
        keep_some(y + c, activate(how.activation, some(x + c, n)) * some(y + c, n), n);
    }
}

// ``memory``: room for one head and its angles.
inline void run_turn(const longspan_turn& how, std::int64_t position, float* row, float* memory) {
    float *angles = memory, *turned = memory + how.size;
    turns(how.rates, position, angles, how.size);
    for (float *x = row + how.at, *end = x + how.heads * how.apart; x < end; x += how.apart) {
        rotate(x, angles, turned, how.size);
        std::memcpy(x, turned, sizeof(float) * how.size);
    }
}

constexpr long CHANNELS = 512;  // of a convolution in one unit of work, a multiple of W

// The state of a unit: numbers, or rows of channels with these strides.
template <class S>
struct Place {
    S* at;
    long row = 0, channel = 1;
};

// The recent inputs of sequence b from ``channel`` on, where ``inputs`` are those of all sequences.
template <class S>
Place<S> recent(const longspan_convolve& how, void* all, long b, long channel) {
    S* inputs = static_cast<S*>(all) + b * how.rows * how.channels;
    return how.by_channel ? Place<S>{inputs + channel * how.rows, 1, how.rows} : Place<S>{inputs + channel, how.channels, 1};
}

inline long channels_of(const longspan_convolve& how, long channel) {
    return how.channels - channel < CHANNELS ? how.channels - channel : CHANNELS;
}

// ``inputs``: the recent ones of the channels from ``channel`` on.
template <class S>
void run_convolve(const longspan_convolve& how, Place<S> inputs, float* row, long channel, float* window) {
    const long count = channels_of(how, channel);
    float* x = row + how.at + channel;
    const Line<float, S> line{inputs.at, x,        x,       inputs.row, inputs.channel, 1, how.weights + channel * (how.taps + 1),
                                  how.taps,  how.rows};
    with_taps(how.taps, [&](auto taps) {
        constexpr int count_of_taps = decltype(taps)::count;
        if (how.linear)
            convolve_token<count_of_taps, false>(line, count, window);
        else
            convolve_token<count_of_taps, true>(line, count, window);
    });
}

// Heads from ... to, counted over the rows, whose sums begin at ``sums``; ``width`` numbers lie between the rows.
inline void run_recur(const longspan_recur& how, float* sums, float* rows, long width, long from, long to) {
    const float* decays = how.log_decays >= 0 ? rows + how.log_decays : how.log_decay;
    const gated::Step<float> step{sums, rows + how.query, rows + how.key, rows + how.value, decays,
                                  how.beta >= 0 ? rows + how.beta : nullptr, rows + how.to, how.heads,
                                  how.heads / how.key_heads, how.keys, how.values, static_cast<int>(how.decay),
                                  how.normalize != 0, how.scale, width, how.log_decays >= 0 ? width : 0};
    gated::step_rows(step, from, to);
}

// One head of one sequence, whose sums begin at ``sums``; those of the thread end at ``end``.
inline void run_rwkv(const longspan_rwkv& how, float* sums, const float* end, float* row, long h) {
    const long keys = how.keys, values = how.values, at = h * keys, place = h * values;
    const float *k = row + how.key + at, *rate = row + how.rate + at;
    general::Token token;
    token.q = row + how.query + at, token.v = row + how.value + place, token.out = row + how.to + place;
    token.k = token.own_k, token.e = token.own_e, token.state = sums, token.end = end;
    float *direction = token.own_r, length = how.least, bonus = 0.0f;
    for (long d = 0; d < keys; ++d) {
        direction[d] = k[d] * how.directions[at + d];
        length += direction[d] * direction[d];
        token.own_k[d] = k[d] + k[d] * (rate[d] - 1.0f) * how.shares[at + d];
        bonus += token.q[d] * token.own_k[d] * how.bonus[at + d];
    }
    const float factor = 1.0f / std::sqrt(length);
    for (long d = 0; d < keys; ++d) {
        direction[d] *= factor;
        token.own_e[d] = direction[d] * rate[d];
    }
    general::prepare(token, direction, row + how.log_decays + at, by_channel, true, keys);
    long e = general::columns<4>(token, 0, keys, values, 1.0f);
    e = general::columns<1>(token, e, keys, values, 1.0f);
    for (; e < values; ++e) general::column(token, e, keys, values, 1.0f);
    float mean = 0.0f, square = 0.0f, *y = token.out;
    for (long j = 0; j < values; ++j) mean += y[j];
    mean /= values;
    for (long j = 0; j < values; ++j) square += (y[j] - mean) * (y[j] - mean);
    const float inverse = 1.0f / std::sqrt(square / values + how.eps), *gate = row + how.gate + place;
    for (long j = 0; j < values; ++j)
        y[j] = ((y[j] - mean) * inverse * how.weight[place + j] + how.bias[place + j] + bonus * token.v[j]) * gate[j];
}

inline void run_arrange(const longspan_arrange& how, float* row) {
    for (long i = 0; i < how.count; ++i)
        std::memcpy(row + how.to + i * how.size, row + how.from + how.places[i], sizeof(float) * how.size);
}

constexpr long SCANNED = 64;  // channels of a selective scan in one unit of work, a multiple of W

// The channels of one unit from ``channel`` on; ``states`` are those of the sequence.
inline void run_select(const longspan_select& how, float* states, float* row, long channel) {
    const float *b = row + how.b, *c = row + how.c;
    const long size = how.size, end = how.channels - channel < SCANNED ? how.channels : channel + SCANNED;
    for (; channel < end; channel += W) {
        const long n = end - channel;
        const vec x = some(row + how.x + channel, n), d = some(row + how.dt + channel, n);
        float steps[W], inputs[W], lanes[W * W] = {}, read[W];
        store(steps, d), store(inputs, d * x);
        for (long j = 0; j < (n < W ? n : W); ++j) {
            float* state = states + (channel + j) * size;
            const float* rates = how.rates + (channel + j) * size;
            vec total{};
            for (long s = 0; s < size; s += W) {
                const vec h = some(state + s, size - s) * exponential(steps[j] * some(rates + s, size - s)) +
                              inputs[j] * some(b + s, size - s);
                keep_some(state + s, h, size - s);
                total += h * some(c + s, size - s);
            }
            store(lanes + j * W, total);
        }
        sum_lanes(lanes, W, read);
        const vec y = load(read) + some(how.skip + channel, n) * x;
        keep_some(row + how.to + channel, y * silu(some(row + how.gate + channel, n)), n);
    }
}

// The experts of a row with their factors.
inline void choose(const longspan_experts& how, const float* row, std::int32_t* which, float* factors) {
    const float* logits = row + how.logits;
    const long chosen = how.chosen;
    for (long e = 0, found = 0; e < how.count; ++e) {
        if (found == chosen && !(logits[e] > logits[which[found - 1]])) continue;
        // In order of the logits; the first of equal ones.
        long at = found < chosen ? found++ : chosen - 1;
        for (; at > 0 && logits[e] > logits[which[at - 1]]; --at) which[at] = which[at - 1];
        which[at] = static_cast<std::int32_t>(e);
    }
    const float most = logits[which[0]];
    vec all{};
    for (long e = 0; e < how.count && !how.normalize; e += W) {
        const vec x = exponential(some(logits + e, how.count - e) - most);
        float kept[W] = {};
        keep_some(kept, x, how.count - e);
        all += load(kept);
    }
    float total = sum(all);
    for (long i = 0; i < chosen; ++i) {
        factors[i] = exponential(splat(logits[which[i]] - most))[0];
        if (how.normalize) total += factors[i];
    }
    for (long i = 0; i < chosen; ++i) factors[i] /= total;
    if (how.shared) {
        which[chosen] = static_cast<std::int32_t>(how.count);
        factors[chosen] = how.by < 0 ? 1.0f : sigmoid(splat(row[how.by]))[0];
    }
}

// One head of one sequence with its sums; the same thread processes those before ``end``. ``memory``: 6 heads.
inline void run_linear(const longspan_linear_attention& how, float* sums, const float* end, std::int64_t position, long h,
                       float* row, float* memory) {
    const long d = how.size;
    const float *q = row + how.from + h * d, *k = q + how.heads * d, *v = k + how.heads * d;
    float *fq = memory, *fk = fq + d, *rq = fk + d, *rk = rq + d, *angles = rk + d;
    map_token(static_cast<int>(how.map), q, fq, d);
    map_token(static_cast<int>(how.map), k, fk, d);
    Token token{fk, fq, fk, fq, v};
    if (how.rates) {
        turns(how.rates, position, angles, d);
        rotate(fq, angles, rq, d);
        rotate(fk, angles, rk, d);
        token = {rk, rq, fk, fq, v};
    }
    advance_head(sums, end, token, row + how.to + h * d, d, d, how.eps);
}

// All query heads that share key head g of sequence b; its key and value are first written to the slot. ``memory``: 3 heads.
template <class T>
void run_softmax(const longspan_softmax_attention& how, const longspan_state& state, long b, long g, long slot, float* row,
                 float* memory) {
    const long d = how.size, members = how.heads / how.groups;
    const float *k = row + how.key + g * d, *v = row + how.value + g * d;
    const long begin = state.begin ? state.begin[b] : 0;
    T* keys = static_cast<T*>(state.first) + (b * how.groups + g) * state.capacity * d;
    T* values = static_cast<T*>(state.second) + (b * how.groups + g) * state.capacity * d;
    float *q = memory, *turned = q + d, *angles = turned + d;
    if (how.rates) {
        turns(how.rates, slot, angles, d);
        rotate(k, angles, turned, d);
        k = turned;
    }
    for (long j = 0; j < d; ++j) {
        narrow(k[j], keys + slot * d + j);
        narrow(v[j], values + slot * d + j);
    }
    for (long h = g * members; h < (g + 1) * members; ++h) {
        const float* from = row + how.query + h * how.apart;
        if (how.rates) {
            rotate(from, angles, turned, d);
            from = turned;
        }
        for (long j = 0; j < d; ++j) q[j] = from[j] * how.scale;
        softmax_head(q, keys + begin * d, values + begin * d, slot + 1 - begin, d, row + how.to + h * d);
    }
}

}  // namespace
