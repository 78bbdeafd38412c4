// Prefetching of a state for the token steps, which pass over all of it once.
#pragma once
#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace {

// The row to fetch while ``row`` is in use: 4 kB ahead, unless that is ``end`` or beyond, where another thread may be
// writing: the two would compete for the cache line.
inline const float* upcoming(const float* row, const float* end) {
    constexpr long distance = 1024;
    return end - row > distance ? row + distance : row;
}

// Whether to prefetch at all. AMD's processors are faster without it, if the states lie in their caches, and no slower if
// they do not (docs/results/lab.md, 2026-11-27).
inline bool gains_from_fetches() {
#if defined(__x86_64__)
    unsigned least, b, c, d;
    return !__get_cpuid(0, &least, &b, &c, &d) || b != 0x68747541;  // "Auth" of AuthenticAMD
#else
    return true;
#endif
}
const bool fetches = gains_from_fetches();

// One line into the first-level cache, or into the second-level one of processors with AMX, where that gained nothing
// (docs/results/lab.md). By an instruction, since GCC 12 removes loops that only prefetch.
inline void fetch_line(const float* line) {
#if defined(__AMX_TILE__)
    asm volatile("prefetcht1 %0" : : "m"(*line));
#elif defined(__x86_64__)
    asm volatile("prefetcht0 %0" : : "m"(*line));
#else
    __builtin_prefetch(line, 0, 2);
#endif
}

// ``size`` floats from ``row`` on, as for reading, although they will be written: docs/results/lab.md has the alternatives.
template <long size>
inline void fetch_row(const float* row) {
    constexpr long line = 16;
    if (fetches)
#pragma GCC unroll 16
        for (long j = 0; j < size; j += line) fetch_line(row + j);
}

}  // namespace
