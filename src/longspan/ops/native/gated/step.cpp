// One token of the recurrence with decay and delta rule for every row and head. Plain C interface.
#include "token.h"

namespace {

template <class T>
void step_all(const gated::Step<T>& step, long rows, int threads) {
    // Below this, waking a second thread costs more than it saves.
    const long parts = threads > 1 && rows * step.keys * step.values >= 32768 ? (threads < rows ? threads : rows) : 1;
#pragma omp parallel for num_threads(parts) schedule(static) if (parts > 1)
    for (long part = 0; part < parts; ++part) gated::step_rows(step, rows * part / parts, rows * (part + 1) / parts);
}

}  // namespace

// state (B,H,D,E) float, overwritten; q, k (B,G,D); v, out (B,H,E), of type 0 float, 1 bfloat16, 2 float16; log_decay null, or
// (B,H), (B,H,D), or (B,H,E) without beta, and beta null, or (B,H), float. Returns 0, or 1 for a head that is too large.
extern "C" int longspan_gated_step(float* state, const void* q, const void* k, const void* v, const float* log_decay,
                                   const float* beta, void* out, long rows, long shared, long keys, long values, int decay,
                                   int normalize, int type, float scale, int threads) {
    if (keys > gated::limit || values > gated::limit) return 1;
    const auto run = [&](auto element) {
        using T = decltype(element);
        // Contiguous operands are those of one sequence with all heads.
        const gated::Step<T> step{state, static_cast<const T*>(q), static_cast<const T*>(k), static_cast<const T*>(v),
                                  log_decay, beta, static_cast<T*>(out), rows, shared, keys, values, decay,
                                  normalize != 0, scale};
        step_all(step, rows, threads);
    };
    if (type == 0) run(float{});
    else if (type == 1) run(bfloat16{});
    else run(float16{});
    return 0;
}
