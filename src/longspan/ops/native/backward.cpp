// The gradients of causal normalised linear attention, recomputed from its inputs with nothing stored but its outputs.
// With f = phi(q), h = phi(k), b_i the denominator and g_i = dL/do_i: dn_i = g_i / b_i, db_i = -(g_i.o_i) / b_i, and
//   df_i = sum_{j<=i} (dn_i.v_j + db_i) h_j,   dh_j = sum_{i>=j} (dn_i.v_j + db_i) f_i,   dv_j = sum_{i>=j} (f_i.h_j) dn_i,
// so that df needs a sum carried ahead, of v h^T and h, and dh and dv one carried back, of f dn^T and db f.
// Source: Katharopoulos et al. 2020 (2006.16236), eqs 13-15, with the normaliser and the feature map's slope added.
#include "rows.h"

namespace {

template <class T>
struct Backward {
    Call call;
    Tensor<const T> q, k, v, out, grad;
    Tensor<T> dq, dk, dv;
    const float* below;  // (B, H, N): the denominators, eps included

    long packed() const { return C * (2 * call.kp() + 3 * call.vp()); }
    long together() const { return heads_together(packed()); }
    long scratch() const { return C * (5 * call.kp() + call.vp() + 2 * C + W + 1) + together() * packed(); }
    // The sums carried ahead are s (E, kp) of v h^T and z (kp) of h; those carried back, r (D, vp) of f dn^T and w (kp)
    // of db f, are the gradient of the state.
    long ahead_matrix() const { return call.values * call.kp(); }
    long back_matrix() const { return call.keys * call.vp(); }
    long ahead_size() const { return ahead_matrix() + call.kp(); }
    long back_size() const { return back_matrix() + call.kp(); }

    // C tokens of a head as they were given: q and k (C, kp), v, out and grad (C, vp).
    struct Chunk {
        float *q, *k, *v, *out, *grad;
    };

    // All that ``heads`` rows need of n tokens, a chunk each: keys and values, or queries, outputs and gradients, or all.
    Chunk enter(long first, long heads, long begin, long n, bool keys, bool queries, float* memory) const {
        const long kp = call.kp(), vp = call.vp(), apart = packed();
        const std::uint8_t* mask = call.mask_of(first);
        const Chunk chunk{memory, memory + C * kp, memory + C * 2 * kp, memory + C * (2 * kp + vp),
                          memory + C * 2 * (kp + vp)};
        const auto same = [](vec x) { return x; };
        const Heads rows{first / call.heads, first % call.heads, heads};
        if (keys) pack(k, rows, begin, n, call.keys, nullptr, chunk.k, kp, apart, same);
        if (keys) pack(v, rows, begin, n, call.values, mask, chunk.v, vp, apart, same);
        if (queries) pack(q, rows, begin, n, call.keys, nullptr, chunk.q, kp, apart, same);
        if (queries) pack(out, rows, begin, n, call.values, nullptr, chunk.out, vp, apart, same);
        if (queries) pack(grad, rows, begin, n, call.values, nullptr, chunk.grad, vp, apart, same);
        return chunk;
    }
    Chunk next(const Chunk& chunk) const {
        const long apart = packed();
        return {chunk.q + apart, chunk.k + apart, chunk.v + apart, chunk.out + apart, chunk.grad + apart};
    }

    // The features of keys (n, kp), nothing where a token is masked.
    void key_features(long row, long begin, long n, const float* raw, float* fk) const {
        features(call.map, raw, fk, n, call.keys, call.kp());
        clear_masked(call.mask_of(row), begin, n, fk, call.kp());
    }

    // Gradients (n, vp) become dn; -> db (n). lanes (C, W) is room to work in.
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

    // dq of n tokens of a row, from s and z, which go on to include them. Without READ only they do.
    template <bool READ>
    void ahead(long row, long begin, long n, const Chunk& chunk, float* s, float* z, Scratch scratch) const {
        const long keys = call.keys, values = call.values, kp = call.kp(), vp = call.vp();
        float *fk = scratch.take(C * kp), *fq = scratch.take(C * kp), *df = scratch.take(C * kp);
        float *turned = scratch.take(C * vp), *p = scratch.take(C * C), *lanes = scratch.take(C * W);
        float* db = scratch.take(C);
        key_features(row, begin, n, chunk.k, fk);
        if (READ) {
            const Rows<T> queries(dq, row / call.heads, row % call.heads);
            divide(row, begin, n, chunk, db, lanes);
            transpose(chunk.v, vp, turned, C, whole_vectors(n), vp);
            lower_product(n, values, chunk.grad, vp, turned, C, p, C);
            finish_lower(p, n, db, nullptr);
            gemm<false>(n, kp, values, chunk.grad, vp, 1, s, kp, df, kp);
            fetch(queries, begin, n, keys);
            lower_times(n, kp, p, C, fk, kp, df, kp);
            for (long i = 0; i < n; ++i)
                for (long j = 0; j < kp; j += W) store(df + i * kp + j, load(df + i * kp + j) + load(z + j) * db[i]);
            features(call.map, chunk.q, fq, n, keys, kp);
            slopes(call.map, df, chunk.q, fq, n * kp);
            write(df, kp, queries, begin, n, keys);
        }
        gemm<true>(values, kp, n, chunk.v, 1, vp, fk, kp, s, kp);
        add_rows(fk, n, kp, z);
    }

    // dk and dv of n tokens of a row, from r and w after them, which go on to include them. Without READ only they do.
    template <bool READ>
    void back(long row, long begin, long n, const Chunk& chunk, float* r, float* w, Scratch scratch) const {
        const long keys = call.keys, values = call.values, kp = call.kp(), vp = call.vp(), np = whole_vectors(n);
        float *fk = scratch.take(C * kp), *fq = scratch.take(C * kp), *dh = scratch.take(C * kp);
        float *across = scratch.take(C * kp), *turned_k = scratch.take(C * kp), *turned_v = scratch.take(C * vp);
        float *a = scratch.take(C * C), *p = scratch.take(C * C), *lanes = scratch.take(C * W), *db = scratch.take(C);
        features(call.map, chunk.q, fq, n, keys, kp);
        divide(row, begin, n, chunk, db, lanes);
        if (READ) {
            const long batch = row / call.heads, head = row % call.heads;
            const Rows<T> key_grads(dk, batch, head), value_grads(dv, batch, head);
            float *dn = chunk.grad, *outputs = chunk.out;  // whose numbers are not needed any more
            key_features(row, begin, n, chunk.k, fk);
            transpose(fk, kp, turned_k, C, np, kp);
            transpose(chunk.v, vp, turned_v, C, np, vp);
            lower_product(n, keys, fq, kp, turned_k, C, a, C);
            finish_lower(a, n, nullptr, nullptr);
            lower_product(n, values, dn, vp, turned_v, C, p, C);
            finish_lower(p, n, db, nullptr);
            // dv = h r + a^T dn
            gemm<false>(n, vp, keys, fk, kp, 1, r, vp, outputs, vp);
            fetch(value_grads, begin, n, values);
            upper_times(n, vp, a, C, dn, vp, outputs, vp);
            write(outputs, vp, value_grads, begin, n, values);
            // dh^T = r v^T + f^T p, turned, since r lies right for that
            gemm<false>(keys, np, values, r, vp, 1, turned_v, C, across, C);
            fetch(key_grads, begin, n, keys);
            for (long j = 0; j < np; j += W)
                gemm<true>(keys, W, n - j, fq + j * kp, 1, kp, p + j * C + j, C, across + j, C);
            transpose(across, C, dh, kp, kp, np);
            for (long i = 0; i < n; ++i)
                for (long j = 0; j < kp; j += W) store(dh + i * kp + j, load(dh + i * kp + j) + load(w + j));
            slopes(call.map, dh, chunk.k, fk, n * kp);
            clear_masked(call.mask_of(row), begin, n, dh, kp);
            write(dh, kp, key_grads, begin, n, keys);
        }
        gemm<true>(keys, vp, n, fq, 1, kp, chunk.grad, vp, r, vp);
        for (long j = 0; j < kp; j += W) {
            vec acc = load(w + j);
            for (long i = 0; i < n; ++i) acc += load(fq + i * kp + j) * db[i];
            store(w + j, acc);
        }
    }

    // Calls use(row, chunk) for the rows of a unit, whose tokens begin ... end are read for some heads at a time.
    template <class F>
    void each_row(const Units& units, long unit, long begin, long end, bool keys, bool queries, float* memory,
                  F use) const {
        const long last = units.last_row(unit);
        for (long row = units.first_row(unit); row < last;) {
            const long heads = row + together() < last ? together() : last - row;
            Chunk chunk = enter(row, heads, begin, end - begin, keys, queries, memory);
            for (long i = 0; i < heads; ++i, ++row, chunk = next(chunk)) use(row, chunk);
        }
    }

    // One unit from its beginning to its end; its row r has its sums at sums + r * stride.
    template <bool READ>
    void run_ahead(const Units& units, long unit, float* sums, long stride, Scratch scratch) const {
        const Part part = units.tokens(unit);
        const std::int64_t* segments = call.segments_of(units.first_row(unit));
        float* memory = scratch.take(together() * packed());
        for (long begin = part.begin, end; begin < part.end; begin = end) {
            end = chunk_end(segments, begin, part.end);
            each_row(units, unit, begin, end, true, READ, memory, [&](long row, const Chunk& chunk) {
                float* s = sums + row * stride;
                if (starts_anew(segments, begin)) std::memset(s, 0, sizeof(float) * ahead_size());
                ahead<READ>(row, begin, end - begin, chunk, s, s + ahead_matrix(), scratch);
            });
        }
    }

    // The same from its end to its beginning.
    template <bool READ>
    void run_back(const Units& units, long unit, float* sums, long stride, Scratch scratch) const {
        const Part part = units.tokens(unit);
        const std::int64_t* segments = call.segments_of(units.first_row(unit));
        float* memory = scratch.take(together() * packed());
        for (long end = part.end, begin; end > part.begin; end = begin) {
            begin = chunk_begin(segments, part.begin, end);
            const bool border = end < call.tokens && starts_anew(segments, end);
            each_row(units, unit, begin, end, READ, true, memory, [&](long row, const Chunk& chunk) {
                float* r = sums + row * stride;
                if (border) std::memset(r, 0, sizeof(float) * back_size());
                back<READ>(row, begin, end - begin, chunk, r, r + back_matrix(), scratch);
            });
        }
    }
};

template <class T>
int backward(const Backward<T>& pass, const float* first, const float* grad_last, float* grad_first, int threads) {
    const Call& call = pass.call;
    const Units units(call, threads);
    const long parts = units.parts, width = call.keys * (call.values + 1);
    const long ahead_size = pass.ahead_size(), ahead_matrix = pass.ahead_matrix(), ahead_stride = parts * ahead_size;
    const long back_size = pass.back_size(), back_matrix = pass.back_matrix(), back_stride = parts * back_size;
    // The sums that every part begins with in its direction.
    Memory aheads(call.rows() * ahead_stride), backs(call.rows() * back_stride);
    bool failed = !aheads.ready() || !backs.ready();
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        Memory memory(pass.scratch());
        if (!memory.ready()) failed = true;
#pragma omp barrier
        if (!failed) {
#pragma omp for schedule(static)
            for (long row = 0; row < call.rows(); ++row) {
                float *s = aheads.data() + row * ahead_stride, *r = backs.data() + (row + 1) * back_stride - back_size;
                const float* state = first ? first + row * width : nullptr;
                for (long d = 0; state && d < call.keys; ++d, state += call.values + 1) {
                    for (long e = 0; e < call.values; ++e) s[e * call.kp() + d] = state[e];
                    s[ahead_matrix + d] = state[call.values];
                }
                if (grad_last)
                    unpack_state(grad_last + row * width, call.keys, call.values, r, call.vp(), r + back_matrix);
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
                    float *s = aheads.data() + row * ahead_stride, *r = backs.data() + row * back_stride;
                    for (long i = ahead_size; i < ahead_stride; ++i) s[i] += s[i - ahead_size];
                    for (long i = back_stride - back_size - 1; i >= 0; --i) r[i] += r[i + back_size];
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
                    const float* r = backs.data() + row * back_stride;
                    pack_state(r, call.vp(), r + back_matrix, call.keys, call.values, grad_first + row * width);
                }
            }
        }
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
