// Attention of a few rows to a cache, without ExecuTorch. custom_sdpa.cpp is the operator.
#pragma once

#include <cstdint>

namespace eagle3::operators {

constexpr int64_t kRows = 16;  // the most rows of a part

/// out[b, t, h] = softmax_s(scale * q[b, t, h] . k[b, s, h / G] + mask[t, s]) v[b, s, h / G], with G = Hq / Hk.
///
/// q and out [B, T, Hq, D]; k and v [B, S, Hk, D]; all contiguous float32. With a mask [T, S] s goes over all S slots,
/// without one (null) over the first `start` + T. If `causal`, row t sees the first `start` + t + 1 only. A row that
/// sees nothing gets zeros.
struct Attention {
  int64_t B, T, Hq, Hk, D, S, start;
  bool causal;
  float scale;
  const float *q, *k, *v, *mask;
  float* out;

  /// Independent parts, for threads: blocks of rows that share keys.
  int64_t parts() const;
  void compute(int64_t first_part, int64_t last_part) const;
  /// Products of two numbers, to tell whether threads are worth their start.
  int64_t work() const;
};

}  // namespace eagle3::operators
