// The gradients of causal normalized linear attention, recomputed from its inputs and outputs.
// With f = phi(q), h = phi(k), b_i the denominator and g_i = dL/do_i: dn_i = g_i / b_i, db_i = -(g_i.o_i) / b_i, and
//   df_i = sum_{j<=i} (dn_i.v_j + db_i) h_j,   dh_j = sum_{i>=j} (dn_i.v_j + db_i) f_i,   dv_j = sum_{i>=j} (f_i.h_j) dn_i,
// so that df needs a forward sum, of v h^T and h, and dh and dv a backward sum, of f dn^T and db f.
// Source: Katharopoulos et al. 2020 (2006.16236), eqs 13-15, with the normalizer and the feature map's slope added.
#include "rows.h"

namespace {

template <class T>
struct Backward {
    Call call;
    Tensor<const T> q, k, v, out, grad;
    Tensor<T> dq, dk, dv;
    const float* below;  // (B, H, N): the denominators, eps included

    long packed() const { return C * (2 * call.kp() + 3 * call.vp()); }
    long scratch() const { return C * (5 * call.kp() + call.vp() + 2 * C + W + 1) + packed(); }
    // The forward sums are s (E, kp) of v h^T and z (kp) of h. The backward sums, r (D, vp) of f dn^T and w (kp) of db f,
    // are the gradient of the state.
    long ahead_matrix() const { return call.values * call.kp(); }
    long back_matrix() const { return call.keys * call.vp(); }
    long ahead_size() const { return ahead_matrix() + call.kp(); }
    long back_size() const { return back_matrix() + call.kp(); }

    // C tokens of a head before the feature map: q and k (C, kp), v, out and grad (C, vp).
    struct Chunk {
        float *q, *k, *v, *out, *grad;
    };

    // Loads a chunk of a row: keys and values, or queries, outputs and gradients, or all.
    Chunk enter(Tokens at, bool keys, bool queries, Scratch& scratch) const {
        const long kp = call.kp(), vp = call.vp();
        const Chunk chunk{scratch.take(C * kp), scratch.take(C * kp), scratch.take(C * vp), scratch.take(C * vp),
                          scratch.take(C * vp)};
        if (keys) pack(call.of(k, at.row), at, call.keys, nullptr, chunk.k, kp, same);
        if (keys) pack(call.of(v, at.row), at, call.values, call.mask_of(at.row), chunk.v, vp, same);
        if (queries) pack(call.of(q, at.row), at, call.keys, nullptr, chunk.q, kp, same);
        if (queries) pack(call.of(out, at.row), at, call.values, nullptr, chunk.out, vp, same);
        if (queries) pack(call.of(grad, at.row), at, call.values, nullptr, chunk.grad, vp, same);
        return chunk;
    }

    // The features of keys (n, kp), 0 for masked tokens.
    void key_features(long row, long begin, long n, const float* raw, float* fk) const {
        features(call.map, raw, fk, n, call.keys, call.kp());
        clear_masked(call.mask_of(row), begin, n, fk, call.kp());
    }

    // Gradients (n, vp) become dn; -> db (n). lanes (C, W) is scratch memory.
    void divide(long row, long begin, long n, const Chunk& chunk, float* db, float* lanes) const {
        const long vp = call.vp();
        for (long i = 0; i < n; ++i) {
            const vec scale = splat(1.0f / below[row * call.tokens + begin + i]);
            float* dn = chunk.grad + i * vp;
            for (long j = 0; j < vp; j += W) store(dn + j, load(dn + j) * scale);
            store(lanes + i * W, -dot_lanes(dn, chunk.out + i * vp, vp));
        }
        sum_lanes(lanes, n, db);
    }

    // dq of n tokens of a row, given s and z, which are updated. Without READ only the sums are.
    template <bool READ>
    void ahead(Tokens at, Tokens next, float* s, float* z, Scratch scratch) const {
        const long row = at.row, begin = at.begin, n = at.n;
        const long keys = call.keys, values = call.values, kp = call.kp(), vp = call.vp();
        stage(reading);
        const Chunk chunk = enter(at, true, READ, scratch);
        float *fk = scratch.take(C * kp), *fq = scratch.take(C * kp), *df = scratch.take(C * kp);
        float *turned = scratch.take(C * vp), *p = scratch.take(C * C), *lanes = scratch.take(C * W);
        float* db = scratch.take(C);
        fetch(call.of(k, next.row), next, keys);
        stage(mapping);
        key_features(row, begin, n, chunk.k, fk);
        if (READ) {
            const Rows<T> queries = call.of(dq, row);
            divide(row, begin, n, chunk, db, lanes);
            fetch(call.of(q, next.row), next, keys);
            stage(scoring);
            transpose(chunk.v, vp, turned, C, whole_vectors(n), vp);
            lower_product(n, values, chunk.grad, vp, turned, C, p, C);
            finish_lower(p, n, db, nullptr);
            fetch(call.of(out, next.row), next, values);
            stage(from_state);
            gemm<false>(n, kp, values, chunk.grad, vp, 1, s, kp, df, kp);
            stage(within_chunk);
            fetch(queries, at, keys);
            lower_times(n, kp, p, C, fk, kp, df, kp);
            fetch(call.of(grad, next.row), next, values);
            stage(mapping);
            for (long i = 0; i < n; ++i)
                for (long j = 0; j < kp; j += W) store(df + i * kp + j, load(df + i * kp + j) + load(z + j) * db[i]);
            features(call.map, chunk.q, fq, n, keys, kp);
            slopes(call.map, df, chunk.q, fq, n * kp);
            stage(writing);
            write(df, kp, queries, begin, n, keys);
        }
        stage(updating);
        fetch(call.of(v, next.row), next, values);
        gemm<true>(values, kp, n, chunk.v, 1, vp, fk, kp, s, kp);
        add_rows(fk, n, kp, z);
        stage(states);
    }

    // dk and dv of n tokens of a row, given r and w after them, which are updated. Without READ only the sums are.
    template <bool READ>
    void back(Tokens at, Tokens next, float* r, float* w, Scratch scratch) const {
        const long row = at.row, begin = at.begin, n = at.n;
        stage(reading);
        const Chunk chunk = enter(at, READ, true, scratch);
        const long keys = call.keys, values = call.values, kp = call.kp(), vp = call.vp(), np = whole_vectors(n);
        float *fk = scratch.take(C * kp), *fq = scratch.take(C * kp), *dh = scratch.take(C * kp);
        float *across = scratch.take(C * kp), *turned_k = scratch.take(C * kp), *turned_v = scratch.take(C * vp);
        float *a = scratch.take(C * C), *p = scratch.take(C * C), *lanes = scratch.take(C * W), *db = scratch.take(C);
        fetch(call.of(q, next.row), next, keys);
        stage(mapping);
        features(call.map, chunk.q, fq, n, keys, kp);
        fetch(call.of(out, next.row), next, values);
        divide(row, begin, n, chunk, db, lanes);
        if (READ) {
            const Rows<T> key_grads = call.of(dk, row), value_grads = call.of(dv, row);
            float *dn = chunk.grad, *outputs = chunk.out;  // reuse memory that is no longer needed
            key_features(row, begin, n, chunk.k, fk);
            stage(scoring);
            transpose(fk, kp, turned_k, C, np, kp);
            transpose(chunk.v, vp, turned_v, C, np, vp);
            lower_product(n, keys, fq, kp, turned_k, C, a, C);
            finish_lower(a, n, nullptr, nullptr);
            fetch(call.of(k, next.row), next, keys);
            lower_product(n, values, dn, vp, turned_v, C, p, C);
            finish_lower(p, n, db, nullptr);
            // dv = h r + a^T dn
            stage(from_state);
            gemm<false>(n, vp, keys, fk, kp, 1, r, vp, outputs, vp);
            stage(within_chunk);
            fetch(value_grads, at, values);
            upper_times(n, vp, a, C, dn, vp, outputs, vp);
            fetch(call.of(v, next.row), next, values);
            stage(writing);
            write(outputs, vp, value_grads, begin, n, values);
            stage(from_state);
            // dh^T = r v^T + f^T p, transposed to suit the layout of r
            gemm<false>(keys, np, values, r, vp, 1, turned_v, C, across, C);
            fetch(key_grads, at, keys);
            stage(within_chunk);
            for (long j = 0; j < np; j += W)
                gemm<true>(keys, W, n - j, fq + j * kp, 1, kp, p + j * C + j, C, across + j, C);
            transpose(across, C, dh, kp, kp, np);
            stage(mapping);
            for (long i = 0; i < n; ++i)
                for (long j = 0; j < kp; j += W) store(dh + i * kp + j, load(dh + i * kp + j) + load(w + j));
            slopes(call.map, dh, chunk.k, fk, n * kp);
            clear_masked(call.mask_of(row), begin, n, dh, kp);
            stage(writing);
            write(dh, kp, key_grads, begin, n, keys);
        }
        stage(updating);
        fetch(call.of(grad, next.row), next, values);
        gemm<true>(keys, vp, n, fq, 1, kp, chunk.grad, vp, r, vp);
        for (long j = 0; j < kp; j += W) {
            vec acc = load(w + j);
            for (long i = 0; i < n; ++i) acc += load(fq + i * kp + j) * db[i];
            store(w + j, acc);
        }
        stage(states);
    }

    // One unit from start to end; the sums of row r are at sums + r * stride.
    template <bool READ>
    void run_ahead(const Units& units, long unit, float* sums, long stride, Scratch scratch) const {
        const Part part = units.tokens(unit);
        const std::int64_t* segments = call.segments_of(units.first_row(unit));
        for (long begin = part.begin, end; begin < part.end; begin = end) {
            end = chunk_end(segments, begin, part.end);
            const Part after{end, end + C < part.end ? end + C : part.end};
            units.each_row(unit, {begin, end}, after, [&](Tokens at, Tokens next) {
                float* s = sums + at.row * stride;
                if (starts_anew(segments, begin)) std::memset(s, 0, sizeof(float) * ahead_size());
                ahead<READ>(at, next, s, s + ahead_matrix(), scratch);
            });
        }
        stage(waiting);
    }

    // One unit from end to start.
    template <bool READ>
    void run_back(const Units& units, long unit, float* sums, long stride, Scratch scratch) const {
        const Part part = units.tokens(unit);
        const std::int64_t* segments = call.segments_of(units.first_row(unit));
        for (long end = part.end, begin; end > part.begin; end = begin) {
            begin = chunk_begin(segments, part.begin, end);
            const bool border = end < call.tokens && starts_anew(segments, end);
            const Part after{begin - C > part.begin ? begin - C : part.begin, begin};
            units.each_row(unit, {begin, end}, after, [&](Tokens at, Tokens next) {
                float* r = sums + at.row * stride;
                if (border) std::memset(r, 0, sizeof(float) * back_size());
                back<READ>(at, next, r, r + back_matrix(), scratch);
            });
        }
        stage(waiting);
    }
};

template <class T>
int backward(const Backward<T>& pass, const float* first, const float* grad_last, float* grad_first, int threads) {
    const Call& call = pass.call;
    const Units units(call, threads);
    const long parts = units.parts, width = call.keys * (call.values + 1);
    const long ahead_size = pass.ahead_size(), ahead_matrix = pass.ahead_matrix(), ahead_stride = parts * ahead_size;
    const long back_size = pass.back_size(), back_matrix = pass.back_matrix(), back_stride = parts * back_size;
    // The initial sums of every part in its direction.
    Memory aheads(call.rows() * ahead_stride), backs(call.rows() * back_stride);
    bool failed = !aheads.ready() || !backs.ready();
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
                float *s = aheads.data() + row * ahead_stride, *r = backs.data() + (row + 1) * back_stride - back_size;
                const float* state = first ? first + row * width : nullptr;
                for (long d = 0; state && d < call.keys; ++d, state += call.values + 1) {
                    for (long e = 0; e < call.values; ++e) s[e * call.kp() + d] = state[e];
                    s[ahead_matrix + d] = state[call.values];
                }
                if (grad_last)
                    unpack_state(grad_last + row * width, call.keys, call.values, r, call.vp(), r + back_matrix);
                stage(waiting);
            }
            if (parts > 1) {
#pragma omp for schedule(static)
                for (long unit = 0; unit < units.count(); ++unit) {
                    const long part = units.part(unit);
                    if (part + 1 < parts)
                        pass.template run_ahead<false>(units, unit, aheads.data() + (part + 1) * ahead_size, ahead_stride,
                                                       memory.scratch());
                    if (part > 0)
                        pass.template run_back<false>(units, unit, backs.data() + (part - 1) * back_size, back_stride,
                                                      memory.scratch());
                }
#pragma omp for schedule(static)
                for (long row = 0; row < call.rows(); ++row) {
                    stage(states);
                    float *s = aheads.data() + row * ahead_stride, *r = backs.data() + row * back_stride;
                    for (long i = ahead_size; i < ahead_stride; ++i) s[i] += s[i - ahead_size];
                    for (long i = back_stride - back_size - 1; i >= 0; --i) r[i] += r[i + back_size];
                    stage(waiting);
                }
            }
#pragma omp for schedule(static)
            for (long unit = 0; unit < units.count(); ++unit) {
                const long part = units.part(unit);
                pass.template run_ahead<true>(units, unit, aheads.data() + part * ahead_size, ahead_stride,
                                              memory.scratch());
                pass.template run_back<true>(units, unit, backs.data() + part * back_size, back_stride, memory.scratch());
            }
            if (grad_first) {
#pragma omp for schedule(static)
                for (long row = 0; row < call.rows(); ++row) {
                    stage(states);
                    const float* r = backs.data() + row * back_stride;
                    pack_state(r, call.vp(), r + back_matrix, call.keys, call.values, grad_first + row * width);
                    stage(waiting);
                }
            }
        }
        stage(waiting);
    }
    return failed;
}

}  // namespace

// As longspan_linear_forward, with the strides of q, k, v, out, grad, dq, dk, dv in this order; grad_last (or null) and
// grad_first (or null) are the gradients of the last and of the first state.
extern "C" int longspan_linear_backward(const void* q, const void* k, const void* v, const void* out, const void* grad,
                                        void* dq, void* dk, void* dv, const float* below, const float* first,
                                        const float* grad_last, float* grad_first, const std::uint8_t* mask,
                                        const std::int64_t* segments, const long* strides, long batch, long heads,
                                        long tokens, long keys, long values, int map, int type, float eps, int threads) {
    const Call call{batch, heads, tokens, keys, values, map, eps, mask, segments};
    const auto pass = [&](auto element) {
        using T = decltype(element);
        const auto in = [&](const void* data, int i) {
            return Tensor<const T>{static_cast<const T*>(data), strides + 4 * i};
        };
        const auto to = [&](void* data, int i) { return Tensor<T>{static_cast<T*>(data), strides + 4 * i}; };
        const Backward<T> work{call,        in(q, 0),  in(k, 1),  in(v, 2),  in(out, 3),
                               in(grad, 4), to(dq, 5), to(dk, 6), to(dv, 7), below};
        return backward(work, first, grad_last, grad_first, threads);
    };
    return type == 0 ? pass(float{}) : pass(bfloat16{});
}
