// The diagonal scan h_t = e^g_t h_(t-1) + x_t, channel by channel: whole sequences, forward and backward, and one token.
// A log decay of -inf clears the state by selection, so that infinity and NaN do not survive it.
#include "tiles.h"

namespace {

inline ivec clears(vec g) { return (ivec)(g == splat(-__builtin_inff())); }

struct Pass {
    const Scan& call;
    Operand x, g;

    static constexpr long scratch = 8 * TILE * BLOCK;

    void forward(Span s, long channel, Operand y, const float* first, float* last, float* starts, Scratch scratch) const {
        const long count = call.count(channel), ld = whole_vectors(count), at = s.state * call.channels + channel;
        float *xs = scratch.take(TILE * BLOCK), *gs = scratch.take(TILE * BLOCK), state[BLOCK] = {};
        stage(states);
        std::memcpy(state, first + at, sizeof(float) * count);
        long tile = call.first_tile(s.state);
        for (long begin = s.begin; begin < s.end; begin += TILE, ++tile) {
            const long n = s.end - begin < TILE ? s.end - begin : TILE;
            stage(states);
            if (starts) std::memcpy(starts + tile * call.channels + channel, state, sizeof(float) * count);
            stage(reading);
            read_tile(x, s.row, channel, begin, n, count, xs, ld);
            read_tile(g, s.row, channel, begin, n, count, gs, ld);
            stage(scanning);
            for (long v = 0; v < ld; v += W) {
                vec h = load(state + v);
                for (long i = 0; i < n; ++i) {
                    float* here = xs + i * ld + v;
                    if (call.fresh(s.row, begin + i)) h = vec{};
                    if (!call.real(s.row, begin + i)) {
                        store(here, vec{});
                        continue;
                    }
                    const vec log_decay = load(gs + i * ld + v);
                    h = load(here) + pick(clears(log_decay), vec{}, decay(log_decay) * h);
                    store(here, h);
                }
                store(state + v, h);
            }
            stage(writing);
            write_tile(xs, ld, y, s.row, channel, begin, n, count);
        }
        stage(states);
        std::memcpy(last + at, state, sizeof(float) * count);
    }

    void backward(Span s, long channel, Operand grad, Operand dx, Operand dg, const float* starts, const float* grad_last,
                  float* grad_first, Scratch scratch) const {
        const long count = call.count(channel), ld = whole_vectors(count), at = s.state * call.channels + channel;
        float *xs = scratch.take(TILE * BLOCK), *gs = scratch.take(TILE * BLOCK), *ds = scratch.take(TILE * BLOCK);
        float *before = scratch.take(TILE * BLOCK), *kept = scratch.take(TILE * BLOCK), carry[BLOCK] = {}, state[BLOCK] = {};
        stage(states);
        std::memcpy(carry, grad_last + at, sizeof(float) * count);
        for (long k = s.tiles() - 1; k >= 0; --k) {
            const long begin = s.begin + k * TILE, n = s.end - begin < TILE ? s.end - begin : TILE;
            const long tile = call.first_tile(s.state) + k;
            stage(states);
            std::memcpy(state, starts + tile * call.channels + channel, sizeof(float) * count);
            stage(reading);
            read_tile(x, s.row, channel, begin, n, count, xs, ld);
            read_tile(g, s.row, channel, begin, n, count, gs, ld);
            read_tile(grad, s.row, channel, begin, n, count, ds, ld);
            stage(scanning);
            for (long v = 0; v < ld; v += W) {
                vec h = load(state + v), d = load(carry + v);
                // What each token keeps of the state before it, and the factor: 0 where it keeps nothing.
                for (long i = 0; i < n; ++i) {
                    const long place = i * ld + v;
                    const vec log_decay = load(gs + place);
                    if (call.fresh(s.row, begin + i)) h = vec{};
                    if (!call.real(s.row, begin + i)) continue;
                    const ivec cleared = clears(log_decay);
                    const vec factor = pick(cleared, vec{}, decay(log_decay));
                    const vec rest = pick(cleared, vec{}, factor * h);
                    store(before + place, rest);
                    store(kept + place, factor);
                    h = load(xs + place) + rest;
                }
                for (long i = n - 1; i >= 0; --i) {
                    const long place = i * ld + v;
                    if (!call.real(s.row, begin + i)) {
                        store(xs + place, vec{});
                        store(gs + place, vec{});
                    } else {
                        d += load(ds + place);
                        store(xs + place, d);
                        const vec factor = load(kept + place);
                        const ivec cleared = (ivec)(factor == vec{});
                        store(gs + place, pick(cleared, vec{}, d * load(before + place)));
                        d = pick(cleared, vec{}, d * factor);
                    }
                    if (call.fresh(s.row, begin + i)) d = vec{};
                }
                store(carry + v, d);
            }
            stage(writing);
            write_tile(xs, ld, dx, s.row, channel, begin, n, count);
            write_tile(gs, ld, dg, s.row, channel, begin, n, count);
        }
        stage(states);
        std::memcpy(grad_first + at, carry, sizeof(float) * count);
    }
};

}  // namespace

// x, g, y (B,1,N,C) with 4 strides each, in this order, of types as in tiles.h; first, last (sequences,C) float; starts
// (tiles,C) float or null; mask (B,N), segments (B,N) or null; offsets (sequences+1) or null. sizes: B, N, C, sequences.
// Returns 0, or 1 if memory runs out.
extern "C" int longspan_diagonal_forward(void* x, void* g, void* y, const float* first, float* last, float* starts,
                                         const std::uint8_t* mask, const std::int64_t* segments, const std::int64_t* offsets,
                                         const long* strides, const int* types, const long* sizes, int threads) {
    const Scan call{sizes[0], sizes[1], sizes[2], sizes[3], mask, segments, offsets};
    const Operand out{y, strides + 8, types[2]};
    const Pass pass{call, {x, strides, types[0]}, {g, strides + 4, types[1]}};
    return in_threads(Pass::scratch, threads, [&](Scratch scratch) {
        call.each_unit([&](Span s, long channel) { pass.forward(s, channel, out, first, last, starts, scratch); });
    });
}

// As above; grad, dx, dg like x; grad_last, grad_first (sequences,C) float.
extern "C" int longspan_diagonal_backward(void* x, void* g, void* grad, void* dx, void* dg, const float* starts,
                                          const float* grad_last, float* grad_first, const std::uint8_t* mask,
                                          const std::int64_t* segments, const std::int64_t* offsets, const long* strides,
                                          const int* types, const long* sizes, int threads) {
    const Scan call{sizes[0], sizes[1], sizes[2], sizes[3], mask, segments, offsets};
    const Operand up{grad, strides + 8, types[2]}, to_x{dx, strides + 12, types[3]}, to_g{dg, strides + 16, types[4]};
    const Pass pass{call, {x, strides, types[0]}, {g, strides + 4, types[1]}};
    return in_threads(Pass::scratch, threads, [&](Scratch scratch) {
        call.each_unit([&](Span s, long channel) {
            pass.backward(s, channel, up, to_x, to_g, starts, grad_last, grad_first, scratch);
        });
    });
}

// One token: x, g, y (B,1,1,C) as above; state (B,C) float is overwritten. sizes: B, C.
extern "C" void longspan_diagonal_step(void* x, void* g, void* y, float* state, const long* strides, const int* types,
                                       const long* sizes, int threads) {
    const Scan call{sizes[0], 1, sizes[1], sizes[0], nullptr, nullptr, nullptr};
    const Operand in{x, strides, types[0]}, gate{g, strides + 4, types[1]}, out{y, strides + 8, types[2]};
#pragma omp parallel num_threads(threads) if (threads > 1 && sizes[0] * sizes[1] > 1 << 15)
    call.each_unit([&](Span s, long channel) {
        const long count = call.count(channel), ld = whole_vectors(count);
        float xs[BLOCK], gs[BLOCK], hs[BLOCK] = {}, *h = state + s.state * call.channels + channel;
        read_tile(in, s.row, channel, 0, 1, count, xs, ld);
        read_tile(gate, s.row, channel, 0, 1, count, gs, ld);
        std::memcpy(hs, h, sizeof(float) * count);
        for (long v = 0; v < ld; v += W) {
            const vec log_decay = load(gs + v);
            store(hs + v, load(xs + v) + pick(clears(log_decay), vec{}, decay(log_decay) * load(hs + v)));
        }
        std::memcpy(h, hs, sizeof(float) * count);
        write_tile(hs, ld, out, s.row, channel, 0, 1, count);
    });
}
