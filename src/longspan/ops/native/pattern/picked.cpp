// Softmax attention in which each query picks tokens, and its gradients: out_i = sum_s p_is v_s over the picked tokens s. And
// the choice of the tokens with the largest scores sum_h w_ih max(0, q_ih k_s).
#include <memory>

#include "choice.h"

namespace {

constexpr long SPAN = 128;    // tokens that are scored together
constexpr long QUERIES = 32;  // queries of a unit of the choice

// The heads that share a head of keys are cut into parts of the queries, each with its own sums of the gradients of keys. The
// result depends on their number, which therefore does not depend on the threads.
inline long parts_of(const Choice& choice) { return choice.batch * choice.groups < 8 ? 4 : 1; }

struct Share {
    long batch, group, begin, end;
    Share(const Choice& c, long unit, long parts)
        : batch(unit / parts / c.groups), group(unit / parts % c.groups), begin(c.queries * (unit % parts) / parts),
          end(c.queries * (unit % parts + 1) / parts) {}
};

// Tokens of one head of keys, of which all are packed first if they are read more than twice.
template <class T>
struct Head {
    Rows<const T> rows;
    long width, ld;
    float *packed, *room;  // (M,ld), or null; (W,ld)

    Head(Rows<const T> rows, const Choice& choice, Share share, long width, Scratch& scratch)
        : rows(rows), width(width), ld(whole_vectors(width)),
          packed((share.end - share.begin) * choice.picks > 2 * choice.tokens ? scratch.take(choice.tokens * ld) : nullptr),
          room(scratch.take(W * ld)) {
        if (packed) read(rows, 0, choice.tokens, width, packed, ld);
    }
    static long floats(const Choice& choice, long width) { return (choice.tokens + W) * whole_vectors(width); }
    // W rows, of which those after the n-th repeat the first.
    void find(const std::int64_t* tokens, long n, const float** out) const {
        for (long t = 0; t < W; ++t) {
            const long token = tokens[t < n ? t : 0];
            out[t] = packed ? packed + token * ld : room + (t < n ? t : 0) * ld;
            if (!packed && t < n) read_row(rows, token, width, room + t * ld, ld, same);
        }
        // Rows are too far apart for the hardware.
        if (packed)
            for (long t = n; t < n + W; ++t)
                for (long j = 0; j < ld; j += 16) __builtin_prefetch(packed + tokens[t] * ld + j, 0, 3);
    }
};

// The products of W rows with one.
inline vec dots(const float* const* rows, const float* x, long ld) {
    vec acc[W] = {};
    for (long j = 0; j < ld; j += W) {
        const vec y = load(x + j);
        for (long t = 0; t < W; ++t) acc[t] += y * load(rows[t] + j);
    }
    float lanes[W * W], out[W];
    for (long t = 0; t < W; ++t) store(lanes + t * W, acc[t]);
    sum_lanes(lanes, W, out);
    return load(out);
}

// sum (ld) += p (n) rows (n, ld)
inline void mix(const float* const* rows, const float* p, long n, float* sum, long ld) {
    for (long j = 0; j < ld; j += W) {
        vec acc = load(sum + j);
        for (long t = 0; t < n; ++t) acc += p[t] * load(rows[t] + j);
        store(sum + j, acc);
    }
}

// row (ld) += sum_r p[r * step] x (r, ld)
inline void spread(const float* p, long step, const float* x, long n, float* row, long ld) {
    for (long j = 0; j < ld; j += W) {
        vec acc = load(row + j);
        for (long r = 0; r < n; ++r) acc += p[r * step] * load(x + r * ld + j);
        store(row + j, acc);
    }
}

// The tokens that a query picked, and 0 for W more; returns their number.
inline long tokens_of(const Choice& choice, Share share, long query, std::int64_t* out) {
    long n = 0;
    choice.each(share.batch, share.group * choice.shared(), query, [&](long token) { out[n++] = token; });
    for (long t = 0; t < 2 * W; ++t) out[n + t] = 0;
    return n;
}
inline long token_floats(const Choice& choice) { return 2 * (choice.picks + 2 * W); }

// Queries, or what is laid out like them: the heads that share a head of keys, (shared, ld).
template <class T>
void read_heads(const Choice& choice, const Operands<T>& operands, Operand i, Share share, long query, long width, float* out) {
    for (long r = 0; r < choice.shared(); ++r, out += whole_vectors(width))
        read_row(operands.in(i, share.batch, share.group * choice.shared() + r), query, width, out, whole_vectors(width), same);
}

// Products of the heads (shared, ld) and the tokens, (shared, step); NEVER after the last.
template <class T>
void score(const Choice& choice, const Head<T>& head, const std::int64_t* tokens, long n, const float* x, float* out, long step) {
    const float* rows[W];
    for (long s = 0; s < n; s += W) {
        head.find(tokens + s, std::min(W, n - s), rows);
        for (long r = 0; r < choice.shared(); ++r) {
            store(out + r * step + s, dots(rows, x + r * head.ld, head.ld));
            for (long t = n - s; t < W; ++t) out[r * step + s + t] = NEVER;
        }
    }
}

template <class T>
struct Forward {
    const Choice& choice;
    Operands<T> operands;

    long units() const { return choice.batch * choice.groups * 4; }
    long scratch() const {
        const Choice& c = choice;
        return Head<T>::floats(c, c.keys) + Head<T>::floats(c, c.values) + token_floats(c) +
               c.shared() * (c.kp() + c.vp() + whole_vectors(c.picks));
    }

    void run(long unit, Scratch scratch) const {
        const Share share(choice, unit, 4);
        const long kp = choice.kp(), vp = choice.vp(), shared = choice.shared(), step = whole_vectors(choice.picks);
        const Head<T> keys(operands.in(K, share.batch, share.group), choice, share, choice.keys, scratch);
        const Head<T> values(operands.in(V, share.batch, share.group), choice, share, choice.values, scratch);
        std::int64_t* tokens = reinterpret_cast<std::int64_t*>(scratch.take(token_floats(choice)));
        float *query = scratch.take(shared * kp), *sum = scratch.take(shared * vp), *p = scratch.take(shared * step);
        const float* rows[W];
        for (long i = share.begin; i < share.end; ++i) {
            const long n = tokens_of(choice, share, i, tokens);
            read_heads(choice, operands, Q, share, i, choice.keys, query);
            scale_rows(query, shared, kp, choice.scale);
            score(choice, keys, tokens, n, query, p, step);
            std::memset(sum, 0, sizeof(float) * shared * vp);
            for (long r = 0; r < shared; ++r) {
                float top = NEVER, below = 0.0f;
                if (n) weigh(p + r * step, whole_vectors(n), top, below, sum, vp);
                for (long s = 0; s < n; s += W) store(p + r * step + s, load(p + r * step + s) / below);
                operands.lse[(share.batch * choice.heads + share.group * shared + r) * choice.queries + i] =
                    n ? top + std::log(below) : -INFINITY;
            }
            for (long s = 0; s < n; s += W) {
                const long some = std::min(W, n - s);
                values.find(tokens + s, some, rows);
                for (long r = 0; r < shared; ++r) mix(rows, p + r * step + s, some, sum + r * vp, vp);
            }
            for (long r = 0; r < shared; ++r)
                write(sum + r * vp, vp, operands.out(OUT, share.batch, share.group * shared + r), i, 1, choice.values);
        }
    }
};

template <class T>
struct Backward {
    const Choice& choice;
    Operands<T> operands;
    float* sums;  // (parts B G,M,kp+vp)

    long units() const { return choice.batch * choice.groups * parts_of(choice); }
    long scratch() const {
        const Choice& c = choice;
        return Head<T>::floats(c, c.keys) + Head<T>::floats(c, c.values) + token_floats(c) +
               c.shared() * (2 * c.kp() + 2 * c.vp() + 2 * whole_vectors(c.picks));
    }

    void run(long unit, Scratch scratch) const {
        const Share share(choice, unit, parts_of(choice));
        const long kp = choice.kp(), vp = choice.vp(), shared = choice.shared(), step = whole_vectors(choice.picks);
        const Head<T> keys(operands.in(K, share.batch, share.group), choice, share, choice.keys, scratch);
        const Head<T> values(operands.in(V, share.batch, share.group), choice, share, choice.values, scratch);
        std::int64_t* tokens = reinterpret_cast<std::int64_t*>(scratch.take(token_floats(choice)));
        float *query = scratch.take(shared * kp), *sum = scratch.take(shared * kp), *up = scratch.take(shared * vp);
        float *output = scratch.take(shared * vp), *p = scratch.take(shared * step), *ds = scratch.take(shared * step);
        float *dkeys = sums + unit * choice.tokens * (kp + vp), *dvalues = dkeys + choice.tokens * kp;
        std::memset(dkeys, 0, sizeof(float) * choice.tokens * (kp + vp));
        const float* rows[W];
        for (long i = share.begin; i < share.end; ++i) {
            const long n = tokens_of(choice, share, i, tokens);
            read_heads(choice, operands, Q, share, i, choice.keys, query);
            read_heads(choice, operands, GRAD, share, i, choice.values, up);
            read_heads(choice, operands, OUT, share, i, choice.values, output);
            scale_rows(query, shared, kp, choice.scale);
            score(choice, keys, tokens, n, query, p, step);
            score(choice, values, tokens, n, up, ds, step);
            for (long r = 0; r < shared && n; ++r) {
                const float log = operands.lse[(share.batch * choice.heads + share.group * shared + r) * choice.queries + i];
                for (long t = n; t < whole_vectors(n); ++t) ds[r * step + t] = 0.0f;
                slopes(p + r * step, ds + r * step, whole_vectors(n), log, ::sum(dot_lanes(up + r * vp, output + r * vp, vp)), 0.0f);
            }
            std::memset(sum, 0, sizeof(float) * shared * kp);
            for (long s = 0; s < n; s += W) {
                const long some = std::min(W, n - s);
                keys.find(tokens + s, some, rows);
                for (long r = 0; r < shared; ++r) mix(rows, ds + r * step + s, some, sum + r * kp, kp);
                for (long t = s; t < s + some; ++t) {
                    spread(ds + t, step, query, shared, dkeys + tokens[t] * kp, kp);
                    spread(p + t, step, up, shared, dvalues + tokens[t] * vp, vp);
                }
            }
            scale_rows(sum, shared, kp, choice.scale);
            for (long r = 0; r < shared; ++r)
                write(sum + r * kp, kp, operands.out(DQ, share.batch, share.group * shared + r), i, 1, choice.keys);
        }
    }
};

// The gradients of keys and values from the sums of all parts.
template <class T>
struct Total {
    const Choice& choice;
    Operands<T> operands;
    float* sums;

    long units() const { return choice.batch * choice.groups; }
    long scratch() const { return 0; }
    void run(long unit, Scratch) const {
        const long parts = parts_of(choice), size = choice.tokens * (choice.kp() + choice.vp());
        float* dkeys = sums + unit * parts * size;
        for (long part = 1; part < parts; ++part) add_row(dkeys, dkeys + part * size, size);
        const long batch = unit / choice.groups, group = unit % choice.groups;
        write(dkeys, choice.kp(), operands.out(DK, batch, group), 0, choice.tokens, choice.keys);
        write(dkeys + choice.tokens * choice.kp(), choice.vp(), operands.out(DV, batch, group), 0, choice.tokens, choice.values);
    }
};

// The largest scores of one row, ascending, -1 after the last; of equal scores the first, NEVER is not taken. Candidates are
// those above the least of the picks so far: later scores that equal it lose.
class Best {
   public:
    Best(long picks, Scratch& scratch)
        : picks(picks), ranks(reinterpret_cast<std::int32_t*>(scratch.take(room(picks)))),
          places(reinterpret_cast<std::int32_t*>(scratch.take(room(picks)))) {}
    static long floats(long picks) { return 2 * room(picks); }

    void take(const float* x, long n, std::int64_t* out) {
        const ivec never = rank(splat(NEVER));
        used = 0, least = never[0];
        for (long j = 0; j < n; j += W) {
            std::int32_t ranked[W];
            float rest[W];
            const long some = std::min(W, n - j);
            if (some < W) std::fill(rest, rest + W, NEVER), std::copy(x + j, x + n, rest);
            const vec y = load(some < W ? rest : x + j);
            const ivec all = y == y ? rank(y) : never;
            if (!any(all > least)) continue;
            std::memcpy(ranked, &all, sizeof ranked);
            for (long i = 0; i < W; ++i) {
                ranks[used] = ranked[i], places[used] = static_cast<std::int32_t>(j + i);
                used += ranked[i] > least;
            }
            if (used >= full(picks)) cut();
        }
        cut();
        for (long s = 0; s < picks; ++s) out[s] = s < used ? places[s] : -1;
    }

   private:
    long picks, used;
    std::int32_t least, *ranks, *places;

    static long full(long picks) { return std::max(2 * picks, 32 * W); }
    static long room(long picks) { return whole_vectors(full(picks) + 2 * W); }

    // Whole numbers in the order of the scores; 0 and -0 are equal.
    static ivec rank(vec x) {
        const ivec bits = (ivec)(x + 0.0f);
        return bits ^ ((bits >> 31) & 0x7fffffff);
    }
    static bool any(ivec condition) {
#if defined(__AVX512F__)
        return _mm512_test_epi32_mask((__m512i)condition, (__m512i)condition) != 0;
#else
        std::int32_t all = 0;
        for (long i = 0; i < W; ++i) all |= condition[i];
        return all != 0;
#endif
    }
    long at_least_of(std::int32_t rank) const {
        ivec count = {};
        for (long s = 0; s < used; s += W) {
            ivec x;
            std::memcpy(&x, ranks + s, sizeof x);
            count -= x >= rank;
        }
        long total = 0;
        for (long i = 0; i < W; ++i) total += count[i];
        return total;
    }
    // Leaves the picks: those above the rank of the last, which is found bit by bit, and the first of the equal ones.
    void cut() {
        if (used <= picks) return;
        for (long s = used; s < whole_vectors(used); ++s) ranks[s] = INT32_MIN;
        std::uint32_t bits = 0x80000000u;
        for (std::uint32_t bit = 0x80000000u; bit; bit >>= 1)
            if (at_least_of(static_cast<std::int32_t>(bits + bit)) >= picks) bits += bit;
        least = static_cast<std::int32_t>(bits);
        long equal = picks - (least == INT32_MAX ? 0 : at_least_of(least + 1)), kept = 0;
        for (long s = 0; s < used; ++s) {
            const bool keep = ranks[s] > least || (ranks[s] == least && equal-- > 0);
            ranks[kept] = ranks[s], places[kept] = places[s];
            kept += keep;
        }
        used = kept;
    }
};

// The picks of some queries: index (B,N,picks) ascending, -1 after the last.
struct Choose {
    long batch, queries, tokens, heads, channels, picks;
    const float *q, *k, *weights;  // (B,N,H,D), (B,M,D), (B,N,H)
    const std::int64_t* at;        // (B,N)
    std::int64_t* index;

    long cuts() const { return (queries + QUERIES - 1) / QUERIES; }
    long units() const { return batch * cuts(); }
    long dp() const { return whole_vectors(channels); }
    long scratch() const {
        return QUERIES * whole_vectors(tokens) + Best::floats(picks) + SPAN * 2 * dp() +
               QUERIES * (SPAN + heads * dp());
    }

    void run(long unit, Scratch scratch) const {
        const long row = unit / cuts(), first = unit % cuts() * QUERIES, n = std::min(QUERIES, queries - first);
        const long wide = whole_vectors(tokens), d = dp();
        Best best(picks, scratch);
        float *scores = scratch.take(QUERIES * wide), *key = scratch.take(SPAN * d);
        float *turned = scratch.take(SPAN * d), *x = scratch.take(QUERIES * SPAN), *query = scratch.take(heads * QUERIES * d);
        const std::int64_t* place = at + row * queries + first;
        const long end = std::min<long>(tokens, *std::max_element(place, place + n) + 1);
        const long own[4] = {0, 0, channels, 1}, asked[4] = {0, 0, heads * channels, 1};
        const Rows<const float> keys(Tensor<const float>{k + row * tokens * channels, own}, 0, 0);
        for (long h = 0; h < heads; ++h) {
            const float* from = q + ((row * queries + first) * heads + h) * channels;
            read(Rows<const float>(Tensor<const float>{from, asked}, 0, 0), 0, n, channels, query + h * QUERIES * d, d);
        }
        for (long s = 0; s < end; s += SPAN) {
            const long some = std::min(SPAN, end - s), width = whole_vectors(some);
            read_turned(keys, s, some, channels, d, SPAN, key, turned);
            for (long h = 0; h < heads; ++h) {
                gemm<false>(n, width, channels, query + h * QUERIES * d, d, 1, turned, SPAN, x, SPAN);
                for (long i = 0; i < n; ++i) {
                    const vec weight = splat(weights[(row * queries + first + i) * heads + h]);
                    float* total = scores + i * wide + s;
                    for (long j = 0; j < width; j += W)
                        store(total + j, (h ? load(total + j) : vec{}) + weight * at_least(0.0f, load(x + i * SPAN + j)));
                }
            }
        }
        for (long i = 0; i < n; ++i)
            best.take(scores + i * wide, std::min<long>(end, place[i] + 1), index + (row * queries + first + i) * picks);
    }
};

// The largest scores of each row: index (rows,picks) ascending, -1 after the last; NEVER is not taken.
struct Largest {
    long rows, scores, picks;
    const float* x;
    std::int64_t* index;

    static constexpr long SOME = 256;  // rows of a unit
    long units() const { return (rows + SOME - 1) / SOME; }
    long scratch() const { return Best::floats(picks); }
    void run(long unit, Scratch scratch) const {
        Best best(picks, scratch);
        for (long i = unit * SOME; i < std::min(rows, (unit + 1) * SOME); ++i)
            best.take(x + i * scores, scores, index + i * picks);
    }
};

}  // namespace

// As longspan_chosen_forward and longspan_chosen_backward, for blocks of one token and one choice for all heads.
extern "C" int longspan_picked_forward(void* const* data, const long* strides, float* lse, const std::int64_t* at,
                                       const std::int64_t* blocks, const long* sizes, int type, float scale, int threads) {
    return run_pass<Forward>(Choice(sizes, at, blocks, scale), data, strides, lse, type, threads);
}

extern "C" int longspan_picked_backward(void* const* data, const long* strides, float* lse, const std::int64_t* at,
                                        const std::int64_t* blocks, const long* sizes, int type, float scale, int threads) {
    const Choice choice(sizes, at, blocks, scale);
    const long rows = choice.batch * choice.groups * parts_of(choice) * choice.tokens;
    const std::unique_ptr<float[]> sums(new (std::nothrow) float[rows * (choice.kp() + choice.vp())]);
    return !sums || run_pass<Backward>(choice, data, strides, lse, type, threads, sums.get()) ||
           run_pass<Total>(choice, data, strides, lse, type, threads, sums.get());
}

// x (rows,scores) float, index (rows,picks), contiguous.
extern "C" int longspan_picked_largest(const float* x, std::int64_t* index, long rows, long scores, long picks, int threads) {
    return each_unit(Largest{rows, scores, picks, x, index}, threads);
}

// sizes: B, N, M, heads, D, picks. q (B,N,H,D), k (B,M,D), weights (B,N,H) float, at (B,N), index (B,N,picks), contiguous.
extern "C" int longspan_picked_choose(const float* q, const float* k, const float* weights, const std::int64_t* at,
                                      std::int64_t* index, const long* sizes, int threads) {
    return each_unit(Choose{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], q, k, weights, at, index}, threads);
}
