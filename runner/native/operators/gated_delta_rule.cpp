// llama::gated_delta_rule: a recurrent state, as delta_rule.h defines it. query [B, Hq, T, K]; key [B, H, T, K]; value
// [B, H, T, V]; beta [B, H, T]; decay [B, H, T] or [B, H, T, K]; state [B, H, K, V]; Hq is a multiple of H.
#include <executorch/runtime/kernel/kernel_includes.h>
#include <executorch/runtime/kernel/operator_registry.h>
#include <executorch/runtime/kernel/thread_parallel_interface.h>

#include <cstring>

#include "delta_rule.h"

namespace {

using executorch::aten::ScalarType;
using executorch::aten::Tensor;
using executorch::runtime::Error;
using executorch::runtime::EValue;
using executorch::runtime::KernelRuntimeContext;
using executorch::runtime::Span;

constexpr int64_t kThreadWork = 1 << 18;  // numbers of the state times rows, below which one thread is faster

bool fits(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& decay, const Tensor& beta,
          const Tensor& state) {
  for (const Tensor* each : {&query, &key, &value, &decay, &beta, &state}) {
    if (each->scalar_type() != ScalarType::Float) return false;
  }
  const int64_t heads = key.size(0) * key.size(1), rows = heads * key.size(2);
  return query.dim() == 4 && key.dim() == 4 && value.dim() == 4 && state.dim() == 4 && query.size(1) % key.size(1) == 0 &&
      query.size(3) == key.size(3) && query.size(2) == key.size(2) && value.numel() == rows * value.size(3) &&
      beta.numel() == rows && decay.numel() == (decay.dim() == 4 ? rows * key.size(3) : rows) &&
      state.numel() == heads * key.size(3) * value.size(3);
}

/// Boxed, since ExecuTorch's wrapper of functions takes one output only: six inputs, out, the last state.
void gated_delta_rule(KernelRuntimeContext& context, Span<EValue*> given) {
  const Tensor &query = given[0]->toTensor(), &key = given[1]->toTensor(), &value = given[2]->toTensor();
  const Tensor &decay = given[3]->toTensor(), &beta = given[4]->toTensor(), &initial = given[5]->toTensor();
  Tensor &out = given[6]->toTensor(), &last = given[7]->toTensor();
  ET_KERNEL_CHECK(context, fits(query, key, value, decay, beta, initial), InvalidArgument, );
  const executorch::aten::SizesType shape[4] = {
      (int)query.size(0), (int)query.size(1), (int)query.size(2), (int)value.size(3)};
  ET_KERNEL_CHECK(context, executorch::runtime::resize_tensor(out, {shape, 4}) == Error::Ok, InvalidArgument, );
  ET_KERNEL_CHECK(context, executorch::runtime::resize_tensor(last, initial.sizes()) == Error::Ok, InvalidArgument, );
  std::memmove(last.mutable_data_ptr(), initial.const_data_ptr(), initial.nbytes());
  const eagle3::operators::DeltaRule rule{
      key.size(0) * key.size(1), query.size(1) / key.size(1), key.size(2), key.size(3), value.size(3), decay.dim() == 4,
      query.const_data_ptr<float>(), key.const_data_ptr<float>(), value.const_data_ptr<float>(),
      decay.const_data_ptr<float>(), beta.const_data_ptr<float>(), last.mutable_data_ptr<float>(),
      out.mutable_data_ptr<float>()};
  if (initial.numel() * rule.T < kThreadWork) return rule.compute(0, rule.heads);
  executorch::extension::parallel_for(
      0, rule.heads, 1, [&](int64_t first, int64_t last_head) { rule.compute(first, last_head); });
}

[[maybe_unused]] const auto registered = executorch::runtime::register_kernel(
    executorch::runtime::Kernel("llama::gated_delta_rule.out", gated_delta_rule));

}  // namespace
