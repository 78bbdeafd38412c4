// Fetching a state ahead of its use, for the token steps, which pass over all of it once.
#pragma once

namespace {

// The row to fetch while ``row`` is at hand: 4 kB on, unless that is ``end`` or beyond. There another thread may be
// writing, and each would keep taking the line away from the other.
inline const float* upcoming(const float* row, const float* end) {
    constexpr long distance = 1024;
    return end - row > distance ? row + distance : row;
}

// Into the second cache, as for reading, although it will be written: see docs/results/lab.md for what the other ways cost.
inline void fetch(const float* line) { __builtin_prefetch(line, 0, 2); }

}  // namespace
