// One token of normalised linear attention for every row and head, in one pass over the state. Plain C interface.
// Source: Katharopoulos et al. 2020 (2006.16236), eqs 16-20.
#include "token.h"

// rows = B H; state (rows, D, E+1), overwritten; q, k (rows, D); v, out (rows, E). Returns 0, or 1 for a head that is too
// large.
extern "C" int longspan_linear_step(float* state, const float* q, const float* k, const float* v, float* out, long rows,
                                    long keys, long values, int map, float eps, int threads) {
    constexpr long limit = 1024;
    if (keys > limit || values > limit) return 1;
    // Below this, waking a second thread costs more than it saves.
    const long parts = threads > 1 && rows * keys * values >= 32768 ? (threads < rows ? threads : rows) : 1;
    const long head = keys * (values + 1);
#pragma omp parallel for num_threads(parts) schedule(static) if (parts > 1)
    for (long part = 0; part < parts; ++part) {
        const long to = rows * (part + 1) / parts;
        for (long row = rows * part / parts; row < to; ++row) {
            float fq[limit], fk[limit];
            map_token(map, q + row * keys, fq, keys);
            map_token(map, k + row * keys, fk, keys);
            const Token token{fk, fq, fk, fq, v + row * values};
            advance_head(state + row * head, state + to * head, token, out + row * values, keys, values, eps);
        }
    }
    return 0;
}
