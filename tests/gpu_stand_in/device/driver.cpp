// CUDA's driver and runtime without a GPU, as far as an artifact's libraries, PyTorch's container and ExecuTorch's shims
// call them, and as strict as a GPU: memory that the host cannot touch, streams that run when something waits, launches
// checked against the machine code, graphs that capture and replay. Kernels are Python's to run (see stand_in_start).
//
//     g++ -std=c++20 -shared -fPIC -O1 -Wl,-soname,libcuda.so.1 -o libcuda.so.1 driver.cpp

#include <csignal>

#include "cubin.h"
#include "streams.h"

using namespace stand_in;
using Lock = std::lock_guard<std::mutex>;

#define CALL(name)                   \
  Lock lock(state().mutex);          \
  if (int refused = called(name)) return refused

static int64_t number(uint64_t value) { return static_cast<int64_t>(value); }

// --- Memory

static int allocate(const char* name, void** data, size_t size, Stream* stream) {
  auto& s = state();
  if (!size) return *data = nullptr, SUCCESS;
  if (s.memory.used() + size > s.total)
    return fail(OUT_OF_MEMORY, "%s of %zu bytes: %zu of %zu are taken", name, size, s.memory.used(), s.total);
  auto capture = stream ? stream->capture : nullptr;
  auto block = s.memory.reserve(size, capture ? capture->graph->id : 0);
  if (!block) return fail(OUT_OF_MEMORY, "%s of %zu bytes: no addresses are left", name, size);
  *data = reinterpret_cast<void*>(block->begin);
  if (!stream) return s.memory.start(*block), SUCCESS;
  if (int refused = submit(name, stream, [block] { state().memory.start(*block); })) {
    block->held = false;
    s.memory.forget(*block);
    return refused;
  }
  return SUCCESS;
}

static int release(const char* name, void* data, Stream* stream) {
  auto& s = state();
  if (!data) return SUCCESS;
  auto block = s.memory.find(reinterpret_cast<uint64_t>(data));
  if (!block || block->begin != reinterpret_cast<uint64_t>(data) || !block->held)
    return fail(INVALID_VALUE, "%s of %p, which %s", name, data, block ? "is free" : "nothing allocated");
  block->held = false;
  bool of_graph = block->graph && graph_lives(block->graph);
  if (stream && stream->capture && block->graph != stream->capture->graph->id) {  // from before the capture: no part of it
    stream->queue.push_back({[block] { state().memory.forget(*block); }, {}});
    return stream->issued++, SUCCESS;
  }
  if (of_graph && !(stream && stream->capture)) return SUCCESS;  // the graph's to give back
  if (stream && stream->capture) return submit(name, stream, [block] { state().memory.stop(*block); });
  if (stream) return submit(name, stream, [block] { state().memory.forget(*block); });
  s.memory.forget(*block);
  return SUCCESS;
}

static std::string place_of(uint64_t address) {
  auto block = state().memory.before(address);
  char line[256];
  if (!block) {
    snprintf(line, sizeof line, "no allocation");
  } else {
    auto offset = address - block->begin;
    snprintf(line, sizeof line, "byte %zu of %zu%s%s%s", offset, block->size, block->label.empty() ? "" : " of ",
             block->label.c_str(), block->live ? "" : block->held ? ", which its stream has yet to allocate" : ", which is free");
  }
  return line;
}

enum Kind { HOST_TO_HOST, HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE, BY_ADDRESS };

struct Pinned {
  std::map<uint64_t, uint64_t> ranges;
  bool holds(uint64_t address) const {
    auto next = ranges.upper_bound(address);
    return next != ranges.begin() && address - std::prev(next)->first < std::prev(next)->second;
  }
};
static Pinned& pinned() {
  static auto& one = *new Pinned;
  return one;
}

static int copy(const char* name, void* to, const void* from, size_t size, int kind, Stream* stream, bool waits) {
  auto& memory = state().memory;
  auto target = reinterpret_cast<uint64_t>(to), source = reinterpret_cast<uint64_t>(from);
  bool onto_device = memory.holds(target), from_device = memory.holds(source);
  if (!size) return SUCCESS;
  int actual = onto_device ? (from_device ? DEVICE_TO_DEVICE : HOST_TO_DEVICE) : (from_device ? DEVICE_TO_HOST : HOST_TO_HOST);
  if (kind < 0 || kind > BY_ADDRESS) return fail(INVALID_COPY_KIND, "%s by kind %d", name, kind);
  if (kind != BY_ADDRESS && kind != actual) {
    static const char* words[] = {"host to host", "host to device", "device to host", "device to device"};
    return fail(INVALID_VALUE, "%s said to be %s is %s", name, words[kind], words[actual]);
  }
  for (auto [address, there] : {std::pair{target, onto_device}, std::pair{source, from_device}})
    if (auto block = memory.find(address); there && (!block || !block->held || address + size > block->end()) &&
        !(block && block->graph && address + size <= block->end()))
      return fail(INVALID_VALUE, "%s of %zu bytes at %s", name, size, place_of(address).c_str());
  if (waits) {
    if (int refused = forbidden(name)) return refused;
  }
  bool host_is_pinned = pinned().holds(actual == DEVICE_TO_HOST ? target : source);
  if (stream->capture && actual != DEVICE_TO_DEVICE && !host_is_pinned) return forbidden_in(name, stream);
  std::shared_ptr<std::vector<char>> kept;
  if (actual == HOST_TO_DEVICE && !host_is_pinned)  // pageable memory is staged before the call returns
    kept = std::make_shared<std::vector<char>>(static_cast<const char*>(from), static_cast<const char*>(from) + size);
  // A GPU may be late with what the host is to read: until something waits for it, it is not there. (Of pageable memory
  // the call would wait by itself; code that relies on it fails where the memory is pinned.)
  if (actual == DEVICE_TO_HOST && !stream->capture) memset(to, 0xff, size);
  auto task = [=, text = std::string(name)] {
    auto& memory = state().memory;
    for (auto [address, there] : {std::pair{target, onto_device}, std::pair{source, from_device}})
      if (there && !memory.is_live(address, size))
        return break_down(ILLEGAL_ADDRESS, text + " of " + std::to_string(size) + " bytes at " + place_of(address));
    auto data = onto_device ? memory.shown(target) : static_cast<char*>(to);
    memmove(data, kept ? kept->data() : from_device ? memory.shown(source) : static_cast<const char*>(from), size);
  };
  if (int refused = submit(name, stream, task)) return refused;
  if (waits) wait_for(stream);
  return broken();
}

static int set(const char* name, void* to, int value, size_t size, Stream* stream) {
  auto address = reinterpret_cast<uint64_t>(to);
  auto block = state().memory.find(address);
  if (size && (!block || address + size > block->end()))
    return fail(INVALID_VALUE, "%s of %zu bytes at %s", name, size, place_of(address).c_str());
  return submit(name, stream, [=, text = std::string(name)] {
    auto& memory = state().memory;
    if (!memory.is_live(address, size)) return break_down(ILLEGAL_ADDRESS, text + " at " + place_of(address));
    memset(memory.shown(address), value, size);
  });
}

// --- Modules and launches

struct Module {
  const char* image;
  uint64_t size;
  Image chosen;
  std::vector<Image> images;
};

struct Function {
  Module* module;
  std::string name;
  Code code;
  int64_t kernel;
  unsigned most_dynamic = 48 << 10;
};

struct Launch {
  Function* function;
  std::string name;
  unsigned x, y, z;
  bool early;  // it may begin before the launch before it has ended
  std::vector<char> values;
  std::vector<Parameter> parameters;
};

static unsigned allowed_shared(const Function& function) {
  // The driver keeps 1 KB of a block for itself, which the machine code of sm_80 and later counts as its own.
  auto own = function.code.static_shared;
  return state().most_shared - (state().arch >= 80 && own >= 1024 ? own - 1024 : own);
}

static bool readable(const void* data, size_t size) {
  static int pipes[2] = {-1, -1};
  if (pipes[0] < 0 && pipe(pipes)) return true;
  char sink[64];
  auto wrote = write(pipes[1], data, std::min(size, sizeof sink));  // the system looks, where we would fault
  return wrote > 0 && read(pipes[0], sink, wrote) == wrote;
}

static void run(const Launch& launch) {
  auto& s = state();
  if (!known<Function>("function", launch.function))
    return break_down(ILLEGAL_ADDRESS, launch.name + " runs, its module is unloaded");
  if (!s.launched) return;
  std::vector<void*> arguments;
  for (auto& parameter : launch.parameters) arguments.push_back(const_cast<char*>(launch.values.data()) + parameter.offset);
  auto kernel = launch.function->kernel;
  s.mutex.unlock();
  int code = s.launched(kernel, launch.x, launch.y, launch.z, arguments.data(), int(arguments.size()), launch.early);
  s.mutex.lock();
  if (code) break_down(code, last_text.empty() ? "a kernel failed" : last_text);
}

static int launch(
    Function* function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned dynamic, Stream* stream,
    void** arguments, bool early = false) {
  auto name = function->name.c_str();
  auto& code = function->code;
  if (!x || !y || !z || x > 0x7fffffff || y > 65535 || z > 65535)
    return fail(INVALID_VALUE, "%s over a grid of %u x %u x %u", name, x, y, z);
  if (!threads || threads > 1024 || threads > code.most_threads || (code.required_threads && threads != code.required_threads))
    return fail(INVALID_VALUE, "%s by %u threads, compiled for %u", name, threads,
                code.required_threads ? code.required_threads : code.most_threads);
  if (code.registers * threads > 65536)
    return fail(OUT_OF_RESOURCES, "%s takes %u registers of %u threads, there are 65536", name, code.registers, threads);
  if (dynamic > function->most_dynamic || dynamic > allowed_shared(*function))
    return fail(INVALID_VALUE, "%s with %u bytes of shared memory, allowed are %u", name, dynamic,
                std::min(function->most_dynamic, allowed_shared(*function)));
  Launch one{function, function->name, x, y, z, early, {}, code.parameters};
  for (unsigned index = 0; index < code.parameters.size(); index++) {
    auto [offset, size] = code.parameters[index];
    if (!readable(arguments + index, sizeof(void*)) || !readable(arguments[index], size))
      return fail(INVALID_VALUE, "%s takes %zu arguments, number %u is not given", name, code.parameters.size(), index);
    if (one.values.size() < offset + size) one.values.resize(offset + size);
    memcpy(one.values.data() + offset, arguments[index], size);
  }
  return submit(name, stream, [one = std::move(one)] { run(one); });
}

static void touched(int signal, siginfo_t* what, void*) {
  auto address = reinterpret_cast<uint64_t>(what->si_addr);
  if (state().memory.holds(address)) {
    auto line = "the host touched device memory: " + place_of(address) + "\n";
    if (write(2, line.data(), line.size()) < 0) _exit(1);
    _exit(1);
  }
  std::signal(signal, SIG_DFL);
}

extern "C" {

// --- The tests' own

// `found` is asked for a kernel, by its whole image (fatbin or cubin) and its name, and gives a number; `launched` runs it.
void stand_in_start(Found found, Launched launched) {
  Lock lock(state().mutex);
  state().found = found;
  state().launched = launched;
  struct sigaction action = {};
  action.sa_sigaction = touched;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigaction(SIGSEGV, &action, nullptr);
  sigaction(SIGBUS, &action, nullptr);
}

void stand_in_device(unsigned arch, unsigned most_shared, uint64_t total, unsigned multiprocessors) {
  Lock lock(state().mutex);
  state().arch = arch;
  state().most_shared = most_shared;
  state().total = total;
  state().multiprocessors = multiprocessors;
}

// Call `name` fails with `code`: its `at`-th from now, 0: each. An empty name: none does.
void stand_in_fail(const char* name, int64_t at, int code) {
  Lock lock(state().mutex);
  state().to_fail = name;
  state().fail_at = at ? state().calls[name] + at : 0;
  state().fail_with = code;
}

int64_t stand_in_calls(const char* name) {
  Lock lock(state().mutex);
  return state().calls[name];
}

// What was refused and what went wrong so far, a line each.
const char* stand_in_journal() {
  static thread_local std::string text;
  Lock lock(state().mutex);
  text.clear();
  for (auto& line : state().journal) text += line + "\n";
  return text.c_str();
}

// As after a new process: what a kernel broke is whole, the journal empty.
void stand_in_recover() {
  Lock lock(state().mutex);
  state().broken = 0;
  state().journal.clear();
}

// The text of what the launch that runs now did wrong.
void stand_in_say(const char* text) { last_text = text; }

void stand_in_label(void* data, const char* label) {
  Lock lock(state().mutex);
  if (auto block = state().memory.find(reinterpret_cast<uint64_t>(data))) block->label = label;
}

// The allocation that an address lies in, or comes after: begin, bytes, live; 0 where there is none.
int stand_in_allocation(uint64_t address, uint64_t* begin, uint64_t* size, int* live) {
  Lock lock(state().mutex);
  auto block = state().memory.before(address);
  if (!block || !state().memory.holds(address)) return 0;
  *begin = block->begin;
  *size = block->size;
  *live = block->live;
  return 1;
}

const char* stand_in_place(uint64_t address) {
  static thread_local std::string text;
  Lock lock(state().mutex);
  text = state().memory.holds(address) ? place_of(address) : "the host's memory";
  return text.c_str();
}

// Checks a kernel's accesses and gives the addresses to read and write instead. -1, or the first that is wrong.
int64_t stand_in_access(const uint64_t* places, const uint8_t* mask, int64_t count, unsigned bytes, uint64_t* shown, int* code) {
  Lock lock(state().mutex);
  auto& memory = state().memory;
  Block* block = nullptr;
  for (int64_t index = 0; index < count; index++) {
    if (!mask[index]) {
      shown[index] = 0;
      continue;
    }
    auto place = places[index];
    if (!block || place < block->begin || place + bytes > block->end()) {
      block = memory.holds(place) ? memory.find(place) : nullptr;
      if (!block || !block->live || place + bytes > block->end()) return *code = ILLEGAL_ADDRESS, index;
    }
    if (place % bytes) return *code = MISALIGNED_ADDRESS, index;
    shown[index] = reinterpret_cast<uint64_t>(memory.shown(place));
  }
  return -1;
}

// The memory behind a live device address, for the tests to look at and to spoil.
char* stand_in_shown(void* data) { return state().memory.shown(reinterpret_cast<uint64_t>(data)); }

int stand_in_allocate(void** data, size_t size, void* stream) {
  CALL("allocate");
  auto on = stream_of(stream);
  if (!on) return fail(INVALID_HANDLE, "memory for an unknown stream");
  return allocate("allocation", data, size, on);
}

// Never refused: what it frees may have broken before.
void stand_in_free(void* data, void* stream) {
  Lock lock(state().mutex);
  auto on = stream_of(stream);
  if (release("free", data, on)) release("free", data, nullptr);
}

// Elements of `bytes` bytes, by sizes and strides in elements, on the device: a kernel of PyTorch's own.
int stand_in_copy_strided(
    void* to, const int64_t* to_strides, const void* from, const int64_t* from_strides, const int64_t* sizes,
    int64_t dimensions, size_t bytes, void* stream) {
  CALL("copy_strided");
  std::vector<int64_t> tos(to_strides, to_strides + dimensions), froms(from_strides, from_strides + dimensions);
  std::vector<int64_t> extent(sizes, sizes + dimensions);
  return submit("copy_", stream_of(stream), [=] {
    auto& memory = state().memory;
    std::vector<int64_t> at(dimensions, 0);
    for (bool more = true; more;) {
      auto target = reinterpret_cast<uint64_t>(to), source = reinterpret_cast<uint64_t>(from);
      for (int64_t d = 0; d < dimensions; d++) {
        target += at[d] * tos[d] * number(bytes);
        source += at[d] * froms[d] * number(bytes);
      }
      for (auto address : {target, source})
        if (!memory.is_live(address, bytes)) return break_down(ILLEGAL_ADDRESS, "copy_ at " + place_of(address));
      memcpy(memory.shown(target), memory.shown(source), bytes);
      int64_t d = dimensions - 1;
      for (; d >= 0 && ++at[d] == extent[d]; d--) at[d] = 0;
      more = d >= 0;
    }
  });
}

#include "driver_calls.h"
#include "runtime_calls.h"
}
