// The instruction sets for which this library was compiled, by the names of build/instruction_sets.py. It lists every
// macro that a kernel may use; whether one does is seen in the other files.
#pragma once

// One copy per library, although several of its sources include this.
extern "C" __attribute__((weak, used, visibility("default"))) const char* longspan_isa();
extern "C" const char* longspan_isa() {
    return ""
#if defined(__x86_64__)
           "generic "
#endif
#if defined(__aarch64__)
           "neon "
#endif
#if defined(__ARM_FEATURE_DOTPROD)
           "neon_dotprod "
#endif
#if defined(__AVX2__)
           "avx2 "
#endif
#if defined(__AVX512F__)
           "avx512 "
#endif
#if defined(__AVX512VNNI__)
           "avx512_vnni "
#endif
#if defined(__AVX512BF16__)
           "avx512_bf16 "
#endif
#if defined(__AMX_BF16__)
           "amx_bf16 "
#endif
        ;
}
