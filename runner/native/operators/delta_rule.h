// The gated delta rule, without ExecuTorch. gated_delta_rule.cpp is the operator.
#pragma once

#include <cstdint>

namespace eagle3::operators {

/// A recurrent state, row by row. For each of the batch's state heads, with S [K, V]:
///
///   S = decay_t * S;   S = S + k_t (beta_t (v_t - S^T k_t))^T;   out_t = S^T q_t
///
/// query [heads * group, T, K]; key [heads, T, K]; value [heads, T, V]; decay [heads, T], or if `by_channel` [heads, T, K];
/// beta [heads, T]; state [heads, K, V], changed in place; out [heads * group, T, V]. All are contiguous float32.
struct DeltaRule {
  int64_t heads, group, T, K, V;
  bool by_channel;
  const float *query, *key, *value, *decay, *beta;
  float *state, *out;

  /// State heads `first` to `last`, which are independent.
  void compute(int64_t first, int64_t last) const;
};

}  // namespace eagle3::operators
