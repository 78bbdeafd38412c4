// The gradients of forward.cpp, from the last span to the first. The forward pass of a span is repeated, keeping the
// state before each chunk and the writes; then its chunks go backward. Source: the adjoint of the recurrence, with
// w_i = beta_i dr_i, where dr solves the transposed system: de = w, dB_ij = -w_i.x_j, dbeta_i = dr_i.e_i.
#include "chunk.h"

namespace {

// T: the type of the operands; K: that of the gradients of queries and keys.
template <class T, class K>
struct Pass {
    const Gates& gates;
    Operands<T> operands;
    Tensor<const T> grad;
    Tensor<K> dq, dk;
    Tensor<T> dv;
    Tensor<float> ddecay, dbeta;
    const float* starts;  // (B, H, spans, D, E)

    long kp() const { return gates.kp(); }
    long vp() const { return gates.vp(); }
    long matrix() const { return gates.keys * vp(); }
    long scratch() const {
        return Chunk::size(gates) + Operands<T>::floats(gates) + (SPAN / C + 5) * matrix() + 2 * vp() * kp() + SPAN * 2 * vp() +
               C * (4 * kp() + 3 * vp() + 2 * C + 1) + 2 * kp();
    }

    struct Work {
        float *after;                    // gradient of the state after the chunk (D, vp)
        float *kept, *errors, *written;  // states before chunks; e and x of the span
        float *turned_start, *turned_after;
        float *dout, *dx, *wn;           // (C, vp): gradients of outputs and of writes; -w
        float *dq, *plus, *minus, *out;  // (C, kp): the parts of the gradients, by the sign of G; that of left keys
        float *da, *db;                  // (C, C)
        float *ends, *carry;             // (kp)
        float* diagonal;                 // (C): of da
    };

    void head(long row, bool adds, float* grad_state, Scratch scratch) const {
        const long batch = row / gates.heads, tokens = gates.tokens_of(batch);
        const std::int64_t* segments = gates.segments_of(batch);
        Chunk chunk(gates, scratch);
        const Operand operand(gates, scratch);
        Work work;
        work.after = scratch.take(matrix());
        work.kept = scratch.take((SPAN / C + 3) * matrix());
        work.errors = scratch.take(SPAN * vp()), work.written = scratch.take(SPAN * vp());
        work.turned_start = scratch.take(vp() * kp()), work.turned_after = scratch.take(vp() * kp());
        for (float** p : {&work.dout, &work.dx, &work.wn}) *p = scratch.take(C * vp());
        for (float** p : {&work.dq, &work.plus, &work.minus, &work.out}) *p = scratch.take(C * kp());
        for (float** p : {&work.da, &work.db}) *p = scratch.take(C * C);
        work.ends = scratch.take(kp()), work.carry = scratch.take(kp());
        work.diagonal = scratch.take(C);
        const long size = gates.keys * gates.values;
        stage(states);
        load_state(grad_state + row * size, gates.keys, gates.values, vp(), work.after);
        for (long span = spans(tokens) - 1; span >= 0; --span) {
            const long from = span * SPAN, to = from + SPAN < tokens ? from + SPAN : tokens;
            // A chunk at the start of a segment starts from zeros, so segments need no more states.
            long cuts[SPAN + 1], count = 0, slots = 0;
            const float* before[SPAN];
            float* s = work.kept;
            load_state(starts + gates.start_of(row, span) * size, gates.keys, gates.values, vp(), s);
            for (long begin = from, end; begin < to; begin = end) {
                end = chunk_end(segments, begin, to);
                cuts[count] = begin;
                const bool anew = starts_anew(segments, begin);
                before[count++] = anew ? nullptr : s;
                float* next = anew ? s : work.kept + ++slots * matrix();
                if (anew)
                    std::memset(s, 0, sizeof(float) * matrix());
                else
                    std::memcpy(next, s, sizeof(float) * matrix());
                const Tokens at{row, begin, end - begin}, soon{row, end, to - end < C ? to - end : C};
                stage(reading);
                gather_keys(operands, gates, at, operand);
                gather_values(operands, gates, at, operand);
                chunk.enter(operand, row, begin, end - begin, false);
                fetch(gates.of_keys(operands.k, row), soon, gates.keys);
                chunk.solve(anew ? nullptr : s);
                fetch(gates.of(operands.v, row), soon, gates.values);
                stage(states);
                std::memcpy(work.errors + (begin - from) * vp(), chunk.e, sizeof(float) * chunk.n * vp());
                std::memcpy(work.written + (begin - from) * vp(), chunk.x, sizeof(float) * chunk.n * vp());
                chunk.advance(next);
                s = next;
            }
            cuts[count] = to;
            for (long i = count - 1; i >= 0; --i) {
                const long begin = cuts[i], n = cuts[i + 1] - begin, then = i ? cuts[i - 1] : begin;
                const Tokens at{row, begin, n}, soon{row, then, begin - then};
                stage(reading);
                gather_queries(operands, gates, at, operand);
                gather_keys(operands, gates, at, operand);
                gather_values(operands, gates, at, operand);
                fetch(gates.of_keys(operands.q, row), soon, gates.keys);
                chunk.enter(operand, row, begin, n, true);
                fetch(gates.of_keys(operands.k, row), soon, gates.keys);
                stage(states);
                std::memcpy(chunk.e, work.errors + (begin - from) * vp(), sizeof(float) * n * vp());
                std::memcpy(chunk.x, work.written + (begin - from) * vp(), sizeof(float) * n * vp());
                back(chunk, work, operand, before[i], row, begin, adds);
                fetch(gates.of(operands.v, row), soon, gates.values);
                fetch(gates.of(grad, row), soon, gates.values);
            }
        }
        save_state(work.after, gates.keys, gates.values, vp(), grad_state + row * size);
    }

    // One chunk; start: the state before it, null at the start of a segment.
    void back(Chunk& chunk, Work& work, const Operand& operand, const float* start, long row, long begin, bool adds) const {
        const long batch = row / gates.heads, n = chunk.n, kp = this->kp(), vp = this->vp();
        const long keys = gates.keys;
        stage(reading);
        read(gates.of(grad, row), begin, n, gates.values, work.dout, vp);
        for (long i = 0; gates.mask && i < n; ++i)
            if (gates.hidden(batch, begin + i)) std::memset(work.dout + i * vp, 0, sizeof(float) * vp);
        // Transposed states; rows beyond the last channel are never read.
        stage(states);
        for (long d = 0; d < keys; d += W) turn(work.after, d, work.turned_after);
        for (long d = 0; start && d < keys; d += W) turn(start, d, work.turned_start);

        stage(from_state);
        gemm<false>(n, vp, keys, chunk.left, kp, 1, work.after, vp, work.dx, vp);
        stage(within_chunk);
        upper_times(n, vp, chunk.a, C, work.dout, vp, work.dx, vp);
        stage(scoring);
        transpose(chunk.x, vp, chunk.turned, C, whole_vectors(n), vp);
        lower_product(n, gates.values, work.dout, vp, chunk.turned, C, work.da, C);
        if (gates.delta) {
            solve_back(chunk, work);
            stage(scoring);
            lower_product(n, gates.values, work.wn, vp, chunk.turned, C, work.db, C);
        }
        for (long i = 0; i < n; ++i) {
            const float* factors = gates.decay == by_head ? chunk.weight + i * C : nullptr;
            finish_row(work.da + i * C, factors, i, n, i + 1);
            work.diagonal[i] = work.da[i * C + i];
            work.da[i * C + i] = 0.0f;
            if (gates.delta) finish_row(work.db + i * C, factors, i, n, i);
        }
        stage(from_state);
        gemm<false>(n, kp, gates.values, chunk.x, vp, 1, work.turned_after, kp, work.out, kp);
        entering(chunk, work, work.dout, start, work.dq);
        if (gates.delta) entering(chunk, work, work.wn, start, work.plus);
        stage(mapping);
        if (gates.decay != no_decay) ends(chunk, work, start);
        stage(within_chunk);
        if (gates.decay == by_channel)
            sweep(chunk, work);
        else
            multiply(chunk, work);

        stage(updating);
        // The state before the chunk.
        if (gates.decay != no_decay)
            for (long d = 0; d < keys; ++d)
                scale_row(work.after + d * vp, work.after + d * vp, chunk.whole[d], vp);
        if (start) {
            gemm<true>(keys, vp, n, chunk.read, 1, kp, work.dout, vp, work.after, vp);
            if (gates.delta) gemm<true>(keys, vp, n, chunk.entering, 1, kp, work.wn, vp, work.after, vp);
        } else {
            std::memset(work.after, 0, sizeof(float) * matrix());
        }
        store_gradients(chunk, work, operand, row, begin, adds);
    }

    // Rows d ... d + W of a state (D, vp), as columns of out (vp, kp); the last ones may be missing.
    void turn(const float* state, long d, float* out) const {
        const long vp = this->vp(), rows = gates.keys - d < W ? gates.keys - d : W;
        float padded[W * W];
        for (long e = 0; e < vp; e += W) {
            if (rows == W) {
                transpose_square(state + d * vp + e, vp, out + e * kp() + d, kp());
                continue;
            }
            std::memset(padded, 0, sizeof padded);
            for (long i = 0; i < rows; ++i) store(padded + i * W, load(state + (d + i) * vp + e));
            transpose_square(padded, W, out + e * kp() + d, kp());
        }
    }

    // (I + B^T Diag(beta)) dr = dx, from the last row to the first; wn = -beta dr, and dx becomes dr.
    void solve_back(const Chunk& chunk, Work& work) const {
        const long n = chunk.n, vp = this->vp();
        stage(solving);
        for (long first = (n - 1) / STRIP * STRIP; first >= 0; first -= STRIP) {
            const long end = first + STRIP < n ? first + STRIP : n;
            gemm<true>(end - first, vp, n - end, chunk.b + end * C + first, 1, C, work.wn + end * vp, vp,
                       work.dx + first * vp, vp);
            for (long i = end - 1; i >= first; --i)
                for (long j = 0; j < vp; j += W) {
                    vec acc = load(work.dx + i * vp + j);
                    for (long p = i + 1; p < end; ++p) acc += chunk.b[p * C + i] * load(work.wn + p * vp + j);
                    store(work.dx + i * vp + j, acc);
                    store(work.wn + i * vp + j, acc * -chunk.beta[i]);
                }
        }
    }

    // Gradients of queries or keys through the state before the chunk.
    void entering(const Chunk& chunk, const Work& work, const float* grads, const float* start, float* into) const {
        const long n = chunk.n, kp = this->kp();
        if (!start) {
            std::memset(into, 0, sizeof(float) * n * kp);
            return;
        }
        gemm<false>(n, kp, gates.values, grads, vp(), 1, work.turned_start, kp, into, kp);
        for (long i = 0; i < n; ++i) {
            if (gates.decay == by_head) scale_row(into + i * kp, into + i * kp, chunk.start[i], kp);
            if (gates.decay == by_channel) scale_row(into + i * kp, into + i * kp, chunk.grown + i * kp, kp);
        }
    }

    // The gradient of the last G through the state after the chunk, per channel.
    void ends(const Chunk& chunk, Work& work, const float* start) const {
        const long vp = this->vp();
        for (long d = 0; d < kp(); ++d) {
            work.ends[d] = 0.0f;
            if (start && d < gates.keys)
                work.ends[d] = sum(dot_lanes(start + d * vp, work.after + d * vp, vp)) * chunk.whole[d];
        }
        for (long i = 0; i < chunk.n; ++i)
            for (long d = 0; d < kp(); d += W)
                store(work.ends + d,
                      load(work.ends + d) + load(chunk.left + i * kp() + d) * load(work.out + i * kp() + d));
    }

    void multiply(const Chunk& chunk, Work& work) const {
        const long n = chunk.n, kp = this->kp();
        const float* leaving = chunk.weight + (n - 1) * C;
        for (long i = 0; i < n; ++i)
            scale_row(work.minus + i * kp, work.out + i * kp, gates.decay == by_head ? leaving[i] : 1.0f, kp);
        lower_times(n, kp, work.da, C, chunk.k, kp, work.dq, kp);
        upper_times(n, kp, work.da, C, chunk.q, kp, work.minus, kp);
        if (gates.delta) {
            lower_times(n, kp, work.db, C, chunk.k, kp, work.plus, kp);
            upper_times(n, kp, work.db, C, chunk.k, kp, work.minus, kp);
        }
    }

    // The same per channel, as in Chunk::sweep: keys decay from the first strip to the last, gradients from the last to the
    // first.
    void sweep(Chunk& chunk, Work& work) const {
        const long n = chunk.n, kp = this->kp();
        for (long first = 0; first < n; first += STRIP) {
            const long end = first + STRIP < n ? first + STRIP : n;
            if (first) {
                earlier(chunk, first, end, work.da, work.dq);
                if (gates.delta) earlier(chunk, first, end, work.db, work.plus);
            }
            for (long i = first; i < end; ++i) {
                chunk.decay_keys(first, i);
                for (long d = 0; d < kp; d += W) {
                    vec dq = load(work.dq + i * kp + d), plus = gates.delta ? load(work.plus + i * kp + d) : vec{};
                    for (long j = first; j <= i; ++j) {
                        const vec key = load(chunk.left + j * kp + d);
                        dq += work.da[i * C + j] * key;
                        if (gates.delta) plus += work.db[i * C + j] * key;
                    }
                    store(work.dq + i * kp + d, dq);
                    if (gates.delta) store(work.plus + i * kp + d, plus);
                }
            }
            decay_rows(chunk.alpha, kp, first, end, chunk.left, first);
        }
        std::memcpy(work.minus, work.out, sizeof(float) * n * kp);
        for (long first = (n - 1) / STRIP * STRIP; first >= 0; first -= STRIP) {
            const long end = first + STRIP < n ? first + STRIP : n;
            for (long d = 0; d < kp; d += W)
                for (long i = end - 1; i >= first; --i) {
                    const vec rate = i + 1 < end ? load(chunk.alpha + (i + 1) * kp + d) : splat(1.0f);
                    const vec query = load(chunk.q + i * kp + d), key = load(chunk.k + i * kp + d);
                    for (long j = first; j <= i; ++j) {
                        vec x = load(work.minus + j * kp + d) * rate + work.da[i * C + j] * query;
                        if (gates.delta) x += work.db[i * C + j] * key;
                        store(work.minus + j * kp + d, x);
                    }
                }
            if (!first) break;
            decay_rows(chunk.alpha, kp, first, end, work.minus, first);
            later(chunk, first, end, work.da, chunk.q, work.minus);
            if (gates.delta) later(chunk, first, end, work.db, chunk.k, work.minus);
        }
    }

    // into_i += e^(G_i - G) sum_j x_ij left_j for the tokens of a strip and the keys j before it, with G before the strip.
    void earlier(const Chunk& chunk, long first, long end, const float* x, float* into) const {
        gemm<false>(end - first, kp(), first, x + first * C, C, 1, chunk.left, kp(), chunk.near, kp());
        add_since(chunk.alpha, kp(), first, end, chunk.near, into);
    }

    // into_j += sum_i x_ij e^(G_i - G) of_i for the same pairs.
    void later(const Chunk& chunk, long first, long end, const float* x, const float* of, float* into) const {
        since(chunk.alpha, kp(), first, end, of, chunk.near);
        gemm<true>(first, kp(), end - first, x + first * C, 1, C, chunk.near, kp(), into, kp());
    }

    void store_gradients(const Chunk& chunk, Work& work, const Operand& operand, long row, long begin, bool adds) const {
        const long batch = row / gates.heads, n = chunk.n, kp = this->kp(), vp = this->vp();
        const bool hides = gates.mask != nullptr;
        stage(mapping);
        if (gates.decay != no_decay) {
            // Row i reads with the factor e^G_i, column j writes with e^-G_j, so dG = x dx for each use of x.
            const Rows<float> rows = gates.of(ddecay, row);
            std::memcpy(work.carry, work.ends, sizeof(float) * kp);
            for (long i = n - 1; i >= 0; --i) {
                for (long d = 0; d < kp; d += W) {
                    vec more = load(chunk.q + i * kp + d) * load(work.dq + i * kp + d);
                    const vec key = load(chunk.k + i * kp + d);
                    more -= key * load(work.minus + i * kp + d);
                    if (gates.delta) more += key * load(work.plus + i * kp + d);
                    store(work.carry + d, load(work.carry + d) + more);
                }
                const bool hidden = hides && gates.hidden(batch, begin + i);
                float* out = rows.data + (begin + i) * rows.token;
                if (gates.decay == by_head) {
                    vec all = vec{};
                    for (long d = 0; d < kp; d += W) all += load(work.carry + d);
                    *out = hidden ? 0.0f : sum(all);
                } else {
                    for (long d = 0; d < gates.keys; ++d) out[d * rows.channel] = hidden ? 0.0f : work.carry[d];
                }
            }
        }
        // A token reads its own write without decay. This is added last, since the sum of differences above would only add
        // rounding errors to it.
        for (long i = 0; i < n; ++i)
            for (long d = 0; d < kp; d += W) {
                const vec own = splat(work.diagonal[i]), q = load(chunk.q + i * kp + d), k = load(chunk.k + i * kp + d);
                store(work.dq + i * kp + d, load(work.dq + i * kp + d) + own * k);
                store(work.minus + i * kp + d, load(work.minus + i * kp + d) + own * q);
            }
        if (gates.delta) {
            const Rows<float> rows = gates.of(dbeta, row);
            for (long i = 0; i < n; ++i) {
                const float found = sum(dot_lanes(work.dx + i * vp, chunk.e + i * vp, vp));
                rows.data[(begin + i) * rows.token] = hides && gates.hidden(batch, begin + i) ? 0.0f : found;
                for (long j = 0; j < vp; j += W) store(work.dx + i * vp + j, vec{} - load(work.wn + i * vp + j));
                for (long j = 0; j < kp; j += W)
                    store(work.minus + i * kp + j, load(work.minus + i * kp + j) + load(work.plus + i * kp + j));
            }
        }
        for (long j = 0; j < n * kp; j += W) store(work.dq + j, load(work.dq + j) * gates.scale);
        if (gates.normalize) {
            normalize_rows_back(chunk.q, n, kp, gates.scale, operand.q_factor, work.dq);
            normalize_rows_back(chunk.k, n, kp, 1.0f, operand.k_factor, work.minus);
        }
        for (long i = 0; hides && i < n; ++i)
            if (gates.hidden(batch, begin + i)) {
                std::memset(work.dq + i * kp, 0, sizeof(float) * kp);
                std::memset(work.minus + i * kp, 0, sizeof(float) * kp);
                std::memset(work.dx + i * vp, 0, sizeof(float) * vp);
            }
        stage(writing);
        const Rows<K> queries = gates.of_keys(dq, row), keys = gates.of_keys(dk, row);
        if (adds) {
            add(queries, begin, n, work.dq);
            add(keys, begin, n, work.minus);
        }
        write(work.dq, kp, queries, begin, n, gates.keys);
        write(work.minus, kp, keys, begin, n, gates.keys);
        write(work.dx, vp, gates.of(dv, row), begin, n, gates.values);
    }

    // x (n, kp) += the values already stored, from another value head.
    void add(Rows<K> rows, long begin, long n, float* x) const {
        for (long i = 0; i < n; ++i)
            for (long d = 0; d < gates.keys; ++d)
                x[i * kp() + d] += widen(rows.data[(begin + i) * rows.token + d * rows.channel]);
    }
};

template <class T, class K>
int backward(const Pass<T, K>& pass, float* grad_state, int threads) {
    const Gates& gates = pass.gates;
    const long units = gates.batch * gates.key_heads, shared = gates.heads / gates.key_heads;
    bool failed = false;
#pragma omp parallel num_threads(threads) if (threads > 1 && units > 1)
    {
        stage(states);
        Memory memory(pass.scratch());
        if (!memory.ready()) failed = true;
        stage(waiting);
#pragma omp barrier
        if (!failed) {
#pragma omp for schedule(dynamic)
            for (long unit = 0; unit < units; ++unit)
                for (long i = 0; i < shared; ++i) {
                    pass.head(unit * shared + i, i > 0, grad_state, memory.scratch());
                    stage(waiting);
                }
        }
        stage(waiting);
    }
    return failed;
}

}  // namespace

// Arguments as in forward.cpp, and grad (B,H,N,E) like v; dq, dk (B,G,N,D) of type ``key_type``, dv like v, ddecay
// (B,H,N,1|D) or null and dbeta (B,H,N,1) or null, float. Strides: q, k, v, grad, dq, dk, dv, log_decay, beta, ddecay,
// dbeta. grad_state (B,H,D,E) float, contiguous: the gradient of the last state, updated to that of the first.
extern "C" int longspan_gated_backward(const void* q, const void* k, const void* v, const void* grad, void* dq, void* dk,
                                       void* dv, const float* log_decay, const float* beta, float* ddecay, float* dbeta,
                                       const float* starts, float* grad_state, const std::uint8_t* mask,
                                       const std::int64_t* segments, const std::int64_t* offsets, const long* strides,
                                       const long* sizes, int decay, int type, int key_type, float scale, int threads) {
    const Gates gates{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], decay, beta != nullptr, scale,
                      mask, segments, log_decay, beta, strides + 28, strides + 32, offsets, sizes[6] != 0};
    const auto pass = [&](auto element, auto key_element) {
        using T = decltype(element);
        using K = decltype(key_element);
        const Pass<T, K> work{gates,
                              {{static_cast<const T*>(q), strides},
                               {static_cast<const T*>(k), strides + 4},
                               {static_cast<const T*>(v), strides + 8}},
                              {static_cast<const T*>(grad), strides + 12},
                              {static_cast<K*>(dq), strides + 16},
                              {static_cast<K*>(dk), strides + 20},
                              {static_cast<T*>(dv), strides + 24},
                              {ddecay, strides + 36},
                              {dbeta, strides + 40},
                              starts};
        return backward(work, grad_state, threads);
    };
    if (type == 0) return pass(float{}, float{});
    return key_type == 0 ? pass(bfloat16{}, float{}) : pass(bfloat16{}, bfloat16{});
}
