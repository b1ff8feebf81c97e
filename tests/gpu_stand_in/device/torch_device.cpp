// A CUDA device of PyTorch's CPU build, over the stand-in's driver: tensors of device type CUDA whose memory is the
// driver's, the few operations that a runner needs on them, and what else PyTorch's CUDA libraries would bring.

#include <ATen/EmptyTensor.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/inductor/aoti_runner/model_container_runner.h>
#include <torch/library.h>

extern "C" {
int stand_in_allocate(void** data, size_t size, void* stream);
void stand_in_free(void* data, void* stream);
int stand_in_copy_strided(
    void* to, const int64_t* to_strides, const void* from, const int64_t* from_strides, const int64_t* sizes,
    int64_t dimensions, size_t bytes, void* stream);
int cudaMemcpyAsync(void* to, const void* from, size_t size, int kind, void* stream);
int cudaMemsetAsync(void* to, int value, size_t size, void* stream);
int cudaStreamSynchronize(void* stream);
int cudaGetLastError();
const char* cudaGetErrorString(int code);
}

namespace {

thread_local void* current_stream = nullptr;

void check(int code) {
  if (!code) return;
  std::string text = cudaGetErrorString(code);
  cudaGetLastError();
  throw std::runtime_error("CUDA error: " + text);
}

// --- Memory: each storage an allocation of its own, freed in the order of the stream that it was made for

struct Owned {
  void *data, *stream;
};

void drop(void* context) {
  auto owned = static_cast<Owned*>(context);
  stand_in_free(owned->data, owned->stream);
  delete owned;
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* data = nullptr;
    check(stand_in_allocate(&data, size, current_stream));
    return {data, new Owned{data, current_stream}, drop, {c10::kCUDA, 0}};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void*, const void*, size_t) const override { throw std::runtime_error("copy_data of a CUDA storage"); }
};
Allocator allocator;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device exchangeDevice(c10::Device) const override { return {c10::kCUDA, 0}; }
  c10::Device getDevice() const override { return {c10::kCUDA, 0}; }
  void setDevice(c10::Device device) const override { TORCH_CHECK(device.index() <= 0, "CUDA error: invalid device ordinal"); }
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return stream(current_stream); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(nullptr); }
  c10::Stream exchangeStream(c10::Stream next) const override {
    auto before = stream(current_stream);
    current_stream = reinterpret_cast<void*>(next.id());
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  static c10::Stream stream(void* handle) {
    return c10::Stream(c10::Stream::UNSAFE, {c10::kCUDA, 0}, reinterpret_cast<c10::StreamId>(handle));
  }
};

// --- Operations

constexpr c10::DispatchKeySet KEYS(c10::DispatchKey::CUDA);

at::Tensor empty(
    c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device>,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &allocator, KEYS, at::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &allocator, KEYS, at::dtype_or_default(dtype));
}

at::Tensor aliased(const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride, int64_t offset) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(self.storage()), self.key_set(), self.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return made;
}

at::Tensor as_strided(
    const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  auto from = offset ? offset->expect_int() : self.storage_offset();
  return aliased(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), from);
}

at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return aliased(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), self.storage_offset());
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef symbolic) {
  TORCH_CHECK(self.is_contiguous(), "the stand-in views contiguous tensors alone");
  auto size = C10_AS_INTARRAYREF_SLOW(symbolic).vec();
  int64_t known = 1;
  for (auto each : size) known *= each < 0 ? 1 : each;
  for (auto& each : size) each = each < 0 ? self.numel() / known : each;
  std::vector<int64_t> stride(size.size());
  int64_t step = 1;
  for (auto d = int64_t(size.size()) - 1; d >= 0; step *= size[d--]) stride[d] = step;
  return aliased(self, size, stride, self.storage_offset());
}

at::Tensor& set(
    at::Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  auto tensor = self.unsafeGetTensorImpl();
  TORCH_CHECK(source.device_type() == c10::kCUDA, "set_ of a CUDA tensor to the storage of another device");
  tensor->set_storage_keep_dtype(std::move(source));
  tensor->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), offset.expect_int());
  return self;
}

at::Tensor& copy(at::Tensor& self, const at::Tensor& given, bool non_blocking) {
  if (!self.numel()) return self;
  auto source = given;
  bool from_device = source.is_cuda(), onto_device = self.is_cuda();
  if (source.dtype() != self.dtype()) {
    TORCH_CHECK(!from_device, "the stand-in has no kernel that converts a tensor of the device to another dtype");
    source = source.to(self.scalar_type());
  }
  if (source.sizes() != self.sizes()) source = source.expand_as(self);
  auto alike = source.strides() == self.strides() && self.is_non_overlapping_and_dense();
  if (!alike && from_device && onto_device) {
    check(stand_in_copy_strided(
        self.data_ptr(), self.strides().data(), source.data_ptr(), source.strides().data(), self.sizes().data(),
        self.dim(), self.element_size(), current_stream));
    return self;
  }
  if (!alike) {
    source = source.contiguous();
    if (!self.is_contiguous()) {
      auto whole = at::empty(self.sizes(), self.options());
      copy(whole, source, false);
      return self.copy_(whole);
    }
  }
  check(cudaMemcpyAsync(self.data_ptr(), source.data_ptr(), self.nbytes(), 4, current_stream));
  if (from_device == onto_device || non_blocking) return self;
  if (int code = cudaStreamSynchronize(current_stream)) {
    static auto& late = *new std::vector<at::Tensor>;
    if (!onto_device) late.push_back(self);  // the copy is still to come: its memory is nobody else's meanwhile
    check(code);
  }
  return self;
}

at::Tensor& zero(at::Tensor& self) {
  TORCH_CHECK(self.is_contiguous(), "the stand-in zeroes contiguous tensors alone");
  check(cudaMemsetAsync(self.data_ptr(), 0, self.nbytes(), current_stream));
  return self;
}

at::Tensor cat(const at::ITensorListRef& tensors, int64_t dim) {
  auto first = tensors.materialize().front().get();
  auto size = first.sizes().vec();
  dim = dim < 0 ? dim + first.dim() : dim;
  size[dim] = 0;
  for (const at::Tensor& each : tensors) size[dim] += each.size(dim);
  auto made = at::empty(size, first.options());
  int64_t from = 0;
  for (const at::Tensor& each : tensors) {
    auto part = made.narrow(dim, from, each.size(dim));
    copy(part, each, false);
    from += each.size(dim);
  }
  return made;
}

}  // namespace

namespace c10::impl {
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  c10::SetAllocator(c10::kCUDA, &allocator, 255);
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("as_strided", as_strided);
  library.impl("_reshape_alias", reshape_alias);
  library.impl("view", view);
  library.impl("set_.source_Storage_storage_offset", set);
  library.impl("copy_", copy);
  library.impl("zero_", zero);
  library.impl("cat", cat);
}

// --- PyTorch's container for CUDA, as its own class in libtorch_cuda: on the current stream

struct Container : torch::inductor::AOTIModelContainerRunner {
  Container(const std::string& path, size_t models, const std::string& device)
      : AOTIModelContainerRunner(path, models, device, "", false) {}

  std::vector<at::Tensor> run_impl(std::vector<AtenTensorHandle>& inputs, void* stream) override {
    return AOTIModelContainerRunner::run_impl(inputs, stream ? stream : current_stream);
  }
};

static thread_local std::string error;

template <typename Body>
int64_t guarded(Body body) {
  try {
    return body();
  } catch (const std::exception& failure) {
    error = failure.what();
    return -1;
  }
}

extern "C" {

const char* stand_in_error() { return error.c_str(); }
void* stand_in_current_stream() { return current_stream; }
void stand_in_set_stream(void* stream) { current_stream = stream; }

// Of an UntypedStorage, which PyTorch's CPU build resizes for other devices alone.
int64_t stand_in_resize(c10::StorageImpl* storage, size_t size) {
  return guarded([&] {
    TORCH_CHECK(size == 0, "the stand-in resizes a storage to nothing alone");
    storage->set_data_ptr_noswap({nullptr, {c10::kCUDA, 0}});
    storage->set_nbytes(0);
    return 0;
  });
}

int64_t stand_in_container(Container** made, const char* path, size_t models, const char* device) {
  return guarded([&] { return *made = new Container(path, models, device), 0; });
}
void stand_in_container_delete(Container* container) { delete container; }

// A line for each constant: its name, a tab, its original name.
const char* stand_in_container_names(Container* container) {
  static thread_local std::string lines;
  lines.clear();
  for (auto& [name, original] : container->getConstantNamesToOriginalFQNs()) lines += name + "\t" + original + "\n";
  return lines.c_str();
}

int64_t stand_in_container_update(
    Container* container, const char** names, at::Tensor** tensors, size_t count, bool inactive, bool whole, bool theirs) {
  return guarded([&] {
    torch::inductor::TensorConstantMap given;
    for (size_t index = 0; index < count; index++) given[names[index]] = tensors[index];
    return container->update_constant_buffer(given, inactive, whole, theirs), 0;
  });
}

// The tensors that come out are the caller's. How many, or -1.
int64_t stand_in_container_run(Container* container, at::Tensor** inputs, size_t count, at::Tensor** outputs, size_t most) {
  return guarded([&] {
    std::vector<at::Tensor> given;
    for (size_t index = 0; index < count; index++) given.push_back(*inputs[index]);
    auto made = container->run(given);
    TORCH_CHECK(made.size() <= most, "more outputs than places for them");
    for (size_t index = 0; index < made.size(); index++) outputs[index] = new at::Tensor(made[index]);
    return int64_t(made.size());
  });
}

// What PyTorch's libtorch_cuda exports of the C shim that libraries call.
int32_t aoti_torch_create_cuda_guard(int32_t, void** guard) { return *guard = nullptr, 0; }
int32_t aoti_torch_delete_cuda_guard(void*) { return 0; }
int32_t aoti_torch_cuda_guard_set_index(void*, int32_t) { return 0; }
int32_t aoti_torch_get_current_cuda_stream(int32_t, void** stream) { return *stream = current_stream, 0; }
int32_t aoti_torch_create_cuda_stream_guard(void* stream, int32_t, void** guard) {
  *guard = new void*(current_stream);
  return current_stream = stream, 0;
}
int32_t aoti_torch_delete_cuda_stream_guard(void* guard) {
  current_stream = *static_cast<void**>(guard);
  return delete static_cast<void**>(guard), 0;
}
}
