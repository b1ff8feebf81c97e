// Attention of some rows to a cache, without ExecuTorch. custom_sdpa.cpp is the operator.
#pragma once

#include <cstdint>

namespace eagle3::operators {

constexpr int64_t kRows = 64;  // the most rows of a part

/// out[b, t, h] = softmax_s(scale * q[b, t, h] . k[b, s, h / G] + mask[t, s]) v[b, s, h / G], with G = Hq / Hk.
///
/// q and out [B, T, Hq, D]; k and v [B, S, Hk, D]; all contiguous float32. With a mask [T, S] s goes over all S slots,
/// without one (null) over the first `start` + T. If `causal`, row t sees the first `start` + t + 1 only. A row that
/// sees nothing gets zeros.
///
/// The T * G rows that share keys are cut into parts of `part_rows`, which are independent.
struct Attention {
  int64_t B, T, Hq, Hk, D, S, start;
  bool causal;
  float scale;
  const float *q, *k, *v, *mask;
  float* out;
  int64_t part_rows = kRows;

  /// Makes parts small enough for `threads`.
  void divide(int64_t threads);
  int64_t parts() const;
  /// `version` is one of the versions() that this processor can run; -1: the last, which is the fastest.
  void compute(int64_t first_part, int64_t last_part, int version = -1) const;
  static int versions();
  /// Products of two numbers, to tell whether threads are worth their start.
  int64_t work() const;
};

}  // namespace eagle3::operators
