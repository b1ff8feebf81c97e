// Loads a method's library as a host does, and prints what it says of itself: its constants, inputs and outputs, and its
// kernels, each of which the stand-in for CUDA's driver loads.
//
//     g++ -std=c++20 -rdynamic -o loads_library loads_library.cpp -ldl
//     loads_library libcuda.so.1 LIBRARY ARCHITECTURE SHARED_BYTES KERNEL...

#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

// What a library asks of its host before its first run. Other functions of the host are bound when they are called.
extern "C" {
int32_t aoti_torch_device_type_cpu() { return 0; }
int32_t aoti_torch_device_type_cuda() { return 1; }
int32_t aoti_torch_dtype_uint8() { return 0; }
int32_t aoti_torch_dtype_int8() { return 1; }
int32_t aoti_torch_dtype_int32() { return 3; }
int32_t aoti_torch_dtype_int64() { return 4; }
int32_t aoti_torch_dtype_float16() { return 5; }
int32_t aoti_torch_dtype_float32() { return 6; }
int32_t aoti_torch_dtype_bool() { return 11; }
int32_t aoti_torch_dtype_bfloat16() { return 15; }
int32_t aoti_torch_layout_strided() { return 0; }
}

template <typename Function>
Function* found(void* library, const std::string& name) {
  if (void* place = dlsym(library, name.c_str())) return reinterpret_cast<Function*>(place);
  std::fprintf(stderr, "%s\n", dlerror());
  std::exit(1);
}

static void* opened(const char* path) {
  if (void* library = dlopen(path, RTLD_LAZY | RTLD_GLOBAL)) return library;
  std::fprintf(stderr, "%s\n", dlerror());
  std::exit(1);
}

static void check(const char* name, int code) {
  if (!code) return;
  std::fprintf(stderr, "%s: %d\n", name, code);
  std::exit(1);
}

int main(int count, char** given) {
  void* driver = opened(given[1]);
  auto arch = static_cast<unsigned>(std::atoi(given[3])), shared = static_cast<unsigned>(std::atoi(given[4]));
  found<void(void*, void*)>(driver, "stand_in_start")(nullptr, nullptr);
  found<void(unsigned, unsigned, uint64_t, unsigned)>(driver, "stand_in_device")(arch, shared, uint64_t(8) << 30, 16);

  void* library = opened(given[2]);
  const std::string container = "AOTInductorModelContainer";
  void* model = nullptr;
  check("create", found<int(void**, size_t, const char*, const char*)>(library, container + "CreateWithDevice")(&model, 1, "cuda", nullptr));
  for (const char* what : {"NumConstants", "NumInputs", "NumOutputs"}) {
    size_t many = 0;
    check(what, found<int(void*, size_t*)>(library, container + "Get" + what)(model, &many));
    std::printf("%s %zu\n", what, many);
    for (size_t at = 0; at < many && what[3] == 'C'; ++at) {
      const char *name = nullptr, *original = nullptr;
      size_t bytes = 0;
      check("name", found<int(void*, size_t, const char**)>(library, container + "GetConstantName")(model, at, &name));
      check("original", found<int(void*, size_t, const char**)>(library, container + "GetConstantOriginalFQN")(model, at, &original));
      check("bytes", found<int(void*, size_t, size_t*)>(library, container + "GetConstantDataSize")(model, at, &bytes));
      std::printf("%s %s %zu\n", name, original, bytes);
    }
  }
  auto load = found<int(void**, const void*)>(driver, "cuModuleLoadData");
  for (int at = 5; at < count; ++at) {
    void* module = nullptr;
    check(given[at], load(&module, dlsym(library, (std::string("__") + given[at] + "_start").c_str())));
    std::printf("%s\n", given[at]);
  }
  check("delete", found<int(void*)>(library, container + "Delete")(model));
}
