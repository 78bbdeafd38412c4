// One token of normalized linear attention for every row and head, in one pass over the state. Plain C interface.
// Source: Katharopoulos et al. 2020 (2006.16236), eqs 16-20.
#include "token.h"

namespace {

constexpr long limit = 1024;

template <class T>
void step(float* state, const T* q, const T* k, const T* v, T* out, long rows, long keys, long values, int map, float eps,
          int threads) {
    // Below this, waking a second thread costs more than it saves.
    const long parts = threads > 1 && rows * keys * values >= 32768 ? (threads < rows ? threads : rows) : 1;
    const long head = keys * (values + 1);
#pragma omp parallel for num_threads(parts) schedule(static) if (parts > 1)
    for (long part = 0; part < parts; ++part) {
        const long to = rows * (part + 1) / parts;
        for (long row = rows * part / parts; row < to; ++row) {
            float fq[limit], fk[limit], own[limit], value[limit], read[limit];
            map_token(map, widened(q + row * keys, keys, own), fq, keys);
            map_token(map, widened(k + row * keys, keys, own), fk, keys);
            const Token token{fk, fq, fk, fq, widened(v + row * values, values, value)};
            float* y = room(out + row * values, read);
            advance_head(state + row * head, state + to * head, token, y, keys, values, eps);
            narrowed(y, values, out + row * values);
        }
    }
}

}  // namespace

// rows = B H; state (rows, D, E+1) float, overwritten; q, k (rows, D); v, out (rows, E), of type 0 float, 1 bfloat16, 2 float16.
// Returns 0, or 1 for a head that is too large.
extern "C" int longspan_linear_step(float* state, const void* q, const void* k, const void* v, void* out, long rows,
                                    long keys, long values, int map, float eps, int type, int threads) {
    if (keys > limit || values > limit) return 1;
    const auto run = [&](auto element) {
        using T = decltype(element);
        step(state, static_cast<const T*>(q), static_cast<const T*>(k), static_cast<const T*>(v), static_cast<T*>(out), rows,
             keys, values, map, eps, threads);
    };
    if (type == 0) run(float{});
    else if (type == 1) run(bfloat16{});
    else run(float16{});
    return 0;
}
