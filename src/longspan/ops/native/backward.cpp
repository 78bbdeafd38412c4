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

    long scratch() const { return C * (6 * call.kp() + 4 * call.vp() + 2 * C + W + 1); }
    // The sums carried ahead are s (E, kp) of v h^T and z (kp) of h; those carried back, r (D, vp) of f dn^T and w (kp)
    // of db f, are the gradient of the state.
    long ahead_matrix() const { return call.values * call.kp(); }
    long back_matrix() const { return call.keys * call.vp(); }
    long ahead_size() const { return ahead_matrix() + call.kp(); }
    long back_size() const { return back_matrix() + call.kp(); }

    template <bool READ>
    void fetch_ahead(long row, long begin, long n) const {
        const long batch = row / call.heads, head = row % call.heads;
        fetch(Rows<const T>(k, batch, head), begin, n, call.keys);
        fetch(Rows<const T>(v, batch, head), begin, n, call.values);
        if (READ) {
            fetch(Rows<const T>(q, batch, head), begin, n, call.keys);
            fetch(Rows<const T>(out, batch, head), begin, n, call.values);
            fetch(Rows<const T>(grad, batch, head), begin, n, call.values);
            fetch(Rows<T>(dq, batch, head), begin, n, call.keys);
        }
    }

    template <bool READ>
    void fetch_back(long row, long begin, long n) const {
        const long batch = row / call.heads, head = row % call.heads;
        fetch(Rows<const T>(q, batch, head), begin, n, call.keys);
        fetch(Rows<const T>(out, batch, head), begin, n, call.values);
        fetch(Rows<const T>(grad, batch, head), begin, n, call.values);
        if (READ) {
            fetch(Rows<const T>(k, batch, head), begin, n, call.keys);
            fetch(Rows<const T>(v, batch, head), begin, n, call.values);
            fetch(Rows<T>(dk, batch, head), begin, n, call.keys);
            fetch(Rows<T>(dv, batch, head), begin, n, call.values);
        }
    }

    // The keys of a chunk, and what they were before the feature map; the values. Nothing where a token is masked.
    void read_keys(long row, long begin, long n, float* raw, float* fk, float* x) const {
        const long batch = row / call.heads, head = row % call.heads;
        read(Rows<const T>(k, batch, head), begin, n, call.keys, raw, call.kp());
        std::memcpy(fk, raw, sizeof(float) * n * call.kp());
        features(call.map, fk, n, call.keys, call.kp());
        read(Rows<const T>(v, batch, head), begin, n, call.values, x, call.vp());
        clear_masked(call.mask_of(row), begin, n, fk, call.kp());
        clear_masked(call.mask_of(row), begin, n, x, call.vp());
    }

    // dn (n, vp) and db (n); outputs (n, vp) and lanes (C, W) are room to work in.
    void read_grads(long row, long begin, long n, float* dn, float* db, float* outputs, float* lanes) const {
        const long batch = row / call.heads, head = row % call.heads, vp = call.vp();
        read(Rows<const T>(grad, batch, head), begin, n, call.values, dn, vp);
        read(Rows<const T>(out, batch, head), begin, n, call.values, outputs, vp);
        for (long i = 0; i < n; ++i) {
            const vec scale = splat(1.0f / below[row * call.tokens + begin + i]);
            for (long j = 0; j < vp; j += W) store(dn + i * vp + j, load(dn + i * vp + j) * scale);
            store(lanes + i * W, -dot_lanes(dn + i * vp, outputs + i * vp, vp));
        }
        sum_lanes(lanes, n, db);
    }

    // dq of n tokens of a row, from s and z, which go on to include them. Without READ only they do.
    template <bool READ>
    void ahead(long row, long begin, long n, float* s, float* z, Scratch scratch) const {
        const long keys = call.keys, values = call.values, kp = call.kp(), vp = call.vp();
        const long batch = row / call.heads, head = row % call.heads;
        float *raw = scratch.take(C * kp), *fk = scratch.take(C * kp), *fq = scratch.take(C * kp);
        float *df = scratch.take(C * kp), *x = scratch.take(C * vp), *turned = scratch.take(C * vp);
        float *dn = scratch.take(C * vp), *outputs = scratch.take(C * vp), *p = scratch.take(C * C);
        float *lanes = scratch.take(C * W), *db = scratch.take(C);
        read_keys(row, begin, n, raw, fk, x);
        if (READ) {
            read_grads(row, begin, n, dn, db, outputs, lanes);
            transpose(x, vp, turned, C, whole_vectors(n), vp);
            lower_product(n, values, dn, vp, turned, C, p, C);
            finish_lower(p, n, db, nullptr);
            gemm<false>(n, kp, values, dn, vp, 1, s, kp, df, kp);
            lower_times(n, kp, p, C, fk, kp, df, kp);
            for (long i = 0; i < n; ++i)
                for (long j = 0; j < kp; j += W) store(df + i * kp + j, load(df + i * kp + j) + load(z + j) * db[i]);
            read(Rows<const T>(q, batch, head), begin, n, keys, raw, kp);
            std::memcpy(fq, raw, sizeof(float) * n * kp);
            features(call.map, fq, n, keys, kp);
            slopes(call.map, df, raw, fq, n * kp);
            write(df, kp, Rows<T>(dq, batch, head), begin, n, keys);
        }
        gemm<true>(values, kp, n, x, 1, vp, fk, kp, s, kp);
        add_rows(fk, n, kp, z);
    }

    // dk and dv of n tokens of a row, from r and w after them, which go on to include them. Without READ only they do.
    template <bool READ>
    void back(long row, long begin, long n, float* r, float* w, Scratch scratch) const {
        const long keys = call.keys, values = call.values, kp = call.kp(), vp = call.vp(), np = whole_vectors(n);
        const long batch = row / call.heads, head = row % call.heads;
        float *raw = scratch.take(C * kp), *fk = scratch.take(C * kp), *fq = scratch.take(C * kp);
        float *dh = scratch.take(C * kp), *across = scratch.take(C * kp), *turned_k = scratch.take(C * kp);
        float *x = scratch.take(C * vp), *turned_v = scratch.take(C * vp), *dn = scratch.take(C * vp);
        float *outputs = scratch.take(C * vp), *a = scratch.take(C * C), *p = scratch.take(C * C);
        float *lanes = scratch.take(C * W), *db = scratch.take(C);
        read(Rows<const T>(q, batch, head), begin, n, keys, fq, kp);
        features(call.map, fq, n, keys, kp);
        read_grads(row, begin, n, dn, db, outputs, lanes);
        if (READ) {
            read_keys(row, begin, n, raw, fk, x);
            transpose(fk, kp, turned_k, C, np, kp);
            transpose(x, vp, turned_v, C, np, vp);
            lower_product(n, keys, fq, kp, turned_k, C, a, C);
            finish_lower(a, n, nullptr, nullptr);
            lower_product(n, values, dn, vp, turned_v, C, p, C);
            finish_lower(p, n, db, nullptr);
            // dv = h r + a^T dn
            gemm<false>(n, vp, keys, fk, kp, 1, r, vp, outputs, vp);
            upper_times(n, vp, a, C, dn, vp, outputs, vp);
            write(outputs, vp, Rows<T>(dv, batch, head), begin, n, values);
            // dh^T = r v^T + f^T p, turned, since r lies right for that
            gemm<false>(keys, np, values, r, vp, 1, turned_v, C, across, C);
            for (long j = 0; j < np; j += W)
                gemm<true>(keys, W, n - j, fq + j * kp, 1, kp, p + j * C + j, C, across + j, C);
            transpose(across, C, dh, kp, kp, np);
            for (long i = 0; i < n; ++i)
                for (long j = 0; j < kp; j += W) store(dh + i * kp + j, load(dh + i * kp + j) + load(w + j));
            slopes(call.map, dh, raw, fk, n * kp);
            clear_masked(call.mask_of(row), begin, n, dh, kp);
            write(dh, kp, Rows<T>(dk, batch, head), begin, n, keys);
        }
        gemm<true>(keys, vp, n, fq, 1, kp, dn, vp, r, vp);
        for (long j = 0; j < kp; j += W) {
            vec acc = load(w + j);
            for (long i = 0; i < n; ++i) acc += load(fq + i * kp + j) * db[i];
            store(w + j, acc);
        }
    }

    // One unit from its beginning to its end; its row r has its sums at sums + r * stride.
    template <bool READ>
    void run_ahead(const Units& units, long unit, float* sums, long stride, Scratch scratch) const {
        const long first = units.first_row(unit), last = units.last_row(unit);
        const Part part = units.tokens(unit);
        const std::int64_t* segments = call.segments_of(first);
        for (long begin = part.begin, end; begin < part.end; begin = end) {
            end = chunk_end(segments, begin, part.end);
            for (long row = first; row < last; ++row) {
                if (row + 1 < last)
                    fetch_ahead<READ>(row + 1, begin, end - begin);
                else
                    fetch_ahead<READ>(first, end, part.end - end < C ? part.end - end : C);
                float* s = sums + row * stride;
                if (starts_anew(segments, begin)) std::memset(s, 0, sizeof(float) * ahead_size());
                ahead<READ>(row, begin, end - begin, s, s + ahead_matrix(), scratch);
            }
        }
    }

    // The same from its end to its beginning.
    template <bool READ>
    void run_back(const Units& units, long unit, float* sums, long stride, Scratch scratch) const {
        const long first = units.first_row(unit), last = units.last_row(unit);
        const Part part = units.tokens(unit);
        const std::int64_t* segments = call.segments_of(first);
        for (long end = part.end, begin; end > part.begin; end = begin) {
            begin = chunk_begin(segments, part.begin, end);
            const bool border = end < call.tokens && starts_anew(segments, end);
            const long before = begin - part.begin < C ? begin - part.begin : C;
            for (long row = first; row < last; ++row) {
                if (row + 1 < last)
                    fetch_back<READ>(row + 1, begin, end - begin);
                else
                    fetch_back<READ>(first, begin - before, before);
                float* r = sums + row * stride;
                if (border) std::memset(r, 0, sizeof(float) * back_size());
                back<READ>(row, begin, end - begin, r, r + back_matrix(), scratch);
            }
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
