// Code that the passes over a sequence share: rows of any strides and two types, read into packed chunks of C tokens; the
// cuts of a sequence into chunks, segments and sections; running sums in the layout of the public state.
#pragma once
#include <cstdlib>

#include "../shared/gemm.h"
#include "../shared/stages.h"
#include "maps.h"

namespace {

constexpr long C = 32;  // tokens whose products form one small matrix

// One tensor (B, H, N, channels) with strides in elements.
template <class T>
struct Tensor {
    T* data;
    const long* strides;
};

// The rows of one head.
template <class T>
struct Rows {
    T* data;
    long token, channel;
    Rows(Tensor<T> t, long batch, long head)
        : data(t.data + batch * t.strides[0] + head * t.strides[1]), token(t.strides[2]), channel(t.strides[3]) {}
};

// One token of a head into out (ld), through a map, zeros beyond the width.
template <class T, class F>
inline void read_row(Rows<const T> rows, long token, long width, float* out, long ld, F map) {
    const T* row = rows.data + token * rows.token;
    long j = 0;
    if (rows.channel == 1)
        for (; j + W <= width; j += W) store(out + j, map(load(row + j)));
    for (; j < ld; j += W) {
        float rest[W] = {};
        for (long i = 0; i < W && j + i < width; ++i) rest[i] = widen(row[(j + i) * rows.channel]);
        store(rest, map(load(rest)));
        // phi(0) may be 1, and entries beyond the width must be zero.
        for (long i = 0; i < W; ++i) out[j + i] = j + i < width ? rest[i] : 0.0f;
    }
}

inline vec same(vec x) { return x; }

// Tokens begin ... begin + n of a head into out (n, ld), zeros beyond the width.
template <class T>
void read(Rows<const T> rows, long begin, long n, long width, float* out, long ld) {
    for (long i = 0; i < n; ++i) read_row(rows, begin + i, width, out + i * ld, ld, same);
}

// Tokens begin ... begin + n of a row, which is a head of a sequence.
struct Tokens {
    long row, begin, n;
};

// Some tokens through a map into out (n, ld); masked ones are zero.
template <class T, class F>
void pack(Rows<const T> rows, Tokens at, long width, const std::uint8_t* mask, float* out, long ld, F map) {
    for (long i = 0; i < at.n; ++i, out += ld) {
        if (mask && !mask[at.begin + i])
            std::memset(out, 0, sizeof(float) * ld);
        else
            read_row(rows, at.begin + i, width, out, ld, map);
    }
}

// Prefetch tokens that will be read or written soon; they are too far apart for the hardware prefetcher. One tensor at a
// time with work in between: a processor stalls if too many lines are requested together.
template <class T>
void fetch(Rows<T> rows, Tokens at, long width) {
    if (rows.channel != 1) return;
    constexpr long line = 64 / sizeof(T);
    for (long i = 0; i < at.n; ++i)
        for (long j = 0; j < width; j += line) __builtin_prefetch(rows.data + (at.begin + i) * rows.token + j, 0, 2);
}

template <class T>
void write(const float* x, long ld, Rows<T> rows, long begin, long n, long width) {
    for (long i = 0; i < n; ++i, x += ld) {
        T* row = rows.data + (begin + i) * rows.token;
        long j = 0;
        if (rows.channel == 1)
            for (; j + W <= width; j += W) store(row + j, load(x + j));
        for (; j < width; ++j) narrow(x[j], row + j * rows.channel);
    }
}

// out = phi(x), rows (n, ld) with zeros beyond the width.
inline void features(int map, const float* x, float* out, long n, long width, long ld) {
    with_map(map, [&](auto phi) {
        for (long i = 0; i < n; ++i, x += ld, out += ld) {
            for (long j = 0; j < width; j += W) store(out + j, phi(load(x + j)));
            // phi(0) may be 1, and entries beyond the width must stay zero.
            for (long j = width; j < ld; ++j) out[j] = 0.0f;
        }
    });
}

template <int MAP>
void slope_rows(float* grad, const float* x, const float* y, long size) {
    for (long j = 0; j < size; j += W) store(grad + j, load(grad + j) * slope<MAP>(load(x + j), load(y + j)));
}

// grad *= phi'(x), with y = phi(x); size is a multiple of W.
inline void slopes(int map, float* grad, const float* x, const float* y, long size) {
    switch (map) {
        case elu: return slope_rows<elu>(grad, x, y, size);
        case relu: return slope_rows<relu>(grad, x, y, size);
        case squared_relu: return slope_rows<squared_relu>(grad, x, y, size);
        default: return slope_rows<clamped_exp>(grad, x, y, size);
    }
}

inline void clear_masked(const std::uint8_t* mask, long begin, long n, float* x, long ld) {
    if (mask)
        for (long i = 0; i < n; ++i)
            if (!mask[begin + i]) std::memset(x + i * ld, 0, sizeof(float) * ld);
}

inline vec dot_lanes(const float* a, const float* b, long size) {
    vec acc = vec{};
    for (long j = 0; j < size; j += W) acc += load(a + j) * load(b + j);
    return acc;
}

// out[i] = the sum of the W lanes of row i of x (rows, W); rows up to the next multiple of W are read and written.
inline void sum_lanes(const float* x, long rows, float* out) {
    float turned[W * W];
    for (long i = 0; i < rows; i += W) {
        transpose_square(x + i * W, W, turned, W);
        vec acc = load(turned);
        for (long j = 1; j < W; ++j) acc += load(turned + j * W);
        store(out + i, acc);
    }
}

// Zero above the diagonal of c, n by n, as far as lower_product wrote; before that, add shift[i] to row i if there is one;
// after it, add the sum of row i to the lanes of sums (n, W) if they are given.
inline void finish_lower(float* c, long n, const float* shift, float* sums) {
    ivec lane;
    for (long j = 0; j < W; ++j) lane[j] = static_cast<std::int32_t>(j);
    for (long i = 0; i < n; ++i) {
        const long strip = i / STRIP * STRIP + STRIP;
        const long end = whole_vectors(strip < n ? strip : n);
        float* row = c + i * C;
        vec acc = sums ? load(sums + i * W) : vec{};
        const vec more = shift ? splat(shift[i]) : vec{};
        for (long j = 0; j < end; j += W) {
            vec x = load(row + j) + more;
            if (j + W > i + 1) x = pick(lane + static_cast<std::int32_t>(j - i) > 0, vec{}, x);
            store(row + j, x);
            acc += x;
        }
        if (sums) store(sums + i * W, acc);
    }
}

inline void add_rows(const float* x, long n, long ld, float* out) {
    for (long j = 0; j < ld; j += W) {
        vec acc = load(out + j);
        for (long i = 0; i < n; ++i) acc += load(x + i * ld + j);
        store(out + j, acc);
    }
}

// Memory cut into arrays of whole vectors.
class Scratch {
   public:
    explicit Scratch(float* memory) : memory(memory) {}
    float* take(long floats) {
        float* taken = memory;
        memory += floats;
        return taken;
    }

   private:
    float* memory;
};

// Zeroed memory that is freed at the end of its scope; check ready() before use.
class Memory {
   public:
    explicit Memory(long floats) : memory(static_cast<float*>(std::aligned_alloc(64, (floats * 4 + 63) / 64 * 64))) {
        if (memory) std::memset(memory, 0, sizeof(float) * floats);
    }
    ~Memory() { std::free(memory); }
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;
    bool ready() const { return memory != nullptr; }
    float* data() const { return memory; }
    Scratch scratch() const { return Scratch(memory); }

   private:
    float* memory;
};

// The arguments of a call that both passes need.
struct Call {
    long batch, heads, tokens, keys, values;
    int map;
    float eps;
    const std::uint8_t* mask;      // (B, N), may be null
    const std::int64_t* segments;  // (B, N), may be null
    long rows() const { return batch * heads; }
    long kp() const { return whole_vectors(keys); }
    long vp() const { return whole_vectors(values); }

    template <class T>
    Rows<T> of(Tensor<T> t, long row) const {
        return Rows<T>(t, row / heads, row % heads);
    }
    const std::uint8_t* mask_of(long row) const { return mask ? mask + row / heads * tokens : nullptr; }
    const std::int64_t* segments_of(long row) const { return segments ? segments + row / heads * tokens : nullptr; }
};

// The end of the chunk that begins at begin: it has at most C tokens, all of one segment.
inline long chunk_end(const std::int64_t* segments, long begin, long end) {
    long stop = begin + C < end ? begin + C : end;
    if (segments)
        for (long t = begin + 1; t < stop; ++t)
            if (segments[t] != segments[begin]) return t;
    return stop;
}

inline long chunk_begin(const std::int64_t* segments, long begin, long end) {
    long start = end - C > begin ? end - C : begin;
    if (segments)
        for (long t = end - 1; t > start; --t)
            if (segments[t - 1] != segments[end - 1]) return t;
    return start;
}

inline bool starts_anew(const std::int64_t* segments, long t) { return segments && t > 0 && segments[t] != segments[t - 1]; }

struct Part {
    long begin, end;
};

// How a call is cut into units for parallel threads. Neighboring heads of one batch row form a unit, a chunk at a time,
// since their channels are adjacent in memory. If there are too few heads for the threads, the tokens are cut into parts
// too. Rows with segments stay whole, since segments cut the sums anyway.
struct Units {
    long parts, groups;  // per sequence; per batch row
    const Call& call;

    Units(const Call& call, long threads) : parts(1), groups(1), call(call) {
        if (!call.segments && call.rows() < 8 * threads) {
            const long fewest = threads / common(call.rows(), threads);  // so that rows * parts divides evenly
            if (call.tokens >= fewest * 8 * C) parts = fewest;
        }
        while (groups < call.heads && call.batch * groups * parts < 8 * threads && call.batch * groups * parts % threads)
            ++groups;
    }
    static long common(long a, long b) { return b ? common(b, a % b) : a; }
    long count() const { return call.batch * groups * parts; }
    long part(long unit) const { return unit % parts; }
    long first_row(long unit) const { return row(unit, 0); }
    long last_row(long unit) const { return row(unit, 1); }  // not included
    Part tokens(long unit) const {
        const long chunks = (call.tokens + C - 1) / C, p = part(unit);
        const long begin = chunks * p / parts * C, end = chunks * (p + 1) / parts * C;
        return {begin < call.tokens ? begin : call.tokens, end < call.tokens ? end : call.tokens};
    }

    // Calls use(at, next) for the tokens ``now`` of every row of a unit, row by row, since heads are often adjacent; next is
    // used after that: the same tokens of the next row, or the following tokens of the first row.
    template <class F>
    void each_row(long unit, Part now, Part after, F use) const {
        const long first = first_row(unit), last = last_row(unit);
        for (long row = first; row < last; ++row) {
            const Part then = row + 1 < last ? now : after;
            use(Tokens{row, now.begin, now.end - now.begin},
                Tokens{row + 1 < last ? row + 1 : first, then.begin, then.end - then.begin});
        }
    }

   private:
    long row(long unit, long more) const {
        const long group = unit / parts % groups + more, batch = unit / parts / groups;
        return batch * call.heads + group * call.heads / groups;
    }
};

// The running sums of one row: matrix (rows, ld) and vector, which the public state (D, E+1) holds in one tensor.
inline void unpack_state(const float* state, long keys, long values, float* matrix, long ld, float* vector) {
    for (long d = 0; d < keys; ++d, state += values + 1) {
        std::memcpy(matrix + d * ld, state, sizeof(float) * values);
        vector[d] = state[values];
    }
}

inline void pack_state(const float* matrix, long ld, const float* vector, long keys, long values, float* state) {
    for (long d = 0; d < keys; ++d, state += values + 1) {
        std::memcpy(state, matrix + d * ld, sizeof(float) * values);
        state[values] = vector[d];
    }
}

// Calls pass.run for each of pass.units(), with memory for pass.scratch() floats per thread. Returns 1 if memory runs out.
template <class Pass>
int each_unit(const Pass& pass, int threads) {
    const long units = pass.units();
    bool failed = false;
#pragma omp parallel num_threads(threads) if (threads > 1 && units > 1)
    {
        Memory memory(pass.scratch());
        if (!memory.ready()) failed = true;
#pragma omp barrier
        if (!failed) {
#pragma omp for schedule(dynamic)
            for (long unit = 0; unit < units; ++unit) pass.run(unit, memory.scratch());
        }
    }
    return failed;
}

}  // namespace
