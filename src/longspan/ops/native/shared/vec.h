// Vectors of floats as wide as the machine's registers, by the compiler's vector extensions (GCC and clang, any CPU).
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__F16C__))
#include <immintrin.h>
#elif defined(__SSE2__) && !defined(__AVX2__)
#include <emmintrin.h>
#define LONGSPAN_SSE2
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif
#include "isa.h"

namespace {

#if defined(__AVX512F__)
constexpr long W = 16;  // floats in a vector
#elif defined(__AVX2__)
constexpr long W = 8;
#else
constexpr long W = 4;
#endif

typedef float vec __attribute__((vector_size(W * 4)));
typedef std::int32_t ivec __attribute__((vector_size(W * 4)));
typedef float unaligned_vec __attribute__((vector_size(W * 4), aligned(4), may_alias));
typedef std::uint16_t halves __attribute__((vector_size(W * 2)));
typedef std::uint16_t unaligned_halves __attribute__((vector_size(W * 2), aligned(2), may_alias));
typedef std::uint32_t words __attribute__((vector_size(W * 4)));

inline vec load(const float* p) { return *reinterpret_cast<const unaligned_vec*>(p); }
inline void store(float* p, vec x) { *reinterpret_cast<unaligned_vec*>(p) = x; }
inline vec splat(float x) { return x - vec{}; }

// x itself, for numbers that are used more than once: the compiler would load them again for each use.
inline vec in_register(vec x) {
#if defined(__x86_64__)
    asm("" : "+v"(x));
#endif
    return x;
}

// bfloat16 is the upper half of a float.
struct bfloat16 {
    std::uint16_t bits;
};
inline float widen(float x) { return x; }
inline float widen(bfloat16 x) {
    const std::uint32_t word = static_cast<std::uint32_t>(x.bits) << 16;
    float out;
    std::memcpy(&out, &word, sizeof out);
    return out;
}
inline void narrow(float x, float* out) { *out = x; }
inline void narrow(float x, bfloat16* out) {
    std::uint32_t word;
    std::memcpy(&word, &x, sizeof word);
    // To nearest, ties to even; NaN stays NaN.
    out->bits = static_cast<std::uint16_t>(x != x ? 0x7fc0 : (word + 0x7fff + ((word >> 16) & 1)) >> 16);
}
inline vec load(const bfloat16* p) {
#if defined(__AVX512F__)
    // The same in one instruction, which GCC 12 does not generate.
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16);
#elif defined(__AVX2__) && defined(__F16C__)
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return (vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16);
#elif defined(LONGSPAN_SSE2)
    return (vec)_mm_unpacklo_epi16(_mm_setzero_si128(), _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#else
    const halves raw = *reinterpret_cast<const unaligned_halves*>(p);
    const words wide = __builtin_convertvector(raw, words) << 16;
    return (vec)wide;  // a cast between vectors keeps the bits
#endif
}
inline void store(bfloat16* p, vec x) {
    const words word = (words)x;
#if defined(LONGSPAN_SSE2)
    // Signed, so that this instruction set can pack them; none exceeds 16 bits, so that nothing saturates.
    ivec rounded = (ivec)(word + 0x7fff + ((word >> 16) & 1)) >> 16;
    const ivec number = x == x;
    rounded = (rounded & number) | (~number & 0x7fc0);
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi32((__m128i)rounded, (__m128i)rounded));
#else
    words rounded = (word + 0x7fff + ((word >> 16) & 1)) >> 16;
    const auto number = x == x;
    rounded = number ? rounded : words{} + 0x7fc0;
#if defined(__AVX512F__)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16((__m512i)rounded));
#elif defined(__AVX2__) && defined(__F16C__)
    const __m256i wide = (__m256i)rounded;  // none of them above 0xffff, so that nothing saturates
    const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), packed);
#else
    *reinterpret_cast<unaligned_halves*>(p) = __builtin_convertvector(rounded, halves);
#endif
#endif
}

// float16 has 5 bits of exponent; machine instructions are used if available.
struct float16 {
    std::uint16_t bits;
};
inline float widen(float16 x) {
    // As the exponent of a float, which is 112 larger; infinity and NaN have the largest one in both.
    std::uint32_t word = static_cast<std::uint32_t>(x.bits & 0x7fff) << 13;
    float out;
    if (word >= 0x0f800000u) {
        word |= 0x7f800000u;
        std::memcpy(&out, &word, sizeof out);
    } else {
        std::memcpy(&out, &word, sizeof out);
        out *= 0x1p112f;
    }
    return x.bits & 0x8000 ? -out : out;
}
inline void narrow(float x, float16* out) {
    std::uint32_t word;
    std::memcpy(&word, &x, sizeof word);
    const std::uint32_t sign = word >> 16 & 0x8000;
    word &= 0x7fffffff;
    if (word > 0x7f800000u) {
        out->bits = static_cast<std::uint16_t>(sign | 0x7e00);
        return;
    }
    // To nearest, ties to even: below the smallest normal number by the sum with one whose last bit has that weight.
    std::uint32_t rounded;
    if (word < 0x38800000u) {
        float magnitude;
        std::memcpy(&magnitude, &word, sizeof magnitude);
        magnitude += 0.5f;
        std::memcpy(&rounded, &magnitude, sizeof rounded);
        rounded -= 0x3f000000u;
    } else {
        rounded = (word - 0x38000000u + 0xfff + (word >> 13 & 1)) >> 13;
        if (rounded > 0x7c00) rounded = 0x7c00;
    }
    out->bits = static_cast<std::uint16_t>(sign | rounded);
}
#if defined(__AVX512F__)
inline vec load(const float16* p) {
    return (vec)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline void store(float16* p, vec x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
}
#elif defined(__AVX2__) && defined(__F16C__)
inline vec load(const float16* p) {
    return (vec)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline void store(float16* p, vec x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
}
#else
inline vec load(const float16* p) {
#if defined(__aarch64__)
    uint16x4_t bits;
    std::memcpy(&bits, p, sizeof bits);
    return (vec)vcvt_f32_f16(vreinterpret_f16_u16(bits));
#else
    vec out;
    for (long i = 0; i < W; ++i) out[i] = widen(p[i]);
    return out;
#endif
}
inline void store(float16* p, vec x) {
    for (long i = 0; i < W; ++i) narrow(x[i], p + i);
}
#endif

// size numbers in float: in place, or widened into ``out``.
inline const float* widened(const float* x, long, float*) { return x; }
template <class T>
const float* widened(const T* x, long size, float* out) {
    long i = 0;
    for (; i + W <= size; i += W) store(out + i, load(x + i));
    for (; i < size; ++i) out[i] = widen(x[i]);
    return out;
}
// Where to compute the numbers that ``narrowed`` writes to ``out``: there, or in ``own``.
inline float* room(float* out, float*) { return out; }
template <class T>
float* room(T*, float* own) {
    return own;
}
inline void narrowed(const float*, long, float*) {}
template <class T>
void narrowed(const float* x, long size, T* out) {
    long i = 0;
    for (; i + W <= size; i += W) store(out + i, load(x + i));
    for (; i < size; ++i) narrow(x[i], out + i);
}

inline float sum(vec x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)x);
#else
    float out = 0.0f;
    for (long i = 0; i < W; ++i) out += x[i];
    return out;
#endif
}

inline vec pick(ivec condition, vec a, vec b) { return condition ? a : b; }

// max(x, least); NaN stays NaN.
inline vec at_least(float least, vec x) {
#if defined(__AVX512F__)
    return (vec)_mm512_max_ps(_mm512_set1_ps(least), (__m512)x);
#elif defined(__AVX2__) && defined(__F16C__)
    return (vec)_mm256_max_ps(_mm256_set1_ps(least), (__m256)x);
#else
    return pick(x < splat(least), splat(least), x);
#endif
}

// e^x for x up to 88, to 2 units in the last place; below -86 it is e^-86. Cody and Waite's reduction x = n ln 2 + r, then
// 1 + r + r^2 P(r), where P was fitted for the smallest relative error, 3e-9, on |r| <= ln 2 / 2.
inline vec exponential(vec x) {
    x = at_least(-86.0f, x);
    // Adding 1.5 * 2^23 rounds to an integer in the low bits of the word.
    const vec magic = splat(12582912.0f);
    const vec shifted = x * 1.44269504f + magic;
    const vec n = shifted - magic;
    const vec r = (x - n * 0.693145752f) - n * 1.42860677e-6f;
    vec p = splat(1.381454008e-03f);
    p = p * r + 8.368745213e-03f;
    p = p * r + 4.166839079e-02f;
    p = p * r + 1.666652040e-01f;
    p = p * r + 4.999999343e-01f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    // Times 2^n, which has these bits: a product, so that NaN stays NaN.
    return p * (vec)(((ivec)shifted << 23) + 0x3f800000);
}

// 1 / sigmoid(x), within the range of floats: 1 + e^-x.
inline vec above_one(vec x) { return 1.0f + exponential(vec{} - at_least(-88.0f, x)); }

// x / y for y of 1 or more.
inline vec over(vec x, vec y) {
#if defined(__AVX512F__)
    // 14 bits of the reciprocal, doubled by a Newton step, in half the time of a division.
    const vec guess = (vec)_mm512_rcp14_ps((__m512)y);
    return x * (guess * (2.0f - y * guess));
#else
    return x / y;
#endif
}

inline vec sigmoid(vec x) { return over(splat(1.0f), above_one(x)); }
inline vec silu(vec x) { return over(x, above_one(x)); }

// Lanes of a and b in turn: a0 b0 a1 b1 ... from their lower or upper halves.
#if defined(__clang__)
#define LONGSPAN_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define LONGSPAN_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, ivec{__VA_ARGS__})
#endif
#if defined(__AVX512F__)
inline vec zip_low(vec a, vec b) {
    return LONGSPAN_SHUFFLE(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
}
inline vec zip_high(vec a, vec b) {
    return LONGSPAN_SHUFFLE(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}
#elif defined(__AVX2__)
inline vec zip_low(vec a, vec b) { return LONGSPAN_SHUFFLE(a, b, 0, 8, 1, 9, 2, 10, 3, 11); }
inline vec zip_high(vec a, vec b) { return LONGSPAN_SHUFFLE(a, b, 4, 12, 5, 13, 6, 14, 7, 15); }
#else
inline vec zip_low(vec a, vec b) { return LONGSPAN_SHUFFLE(a, b, 0, 4, 1, 5); }
inline vec zip_high(vec a, vec b) { return LONGSPAN_SHUFFLE(a, b, 2, 6, 3, 7); }
#endif

// out[j, i] = x[i, j] for a square of W by W. Zipping row i with row i + W/2, log2 W times over, is a transposition.
inline void transpose_square(const float* x, long x_row, float* out, long out_row) {
    vec a[W], b[W];
    for (long i = 0; i < W; ++i) a[i] = load(x + i * x_row);
    for (long stage = 1; stage < W; stage *= 2) {
        for (long i = 0; i < W / 2; ++i) {
            b[2 * i] = zip_low(a[i], a[i + W / 2]);
            b[2 * i + 1] = zip_high(a[i], a[i + W / 2]);
        }
        for (long i = 0; i < W; ++i) a[i] = b[i];
    }
    for (long i = 0; i < W; ++i) store(out + i * out_row, a[i]);
}

// out (cols, rows) = x (rows, cols)^T; both sizes are multiples of W.
inline void transpose(const float* x, long x_row, float* out, long out_row, long rows, long cols) {
    for (long i = 0; i < rows; i += W)
        for (long j = 0; j < cols; j += W) transpose_square(x + i * x_row + j, x_row, out + j * out_row + i, out_row);
}

inline long whole_vectors(long n) { return (n + W - 1) / W * W; }

}  // namespace
