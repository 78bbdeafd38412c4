// One token of the general delta rule for every row and head. Plain C interface.
#include "token.h"

namespace {

using namespace general;

template <class T>
struct Step {
    float* state;
    const T *q, *k, *v, *r, *e;
    const float* log_decay;
    T* out;
    long shared, keys, values;
    int decay;
    bool early;
    float scale;
};

template <class T>
void run(const Step<T>& step, long from, long to) {
    const long keys = step.keys, values = step.values;
    Token token;
    for (long row = from; row < to; ++row) {
        const long head = row / step.shared * keys, at = row * values;
        token.q = widened(step.q + head, keys, token.own_q), token.k = widened(step.k + head, keys, token.own_k);
        token.e = widened(step.e + head, keys, token.own_e), token.v = widened(step.v + at, values, token.own_v);
        token.out = room(step.out + at, token.own_out);
        token.state = step.state + at * keys, token.end = step.state + to * values * keys;
        const float* gates = step.decay == by_channel ? step.log_decay + row * keys : step.log_decay + row;
        prepare(token, widened(step.r + head, keys, token.own_r), gates, step.decay, step.early, keys);
        long e = columns<4>(token, 0, keys, values, step.scale);
        e = columns<1>(token, e, keys, values, step.scale);
        for (; e < values; ++e) column(token, e, keys, values, step.scale);
        narrowed(token.out, values, step.out + at);
    }
}

template <class T>
void step_rows(const Step<T>& step, long rows, int threads) {
    // Below this, waking a second thread costs more than it saves.
    const long parts = threads > 1 && rows * step.keys * step.values >= 32768 ? (threads < rows ? threads : rows) : 1;
#pragma omp parallel for num_threads(parts) schedule(static) if (parts > 1)
    for (long part = 0; part < parts; ++part) run(step, rows * part / parts, rows * (part + 1) / parts);
}

}  // namespace

// state (B,H,D,E) float, overwritten; q, k, r, e (B,G,D); v, out (B,H,E), of type 0 float, 1 bfloat16, 2 float16; log_decay
// null, or (B,H) or (B,H,D), float. early: whether to read before the decay. Returns 0, or 1 for a head that is too large.
extern "C" int longspan_general_step(float* state, const void* q, const void* k, const void* v, const void* r, const void* e,
                                     const float* log_decay, void* out, long rows, long shared, long keys, long values,
                                     int decay, int early, int type, float scale, int threads) {
    if (keys > limit || values > limit) return 1;
    const auto run = [&](auto element) {
        using T = decltype(element);
        const Step<T> step{state, static_cast<const T*>(q), static_cast<const T*>(k), static_cast<const T*>(v),
                           static_cast<const T*>(r), static_cast<const T*>(e), log_decay, static_cast<T*>(out), shared, keys,
                           values, decay, early != 0, scale};
        step_rows(step, rows, threads);
    };
    if (type == 0) run(float{});
    else if (type == 1) run(bfloat16{});
    else run(float16{});
    return 0;
}
