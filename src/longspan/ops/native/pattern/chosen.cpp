// Softmax attention in which each query chooses blocks of keys: out_i = sum_j p_ij v_j over the keys of its blocks up to its
// own position, and the gradients. The queries of a block are gathered, so that a block of keys is read once per head.
#include "choice.h"

namespace {

constexpr long TILE = 64;   // queries that are gathered together
constexpr long SPAN = 128;  // keys of a block that are read together
// Rows whose queries and sums stay in the cache while all keys pass by.
constexpr long FORWARD = 1536, BACKWARD = 1024;

// Keys ``first`` ... ``first + cols`` and the rows that visit them.
struct KeyPart {
    long first, cols, width;
};

template <class F>
void each_part(const Choice& choice, const Visits& visits, F use) {
    for (long c = 0; c < visits.count; ++c)
        for (long first = c * choice.size, end = std::min(first + choice.size, choice.tokens); first < end; first += SPAN)
            if (visits.begin[c] < visits.begin[c + 1]) {
                const long cols = std::min(SPAN, end - first);
                use(c, KeyPart{first, cols, whole_vectors(cols)});
            }
}

// The given rows of x (.,ld), n of them, into out.
inline void gather(const float* x, const std::int32_t* rows, long n, float* out, long ld) {
    for (long i = 0; i < n; ++i)
        for (long j = 0; j < ld; j += W) store(out + i * ld + j, load(x + rows[i] * ld + j));
}

// The position of the query of each row.
inline const std::int64_t* positions(const Section& section, Scratch& scratch) {
    std::int64_t* last = reinterpret_cast<std::int64_t*>(scratch.take(2 * whole_vectors(section.rows())));
    for (long row = 0; row < section.rows(); ++row) last[row] = section.at(row);
    return last;
}

// Logits of a tile of rows: NEVER after the position of a query, and beyond the last key.
inline void hide_later(const std::int64_t* last, const std::int32_t* rows, long n, KeyPart part, float* x) {
    for (long i = 0; i < n; ++i)
        for (long j = std::max(0L, std::min<long>(part.cols, last[rows[i]] - part.first + 1)); j < part.width; ++j)
            x[i * SPAN + j] = NEVER;
}

template <class T>
struct Forward {
    const Choice& choice;
    Operands<T> operands;

    long sections() const { return Section::count(choice, choice.queries, FORWARD); }
    long units() const { return choice.batch * choice.groups * sections(); }
    long scratch() const {
        const Choice& c = choice;
        const long rows = c.shared() * Section::tokens(c, FORWARD);
        return Visits::floats(c, FORWARD) + rows * (c.kp() + c.vp()) + 4 * whole_vectors(rows) +
               TILE * (c.kp() + c.vp() + SPAN) + SPAN * (2 * c.kp() + c.vp());
    }

    void run(long unit, Scratch scratch) const {
        const Section section(choice, unit / sections(), 0, choice.queries, unit % sections(), FORWARD);
        const long kp = choice.kp(), vp = choice.vp(), rows = section.rows();
        float *asked = scratch.take(rows * kp), *sum = scratch.take(rows * vp), *top = scratch.take(whole_vectors(rows));
        float *below = scratch.take(whole_vectors(rows)), *query = scratch.take(TILE * kp), *read_value = scratch.take(TILE * vp);
        float *logits = scratch.take(TILE * SPAN), *key = scratch.take(SPAN * kp), *turned = scratch.take(SPAN * kp);
        float* value = scratch.take(SPAN * vp);
        const Visits visits(section, FORWARD, scratch);
        const std::int64_t* last = positions(section, scratch);
        read_section(operands, Q, section, choice.keys, asked);
        scale_rows(asked, rows, kp, choice.scale);
        std::memset(sum, 0, sizeof(float) * rows * vp);
        for (long i = 0; i < rows; ++i) top[i] = NEVER, below[i] = 0.0f;
        const auto keys = operands.in(K, section.batch, section.group), values = operands.in(V, section.batch, section.group);
        each_part(choice, visits, [&](long c, KeyPart part) {
            read_turned(keys, part.first, part.cols, choice.keys, kp, SPAN, key, turned);
            read(values, part.first, part.cols, choice.values, value, vp);
            for (long e = visits.begin[c]; e < visits.begin[c + 1]; e += TILE) {
                const long n = std::min<long>(TILE, visits.begin[c + 1] - e);
                const std::int32_t* at = visits.rows + e;
                gather(asked, at, n, query, kp);
                gemm<false>(n, part.width, choice.keys, query, kp, 1, turned, SPAN, logits, SPAN);
                hide_later(last, at, n, part, logits);
                for (long i = 0; i < n; ++i)
                    weigh(logits + i * SPAN, part.width, top[at[i]], below[at[i]], sum + at[i] * vp, vp);
                gemm<false>(n, vp, part.cols, logits, SPAN, 1, value, vp, read_value, vp);
                for (long i = 0; i < n; ++i) add_row(sum + at[i] * vp, read_value + i * vp, vp);
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

    long units() const { return choice.batch * choice.groups; }
    long scratch() const {
        const Choice& c = choice;
        const long rows = c.shared() * Section::tokens(c, BACKWARD);
        return Visits::floats(c, BACKWARD) + rows * (2 * c.kp() + c.vp()) + 4 * whole_vectors(rows) +
               TILE * (2 * c.kp() + c.vp() + 2 * SPAN) + (2 * SPAN + c.tokens) * (c.kp() + c.vp());
    }

    void run(long unit, Scratch scratch) const {
        const long kp = choice.kp(), vp = choice.vp(), batch = unit / choice.groups, group = unit % choice.groups;
        float *dkeys = scratch.take(choice.tokens * kp), *dvalues = scratch.take(choice.tokens * vp);
        std::memset(dkeys, 0, sizeof(float) * choice.tokens * kp);
        std::memset(dvalues, 0, sizeof(float) * choice.tokens * vp);
        for (long s = 0; s < Section::count(choice, choice.queries, BACKWARD); ++s)
            add(Section(choice, unit, 0, choice.queries, s, BACKWARD), dkeys, dvalues, scratch);
        write(dkeys, kp, operands.out(DK, batch, group), 0, choice.tokens, choice.keys);
        write(dvalues, vp, operands.out(DV, batch, group), 0, choice.tokens, choice.values);
    }

    void add(const Section& section, float* dkeys, float* dvalues, Scratch scratch) const {
        const long kp = choice.kp(), vp = choice.vp(), rows = section.rows();
        float *asked = scratch.take(rows * kp), *sum = scratch.take(rows * kp), *grad = scratch.take(rows * vp);
        float *delta = scratch.take(whole_vectors(rows)), *logs = scratch.take(whole_vectors(rows));
        float *query = scratch.take(TILE * kp), *found = scratch.take(TILE * kp);
        float *up = scratch.take(TILE * vp), *p = scratch.take(TILE * SPAN), *ds = scratch.take(TILE * SPAN);
        float *key = scratch.take(SPAN * kp), *key_turned = scratch.take(SPAN * kp), *value = scratch.take(SPAN * vp);
        float* value_turned = scratch.take(SPAN * vp);
        const Visits visits(section, BACKWARD, scratch);
        const std::int64_t* last = positions(section, scratch);
        read_section(operands, Q, section, choice.keys, asked);
        scale_rows(asked, rows, kp, choice.scale);
        read_section(operands, GRAD, section, choice.values, grad);
        for (long i = 0; i < rows; ++i) {
            read_row(operands.in(OUT, section.batch, section.head(i)), section.token(i), choice.values, up, vp, same);
            delta[i] = ::sum(dot_lanes(grad + i * vp, up, vp)), logs[i] = operands.lse[section.place(i)];
        }
        std::memset(sum, 0, sizeof(float) * rows * kp);
        const auto keys = operands.in(K, section.batch, section.group), values = operands.in(V, section.batch, section.group);
        each_part(choice, visits, [&](long c, KeyPart part) {
            read_turned(keys, part.first, part.cols, choice.keys, kp, SPAN, key, key_turned);
            read_turned(values, part.first, part.cols, choice.values, vp, SPAN, value, value_turned);
            for (long e = visits.begin[c]; e < visits.begin[c + 1]; e += TILE) {
                const long n = std::min<long>(TILE, visits.begin[c + 1] - e);
                const std::int32_t* at = visits.rows + e;
                gather(asked, at, n, query, kp);
                gather(grad, at, n, up, vp);
                gemm<false>(n, part.width, choice.keys, query, kp, 1, key_turned, SPAN, p, SPAN);
                hide_later(last, at, n, part, p);
                gemm<false>(n, part.width, choice.values, up, vp, 1, value_turned, SPAN, ds, SPAN);
                for (long i = 0; i < n; ++i)
                    slopes(p + i * SPAN, ds + i * SPAN, part.width, logs[at[i]], delta[at[i]], 0.0f);
                gemm<true>(part.cols, vp, n, p, 1, SPAN, up, vp, dvalues + part.first * vp, vp);
                gemm<true>(part.cols, kp, n, ds, 1, SPAN, query, kp, dkeys + part.first * kp, kp);
                gemm<false>(n, kp, part.cols, ds, SPAN, 1, key, kp, found, kp);
                for (long i = 0; i < n; ++i) add_row(sum + at[i] * kp, found + i * kp, kp);
            }
        });
        scale_rows(sum, rows, kp, choice.scale);
        write_section(sum, operands, DQ, section, choice.keys);
    }
};

}  // namespace

// sizes: B, H, G, N, M, D, E, keys of a block, blocks per query, heads that choose; at and blocks int64, contiguous.
extern "C" int longspan_chosen_forward(void* const* data, const long* strides, float* lse, const std::int64_t* at,
                                       const std::int64_t* blocks, const long* sizes, int type, float scale, int threads) {
    return run_pass<Forward>(Choice(sizes, at, blocks, scale), data, strides, lse, type, threads);
}

// As longspan_chosen_forward, which gave out and lse.
extern "C" int longspan_chosen_backward(void* const* data, const long* strides, float* lse, const std::int64_t* at,
                                        const std::int64_t* blocks, const long* sizes, int type, float scale, int threads) {
    return run_pass<Backward>(Choice(sizes, at, blocks, scale), data, strides, lse, type, threads);
}
