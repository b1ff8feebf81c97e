// llama::gated_delta_rule: a recurrent state, row by row. For each batch and state head, with S [K, V]:
//
//   S = decay_t * S;   S = S + k_t (beta_t (v_t - S^T k_t))^T;   out_t = S^T q_t
//
// query [B, Hq, T, K]; key [B, H, T, K]; value [B, H, T, V]; beta [B, H, T]; the state [B, H, K, V]. Decay is [B, H, T], or
// [B, H, T, K] for one a channel, and Hq a multiple of H. All are float32. Returns out [B, Hq, T, V] and the last state.
#include <executorch/runtime/kernel/kernel_includes.h>
#include <executorch/runtime/kernel/operator_registry.h>

#include <algorithm>
#include <cstring>
#include <vector>

namespace {

using executorch::aten::ScalarType;
using executorch::aten::Tensor;
using executorch::runtime::Error;
using executorch::runtime::EValue;
using executorch::runtime::KernelRuntimeContext;
using executorch::runtime::Span;

struct Sizes {
  int64_t rows, keys, values, group;
  bool by_channel;
};

struct Rows {
  const float *query, *key, *value, *decay, *beta;
  float *state, *out;
};

/// One state head: `rows.query` and `rows.out` begin at the first of its `group` heads.
void head(const Sizes& n, const Rows& rows) {
  std::vector<float> held(n.values);
  for (int64_t t = 0; t < n.rows; t++) {
    const float *key = rows.key + t * n.keys, *value = rows.value + t * n.values;
    const float* decay = rows.decay + (n.by_channel ? t * n.keys : t);
    std::fill(held.begin(), held.end(), 0.0f);
    for (int64_t k = 0; k < n.keys; k++) {
      float *state = rows.state + k * n.values, factor = decay[n.by_channel ? k : 0], by = key[k];
      for (int64_t v = 0; v < n.values; v++) held[v] += by * (state[v] *= factor);
    }
    for (int64_t v = 0; v < n.values; v++) held[v] = (value[v] - held[v]) * rows.beta[t];
    for (int64_t k = 0; k < n.keys; k++) {
      float *state = rows.state + k * n.values, by = key[k];
      for (int64_t v = 0; v < n.values; v++) state[v] += by * held[v];
    }
    for (int64_t g = 0; g < n.group; g++) {
      const float* query = rows.query + (g * n.rows + t) * n.keys;
      float* out = rows.out + (g * n.rows + t) * n.values;
      std::fill(out, out + n.values, 0.0f);
      for (int64_t k = 0; k < n.keys; k++) {
        const float *state = rows.state + k * n.values, by = query[k];
        for (int64_t v = 0; v < n.values; v++) out[v] += by * state[v];
      }
    }
  }
}

/// Boxed, since ExecuTorch's wrapper of functions takes one output only: six inputs, out, the last state.
void gated_delta_rule(KernelRuntimeContext& context, Span<EValue*> given) {
  const Tensor &query = given[0]->toTensor(), &key = given[1]->toTensor(), &value = given[2]->toTensor();
  const Tensor &decay = given[3]->toTensor(), &beta = given[4]->toTensor(), &initial = given[5]->toTensor();
  Tensor &out = given[6]->toTensor(), &last = given[7]->toTensor();
  bool right = query.dim() == 4 && key.dim() == 4 && value.dim() == 4 && initial.dim() == 4 &&
      (decay.dim() == 3 || decay.dim() == 4) && query.size(1) % key.size(1) == 0;
  for (const Tensor* each : {&query, &key, &value, &decay, &beta, &initial}) {
    right = right && each->scalar_type() == ScalarType::Float;
  }
  ET_KERNEL_CHECK(context, right, InvalidArgument, );
  const Sizes n{key.size(2), key.size(3), value.size(3), query.size(1) / key.size(1), decay.dim() == 4};
  const executorch::aten::SizesType shape[4] = {
      (int)query.size(0), (int)query.size(1), (int)query.size(2), (int)value.size(3)};
  ET_KERNEL_CHECK(context, executorch::runtime::resize_tensor(out, {shape, 4}) == Error::Ok, InvalidArgument, );
  ET_KERNEL_CHECK(context, executorch::runtime::resize_tensor(last, initial.sizes()) == Error::Ok, InvalidArgument, );
  std::memmove(last.mutable_data_ptr(), initial.const_data_ptr(), initial.nbytes());
  const int64_t channels = n.by_channel ? n.keys : 1;
  for (int64_t h = 0; h < key.size(0) * key.size(1); h++) {
    head(n, {query.const_data_ptr<float>() + h * n.group * n.rows * n.keys,
             key.const_data_ptr<float>() + h * n.rows * n.keys,
             value.const_data_ptr<float>() + h * n.rows * n.values,
             decay.const_data_ptr<float>() + h * n.rows * channels,
             beta.const_data_ptr<float>() + h * n.rows,
             last.mutable_data_ptr<float>() + h * n.keys * n.values,
             out.mutable_data_ptr<float>() + h * n.group * n.rows * n.values});
  }
}

[[maybe_unused]] const auto registered = executorch::runtime::register_kernel(
    executorch::runtime::Kernel("llama::gated_delta_rule.out", gated_delta_rule));

}  // namespace
