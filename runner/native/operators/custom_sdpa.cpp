// llama::custom_sdpa: attention of some rows to a cache, as attention.h defines it.
#include <executorch/extension/kernel_util/make_boxed_from_unboxed_functor.h>
#include <executorch/runtime/kernel/kernel_includes.h>
#include <executorch/runtime/kernel/thread_parallel_interface.h>

#include <cmath>
#include <optional>

#include "attention.h"

namespace {

using executorch::aten::ScalarType;
using executorch::aten::Tensor;
using executorch::runtime::Error;
using executorch::runtime::KernelRuntimeContext;

constexpr int64_t kThreadWork = 1 << 18;  // products below which a second thread costs more than it saves

bool is_float(const Tensor& tensor, int64_t dimensions) {
  return tensor.scalar_type() == ScalarType::Float && tensor.dim() == dimensions;
}

Tensor& custom_sdpa(
    KernelRuntimeContext& context, const Tensor& q, const Tensor& k, const Tensor& v, int64_t start,
    const std::optional<Tensor>& mask, double, bool causal, std::optional<double> scale, Tensor& out) {
  const bool right = is_float(q, 4) && is_float(k, 4) && is_float(v, 4) && k.size(0) == q.size(0) &&
      k.size(3) == q.size(3) && q.size(2) % k.size(2) == 0 && k.nbytes() == v.nbytes() && start >= 0 &&
      (!mask || (is_float(*mask, 2) && mask->size(0) == q.size(1) && mask->size(1) == k.size(1)));
  ET_KERNEL_CHECK(context, right, InvalidArgument, out);
  ET_KERNEL_CHECK(context, executorch::runtime::resize_tensor(out, q.sizes()) == Error::Ok, InvalidArgument, out);
  eagle3::operators::Attention attention{
      q.size(0), q.size(1), q.size(2), k.size(2), q.size(3), k.size(1), start, causal,
      (float)scale.value_or(1 / std::sqrt((double)q.size(3))), q.const_data_ptr<float>(), k.const_data_ptr<float>(),
      v.const_data_ptr<float>(), mask ? mask->const_data_ptr<float>() : nullptr, out.mutable_data_ptr<float>()};
  const int64_t threads = attention.work() < kThreadWork ? 1 : executorch::extension::get_thread_count();
  attention.divide(threads);
  if (threads == 1) {
    attention.compute(0, attention.parts());
  } else {
    executorch::extension::parallel_for(
        0, attention.parts(), 1, [&](int64_t first, int64_t last) { attention.compute(first, last); });
  }
  return out;
}

}  // namespace

EXECUTORCH_LIBRARY(llama, "custom_sdpa.out", custom_sdpa);
