// Causal normalised linear attention over a whole sequence: feature map, sums, mask and normaliser in one pass over the
// tokens, C of them at a time. With f = phi(q), h = phi(k): o_i = sum_{j<=i} (f_i.h_j) v_j / (eps + sum_{j<=i} f_i.h_j).
// Source: Katharopoulos et al. 2020 (2006.16236), eqs 9-12.
#include "rows.h"

namespace {

template <class T>
struct Forward {
    Call call;
    Tensor<const T> q, k, v;
    Tensor<T> out;
    float* below;  // (B, H, N): the denominators, eps included

    long matrix() const { return call.keys * call.vp(); }
    long size() const { return matrix() + call.kp(); }
    long packed() const { return C * (2 * call.kp() + call.vp()); }
    long together() const { return heads_together(packed()); }
    long scratch() const { return C * (call.kp() + call.vp() + C + W + 1) + together() * packed(); }

    // C tokens of a head: features of queries and keys (C, kp), values (C, vp).
    struct Chunk {
        float *q, *k, *v;
    };

    // All that ``heads`` rows need of n tokens, a chunk each.
    template <bool READ>
    Chunk enter(long first, long heads, long begin, long n, float* memory) const {
        const long kp = call.kp(), vp = call.vp(), apart = packed();
        const Chunk chunk{memory + C * (kp + vp), memory, memory + C * kp};
        const std::uint8_t* mask = call.mask_of(first);
        const Heads rows{first / call.heads, first % call.heads, heads};
        with_map(call.map, [&](auto map) {
            pack(k, rows, begin, n, call.keys, mask, chunk.k, kp, apart, map);
            if (READ) pack(q, rows, begin, n, call.keys, nullptr, chunk.q, kp, apart, map);
        });
        pack(v, rows, begin, n, call.values, mask, chunk.v, vp, apart, [](vec x) { return x; });
        return chunk;
    }

    // n tokens of a row, from the sums s (D, vp) and z (kp), which go on to include them. Without READ only they do.
    template <bool READ>
    void advance(long row, long begin, long n, Chunk chunk, float* s, float* z, Scratch scratch) const {
        const long keys = call.keys, values = call.values, kp = call.kp(), vp = call.vp();
        if (READ) {
            const Rows<T> outputs(out, row / call.heads, row % call.heads);
            float *turned = scratch.take(kp * C), *o = scratch.take(C * vp), *scores = scratch.take(C * C);
            float *lanes = scratch.take(C * W), *sums = scratch.take(C);
            transpose(chunk.k, kp, turned, C, whole_vectors(n), kp);
            for (long i = 0; i < n; ++i) store(lanes + i * W, dot_lanes(chunk.q + i * kp, z, kp));
            lower_product(n, keys, chunk.q, kp, turned, C, scores, C);
            finish_lower(scores, n, nullptr, lanes);
            sum_lanes(lanes, n, sums);
            gemm<false>(n, vp, keys, chunk.q, kp, 1, s, vp, o, vp);
            fetch(outputs, begin, n, values);
            lower_times(n, vp, scores, C, chunk.v, vp, o, vp);
            for (long i = 0; i < n; ++i) {
                const float denominator = sums[i] + call.eps;
                below[row * call.tokens + begin + i] = denominator;
                const vec scale = splat(1.0f / denominator);
                for (long j = 0; j < vp; j += W) store(o + i * vp + j, load(o + i * vp + j) * scale);
            }
            write(o, vp, outputs, begin, n, values);
        }
        gemm<true>(keys, vp, n, chunk.k, 1, kp, chunk.v, vp, s, vp);
        add_rows(chunk.k, n, kp, z);
    }

    // One unit, whose row r has its sums at sums + r * stride.
    template <bool READ>
    void run(const Units& units, long unit, float* sums, long stride, Scratch scratch) const {
        const long last = units.last_row(unit);
        const Part part = units.tokens(unit);
        const std::int64_t* segments = call.segments_of(units.first_row(unit));
        float* memory = scratch.take(together() * packed());
        for (long begin = part.begin, end; begin < part.end; begin = end) {
            end = chunk_end(segments, begin, part.end);
            for (long first = units.first_row(unit), next; first < last; first = next) {
                next = first + together() < last ? first + together() : last;
                Chunk chunk = enter<READ>(first, next - first, begin, end - begin, memory);
                for (long row = first; row < next; ++row) {
                    float* s = sums + row * stride;
                    if (starts_anew(segments, begin)) std::memset(s, 0, sizeof(float) * size());
                    advance<READ>(row, begin, end - begin, chunk, s, s + matrix(), scratch);
                    chunk = {chunk.q + packed(), chunk.k + packed(), chunk.v + packed()};
                }
            }
        }
    }
};

template <class T>
int forward(const Forward<T>& pass, const float* first, float* last, int threads) {
    const Call& call = pass.call;
    const Units units(call, threads);
    const long size = pass.size(), stride = units.parts * size, width = call.keys * (call.values + 1);
    // The sums that every part begins with.
    Memory sums(call.rows() * stride);
    bool failed = !sums.ready();
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        Memory memory(pass.scratch());
        if (!memory.ready()) failed = true;
#pragma omp barrier
        if (!failed) {
#pragma omp for schedule(static)
            for (long row = 0; row < call.rows(); ++row) {
                float* s = sums.data() + row * stride;
                if (first) unpack_state(first + row * width, call.keys, call.values, s, call.vp(), s + pass.matrix());
            }
            if (units.parts > 1) {
#pragma omp for schedule(static)
                for (long unit = 0; unit < units.count(); ++unit)
                    if (units.part(unit) + 1 < units.parts)
                        pass.template run<false>(units, unit, sums.data() + (units.part(unit) + 1) * size, stride,
                                                 memory.scratch());
#pragma omp for schedule(static)
                for (long row = 0; row < call.rows(); ++row)
                    for (float* s = sums.data() + row * stride + size; s < sums.data() + (row + 1) * stride; ++s)
                        *s += s[-size];
            }
#pragma omp for schedule(static)
            for (long unit = 0; unit < units.count(); ++unit)
                pass.template run<true>(units, unit, sums.data() + units.part(unit) * size, stride, memory.scratch());
#pragma omp for schedule(static)
            for (long row = 0; row < call.rows(); ++row) {
                const float* s = sums.data() + (row + 1) * stride - size;
                pack_state(s, call.vp(), s + pass.matrix(), call.keys, call.values, last + row * width);
            }
        }
    }
    return failed;
}

}  // namespace

// q, k (B,H,N,D), v, out (B,H,N,E), of type 0 float or 1 bfloat16, with 4 strides each, in this order; below (B,H,N),
// first (or null) and last (B,H,D,E+1) float, contiguous; mask (B,N) bytes or null; segments (B,N) or null. Returns 0, or
// 1 where memory is lacking.
extern "C" int longspan_linear_forward(const void* q, const void* k, const void* v, void* out, float* below,
                                       const float* first, float* last, const std::uint8_t* mask,
                                       const std::int64_t* segments, const long* strides, long batch, long heads,
                                       long tokens, long keys, long values, int map, int type, float eps, int threads) {
    const Call call{batch, heads, tokens, keys, values, map, eps, mask, segments};
    const auto pass = [&](auto element) {
        using T = decltype(element);
        const Forward<T> work{call,
                              {static_cast<const T*>(q), strides},
                              {static_cast<const T*>(k), strides + 4},
                              {static_cast<const T*>(v), strides + 8},
                              {static_cast<T*>(out), strides + 12},
                              below};
        return forward(work, first, last, threads);
    };
    return type == 0 ? pass(float{}) : pass(bfloat16{});
}
