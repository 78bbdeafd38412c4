// Sums over tokens of products of channels, phi_f(h) = scale_f h_a h_b for a listed pair (a, b) of rows of h: their reading
// phi(q) S, their writing phi(k)^T v, and the gradients. Features exist for one block of tokens and features at a time.
#include <algorithm>

#include "rows.h"

namespace {

constexpr long TILE = 64;      // tokens whose features are made together
constexpr long BLOCK = 64;     // features of a block
constexpr long SECTION = 256;  // tokens, or features, of a unit of work

struct Products {
    const std::int32_t* pairs;  // (2, F)
    const float* scales;        // (F)
    long rows, channels, tokens, values, features;  // rows: sequences times heads

    long vp() const { return whole_vectors(values); }
    long sections(long n) const { return (n + SECTION - 1) / SECTION; }

    // Tokens begin ... begin + n of h (channels, tokens) into out (channels, TILE), zeros beyond them.
    void read_tile(const float* h, long begin, long n, float* out) const {
        for (long c = 0; c < channels; ++c, out += TILE) {
            std::memcpy(out, h + c * tokens + begin, sizeof(float) * n);
            std::memset(out + n, 0, sizeof(float) * (TILE - n));
        }
    }

    // Features first ... first + n of a tile of h into out (n, TILE).
    void make(const float* h, long first, long n, float* out) const {
        for (long f = 0; f < n; ++f, out += TILE) {
            const float *a = h + pairs[first + f] * TILE, *b = h + pairs[features + first + f] * TILE;
            for (long t = 0; t < TILE; t += W) store(out + t, load(a + t) * load(b + t) * scales[first + f]);
        }
    }

    // Rows (n, values) into (n, vp), zeros beyond them.
    void pad(const float* from, long n, float* out) const {
        for (long i = 0; i < n; ++i, out += vp()) {
            std::memcpy(out, from + i * values, sizeof(float) * values);
            std::memset(out + values, 0, sizeof(float) * (vp() - values));
        }
    }
    void unpad(const float* from, long n, float* out) const {
        for (long i = 0; i < n; ++i) std::memcpy(out + i * values, from + i * vp(), sizeof(float) * values);
    }

    template <class F>
    void each_block(long from, long to, F use) const {
        for (long first = from; first < to; first += BLOCK) use(first, std::min(BLOCK, to - first));
    }
};

// out = phi(h) S.
struct Read {
    Products p;
    const float *h, *sums;
    float* out;

    long units() const { return p.rows * p.sections(p.tokens); }
    long scratch() const { return (p.channels + BLOCK) * TILE * (SECTION / TILE) + (SECTION + BLOCK) * p.vp(); }

    void run(long unit, Scratch scratch) const {
        const long row = unit / p.sections(p.tokens), begin = unit % p.sections(p.tokens) * SECTION, vp = p.vp();
        const long n = std::min(SECTION, p.tokens - begin), size = p.channels * TILE;
        float *tiles = scratch.take(size * (SECTION / TILE)), *made = scratch.take(BLOCK * TILE);
        float *found = scratch.take(SECTION * vp), *read = scratch.take(BLOCK * vp);
        for (long t = 0; t < n; t += TILE)
            p.read_tile(h + row * p.channels * p.tokens, begin + t, std::min(TILE, n - t), tiles + t / TILE * size);
        std::memset(found, 0, sizeof(float) * n * vp);
        p.each_block(0, p.features, [&](long first, long count) {
            p.pad(sums + (row * p.features + first) * p.values, count, read);
            for (long t = 0; t < n; t += TILE) {
                p.make(tiles + t / TILE * size, first, count, made);
                gemm<true>(std::min(TILE, n - t), vp, count, made, 1, TILE, read, vp, found + t * vp, vp);
            }
        });
        p.unpad(found, n, out + (row * p.tokens + begin) * p.values);
    }
};

// sums = phi(h)^T v.
struct Write {
    Products p;
    const float *h, *v;
    float* sums;

    long units() const { return p.rows * p.sections(p.features); }
    long scratch() const { return (p.channels + BLOCK) * TILE + (SECTION + TILE) * p.vp(); }

    void run(long unit, Scratch scratch) const {
        const long row = unit / p.sections(p.features), from = unit % p.sections(p.features) * SECTION, vp = p.vp();
        const long to = std::min(from + SECTION, p.features);
        float *tile = scratch.take(p.channels * TILE), *made = scratch.take(BLOCK * TILE);
        float *written = scratch.take(SECTION * vp), *value = scratch.take(TILE * vp);
        std::memset(written, 0, sizeof(float) * (to - from) * vp);
        for (long t = 0; t < p.tokens; t += TILE) {
            const long n = std::min(TILE, p.tokens - t);
            p.read_tile(h + row * p.channels * p.tokens, t, n, tile);
            p.pad(v + (row * p.tokens + t) * p.values, n, value);
            p.each_block(from, to, [&](long first, long count) {
                p.make(tile, first, count, made);
                gemm<true>(count, vp, n, made, TILE, 1, value, vp, written + (first - from) * vp, vp);
            });
        }
        p.unpad(written, to - from, sums + (row * p.features + from) * p.values);
    }
};

// The gradient of h from that of phi, which is sums v^T.
struct Slopes {
    Products p;
    const float *h, *v, *sums;
    float* out;

    long tiles() const { return (p.tokens + TILE - 1) / TILE; }
    long units() const { return p.rows * tiles(); }
    long scratch() const { return (2 * p.channels + BLOCK) * TILE + 2 * p.vp() * TILE; }

    void run(long unit, Scratch scratch) const {
        const long row = unit / tiles(), begin = unit % tiles() * TILE, n = std::min(TILE, p.tokens - begin), vp = p.vp();
        float *tile = scratch.take(p.channels * TILE), *slope = scratch.take(p.channels * TILE);
        float *made = scratch.take(BLOCK * TILE), *value = scratch.take(TILE * vp), *turned = scratch.take(vp * TILE);
        p.read_tile(h + row * p.channels * p.tokens, begin, n, tile);
        p.pad(v + (row * p.tokens + begin) * p.values, n, value);
        std::memset(value + n * vp, 0, sizeof(float) * (TILE - n) * vp);
        transpose(value, vp, turned, TILE, TILE, vp);
        std::memset(slope, 0, sizeof(float) * p.channels * TILE);
        p.each_block(0, p.features, [&](long first, long count) {
            const float* rows = sums + (row * p.features + first) * p.values;
            gemm<false>(count, TILE, p.values, rows, p.values, 1, turned, TILE, made, TILE);
            for (long f = 0; f < count; ++f) {
                const long a = p.pairs[first + f] * TILE, b = p.pairs[p.features + first + f] * TILE;
                for (long t = 0; t < TILE; t += W) {
                    const vec up = load(made + f * TILE + t) * p.scales[first + f];
                    const vec left = load(tile + a + t), right = load(tile + b + t);
                    store(slope + a + t, load(slope + a + t) + up * right);
                    store(slope + b + t, load(slope + b + t) + up * left);
                }
            }
        });
        for (long c = 0; c < p.channels; ++c)
            std::memcpy(out + (row * p.channels + c) * p.tokens + begin, slope + c * TILE, sizeof(float) * n);
    }
};

// One token: S = left S + phi(k)^T v, out = phi(q) S; left may be null, for 1.
struct Step {
    Products p;
    const float *q, *k, *v, *left;
    float *sums, *out;

    long units() const { return p.rows; }
    long scratch() const { return 2 * p.vp(); }

    void run(long row, Scratch scratch) const {
        float *value = scratch.take(p.vp()), *found = scratch.take(p.vp()), *s = sums + row * p.features * p.values;
        const float *qs = q + row * p.channels, *ks = k + row * p.channels, rest = left ? left[row] : 1.0f;
        const long whole = p.values / W * W;
        p.pad(v + row * p.values, 1, value);
        std::memset(found, 0, sizeof(float) * p.vp());
        for (long f = 0; f < p.features; ++f, s += p.values) {
            const long a = p.pairs[f], b = p.pairs[p.features + f];
            const float key = ks[a] * ks[b] * p.scales[f], query = qs[a] * qs[b] * p.scales[f];
            for (long e = 0; e < whole; e += W) {
                const vec now = load(s + e) * rest + key * load(value + e);
                store(s + e, now);
                store(found + e, load(found + e) + query * now);
            }
            for (long e = whole; e < p.values; ++e) {
                s[e] = s[e] * rest + key * value[e];
                found[e] += query * s[e];
            }
        }
        p.unpad(found, 1, out + row * p.values);
    }
};

inline Products products(const std::int32_t* pairs, const float* scales, const long* sizes) {
    return {pairs, scales, sizes[0], sizes[1], sizes[2], sizes[3], sizes[4]};
}

}  // namespace

// sizes: rows (sequences times heads), channels P, tokens N, values E, features F. All tensors are contiguous floats:
// h (rows, P, N), v and out (rows, N, E), sums (rows, F, E). Each function returns 0, or 1 if memory runs out.
extern "C" int longspan_products_read(const std::int32_t* pairs, const float* scales, const float* h, const float* sums,
                                      float* out, const long* sizes, int threads) {
    return each_unit(Read{products(pairs, scales, sizes), h, sums, out}, threads);
}

extern "C" int longspan_products_write(const std::int32_t* pairs, const float* scales, const float* h, const float* v,
                                       float* sums, const long* sizes, int threads) {
    return each_unit(Write{products(pairs, scales, sizes), h, v, sums}, threads);
}

extern "C" int longspan_products_slopes(const std::int32_t* pairs, const float* scales, const float* h, const float* v,
                                        const float* sums, float* out, const long* sizes, int threads) {
    return each_unit(Slopes{products(pairs, scales, sizes), h, v, sums, out}, threads);
}

// N is 1: q, k (rows, P), v, out (rows, E), left (rows) or null. Overwrites sums.
extern "C" int longspan_products_step(const std::int32_t* pairs, const float* scales, const float* q, const float* k,
                                      const float* v, const float* left, float* sums, float* out, const long* sizes,
                                      int threads) {
    return each_unit(Step{products(pairs, scales, sizes), q, k, v, left, sums, out}, threads);
}
