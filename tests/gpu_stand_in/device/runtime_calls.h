// libcudart: memory, streams, events, captures, graphs. Inside of driver.cpp's extern "C".

const char* cudaGetErrorString(int code) {
  return code && code == last_code && !last_text.empty() ? last_text.c_str() : text_of(code);
}
const char* cudaGetErrorName(int code) { return text_of(code); }
int cudaGetLastError() {
  auto code = state().broken ? state().broken : last_error;
  return last_error = 0, code;
}
int cudaPeekAtLastError() { return state().broken ? state().broken : last_error; }

// --- The device

int cudaGetDeviceCount(int* count) { return *count = 1, SUCCESS; }
int cudaGetDevice(int* device) {
  CALL("cudaGetDevice");
  return *device = 0, SUCCESS;
}
int cudaSetDevice(int device) {
  CALL("cudaSetDevice");
  return device ? fail(INVALID_DEVICE, "cudaSetDevice(%d): there is one device", device) : SUCCESS;
}
int cudaDeviceGetAttribute(int* value, int attribute, int) {
  constexpr int WARP = 10, PROCESSORS = 16, MAJOR = 75, MINOR = 76, SHARED_OPT_IN = 97;
  auto& s = state();
  *value = attribute == MAJOR ? s.arch / 10 : attribute == MINOR ? s.arch % 10 : attribute == WARP ? 32
      : attribute == PROCESSORS ? s.multiprocessors : attribute == SHARED_OPT_IN ? s.most_shared : 0;
  return SUCCESS;
}
int cudaMemGetInfo(size_t* available, size_t* total) {
  CALL("cudaMemGetInfo");
  *total = state().total;
  return *available = *total - std::min(*total, state().memory.used()), SUCCESS;
}
int cudaDeviceSynchronize() {
  CALL("cudaDeviceSynchronize");
  if (int refused = forbidden("cudaDeviceSynchronize")) return refused;
  wait_for(everything());
  return broken();
}

// --- Memory

int cudaMalloc(void** data, size_t size) {
  CALL("cudaMalloc");
  if (int refused = forbidden("cudaMalloc")) return refused;
  return allocate("cudaMalloc", data, size, nullptr);
}
int cudaFree(void* data) {
  CALL("cudaFree");
  if (!data) return SUCCESS;
  if (int refused = forbidden("cudaFree")) return refused;
  wait_for(everything());
  return release("cudaFree", data, nullptr);
}
int cudaMallocAsync(void** data, size_t size, void* stream) {
  CALL("cudaMallocAsync");
  auto on = stream_of(stream);
  return on ? allocate("cudaMallocAsync", data, size, on) : fail(INVALID_HANDLE, "cudaMallocAsync in an unknown stream");
}
int cudaFreeAsync(void* data, void* stream) {
  CALL("cudaFreeAsync");
  auto on = stream_of(stream);
  return on ? release("cudaFreeAsync", data, on) : fail(INVALID_HANDLE, "cudaFreeAsync in an unknown stream");
}
int cudaMallocHost(void** data, size_t size) {
  CALL("cudaMallocHost");
  *data = aligned_alloc(4096, (size + 4095) / 4096 * 4096);
  pinned().ranges[reinterpret_cast<uint64_t>(*data)] = size;
  return SUCCESS;
}
int cudaHostAlloc(void** data, size_t size, unsigned) { return cudaMallocHost(data, size); }
int cudaFreeHost(void* data) {
  CALL("cudaFreeHost");
  if (!data) return SUCCESS;
  if (!pinned().ranges.count(reinterpret_cast<uint64_t>(data))) return fail(INVALID_VALUE, "cudaFreeHost of %p", data);
  wait_for(everything());
  pinned().ranges.erase(reinterpret_cast<uint64_t>(data));
  return free(data), SUCCESS;
}
int cudaMemcpy(void* to, const void* from, size_t size, int kind) {
  CALL("cudaMemcpy");
  return copy("cudaMemcpy", to, from, size, kind, streams().legacy.get(), true);
}
int cudaMemcpyAsync(void* to, const void* from, size_t size, int kind, void* stream) {
  CALL("cudaMemcpyAsync");
  auto on = stream_of(stream);
  if (!on) return fail(INVALID_HANDLE, "cudaMemcpyAsync in an unknown stream");
  return copy("cudaMemcpyAsync", to, from, size, kind, on, false);
}
int cudaMemset(void* to, int value, size_t size) {
  CALL("cudaMemset");
  return set("cudaMemset", to, value, size, streams().legacy.get());
}
int cudaMemsetAsync(void* to, int value, size_t size, void* stream) {
  CALL("cudaMemsetAsync");
  auto on = stream_of(stream);
  return on ? set("cudaMemsetAsync", to, value, size, on) : fail(INVALID_HANDLE, "cudaMemsetAsync in an unknown stream");
}
struct PointerAttributes {
  int type, device;
  void *device_data, *host_data;
};
int cudaPointerGetAttributes(PointerAttributes* found, const void* data) {
  CALL("cudaPointerGetAttributes");
  auto address = reinterpret_cast<uint64_t>(data);
  bool on_device = state().memory.holds(address), on_host = pinned().holds(address);
  auto mine = const_cast<void*>(data);
  *found = {on_device ? 2 : on_host ? 1 : 0, on_device || on_host ? 0 : -2, on_device ? mine : nullptr, on_device ? nullptr : mine};
  return SUCCESS;
}

// --- Streams

int cudaStreamCreateWithFlags(void** stream, unsigned flags) {
  CALL("cudaStreamCreate");
  auto made = std::make_shared<Stream>();
  made->blocking = !(flags & 1);
  streams().all[made.get()] = made;
  return *stream = made.get(), SUCCESS;
}
int cudaStreamCreate(void** stream) { return cudaStreamCreateWithFlags(stream, 0); }
int cudaStreamCreateWithPriority(void** stream, unsigned flags, int) { return cudaStreamCreateWithFlags(stream, flags); }
int cudaStreamDestroy(void* stream) {
  CALL("cudaStreamDestroy");
  auto on = stream_of(stream);
  if (!on || on == streams().legacy.get()) return fail(INVALID_HANDLE, "cudaStreamDestroy of an unknown stream");
  if (on->capture) {
    on->capture->broken = CAPTURE_INVALIDATED;
    streams().captures.erase(on->capture);
  }
  wait_for(on);
  streams().all.erase(on);
  return SUCCESS;
}
int cudaStreamSynchronize(void* stream) {
  CALL("cudaStreamSynchronize");
  auto on = stream_of(stream);
  if (!on) return fail(INVALID_HANDLE, "cudaStreamSynchronize of an unknown stream");
  if (int refused = forbidden_in("cudaStreamSynchronize", on)) return refused;
  wait_for(on);
  return broken();
}
int cudaStreamQuery(void* stream) {
  CALL("cudaStreamQuery");
  auto on = stream_of(stream);
  if (!on) return fail(INVALID_HANDLE, "cudaStreamQuery of an unknown stream");
  if (int refused = forbidden_in("cudaStreamQuery", on)) return refused;
  if (on->done == on->issued) return SUCCESS;
  wait_for({Point{on->shared_from_this(), on->done + 1}});  // who asks again and again will see it done
  return NOT_READY;
}

// --- Events

int cudaEventCreateWithFlags(void** event, unsigned) {
  CALL("cudaEventCreate");
  auto made = new Event;
  state().handles["event"].insert(made);
  return *event = made, SUCCESS;
}
int cudaEventCreate(void** event) { return cudaEventCreateWithFlags(event, 0); }
int cudaEventDestroy(void* event) {
  CALL("cudaEventDestroy");
  auto one = known<Event>("event", event);
  if (!one) return fail(INVALID_HANDLE, "cudaEventDestroy of an unknown event");
  state().handles["event"].erase(event);
  return delete one, SUCCESS;
}
int cudaEventRecord(void* event, void* stream) {
  CALL("cudaEventRecord");
  auto one = known<Event>("event", event);
  auto on = stream_of(stream);
  if (!one || !on) return fail(INVALID_HANDLE, "cudaEventRecord of an unknown %s", one ? "stream" : "event");
  one->point = {on->shared_from_this(), on->issued};
  one->capture = on->capture;
  one->captured = on->captured;
  return SUCCESS;
}
int cudaEventRecordWithFlags(void* event, void* stream, unsigned) { return cudaEventRecord(event, stream); }
int cudaEventQuery(void* event) {
  CALL("cudaEventQuery");
  auto one = known<Event>("event", event);
  if (!one) return fail(INVALID_HANDLE, "cudaEventQuery of an unknown event");
  if (int refused = forbidden("cudaEventQuery")) return refused;
  auto& stream = one->point.stream;
  if (!stream || stream->done >= one->point.number) return SUCCESS;
  wait_for({Point{stream, stream->done + 1}});
  return broken() ? broken() : NOT_READY;
}
int cudaEventSynchronize(void* event) {
  CALL("cudaEventSynchronize");
  auto one = known<Event>("event", event);
  if (!one) return fail(INVALID_HANDLE, "cudaEventSynchronize of an unknown event");
  if (int refused = forbidden("cudaEventSynchronize")) return refused;
  if (one->point.stream) wait_for({one->point});
  return broken();
}
int cudaEventElapsedTime(float* milliseconds, void*, void*) { return *milliseconds = 0, SUCCESS; }
int cudaStreamWaitEvent(void* stream, void* event, unsigned) {
  CALL("cudaStreamWaitEvent");
  auto one = known<Event>("event", event);
  auto on = stream_of(stream);
  if (!one || !on) return fail(INVALID_HANDLE, "cudaStreamWaitEvent of an unknown %s", one ? "stream" : "event");
  if (one->capture) {  // the stream joins its capture
    if (on->capture && on->capture != one->capture) return fail(CAPTURE_INVALIDATED, "an event of another capture");
    if (!on->capture) {
      on->captured = on->joined = 0;
      one->capture->streams.insert(on);
    }
    on->capture = one->capture;
    one->point.stream->joined = one->captured;
  } else if (on->capture) {
    return forbidden_in("cudaStreamWaitEvent for an event from before the capture", on);
  } else if (one->point.stream) {
    on->next_after.push_back(one->point);
  }
  return SUCCESS;
}

// --- Captures and graphs

int cudaStreamBeginCapture(void* stream, int mode) {
  CALL("cudaStreamBeginCapture");
  auto on = stream_of(stream);
  if (!on) return fail(INVALID_HANDLE, "cudaStreamBeginCapture of an unknown stream");
  if (on == streams().legacy.get()) return fail(CAPTURE_UNSUPPORTED, "cudaStreamBeginCapture of the legacy stream");
  if (on->capture) return fail(INVALID_VALUE, "cudaStreamBeginCapture of a stream that is captured");
  auto graph = std::make_shared<Graph>();
  graph->id = ++streams().last_graph;
  streams().graphs[graph->id] = graph;
  on->captured = on->joined = 0;
  on->capture = std::make_shared<Capture>(Capture{graph, on, mode, std::this_thread::get_id(), 0, {on}});
  streams().captures.insert(on->capture);
  return SUCCESS;
}
int cudaStreamEndCapture(void* stream, void** graph) {
  *graph = nullptr;
  Lock lock(state().mutex);  // even after a failure: who ends it must be able to
  int refused = called("cudaStreamEndCapture");
  auto on = stream_of(stream);
  auto capture = on ? on->capture : nullptr;
  if (!capture || capture->origin != on)
    return refused ? refused : fail(CAPTURE_UNMATCHED, "cudaStreamEndCapture of a stream that is not captured");
  bool unjoined = false;
  for (auto each : capture->streams) {
    unjoined |= each != on && each->joined < each->captured;
    each->capture = nullptr;
  }
  streams().captures.erase(capture);
  if (refused || capture->broken || unjoined) {
    release_graph(*capture->graph);
    if (refused) return refused;
    return capture->broken ? fail(CAPTURE_INVALIDATED, "the capture ends") : fail(CAPTURE_UNJOINED, "the capture ends");
  }
  state().memory.each([&](Block& block) {  // of what a replay is to fill there is the memory already
    if (block.graph == capture->graph->id && block.held) state().memory.start(block);
  });
  auto made = new std::shared_ptr<Graph>(capture->graph);
  state().handles["graph"].insert(made);
  return *graph = made, SUCCESS;
}
int cudaStreamIsCapturing(void* stream, int* status) {
  CALL("cudaStreamIsCapturing");
  auto on = stream_of(stream);
  if (!on) return fail(INVALID_HANDLE, "cudaStreamIsCapturing of an unknown stream");
  return *status = on->capture ? (on->capture->broken ? 2 : 1) : 0, SUCCESS;
}
int cudaThreadExchangeStreamCaptureMode(int* mode) {
  static thread_local int mine = GLOBAL;
  std::swap(*mode, mine);
  return SUCCESS;
}
int cudaGraphInstantiate(void** executable, void* graph, uint64_t) {
  CALL("cudaGraphInstantiate");
  auto one = known<std::shared_ptr<Graph>>("graph", graph);
  if (!one) return fail(INVALID_HANDLE, "cudaGraphInstantiate of an unknown graph");
  auto made = new std::shared_ptr<Graph>(*one);
  state().handles["executable"].insert(made);
  return *executable = made, SUCCESS;
}
int cudaGraphInstantiateWithFlags(void** executable, void* graph, uint64_t flags) {
  return cudaGraphInstantiate(executable, graph, flags);
}
int cudaGraphLaunch(void* executable, void* stream) {
  CALL("cudaGraphLaunch");
  auto one = known<std::shared_ptr<Graph>>("executable", executable);
  auto on = stream_of(stream);
  if (!one || !on) return fail(INVALID_HANDLE, "cudaGraphLaunch of an unknown %s", one ? "stream" : "graph");
  return submit("cudaGraphLaunch", on, [graph = *one] {
    for (auto& node : graph->nodes)
      if (!state().broken) node();
  });
}
static int drop_graph(const char* name, const char* kind, void* handle) {
  auto one = known<std::shared_ptr<Graph>>(kind, handle);
  if (!one) return fail(INVALID_HANDLE, "%s of an unknown graph", name);
  wait_for(everything());
  state().handles[kind].erase(handle);
  auto graph = *one;
  delete one;
  for (auto other : {"graph", "executable"})
    for (auto each : state().handles[other])
      if (*static_cast<std::shared_ptr<Graph>*>(each) == graph) return SUCCESS;
  return release_graph(*graph), SUCCESS;
}
int cudaGraphDestroy(void* graph) {
  CALL("cudaGraphDestroy");
  return drop_graph("cudaGraphDestroy", "graph", graph);
}
int cudaGraphExecDestroy(void* executable) {
  CALL("cudaGraphExecDestroy");
  return drop_graph("cudaGraphExecDestroy", "executable", executable);
}

// Of what the caller must give back: "block", "stream", "event", "module", "function", "graph", "executable", "pinned".
int64_t stand_in_count(const char* kind) {
  Lock lock(state().mutex);
  std::string what = kind;
  if (what == "block") return state().memory.held();
  if (what == "bytes") return state().memory.used();
  if (what == "stream") return streams().all.size() - 1;
  if (what == "pinned") return pinned().ranges.size();
  if (what == "capture") return streams().captures.size();
  return state().handles[what].size();
}
