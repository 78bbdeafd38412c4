// Causal normalized linear attention over a whole sequence: feature map, sums, mask and normalizer in one pass over the
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
    long scratch() const { return C * (3 * call.kp() + 2 * call.vp() + C + W + 1); }

    // Tokens of a row, given the sums s (D, vp) and z (kp), which are updated. Without READ only the sums are. The next
    // tokens are prefetched.
    template <bool READ>
    void advance(Tokens at, Tokens next, float* s, float* z, Scratch scratch) const {
        const long n = at.n, keys = call.keys, values = call.values, kp = call.kp(), vp = call.vp();
        const std::uint8_t* mask = call.mask_of(at.row);
        float *fq = scratch.take(C * kp), *fk = scratch.take(C * kp), *v = scratch.take(C * vp);
        stage(reading);
        with_map(call.map, [&](auto map) {
            pack(call.of(this->k, at.row), at, keys, mask, fk, kp, map);
            if (READ) pack(call.of(q, at.row), at, keys, nullptr, fq, kp, map);
        });
        pack(call.of(this->v, at.row), at, values, mask, v, vp, same);
        fetch(call.of(this->k, next.row), next, keys);
        if (READ) {
            const Rows<T> outputs = call.of(out, at.row);
            float *turned = scratch.take(kp * C), *o = scratch.take(C * vp), *scores = scratch.take(C * C);
            float *lanes = scratch.take(C * W), *sums = scratch.take(C);
            stage(scoring);
            transpose(fk, kp, turned, C, whole_vectors(n), kp);
            for (long i = 0; i < n; ++i) store(lanes + i * W, dot_lanes(fq + i * kp, z, kp));
            lower_product(n, keys, fq, kp, turned, C, scores, C);
            finish_lower(scores, n, nullptr, lanes);
            sum_lanes(lanes, n, sums);
            fetch(call.of(q, next.row), next, keys);
            stage(from_state);
            gemm<false>(n, vp, keys, fq, kp, 1, s, vp, o, vp);
            stage(within_chunk);
            fetch(outputs, at, values);
            lower_times(n, vp, scores, C, v, vp, o, vp);
            stage(writing);
            for (long i = 0; i < n; ++i) {
                const float denominator = divisor(sums[i] + call.eps);
                below[at.row * call.tokens + at.begin + i] = denominator;
                const vec scale = splat(1.0f / denominator);
                for (long j = 0; j < vp; j += W) store(o + i * vp + j, load(o + i * vp + j) * scale);
            }
            write(o, vp, outputs, at.begin, n, values);
        }
        stage(updating);
        fetch(call.of(this->v, next.row), next, values);
        gemm<true>(keys, vp, n, fk, 1, kp, v, vp, s, vp);
        add_rows(fk, n, kp, z);
        stage(states);
    }

    // One unit; the sums of row r are at sums + r * stride.
    template <bool READ>
    void run(const Units& units, long unit, float* sums, long stride, Scratch scratch) const {
        const Part part = units.tokens(unit);
        const std::int64_t* segments = call.segments_of(units.first_row(unit));
        for (long begin = part.begin, end; begin < part.end; begin = end) {
            end = chunk_end(segments, begin, part.end);
            const Part after{end, end + C < part.end ? end + C : part.end};
            units.each_row(unit, {begin, end}, after, [&](Tokens at, Tokens next) {
                float* s = sums + at.row * stride;
                if (starts_anew(segments, begin)) std::memset(s, 0, sizeof(float) * size());
                advance<READ>(at, next, s, s + matrix(), scratch);
            });
        }
        stage(waiting);
    }
};

template <class T>
int forward(const Forward<T>& pass, const float* first, float* last, int threads) {
    const Call& call = pass.call;
    const Units units(call, threads);
    const long size = pass.size(), stride = units.parts * size, width = call.keys * (call.values + 1);
    // The initial sums of every part.
    Memory sums(call.rows() * stride);
    bool failed = !sums.ready();
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        stage(states);
        Memory memory(pass.scratch());
        if (!memory.ready()) failed = true;
        stage(waiting);
#pragma omp barrier
        if (!failed) {
#pragma omp for schedule(static)
            for (long row = 0; row < call.rows(); ++row) {
                stage(states);
                float* s = sums.data() + row * stride;
                if (first) unpack_state(first + row * width, call.keys, call.values, s, call.vp(), s + pass.matrix());
                stage(waiting);
            }
            if (units.parts > 1) {
#pragma omp for schedule(static)
                for (long unit = 0; unit < units.count(); ++unit)
                    if (units.part(unit) + 1 < units.parts)
                        pass.template run<false>(units, unit, sums.data() + (units.part(unit) + 1) * size, stride,
                                                 memory.scratch());
#pragma omp for schedule(static)
                for (long row = 0; row < call.rows(); ++row) {
                    stage(states);
                    for (float* s = sums.data() + row * stride + size; s < sums.data() + (row + 1) * stride; ++s)
                        *s += s[-size];
                    stage(waiting);
                }
            }
#pragma omp for schedule(static)
            for (long unit = 0; unit < units.count(); ++unit)
                pass.template run<true>(units, unit, sums.data() + units.part(unit) * size, stride, memory.scratch());
#pragma omp for schedule(static)
            for (long row = 0; row < call.rows(); ++row) {
                stage(states);
                const float* s = sums.data() + (row + 1) * stride - size;
                pack_state(s, call.vp(), s + pass.matrix(), call.keys, call.values, last + row * width);
                stage(waiting);
            }
        }
        stage(waiting);
    }
    return failed;
}

}  // namespace

// q, k (B,H,N,D), v, out (B,H,N,E), of type 0 float or 1 bfloat16, with 4 strides each, in this order; below (B,H,N),
// first (or null) and last (B,H,D,E+1) float, contiguous; mask (B,N) bytes or null; segments (B,N) or null. Returns 0, or
// 1 if memory runs out.
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
