// CUDA's runtime and driver as far as the libraries of an artifact call them, without a GPU: the device's memory is the
// host's, a kernel that is asked for and a launch are handed to Python.

#include <cstdint>
#include <cstdlib>
#include <cstring>

using Asked = int64_t (*)(const void* image, const char* name);
using Launched = void (*)(int64_t kernel, unsigned x, unsigned y, unsigned z, void** arguments);

static Asked asked;
static Launched launched;

extern "C" {

void stand_in(Asked on_asked, Launched on_launched) {
  asked = on_asked;
  launched = on_launched;
}

int cuModuleLoadData(const void** module, const void* image) {
  *module = image;
  return 0;
}
int cuModuleGetFunction(int64_t* kernel, const void* module, const char* name) {
  *kernel = asked(module, name);
  return 0;
}
int cuLaunchKernel(
    int64_t kernel, unsigned x, unsigned y, unsigned z, unsigned, unsigned, unsigned, unsigned, void*, void** arguments,
    void**) {
  launched(kernel, x, y, z, arguments);
  return 0;
}
int cuModuleUnload(void*) { return 0; }
int cuFuncSetAttribute(int64_t, int, int) { return 0; }
int cuGetErrorString(int, const char** text) {
  *text = "none";
  return 0;
}

int cudaMalloc(void** memory, size_t size) {
  *memory = aligned_alloc(256, (size + 255) / 256 * 256);
  return *memory ? 0 : 2;
}
int cudaFree(void* memory) {
  free(memory);
  return 0;
}
int cudaMemcpy(void* to, const void* from, size_t size, int) {
  memcpy(to, from, size);
  return 0;
}
int cudaGetDevice(int* device) {
  *device = 0;
  return 0;
}
int cudaSetDevice(int) { return 0; }
int cudaEventCreate(void** event) {
  *event = nullptr;
  return 0;
}
int cudaEventDestroy(void*) { return 0; }
int cudaEventRecord(void*, void*) { return 0; }
int cudaEventQuery(void*) { return 0; }
int cudaEventSynchronize(void*) { return 0; }
int cudaGetLastError() { return 0; }
const char* cudaGetErrorString(int) { return "none"; }

// PyTorch's own, found here first: what a library makes on the GPU is the host's.
int32_t aoti_torch_device_type_cuda() { return 0; }  // that of the CPU
int aoti_torch_create_cuda_stream_guard(void*, int32_t, void** guard) {
  *guard = nullptr;
  return 0;
}
int aoti_torch_delete_cuda_stream_guard(void*) { return 0; }
}
