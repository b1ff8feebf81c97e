// The one device of the process: its properties, what was refused, which call is to fail, and handles.

#pragma once

#include <cstdarg>
#include <cstdio>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "memory.h"

namespace stand_in {

enum : int {
  SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_COPY_KIND = 21, INVALID_DEVICE = 101, NO_BINARY = 209,
  INVALID_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600, ILLEGAL_ADDRESS = 700, OUT_OF_RESOURCES = 701,
  MISALIGNED_ADDRESS = 716, LAUNCH_FAILED = 719, CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901,
  CAPTURE_UNMATCHED = 903, CAPTURE_UNJOINED = 904, CAPTURE_IMPLICIT = 906,
};  // clang-format off

inline const char* text_of(int code) {
  switch (code) {
    case SUCCESS: return "no error";
    case INVALID_VALUE: return "invalid argument";
    case OUT_OF_MEMORY: return "out of memory";
    case INVALID_COPY_KIND: return "invalid copy direction for memcpy";
    case INVALID_DEVICE: return "invalid device ordinal";
    case NO_BINARY: return "no kernel image is available for execution on the device";
    case INVALID_HANDLE: return "invalid resource handle";
    case NOT_FOUND: return "named symbol not found";
    case NOT_READY: return "device not ready";
    case ILLEGAL_ADDRESS: return "an illegal memory access was encountered";
    case OUT_OF_RESOURCES: return "too many resources requested for launch";
    case MISALIGNED_ADDRESS: return "misaligned address";
    case LAUNCH_FAILED: return "unspecified launch failure";
    case CAPTURE_UNSUPPORTED: return "operation not permitted when stream is capturing";
    case CAPTURE_INVALIDATED: return "operation failed due to a previous error during capture";
    case CAPTURE_UNMATCHED: return "stream capture was not begun in this stream";
    case CAPTURE_UNJOINED: return "capturing stream has unjoined work";
    case CAPTURE_IMPLICIT: return "operation would make the legacy stream depend on a capturing blocking stream";
    default: return "unknown error";
  }
}

using Found = int64_t (*)(const char* image, uint64_t size, const char* name);
using Launched = int (*)(int64_t kernel, unsigned x, unsigned y, unsigned z, void** arguments, int count, int early);

struct State {
  Memory memory;
  std::mutex mutex;
  unsigned arch = 90, most_shared = 232448, multiprocessors = 132;
  uint64_t total = 8ull << 30;
  Found found = nullptr;  // Python's, for a kernel that is asked for
  Launched launched = nullptr;  // and for a launch whose turn has come; neither: nothing is computed
  int broken = 0;  // what a kernel did stays: every later call fails
  std::string reason;
  std::vector<std::string> journal;
  std::map<std::string, int64_t> calls;
  std::string to_fail;
  int64_t fail_at = 0;
  int fail_with = 0;
  std::map<std::string, std::set<void*>> handles;
};

inline State& state() {
  static auto& one = *new State;  // it outlives what is freed as the process ends
  return one;
}

inline thread_local int last_code = 0, last_error = 0;
inline thread_local std::string last_text;

// A call's failure: the code it returns, and a line for those who ask for the code's text.
__attribute__((format(printf, 2, 3))) inline int fail(int code, const char* format, ...) {
  char line[1024];
  va_list values;
  va_start(values, format);
  vsnprintf(line, sizeof line, format, values);
  va_end(values);
  last_code = last_error = code;
  last_text = std::string(text_of(code)) + " (" + line + ")";
  state().journal.push_back(last_text);
  return code;
}

// A kernel's or a queued copy's failure, told at the next call.
inline void break_down(int code, const std::string& reason) {
  auto& s = state();
  if (s.broken) return;
  s.broken = code;
  s.reason = std::string(text_of(code)) + " (" + reason + ")";
  s.journal.push_back(s.reason);
}

inline int broken() {
  auto& s = state();
  if (s.broken) {
    last_code = last_error = s.broken;
    last_text = s.reason;
  }
  return s.broken;
}

// What each call begins with.
inline int called(const char* name) {
  auto& s = state();
  auto number = ++s.calls[name];
  if (s.to_fail == name && (s.fail_at == 0 || s.fail_at == number)) {
    last_code = last_error = s.fail_with;
    last_text = std::string(text_of(s.fail_with)) + " (" + name + ", made to fail at its call " + std::to_string(number) + ")";
    return s.fail_with;
  }
  return broken();
}

template <typename T>
T* known(const char* kind, void* handle) {
  auto& all = state().handles[kind];
  return all.count(handle) ? static_cast<T*>(handle) : nullptr;
}

}  // namespace stand_in
