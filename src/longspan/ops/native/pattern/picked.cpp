// Softmax attention in which each query picks tokens, and its gradients: out_i = sum_s p_is v_s over the picked tokens s. And
// the choice of the tokens with the largest scores sum_h w_ih max(0, q_ih k_s).
#include <memory>

#include "choice.h"

namespace {

constexpr long SPAN = 128;    // tokens that are scored together
constexpr long QUERIES = 48;  // queries of a unit of the choice

// The queries of a head of keys are cut into parts, each with its own sums of the gradients of keys. The result depends on
// their number, which therefore does not depend on the threads.
inline long parts_of(const Choice& choice) { return choice.batch * choice.groups < 8 ? 4 : 1; }

constexpr long ROWS = 512;  // rows whose queries and sums stay in the cache while all tokens pass by
constexpr long PAIRS = 32;  // pairs of a row and a token that are read together, at least
constexpr long AHEAD = 48;  // tokens from the one that is read to the one that is fetched

inline long rows_of(const Choice& choice) { return choice.shared() * Section::tokens(choice, ROWS); }

// Calls use(section) for the sections of a unit, which is a part of the queries of a head of keys.
template <class F>
void each_section(const Choice& choice, long unit, F use) {
    const long parts = parts_of(choice), part = unit % parts;
    const long begin = choice.queries * part / parts, end = choice.queries * (part + 1) / parts;
    for (long s = 0; s < Section::count(choice, end - begin, ROWS); ++s)
        use(Section(choice, unit / parts, begin, end, s, ROWS));
}

// Some visited tokens and their pairs, from pair ``begin`` of the section on: the rows that visit the first token, and then
// those of the next ones.
struct Group {
    long n, pairs, begin;
    std::int32_t tokens[PAIRS], *slots;  // n tokens, and the place of each pair's token among them
    const std::int32_t* rows;            // of the pairs

    static long floats(const Choice& c) { return whole_vectors(PAIRS + rows_of(c)); }
    explicit Group(const Choice& c, Scratch& scratch) : slots(reinterpret_cast<std::int32_t*>(scratch.take(floats(c)))) {}

    // Calls use() with each group in turn.
    template <class F>
    void each(const Visits& visits, F use) {
        for (long c = 0; c < visits.count;) {
            for (n = 0, begin = visits.begin[c], pairs = 0; c < visits.count && pairs < PAIRS; ++c) {
                const long more = visits.begin[c + 1] - visits.begin[c];
                if (!more) continue;
                std::fill(slots + pairs, slots + pairs + more, static_cast<std::int32_t>(n));
                tokens[n++] = static_cast<std::int32_t>(c), pairs += more;
            }
            rows = visits.rows + begin;
            if (pairs) use();
        }
    }
    // The tokens of a head into out (n, ld).
    template <class T>
    void read_tokens(Rows<const T> head, long width, float* out, long ld) const {
        for (long i = 0; i < n; ++i) {
            fetch(head, Tokens{0, tokens[i] + AHEAD, 1}, width);
            read_row(head, tokens[i], width, out + i * ld, ld, same);
        }
    }
    // Products of rows of x (.,ld) and the tokens y (n,ld), for each pair; the vector at the end is filled.
    void score(const float* x, const float* y, long ld, float* out) const {
        float lanes[W * W];
        for (long e = 0; e < pairs; e += W) {
            for (long t = 0; t < W; ++t) {
                const long i = std::min(e + t, pairs - 1);
                store(lanes + t * W, dot_lanes(x + rows[i] * ld, y + slots[i] * ld, ld));
            }
            sum_lanes(lanes, W, out + e);
        }
    }
    // The numbers of the rows of W pairs, from pair e on.
    vec of_rows(const float* x, long e) const {
        vec out;
        for (long t = 0; t < W; ++t) out[t] = x[rows[std::min(e + t, pairs - 1)]];
        return out;
    }
};

// For NV vectors of columns of the pairs of one token: sum[row] += p token, and total += p x[row].
template <int NV, bool SUM, bool TOTAL>
LONGSPAN_INLINE void mix(const float* p, const std::int32_t* rows, long n, const float* token, float* sum, const float* x,
                         float* total, long ld) {
    vec y[NV], acc[NV];
    for (int j = 0; j < NV; ++j) y[j] = SUM ? load(token + j * W) : vec{}, acc[j] = TOTAL ? load(total + j * W) : vec{};
    for (long e = 0; e < n; ++e) {
        const vec by = splat(p[e]);
        for (int j = 0; j < NV; ++j) {
            const long at = rows[e] * ld + j * W;
            if (TOTAL) acc[j] += by * load(x + at);
            if (SUM) store(sum + at, load(sum + at) + by * y[j]);
        }
    }
    for (int j = 0; j < NV; ++j)
        if (TOTAL) store(total + j * W, acc[j]);
}
template <bool SUM, bool TOTAL>
void mix_rows(const float* p, const std::int32_t* rows, long n, const float* token, float* sum, const float* x, float* total,
              long ld) {
    long j = 0;
    for (; j + 4 * W <= ld; j += 4 * W) mix<4, SUM, TOTAL>(p, rows, n, token + j, sum + j, x + j, total + j, ld);
    for (; j < ld; j += W) mix<1, SUM, TOTAL>(p, rows, n, token + j, sum + j, x + j, total + j, ld);
}

template <class T>
struct Forward {
    const Choice& choice;
    Operands<T> operands;

    long units() const { return choice.batch * choice.groups * parts_of(choice); }
    long scratch() const {
        const Choice& c = choice;
        return Visits::floats(c, ROWS) + Group::floats(c) + rows_of(c) * (c.kp() + c.vp()) + 2 * whole_vectors(rows_of(c)) +
               whole_vectors(rows_of(c) * c.picks + W) + PAIRS * std::max(c.kp(), c.vp());
    }

    void run(long unit, Scratch scratch) const {
        each_section(choice, unit, [&](const Section& section) { attend(section, scratch); });
    }

    void attend(const Section& section, Scratch scratch) const {
        const long kp = choice.kp(), vp = choice.vp(), rows = section.rows();
        const Visits visits(section, ROWS, scratch);
        Group group(choice, scratch);
        float *asked = scratch.take(rows * kp), *sum = scratch.take(rows * vp), *top = scratch.take(whole_vectors(rows));
        float *below = scratch.take(whole_vectors(rows)), *token = scratch.take(PAIRS * std::max(kp, vp));
        float* logits = scratch.take(whole_vectors(rows * choice.picks + W));  // of all pairs
        read_section(operands, Q, section, choice.keys, asked);
        scale_rows(asked, rows, kp, choice.scale);
        std::memset(sum, 0, sizeof(float) * rows * vp);
        for (long i = 0; i < rows; ++i) top[i] = NEVER, below[i] = 0.0f;
        const auto keys = operands.in(K, section.batch, section.group), values = operands.in(V, section.batch, section.group);
        group.each(visits, [&] {
            float* x = logits + group.begin;
            group.read_tokens(keys, choice.keys, token, kp);
            group.score(asked, token, kp, x);
            for (long e = 0; e < group.pairs; ++e) top[group.rows[e]] = std::max(top[group.rows[e]], x[e]);
        });
        group.each(visits, [&] {
            float* p = logits + group.begin;
            group.read_tokens(values, choice.values, token, vp);
            // The vector at the end holds logits of the next group.
            for (long e = 0; e < group.pairs; e += W) {
                float some[W];
                store(some, exponential(load(p + e) - group.of_rows(top, e)));
                std::copy(some, some + std::min(W, group.pairs - e), p + e);
            }
            for (long e = 0; e < group.pairs; ++e) below[group.rows[e]] += p[e];
            for (long i = 0, e = 0, end; i < group.n; ++i, e = end) {
                for (end = e; end < group.pairs && group.slots[end] == i;) ++end;
                mix_rows<true, false>(p + e, group.rows + e, end - e, token + i * vp, sum, nullptr, nullptr, vp);
            }
        });
        for (long i = 0; i < rows; ++i) {
            scale_rows(sum + i * vp, 1, vp, below[i] > 0.0f ? 1.0f / below[i] : 0.0f);
            operands.lse[section.place(i)] = below[i] > 0.0f ? top[i] + std::log(below[i]) : -INFINITY;
        }
        write_section(sum, operands, OUT, section, choice.values);
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
        return Visits::floats(c, ROWS) + 3 * Group::floats(c) + rows_of(c) * (2 * c.kp() + c.vp()) + 2 * whole_vectors(rows_of(c)) +
               PAIRS * (c.kp() + c.vp()) + c.vp();
    }

    void run(long unit, Scratch scratch) const {
        float* dkeys = sums + unit * choice.tokens * (choice.kp() + choice.vp());
        std::memset(dkeys, 0, sizeof(float) * choice.tokens * (choice.kp() + choice.vp()));
        float* dvalues = dkeys + choice.tokens * choice.kp();
        each_section(choice, unit, [&](const Section& section) { add(section, dkeys, dvalues, scratch); });
    }

    void add(const Section& section, float* dkeys, float* dvalues, Scratch scratch) const {
        const long kp = choice.kp(), vp = choice.vp(), rows = section.rows();
        const Visits visits(section, ROWS, scratch);
        Group group(choice, scratch);
        float *asked = scratch.take(rows * kp), *sum = scratch.take(rows * kp), *grad = scratch.take(rows * vp);
        float *delta = scratch.take(whole_vectors(rows)), *logs = scratch.take(whole_vectors(rows)), *output = scratch.take(vp);
        float *key = scratch.take(PAIRS * kp), *value = scratch.take(PAIRS * vp);
        float *p = scratch.take(Group::floats(choice)), *ds = scratch.take(Group::floats(choice));
        read_section(operands, Q, section, choice.keys, asked);
        scale_rows(asked, rows, kp, choice.scale);
        read_section(operands, GRAD, section, choice.values, grad);
        for (long i = 0; i < rows; ++i) {
            read_row(operands.in(OUT, section.batch, section.head(i)), section.token(i), choice.values, output, vp, same);
            delta[i] = ::sum(dot_lanes(grad + i * vp, output, vp)), logs[i] = operands.lse[section.place(i)];
        }
        std::memset(sum, 0, sizeof(float) * rows * kp);
        const auto keys = operands.in(K, section.batch, section.group), values = operands.in(V, section.batch, section.group);
        group.each(visits, [&] {
            group.read_tokens(keys, choice.keys, key, kp);
            group.read_tokens(values, choice.values, value, vp);
            group.score(asked, key, kp, p);
            group.score(grad, value, vp, ds);
            for (long e = 0; e < group.pairs; e += W) {
                const vec weight = exponential(load(p + e) - group.of_rows(logs, e));
                store(ds + e, weight * (load(ds + e) - group.of_rows(delta, e)));
                store(p + e, weight);
            }
            for (long i = 0, e = 0, end; i < group.n; ++i, e = end) {
                for (end = e; end < group.pairs && group.slots[end] == i;) ++end;
                const long token = group.tokens[i];
                mix_rows<true, true>(ds + e, group.rows + e, end - e, key + i * kp, sum, asked, dkeys + token * kp, kp);
                mix_rows<false, true>(p + e, group.rows + e, end - e, nullptr, nullptr, grad, dvalues + token * vp, vp);
            }
        });
        scale_rows(sum, rows, kp, choice.scale);
        write_section(sum, operands, DQ, section, choice.keys);
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
    Best() = default;
    Best(long picks, Scratch& scratch)
        : picks(picks), ranks(reinterpret_cast<std::int32_t*>(scratch.take(room(picks)))),
          places(reinterpret_cast<std::int32_t*>(scratch.take(room(picks)))) {}
    static long floats(long picks) { return 2 * room(picks); }

    void start() { used = 0, least = rank(splat(NEVER))[0]; }
    // The scores of n tokens from token ``first`` on, after those of all tokens before.
    void add(const float* x, long n, long first) {
        const ivec never = rank(splat(NEVER));
        ivec lanes;
        for (long i = 0; i < W; ++i) lanes[i] = static_cast<std::int32_t>(i);
        for (long j = 0; j < n; j += W) {
            float rest[W];
            const long some = std::min(W, n - j);
            if (some < W) std::fill(rest, rest + W, NEVER), std::copy(x + j, x + n, rest);
            const vec y = load(some < W ? rest : x + j);
            const ivec tokens = lanes + static_cast<std::int32_t>(first + j);
            if (keep(y == y ? rank(y) : never, tokens, least) && used >= full(picks)) cut();
        }
    }
    void finish(std::int64_t* out) {
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
    // Appends those of W ranks that are above ``limit``, and their tokens; whether there is one.
    bool keep(ivec ranked, ivec tokens, std::int32_t limit) {
#if defined(__AVX512F__)
        const __mmask16 above = _mm512_cmpgt_epi32_mask((__m512i)ranked, _mm512_set1_epi32(limit));
        if (!above) return false;
        _mm512_storeu_si512(ranks + used, _mm512_maskz_compress_epi32(above, (__m512i)ranked));
        _mm512_storeu_si512(places + used, _mm512_maskz_compress_epi32(above, (__m512i)tokens));
        used += __builtin_popcount(above);
        return true;
#else
        std::int32_t some = 0;
        const ivec above = ranked > limit;
        for (long i = 0; i < W; ++i) some |= above[i];
        for (long i = 0; i < W && some; ++i) {
            ranks[used] = ranked[i], places[used] = tokens[i];
            used -= above[i];
        }
        return some != 0;
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
        long most = used;  // that are at least as large
        for (std::uint32_t bit = 0x80000000u; bit && most > picks; bit >>= 1) {
            const long more = at_least_of(static_cast<std::int32_t>(bits + bit));
            if (more >= picks) bits += bit, most = more;
        }
        least = static_cast<std::int32_t>(bits);
        if (most == picks) {
            const long all = used;
            used = 0;
            for (long s = 0; s < all; s += W) {
                ivec x, y;
                std::memcpy(&x, ranks + s, sizeof x), std::memcpy(&y, places + s, sizeof y);
                keep(x, y, least - 1);
            }
            return;
        }
        long equal = picks - (least == INT32_MAX ? 0 : at_least_of(least + 1)), kept = 0;
        for (long s = 0; s < used; ++s) {
            const bool stays = ranks[s] > least || (ranks[s] == least && equal-- > 0);
            ranks[kept] = ranks[s], places[kept] = places[s];
            kept += stays;
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
        return QUERIES * (Best::floats(picks) + 2 * SPAN + heads * dp()) + SPAN * 2 * dp();
    }

    void run(long unit, Scratch scratch) const {
        const long row = unit / cuts(), first = unit % cuts() * QUERIES, n = std::min(QUERIES, queries - first), d = dp();
        float *scores = scratch.take(QUERIES * SPAN), *x = scratch.take(QUERIES * SPAN), *key = scratch.take(SPAN * d);
        float *turned = scratch.take(SPAN * d), *query = scratch.take(heads * QUERIES * d);
        const std::int64_t* place = at + row * queries + first;
        const long end = std::min<long>(tokens, *std::max_element(place, place + n) + 1);
        const long own[4] = {0, 0, channels, 1}, asked[4] = {0, 0, heads * channels, 1};
        const Rows<const float> keys(Tensor<const float>{k + row * tokens * channels, own}, 0, 0);
        for (long h = 0; h < heads; ++h) {
            const float* from = q + ((row * queries + first) * heads + h) * channels;
            read(Rows<const float>(Tensor<const float>{from, asked}, 0, 0), 0, n, channels, query + h * QUERIES * d, d);
        }
        Best best[QUERIES];
        for (long i = 0; i < n; ++i) best[i] = Best(picks, scratch), best[i].start();
        for (long s = 0; s < end; s += SPAN) {
            const long some = std::min(SPAN, end - s), width = whole_vectors(some);
            read_turned(keys, s, some, channels, d, SPAN, key, turned);
            std::memset(scores, 0, sizeof(float) * n * SPAN);
            for (long h = 0; h < heads; ++h) {
                gemm<false>(n, width, channels, query + h * QUERIES * d, d, 1, turned, SPAN, x, SPAN);
                for (long i = 0; i < n; ++i) {
                    const vec weight = splat(weights[(row * queries + first + i) * heads + h]);
                    for (long j = i * SPAN; j < i * SPAN + width; j += W)
                        store(scores + j, load(scores + j) + weight * at_least(0.0f, load(x + j)));
                }
            }
            for (long i = 0; i < n; ++i) best[i].add(scores + i * SPAN, std::min<long>(some, place[i] + 1 - s), s);
        }
        for (long i = 0; i < n; ++i) best[i].finish(index + (row * queries + first + i) * picks);
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
            best.start(), best.add(x + i * scores, scores, 0), best.finish(index + i * picks);
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
