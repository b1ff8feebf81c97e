// llama::update_cache and update_cache_with_indices: rows written into a cache in place.
//
//   update_cache:               cache[b, start + t] = value[b, t]
//   update_cache_with_indices:  cache[b, indices[b, t]] = value[b, t]
//
// value [B, T, H, D] and cache [B, S, H, D] have one dtype; indices are int64 [B, T].
#include <executorch/extension/kernel_util/make_boxed_from_unboxed_functor.h>
#include <executorch/runtime/kernel/kernel_includes.h>

#include <cstring>

namespace {

using executorch::aten::ScalarType;
using executorch::aten::Tensor;
using executorch::runtime::Error;
using executorch::runtime::KernelRuntimeContext;

bool fits(const Tensor& value, const Tensor& cache) {
  return value.dim() == 4 && cache.dim() == 4 && value.size(0) == cache.size(0) && value.size(2) == cache.size(2) &&
      value.size(3) == cache.size(3) && value.scalar_type() == cache.scalar_type();
}

size_t row_bytes(const Tensor& cache) { return cache.size(2) * cache.size(3) * cache.element_size(); }

Tensor& update_cache(KernelRuntimeContext& context, const Tensor& value, Tensor& cache, int64_t start, Tensor& out) {
  const int64_t rows = value.size(1), slots = cache.size(1);
  ET_KERNEL_CHECK(context, fits(value, cache) && start >= 0 && start + rows <= slots, InvalidArgument, out);
  const size_t bytes = row_bytes(cache);
  auto* to = (uint8_t*)cache.mutable_data_ptr();
  auto* from = (const uint8_t*)value.const_data_ptr();
  for (int64_t batch = 0; batch < value.size(0); batch++) {
    std::memcpy(to + (batch * slots + start) * bytes, from + batch * rows * bytes, rows * bytes);
  }
  return out;
}

Tensor& update_cache_with_indices(
    KernelRuntimeContext& context, const Tensor& value, Tensor& cache, int64_t, const Tensor& indices, Tensor& out) {
  const int64_t rows = value.size(1), slots = cache.size(1);
  const bool right = fits(value, cache) && indices.scalar_type() == ScalarType::Long && indices.dim() == 2 &&
      indices.size(0) == value.size(0) && indices.size(1) == rows;
  ET_KERNEL_CHECK(context, right, InvalidArgument, out);
  const size_t bytes = row_bytes(cache);
  const int64_t* slot = indices.const_data_ptr<int64_t>();
  auto* to = (uint8_t*)cache.mutable_data_ptr();
  auto* from = (const uint8_t*)value.const_data_ptr();
  for (int64_t row = 0; row < value.size(0) * rows; row++) {
    ET_KERNEL_CHECK(context, slot[row] >= 0 && slot[row] < slots, InvalidArgument, out);
    std::memcpy(to + (row / rows * slots + slot[row]) * bytes, from + row * bytes, bytes);
  }
  return out;
}

}  // namespace

EXECUTORCH_LIBRARY(llama, "update_cache.out", update_cache);
EXECUTORCH_LIBRARY(llama, "update_cache_with_indices.out", update_cache_with_indices);
