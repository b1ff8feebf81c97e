// The native runner's attention as a C function for bench_native_kernels.py, with the threads of ExecuTorch's pool, as
// runner/native/operators/custom_sdpa.cpp runs it.
#include <executorch/runtime/kernel/thread_parallel_interface.h>

#include "attention.h"

using eagle3::operators::Attention;

extern "C" void attend(const int64_t* sizes, int64_t start, bool causal, float scale, const float* q, const float* k,
                       const float* v, const float* mask, float* out) {
  Attention attention{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], start, causal, scale,
                      q,        k,        v,        mask,     out};
  attention.divide(executorch::extension::get_thread_count());
  executorch::extension::parallel_for(
      0, attention.parts(), 1, [&](int64_t first, int64_t last) { attention.compute(first, last); });
}
