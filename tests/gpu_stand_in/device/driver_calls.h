// libcuda: modules, functions, launches. Inside of driver.cpp's extern "C".

int cuInit(unsigned) { return SUCCESS; }
int cuDriverGetVersion(int* version) { return *version = 13000, SUCCESS; }

int cudaDeviceGetAttribute(int* value, int attribute, int device);
int cuDeviceGet(int* handle, int device) {
  CALL("cuDeviceGet");
  return device ? fail(INVALID_DEVICE, "cuDeviceGet(%d): there is one device", device) : (*handle = 0, SUCCESS);
}
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  CALL("cuDeviceGetAttribute");
  return cudaDeviceGetAttribute(value, attribute, device);
}

int cuGetErrorString(int code, const char** text) {
  *text = code == last_code && !last_text.empty() ? last_text.c_str() : text_of(code);
  return SUCCESS;
}

int cuModuleLoadData(void** module, const void* image) {
  CALL("cuModuleLoadData");
  if (int refused = forbidden("cuModuleLoadData")) return refused;
  auto images = images_of(static_cast<const char*>(image));
  if (images.empty()) return fail(INVALID_VALUE, "cuModuleLoadData of what is no fatbin and no cubin");
  auto fits = [](auto& each) { return each.runs_on(state().arch); };
  if (std::none_of(images.begin(), images.end(), fits)) {
    std::string made;
    for (auto& each : images) {
      made += (made.empty() ? "" : ", ") + std::string(each.machine_code ? "SASS sm_" : "PTX sm_") + std::to_string(each.arch);
      if (each.variant) made += each.variant;
    }
    return fail(NO_BINARY, "the module is made for %s, the device is sm_%u", made.c_str(), state().arch);
  }
  // Machine code comes before PTX, code for the device alone before code that later ones run too, then the latest.
  auto worse = [](const Image& one, const Image& other) {
    return std::tuple(one.machine_code, bool(one.variant), one.arch) < std::tuple(other.machine_code, bool(other.variant), other.arch);
  };
  const Image* chosen = nullptr;
  for (auto& each : images) {
    if (fits(each) && (!chosen || worse(*chosen, each))) chosen = &each;
  }
  // The stand-in compiles no PTX: the machine code that was made of it stands for it.
  auto code = std::find_if(images.begin(), images.end(), [&](auto& each) {
    return each.machine_code && each.arch == chosen->arch && each.variant == chosen->variant;
  });
  if (code == images.end()) return fail(NO_BINARY, "the stand-in reads machine code, the module has none");
  uint64_t size = 0;
  for (auto& each : images) size = std::max<uint64_t>(size, each.data + each.size - static_cast<const char*>(image));
  auto made = new Module{static_cast<const char*>(image), size, *code, images};
  state().handles["module"].insert(made);
  return *module = made, SUCCESS;
}

int cuModuleGetFunction(void** function, void* module, const char* name) {
  CALL("cuModuleGetFunction");
  auto owner = known<Module>("module", module);
  if (!owner) return fail(INVALID_HANDLE, "cuModuleGetFunction of an unknown module");
  Function made{owner, name, {}, 0};
  if (!read_code(owner->chosen, name, made.code)) return fail(NOT_FOUND, "the module has no kernel %s", name);
  for (auto& each : owner->images) {  // one host launches them all
    Code other;
    if (each.machine_code && read_code(each, name, other) && other.parameters != made.code.parameters)
      return fail(INVALID_VALUE, "%s has other parameters in its code for sm_%u than for sm_%u", name, each.arch, owner->chosen.arch);
  }
  auto& s = state();
  if (s.found) {
    s.mutex.unlock();
    made.kernel = s.found(owner->image, owner->size, name);
    s.mutex.lock();
    if (made.kernel < 0) return fail(NOT_FOUND, "nobody kept the source of %s", name);
  }
  auto kept = new Function(made);
  s.handles["function"].insert(kept);
  return *function = kept, SUCCESS;
}

int cuModuleUnload(void* module) {
  CALL("cuModuleUnload");
  auto owner = known<Module>("module", module);
  if (!owner) return fail(INVALID_HANDLE, "cuModuleUnload of an unknown module");
  wait_for(everything());  // its kernels are run before they go
  auto& functions = state().handles["function"];
  for (auto each = functions.begin(); each != functions.end();) {
    auto function = static_cast<Function*>(*each);
    if (function->module == owner) {
      each = functions.erase(each);
      delete function;
    } else {
      ++each;
    }
  }
  state().handles["module"].erase(module);
  delete owner;
  return SUCCESS;
}

int cuFuncSetAttribute(void* handle, int attribute, int value) {
  CALL("cuFuncSetAttribute");
  constexpr int MOST_DYNAMIC_SHARED = 8;
  auto function = known<Function>("function", handle);
  if (!function) return fail(INVALID_HANDLE, "cuFuncSetAttribute of an unknown function");
  if (attribute != MOST_DYNAMIC_SHARED) return SUCCESS;
  if (value < 0 || unsigned(value) > allowed_shared(*function))
    return fail(INVALID_VALUE, "%s wants %d bytes of shared memory, the device has %u for it", function->name.c_str(), value,
                allowed_shared(*function));
  function->most_dynamic = std::max<unsigned>(value, 48 << 10);
  return SUCCESS;
}

int cuLaunchKernel(
    void* handle, unsigned x, unsigned y, unsigned z, unsigned threads_x, unsigned threads_y, unsigned threads_z,
    unsigned dynamic, void* stream, void** arguments, void** extra) {
  CALL("cuLaunchKernel");
  auto function = known<Function>("function", handle);
  if (!function) return fail(INVALID_HANDLE, "cuLaunchKernel of an unknown function");
  auto on = stream_of(stream);
  if (!on) return fail(INVALID_HANDLE, "%s in an unknown stream", function->name.c_str());
  if (extra || !arguments) return fail(INVALID_VALUE, "%s without a list of its arguments", function->name.c_str());
  return launch(function, x, y, z, threads_x * threads_y * threads_z, dynamic, on, arguments);
}

struct LaunchAttribute {
  int id, pad, value;
  char rest[60];
};

struct LaunchConfiguration {
  unsigned x, y, z, threads_x, threads_y, threads_z, dynamic;
  void* stream;
  LaunchAttribute* attributes;
  unsigned count;
};

int cuLaunchKernelEx(const LaunchConfiguration* given, void* handle, void** arguments, void** extra) {
  CALL("cuLaunchKernelEx");
  constexpr int PROGRAMMATIC_STREAM_SERIALIZATION = 6;
  auto function = known<Function>("function", handle);
  if (!function) return fail(INVALID_HANDLE, "cuLaunchKernelEx of an unknown function");
  auto name = function->name.c_str();
  auto on = stream_of(given->stream);
  if (!on) return fail(INVALID_HANDLE, "%s in an unknown stream", name);
  if (extra || !arguments) return fail(INVALID_VALUE, "%s without a list of its arguments", name);
  bool early = false;
  for (unsigned index = 0; index < given->count; index++) {
    auto& attribute = given->attributes[index];
    if (attribute.id != PROGRAMMATIC_STREAM_SERIALIZATION)
      return fail(INVALID_VALUE, "%s with launch attribute %d, which the stand-in does not know", name, attribute.id);
    early |= attribute.value != 0;
  }
  if (early && state().arch < 90) return fail(INVALID_VALUE, "%s is launched early, on sm_%u", name, state().arch);
  auto threads = given->threads_x * given->threads_y * given->threads_z;
  return launch(function, given->x, given->y, given->z, threads, given->dynamic, on, arguments, early);
}
