// Products of rows of activations with a weight in blocks of few bits. Weights are in groups of 16 rows; a cell is what a
// group has of one block of 32 inputs. For each cell of an output the integers are summed exactly and the sums of cells are
// added in order, so that an output has the same bits whatever is computed beside it.
//
// Storage of a cell, by format: bytes u of 16 rows, four inputs of each row at a time ("a chunk"), and two scales of 16 rows:
//   Q8_0  8 chunks; weight d (u - 128)
//   Q4_0  4 chunks, inputs 0 ... 15 in the lower and 16 ... 31 in the upper halves of their bytes; weight d (u - 8)
//   Q4_K  likewise; weight d s u - m t, where d and m are of 8 cells
//   Q6_K  likewise for four bits, and two chunks with the upper two bits of inputs 0 ... 15 and 16 ... 31, those of chunk c
//         from bit 2c on; weight d s (u - 32), s for each half of the inputs, and d of 8 cells
#pragma once
#include "../shared/vec.h"

namespace {
namespace quantized {

enum Format { plain = 0, q8_0 = 1, q4_0 = 2, q4_k = 3, q6_k = 4 };  // as in ops/quantized/native.py
enum Activations { int16 = 0, int8 = 1, float32 = 2 };
constexpr long GROUP = 16, CELL = 32, CHUNK = 64, SCALES = 32, SUPER = 8;
constexpr int P = GROUP / W;   // vectors of rows in a group
constexpr long AHEAD = 4096;  // bytes: a page, at whose end processors stop to prefetch themselves
constexpr int TOGETHER = 4;  // rows of activations that are multiplied together
constexpr float LARGEST = 32639.0f;  // of int16: 127 * 256 + 127, so that both bytes are signed

constexpr long cell_bytes(int format) { return format == q8_0 ? 512 : format == q6_k ? 384 : 256; }
constexpr int offset_of(int format) { return format == q8_0 ? 128 : format == q4_0 ? 8 : format == q6_k ? 32 : 0; }
constexpr bool in_halves(int format) { return format == q6_k; }
constexpr long factors_of(int format) { return format == q4_k ? 2 : format == q6_k ? 1 : 0; }

struct Weight {
    const std::uint8_t *quants, *scales;
    const float16* factors;  // of 8 cells, for formats that have them
    long inputs, outputs;
    int format, activations;

    long cells() const { return inputs / CELL; }
    long groups() const { return (outputs + GROUP - 1) / GROUP; }
};

// How integers of activations are stored: the lower and upper bytes, bytes alone, pairs of int16 from even and odd places, or
// int16 in order.
enum Storage { limbs, bytes, words, shorts };
constexpr Storage storage_of([[maybe_unused]] int format, [[maybe_unused]] int activations) {
#if (defined(__AVX512VNNI__) && defined(__AVX512BW__)) || defined(__ARM_FEATURE_DOTPROD)
    return activations == int16 ? limbs : bytes;
#elif defined(__aarch64__)
    return activations == int16 ? shorts : bytes;
#elif defined(__AVX512BW__) || (defined(__AVX2__) && !defined(__AVX512F__))
    // Sums of two products of bytes must fit into int16.
    return activations == int8 && format != q8_0 ? bytes : words;
#else
    return words;
#endif
}

// What is subtracted from bytes of weights before the products, where these are of bytes with a sign.
constexpr int signed_by([[maybe_unused]] int format, [[maybe_unused]] int activations) {
#if defined(__aarch64__)
    return format == q8_0 && storage_of(format, activations) != shorts ? offset_of(q8_0) : 0;
#else
    return 0;
#endif
}

// 32 activations: scale * integers, and scale * their sum; ``shift`` is the sum of the integers, or of each half, times the
// offset of the weights, or what is left of it.
struct alignas(16) Cell {
    float scale, total;
    std::int32_t shift[2];
    union {
        struct {
            std::int8_t low[CELL], high[CELL];
        };
        struct {
            std::int16_t even[CELL / 2], odd[CELL / 2];
        };
        std::int16_t whole[CELL];
        float numbers[CELL];
    };
};

inline ivec nearest(vec x) {
#if defined(__AVX512F__)
    return (ivec)_mm512_cvtps_epi32((__m512)x);
#elif defined(__AVX2__) && defined(__F16C__)
    return (ivec)_mm256_cvtps_epi32((__m256)x);
#elif defined(__aarch64__)
    return (ivec)vcvtnq_s32_f32((float32x4_t)x);
#else
    ivec out;
    for (long i = 0; i < W; ++i) out[i] = static_cast<std::int32_t>(__builtin_lrintf(x[i]));
    return out;
#endif
}

// The activations x of one cell in the form that a weight needs. Not finite ones make the products NaN; numbers below 1e-30
// count as 0.
inline void prepare(const float* x, int format, int activations, Cell* out) {
    if (activations == float32) {
        float total = 0.0f;
        for (long i = 0; i < CELL; ++i) total += out->numbers[i] = x[i];
        out->total = total;
        return;
    }
    ivec most{};
    for (long i = 0; i < CELL; i += W) {
        const ivec size = (ivec)load(x + i) & 0x7fffffff;
        most = size > most ? size : most;
    }
    std::int32_t largest = 0;
    for (long i = 0; i < W; ++i) largest = most[i] > largest ? most[i] : largest;
    float size;
    std::memcpy(&size, &largest, sizeof size);
    const bool finite = largest < 0x7f800000, none = !finite || size < 1e-30f;
    const float limit = activations == int8 ? 127.0f : LARGEST;
    const vec factor = splat(none ? 0.0f : limit / size);
    std::int32_t q[CELL];
    for (long i = 0; i < CELL; i += W) {
        const ivec rounded = none ? ivec{} : nearest(load(x + i) * factor);
        std::memcpy(q + i, &rounded, sizeof rounded);
    }
    std::int32_t sums[2] = {0, 0};
    for (long h = 0; h < 2; ++h)
        for (long i = 0; i < CELL / 2; ++i) sums[h] += q[h * CELL / 2 + i];
    out->scale = !finite ? __builtin_nanf("") : none ? 0.0f : size / limit;
    out->total = out->scale * static_cast<float>(sums[0] + sums[1]);
    const int offset = offset_of(format) - signed_by(format, activations);
    out->shift[0] = offset * (in_halves(format) ? sums[0] : sums[0] + sums[1]);
    out->shift[1] = offset * sums[1];
    const Storage storage = storage_of(format, activations);
    if (storage == shorts)
        for (long i = 0; i < CELL; ++i) out->whole[i] = static_cast<std::int16_t>(q[i]);
    else if (storage == words)
        for (long i = 0; i < CELL / 2; ++i) {
            out->even[i] = static_cast<std::int16_t>(q[2 * i]);
            out->odd[i] = static_cast<std::int16_t>(q[2 * i + 1]);
        }
    else
        for (long i = 0; i < CELL; ++i) {
            out->low[i] = static_cast<std::int8_t>(q[i]);
            out->high[i] = static_cast<std::int8_t>((q[i] - out->low[i]) >> 8);
        }
}

inline ivec load_bytes(const std::uint8_t* p) {
    ivec out;
    std::memcpy(&out, p, sizeof out);
    return out;
}

// Chunk c of half h of the inputs as bytes; q points to the first of W rows.
template <int FORMAT>
inline ivec chunk(const std::uint8_t* q, int c, int h) {
    if (FORMAT == q8_0) return load_bytes(q + (4 * h + c) * CHUNK);
    const ivec both = load_bytes(q + c * CHUNK), four = (h ? both >> 4 : both) & 0x0f0f0f0f;
    if (FORMAT != q6_k) return four;
    const ivec two = load_bytes(q + (4 + h) * CHUNK);
    return four | ((c < 2 ? two << (4 - 2 * c) : two >> (2 * c - 4)) & 0x30303030);
}

inline vec numbers(ivec x) { return __builtin_convertvector(x, vec); }

// W bytes as numbers, with or without sign.
inline vec small_numbers(const std::uint8_t* p, bool with_sign) {
#if defined(__AVX512F__)
    const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return (vec)_mm512_cvtepi32_ps(with_sign ? _mm512_cvtepi8_epi32(x) : _mm512_cvtepu8_epi32(x));
#elif defined(__AVX2__) && defined(__F16C__)
    const __m128i x = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    return (vec)_mm256_cvtepi32_ps(with_sign ? _mm256_cvtepi8_epi32(x) : _mm256_cvtepu8_epi32(x));
#elif defined(__aarch64__)
    std::uint32_t four;
    std::memcpy(&four, p, sizeof four);
    const uint8x8_t x = vreinterpret_u8_u32(vdup_n_u32(four));
    if (!with_sign) return (vec)vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(x))));
    return (vec)vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u8(x)))));
#else
    vec out;
    for (long i = 0; i < W; ++i) out[i] = with_sign ? static_cast<std::int8_t>(p[i]) : p[i];
    return out;
#endif
}

// a b + c with one rounding if the machine has such an instruction.
inline vec fused(vec a, vec b, vec c) {
#if defined(__AVX512F__)
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__F16C__) && defined(__FMA__)
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

// The factors of the integers of a cell for W rows, and those of the second half, or of the sum of the activations.
template <int FORMAT>
inline void factors(const std::uint8_t* scale, const float16* super, vec* first, vec* second) {
    if (FORMAT == q4_k) {
        *first = load(super) * small_numbers(scale, false);
        *second = vec{} - load(super + GROUP) * small_numbers(scale + GROUP, false);
    } else if (FORMAT == q6_k) {
        const vec d = load(super);
        *first = d * small_numbers(scale, true);
        *second = d * small_numbers(scale + GROUP, true);
    } else {
        // Where 16 rows are several vectors, ``scale`` points to the first byte of W scales of one byte.
        *first = load(reinterpret_cast<const float16*>(scale));
    }
}

#if defined(__AVX512BW__)
#define LONGSPAN_WIDE(name) _mm512_##name
typedef __m512i wide;
inline ivec four_bytes(const void* p) {
    std::int32_t x;
    std::memcpy(&x, p, sizeof x);
    return (ivec)_mm512_set1_epi32(x);
}
#elif defined(__AVX2__) && !defined(__AVX512F__)
#define LONGSPAN_WIDE(name) _mm256_##name
typedef __m256i wide;
inline ivec four_bytes(const void* p) {
    std::int32_t x;
    std::memcpy(&x, p, sizeof x);
    return (ivec)_mm256_set1_epi32(x);
}
#endif

// The sum of products of bytes u of W rows with activations, exactly.
template <int FORMAT, Storage>
struct Sum;

template <int FORMAT>
struct Sum<FORMAT, words> {
    ivec sum{};
    void add(ivec u, const Cell& x, int at) {
#if defined(LONGSPAN_WIDE)
        const ivec even = u & 0x00ff00ff, odd = (ivec)LONGSPAN_WIDE(srli_epi16)((wide)u, 8);
        sum += (ivec)LONGSPAN_WIDE(madd_epi16)((wide)even, (wide)four_bytes(x.even + 2 * at));
        sum += (ivec)LONGSPAN_WIDE(madd_epi16)((wide)odd, (wide)four_bytes(x.odd + 2 * at));
#else
        for (int j = 0; j < 2; ++j) {
            sum += (u >> 16 * j & 255) * static_cast<std::int32_t>(x.even[2 * at + j]);
            sum += (u >> (16 * j + 8) & 255) * static_cast<std::int32_t>(x.odd[2 * at + j]);
        }
#endif
    }
    ivec total() const { return sum; }
};

#if defined(LONGSPAN_WIDE)
template <int FORMAT>
struct Sum<FORMAT, bytes> {
    ivec sum{};
    void add(ivec u, const Cell& x, int at) {
        const wide y = (wide)four_bytes(x.low + 4 * at);
#if defined(__AVX512VNNI__)
        sum = (ivec)_mm512_dpbusd_epi32((wide)sum, (wide)u, y);
#else
        const wide pairs = LONGSPAN_WIDE(maddubs_epi16)((wide)u, y);
        if (FORMAT == q6_k)
            sum += (ivec)LONGSPAN_WIDE(madd_epi16)(pairs, LONGSPAN_WIDE(set1_epi16)(1));
        else  // eight of them fit into int16: 8 * 2 * 15 * 127
            sum = (ivec)LONGSPAN_WIDE(add_epi16)((wide)sum, pairs);
#endif
    }
    ivec total() const {
#if !defined(__AVX512VNNI__)
        if (FORMAT != q6_k) return (ivec)LONGSPAN_WIDE(madd_epi16)((wide)sum, LONGSPAN_WIDE(set1_epi16)(1));
#endif
        return sum;
    }
};
#endif

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
template <int FORMAT>
struct Sum<FORMAT, limbs> {
    ivec low{}, high{};
    void add(ivec u, const Cell& x, int at) {
        low = (ivec)_mm512_dpbusd_epi32((wide)low, (wide)u, (wide)four_bytes(x.low + 4 * at));
        high = (ivec)_mm512_dpbusd_epi32((wide)high, (wide)u, (wide)four_bytes(x.high + 4 * at));
    }
    ivec total() const { return (high << 8) + low; }
};
#endif

#if defined(__aarch64__)
// Bytes with a sign: those of Q8_0 lose their offset, others are below 128.
template <int FORMAT>
inline int8x16_t with_sign(ivec u) {
    return FORMAT == q8_0 ? vreinterpretq_s8_u8(veorq_u8((uint8x16_t)u, vdupq_n_u8(128))) : (int8x16_t)u;
}
inline int8x16_t four_bytes(const std::int8_t* p) {
    std::int32_t x;
    std::memcpy(&x, p, sizeof x);
    return vreinterpretq_s8_s32(vdupq_n_s32(x));
}

template <int FORMAT>
struct Sum<FORMAT, bytes> {
#if defined(__ARM_FEATURE_DOTPROD)
    int32x4_t sum = vdupq_n_s32(0);
    void add(ivec u, const Cell& x, int at) { sum = vdotq_s32(sum, with_sign<FORMAT>(u), four_bytes(x.low + 4 * at)); }
    ivec total() const { return (ivec)sum; }
#else
    int32x4_t lower = vdupq_n_s32(0), upper = vdupq_n_s32(0);  // of two rows each, in two parts
    void add(ivec u, const Cell& x, int at) {
        const int8x16_t w = with_sign<FORMAT>(u), y = four_bytes(x.low + 4 * at);
        lower = vpadalq_s16(lower, vmull_s8(vget_low_s8(w), vget_low_s8(y)));
        upper = vpadalq_s16(upper, vmull_high_s8(w, y));
    }
    ivec total() const { return (ivec)vpaddq_s32(lower, upper); }
#endif
};

#if defined(__ARM_FEATURE_DOTPROD)
template <int FORMAT>
struct Sum<FORMAT, limbs> {
    int32x4_t low = vdupq_n_s32(0), high = vdupq_n_s32(0);
    void add(ivec u, const Cell& x, int at) {
        const int8x16_t w = with_sign<FORMAT>(u);
        low = vdotq_s32(low, w, four_bytes(x.low + 4 * at));
        high = vdotq_s32(high, w, four_bytes(x.high + 4 * at));
    }
    ivec total() const { return (ivec)vaddq_s32(vshlq_n_s32(high, 8), low); }
};
#else
template <int FORMAT>
struct Sum<FORMAT, shorts> {
    int32x4_t row[4] = {};  // in four parts
    void add(ivec u, const Cell& x, int at) {
        const int16x8_t lower = vreinterpretq_s16_u16(vmovl_u8(vget_low_u8((uint8x16_t)u)));
        const int16x8_t upper = vreinterpretq_s16_u16(vmovl_high_u8((uint8x16_t)u));
        const int16x4_t y = vld1_s16(x.whole + 4 * at);
        const int16x8_t both = vcombine_s16(y, y);
        row[0] = vmlal_s16(row[0], vget_low_s16(lower), y);
        row[1] = vmlal_high_s16(row[1], lower, both);
        row[2] = vmlal_s16(row[2], vget_low_s16(upper), y);
        row[3] = vmlal_high_s16(row[3], upper, both);
    }
    ivec total() const { return (ivec)vpaddq_s32(vpaddq_s32(row[0], row[1]), vpaddq_s32(row[2], row[3])); }
};
#endif
#endif

// Prefetches a cell that is needed later: a fifth faster for one row (`longspan bench weights`).
template <int FORMAT>
inline void ahead(const std::uint8_t* q) {
    for (long i = 0; i < cell_bytes(FORMAT); i += CHUNK) __builtin_prefetch(q + AHEAD + i);
}

// ROWS rows of prepared activations, ``cells`` each, times VECTORS vectors of rows of a group from row ``from`` on.
template <int FORMAT, int ACTIVATIONS, int ROWS, int VECTORS>
inline void integers(const Weight& w, long group, long from, const Cell* x, vec (&out)[ROWS][VECTORS]) {
    const long cells = w.cells();
    const std::uint8_t *q = w.quants + group * cells * cell_bytes(FORMAT) + 4 * from, *s = w.scales + group * cells * SCALES;
    const long supers = factors_of(FORMAT) * GROUP, step = supers ? 1 : 2;
    const float16* super = w.factors + group * (cells / SUPER) * supers + from;
    s += step * from;
    for (long b = 0; b < cells; ++b, q += cell_bytes(FORMAT), s += SCALES) {
        typedef Sum<FORMAT, storage_of(FORMAT, ACTIVATIONS)> S;
        S one[ROWS][VECTORS], two[in_halves(FORMAT) ? ROWS : 1][VECTORS];
        ahead<FORMAT>(q);
#pragma GCC unroll 4
        for (int c = 0; c < 4; ++c)
#pragma GCC unroll 2
            for (int h = 0; h < 2; ++h)
#pragma GCC unroll 4
                for (int v = 0; v < VECTORS; ++v) {
                    const ivec u = chunk<FORMAT>(q + 4 * W * v, c, h);
#pragma GCC unroll 4
                    for (int r = 0; r < ROWS; ++r) {
                        const Cell& cell = x[r * cells + b];
                        if (h && in_halves(FORMAT))
                            two[in_halves(FORMAT) ? r : 0][v].add(u, cell, 4 * h + c);
                        else
                            one[r][v].add(u, cell, 4 * h + c);
                    }
                }
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) {
            vec first, second;
            factors<FORMAT>(s + step * W * v, super + b / SUPER * supers + W * v, &first, &second);
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; ++r) {
                const Cell& cell = x[r * cells + b];
                ivec sum = one[r][v].total();
                if (offset_of(FORMAT) != signed_by(FORMAT, ACTIVATIONS)) sum -= cell.shift[0];
                out[r][v] = fused(first * cell.scale, numbers(sum), out[r][v]);
                if (in_halves(FORMAT))
                    out[r][v] = fused(second * cell.scale, numbers(two[in_halves(FORMAT) ? r : 0][v].total() - cell.shift[1]),
                                      out[r][v]);
                else if (FORMAT == q4_k)
                    out[r][v] = fused(second, splat(cell.total), out[r][v]);
            }
        }
    }
}

// The same without rounding of the activations.
template <int FORMAT, int ROWS, int VECTORS>
inline void floats(const Weight& w, long group, long from, const Cell* x, vec (&out)[ROWS][VECTORS]) {
    const long cells = w.cells();
    const std::uint8_t *q = w.quants + group * cells * cell_bytes(FORMAT) + 4 * from, *s = w.scales + group * cells * SCALES;
    const long supers = factors_of(FORMAT) * GROUP, step = supers ? 1 : 2;
    const float16* super = w.factors + group * (cells / SUPER) * supers + from;
    s += step * from;
    for (long b = 0; b < cells; ++b, q += cell_bytes(FORMAT), s += SCALES) {
        ahead<FORMAT>(q);
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) {
            vec first, second;
            factors<FORMAT>(s + step * W * v, super + b / SUPER * supers + W * v, &first, &second);
            vec sum[ROWS][4] = {};  // several, since each addition waits for the one before
#pragma GCC unroll 2
            for (int h = 0; h < 2; ++h) {
#pragma GCC unroll 4
                for (int c = 0; c < 4; ++c) {
                    const ivec u = chunk<FORMAT>(q + 4 * W * v, c, h);
#pragma GCC unroll 4
                    for (int j = 0; j < 4; ++j) {
                        const vec weight = numbers((u >> 8 * j & 255) - offset_of(FORMAT));
#pragma GCC unroll 4
                        for (int r = 0; r < ROWS; ++r)
                            sum[r][j] = fused(weight, splat(x[r * cells + b].numbers[16 * h + 4 * c + j]), sum[r][j]);
                    }
                }
                if (h || in_halves(FORMAT))
#pragma GCC unroll 4
                    for (int r = 0; r < ROWS; ++r) {
                        const vec all = (sum[r][0] + sum[r][1]) + (sum[r][2] + sum[r][3]);
                        out[r][v] = fused(h && in_halves(FORMAT) ? second : first, all, out[r][v]);
                        for (vec& part : sum[r]) part = vec{};
                    }
            }
            if (FORMAT == q4_k)
                for (int r = 0; r < ROWS; ++r) out[r][v] = fused(second, splat(x[r * cells + b].total), out[r][v]);
        }
    }
}

template <int FORMAT, int ACTIVATIONS, int ROWS, int VECTORS>
void tile(const Weight& w, long group, const Cell* x, float* out) {
    for (long from = 0; from < GROUP; from += W * VECTORS) {
        vec sum[ROWS][VECTORS] = {};
        if constexpr (ACTIVATIONS == float32)
            floats<FORMAT, ROWS, VECTORS>(w, group, from, x, sum);
        else
            integers<FORMAT, ACTIVATIONS, ROWS, VECTORS>(w, group, from, x, sum);
        for (int r = 0; r < ROWS; ++r)
            for (int v = 0; v < VECTORS; ++v) store(out + r * GROUP + from + v * W, sum[r][v]);
    }
}

template <int FORMAT, int ACTIVATIONS>
void all_rows(const Weight& w, long group, const Cell* x, long rows, float* out) {
    long r = 0;
    for (; r + TOGETHER <= rows; r += TOGETHER) tile<FORMAT, ACTIVATIONS, TOGETHER, 1>(w, group, x + r * w.cells(), out + r * GROUP);
    for (; r < rows; ++r) tile<FORMAT, ACTIVATIONS, 1, P>(w, group, x + r * w.cells(), out + r * GROUP);
}

template <int FORMAT>
void any_activations(const Weight& w, long group, const Cell* x, long rows, float* out) {
    switch (w.activations) {
        case int16: return all_rows<FORMAT, int16>(w, group, x, rows, out);
        case int8: return all_rows<FORMAT, int8>(w, group, x, rows, out);
        default: return all_rows<FORMAT, float32>(w, group, x, rows, out);
    }
}

// The numbers of a group of a weight -> out (GROUP, inputs).
template <int FORMAT>
void numbers_of(const Weight& w, long group, float* out) {
    const long cells = w.cells(), supers = factors_of(FORMAT) * GROUP, step = supers ? 1 : 2;
    const std::uint8_t *q = w.quants + group * cells * cell_bytes(FORMAT), *s = w.scales + group * cells * SCALES;
    const float16* super = w.factors + group * (cells / SUPER) * supers;
    for (long b = 0; b < cells; ++b, q += cell_bytes(FORMAT), s += SCALES)
        for (int v = 0; v < P; ++v) {
            vec first, second;
            factors<FORMAT>(s + step * W * v, super + b / SUPER * supers + W * v, &first, &second);
            alignas(64) float columns[CELL * W];  // input by input, those of W rows
            for (int h = 0; h < 2; ++h)
                for (int c = 0; c < 4; ++c) {
                    const ivec u = chunk<FORMAT>(q + 4 * W * v, c, h);
                    for (int j = 0; j < 4; ++j) {
                        const vec x = numbers((u >> 8 * j & 255) - offset_of(FORMAT));
                        const vec y = (in_halves(FORMAT) && h ? second : first) * x;
                        store(columns + (16 * h + 4 * c + j) * W, FORMAT == q4_k ? y + second : y);
                    }
                }
            for (long i = 0; i < CELL; i += W)
                transpose_square(columns + i * W, W, out + v * W * w.inputs + b * CELL + i, w.inputs);
        }
}

inline void numbers_of(const Weight& w, long group, float* out) {
    switch (w.format) {
        case q8_0: return numbers_of<q8_0>(w, group, out);
        case q4_0: return numbers_of<q4_0>(w, group, out);
        case q4_k: return numbers_of<q4_k>(w, group, out);
        default: return numbers_of<q6_k>(w, group, out);
    }
}

// The numbers of one row -> out (K).
template <int FORMAT>
void row_of(const Weight& w, long row, float* out) {
    const long cells = w.cells(), supers = factors_of(FORMAT) * GROUP, group = row / GROUP, r = row % GROUP;
    for (long b = 0; b < cells; ++b) {
        const std::uint8_t *q = w.quants + (group * cells + b) * cell_bytes(FORMAT) + 4 * r, *s = w.scales + (group * cells + b) * SCALES;
        float d[2], least = 0.0f;  // the factors of both halves, and what is added
        if (supers) {
            const float16* super = w.factors + (group * cells + b) / SUPER * supers + r;
            if (FORMAT == q4_k) {
                d[0] = d[1] = widen(super[0]) * s[r];
                least = -(widen(super[GROUP]) * s[GROUP + r]);
            } else {
                for (int h = 0; h < 2; ++h) d[h] = widen(super[0]) * static_cast<std::int8_t>(s[GROUP * h + r]);
            }
        } else {
            d[0] = d[1] = widen(reinterpret_cast<const float16*>(s)[r]);
        }
        for (int i = 0; i < CELL; ++i) {
            const int h = i / 16, c = i / 4 % 4, at = i % 4;
            int u;
            if (FORMAT == q8_0) {
                u = q[(4 * h + c) * CHUNK + at];
            } else {
                u = q[c * CHUNK + at] >> 4 * h & 15;
                if (FORMAT == q6_k) u |= (q[(4 + h) * CHUNK + at] >> 2 * c & 3) << 4;
            }
            out[b * CELL + i] = d[h] * static_cast<float>(u - offset_of(FORMAT)) + least;
        }
    }
}

inline void row_of(const Weight& w, long row, float* out) {
    switch (w.format) {
        case q8_0: return row_of<q8_0>(w, row, out);
        case q4_0: return row_of<q4_0>(w, row, out);
        case q4_k: return row_of<q4_k>(w, row, out);
        default: return row_of<q6_k>(w, row, out);
    }
}

// rows of prepared activations times a group of a weight -> out (rows, GROUP)
inline void multiply(const Weight& w, long group, const Cell* x, long rows, float* out) {
    switch (w.format) {
        case q8_0: return any_activations<q8_0>(w, group, x, rows, out);
        case q4_0: return any_activations<q4_0>(w, group, x, rows, out);
        case q4_k: return any_activations<q4_k>(w, group, x, rows, out);
        default: return any_activations<q6_k>(w, group, x, rows, out);
    }
}

}  // namespace quantized
}  // namespace
