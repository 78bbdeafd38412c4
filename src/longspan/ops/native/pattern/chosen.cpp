// Softmax attention in which each query chooses blocks of keys: out_i = sum_j p_ij v_j over the keys of its blocks up to its
// own position, and the gradients. The queries of a block are gathered, so that a block of keys is read once per head.
#include "choice.h"

namespace {

constexpr long TILE = 64;   // queries that are gathered together
constexpr long SPAN = 128;  // keys of a block that are read together

// Queries that read one head of keys.
inline long rows_of(const Choice& choice) { return choice.shared() * choice.queries; }

// The rows that visit each block, in ascending order: rows[e] for e in begin[c] ... begin[c + 1].
struct Visits {
    std::int32_t *begin, *rows;

    static long floats(const Choice& c) { return rows_of(c) * c.picks + c.count() + 1; }  // which hold 32-bit numbers

    Visits(const Choice& choice, long unit, Scratch& scratch)
        : begin(reinterpret_cast<std::int32_t*>(scratch.take(choice.count() + 1))),
          rows(reinterpret_cast<std::int32_t*>(scratch.take(rows_of(choice) * choice.picks))) {
        const long count = choice.count(), batch = unit / choice.groups;
        const auto each = [&](long row, auto use) {
            choice.each(batch, unit % choice.groups * choice.shared() + row / choice.queries, row % choice.queries, use);
        };
        std::memset(begin, 0, sizeof(std::int32_t) * (count + 1));
        for (long row = 0; row < rows_of(choice); ++row) each(row, [&](long block) { ++begin[block]; });
        for (long c = 0, total = 0; c <= count; ++c) total += begin[c], begin[c] = static_cast<std::int32_t>(total);
        // Filled from the end, after which begin[c] is the start of a block.
        for (long row = rows_of(choice) - 1; row >= 0; --row)
            each(row, [&](long block) { rows[--begin[block]] = static_cast<std::int32_t>(row); });
    }
};

// Keys ``first`` ... ``first + cols`` and the rows that visit them.
struct KeyPart {
    long first, cols, width;
};

template <class F>
void each_part(const Choice& choice, const Visits& visits, F use) {
    for (long c = 0; c < choice.count(); ++c)
        for (long first = c * choice.size, end = std::min(first + choice.size, choice.tokens); first < end; first += SPAN)
            if (visits.begin[c] < visits.begin[c + 1]) {
                const long cols = std::min(SPAN, end - first);
                use(c, KeyPart{first, cols, whole_vectors(cols)});
            }
}

// Rows of one unit, gathered into out (n, ld).
template <class T>
void gather(const Choice& choice, const Operands<T>& operands, Operand i, long unit, const std::int32_t* rows, long n, long width,
            float* out, long ld) {
    for (; n > 0; --n, ++rows, out += ld) {
        const long head = unit % choice.groups * choice.shared() + *rows / choice.queries;
        read_row(operands.in(i, unit / choice.groups, head), *rows % choice.queries, width, out, ld, same);
    }
}

// Logits of a tile of rows: NEVER after the position of a query, and beyond the last key.
inline void hide_later(const Choice& choice, long unit, const std::int32_t* rows, long n, KeyPart part, float* x) {
    const std::int64_t* at = choice.at + unit / choice.groups * choice.queries;
    for (long i = 0; i < n; ++i)
        for (long j = std::max(0L, std::min(part.cols, at[rows[i] % choice.queries] - part.first + 1)); j < part.width; ++j)
            x[i * SPAN + j] = NEVER;
}

template <class T>
struct Forward {
    const Choice& choice;
    Operands<T> operands;

    long units() const { return choice.batch * choice.groups; }
    long scratch() const {
        const Choice& c = choice;
        return Visits::floats(c) + rows_of(c) * c.vp() + 2 * whole_vectors(rows_of(c)) + TILE * (c.kp() + c.vp() + SPAN) +
               SPAN * (2 * c.kp() + c.vp());
    }

    void run(long unit, Scratch scratch) const {
        const long kp = choice.kp(), vp = choice.vp(), rows = rows_of(choice), batch = unit / choice.groups;
        float *sum = scratch.take(rows * vp), *top = scratch.take(whole_vectors(rows)), *below = scratch.take(whole_vectors(rows));
        float *query = scratch.take(TILE * kp), *read_value = scratch.take(TILE * vp), *logits = scratch.take(TILE * SPAN);
        float *key = scratch.take(SPAN * kp), *turned = scratch.take(SPAN * kp), *value = scratch.take(SPAN * vp);
        const Visits visits(choice, unit, scratch);
        std::memset(sum, 0, sizeof(float) * rows * vp);
        for (long i = 0; i < rows; ++i) top[i] = NEVER, below[i] = 0.0f;
        const auto keys = operands.in(K, batch, unit % choice.groups), values = operands.in(V, batch, unit % choice.groups);
        each_part(choice, visits, [&](long c, KeyPart part) {
            read_turned(keys, part.first, part.cols, choice.keys, kp, SPAN, key, turned);
            read(values, part.first, part.cols, choice.values, value, vp);
            for (long e = visits.begin[c]; e < visits.begin[c + 1]; e += TILE) {
                const long n = std::min<long>(TILE, visits.begin[c + 1] - e);
                const std::int32_t* at = visits.rows + e;
                gather(choice, operands, Q, unit, at, n, choice.keys, query, kp);
                scale_rows(query, n, kp, choice.scale);
                gemm<false>(n, part.width, choice.keys, query, kp, 1, turned, SPAN, logits, SPAN);
                hide_later(choice, unit, at, n, part, logits);
                for (long i = 0; i < n; ++i)
                    weigh(logits + i * SPAN, part.width, top[at[i]], below[at[i]], sum + at[i] * vp, vp);
                gemm<false>(n, vp, part.cols, logits, SPAN, 1, value, vp, read_value, vp);
                for (long i = 0; i < n; ++i) add_row(sum + at[i] * vp, read_value + i * vp, vp);
            }
        });
        for (long i = 0; i < rows; ++i) {
            const long head = unit % choice.groups * choice.shared() + i / choice.queries, token = i % choice.queries;
            scale_rows(sum + i * vp, 1, vp, below[i] > 0.0f ? 1.0f / below[i] : 0.0f);
            write(sum + i * vp, vp, operands.out(OUT, batch, head), token, 1, choice.values);
            operands.lse[(batch * choice.heads + head) * choice.queries + token] =
                below[i] > 0.0f ? top[i] + std::log(below[i]) : -INFINITY;
        }
    }
};

template <class T>
struct Backward {
    const Choice& choice;
    Operands<T> operands;

    long units() const { return choice.batch * choice.groups; }
    long scratch() const {
        const Choice& c = choice;
        return Visits::floats(c) + rows_of(c) * c.kp() + whole_vectors(rows_of(c)) + TILE * (2 * c.kp() + 2 * c.vp() + 2 * SPAN) +
               (2 * SPAN + c.tokens) * (c.kp() + c.vp());
    }

    void run(long unit, Scratch scratch) const {
        const long kp = choice.kp(), vp = choice.vp(), rows = rows_of(choice);
        const long batch = unit / choice.groups, group = unit % choice.groups;
        float *sum = scratch.take(rows * kp), *delta = scratch.take(whole_vectors(rows));
        float *query = scratch.take(TILE * kp), *found = scratch.take(TILE * kp), *up = scratch.take(TILE * vp);
        float *output = scratch.take(TILE * vp), *p = scratch.take(TILE * SPAN), *ds = scratch.take(TILE * SPAN);
        float *key = scratch.take(SPAN * kp), *key_turned = scratch.take(SPAN * kp), *value = scratch.take(SPAN * vp);
        float* value_turned = scratch.take(SPAN * vp);
        float *dkeys = scratch.take(choice.tokens * kp), *dvalues = scratch.take(choice.tokens * vp);
        const Visits visits(choice, unit, scratch);
        std::memset(sum, 0, sizeof(float) * rows * kp);
        std::memset(dkeys, 0, sizeof(float) * choice.tokens * kp);
        std::memset(dvalues, 0, sizeof(float) * choice.tokens * vp);
        for (long i = 0; i < rows; ++i) {
            const std::int32_t row = static_cast<std::int32_t>(i);
            gather(choice, operands, GRAD, unit, &row, 1, choice.values, up, vp);
            gather(choice, operands, OUT, unit, &row, 1, choice.values, output, vp);
            delta[i] = ::sum(dot_lanes(up, output, vp));
        }
        const auto keys = operands.in(K, batch, group), values = operands.in(V, batch, group);
        const float* logs = operands.lse + (batch * choice.heads + group * choice.shared()) * choice.queries;  // by row
        each_part(choice, visits, [&](long c, KeyPart part) {
            read_turned(keys, part.first, part.cols, choice.keys, kp, SPAN, key, key_turned);
            read_turned(values, part.first, part.cols, choice.values, vp, SPAN, value, value_turned);
            for (long e = visits.begin[c]; e < visits.begin[c + 1]; e += TILE) {
                const long n = std::min<long>(TILE, visits.begin[c + 1] - e);
                const std::int32_t* at = visits.rows + e;
                gather(choice, operands, Q, unit, at, n, choice.keys, query, kp);
                scale_rows(query, n, kp, choice.scale);
                gather(choice, operands, GRAD, unit, at, n, choice.values, up, vp);
                gemm<false>(n, part.width, choice.keys, query, kp, 1, key_turned, SPAN, p, SPAN);
                hide_later(choice, unit, at, n, part, p);
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
        for (long r = 0; r < choice.shared(); ++r)
            write(sum + r * choice.queries * kp, kp, operands.out(DQ, batch, group * choice.shared() + r), 0,
                  choice.queries, choice.keys);
        write(dkeys, kp, operands.out(DK, batch, group), 0, choice.tokens, choice.keys);
        write(dvalues, vp, operands.out(DV, batch, group), 0, choice.tokens, choice.values);
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
