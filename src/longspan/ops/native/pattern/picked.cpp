// Softmax attention in which each query picks tokens, the same for all heads, and its gradients: out_i = sum_s p_is v_s over
// the picked tokens s. And the choice of the tokens with the largest scores sum_h w_ih max(0, q_ih k_s).
#include <functional>

#include "blocks.h"

namespace {

constexpr long SPAN = 64;    // tokens that are gathered together
constexpr long QUERIES = 32;  // queries of a unit
constexpr long PARTS = 4;    // sums of the gradients of keys, each over some of the queries

struct Pick {
    long batch, heads, groups, queries, tokens, keys, values, picks;
    const std::int64_t* index;  // (B,N,picks), negative for none
    float scale;
    long kp() const { return whole_vectors(keys); }
    long vp() const { return whole_vectors(values); }
    long shared() const { return heads / groups; }
    long rp() const { return whole_vectors(shared()); }
    // The tokens that a query picked, without the gaps; returns their number.
    long of(long batch, long query, std::int64_t* out) const {
        const std::int64_t* all = index + (batch * queries + query) * picks;
        long n = 0;
        for (long s = 0; s < picks; ++s)
            if (all[s] >= 0) out[n++] = all[s];
        return n;
    }
};

template <class T>
void gather(Rows<const T> rows, const std::int64_t* tokens, long n, long width, float* out, long ld) {
    for (long i = 0; i < n; ++i) read_row(rows, tokens[i], width, out + i * ld, ld, same);
}

// The heads of a query that share a head of keys: rows (shared, ld), and turned (ld, rp) with zeros for other columns.
template <class T>
void read_heads(const Pick& pick, Tensor<const T> t, long batch, long group, long query, long width, float* rows, long ld,
                float* turned) {
    for (long r = 0; r < pick.shared(); ++r)
        read_row(Rows<const T>(t, batch, group * pick.shared() + r), query, width, rows + r * ld, ld, same);
    std::memset(rows + pick.shared() * ld, 0, sizeof(float) * (pick.rp() - pick.shared()) * ld);
    transpose(rows, ld, turned, pick.rp(), pick.rp(), ld);
}

template <class T>
struct Forward {
    const Pick& pick;
    Tensor<const T> q, k, v;
    Tensor<T> out;
    float* lse;  // (B,H,N)

    long cuts() const { return (pick.queries + QUERIES - 1) / QUERIES; }
    long units() const { return pick.batch * pick.groups * cuts(); }
    long scratch() const {
        return 2 * pick.picks + pick.picks * pick.rp() + SPAN * (pick.kp() + pick.vp()) + pick.rp() * (2 * pick.kp() + pick.vp());
    }

    void run(long unit, Scratch scratch) const {
        const long cut = unit % cuts(), group = unit / cuts() % pick.groups, batch = unit / cuts() / pick.groups;
        const long kp = pick.kp(), vp = pick.vp(), rp = pick.rp();
        std::int64_t* tokens = reinterpret_cast<std::int64_t*>(scratch.take(2 * pick.picks));
        float *x = scratch.take(pick.picks * rp), *key = scratch.take(SPAN * kp), *value = scratch.take(SPAN * vp);
        float *query = scratch.take(rp * kp), *turned = scratch.take(rp * kp), *sum = scratch.take(rp * vp);
        const Rows<const T> keys(k, batch, group), values(v, batch, group);
        for (long i = cut * QUERIES; i < std::min(pick.queries, (cut + 1) * QUERIES); ++i) {
            const long n = pick.of(batch, i, tokens);
            read_heads(pick, q, batch, group, i, pick.keys, query, kp, turned);
            scale_rows(turned, rp, kp, pick.scale);
            for (long s = 0; s < n; s += SPAN) {
                const long some = std::min(SPAN, n - s);
                gather(keys, tokens + s, some, pick.keys, key, kp);
                gemm<false>(some, rp, pick.keys, key, kp, 1, turned, rp, x + s * rp, rp);
            }
            std::memset(sum, 0, sizeof(float) * rp * vp);
            for (long j = 0; j < rp; j += W) weigh(x + j, n, batch, group, j, i);
            for (long s = 0; s < n; s += SPAN) {
                const long some = std::min(SPAN, n - s);
                gather(values, tokens + s, some, pick.values, value, vp);
                gemm<true>(pick.shared(), vp, some, x + s * rp, 1, rp, value, vp, sum, vp);
            }
            for (long r = 0; r < pick.shared(); ++r)
                write(sum + r * vp, vp, Rows<T>(out, batch, group * pick.shared() + r), i, 1, pick.values);
        }
    }

    // The weights of W heads, in place.
    void weigh(float* x, long n, long batch, long group, long first, long query) const {
        const long rp = pick.rp();
        vec most = splat(NEVER), below = vec{};
        for (long s = 0; s < n; ++s) most = pick_larger(most, load(x + s * rp));
        for (long s = 0; s < n; ++s) {
            const vec p = exponential(load(x + s * rp) - most);
            store(x + s * rp, p);
            below += p;
        }
        for (long s = 0; s < n; ++s) store(x + s * rp, load(x + s * rp) / below);
        for (long r = first; r < std::min(first + W, pick.shared()); ++r)
            lse[(batch * pick.heads + group * pick.shared() + r) * pick.queries + query] =
                n ? most[r - first] + std::log(below[r - first]) : -INFINITY;
    }
    static vec pick_larger(vec a, vec b) { return ::pick(a > b, a, b); }
};

template <class T>
struct Backward {
    const Pick& pick;
    Tensor<const T> q, k, v, out, grad;
    Tensor<T> dq;
    float *dkeys, *dvalues;  // (PARTS,B,G,M,kp), (PARTS,B,G,M,vp), zero before
    const float* lse;        // (B,H,N)

    long units() const { return pick.batch * pick.groups * PARTS; }
    long scratch() const {
        return 2 * pick.picks + 2 * SPAN * (pick.kp() + pick.vp() + pick.rp()) + pick.rp() * (3 * pick.kp() + 3 * pick.vp() + 2);
    }

    void run(long unit, Scratch scratch) const {
        const long part = unit % PARTS, group = unit / PARTS % pick.groups, batch = unit / PARTS / pick.groups;
        const long kp = pick.kp(), vp = pick.vp(), rp = pick.rp(), shared = pick.shared();
        std::int64_t* tokens = reinterpret_cast<std::int64_t*>(scratch.take(2 * pick.picks));
        float *key = scratch.take(SPAN * kp), *value = scratch.take(SPAN * vp), *p = scratch.take(SPAN * rp);
        float *ds = scratch.take(SPAN * rp), *key_grad = scratch.take(SPAN * kp), *value_grad = scratch.take(SPAN * vp);
        float *query = scratch.take(rp * kp), *turned = scratch.take(rp * kp), *sum = scratch.take(rp * kp);
        float *up = scratch.take(rp * vp), *up_turned = scratch.take(rp * vp), *output = scratch.take(rp * vp);
        float *delta = scratch.take(rp), *logs = scratch.take(rp);
        const long place = (part * pick.batch + batch) * pick.groups + group;
        float *dk = dkeys + place * pick.tokens * kp, *dv = dvalues + place * pick.tokens * vp;
        const Rows<const T> keys(k, batch, group), values(v, batch, group);
        for (long i = pick.queries * part / PARTS; i < pick.queries * (part + 1) / PARTS; ++i) {
            const long n = pick.of(batch, i, tokens);
            read_heads(pick, q, batch, group, i, pick.keys, query, kp, turned);
            read_heads(pick, grad, batch, group, i, pick.values, up, vp, up_turned);
            scale_rows(query, rp, kp, pick.scale);
            scale_rows(turned, rp, kp, pick.scale);
            for (long r = 0; r < rp; ++r) delta[r] = logs[r] = 0.0f;
            for (long r = 0; r < shared; ++r) {
                const long head = group * shared + r;
                read_row(Rows<const T>(out, batch, head), i, pick.values, output, vp, same);
                delta[r] = ::sum(dot_lanes(up + r * vp, output, vp));
                logs[r] = n ? lse[(batch * pick.heads + head) * pick.queries + i] : 0.0f;
            }
            std::memset(sum, 0, sizeof(float) * rp * kp);
            for (long s = 0; s < n; s += SPAN) {
                const long some = std::min(SPAN, n - s);
                gather(keys, tokens + s, some, pick.keys, key, kp);
                gather(values, tokens + s, some, pick.values, value, vp);
                gemm<false>(some, rp, pick.keys, key, kp, 1, turned, rp, p, rp);
                gemm<false>(some, rp, pick.values, value, vp, 1, up_turned, rp, ds, rp);
                for (long t = 0; t < some; ++t)
                    for (long j = 0; j < rp; j += W) {
                        const vec x = exponential(load(p + t * rp + j) - load(logs + j));
                        store(p + t * rp + j, x);
                        store(ds + t * rp + j, x * (load(ds + t * rp + j) - load(delta + j)));
                    }
                gemm<true>(shared, kp, some, ds, 1, rp, key, kp, sum, kp);
                gemm<false>(some, kp, shared, ds, rp, 1, query, kp, key_grad, kp);
                gemm<false>(some, vp, shared, p, rp, 1, up, vp, value_grad, vp);
                for (long t = 0; t < some; ++t) {
                    add_row(dk + tokens[s + t] * kp, key_grad + t * kp, kp);
                    add_row(dv + tokens[s + t] * vp, value_grad + t * vp, vp);
                }
            }
            scale_rows(sum, rp, kp, pick.scale);
            for (long r = 0; r < shared; ++r) write(sum + r * kp, kp, Rows<T>(dq, batch, group * shared + r), i, 1, pick.keys);
        }
    }
};

// The largest of n scores; of equal ones the first.
inline void take(const float* x, long n, long picks, float* order, std::int64_t* out) {
    long used = 0;
    float least = NEVER;
    if (n > picks) {
        std::copy(x, x + n, order);
        std::nth_element(order, order + picks - 1, order + n, std::greater<float>());
        least = order[picks - 1];
    }
    long room = picks;
    for (long j = 0; j < n; ++j) room -= x[j] > least;
    for (long j = 0; j < n && used < picks; ++j)
        if (x[j] > least || (x[j] == least && x[j] > NEVER && room-- > 0)) out[used++] = j;
    for (; used < picks; ++used) out[used] = -1;
}

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
        return QUERIES * whole_vectors(tokens) + whole_vectors(tokens) + SPAN * 2 * dp() + QUERIES * (SPAN + dp());
    }

    void run(long unit, Scratch scratch) const {
        const long row = unit / cuts(), first = unit % cuts() * QUERIES, n = std::min(QUERIES, queries - first);
        const long wide = whole_vectors(tokens), d = dp();
        float *scores = scratch.take(QUERIES * wide), *order = scratch.take(wide), *key = scratch.take(SPAN * d);
        float *turned = scratch.take(SPAN * d), *x = scratch.take(QUERIES * SPAN), *query = scratch.take(QUERIES * d);
        const std::int64_t* place = at + row * queries + first;
        const long end = std::min<long>(tokens, *std::max_element(place, place + n) + 1);
        const long own[4] = {0, 0, channels, 1}, asked[4] = {0, 0, heads * channels, 1};
        const Rows<const float> keys(Tensor<const float>{k + row * tokens * channels, own}, 0, 0);
        std::memset(scores, 0, sizeof(float) * QUERIES * wide);
        for (long s = 0; s < end; s += SPAN) {
            const long some = std::min(SPAN, end - s), width = whole_vectors(some);
            read_turned(keys, s, some, channels, d, SPAN, key, turned);
            for (long h = 0; h < heads; ++h) {
                const float* from = q + ((row * queries + first) * heads + h) * channels;
                read(Rows<const float>(Tensor<const float>{from, asked}, 0, 0), 0, n, channels, query, d);
                gemm<false>(n, width, channels, query, d, 1, turned, SPAN, x, SPAN);
                for (long i = 0; i < n; ++i) {
                    const vec weight = splat(weights[(row * queries + first + i) * heads + h]);
                    float* total = scores + i * wide + s;
                    for (long j = 0; j < width; j += W)
                        store(total + j, load(total + j) + weight * at_least(0.0f, load(x + i * SPAN + j)));
                }
            }
        }
        for (long i = 0; i < n; ++i)
            take(scores + i * wide, std::min<long>(end, place[i] + 1), picks, order, index + (row * queries + first + i) * picks);
    }

};

// The largest scores of each row: index (rows,picks) ascending, -1 after the last; NEVER is not taken.
struct Largest {
    long rows, scores, picks;
    const float* x;
    std::int64_t* index;

    static constexpr long SOME = 256;  // rows of a unit
    long units() const { return (rows + SOME - 1) / SOME; }
    long scratch() const { return whole_vectors(scores); }
    void run(long unit, Scratch scratch) const {
        float* order = scratch.take(whole_vectors(scores));
        for (long i = unit * SOME; i < std::min(rows, (unit + 1) * SOME); ++i)
            take(x + i * scores, scores, picks, order, index + i * picks);
    }
};

inline Pick pick_of(const long* sizes, const std::int64_t* index, float scale) {
    return {sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6], sizes[7], index, scale};
}

}  // namespace

// sizes: B, H, G, N, M, D, E, picks. q (B,H,N,D), k (B,G,M,D), v (B,G,M,E), out (B,H,N,E), of type 0 float or 1 bfloat16, with
// 4 strides each, in this order; lse (B,H,N) float, index (B,N,picks) int64, contiguous. Returns 0, or 1 if memory runs out.
extern "C" int longspan_picked_forward(const void* q, const void* k, const void* v, void* out, float* lse,
                                       const std::int64_t* index, const long* strides, const long* sizes, int type,
                                       float scale, int threads) {
    const Pick pick = pick_of(sizes, index, scale);
    const auto pass = [&](auto element) {
        using T = decltype(element);
        const auto read = [&](const void* data, long i) { return Tensor<const T>{static_cast<const T*>(data), strides + 4 * i}; };
        return each_unit(Forward<T>{pick, read(q, 0), read(k, 1), read(v, 2), {static_cast<T*>(out), strides + 12}, lse}, threads);
    };
    return type == 0 ? pass(float{}) : pass(bfloat16{});
}

// The sums of the gradients of keys and values that each part of the queries makes: dk (PARTS,B,G,M,kp), dv (PARTS,B,G,M,vp)
// float, zero before, with channels up to whole vectors; strides of q, k, v, out, grad, dq.
extern "C" int longspan_picked_backward(const void* q, const void* k, const void* v, const void* out, const void* grad,
                                        void* dq, float* dk, float* dv, const float* lse, const std::int64_t* index,
                                        const long* strides, const long* sizes, int type, float scale, int threads) {
    const Pick pick = pick_of(sizes, index, scale);
    const auto pass = [&](auto element) {
        using T = decltype(element);
        const auto read = [&](const void* data, long i) { return Tensor<const T>{static_cast<const T*>(data), strides + 4 * i}; };
        return each_unit(Backward<T>{pick, read(q, 0), read(k, 1), read(v, 2), read(out, 3), read(grad, 4),
                                     {static_cast<T*>(dq), strides + 20}, dk, dv, lse},
                         threads);
    };
    return type == 0 ? pass(float{}) : pass(bfloat16{});
}

extern "C" long longspan_picked_parts() { return PARTS; }
extern "C" long longspan_picked_vector() { return W; }

// x (rows,scores) float, index (rows,picks), contiguous.
extern "C" int longspan_picked_largest(const float* x, std::int64_t* index, long rows, long scores, long picks, int threads) {
    return each_unit(Largest{rows, scores, picks, x, index}, threads);
}

// sizes: B, N, M, heads, D, picks. q (B,N,H,D), k (B,M,D), weights (B,N,H) float, at (B,N), index (B,N,picks), contiguous.
extern "C" int longspan_picked_choose(const float* q, const float* k, const float* weights, const std::int64_t* at,
                                      std::int64_t* index, const long* sizes, int threads) {
    return each_unit(Choose{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], q, k, weights, at, index}, threads);
}
