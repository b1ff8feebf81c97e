// llama::custom_sdpa: attention of some rows to a cache.
//
//   out[b, t, h] = softmax_s(scale * q[b, t, h] . k[b, s, h / G] + mask[t, s]) v[b, s, h / G]
//
// q [B, T, Hq, D]; k and v [B, S, Hk, D]; G = Hq / Hk; scale is 1 / sqrt(D) unless given. With a mask [T, S] s goes over
// all S slots; without one over the first `start` + T slots; if causal, row t sees the first `start` + t + 1 only.
#include <executorch/extension/kernel_util/make_boxed_from_unboxed_functor.h>
#include <executorch/runtime/kernel/kernel_includes.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <vector>

namespace {

using executorch::aten::ScalarType;
using executorch::aten::Tensor;
using executorch::runtime::Error;
using executorch::runtime::KernelRuntimeContext;

Tensor& custom_sdpa(
    KernelRuntimeContext& context, const Tensor& q, const Tensor& k, const Tensor& v, int64_t start,
    const std::optional<Tensor>& mask, double, bool causal, std::optional<double> scale, Tensor& out) {
  (void)executorch::runtime::resize_tensor(out, q.sizes());
  const int64_t B = q.size(0), T = q.size(1), Hq = q.size(2), D = q.size(3), S = k.size(1), Hk = k.size(2), G = Hq / Hk;
  const float *qp = q.const_data_ptr<float>(), *kp = k.const_data_ptr<float>(), *vp = v.const_data_ptr<float>();
  const float* mp = mask ? mask->const_data_ptr<float>() : nullptr;
  float* op = out.mutable_data_ptr<float>();
  const float factor = scale ? *scale : 1 / std::sqrt((double)D);
  std::vector<float> p(S);
  for (int64_t b = 0; b < B; b++)
    for (int64_t t = 0; t < T; t++)
      for (int64_t h = 0; h < Hq; h++) {
        const float *qr = qp + ((b * T + t) * Hq + h) * D, *kb = kp + (b * S * Hk + h / G) * D;
        const float* vb = vp + (b * S * Hk + h / G) * D;
        const int64_t last = causal ? std::min(S, start + t + 1) : mp ? S : std::min(S, start + T);
        float most = -INFINITY, sum = 0;
        for (int64_t s = 0; s < last; s++) {
          float a = 0;
          for (int64_t d = 0; d < D; d++) a += qr[d] * kb[s * Hk * D + d];
          p[s] = a * factor + (mp ? mp[t * S + s] : 0);
          most = std::max(most, p[s]);
        }
        float* o = op + ((b * T + t) * Hq + h) * D;
        std::fill(o, o + D, 0.0f);
        for (int64_t s = 0; s < last; s++) {
          const float w = std::exp(p[s] - most);
          sum += w;
          for (int64_t d = 0; d < D; d++) o[d] += w * vb[s * Hk * D + d];
        }
        for (int64_t d = 0; d < D; d++) o[d] /= sum;
      }
  (void)context;
  return out;
}

}  // namespace

EXECUTORCH_LIBRARY(llama, "custom_sdpa.out", custom_sdpa);
