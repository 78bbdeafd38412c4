// softplus(x) = log(1 + e^x), without overflow.
#pragma once
#include "vec.h"

namespace {

// log(1 + u) for u in 0 ... 1, as 2 artanh(u / (2 + u)), whose series has a relative error of 2e-8 there.
inline vec log1p_of(vec u) {
    const vec s = u / (2.0f + u), q = s * s;
    vec p = splat(1.0f / 13.0f);
    p = p * q + 1.0f / 11.0f;
    p = p * q + 1.0f / 9.0f;
    p = p * q + 1.0f / 7.0f;
    p = p * q + 1.0f / 5.0f;
    p = p * q + 1.0f / 3.0f;
    p = p * q + 1.0f;
    return 2.0f * s * p;
}

inline vec softplus(vec x) {
    const vec size = (vec)((ivec)x & 0x7fffffff);
    return at_least(0.0f, x) + log1p_of(exponential(vec{} - size));
}

}  // namespace
