// One token of softmax attention over cached keys and values, and rotary positions.
#pragma once
#include <cmath>

#include "../shared/vec.h"

namespace {

constexpr long KEYS = 64;  // cached keys whose weights are computed together

// Pair j of the channels is (j, j + D/2), as in layers.rotate.
inline void rotate(const float* x, const float* turn, float* out, long size) {
    const long half = size / 2;
    for (long j = 0; j < half; ++j) {
        const float c = turn[j], s = turn[half + j];
        out[j] = x[j] * c - x[j + half] * s;
        out[j + half] = x[j] * s + x[j + half] * c;
    }
}

inline void turns(const float* rates, std::int64_t position, float* turn, long size) {
    for (long j = 0; j < size / 2; ++j) {
        const float angle = static_cast<float>(position) * rates[j];
        turn[j] = std::cos(angle);
        turn[size / 2 + j] = std::sin(angle);
    }
}

template <class T>
float dot(const float* a, const T* b, long size) {
    vec acc = vec{};
    long j = 0;
    for (; j + W <= size; j += W) acc += load(a + j) * load(b + j);
    float out = sum(acc);
    for (; j < size; ++j) out += a[j] * widen(b[j]);
    return out;
}

// scores[i] = q.k_i for a whole number of W keys, transposing partial sums instead of adding up lanes one by one.
template <class T>
void dots(const float* q, const T* keys, long count, long size, float* scores) {
    if (size % W) {
        for (long i = 0; i < count; ++i) scores[i] = dot(q, keys + i * size, size);
        return;
    }
    for (long i = 0; i < count; i += W) {
        float lanes[W * W], turned[W * W];
        for (long r = 0; r < W; ++r) {
            vec acc = vec{};
            for (long j = 0; j < size; j += W) acc += load(q + j) * load(keys + (i + r) * size + j);
            store(lanes + r * W, acc);
        }
        transpose_square(lanes, W, turned, W);
        vec total = load(turned);
        for (long r = 1; r < W; ++r) total += load(turned + r * W);
        store(scores + i, total);
    }
}

// One query head over the cached keys and values of its key head: softmax by blocks, with a running maximum.
template <class T>
void softmax_head(const float* q, const T* keys, const T* values, long count, long size, float* out) {
    float scores[KEYS], largest = -INFINITY, total = 0.0f;
    for (long j = 0; j < size; ++j) out[j] = 0.0f;
    for (long begin = 0; begin < count; begin += KEYS) {
        const long n = count - begin < KEYS ? count - begin : KEYS, whole = n / W * W;
        dots(q, keys + begin * size, whole, size, scores);
        for (long i = whole; i < n; ++i) scores[i] = dot(q, keys + (begin + i) * size, size);
        float top = largest;
        for (long i = 0; i < n; ++i) top = scores[i] > top ? scores[i] : top;
        const float before = total == 0.0f ? 0.0f : std::exp(largest - top);
        for (long i = n; i < whole_vectors(n); ++i) scores[i] = -INFINITY;
        for (long i = 0; i < n; i += W) store(scores + i, exponential(load(scores + i) - top));
        total *= before;
        for (long i = 0; i < n; ++i) total += scores[i];
        largest = top;
        long j = 0;
        for (; j + W <= size; j += W) {
            vec acc = load(out + j) * before;
            for (long i = 0; i < n; ++i) acc += scores[i] * load(values + (begin + i) * size + j);
            store(out + j, acc);
        }
        for (; j < size; ++j) {
            float acc = out[j] * before;
            for (long i = 0; i < n; ++i) acc += scores[i] * widen(values[(begin + i) * size + j]);
            out[j] = acc;
        }
    }
    for (long j = 0; j < size; ++j) out[j] /= total;
}

}  // namespace
