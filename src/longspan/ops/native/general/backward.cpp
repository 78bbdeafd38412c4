// The gradients of forward.cpp, from the last span to the first. The forward pass of a span is repeated, keeping the
// state before each chunk and the writes; then its chunks go backward. Source: the adjoint of the recurrence, with z the
// gradient of the right side of the system, which the transposed system gives: d[r k]_ij = z_i.v_j, d[r e]_ij = z_i.w_j.
#include "chunk.h"

namespace {

// T: the type of the operands; K: that of the gradients of queries, keys, reads and erasures.
template <class T, class K>
struct Pass {
    const General& general;
    Vectors<T> operands;
    Tensor<const T> grad;
    Tensor<K> dq, dk, dr, de;
    Tensor<T> dv;
    Tensor<float> ddecay;
    const float* starts;  // (B, H, spans, D, E)

    const Gates& gates() const { return general.gates; }
    long kp() const { return gates().kp(); }
    long vp() const { return gates().vp(); }
    long matrix() const { return gates().keys * vp(); }
    long scratch() const {
        return Piece::size(gates()) + Vectors<T>::floats(gates()) + (SPAN / C + 4) * matrix() + 2 * vp() * kp() + SPAN * vp() +
               C * (6 * kp() + 3 * vp() + 4 * C + 2) + 2 * kp();
    }

    struct Work {
        float *after;               // gradient of the state after the chunk (D, vp)
        float *kept, *written;      // states before chunks; w of the span
        float *turned_start, *turned_after;
        float *dout, *dv, *z;       // (C, vp)
        float *dq, *dk, *dr, *de;   // (C, kp)
        float *put, *taken;         // (C, kp): gradients of left keys and erasures
        float *qk, *qe, *rk, *re;   // (C, C): gradients of the products
        float *ends, *carry;        // (kp)
        float *own, *own_e;         // (C): the diagonals of qk and qe
    };

    void head(long row, bool adds, float* grad_state, Scratch scratch) const {
        const Gates& gates = this->gates();
        const long batch = row / gates.heads, tokens = gates.tokens_of(batch);
        const std::int64_t* segments = gates.segments_of(batch);
        Piece piece(general, scratch);
        const Packed packed(gates, scratch);
        Work work;
        work.after = scratch.take(matrix());
        work.kept = scratch.take((SPAN / C + 3) * matrix());
        work.written = scratch.take(SPAN * vp());
        work.turned_start = scratch.take(vp() * kp()), work.turned_after = scratch.take(vp() * kp());
        for (float** p : {&work.dout, &work.dv, &work.z}) *p = scratch.take(C * vp());
        for (float** p : {&work.dq, &work.dk, &work.dr, &work.de, &work.put, &work.taken}) *p = scratch.take(C * kp());
        for (float** p : {&work.qk, &work.qe, &work.rk, &work.re}) *p = scratch.take(C * C);
        work.ends = scratch.take(kp()), work.carry = scratch.take(kp());
        work.own = scratch.take(C), work.own_e = scratch.take(C);
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
                const Tokens at{row, begin, end - begin};
                stage(reading);
                gather_keys(operands, gates, at, packed);
                gather_values(operands, gates, at, packed);
                piece.enter(packed, row, begin, end - begin, false);
                piece.solve(anew ? nullptr : s);
                stage(states);
                std::memcpy(work.written + (begin - from) * vp(), piece.w, sizeof(float) * piece.n * vp());
                piece.advance(next);
                stage(states);
                s = next;
            }
            cuts[count] = to;
            for (long i = count - 1; i >= 0; --i) {
                const long begin = cuts[i], n = cuts[i + 1] - begin, then = i ? cuts[i - 1] : begin;
                const Tokens at{row, begin, n}, soon{row, then, begin - then};
                stage(reading);
                gather_queries(operands, gates, at, packed);
                gather_keys(operands, gates, at, packed);
                gather_values(operands, gates, at, packed);
                fetch(gates.of_keys(operands.q, row), soon, gates.keys);
                piece.enter(packed, row, begin, n, true);
                stage(states);
                std::memcpy(piece.w, work.written + (begin - from) * vp(), sizeof(float) * n * vp());
                back(piece, work, before[i], row, begin, adds);
                fetch(gates.of(grad, row), soon, gates.values);
            }
        }
        save_state(work.after, gates.keys, gates.values, vp(), grad_state + row * size);
    }

    // One chunk; start: the state before it, null at the start of a segment.
    void back(Piece& piece, Work& work, const float* start, long row, long begin, bool adds) const {
        const Gates& gates = this->gates();
        const long batch = row / gates.heads, n = piece.n, kp = this->kp(), vp = this->vp(), keys = gates.keys;
        stage(reading);
        read(gates.of(grad, row), begin, n, gates.values, work.dout, vp);
        for (long i = 0; gates.mask && i < n; ++i)
            if (gates.hidden(batch, begin + i)) std::memset(work.dout + i * vp, 0, sizeof(float) * vp);
        stage(states);
        // Transposed states; rows beyond the last channel are never read.
        for (long d = 0; d < keys; d += W) turn(work.after, d, work.turned_after);
        for (long d = 0; start && d < keys; d += W) turn(start, d, work.turned_start);

        stage(from_state);
        gemm<false>(n, vp, keys, piece.gone, kp, 1, work.after, vp, work.z, vp);
        stage(within_chunk);
        upper_times(n, vp, piece.qe, C, work.dout, vp, work.z, vp);
        stage(solving);
        solve_back(piece, work.z);
        stage(from_state);
        gemm<false>(n, vp, keys, piece.left, kp, 1, work.after, vp, work.dv, vp);
        stage(within_chunk);
        upper_times(n, vp, piece.qk, C, work.dout, vp, work.dv, vp);
        upper_times(n, vp, piece.rk, C, work.z, vp, work.dv, vp);

        stage(scoring);
        transpose(piece.v, vp, piece.turned, C, whole_vectors(n), vp);
        lower_product(n, gates.values, work.dout, vp, piece.turned, C, work.qk, C);
        lower_product(n, gates.values, work.z, vp, piece.turned, C, work.rk, C);
        transpose(piece.w, vp, piece.turned, C, whole_vectors(n), vp);
        lower_product(n, gates.values, work.dout, vp, piece.turned, C, work.qe, C);
        lower_product(n, gates.values, work.z, vp, piece.turned, C, work.re, C);
        for (long i = 0; i < n; ++i) {
            const bool head = gates.decay == by_head;
            const float* factors = head ? piece.weight + i * C : nullptr;
            finish_row(work.qk + i * C, factors, i, n, i + 1);
            finish_row(work.qe + i * C, factors, i, n, i + 1);
            factors = head ? piece.read_factors(piece.weight, i) : nullptr;
            finish_row(work.rk + i * C, factors, i, n, i);
            finish_row(work.re + i * C, factors, i, n, i);
            work.own[i] = work.qk[i * C + i], work.own_e[i] = work.qe[i * C + i];
            work.qk[i * C + i] = work.qe[i * C + i] = 0.0f;
        }
        stage(from_state);
        gemm<false>(n, kp, gates.values, piece.v, vp, 1, work.turned_after, kp, work.put, kp);
        gemm<false>(n, kp, gates.values, piece.w, vp, 1, work.turned_after, kp, work.taken, kp);
        entering(piece, work, work.dout, start, false, work.dq);
        entering(piece, work, work.z, start, true, work.dr);
        stage(mapping);
        if (gates.decay != no_decay) ends(piece, work, start);
        stage(within_chunk);
        if (gates.decay == by_channel)
            sweep(piece, work);
        else
            multiply(piece, work);

        stage(updating);
        // The state before the chunk.
        if (gates.decay != no_decay)
            for (long d = 0; d < keys; ++d)
                scale_row(work.after + d * vp, work.after + d * vp, piece.whole[d], vp);
        if (start) {
            gemm<true>(keys, vp, n, piece.read, 1, kp, work.dout, vp, work.after, vp);
            gemm<true>(keys, vp, n, piece.entering, 1, kp, work.z, vp, work.after, vp);
        } else {
            std::memset(work.after, 0, sizeof(float) * matrix());
        }
        store_gradients(piece, work, row, begin, adds);
    }

    // Rows d ... d + W of a state (D, vp), as columns of out (vp, kp); the last ones may be missing.
    void turn(const float* state, long d, float* out) const {
        const long vp = this->vp(), rows = gates().keys - d < W ? gates().keys - d : W;
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

    // z_i = -(dw_i + sum_{p>i} [r e]_pi z_p), from the last row to the first, in place of dw.
    void solve_back(const Piece& piece, float* z) const {
        const long n = piece.n, vp = this->vp();
        for (long first = (n - 1) / STRIP * STRIP; first >= 0; first -= STRIP) {
            const long end = first + STRIP < n ? first + STRIP : n;
            gemm<true>(end - first, vp, n - end, piece.re + end * C + first, 1, C, z + end * vp, vp, z + first * vp, vp);
            for (long i = end - 1; i >= first; --i)
                for (long j = 0; j < vp; j += W) {
                    vec acc = load(z + i * vp + j);
                    for (long p = i + 1; p < end; ++p) acc += piece.re[p * C + i] * load(z + p * vp + j);
                    store(z + i * vp + j, vec{} - acc);
                }
        }
    }

    // Gradients of queries or reads through the state before the chunk.
    void entering(const Piece& piece, const Work& work, const float* grads, const float* start, bool reads,
                  float* into) const {
        const long n = piece.n, kp = this->kp();
        if (!start) {
            std::memset(into, 0, sizeof(float) * n * kp);
            return;
        }
        gemm<false>(n, kp, gates().values, grads, vp(), 1, work.turned_start, kp, into, kp);
        for (long i = 0; i < n; ++i) {
            const long at = reads && piece.early ? i - 1 : i;
            if (gates().decay == by_head)
                scale_row(into + i * kp, into + i * kp, reads ? piece.read_start(i) : piece.start[i], kp);
            if (gates().decay == by_channel && at >= 0) scale_row(into + i * kp, into + i * kp, piece.grown + at * kp, kp);
        }
    }

    // The gradient of the last G through the state after the chunk, per channel.
    void ends(const Piece& piece, Work& work, const float* start) const {
        const long vp = this->vp(), kp = this->kp();
        for (long d = 0; d < kp; ++d) {
            work.ends[d] = 0.0f;
            if (start && d < gates().keys)
                work.ends[d] = sum(dot_lanes(start + d * vp, work.after + d * vp, vp)) * piece.whole[d];
        }
        for (long i = 0; i < piece.n; ++i)
            for (long d = 0; d < kp; d += W)
                store(work.ends + d, load(work.ends + d) + load(piece.left + i * kp + d) * load(work.put + i * kp + d) +
                                         load(piece.gone + i * kp + d) * load(work.taken + i * kp + d));
    }

    void multiply(const Piece& piece, Work& work) const {
        const long n = piece.n, kp = this->kp();
        const float* leaving = piece.weight + (n - 1) * C;
        for (long i = 0; i < n; ++i) {
            const float share = gates().decay == by_head ? leaving[i] : 1.0f;
            scale_row(work.dk + i * kp, work.put + i * kp, share, kp);
            scale_row(work.de + i * kp, work.taken + i * kp, share, kp);
        }
        lower_times(n, kp, work.qk, C, piece.k, kp, work.dq, kp);
        lower_times(n, kp, work.qe, C, piece.e, kp, work.dq, kp);
        lower_times(n, kp, work.rk, C, piece.k, kp, work.dr, kp);
        lower_times(n, kp, work.re, C, piece.e, kp, work.dr, kp);
        upper_times(n, kp, work.qk, C, piece.q, kp, work.dk, kp);
        upper_times(n, kp, work.rk, C, piece.r, kp, work.dk, kp);
        upper_times(n, kp, work.qe, C, piece.q, kp, work.de, kp);
        upper_times(n, kp, work.re, C, piece.r, kp, work.de, kp);
    }

    // The same per channel, strip by strip: keys decay from the first strip to the last, gradients from the last to the first.
    void sweep(Piece& piece, Work& work) const {
        const long n = piece.n, kp = this->kp();
        const bool early = piece.early;
        for (long first = 0; first < n; first += STRIP) {
            const long end = first + STRIP < n ? first + STRIP : n;
            if (first) {
                earlier(piece, first, end, work.rk, work.re, early, work.dr);
                earlier(piece, first, end, work.qk, work.qe, false, work.dq);
            }
            for (long i = first; i < end; ++i) {
                if (early) gather(piece, work.rk, work.re, first, i, work.dr);
                piece.decay_keys(first, i);
                if (!early) gather(piece, work.rk, work.re, first, i, work.dr);
                gather(piece, work.qk, work.qe, first, i, work.dq);
            }
            decay_rows(piece.alpha, kp, first, end, piece.left, first);
            decay_rows(piece.alpha, kp, first, end, piece.gone, first);
        }
        std::memcpy(work.dk, work.put, sizeof(float) * n * kp);
        std::memcpy(work.de, work.taken, sizeof(float) * n * kp);
        for (long first = (n - 1) / STRIP * STRIP; first >= 0; first -= STRIP) {
            const long end = first + STRIP < n ? first + STRIP : n;
            scatter(piece, work, first, end);
            if (!first) break;
            decay_rows(piece.alpha, kp, first, end, work.dk, first);
            decay_rows(piece.alpha, kp, first, end, work.de, first);
            later(piece, first, end, work.qk, work.qe, piece.q, false, work);
            later(piece, first, end, work.rk, work.re, piece.r, early, work);
        }
    }

    // Row i of ``into`` += the decayed keys and erasures of its strip before it, weighted by row i of two gradients of products.
    void gather(const Piece& piece, const float* keys, const float* erasures, long first, long i, float* into) const {
        const long kp = this->kp();
        // The diagonal of a product with queries is taken out, and that of one with reads is zero.
        for (long d = 0; d < kp; d += W) {
            vec acc = load(into + i * kp + d);
            for (long j = first; j < i; ++j)
                acc += keys[i * C + j] * load(piece.left + j * kp + d) + erasures[i * C + j] * load(piece.gone + j * kp + d);
            store(into + i * kp + d, acc);
        }
    }

    // The same for all rows of a strip and the keys and erasures before it.
    void earlier(const Piece& piece, long first, long end, const float* keys, const float* erasures, bool early,
                 float* into) const {
        const long kp = this->kp(), rows = end - first;
        gemm<false>(rows, kp, first, keys + first * C, C, 1, piece.left, kp, piece.near, kp);
        gemm<true>(rows, kp, first, erasures + first * C, C, 1, piece.gone, kp, piece.near, kp);
        add_since(piece.alpha, kp, first, end, piece.near, into, early);
    }

    // The gradients of the keys and erasures of a strip from its queries and reads.
    void scatter(const Piece& piece, Work& work, long first, long end) const {
        const long kp = this->kp();
        for (long d = 0; d < kp; d += W)
            for (long i = end - 1; i >= first; --i) {
                const vec rate = i + 1 < end ? load(piece.alpha + (i + 1) * kp + d) : splat(1.0f);
                const vec query = load(piece.q + i * kp + d);
                // A token that reads before its decay reads at the decay of the token before.
                const long reader = piece.early ? i + 1 : i;
                const bool reads = reader < end;
                const vec read = reads ? load(piece.r + reader * kp + d) : vec{};
                for (long j = first; j <= i; ++j) {
                    vec key = load(work.dk + j * kp + d) * rate + work.qk[i * C + j] * query;
                    vec erasure = load(work.de + j * kp + d) * rate + work.qe[i * C + j] * query;
                    if (reads) {
                        key += work.rk[reader * C + j] * read;
                        erasure += work.re[reader * C + j] * read;
                    }
                    store(work.dk + j * kp + d, key);
                    store(work.de + j * kp + d, erasure);
                }
            }
    }

    // The gradients of the keys and erasures before a strip from its queries or reads x.
    void later(const Piece& piece, long first, long end, const float* keys, const float* erasures, const float* x, bool early,
               Work& work) const {
        const long kp = this->kp(), rows = end - first;
        since(piece.alpha, kp, first, end, x, piece.near, early);
        gemm<true>(first, kp, rows, keys + first * C, 1, C, piece.near, kp, work.dk, kp);
        gemm<true>(first, kp, rows, erasures + first * C, 1, C, piece.near, kp, work.de, kp);
    }

    void store_gradients(const Piece& piece, Work& work, long row, long begin, bool adds) const {
        const Gates& gates = this->gates();
        const long batch = row / gates.heads, n = piece.n, kp = this->kp(), vp = this->vp();
        const bool hides = gates.mask != nullptr;
        stage(mapping);
        if (gates.decay != no_decay) {
            // Row i reads with the factor e^G_i, column j writes with e^-G_j, so dG = x dx for each use of x.
            const Rows<float> rows = gates.of(ddecay, row);
            std::memcpy(work.carry, work.ends, sizeof(float) * kp);
            for (long i = n - 1; i >= 0; --i) {
                // What token i + 1 reads before its decay has the factor e^G_i.
                const long reader = piece.early ? i + 1 : i;
                for (long d = 0; d < kp; d += W) {
                    vec more = load(piece.q + i * kp + d) * load(work.dq + i * kp + d);
                    more -= load(piece.k + i * kp + d) * load(work.dk + i * kp + d);
                    more -= load(piece.e + i * kp + d) * load(work.de + i * kp + d);
                    if (reader < n) more += load(piece.r + reader * kp + d) * load(work.dr + reader * kp + d);
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
        // A token's query sees its own writes without decay. This is added last, since the sum of differences above would
        // only add rounding errors to it.
        for (long i = 0; i < n; ++i)
            for (long d = 0; d < kp; d += W) {
                const long at = i * kp + d;
                const vec own = splat(work.own[i]), own_e = splat(work.own_e[i]), q = load(piece.q + at);
                store(work.dq + at, (load(work.dq + at) + own * load(piece.k + at) + own_e * load(piece.e + at)) * gates.scale);
                store(work.dk + at, load(work.dk + at) + own * q);
                store(work.de + at, load(work.de + at) + own_e * q);
            }
        for (long i = 0; hides && i < n; ++i)
            if (gates.hidden(batch, begin + i)) {
                for (float* x : {work.dq, work.dk, work.dr, work.de}) std::memset(x + i * kp, 0, sizeof(float) * kp);
                std::memset(work.dv + i * vp, 0, sizeof(float) * vp);
            }
        stage(writing);
        finish(dq, work.dq, row, begin, n, adds);
        finish(dk, work.dk, row, begin, n, adds);
        finish(dr, work.dr, row, begin, n, adds);
        finish(de, work.de, row, begin, n, adds);
        write(work.dv, vp, gates.of(dv, row), begin, n, gates.values);
        stage(states);
    }

    // Write x (n, kp); ``adds``: plus the values already stored, from another value head.
    void finish(Tensor<K> into, float* x, long row, long begin, long n, bool adds) const {
        const Rows<K> rows = gates().of_keys(into, row);
        for (long i = 0; adds && i < n; ++i)
            for (long d = 0; d < gates().keys; ++d)
                x[i * kp() + d] += widen(rows.data[(begin + i) * rows.token + d * rows.channel]);
        write(x, kp(), rows, begin, n, gates().keys);
    }
};

template <class T, class K>
int backward(const Pass<T, K>& pass, float* grad_state, int threads) {
    const Gates& gates = pass.gates();
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

// Arguments as in forward.cpp, and grad (B,H,N,E) like v; dq, dk, dr, de (B,G,N,D) of type ``key_type``, dv like v, ddecay
// (B,H,N,1|D) or null, float. Strides: q, k, v, r, e, grad, dq, dk, dv, dr, de, log_decay, ddecay. grad_state (B,H,D,E)
// float, contiguous: the gradient of the last state, updated to that of the first.
extern "C" int longspan_general_backward(const void* q, const void* k, const void* v, const void* r, const void* e,
                                         const void* grad, void* dq, void* dk, void* dv, void* dr, void* de,
                                         const float* log_decay, float* ddecay, const float* starts, float* grad_state,
                                         const std::uint8_t* mask, const std::int64_t* segments, const std::int64_t* offsets,
                                         const long* strides, const long* sizes, int decay, int type, int key_type,
                                         float scale, int threads) {
    const General general{{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], decay, true, scale, mask, segments,
                           log_decay, nullptr, strides + 44, nullptr, offsets, false},
                          sizes[6] != 0};
    const auto pass = [&](auto element, auto key_element) {
        using T = decltype(element);
        using K = decltype(key_element);
        const Pass<T, K> work{general,
                              {{static_cast<const T*>(q), strides},
                               {static_cast<const T*>(k), strides + 4},
                               {static_cast<const T*>(v), strides + 8},
                               {static_cast<const T*>(r), strides + 12},
                               {static_cast<const T*>(e), strides + 16}},
                              {static_cast<const T*>(grad), strides + 20},
                              {static_cast<K*>(dq), strides + 24},
                              {static_cast<K*>(dk), strides + 28},
                              {static_cast<K*>(dr), strides + 36},
                              {static_cast<K*>(de), strides + 40},
                              {static_cast<T*>(dv), strides + 32},
                              {ddecay, strides + 48},
                              starts};
        return backward(work, grad_state, threads);
    };
    if (type == 0) return pass(float{}, float{});
    return key_type == 0 ? pass(bfloat16{}, float{}) : pass(bfloat16{}, bfloat16{});
}
