// A decode step of a whole model: embedding, branches such as mixers and feed-forward networks, head, in one parallel region
// with only barriers between the stages. Weights are packed once, by longspan_pack, or read where the model has them. Plain
// C interface.
//
// A call may compute K tokens of each sequence, with the bits of K calls: they are rows of all that has no state, and
// states pass from token to token. Such a call leaves the states before its tokens, of which some may be undone, and keeps
// what their stages have read in a journal. The next call first applies the tokens that remain. A cache is cut by its
// length.
//
// Sizes: B sequences, K tokens, d width of the residual stream. Row b K + t is token t of sequence b.
#include <cmath>
#include <cstdlib>

#include "../quantized/product.h"
#include "../shared/gemm.h"
#include "stages.h"

namespace {

constexpr long PANEL = COLUMNS * W;  // adjacent outputs of a packed linear map
constexpr long BLOCK = 48;           // sequences that a thread processes per panel

enum Failure { fine = 0, no_memory = 1, bad_token = 2, bad_position = 3, no_room = 4, bad_length = 5 };

}  // namespace

extern "C" {

struct longspan_norm {
    const float *weight, *bias;  // bias null: the mean is not subtracted (RMS)
    float eps;
};

// x = after(x + factor * out(stages(before(x)))): the stages compute on ``width`` floats per sequence, and ``out`` maps those
// from ``mixed`` on. Norms and ``out`` without a weight are left out.
struct longspan_branch {
    longspan_norm before, after;
    longspan_linear out;
    const longspan_stage* stages;
    long count, width, mixed;
    float factor;
};

// The embeddings and the outputs of the head are multiplied by their factors.
struct longspan_model {
    const longspan_branch* branches;
    const void* table;      // learned positions (length, d) of the model's type, or null
    longspan_norm begin, norm;  // of embeddings and of outputs; weight null: none
    longspan_linear tokens, head;  // embeddings (vocab, d): in rows, or a weight in blocks
    long depth, dim, vocab, length, type, kept;  // depth: number of branches; type 0: float, 1: bfloat16; kept: floats
    float token_factor, head_factor;
};

}  // extern "C"

namespace {

void normalize(const longspan_norm& norm, const float* x, float* out, long dim) {
    float mean = 0.0f, square = 0.0f;
    if (norm.bias) {
        for (long j = 0; j < dim; ++j) mean += x[j];
        mean /= dim;
    }
    for (long j = 0; j < dim; ++j) square += (x[j] - mean) * (x[j] - mean);
    const float scale = 1.0f / std::sqrt(square / dim + norm.eps);
    for (long j = 0; j < dim; ++j) out[j] = (x[j] - mean) * scale * norm.weight[j] + (norm.bias ? norm.bias[j] : 0.0f);
}

// How the outputs of a map are stored: after an activation (identity_act for none), times a factor, in place of the old value
// or added to it.
struct Finish {
    long activation = identity_act;
    float factor = 1.0f;
    bool add = false;
};

// Stores columns from ``begin`` on for rows of results that lie ``stride`` apart.
inline void finish(const longspan_linear& map, long begin, long width, const float* result, long stride, long rows, float* out,
                   long oi, Finish how) {
    for (long i = 0; i < rows; ++i) {
        const float* from = result + i * stride;
        float* to = out + i * oi + begin;
        for (long j = 0; j < width; j += W) {
            const long n = width - j;
            vec y = load(from + j);
            if (map.bias) y += some(map.bias + begin + j, n);
            if (how.activation != identity_act) y = activate(how.activation, y);
            if (how.factor != 1.0f) y *= how.factor;
            keep_some(to + j, how.add ? y + some(to + j, n) : y, n);
        }
    }
}

// Columns of one panel for rows of x.
template <class T>
void panel(const longspan_linear& map, long which, const float* x, long xi, long rows, float* out, long oi, Finish how) {
    const long begin = which * PANEL, width = map.out - begin < PANEL ? map.out - begin : PANEL;
    const T* weight = static_cast<const T*>(map.weight) + begin * map.in;
    alignas(64) float result[BLOCK * PANEL];
    columns<COLUMNS, false>(rows, map.in, x, xi, 1, weight, PANEL, result, PANEL);
    finish(map, begin, width, result, PANEL, rows, out, oi, how);
}

constexpr long UNIT = 48, BESIDE = 3;  // outputs of a unit of work, whole vectors; and those that are summed together
constexpr int WITH = 4;                // rows that are multiplied together: with BESIDE, as many sums as there are registers
constexpr long PART = 512;             // inputs that stay in the caches, a multiple of W

// sums[i, j] += x_i w_j lane by lane, for ROWS rows of x and OUTPUTS rows of the weight.
template <int ROWS, int OUTPUTS, class T>
LONGSPAN_INLINE void lanes(long width, const float* x, long xi, const T* w, long wi, vec* sums) {
    vec acc[ROWS][OUTPUTS];
    for (int i = 0; i < ROWS; ++i)
        for (int j = 0; j < OUTPUTS; ++j) acc[i][j] = sums[i * BESIDE + j];
    long p = 0;
    for (; p + W <= width; p += W) {
        vec y[OUTPUTS];
        for (int j = 0; j < OUTPUTS; ++j) y[j] = load(w + j * wi + p);
        for (int i = 0; i < ROWS; ++i) {
            const vec z = load(x + i * xi + p);
            for (int j = 0; j < OUTPUTS; ++j) acc[i][j] += z * y[j];
        }
    }
    if (p < width) {
        float rest[OUTPUTS][W] = {};
        for (int j = 0; j < OUTPUTS; ++j)
            for (long l = 0; p + l < width; ++l) rest[j][l] = widen(w[j * wi + p + l]);
        for (int i = 0; i < ROWS; ++i) {
            const vec z = some(x + i * xi + p, width - p);
            for (int j = 0; j < OUTPUTS; ++j) acc[i][j] += z * load(rest[j]);
        }
    }
    for (int i = 0; i < ROWS; ++i)
        for (int j = 0; j < OUTPUTS; ++j) sums[i * BESIDE + j] = acc[i][j];
}

template <int OUTPUTS, class T>
void all_lanes(long rows, long width, const float* x, long xi, const T* w, long wi, vec* sums) {
    long i = 0;
    for (; i + WITH <= rows; i += WITH) lanes<WITH, OUTPUTS>(width, x + i * xi, xi, w, wi, sums + i * BESIDE);
    for (; i < rows; ++i) lanes<1, OUTPUTS>(width, x + i * xi, xi, w, wi, sums + i * BESIDE);
}

// Outputs of one unit for rows of x, with a weight that is not packed. An output is a sum by lanes, in the order of the inputs.
template <class T>
void in_rows(const longspan_linear& map, long which, const float* x, long xi, long rows, float* out, long oi, Finish how) {
    const long begin = which * UNIT, end = map.out < begin + UNIT ? map.out : begin + UNIT, in = map.in;
    const long part = rows == 1 ? in : PART;
    alignas(64) float result[BLOCK * UNIT];
    vec sums[BLOCK * BESIDE];
    for (long first = begin; first < end; first += BESIDE) {
        const long count = end - first < BESIDE ? end - first : BESIDE;
        for (long i = 0; i < rows * BESIDE; ++i) sums[i] = vec{};
        for (long p = 0; p < in; p += part) {
            const long width = in - p < part ? in - p : part;
            const T* w = static_cast<const T*>(map.weight) + first * in + p;
            if (count == BESIDE)
                all_lanes<BESIDE>(rows, width, x + p, xi, w, in, sums);
            else
                for (long j = 0; j < count; ++j) all_lanes<1>(rows, width, x + p, xi, w + j * in, in, sums + j);
        }
        for (long i = 0; i < rows; ++i)
            for (long j = 0; j < count; ++j) result[i * UNIT + first - begin + j] = sum(sums[i * BESIDE + j]);
    }
    finish(map, begin, end - begin, result, UNIT, rows, out, oi, how);
}

inline quantized::Weight quantized_weight(const longspan_linear& map) {
    return {static_cast<const std::uint8_t*>(map.weight),
            static_cast<const std::uint8_t*>(map.scales),
            static_cast<const float16*>(map.factors),
            map.in,
            map.out,
            static_cast<int>(map.format),
            static_cast<int>(map.activations)};
}

// The cells of an input of a quantized map.
inline long cells_of(const longspan_linear& map) { return map.format > 0 ? map.in / quantized::CELL : 0; }

inline void prepare(const longspan_linear& map, const float* x, quantized::Cell* cell) {
    quantized::prepare(x, static_cast<int>(map.format), static_cast<int>(map.activations), cell);
}

// Outputs of one group, with a quantized weight.
inline void in_blocks(const longspan_linear& map, long group, const quantized::Cell* cells, long rows, float* out, long oi,
                      Finish how) {
    const long begin = group * quantized::GROUP, left = map.out - begin;
    alignas(64) float result[BLOCK * quantized::GROUP];
    quantized::multiply(quantized_weight(map), group, cells, rows, result);
    finish(map, begin, left < quantized::GROUP ? left : quantized::GROUP, result, quantized::GROUP, rows, out, oi, how);
}

// The largest sizes of the stages with experts of a model.
struct Sizes {
    long slots = 0, experts = 0, width = 0, cells = 0;  // slots: experts of a row; width: numbers within an expert

    static void enlarge(long& size, long least) { size = size < least ? least : size; }
    void add(const longspan_experts& how) {
        enlarge(slots, how.chosen + how.shared), enlarge(experts, how.count + how.shared);
        for (long e = 0; e < how.count + how.shared; ++e) {
            const longspan_expert& one = how.experts[e];
            enlarge(width, 2 * one.out.in), enlarge(cells, cells_of(one.gate)), enlarge(cells, cells_of(one.out));
        }
    }
    long floats(long batch, long dim) const { return batch * slots * (dim + width + 4) + 2 * experts + 2; }
};

// Which experts read which rows. A pair is a row and one of its experts; all pairs of an expert are adjacent.
struct Pairs {
    float *ends, *inner, *factors;   // inputs, later outputs, of each pair, and what is between; the factor of each slot
    std::int32_t *which, *places;    // of each slot of each row: its expert, and the place of the pair
    std::int32_t *rows, *begins;     // the row of each pair; the first pair of each expert
    std::int32_t *hits, *hit_count;  // the experts that have pairs

    Pairs(float* memory, Sizes sizes, long batch, long dim) {
        const long count = batch * sizes.slots;
        ends = memory, inner = ends + count * dim, factors = inner + count * sizes.width;
        which = reinterpret_cast<std::int32_t*>(factors + count), places = which + count, rows = places + count;
        begins = rows + count, hits = begins + sizes.experts + 1, hit_count = hits + sizes.experts;
    }

    void sort(long experts, long slots, long batch) const {
        std::memset(begins, 0, sizeof(std::int32_t) * (experts + 1));
        for (long i = 0; i < batch * slots; ++i) ++begins[which[i]];
        std::int32_t before = 0;
        *hit_count = 0;
        for (long e = 0; e <= experts; ++e) {
            const std::int32_t count = begins[e];
            if (count) hits[(*hit_count)++] = static_cast<std::int32_t>(e);
            begins[e] = before;
            before += count;
        }
        // Each expert's place moves to its end, and so becomes that of the next one.
        for (long i = 0; i < batch * slots; ++i) {
            places[i] = begins[which[i]]++;
            rows[places[i]] = static_cast<std::int32_t>(i / slots);
        }
        std::memmove(begins + 1, begins, sizeof(std::int32_t) * experts);
        begins[0] = 0;
    }
};

// The floats of memory that a thread needs for a stage.
inline long memory_of(const longspan_stage& stage) {
    switch (stage.kind) {
        case linear_attention: return 6 * of<longspan_linear_attention>(stage).size;
        case softmax_attention: return 3 * of<longspan_softmax_attention>(stage).size;
        case turn: return 2 * of<longspan_turn>(stage).size;
        case convolve: return W * (of<longspan_convolve>(stage).rows + 1);
        default: return 0;
    }
}

// The floats of a unit's state, of which a call with a journal changes a copy.
inline long state_of(const longspan_stage& stage) {
    switch (stage.kind) {
        case linear_attention: {
            const long size = of<longspan_linear_attention>(stage).size;
            return size * (size + 1);
        }
        case convolve: return of<longspan_convolve>(stage).rows * CHANNELS;
        case recur: return of<longspan_recur>(stage).keys * of<longspan_recur>(stage).values;
        default: return 0;
    }
}

// Of each branch with sums or a convolution (B, room, 2, width) floats, the activations that these read, first those of the
// convolution; null without a journal. ``kept`` (B): how many tokens of the last call remain.
struct Journal {
    float* const* branches;
    const std::int64_t* kept;
    long room;
};

template <class T>
struct Decode {
    const longspan_model& model;
    const longspan_state* states;
    long sequences, count, batch, dim, parts;  // batch: rows
    float *x, *normed, *inner;  // activations of all rows: two of d channels, and those within mixer or network
    float* kept;                // what a branch leaves to later ones
    Journal journal;
    quantized::Cell* prepared;  // activations of all rows, or of all pairs, for a quantized map
    Sizes sizes;
    Pairs pairs;

    // Called by all threads together, like all below.
    void apply(const longspan_linear& map, const float* from, long width, float* to, long to_width, Finish how) const {
        const long cells = cells_of(map);
        if (cells && !map.prepared) {
            // Another thread may still read those of the map before.
            wait();
#pragma omp for schedule(static)
            for (long i = 0; i < batch * cells; ++i)
                prepare(map, from + i / cells * width + i % cells * quantized::CELL, prepared + i);
        }
        multiply(map, from, width, prepared, batch, to, to_width, how);
    }

    // A quantized map reads its inputs from ``cells``.
    static void multiply(const longspan_linear& map, const float* from, long width, const quantized::Cell* cells, long rows,
                         float* to, long to_width, Finish how) {
        const long size = map.format > 0 ? quantized::GROUP : map.format == IN_ROWS ? UNIT : PANEL;
        const long units = (map.out + size - 1) / size, blocks = (rows + BLOCK - 1) / BLOCK;
#pragma omp for schedule(static) nowait
        for (long item = 0; item < units * blocks; ++item) {
            const long first = item % blocks * BLOCK, count = rows - first < BLOCK ? rows - first : BLOCK;
            const float* x = from + first * width;
            float* out = to + first * to_width;
            if (map.format > 0)
                in_blocks(map, item / blocks, cells + first * cells_of(map), count, out, to_width, how);
            else
                (map.format == IN_ROWS ? in_rows<T> : panel<T>)(map, item / blocks, x, width, count, out, to_width, how);
        }
    }

    void wait() const {
#pragma omp barrier
    }

    void norm(const longspan_norm& how, const float* from, float* to) const {
#pragma omp for schedule(static)
        for (long b = 0; b < batch; ++b) normalize(how, from + b * dim, to + b * dim, dim);
    }

    void embed(const std::int64_t* tokens, const std::int64_t* positions) const {
        const T *rows = static_cast<const T*>(model.tokens.weight), *table = static_cast<const T*>(model.table);
        const quantized::Weight weight = quantized_weight(model.tokens);
#pragma omp for schedule(static)
        for (long b = 0; b < batch; ++b) {
            float* to = x + b * dim;
            if (weight.format > 0)
                quantized::row_of(weight, tokens[b], to);
            else
                for (long j = 0; j < dim; ++j) to[j] = widen(rows[tokens[b] * dim + j]);
            const T* learned = table ? table + (positions[b / count] + b % count) * dim : nullptr;
            for (long j = 0; j < dim; ++j) to[j] = to[j] * model.token_factor + (learned ? widen(learned[j]) : 0.0f);
        }
    }

    // f(row, b) for each row.
    template <class F>
    void each_row(long width, F f) const {
#pragma omp for schedule(static) nowait
        for (long b = 0; b < batch; ++b) f(inner + b * width, b);
    }

    // f(from, to) for ranges of units, ``units`` for each row; the same ranges for the same number of units, so that a
    // thread goes on with its own.
    template <class F>
    void each_part(long units, F f) const {
#pragma omp for schedule(static) nowait
        for (long part = 0; part < parts; ++part)
            f(batch * units * part / parts, batch * units * (part + 1) / parts);
    }

    // f(row, b, unit, to) for each unit; ``to`` ends the units of the thread.
    template <class F>
    void each_unit(long units, long width, F f) const {
        each_part(units, [&](long from, long to) {
            for (long i = from; i < to; ++i) f(inner + i / units * width, i / units, i % units, to);
        });
    }

    // The units of a stage whose state passes from token to token: those that remain of the last call on the state itself,
    // ``place(b, unit)``; then those of this call on a copy. run(place, b, unit, row, t), where t counts from the first
    // token of this call.
    template <class P, class C, class R>
    void chain(long units, float* read, long width, P place, C copy, R run) const {
        const long step = 2 * width, each = journal.room * step;
        each_of(units, [&](long b, long unit) {
            for (long t = 0, kept = journal.kept[b]; t < kept; ++t)
                run(place(b, unit), b, unit, read + b * each + t * step, t - kept);
        });
        wait();
#pragma omp for schedule(static)
        for (long row = 0; row < batch; ++row)
            std::memcpy(read + row / count * each + row % count * step, inner + row * width, sizeof(float) * width);
        each_of(units, [&](long b, long unit) {
            const auto own = copy(place(b, unit), unit);
            for (long t = 0; t < count; ++t) run(own, b, unit, inner + (b * count + t) * width, t);
        });
    }

    // f(b, unit) for ``units`` of each sequence.
    template <class F>
    void each_of(long units, F f) const {
#pragma omp for schedule(static) nowait
        for (long i = 0; i < sequences * units; ++i) f(i / units, i % units);
    }

    // f(expert, first pair, number of pairs) for each expert that has pairs; then all threads wait.
    template <class F>
    void each_expert(const longspan_experts& how, F f) const {
        for (long i = 0; i < *pairs.hit_count; ++i) {
            const long e = pairs.hits[i], first = pairs.begins[e];
            f(how.experts[e], first, pairs.begins[e + 1] - first);
        }
        wait();
    }

    // Writes the inputs of one map of an expert: write(pair, channel, count, to) for parts of each pair.
    template <class F>
    void feed(const longspan_linear& map, long first, long count, float* to, long width, F write) const {
        const long size = quantized::CELL, parts = (map.in + size - 1) / size;
#pragma omp for schedule(static) nowait
        for (long i = 0; i < count * parts; ++i) {
            const long pair = first + i / parts, channel = i % parts * size, left = map.in - channel;
            float* x = to + pair * width + channel;
            write(pair, channel, left < size ? left : size, x);
            if (map.format > 0) prepare(map, x, prepared + first * sizes.cells + i);
        }
    }

    // Each pair is computed by itself and those of a row are added in the order of slots, so that rows do not depend on others.
    void run_experts(const longspan_experts& how, const float* input, long width) const {
        const long slots = how.chosen + how.shared;
        each_row(width, [&](float* row, long b) { choose(how, row, pairs.which + b * slots, pairs.factors + b * slots); });
        wait();
#pragma omp single
        pairs.sort(how.count + how.shared, slots, batch);
        each_expert(how, [&](const longspan_expert& one, long first, long count) {
            feed(one.gate, first, count, pairs.ends, dim, [&](long pair, long channel, long n, float* to) {
                std::memcpy(to, input + pairs.rows[pair] * dim + channel, sizeof(float) * n);
            });
        });
        each_expert(how, [&](const longspan_expert& one, long first, long count) {
            float* to = pairs.inner + first * sizes.width;
            for (const longspan_linear* map : {&one.gate, &one.value})
                if (map->weight) {
                    multiply(*map, pairs.ends + first * dim, dim, prepared + first * sizes.cells, count, to, sizes.width, {});
                    to += map->out;
                }
        });
        each_expert(how, [&](const longspan_expert& one, long first, long count) {
            feed(one.out, first, count, pairs.inner, sizes.width, [&](long, long, long n, float* gate) {
                for (long c = 0; c < n; c += W)
                    keep_some(gate + c, activate(how.activation, some(gate + c, n - c)) * some(gate + one.out.in + c, n - c), n - c);
            });
        });
        each_expert(how, [&](const longspan_expert& one, long first, long count) {
            multiply(one.out, pairs.inner + first * sizes.width, sizes.width, prepared + first * sizes.cells, count,
                     pairs.ends + first * dim, dim, {});
        });
        each_row(width, [&](float* row, long b) {
            float* to = row + how.to;
            std::memset(to, 0, sizeof(float) * dim);
            for (long i = b * slots; i < (b + 1) * slots; ++i)
                for (long j = 0; j < dim; ++j) to[j] += pairs.factors[i] * pairs.ends[pairs.places[i] * dim + j];
        });
    }

    // A stage with a state, for the tokens of a call with a journal; false for a stage without one. Its units are not those
    // of other stages, so that all threads wait before and after it.
    bool run_chained(const longspan_stage& stage, const longspan_branch& branch, const longspan_state& state, float* read,
                     float* mine) const {
        const long width = branch.width;
        float *sums = static_cast<float*>(state.first), *room = mine + memory_of(stage);
        switch (stage.kind) {
            case linear_attention: {
                const auto& how = of<longspan_linear_attention>(stage);
                const long size = how.size * (how.size + 1);
                chain(how.heads, read + width, width,
                      [&](long b, long h) { return Place<float>{sums + (b * how.heads + h) * size}; },
                      [&](Place<float> from, long) { return copied(from, size, room); },
                      [&](Place<float> at, long b, long h, float* row, long t) {
                          const std::int64_t position = state.position ? state.position[b] + t : 0;
                          run_linear(how, at.at, at.at + size, position, h, row, mine);
                      });
                return true;
            }
            case softmax_attention: {
                const auto& how = of<longspan_softmax_attention>(stage);
                wait();
                each_of(how.groups, [&](long b, long g) {
                    for (long t = 0; t < count; ++t)
                        run_softmax<T>(how, state, b, g, state.position[b] + t, inner + (b * count + t) * width, mine);
                });
                return true;
            }
            case convolve: {
                const auto& how = of<longspan_convolve>(stage);
                if (how.by_channel)
                    chain_convolve<T>(how, state, read, width, reinterpret_cast<T*>(room), mine);
                else
                    chain_convolve<float>(how, state, read, width, room, mine);
                return true;
            }
            case recur: {
                const auto& how = of<longspan_recur>(stage);
                const long size = how.keys * how.values;
                chain(how.heads, read + width, width,
                      [&](long b, long h) { return Place<float>{sums + (b * how.heads + h) * size}; },
                      [&](Place<float> from, long) { return copied(from, size, room); },
                      [&](Place<float> at, long, long h, float* row, long) {
                          run_recur(how, at.at - h * size, row, width, h, h + 1);
                      });
                return true;
            }
            default: return false;
        }
    }

    static Place<float> copied(Place<float> from, long size, float* room) {
        std::memcpy(room, from.at, sizeof(float) * size);
        return {room};
    }

    // S: the type of the state; ``room`` holds that of a unit.
    template <class S>
    void chain_convolve(const longspan_convolve& how, const longspan_state& state, float* read, long width, S* room,
                        float* mine) const {
        chain((how.channels + CHANNELS - 1) / CHANNELS, read, width,
              [&](long b, long unit) { return recent<S>(how, state.second, b, unit * CHANNELS); },
              [&](Place<S> from, long unit) {
                  const long n = channels_of(how, unit * CHANNELS);
                  if (how.by_channel) {
                      std::memcpy(room, from.at, sizeof(S) * n * how.rows);
                      return Place<S>{room, 1, how.rows};
                  }
                  for (long k = 0; k < how.rows; ++k)
                      std::memcpy(room + k * CHANNELS, from.at + k * from.row, sizeof(S) * n);
                  return Place<S>{room, CHANNELS, 1};
              },
              [&](Place<S> at, long, long unit, float* row, long) { run_convolve(how, at, row, unit * CHANNELS, mine); });
    }

    void run_stage(const longspan_stage& stage, const longspan_branch& branch, const longspan_state& state, const float* input,
                   float* mine) const {
        const long width = branch.width;
        switch (stage.kind) {
            case project: {
                const auto& how = of<longspan_project>(stage);
                const bool first = how.from < 0;
                apply(how.map, first ? input : inner + how.from, first ? dim : width, inner + how.to, width, {how.activation});
                break;
            }
            case linear_attention: {
                const auto& how = of<longspan_linear_attention>(stage);
                const long size = how.size * (how.size + 1);
                float* sums = static_cast<float*>(state.first);
                each_unit(how.heads, width, [&](float* row, long b, long h, long to) {
                    run_linear(how, sums + (b * how.heads + h) * size, sums + to * size,
                               state.position ? state.position[b] : 0, h, row, mine);
                });
                break;
            }
            case softmax_attention: {
                const auto& how = of<longspan_softmax_attention>(stage);
                each_unit(how.groups, width,
                          [&](float* row, long b, long g, long) {
                              run_softmax<T>(how, state, b, g, state.position[b], row, mine);
                          });
                break;
            }
            case turn: {
                const auto& how = of<longspan_turn>(stage);
                each_row(width, [&](float* row, long b) {
                    run_turn(how, (state.places ? state.places : state.position)[b / count] + b % count, row, mine);
                });
                break;
            }
            case convolve: {
                const auto& how = of<longspan_convolve>(stage);
                each_unit((how.channels + CHANNELS - 1) / CHANNELS, width, [&](float* row, long b, long unit, long) {
                    const long first = unit * CHANNELS;
                    if (how.by_channel)
                        run_convolve(how, recent<T>(how, state.second, b, first), row, first, mine);
                    else
                        run_convolve(how, recent<float>(how, state.second, b, first), row, first, mine);
                });
                break;
            }
            case curve: {
                const auto& how = of<longspan_curve>(stage);
                each_row(width, [&](float* row, long) { run_curve(how, row); });
                break;
            }
            case scale: {
                const auto& how = of<longspan_scale>(stage);
                each_row(width, [&](float* row, long) { run_scale(how, row); });
                break;
            }
            case recur: {
                const auto& how = of<longspan_recur>(stage);
                float* sums = static_cast<float*>(state.first);
                each_part(how.heads, [&](long from, long to) { run_recur(how, sums, inner, width, from, to); });
                break;
            }
            case gate: {
                const auto& how = of<longspan_gate>(stage);
                each_unit(how.groups, width, [&](float* row, long, long g, long) { run_gate(how, row, g); });
                break;
            }
            case token_mix: {
                const auto& how = of<longspan_mix>(stage);
                each_row(width, [&](float* row, long b) {
                    const float* now = input + b * dim;
                    float* last = static_cast<float*>(state.second) + b * dim;
                    for (long i = 0; i < how.count; ++i)
                        for (long j = 0; j < dim; ++j)
                            row[how.to + i * dim + j] = now[j] + (last[j] - now[j]) * how.weights[i * dim + j];
                    std::memcpy(last, now, sizeof(float) * dim);
                });
                break;
            }
            case blend: {
                const auto& how = of<longspan_blend>(stage);
                each_row(width, [&](float* row, long b) {
                    float *x = row + how.at, *first = kept + b * model.kept;
                    if (how.by < 0)
                        std::memcpy(first, x, sizeof(float) * how.width);
                    else
                        for (long j = 0; j < how.width; ++j) x[j] += (first[j] - x[j]) * row[how.by + j];
                });
                break;
            }
            case rwkv: {
                const auto& how = of<longspan_rwkv>(stage);
                const long size = how.keys * how.values;
                float* sums = static_cast<float*>(state.first);
                each_unit(how.heads, width, [&](float* row, long b, long h, long to) {
                    run_rwkv(how, sums + (b * how.heads + h) * size, sums + to * size, row, h);
                });
                break;
            }
            case arrange: {
                const auto& how = of<longspan_arrange>(stage);
                each_row(width, [&](float* row, long) { run_arrange(how, row); });
                break;
            }
            case select: {
                const auto& how = of<longspan_select>(stage);
                float* states = static_cast<float*>(state.first);
                each_unit((how.channels + SCANNED - 1) / SCANNED, width, [&](float* row, long b, long unit, long) {
                    run_select(how, states + b * how.channels * how.size, row, unit * SCANNED);
                });
                break;
            }
            case experts: run_experts(of<longspan_experts>(stage), input, width); break;
            default: {
                const auto& how = of<longspan_head_norm>(stage);
                each_unit(how.groups, width, [&](float* row, long, long g, long) { run_head_norm(how, row, g); });
            }
        }
        if (stage.wait) wait();
    }

    void run(float* mine, float* out) const {
        if (model.begin.weight) norm(model.begin, x, x);
        for (long l = 0; l < model.depth; ++l) {
            const longspan_branch& branch = model.branches[l];
            const float* input = x;
            if (branch.before.weight) {
                norm(branch.before, x, normed);
                input = normed;
            }
            for (long i = 0; i < branch.count; ++i) {
                const longspan_stage& stage = branch.stages[i];
                if (!journal.branches || !run_chained(stage, branch, states[l], journal.branches[l], mine))
                    run_stage(stage, branch, states[l], input, mine);
                else
                    wait();
            }
            if (branch.out.weight)
                apply(branch.out, inner + branch.mixed, branch.width, x, dim, {identity_act, branch.factor, true});
            else
                each_row(branch.width, [&](const float* row, long b) {
                    for (long j = 0; j < dim; ++j) x[b * dim + j] += branch.factor * row[branch.mixed + j];
                });
            wait();
            if (branch.after.weight) norm(branch.after, x, x);
        }
        if (model.norm.weight) norm(model.norm, x, normed);
        apply(model.head, model.norm.weight ? normed : x, dim, out, model.head.out, {identity_act, model.head_factor, false});
    }
};

inline bool caches(const longspan_branch& branch) {
    for (long i = 0; i < branch.count; ++i)
        if (branch.stages[i].kind == softmax_attention) return true;
    return false;
}

template <class T>
int decode(const longspan_model& model, const longspan_state* states, const std::int64_t* tokens,
           const std::int64_t* positions, const float* embedded, long sequences, long count, Journal journal, float* out,
           int threads) {
    const long batch = sequences * count;
    long width = 0, each = 0, cells = 0;
    Sizes sizes;
    const auto holds = [&cells](const longspan_linear& map) { Sizes::enlarge(cells, cells_of(map)); };
    holds(model.head);
    for (long l = 0; l < model.depth; ++l) {
        const longspan_branch& branch = model.branches[l];
        holds(branch.out);
        if (branch.width > width) width = branch.width;
        for (long i = 0; i < branch.count; ++i) {
            const longspan_stage& stage = branch.stages[i];
            const long needed = memory_of(stage) + (journal.branches ? state_of(stage) : 0);
            if (needed > each) each = needed;
            if (stage.kind == project) holds(of<longspan_project>(stage).map);
            if (stage.kind == experts) sizes.add(of<longspan_experts>(stage));
        }
        // Everything is checked before anything is overwritten.
        if (caches(branch))
            for (long b = 0; b < sequences; ++b)
                if (states[l].position[b] < 0 || states[l].position[b] > states[l].capacity ||
                    (states[l].begin && (states[l].begin[b] < 0 || states[l].begin[b] > states[l].position[b])))
                    return bad_length;
    }
    // A cache that grows must be valid, so all lengths are checked first.
    for (long l = 0; l < model.depth; ++l)
        if (caches(model.branches[l]))
            for (long b = 0; b < sequences; ++b)
                if (states[l].position[b] + count > states[l].capacity) return no_room;
    if (!embedded)
        for (long b = 0; b < batch; ++b) {
            if (tokens[b] < 0 || tokens[b] >= model.vocab) return bad_token;
            if (model.table && (positions[b / count] < 0 || positions[b / count] + b % count >= model.length))
                return bad_position;
        }
    const long dim = model.dim;
    each = whole_vectors(each) + 64;
    cells = batch * (cells > sizes.slots * sizes.cells ? cells : sizes.slots * sizes.cells);
    const long size = sizeof(quantized::Cell) * cells;
    const long floats = batch * (2 * dim + width + model.kept) + threads * each + sizes.floats(batch, dim);
    void* whole = std::aligned_alloc(64, (size + sizeof(float) * floats + 63) / 64 * 64);
    if (!whole) return no_memory;
    auto* prepared = static_cast<quantized::Cell*>(whole);
    float* memory = reinterpret_cast<float*>(prepared + cells);
    float *x = memory, *normed = x + batch * dim, *inner = normed + batch * dim, *kept = inner + batch * width, *room = kept + batch * model.kept;
    const Pairs pairs(room + threads * each, sizes, batch, dim);
    const Decode<T> work{model, states, sequences, count, batch, dim, threads, x, normed, inner, kept, journal, prepared, sizes, pairs};
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        float* mine = nullptr;
#pragma omp critical(longspan_decode_room)
        {
            mine = room;
            room += each;
        }
        if (embedded) {
#pragma omp for schedule(static)
            for (long b = 0; b < batch; ++b)
                for (long j = 0; j < dim; ++j) x[b * dim + j] = embedded[b * dim + j] * model.token_factor;
        } else {
            work.embed(tokens, positions);
        }
        work.run(mine, out);
    }
    std::free(whole);
    return fine;
}

template <class T>
void pack(const T* weight, long out, long in, T* packed) {
    for (long begin = 0; begin < out; begin += PANEL, packed += PANEL * in)
        for (long j = 0; j < PANEL; ++j)
            for (long i = 0; i < in; ++i)
                if (begin + j < out)
                    packed[i * PANEL + j] = weight[(begin + j) * in + i];
                else
                    narrow(0.0f, packed + i * PANEL + j);
}

}  // namespace

// The number of elements that longspan_pack writes for a weight (out, in).
extern "C" long longspan_packed_size(long out, long in) { return (out + PANEL - 1) / PANEL * PANEL * in; }

// The taps of a convolution, weight (C, K) and bias (C) or null, into (C, K + 1) floats, C rounded up to whole vectors.
extern "C" void longspan_pack_taps(const float* weight, const float* bias, long channels, long taps, float* packed) {
    const long strides[2] = {taps, 1};
    const Convolution call{0, 1, channels, taps, taps - 1, 0, nullptr, nullptr, weight, strides, bias, true};
    call.gather_weights(0, channels, packed, W, (taps + 1) * W);
}

// weight (out, in), row by row, of type 0 float or 1 bfloat16, into the order of a step.
extern "C" void longspan_pack(const void* weight, long out, long in, int type, void* packed) {
    if (type == 0)
        pack(static_cast<const float*>(weight), out, in, static_cast<float*>(packed));
    else
        pack(static_cast<const bfloat16*>(weight), out, in, static_cast<bfloat16*>(packed));
}

// One token of every sequence: tokens (B) and positions (B), or embedded (B, d) in place of both -> out (B, outputs);
// states (depth) are overwritten, their positions are not. With ``journals`` (depth) K tokens: tokens (B, K), embedded
// (B, K, d), out (B, K, outputs), K at most ``room``; ``kept`` (B) tokens of the last such call are applied first, and
// positions are those of the first token of this call. Returns 0; 1 if memory runs out; 2 or 3 for a token or a
// position out of range; 4 if a cache is full; 5 if its length is negative or above its capacity. With an
// error nothing is changed.
extern "C" int longspan_decode(const longspan_model* model, const longspan_state* states, const std::int64_t* tokens,
                               const std::int64_t* positions, const float* embedded, long batch, long count,
                               float* const* journals, const std::int64_t* kept, long room, float* out, int threads) {
    const Journal journal{journals, kept, room};
    return model->type == 0
               ? decode<float>(*model, states, tokens, positions, embedded, batch, count, journal, out, threads)
               : decode<bfloat16>(*model, states, tokens, positions, embedded, batch, count, journal, out, threads);
}
