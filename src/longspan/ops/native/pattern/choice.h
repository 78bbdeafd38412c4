// Softmax attention to keys that each query chooses: what the forms for blocks and for single tokens share.
#pragma once
#include "blocks.h"

namespace {

struct Choice {
    long batch, heads, groups, queries, tokens, keys, values, size, picks, choosers;
    const std::int64_t *at, *blocks;  // (B,N) positions; (B,choosers,N,picks) numbers of blocks, negative for none
    float scale;
    long all;  // blocks

    Choice(const long* sizes, const std::int64_t* at, const std::int64_t* blocks, float scale)
        : batch(sizes[0]), heads(sizes[1]), groups(sizes[2]), queries(sizes[3]), tokens(sizes[4]), keys(sizes[5]),
          values(sizes[6]), size(sizes[7]), picks(sizes[8]), choosers(sizes[9]), at(at), blocks(blocks), scale(scale),
          all((tokens + size - 1) / size) {}

    long kp() const { return whole_vectors(keys); }
    long vp() const { return whole_vectors(values); }
    long count() const { return all; }
    long shared() const { return heads / groups; }
    // Calls use(block) for the blocks of a query that have a token up to its position.
    template <class F>
    void each(long batch, long head, long token, F use) const {
        const long last = at[batch * queries + token];
        const std::int64_t* own = blocks + ((batch * choosers + head / (heads / choosers)) * queries + token) * picks;
        for (long s = 0; s < picks; ++s)
            if (own[s] >= 0 && own[s] < count() && own[s] * size <= last) use(own[s]);
    }
};

// Some queries of the heads that share a head of keys; each is a row, the queries of the first head first.
struct Section {
    const Choice& choice;
    long batch, group, begin, queries;

    // Number ``number`` of those of at most ``most`` rows, or of one token, that the queries begin ... end are cut into.
    Section(const Choice& choice, long unit, long begin, long end, long number, long most)
        : choice(choice), batch(unit / choice.groups), group(unit % choice.groups), begin(begin + number * tokens(choice, most)),
          queries(std::min(tokens(choice, most), end - this->begin)) {}
    static long tokens(const Choice& choice, long most) {
        return std::max(1L, std::min(choice.queries, most / choice.shared()));
    }
    static long count(const Choice& choice, long queries, long most) {
        return (queries + tokens(choice, most) - 1) / tokens(choice, most);
    }

    long rows() const { return choice.shared() * queries; }
    long head(long row) const { return group * choice.shared() + row / queries; }
    long token(long row) const { return begin + row % queries; }
    std::int64_t at(long row) const { return choice.at[batch * choice.queries + token(row)]; }
    // The first number of a row in what is laid out as (B,H,N).
    long place(long row) const { return (batch * choice.heads + head(row)) * choice.queries + token(row); }
};

// The rows that visit each block, in ascending order: rows[e] for e in begin[c] ... begin[c + 1].
struct Visits {
    std::int32_t *begin, *rows;
    long count;  // blocks up to the last that is visited

    // Floats, which hold as many 32-bit numbers.
    static long floats(const Choice& c, long most) { return whole_vectors(c.count() + 1) + room(c, most); }

    Visits(const Section& section, long most, Scratch& scratch)
        : begin(reinterpret_cast<std::int32_t*>(scratch.take(whole_vectors(section.choice.count() + 1)))),
          rows(reinterpret_cast<std::int32_t*>(scratch.take(room(section.choice, most)))), count(0) {
        const Choice& choice = section.choice;
        const auto each = [&](long row, auto use) { choice.each(section.batch, section.head(row), section.token(row), use); };
        std::memset(begin, 0, sizeof(std::int32_t) * (choice.count() + 1));
        for (long row = 0; row < section.rows(); ++row)
            each(row, [&](long block) { ++begin[block], count = std::max(count, block + 1); });
        for (long c = 0, total = 0; c <= count; ++c) total += begin[c], begin[c] = static_cast<std::int32_t>(total);
        // Filled from the end, after which begin[c] is the start of a block.
        for (long row = section.rows() - 1; row >= 0; --row)
            each(row, [&](long block) { rows[--begin[block]] = static_cast<std::int32_t>(row); });
    }

   private:
    static long room(const Choice& c, long most) { return whole_vectors(c.shared() * Section::tokens(c, most) * c.picks); }
};

// The operands of a pass, of one element type: q (B,H,N,D), k (B,G,M,D), v (B,G,M,E), out (B,H,N,E), and backward grad,
// dq, dk, dv, with 4 strides each, in this order; lse (B,H,N) float, contiguous.
template <class T>
struct Operands {
    void* const* data;
    const long* strides;
    float* lse;
    Rows<const T> in(long i, long batch, long head) const {
        return Rows<const T>(Tensor<const T>{static_cast<const T*>(data[i]), strides + 4 * i}, batch, head);
    }
    Rows<T> out(long i, long batch, long head) const {
        return Rows<T>(Tensor<T>{static_cast<T*>(data[i]), strides + 4 * i}, batch, head);
    }
};
enum Operand { Q, K, V, OUT, GRAD, DQ, DK, DV };

// What is laid out like the queries: the rows of a section (rows, whole vectors of width).
template <class T>
void read_section(const Operands<T>& operands, Operand i, const Section& section, long width, float* out) {
    for (long row = 0; row < section.rows(); row += section.queries)
        read(operands.in(i, section.batch, section.head(row)), section.begin, section.queries, width,
             out + row * whole_vectors(width), whole_vectors(width));
}
template <class T>
void write_section(const float* x, const Operands<T>& operands, Operand i, const Section& section, long width) {
    for (long row = 0; row < section.rows(); row += section.queries)
        write(x + row * whole_vectors(width), whole_vectors(width), operands.out(i, section.batch, section.head(row)),
              section.begin, section.queries, width);
}

// Runs a pass on operands of type 0 float or 1 bfloat16. Returns 0, or 1 if memory runs out.
template <template <class> class Pass, class... More>
int run_pass(const Choice& choice, void* const* data, const long* strides, float* lse, int type, int threads, More... more) {
    if (type == 0) return each_unit(Pass<float>{choice, {data, strides, lse}, more...}, threads);
    return each_unit(Pass<bfloat16>{choice, {data, strides, lse}, more...}, threads);
}

}  // namespace
