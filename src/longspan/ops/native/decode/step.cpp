// A decode step of a whole model: embedding, blocks of linear or softmax attention, head, in one parallel region with
// only barriers between the layers. Weights are packed once, by longspan_pack. Plain C interface.
//
// Sizes: B sequences, d width of the residual stream, H heads of D = d / H channels, G key heads, F inner width.
#include <cmath>
#include <cstdlib>

#include "activations.h"
#include "cached.h"
#include "../shared/gemm.h"
#include "../linear/token.h"

namespace {

constexpr long PANEL = COLUMNS * W;  // adjacent outputs of a packed linear map
constexpr long BLOCK = 48;           // sequences that a thread processes per panel

enum Kind { linear_kind = 0, softmax_kind = 1 };
enum Failure { fine = 0, no_memory = 1, bad_token = 2, bad_position = 3, no_room = 4, bad_length = 5 };

}  // namespace

extern "C" {

// y = W x + b; weight packed, of the model's type; bias float or null.
struct longspan_linear {
    const void* weight;
    const float* bias;
    long in, out;
};

struct longspan_norm {
    const float *weight, *bias;  // bias null: the mean is not subtracted (RMS)
    float eps;
};

struct longspan_layer {
    longspan_norm norm1, norm2;
    longspan_linear project, out, expand, contract;  // project gives queries, keys and values in one vector
    const float* rates;  // rotary: D/2 angles per position, or null
    long kind, groups, map, activation;
    float eps;
};

struct longspan_model {
    const longspan_layer* layers;
    const void *tokens, *table;  // embeddings (vocab, d) and learned positions (length, d) or null, of the model's type
    longspan_norm norm;          // weight null: none
    longspan_linear head;
    long depth, dim, heads, vocab, length, type, prenorm;  // type 0: float, 1: bfloat16
};

// The state of one layer: of linear attention the sums (B,H,D,E+1), of softmax keys and values (B,G,capacity,D) of the
// model's type; position (B) is the number of tokens, null if not needed.
struct longspan_state {
    void *first, *second;
    const std::int64_t* position;
    long capacity;
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

// How an output is stored: directly, after its activation, or added to the old value.
enum After { keep, act, add };

// Columns of one panel for rows of x: out[i, j] = or += (W x_i + b)_j.
template <class T>
void panel(const longspan_linear& map, long which, const float* x, long xi, long rows, float* out, long oi, After after,
           long activation) {
    const long begin = which * PANEL, width = map.out - begin < PANEL ? map.out - begin : PANEL;
    const T* weight = static_cast<const T*>(map.weight) + begin * map.in;
    alignas(64) float result[BLOCK * PANEL];
    columns<COLUMNS, false, T>(rows, map.in, x, xi, 1, weight, PANEL, result, PANEL);
    for (long i = 0; i < rows; ++i) {
        const float* from = result + i * PANEL;
        float* to = out + i * oi + begin;
        long j = 0;
        for (; j + W <= width; j += W) {
            vec y = load(from + j);
            if (map.bias) y += load(map.bias + begin + j);
            if (after == act) y = activate(activation, y);
            if (after == add) y += load(to + j);
            store(to + j, y);
        }
        for (; j < width; ++j) {
            float y = from[j] + (map.bias ? map.bias[begin + j] : 0.0f);
            if (after == act) y = activate(activation, splat(y))[0];
            to[j] = after == add ? to[j] + y : y;
        }
    }
}

struct Sizes {
    long batch, dim, heads, size, parts;
};

// One head of one sequence; the same thread processes all heads before ``to``, counted over the batch.
void linear_head(const longspan_layer& layer, const longspan_state& state, const Sizes& n, long b, long h, long to,
                 const float* projected, float* out, float* room) {
    const long d = n.size;
    const float *q = projected + h * d, *k = q + n.dim, *v = k + n.dim;
    float *fq = room, *fk = room + d, *rq = room + 2 * d, *rk = room + 3 * d, *turn = room + 4 * d;
    map_token(static_cast<int>(layer.map), q, fq, d);
    map_token(static_cast<int>(layer.map), k, fk, d);
    Token token{fk, fq, fk, fq, v};
    if (layer.rates) {
        turns(layer.rates, state.position[b], turn, d);
        rotate(fq, turn, rq, d);
        rotate(fk, turn, rk, d);
        token = {rk, rq, fk, fq, v};
    }
    float* sums = static_cast<float*>(state.first);
    const long each = d * (d + 1);
    advance_head(sums + (b * n.heads + h) * each, sums + to * each, token, out + h * d, d, d, layer.eps);
}

// All query heads that share key head g of sequence b; its key and value are first written to the cache.
template <class T>
void softmax_group(const longspan_layer& layer, const longspan_state& state, const Sizes& n, long b, long g,
                   const float* projected, float* out, float* room) {
    const long d = n.size, members = n.heads / layer.groups, slot = state.position[b];
    const float *k = projected + n.dim + g * d, *v = k + layer.groups * d;
    T* keys = static_cast<T*>(state.first) + (b * layer.groups + g) * state.capacity * d;
    T* values = static_cast<T*>(state.second) + (b * layer.groups + g) * state.capacity * d;
    float *q = room, *turned = room + d, *turn = room + 2 * d;
    if (layer.rates) {
        turns(layer.rates, slot, turn, d);
        rotate(k, turn, turned, d);
        k = turned;
    }
    for (long j = 0; j < d; ++j) {
        narrow(k[j], keys + slot * d + j);
        narrow(v[j], values + slot * d + j);
    }
    const float scale = 1.0f / std::sqrt(static_cast<float>(d));
    for (long h = g * members; h < (g + 1) * members; ++h) {
        const float* from = projected + h * d;
        if (layer.rates) {
            rotate(from, turn, turned, d);
            from = turned;
        }
        for (long j = 0; j < d; ++j) q[j] = from[j] * scale;
        softmax_head(q, keys, values, slot + 1, d, out + h * d);
    }
}

template <class T>
struct Decode {
    const longspan_model& model;
    const longspan_state* states;
    Sizes n;
    float *x, *normed, *projected, *mixed, *hidden, *room;  // activations of all sequences; room (threads, 6 D)
    long project_width, hidden_width;

    // Called by all threads together; ends with a barrier.
    void apply(const longspan_linear& map, const float* from, long width, float* to, long to_width, After after,
               long activation) const {
        const long panels = (map.out + PANEL - 1) / PANEL, blocks = (n.batch + BLOCK - 1) / BLOCK;
#pragma omp for schedule(static)
        for (long item = 0; item < panels * blocks; ++item) {
            const long first = item % blocks * BLOCK, rows = n.batch - first < BLOCK ? n.batch - first : BLOCK;
            panel<T>(map, item / blocks, from + first * width, width, rows, to + first * to_width, to_width, after,
                     activation);
        }
    }

    void norm(const longspan_norm& how, const float* from, float* to) const {
#pragma omp for schedule(static)
        for (long b = 0; b < n.batch; ++b) normalize(how, from + b * n.dim, to + b * n.dim, n.dim);
    }

    void embed(const std::int64_t* tokens, const std::int64_t* positions) const {
        const T *rows = static_cast<const T*>(model.tokens), *table = static_cast<const T*>(model.table);
#pragma omp for schedule(static)
        for (long b = 0; b < n.batch; ++b)
            for (long j = 0; j < n.dim; ++j)
                x[b * n.dim + j] = widen(rows[tokens[b] * n.dim + j]) +
                                   (table ? widen(table[positions[b] * n.dim + j]) : 0.0f);
    }

    void attend(const longspan_layer& layer, const longspan_state& state, float* mine) const {
        const long units = layer.kind == softmax_kind ? layer.groups : n.heads, items = n.batch * units;
#pragma omp for schedule(static)
        for (long part = 0; part < n.parts; ++part) {
            const long end = items * (part + 1) / n.parts;
            for (long item = items * part / n.parts; item < end; ++item) {
                const long b = item / units, unit = item % units;
                const float* from = projected + b * project_width;
                float* to = mixed + b * n.dim;
                if (layer.kind == softmax_kind)
                    softmax_group<T>(layer, state, n, b, unit, from, to, mine);
                else
                    linear_head(layer, state, n, b, unit, end, from, to, mine);
            }
        }
    }

    void feed(const longspan_layer& layer, const float* from) const {
        if (layer.activation != geglu && layer.activation != swiglu) {
            apply(layer.expand, from, n.dim, hidden, hidden_width, act, layer.activation);
        } else {
            apply(layer.expand, from, n.dim, hidden, hidden_width, keep, 0);
            const long inner = layer.contract.in;
#pragma omp for schedule(static)
            for (long b = 0; b < n.batch; ++b) {
                float* row = hidden + b * hidden_width;
                long j = 0;
                for (; j + W <= inner; j += W)
                    store(row + j, activate(layer.activation, load(row + j)) * load(row + inner + j));
                for (; j < inner; ++j) row[j] = activate(layer.activation, splat(row[j]))[0] * row[inner + j];
            }
        }
        apply(layer.contract, hidden, hidden_width, x, n.dim, add, 0);
    }

    void run(float* mine, float* out) const {
        for (long l = 0; l < model.depth; ++l) {
            const longspan_layer& layer = model.layers[l];
            if (model.prenorm) norm(layer.norm1, x, normed);
            apply(layer.project, model.prenorm ? normed : x, n.dim, projected, project_width, keep, 0);
            attend(layer, states[l], mine);
            apply(layer.out, mixed, n.dim, x, n.dim, add, 0);
            norm(model.prenorm ? layer.norm2 : layer.norm1, x, model.prenorm ? normed : x);
            feed(layer, model.prenorm ? normed : x);
            if (!model.prenorm) norm(layer.norm2, x, x);
        }
        if (model.norm.weight) norm(model.norm, x, normed);
        apply(model.head, model.norm.weight ? normed : x, n.dim, out, model.head.out, keep, 0);
    }
};

template <class T>
int decode(const longspan_model& model, const longspan_state* states, const std::int64_t* tokens,
           const std::int64_t* positions, const float* embedded, long batch, float* out, int threads) {
    long project_width = 0, hidden_width = 0;
    for (long l = 0; l < model.depth; ++l) {
        const longspan_layer& layer = model.layers[l];
        if (layer.project.out > project_width) project_width = layer.project.out;
        if (layer.expand.out > hidden_width) hidden_width = layer.expand.out;
        // Everything is checked before anything is overwritten.
        if (layer.kind == softmax_kind)
            for (long b = 0; b < batch; ++b)
                if (states[l].position[b] < 0 || states[l].position[b] > states[l].capacity) return bad_length;
    }
    // A cache that grows must be valid, so all lengths are checked first.
    for (long l = 0; l < model.depth; ++l)
        if (model.layers[l].kind == softmax_kind)
            for (long b = 0; b < batch; ++b)
                if (states[l].position[b] == states[l].capacity) return no_room;
    if (!embedded)
        for (long b = 0; b < batch; ++b) {
            if (tokens[b] < 0 || tokens[b] >= model.vocab) return bad_token;
            if (model.table && (positions[b] < 0 || positions[b] >= model.length)) return bad_position;
        }
    const long dim = model.dim, size = dim / model.heads;
    const long each = whole_vectors(6 * size) + 64, total = batch * (3 * dim + project_width + hidden_width) + threads * each;
    float* memory = static_cast<float*>(std::malloc(sizeof(float) * total));
    if (!memory) return no_memory;
    float *x = memory, *normed = x + batch * dim, *mixed = normed + batch * dim, *projected = mixed + batch * dim;
    float *hidden = projected + batch * project_width, *room = hidden + batch * hidden_width;
    const Decode<T> work{model, states, {batch, dim, model.heads, size, threads}, x, normed, projected, mixed, hidden, room,
                         project_width, hidden_width};
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
            for (long b = 0; b < batch; ++b) std::memcpy(x + b * dim, embedded + b * dim, sizeof(float) * dim);
        } else {
            work.embed(tokens, positions);
        }
        work.run(mine, out);
    }
    std::free(memory);
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

// weight (out, in), row by row, of type 0 float or 1 bfloat16, into the order of a step.
extern "C" void longspan_pack(const void* weight, long out, long in, int type, void* packed) {
    if (type == 0)
        pack(static_cast<const float*>(weight), out, in, static_cast<float*>(packed));
    else
        pack(static_cast<const bfloat16*>(weight), out, in, static_cast<bfloat16*>(packed));
}

// One token of every sequence: tokens (B) and positions (B), or embedded (B, d) in place of both -> out (B, outputs);
// states (depth) are overwritten, their positions are not. Returns 0; 1 if memory runs out; 2 or 3 for a token or a
// position out of range; 4 if a cache is full; 5 if its length is negative or above its capacity. With an
// error nothing is changed.
extern "C" int longspan_decode(const longspan_model* model, const longspan_state* states, const std::int64_t* tokens,
                               const std::int64_t* positions, const float* embedded, long batch, float* out,
                               int threads) {
    return model->type == 0 ? decode<float>(*model, states, tokens, positions, embedded, batch, out, threads)
                            : decode<bfloat16>(*model, states, tokens, positions, embedded, batch, out, threads);
}
