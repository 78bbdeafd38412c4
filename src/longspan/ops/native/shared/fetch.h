// Prefetching of a state for the token steps, which pass over all of it once.
#pragma once

namespace {

// The row to fetch while ``row`` is in use: 4 kB ahead, unless that is ``end`` or beyond, where another thread may be
// writing: the two would compete for the cache line.
inline const float* upcoming(const float* row, const float* end) {
    constexpr long distance = 1024;
    return end - row > distance ? row + distance : row;
}

// Into the second-level cache, as for reading, although it will be written: docs/results/lab.md has the alternatives.
inline void fetch(const float* line) { __builtin_prefetch(line, 0, 2); }

}  // namespace
