// Feature maps and their slopes; the numbers are those of ops/native/call.py.
#pragma once
#include <cmath>

#include "../shared/vec.h"

namespace {

enum Map { elu = 0, relu = 1, squared_relu = 2, clamped_exp = 3 };

// NaN stays NaN in features and slopes: it fails every comparison, so the last branch is x.
template <int MAP>
inline vec feature(vec x) {
    const vec zero = vec{};
    switch (MAP) {
        case elu: return pick(x <= zero, exponential(pick(x < zero, x, zero)), x + 1.0f);
        case relu: return pick(x <= zero, zero, x);
        case squared_relu: return pick(x <= zero, zero, x * x);
        default: return exponential(pick(x > splat(30.0f), splat(30.0f), x));
    }
}

// Calls f with the map of that number.
template <class F>
inline void with_map(int map, F f) {
    switch (map) {
        case elu: return f([](vec x) { return feature<elu>(x); });
        case relu: return f([](vec x) { return feature<relu>(x); });
        case squared_relu: return f([](vec x) { return feature<squared_relu>(x); });
        default: return f([](vec x) { return feature<clamped_exp>(x); });
    }
}

// The derivative, from x and y = feature(x).
template <int MAP>
inline vec slope(vec x, vec y) {
    const vec zero = vec{};
    switch (MAP) {
        case elu: return pick(x > zero, splat(1.0f), y);
        case relu: return pick(x <= zero, zero, splat(1.0f));
        case squared_relu: return pick(x <= zero, zero, 2.0f * x);
        default: return pick(x > splat(30.0f), zero, y);
    }
}

// The divisor of a sum over keys; infinite for a sum without keys.
inline float divisor(float below) { return below == 0.0f ? INFINITY : below; }

}  // namespace
