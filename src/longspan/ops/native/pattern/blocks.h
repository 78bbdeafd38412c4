// Softmax attention over listed blocks of keys: code that forward and backward passes share.
#pragma once
#include <algorithm>
#include <cmath>

#include "../linear/rows.h"

namespace {

constexpr float NEVER = -INFINITY;  // the logit of a key that is not seen

// Which blocks of keys each block of queries reads: keys[e] and masks + tiles[e] (negative: null, all keys are visible)
// for e in offsets[u] ... offsets[u + 1].
struct Blocks {
    const std::int64_t *offsets, *keys, *tiles;
    const std::uint8_t* masks;  // (tiles, size, size)
    long size;
    const std::uint8_t* mask(long e, long skip) const {
        return tiles[e] < 0 ? nullptr : masks + (tiles[e] * size + skip) * size;
    }
};

// The queries of one block: ``rows`` from number ``begin`` on; the first ``skip`` tokens of the block are not queries.
struct Span {
    long begin, rows, skip;
};

// Queries are the last tokens. Their blocks are those of the tokens, so the first block may be cut at its start.
struct Sizes {
    long batch, groups, heads, queries, keys, values, blocks;  // groups: heads of keys and values
    long tokens;
    long start() const { return tokens - queries; }
    long kp() const { return whole_vectors(keys); }
    long vp() const { return whole_vectors(values); }
    long group(long head) const { return head / (heads / groups); }
};

inline Span span(const Sizes& sizes, long size, long u) {
    const long block = (sizes.start() / size + u) * size, from = std::max(block, sizes.start());
    return {from - sizes.start(), std::min(block + size, sizes.tokens) - from, from - block};
}

// Logits (rows, width) at ld: NEVER where the mask has 0 or beyond the last key.
inline void hide(float* x, long rows, long cols, long width, long ld, const std::uint8_t* mask, long size) {
    for (long i = 0; i < rows; ++i, x += ld) {
        if (mask)
            for (long j = 0; j < cols; ++j) x[j] = mask[i * size + j] ? x[j] : NEVER;
        for (long j = cols; j < width; ++j) x[j] = NEVER;
    }
}

// e^(x - shift), 0 for keys that are not visible, even if none is and the shift is not finite.
inline vec seen_exponential(vec x, vec shift) { return pick(x == splat(NEVER), vec{}, exponential(x - shift)); }

// cap tanh(x / cap), whose derivative is 1 - (its value / cap)^2.
inline vec capped(vec x, vec cap) {
    // Beyond, tanh is 1, and the exponential would overflow.
    const vec far = pick(x > cap * 20.0f, cap * 20.0f, pick(x < cap * -20.0f, cap * -20.0f, x));
    return cap - 2.0f * cap / (exponential(2.0f * far / cap) + 1.0f);
}

inline void cap_rows(float* x, long rows, long width, long ld, float cap) {
    for (long i = 0; i < rows; ++i)
        for (long j = 0; j < width; j += W) store(x + i * ld + j, capped(load(x + i * ld + j), splat(cap)));
}

inline float largest(vec x) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)x);
#else
    float out = x[0];
    for (long i = 1; i < W; ++i) out = x[i] > out ? x[i] : out;
    return out;
#endif
}

inline void scale_rows(float* x, long rows, long width, float by) {
    for (long j = 0; j < rows * width; j += W) store(x + j, load(x + j) * by);
}

// Forget gates: the logit of query i and key j gets sums[i] - sums[j], where sums (B,H,M) never rise with the token. Blocks
// of keys whose logits all fall by more than reach (B,H) are left out. Null for no gates.
struct Gates {
    const double* sums;
    const float* reach;
    bool out_of_reach(long row, long tokens, long query, long last) const {
        return sums && sums[row * tokens + query] - sums[row * tokens + last] < -reach[row];
    }
    // Adds to logits (rows, cols) at ld, for queries and keys from these tokens on.
    void add(long row, long tokens, long query, long rows, long key, long cols, float* x, long ld) const {
        if (!sums) return;
        const double *own = sums + row * tokens + query, *to = sums + row * tokens + key;
        // The sums are large and their differences are not, so that these are in double.
        for (long i = 0; i < rows; ++i)
            for (long j = 0; j < cols; ++j) x[i * ld + j] += static_cast<float>(own[i] - to[j]);
    }
};

inline void add_row(float* total, const float* x, long size) {
    for (long j = 0; j < size; j += W) store(total + j, load(total + j) + load(x + j));
}

// The tokens of one block of keys and their transpose, zero beyond the last token and channel.
template <class T>
void read_turned(Rows<const T> rows, long begin, long n, long channels, long padded, long size, float* x, float* turned) {
    read(rows, begin, n, channels, x, padded);
    const long whole = whole_vectors(n);
    if (whole > n) std::memset(x + n * padded, 0, sizeof(float) * (whole - n) * padded);
    transpose(x, padded, turned, size, whole, padded);
}

// Turns the logits of one row into weights; earlier sums are rescaled to the new maximum.
inline void weigh(float* x, long width, float& top, float& below, float* sum, long vp) {
    vec most = load(x);
    for (long j = W; j < width; j += W) {
        const vec y = load(x + j);
        most = pick(y > most, y, most);
    }
    const float now = std::max(top, largest(most));
    vec total = vec{};
    for (long j = 0; j < width; j += W) {
        const vec p = seen_exponential(load(x + j), splat(now));
        store(x + j, p);
        total += p;
    }
    if (now > top && below > 0.0f) {
        const vec kept = exponential(splat(top - now));
        for (long j = 0; j < vp; j += W) store(sum + j, load(sum + j) * kept);
        below *= kept[0];
    }
    below += ::sum(total);
    top = now;
}

// One row: logits become weights, and the products of dO and v become the gradients of the logits.
inline void slopes(float* p, float* ds, long width, float log, float delta, float cap) {
    // A row without visible keys has minus infinity here, and no gradient.
    const vec none = splat(log == -INFINITY ? 0.0f : 1.0f), shift = splat(log == -INFINITY ? 0.0f : log);
    for (long j = 0; j < width; j += W) {
        const vec score = load(p + j), x = seen_exponential(score, shift) * none;
        store(p + j, x);
        vec slope = x * (load(ds + j) - delta);
        // A key that is not visible has minus infinity, and slope 0.
        if (cap > 0.0f) slope = pick(score == splat(NEVER), vec{}, slope * (1.0f - (score / cap) * (score / cap)));
        store(ds + j, slope);
    }
}

}  // namespace
