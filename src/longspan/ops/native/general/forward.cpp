// The general delta rule over a whole sequence: P_t = Diag(alpha_t) S_{t-1}, S_t = P_t + k_t v_t^T - e_t (P_t^T r_t)^T, or
// with S_{t-1}^T r_t in its place, o_t = scale S_t^T q_t. One pass, C tokens at a time.
#include "chunk.h"

namespace {

template <class T>
struct Pass {
    const General& general;
    Vectors<T> operands;
    Tensor<T> out;
    float* starts;  // (B, H, spans, D, E): the state before each span; null without a backward pass

    const Gates& gates() const { return general.gates; }
    long matrix() const { return gates().keys * gates().vp(); }
    long scratch(long heads) const {
        return Piece::size(gates()) + heads * matrix() + C * gates().vp() + Vectors<T>::floats(gates());
    }

    // Some rows of one sequence, chunk by chunk for all of them, since heads are often adjacent.
    void run(long first_row, long last_row, const float* first, float* last, Scratch scratch) const {
        const Gates& gates = this->gates();
        const long size = gates.keys * gates.values, vp = gates.vp();
        const long sequence = first_row / gates.heads, tokens = gates.tokens_of(sequence);
        const std::int64_t* segments = gates.segments_of(sequence);
        stage(states);
        Piece piece(general, scratch);
        const Packed packed(gates, scratch);
        float *states = scratch.take((last_row - first_row) * matrix()), *o = scratch.take(C * vp);
        for (long row = first_row; row < last_row; ++row)
            load_state(first + row * size, gates.keys, gates.values, vp, states + (row - first_row) * matrix());
        for (long begin = 0, end; begin < tokens; begin = end) {
            const long span_end = begin / SPAN * SPAN + SPAN;
            end = chunk_end(segments, begin, span_end < tokens ? span_end : tokens);
            const Tokens after{first_row, end, tokens - end < C ? tokens - end : C};
            for (long row = first_row; row < last_row; ++row) {
                const Tokens at{row, begin, end - begin};
                stage(reading);
                // Value heads that share queries and keys are consecutive.
                if (row == first_row || row % (gates.heads / gates.key_heads) == 0) {
                    gather_queries(operands, gates, at, packed);
                    gather_keys(operands, gates, at, packed);
                }
                gather_values(operands, gates, at, packed);
                const Tokens next = row + 1 < last_row ? Tokens{row + 1, begin, at.n} : after;
                advance(piece, packed, at, next, states + (row - first_row) * matrix(), o);
            }
        }
        for (long row = first_row; row < last_row; ++row)
            save_state(states + (row - first_row) * matrix(), gates.keys, gates.values, vp, last + row * size);
    }

    // One chunk of one row, which updates the state s (D, vp). The next chunk is prefetched.
    void advance(Piece& piece, Packed packed, Tokens at, Tokens next, float* s, float* o) const {
        const Gates& gates = this->gates();
        const long row = at.row, vp = gates.vp(), size = gates.keys * gates.values;
        stage(states);
        const Rows<T> outputs = gates.of(out, row);
        if (starts && at.begin % SPAN == 0)
            save_state(s, gates.keys, gates.values, vp, starts + gates.start_of(row, at.begin / SPAN) * size);
        if (starts_anew(gates.segments_of(row / gates.heads), at.begin)) std::memset(s, 0, sizeof(float) * matrix());
        fetch(gates.of_keys(operands.q, next.row), next, gates.keys);
        fetch(gates.of_keys(operands.r, next.row), next, gates.keys);
        piece.enter(packed, row, at.begin, at.n, true);
        fetch(gates.of_keys(operands.k, next.row), next, gates.keys);
        fetch(gates.of_keys(operands.e, next.row), next, gates.keys);
        piece.solve(s);
        stage(from_state);
        gemm<false>(at.n, vp, gates.keys, piece.read, piece.kp, 1, s, vp, o, vp);
        stage(within_chunk);
        fetch(outputs, at, gates.values);
        lower_times(at.n, vp, piece.qk, C, piece.v, vp, o, vp);
        lower_times(at.n, vp, piece.qe, C, piece.w, vp, o, vp);
        fetch(gates.of(operands.v, next.row), next, gates.values);
        stage(writing);
        write(o, vp, outputs, at.begin, at.n, gates.values);
        piece.advance(s);
        stage(states);
    }
};

template <class T>
int forward(const Pass<T>& pass, const float* first, float* last, int threads) {
    const Gates& gates = pass.gates();
    // As few groups of heads as occupy all threads.
    long groups = 1;
    while (groups < gates.heads && gates.batch * groups < 8 * threads && gates.batch * groups % threads) ++groups;
    const long units = gates.batch * groups;
    bool failed = false;
#pragma omp parallel num_threads(threads) if (threads > 1 && units > 1)
    {
        stage(states);
        Memory memory(pass.scratch((gates.heads + groups - 1) / groups));
        if (!memory.ready()) failed = true;
        stage(waiting);
#pragma omp barrier
        if (!failed) {
            // Packed sequences may have any lengths.
#pragma omp for schedule(dynamic)
            for (long unit = 0; unit < units; ++unit) {
                const long from = unit % groups * gates.heads / groups, to = (unit % groups + 1) * gates.heads / groups;
                const long row = unit / groups * gates.heads;
                pass.run(row + from, row + to, first, last, memory.scratch());
                stage(waiting);
            }
        }
        stage(waiting);
    }
    return failed;
}

}  // namespace

// sizes: B, key heads, heads, N, D, E, whether to read before the decay. q, k, r, e (B,G,N,D), v, out (B,H,N,E), of type 0
// float or 1 bfloat16, log_decay (null, or (B,H,N,1|D)) float, with 4 strides each, in the order q, k, v, r, e, out,
// log_decay; first, last (B,H,D,E) and starts (null, or (B,H,spans,D,E)) float, contiguous; mask (B,N) bytes or null;
// segments (B,N) or null. decay: 0 none, 1 per head, 2 per channel. With offsets (B+1), else null, the B sequences are packed
// into one row of N tokens, and starts is (N / 512 + B,H,D,E). Returns 0, or 1 if memory runs out.
extern "C" int longspan_general_forward(const void* q, const void* k, const void* v, const void* r, const void* e, void* out,
                                        const float* log_decay, const float* first, float* last, float* starts,
                                        const std::uint8_t* mask, const std::int64_t* segments, const std::int64_t* offsets,
                                        const long* strides, const long* sizes, int decay, int type, float scale,
                                        int threads) {
    const General general{{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], decay, true, scale, mask, segments,
                           log_decay, nullptr, strides + 24, nullptr, offsets, false},
                          sizes[6] != 0};
    const auto pass = [&](auto element) {
        using T = decltype(element);
        const Pass<T> work{general,
                           {{static_cast<const T*>(q), strides},
                            {static_cast<const T*>(k), strides + 4},
                            {static_cast<const T*>(v), strides + 8},
                            {static_cast<const T*>(r), strides + 12},
                            {static_cast<const T*>(e), strides + 16}},
                           {static_cast<T*>(out), strides + 20},
                           starts};
        return forward(work, first, last, threads);
    };
    return type == 0 ? pass(float{}) : pass(bfloat16{});
}

// Tokens between two states of ``starts``.
extern "C" long longspan_general_span() { return SPAN; }
