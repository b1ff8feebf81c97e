// The native runner's kernels as C functions, for ctypes. Within Python the operators themselves cannot be registered:
// the wheel's library has registered its own.
#include "attention.h"
#include "delta_rule.h"

using eagle3::operators::Attention;
using eagle3::operators::DeltaRule;

extern "C" int versions() { return Attention::versions(); }

extern "C" void attend(int version, int64_t threads, const int64_t* sizes, int64_t start, bool causal, float scale,
                       const float* q, const float* k, const float* v, const float* mask, float* out) {
  Attention attention{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], start, causal, scale,
                      q,        k,        v,        mask,     out};
  attention.divide(threads);
  for (int64_t part = 0; part < attention.parts(); part++) attention.compute(part, part + 1, version);
}

extern "C" void delta_rule(const int64_t* sizes, bool by_channel, const float* query, const float* key,
                           const float* value, const float* decay, const float* beta, float* state, float* out) {
  const DeltaRule rule{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], by_channel, query,
                       key,      value,    decay,    beta,     state,    out};
  rule.compute(0, rule.heads);
}
