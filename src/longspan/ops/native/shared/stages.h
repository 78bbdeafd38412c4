// Time by stage of a kernel, for `longspan bench profile`: compiled in with -DLONGSPAN_STAGES, nothing otherwise.
#pragma once
#include <cstdint>
#if defined(LONGSPAN_STAGES)
#include <atomic>
#include <chrono>
#if defined(__x86_64__)
#include <x86intrin.h>
#endif
#endif

// In the order of ``STAGES`` in bench/profile.py.
enum Stage {
    waiting,       // for other threads, or outside of the kernel
    states,        // in and out, and all that is not named
    reading,       // operands, with feature maps in the forward pass
    mapping,       // feature maps, activations, gates and their slopes, decays, step sizes
    scoring,       // queries times keys within a chunk, and their mask
    from_state,    // products with the state before the chunk
    within_chunk,  // scores times values
    solving,       // the triangular systems of the delta rule
    updating,      // the state
    scanning,      // a recurrence, token by token
    convolving,    // taps times tokens; rows that need no copy are read and written here
    summing,       // gradients that many tokens or channels share
    writing,
    STAGES
};

#if defined(LONGSPAN_STAGES)

inline std::uint64_t ticks() {
#if defined(__x86_64__)
    return __rdtsc();
#else
    return static_cast<std::uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
#endif
}

struct alignas(128) Stages {
    std::uint64_t spent[STAGES] = {}, since = ticks();
    Stage now = waiting;
};
constexpr int CLOCKS = 256;  // threads that can be measured
inline Stages stages_of[CLOCKS];
inline std::atomic<int> stages_used{0};

// From now on the time of this thread belongs to ``next``.
inline void stage(Stage next) {
    static thread_local Stages& mine = stages_of[stages_used++ % CLOCKS];
    const std::uint64_t at = ticks();
    mine.spent[mine.now] += at - mine.since;
    mine.since = at, mine.now = next;
}

extern "C" __attribute__((weak, used, visibility("default"))) int longspan_stage_count();
extern "C" int longspan_stage_count() { return STAGES; }

// out (256, STAGES): ticks by thread and stage since the last call, whose sum is the same for every thread; returns the
// number of threads. Call it when no kernel runs.
extern "C" __attribute__((weak, used, visibility("default"))) int longspan_stages(std::uint64_t* out);
extern "C" int longspan_stages(std::uint64_t* out) {
    const std::uint64_t at = ticks();
    for (Stages& one : stages_of) {
        one.spent[one.now] += at - one.since;
        one.since = at;
        for (std::uint64_t& spent : one.spent) *out++ = spent, spent = 0;
    }
    const int used = stages_used;
    return used < CLOCKS ? used : CLOCKS;
}

#else
// No function: even an empty one, inlined, lets compilers place variables differently.
#define stage(next) static_cast<void>(0)
#endif
