// Softmax attention over listed blocks of keys: what its passes forward and backward share.
#pragma once
#include <algorithm>
#include <cmath>

#include "../linear/rows.h"

namespace {

constexpr float NEVER = -INFINITY;  // the logit of a key that is not seen

// Which blocks of keys each block of queries meets: keys[e] and masks + tiles[e] (null for a negative one: all is seen)
// for e in offsets[u] ... offsets[u + 1].
struct Blocks {
    const std::int64_t *offsets, *keys, *tiles;
    const std::uint8_t* masks;  // (tiles, size, size)
    long size;
    const std::uint8_t* mask(long e) const { return tiles[e] < 0 ? nullptr : masks + tiles[e] * size * size; }
};

struct Sizes {
    long batch, groups, heads, tokens, keys, values, blocks;  // groups: heads of keys and values
    long kp() const { return whole_vectors(keys); }
    long vp() const { return whole_vectors(values); }
    long group(long head) const { return head / (heads / groups); }
};

// Logits (rows, width) at ld: NEVER where the mask has 0 or beyond the last key.
inline void hide(float* x, long rows, long cols, long width, long ld, const std::uint8_t* mask, long size) {
    for (long i = 0; i < rows; ++i, x += ld) {
        if (mask)
            for (long j = 0; j < cols; ++j) x[j] = mask[i * size + j] ? x[j] : NEVER;
        for (long j = cols; j < width; ++j) x[j] = NEVER;
    }
}

// e^(x - shift), 0 where a key is not seen, also where nothing is and the shift is no number to be taken off.
inline vec seen_exponential(vec x, vec shift) { return pick(x == splat(NEVER), vec{}, exponential(x - shift)); }

inline float largest(vec x) {
    float out = x[0];
    for (long i = 1; i < W; ++i) out = x[i] > out ? x[i] : out;
    return out;
}

inline void scale_rows(float* x, long rows, long width, float by) {
    for (long j = 0; j < rows * width; j += W) store(x + j, load(x + j) * by);
}

// The tokens of one block of keys, and their transposition, zero beyond the last token and channel.
template <class T>
void read_turned(Rows<const T> rows, long begin, long n, long channels, long padded, long size, float* x, float* turned) {
    read(rows, begin, n, channels, x, padded);
    const long whole = whole_vectors(n);
    if (whole > n) std::memset(x + n * padded, 0, sizeof(float) * (whole - n) * padded);
    transpose(x, padded, turned, size, whole, padded);
}

}  // namespace
