// The recurrence with decay and delta rule over a whole sequence: P_t = Diag(alpha_t) S_{t-1},
// S_t = P_t + beta_t k_t (v_t - P_t^T k_t)^T or P_t + k_t v_t^T, o_t = scale S_t^T q_t. One pass, C tokens at a time.
#include "gated.h"

namespace {

template <class T>
struct Pass {
    const Gates& gates;
    Tensor<const T> q, k, v;
    Tensor<T> out;
    float* starts;  // (B, H, spans, D, E): the state before each span; null where no backward pass follows

    static long scratch(const Gates& gates) { return Chunk::size(gates) + (gates.keys + C) * gates.vp(); }

    void run(long row, const float* first, float* last, Scratch scratch) const {
        const long batch = row / gates.heads, head = row % gates.heads, vp = gates.vp();
        const Rows<const T> queries(q, batch, gates.key_head(head)), keys(k, batch, gates.key_head(head));
        const Rows<const T> values(v, batch, head);
        const Rows<T> outputs(out, batch, head);
        const std::int64_t* segments = gates.segments_of(batch);
        Chunk chunk(gates, scratch);
        float *s = scratch.take(gates.keys * vp), *o = scratch.take(C * vp);
        const long size = gates.keys * gates.values;
        if (first)
            load_state(first + row * size, gates.keys, gates.values, vp, s);
        else
            std::memset(s, 0, sizeof(float) * gates.keys * vp);
        for (long begin = 0, end; begin < gates.tokens; begin = end) {
            if (starts && begin % SPAN == 0)
                save_state(s, gates.keys, gates.values, vp, starts + (row * spans(gates.tokens) + begin / SPAN) * size);
            const long span_end = begin / SPAN * SPAN + SPAN;
            end = chunk_end(segments, begin, span_end < gates.tokens ? span_end : gates.tokens);
            if (starts_anew(segments, begin)) std::memset(s, 0, sizeof(float) * gates.keys * vp);
            chunk.enter(queries, keys, values, row, begin, end - begin, true);
            fetch_tokens(queries, keys, values, gates, end, gates.tokens);
            chunk.solve(s);
            gemm<false>(chunk.n, vp, gates.keys, chunk.read, chunk.kp, 1, s, vp, o, vp);
            lower_times(chunk.n, vp, chunk.a, C, chunk.x, vp, o, vp);
            write(o, vp, outputs, begin, chunk.n, gates.values);
            chunk.advance(s);
        }
        save_state(s, gates.keys, gates.values, vp, last + row * size);
    }
};

template <class T>
int forward(const Pass<T>& pass, const float* first, float* last, int threads) {
    const Gates& gates = pass.gates;
    bool failed = false;
#pragma omp parallel num_threads(threads) if (threads > 1 && gates.rows() > 1)
    {
        Memory memory(pass.scratch(gates));
        if (!memory.ready()) failed = true;
#pragma omp barrier
        if (!failed) {
#pragma omp for schedule(static)
            for (long row = 0; row < gates.rows(); ++row) pass.run(row, first, last, memory.scratch());
        }
    }
    return failed;
}

}  // namespace

// sizes: B, key heads, heads, N, D, E. q, k (B,G,N,D), v, out (B,H,N,E), of type 0 float or 1 bfloat16, log_decay (null,
// or (B,H,N,1|D)) and beta (null, or (B,H,N,1)) float, with 4 strides each, in this order; first (or null), last (B,H,D,E)
// and starts (null, or (B,H,spans,D,E)) float, contiguous; mask (B,N) bytes or null; segments (B,N) or null. decay: 0
// none, 1 by head, 2 by channel. Returns 0, or 1 where memory is lacking.
extern "C" int longspan_gated_forward(const void* q, const void* k, const void* v, void* out, const float* log_decay,
                                      const float* beta, const float* first, float* last, float* starts,
                                      const std::uint8_t* mask, const std::int64_t* segments, const long* strides,
                                      const long* sizes, int decay, int type, float scale, int threads) {
    const Gates gates{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], decay, beta != nullptr, scale,
                      mask, segments, log_decay, beta, strides + 16, strides + 20};
    const auto pass = [&](auto element) {
        using T = decltype(element);
        const Pass<T> work{gates,
                           {static_cast<const T*>(q), strides},
                           {static_cast<const T*>(k), strides + 4},
                           {static_cast<const T*>(v), strides + 8},
                           {static_cast<T*>(out), strides + 12},
                           starts};
        return forward(work, first, last, threads);
    };
    return type == 0 ? pass(float{}) : pass(bfloat16{});
}

// Tokens between two states of ``starts``.
extern "C" long longspan_gated_span() { return SPAN; }
