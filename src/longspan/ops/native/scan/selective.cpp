// The selective scan of Mamba: for each channel h_t = e^(d_t A) h_(t-1) + d_t x_t B_t and y_t = (C_t . h_t + D x_t) silu(z_t),
// with d_t = dt_t or softplus(dt_t + bias). Source: Gu and Dao 2023 (2312.00752), section 3. Without A the factor of h_(t-1)
// is 1 - d_t B_t^2, that of Longhorn: Liu et al. 2024 (2407.14207), section 3. The states of a channel fill
// vectors; the channels of a group are read together and then go through a tile of tokens one after the other, so that all
// they need stays in the first cache. The backward pass computes the states of a tile again from the saved one before it.
#include "../shared/softplus.h"
#include "tiles.h"

namespace {

constexpr long GROUP = 16;  // channels that are read together, a multiple of W

// Sizes and operands that both passes share. V: vectors of a state.
template <int V>
struct Selective {
    static constexpr long SP = V * W;  // numbers of a state, with zeros at the end

    const Scan& call;
    long size;  // S
    Operand x, dt, b, c, z;
    const float *rates, *skip, *bias;  // A (C,S), D (C) and the bias (C) of dt, which may be null
    bool soft;

    // What a step d leaves of the numbers of a state to which it writes b.
    template <bool RATES>
    static vec left(vec d, vec a, vec b) {
        return RATES ? decay(d * a) : 1.0f - d * (b * b);
    }

    // A of some channels into rows (SP), if there is one.
    void pad_rates(long channel, long count, float* out) const {
        if (rates) pad(rates + channel * size, count, out);
    }

    // n rows (S) into rows (SP).
    void pad(const float* from, long n, float* out) const {
        for (long i = 0; i < n; ++i) {
            std::memset(out + i * SP, 0, sizeof(float) * SP);
            std::memcpy(out + i * SP, from + i * size, sizeof(float) * size);
        }
    }
    void unpad(const float* from, long n, float* out) const {
        for (long i = 0; i < n; ++i) std::memcpy(out + i * size, from + i * SP, sizeof(float) * size);
    }

    // Some tokens of a sequence, with borders and masks.
    struct Tile {
        long row, begin, n;
        std::uint8_t fresh[TILE], real[TILE];
        bool all;
    };
    Tile tile_of(Span s, long k) const {
        Tile tile;
        tile.row = s.row, tile.begin = s.begin + k * TILE;
        tile.n = s.end - tile.begin < TILE ? s.end - tile.begin : TILE;
        tile.all = true;
        for (long i = 0; i < tile.n; ++i) {
            tile.fresh[i] = call.fresh(s.row, tile.begin + i);
            tile.real[i] = call.real(s.row, tile.begin + i);
            tile.all = tile.all && tile.real[i];
        }
        return tile;
    }

    // Rows of B or C into out (n, SP), zeros at masked tokens.
    void read_states(Operand t, const Tile& tile, float* out) const {
        read_tile(t, tile.row, 0, tile.begin, tile.n, size, out, SP);
        for (long i = 0; i < tile.n && !tile.all; ++i)
            if (!tile.real[i]) std::memset(out + i * SP, 0, sizeof(float) * SP);
    }

    // Zeros at masked tokens of (GROUP, TILE).
    static void clear(const Tile& tile, float* x) {
        if (tile.all) return;
        for (long i = 0; i < tile.n; ++i)
            if (!tile.real[i])
                for (long j = 0; j < GROUP; ++j) x[j * TILE + i] = 0.0f;
    }

    // Channels into out (GROUP, TILE), zeros at masked tokens, beyond the channels, and up to the next whole vector of
    // tokens; ``turned`` holds (TILE, GROUP).
    static void gather(Operand t, const Tile& tile, long channel, long count, float* out, float* turned) {
        const long whole = whole_vectors(tile.n);
        t.rows(tile.row, channel, [&](auto found) {
            const auto rows = constant(found);
            if (rows.token == 1 && rows.channel != 1) {
                for (long j = 0; j < GROUP; ++j) {
                    float* line = out + j * TILE;
                    long i = 0;
                    if (j < count) {
                        const auto* from = rows.data + j * rows.channel + tile.begin;
                        for (; i + W <= tile.n; i += W) store(line + i, load(from + i));
                        for (; i < tile.n; ++i) line[i] = widen(from[i]);
                    }
                    for (; i < whole; ++i) line[i] = 0.0f;
                }
            } else {
                read(rows, tile.begin, tile.n, count, turned, GROUP);
                std::memset(turned + tile.n * GROUP, 0, sizeof(float) * GROUP * (whole - tile.n));
                transpose(turned, GROUP, out, TILE, whole, GROUP);
            }
        });
        clear(tile, out);
    }

    static void scatter(float* x, Operand t, const Tile& tile, long channel, long count, float* turned) {
        clear(tile, x);
        t.rows(tile.row, channel, [&](auto rows) {
            if (rows.token == 1 && rows.channel != 1) {
                for (long j = 0; j < count; ++j) {
                    auto* to = rows.data + j * rows.channel + tile.begin;
                    const float* line = x + j * TILE;
                    long i = 0;
                    for (; i + W <= tile.n; i += W) store(to + i, load(line + i));
                    for (; i < tile.n; ++i) narrow(line[i], to + i);
                }
            } else {
                transpose(x, TILE, turned, GROUP, GROUP, whole_vectors(tile.n));
                write(turned, GROUP, rows, tile.begin, tile.n, count);
            }
        });
    }

    // Step sizes in place, from what was gathered; slopes (GROUP, TILE), if given, get their derivatives.
    void step_sizes(const Tile& tile, long channel, long count, float* steps, float* slopes) const {
        for (long j = 0; j < count && (soft || bias); ++j)
            for (long i = j * TILE; i < j * TILE + tile.n; i += W) {
                vec raw = load(steps + i);
                if (bias) raw += bias[channel + j];
                if (slopes && soft) store(slopes + i, sigmoid(raw));
                store(steps + i, soft ? softplus(raw) : raw);
            }
        clear(tile, steps);
    }
};

template <int V>
struct Forward : Selective<V> {
    using Base = Selective<V>;
    using Base::SP, typename Base::Tile;

    Operand y;
    const float* first;
    float *last, *starts;

    static constexpr long scratch = 2 * BLOCK * SP + 2 * TILE * SP + TILE * W + 4 * GROUP * TILE;

    // One channel: y (n) without D and the gate.
    template <bool RATES>
    static void walk(const float* rates, float* state, const float* steps, const float* x, const float* b, const float* c,
                     const Tile& tile, float* lanes, float* y) {
        vec a[V], h[V];
        for (int v = 0; v < V; ++v) a[v] = load(rates + v * W), h[v] = load(state + v * W);
        for (long t = 0; t < tile.n; ++t) {
            if (tile.fresh[t])
                for (int v = 0; v < V; ++v) h[v] = vec{};
            const vec d = splat(steps[t]), w = splat(steps[t] * x[t]);
            vec total = vec{};
            for (int v = 0; v < V; ++v) {
                const vec row = load(b + t * SP + v * W);
                h[v] = h[v] * Base::template left<RATES>(d, a[v], row) + w * row;
                total += h[v] * load(c + t * SP + v * W);
            }
            store(lanes + t * W, total);
        }
        for (int v = 0; v < V; ++v) store(state + v * W, h[v]);
        sum_lanes(lanes, tile.n, y);
    }

    void run(Span s, long channel, Scratch scratch) const {
        const Scan& call = this->call;
        const long count = call.count(channel), size = this->size, at = (s.state * call.channels + channel) * size;
        float *a = scratch.take(BLOCK * SP), *h = scratch.take(BLOCK * SP);
        float *b = scratch.take(TILE * SP), *c = scratch.take(TILE * SP), *lanes = scratch.take(TILE * W);
        float *xs = scratch.take(GROUP * TILE), *ds = scratch.take(GROUP * TILE), *ys = scratch.take(GROUP * TILE);
        float* turned = scratch.take(GROUP * TILE);
        stage(states);
        this->pad_rates(channel, count, a);
        this->pad(first + at, count, h);
        for (long k = 0; k < s.tiles(); ++k) {
            const Tile tile = this->tile_of(s, k);
            const long place = (call.first_tile(s.state) + k) * call.channels + channel;
            stage(states);
            if (starts) this->unpad(h, count, starts + place * size);
            stage(reading);
            this->read_states(this->b, tile, b);
            this->read_states(this->c, tile, c);
            for (long g = 0; g < count; g += GROUP) {
                const long some = count - g < GROUP ? count - g : GROUP;
                stage(reading);
                this->gather(this->x, tile, channel + g, some, xs, turned);
                this->gather(this->dt, tile, channel + g, some, ds, turned);
                stage(mapping);
                this->step_sizes(tile, channel + g, some, ds, nullptr);
                stage(scanning);
                for (long j = 0; j < some; ++j) {
                    float* line = ys + j * TILE;
                    (this->rates ? walk<true> : walk<false>)(a + (g + j) * SP, h + (g + j) * SP, ds + j * TILE, xs + j * TILE, b,
                                                             c, tile, lanes, line);
                    if (this->skip)
                        for (long i = 0; i < tile.n; i += W)
                            store(line + i, load(line + i) + this->skip[channel + g + j] * load(xs + j * TILE + i));
                }
                if (this->z.data) {
                    stage(reading);
                    this->gather(this->z, tile, channel + g, some, xs, turned);
                    stage(mapping);
                    for (long j = 0; j < some; ++j)
                        for (long i = j * TILE; i < j * TILE + tile.n; i += W)
                            store(ys + i, load(ys + i) * silu(load(xs + i)));
                }
                stage(writing);
                this->scatter(ys, y, tile, channel + g, some, turned);
            }
        }
        stage(states);
        this->unpad(h, count, last + at);
    }
};

template <int V>
struct Backward : Selective<V> {
    using Base = Selective<V>;
    using Base::SP, typename Base::Tile;

    Operand grad, dx, ddt, dz;
    const float *starts, *grad_last;
    float* grad_first;
    // Sums over the channels of a block (blocks,B,N,2,S) for B and C; over the tokens of a sequence for A (sequences,C,S), D
    // and the bias (2,sequences,C).
    float *shares, *rate_sums, *channel_sums;

    static constexpr long scratch = 3 * BLOCK * SP + 6 * TILE * SP + 2 * TILE * W + 8 * GROUP * TILE;

    // One channel forward, from its state before the tile: the states before all tokens, and their factors.
    template <bool RATES>
    static void again(const float* rates, const float* state, const float* steps, const float* x, const float* b,
                      const Tile& tile, float* before, float* factors) {
        vec a[V], h[V];
        for (int v = 0; v < V; ++v) a[v] = load(rates + v * W), h[v] = load(state + v * W);
        for (long t = 0; t < tile.n; ++t) {
            if (tile.fresh[t])
                for (int v = 0; v < V; ++v) h[v] = vec{};
            const vec d = splat(steps[t]), w = splat(steps[t] * x[t]);
            for (int v = 0; v < V; ++v) {
                const long place = t * SP + v * W;
                const vec row = load(b + place), factor = Base::template left<RATES>(d, a[v], row);
                store(before + place, h[v]);
                store(factors + place, factor);
                h[v] = h[v] * factor + w * row;
            }
        }
    }

    // What one channel reads, without D: C_t . h_t.
    static void reads(const float* steps, const float* x, const float* b, const float* c, const float* before,
                      const float* factors, long n, float* lanes, float* y) {
        for (long t = 0; t < n; ++t) {
            const vec w = splat(steps[t] * x[t]);
            vec total = vec{};
            for (int v = 0; v < V; ++v) {
                const long place = t * SP + v * W;
                total += (load(before + place) * load(factors + place) + w * load(b + place)) * load(c + place);
            }
            store(lanes + t * W, total);
        }
        sum_lanes(lanes, n, y);
    }

    // One channel backward; carry: the gradient of its state. Adds to the gradients of its rates and of B and C; to_input (n)
    // and to_step (n) get G_t . B_t and (G_t * e^(d A) h) . A, or -(G_t * h) . B_t^2 without A.
    template <bool RATES>
    static void back(const float* rates, const float* steps, const float* x, const float* grad, const float* b, const float* c,
                     const float* before, const float* factors, const Tile& tile, float* carry, float* rate_sum, float* db,
                     float* dc, float* lanes, float* to_input, float* to_step) {
        float* more = lanes + TILE * W;
        vec a[V], g[V], sums[V];
        for (int v = 0; v < V; ++v) {
            a[v] = load(rates + v * W), g[v] = load(carry + v * W), sums[v] = load(rate_sum + v * W);
        }
        for (long t = tile.n - 1; t >= 0; --t) {
            const vec up = splat(grad[t]), d = splat(steps[t]), w = splat(steps[t] * x[t]);
            vec input = vec{}, step = vec{};
            for (int v = 0; v < V; ++v) {
                const long place = t * SP + v * W;
                const vec factor = load(factors + place), row = load(b + place), old = load(before + place), rest = old * factor;
                store(dc + place, load(dc + place) + up * (w * row + rest));
                g[v] += up * load(c + place);
                const vec slope = g[v] * (RATES ? rest : old * row);
                store(db + place, load(db + place) + w * g[v] - (RATES ? vec{} : 2.0f * d * slope));
                if (RATES) sums[v] += slope * d;
                input += g[v] * row;
                step += RATES ? slope * a[v] : vec{} - slope * row;
                g[v] = tile.fresh[t] ? vec{} : g[v] * factor;
            }
            store(lanes + t * W, input);
            store(more + t * W, step);
        }
        for (int v = 0; v < V; ++v) store(carry + v * W, g[v]), store(rate_sum + v * W, sums[v]);
        sum_lanes(lanes, tile.n, to_input);
        sum_lanes(more, tile.n, to_step);
    }

    void run(Span s, long channel, Scratch scratch) const {
        const Scan& call = this->call;
        const long count = call.count(channel), size = this->size, at = s.state * call.channels + channel;
        float *a = scratch.take(BLOCK * SP), *carry = scratch.take(BLOCK * SP), *rate_sum = scratch.take(BLOCK * SP);
        float *b = scratch.take(TILE * SP), *c = scratch.take(TILE * SP), *db = scratch.take(TILE * SP);
        float *dc = scratch.take(TILE * SP), *before = scratch.take(TILE * SP), *factors = scratch.take(TILE * SP);
        float* lanes = scratch.take(2 * TILE * W);
        float *xs = scratch.take(GROUP * TILE), *ds = scratch.take(GROUP * TILE), *zs = scratch.take(GROUP * TILE);
        float *us = scratch.take(GROUP * TILE), *slopes = scratch.take(GROUP * TILE), *turned = scratch.take(GROUP * TILE);
        float *input = scratch.take(GROUP * TILE), *step = scratch.take(GROUP * TILE);
        float skip_sum[BLOCK] = {}, bias_sum[BLOCK] = {}, start[SP] = {};
        const float* skip = this->skip;
        stage(states);
        this->pad_rates(channel, count, a);
        this->pad(grad_last + at * size, count, carry);
        std::memset(rate_sum, 0, sizeof(float) * BLOCK * SP);
        for (long k = s.tiles() - 1; k >= 0; --k) {
            const Tile tile = this->tile_of(s, k);
            const long n = tile.n, place = (call.first_tile(s.state) + k) * call.channels + channel;
            stage(reading);
            this->read_states(this->b, tile, b);
            this->read_states(this->c, tile, c);
            std::memset(db, 0, sizeof(float) * n * SP);
            std::memset(dc, 0, sizeof(float) * n * SP);
            for (long g = 0; g < count; g += GROUP) {
                const long some = count - g < GROUP ? count - g : GROUP;
                stage(reading);
                this->gather(this->x, tile, channel + g, some, xs, turned);
                this->gather(this->dt, tile, channel + g, some, ds, turned);
                this->gather(grad, tile, channel + g, some, us, turned);
                if (this->z.data) this->gather(this->z, tile, channel + g, some, zs, turned);
                stage(mapping);
                this->step_sizes(tile, channel + g, some, ds, slopes);
                for (long j = 0; j < some; ++j) {
                    const long own = (g + j) * SP;
                    const float* line = xs + j * TILE;
                    float *steps = ds + j * TILE, *up = us + j * TILE, *gate = zs + j * TILE;
                    float *to_input = input + j * TILE, *to_step = step + j * TILE;
                    const float factor = skip ? skip[channel + g + j] : 0.0f;
                    stage(scanning);
                    std::memcpy(start, starts + (place + g + j) * size, sizeof(float) * size);
                    (this->rates ? again<true> : again<false>)(a + own, start, steps, line, b, tile, before, factors);
                    if (this->z.data) {
                        reads(steps, line, b, c, before, factors, n, lanes, to_input);
                        stage(mapping);
                        for (long i = 0; i < n; i += W) {
                            const vec raw = load(gate + i), open = sigmoid(raw), above = load(up + i);
                            const vec y = load(to_input + i) + factor * load(line + i);
                            store(gate + i, above * y * (open * (1.0f + raw * (1.0f - open))));
                            store(up + i, above * (raw * open));
                        }
                    }
                    stage(scanning);
                    (this->rates ? back<true> : back<false>)(a + own, steps, line, up, b, c, before, factors, tile, carry + own,
                                                             rate_sum + own, db, dc, lanes, to_input, to_step);
                    stage(mapping);
                    float skipped = 0.0f, biased = 0.0f;
                    for (long i = 0; i < n; i += W) {
                        const vec read = load(to_input + i), d = load(steps + i);
                        vec change = load(to_step + i) + load(line + i) * read;
                        if (this->soft) change *= load(slopes + j * TILE + i);
                        store(to_step + i, change);
                        store(to_input + i, d * read + factor * load(up + i));
                    }
                    for (long i = 0; i < n; ++i)
                        if (tile.real[i]) skipped += up[i] * line[i], biased += to_step[i];
                    skip_sum[g + j] += skipped;
                    bias_sum[g + j] += biased;
                }
                stage(writing);
                this->scatter(input, dx, tile, channel + g, some, turned);
                this->scatter(step, ddt, tile, channel + g, some, turned);
                if (this->z.data) this->scatter(zs, dz, tile, channel + g, some, turned);
            }
            stage(writing);
            float* share = shares + ((channel / BLOCK * call.batch + s.row) * call.tokens + tile.begin) * 2 * size;
            for (long i = 0; i < n; ++i, share += 2 * size) {
                if (!tile.real[i]) {
                    std::memset(share, 0, sizeof(float) * 2 * size);
                    continue;
                }
                std::memcpy(share, db + i * SP, sizeof(float) * size);
                std::memcpy(share + size, dc + i * SP, sizeof(float) * size);
            }
        }
        stage(states);
        this->unpad(carry, count, grad_first + at * size);
        if (this->rates) this->unpad(rate_sum, count, rate_sums + at * size);
        std::memcpy(channel_sums + at, skip_sum, sizeof(float) * count);
        std::memcpy(channel_sums + call.sequences * call.channels + at, bias_sum, sizeof(float) * count);
    }
};

// out (width) = the sum of ``rows`` rows, in their order; columns from ... to.
void total(const float* x, long rows, long width, long from, long to, float* out) {
    for (long j = from; j < to; ++j) out[j] = x[j];
    for (long i = 1; i < rows; ++i)
        for (long j = from; j < to; ++j) out[j] += x[i * width + j];
}

// The same by all threads of the team; a column has one order of summands for any number of threads.
void total_in_team(const float* x, long rows, long width, float* out) {
    constexpr long part = 4096;
#pragma omp for schedule(static)
    for (long k = 0; k < (width + part - 1) / part; ++k) {
        stage(summing);
        total(x, rows, width, k * part, k * part + part < width ? k * part + part : width, out);
        stage(waiting);
    }
}

template <int N>
struct Vectors {
    static constexpr int count = N;
};

// Calls f with the number of vectors of a state, rounded up to a power of two.
template <class F>
int with_vectors(long size, F f) {
    const long vectors = (size + W - 1) / W;
    if (vectors <= 1) return f(Vectors<1>{});
    if (vectors <= 2) return f(Vectors<2>{});
    if (vectors <= 4) return f(Vectors<4>{});
#if !defined(__AVX512F__)
    if (vectors <= 8) return f(Vectors<8>{});
#if !defined(__AVX2__)
    return f(Vectors<16>{});
#endif
#endif
    return 1;
}

// One token of a block of channels of one row: the state changes in place.
template <int V, bool RATES>
void step(const Selective<V>& s, Operand y, long row, long channel, const float* b, const float* c, float* state) {
    constexpr long SP = Selective<V>::SP;
    const long all = s.call.count(channel), size = s.size;
    for (long g = 0; g < all; g += GROUP) {
        const long some = all - g < GROUP ? all - g : GROUP, from = channel + g;
        float xs[GROUP], ds[GROUP], zs[GROUP], ys[GROUP] = {}, lanes[GROUP * W] = {};
        read_tile(s.x, row, from, 0, 1, some, xs, GROUP);
        read_tile(s.dt, row, from, 0, 1, some, ds, GROUP);
        if (s.bias)
            for (long j = 0; j < some; ++j) ds[j] += s.bias[from + j];
        if (s.soft)
            for (long j = 0; j < GROUP; j += W) store(ds + j, softplus(load(ds + j)));
        for (long j = 0; j < some; ++j) {
            const float* rates = RATES ? s.rates + (from + j) * size : b;
            float *h = state + (from + j) * size, padded[2 * SP] = {}, *now = h;
            if (size != SP) {
                if (RATES) std::memcpy(padded, rates, sizeof(float) * size);
                std::memcpy(padded + SP, h, sizeof(float) * size);
                rates = padded, now = padded + SP;
            }
            const vec d = splat(ds[j]), w = splat(ds[j] * xs[j]);
            vec sum = vec{};
            for (int v = 0; v < V; ++v) {
                const vec row = load(b + v * W), kept = Selective<V>::template left<RATES>(d, load(rates + v * W), row);
                const vec next = load(now + v * W) * kept + w * row;
                store(now + v * W, next);
                sum += next * load(c + v * W);
            }
            store(lanes + j * W, sum);
            if (now != h) std::memcpy(h, now, sizeof(float) * size);
        }
        sum_lanes(lanes, some, ys);
        if (s.skip)
            for (long j = 0; j < some; ++j) ys[j] += s.skip[from + j] * xs[j];
        if (s.z.data) {
            read_tile(s.z, row, from, 0, 1, some, zs, GROUP);
            for (long j = 0; j < GROUP; j += W) store(ys + j, load(ys + j) * silu(load(zs + j)));
        }
        write_tile(ys, GROUP, y, row, from, 0, 1, some);
    }
}

}  // namespace

// x, dt, b, c, z, y (B,1,N,C or S) with 4 strides each, in this order, of types as in tiles.h; z may be null. rates (C,S), skip
// (C) and bias (C), each of which may be null, first, last (sequences,C,S): float, contiguous; starts (tiles,C,S) or null; mask
// (B,N), segments (B,N) or null; offsets (sequences+1) or null. sizes: B, N, C, sequences, S. S is at most 64. Returns 0, or 1
// if memory runs out.
extern "C" int longspan_selective_forward(void* x, void* dt, void* b, void* c, void* z, void* y, const float* rates,
                                          const float* skip, const float* bias, const float* first, float* last, float* starts,
                                          const std::uint8_t* mask, const std::int64_t* segments, const std::int64_t* offsets,
                                          const long* strides, const int* types, const long* sizes, int soft, int threads) {
    const Scan call{sizes[0], sizes[1], sizes[2], sizes[3], mask, segments, offsets};
    const auto operand = [&](void* data, int i) { return Operand{data, strides + 4 * i, types[i]}; };
    return with_vectors(sizes[4], [&](auto vectors) {
        constexpr int V = decltype(vectors)::count;
        const Forward<V> pass{{call, sizes[4], operand(x, 0), operand(dt, 1), operand(b, 2), operand(c, 3), operand(z, 4), rates,
                               skip, bias, soft != 0},
                              operand(y, 5), first, last, starts};
        return in_threads(Forward<V>::scratch, threads, [&](Scratch scratch) {
            call.each_unit([&](Span s, long channel) { pass.run(s, channel, scratch); });
        });
    });
}

// As above, with x, dt, b, c, z, grad, dx, ddt, dz; db_dc (B,N,2,S), drates (C,S), dskip_dbias (2,C), and the memory of
// their summands: shares (C/64 rounded up,B,N,2,S), rate_sums (sequences,C,S), channel_sums (2,sequences,C), all float.
extern "C" int longspan_selective_backward(void* x, void* dt, void* b, void* c, void* z, void* grad, void* dx, void* ddt,
                                           void* dz, const float* rates, const float* skip, const float* bias,
                                           const float* starts, const float* grad_last, float* grad_first, float* shares,
                                           float* rate_sums, float* channel_sums, float* db_dc, float* drates,
                                           float* dskip_dbias, const std::uint8_t* mask, const std::int64_t* segments,
                                           const std::int64_t* offsets, const long* strides, const int* types,
                                           const long* sizes, int soft, int threads) {
    const Scan call{sizes[0], sizes[1], sizes[2], sizes[3], mask, segments, offsets};
    const auto operand = [&](void* data, int i) { return Operand{data, strides + 4 * i, types[i]}; };
    return with_vectors(sizes[4], [&](auto vectors) {
        constexpr int V = decltype(vectors)::count;
        const Backward<V> pass{{call, sizes[4], operand(x, 0), operand(dt, 1), operand(b, 2), operand(c, 3), operand(z, 4), rates,
                                skip, bias, soft != 0},
                               operand(grad, 5), operand(dx, 6), operand(ddt, 7), operand(dz, 8), starts, grad_last, grad_first,
                               shares, rate_sums, channel_sums};
        return in_threads(Backward<V>::scratch, threads, [&](Scratch scratch) {
            call.each_unit([&](Span s, long channel) { pass.run(s, channel, scratch); });
            total_in_team(shares, call.blocks(), call.batch * call.tokens * 2 * sizes[4], db_dc);
            if (rates) total_in_team(rate_sums, call.sequences, call.channels * sizes[4], drates);
            for (long i = 0; i < 2; ++i)
                total_in_team(channel_sums + i * call.sequences * call.channels, call.sequences, call.channels,
                              dskip_dbias + i * call.channels);
        });
    });
}

// One token: x, dt, b, c, z, y as above with N = 1; state (B,C,S) is overwritten. sizes: B, C, S.
extern "C" int longspan_selective_step(void* x, void* dt, void* b, void* c, void* z, void* y, const float* rates,
                                       const float* skip, const float* bias, float* state, const long* strides,
                                       const int* types, const long* sizes, int soft, int threads) {
    const Scan call{sizes[0], 1, sizes[1], sizes[0], nullptr, nullptr, nullptr};
    const long size = sizes[2];
    const auto operand = [&](void* data, int i) { return Operand{data, strides + 4 * i, types[i]}; };
    return with_vectors(size, [&](auto vectors) {
        constexpr int V = decltype(vectors)::count;
        const Selective<V> one{call, size, operand(x, 0), operand(dt, 1), operand(b, 2), operand(c, 3), operand(z, 4), rates,
                               skip, bias, soft != 0};
#pragma omp parallel num_threads(threads) if (threads > 1 && sizes[0] * sizes[1] * size > 1 << 14)
        call.each_unit([&](Span s, long channel) {
            float bs[V * W], cs[V * W];
            read_tile(one.b, s.row, 0, 0, 1, size, bs, V * W);
            read_tile(one.c, s.row, 0, 0, 1, size, cs, V * W);
            (rates ? step<V, true> : step<V, false>)(one, operand(y, 5), s.row, channel, bs, cs,
                                                     state + s.row * call.channels * size);
        });
        return 0;
    });
}
