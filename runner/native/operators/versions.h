// On x86 a function marked EAGLE3_FOR_THIS_CPU is compiled twice, and the processor chooses when the program loads. On
// Arm there is one version: NEON is always there.
#pragma once

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define EAGLE3_FOR_THIS_CPU __attribute__((target_clones("arch=haswell", "default")))
#else
#define EAGLE3_FOR_THIS_CPU
#endif
#define EAGLE3_INLINE static inline __attribute__((always_inline))
