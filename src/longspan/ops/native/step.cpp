// One token of normalised linear attention, in one pass over the state. Plain C interface; see step.py for shapes.
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

// e^x to 2 units in the last place for x in [-87, 88]; plain arithmetic, so that loops over it become vector code.
// Cody and Waite's reduction x = n ln 2 + r, then the Taylor series of e^r to degree 7 on |r| <= ln 2 / 2.
inline float exponential(float x) {
    x = x < -87.0f ? -87.0f : (x > 88.0f ? 88.0f : x);
    const float n = std::nearbyint(x * 1.44269504f);
    const float r = (x - n * 0.693145752f) - n * 1.42860677e-6f;
    float p = 1.98412698e-4f;
    p = p * r + 1.38888889e-3f;
    p = p * r + 8.33333333e-3f;
    p = p * r + 4.16666667e-2f;
    p = p * r + 1.66666667e-1f;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    const std::int32_t bits = (static_cast<std::int32_t>(n) + 127) << 23;
    float power;
    std::memcpy(&power, &bits, sizeof power);
    return p * power;
}

enum Map { elu = 0, relu = 1, squared_relu = 2, clamped_exp = 3 };

void features(const float* x, float* out, long size, int map) {
    switch (map) {
        case elu:
            for (long i = 0; i < size; ++i) {
                const float below = exponential(x[i] < 0.0f ? x[i] : 0.0f);
                out[i] = x[i] > 0.0f ? x[i] + 1.0f : below;
            }
            break;
        case relu:
            for (long i = 0; i < size; ++i) out[i] = x[i] > 0.0f ? x[i] : 0.0f;
            break;
        case squared_relu:
            for (long i = 0; i < size; ++i) out[i] = x[i] > 0.0f ? x[i] * x[i] : 0.0f;
            break;
        default:
            for (long i = 0; i < size; ++i) out[i] = exponential(x[i] < 30.0f ? x[i] : 30.0f);
    }
}

// state (D, E+1): S += k (v, 1)^T; read = q^T S. E is a constant where it is a usual head size, else 0.
template <long E>
void advance(float* state, const float* q, const float* k, const float* v, float* out, long keys, long values,
             float eps) {
    const long width = E ? E : values;
    float below = 0.0f;
    for (long e = 0; e < width; ++e) out[e] = 0.0f;
    for (long d = 0; d < keys; ++d, state += width + 1) {
        const float kd = k[d], qd = q[d];
        for (long e = 0; e < width; ++e) {
            const float s = state[e] + kd * v[e];
            state[e] = s;
            out[e] += qd * s;
        }
        const float z = state[width] + kd;
        state[width] = z;
        below += qd * z;
    }
    const float scale = 1.0f / (below + eps);
    for (long e = 0; e < width; ++e) out[e] *= scale;
}

}  // namespace

// rows = B H heads; state (rows, D, E+1), overwritten; q, k (rows, D); v, out (rows, E). Returns 0, or 1 for a head
// that is too large.
extern "C" int longspan_linear_step(float* state, const float* q, const float* k, const float* v, float* out, long rows,
                                    long keys, long values, int map, float eps, int threads) {
    constexpr long limit = 1024;
    if (keys > limit || values > limit) return 1;
    // Below this, waking a second thread costs more than it saves.
    const bool parallel = rows * keys * values > 65536;
#pragma omp parallel for num_threads(threads) schedule(static) if (parallel)
    for (long row = 0; row < rows; ++row) {
        float fq[limit], fk[limit], o[limit];
        features(q + row * keys, fq, keys, map);
        features(k + row * keys, fk, keys, map);
        float* s = state + row * keys * (values + 1);
        const float* x = v + row * values;
        switch (values) {
            case 32: advance<32>(s, fq, fk, x, o, keys, values, eps); break;
            case 64: advance<64>(s, fq, fk, x, o, keys, values, eps); break;
            case 128: advance<128>(s, fq, fk, x, o, keys, values, eps); break;
            default: advance<0>(s, fq, fk, x, o, keys, values, eps);
        }
        std::memcpy(out + row * values, o, sizeof(float) * static_cast<std::size_t>(values));
    }
    return 0;
}
