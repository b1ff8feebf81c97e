// Streams as queues: work waits until something waits for it. Events, captures and graphs.

#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "state.h"

namespace stand_in {

struct Stream;

// All work of a stream up to a number.
struct Point {
  std::shared_ptr<Stream> stream;
  uint64_t number = 0;
};

using Task = std::function<void()>;

struct Work {
  Task run;
  std::vector<Point> after;
};

struct Graph {
  int64_t id;
  std::vector<Task> nodes;
  bool released = false;
};

enum CaptureMode : int { GLOBAL, THREAD_LOCAL, RELAXED };

struct Capture {
  std::shared_ptr<Graph> graph;
  Stream* origin;
  int mode;
  std::thread::id thread;
  int broken = 0;
  std::set<Stream*> streams;
};

struct Stream : std::enable_shared_from_this<Stream> {
  bool blocking = true;  // ordered with the legacy stream
  std::deque<Work> queue;
  std::vector<Point> next_after;
  uint64_t issued = 0, done = 0, captured = 0, joined = 0;
  std::shared_ptr<Capture> capture;
};

struct Event {
  Point point;
  std::shared_ptr<Capture> capture;
  uint64_t captured = 0;
};

struct Streams {
  std::shared_ptr<Stream> legacy = std::make_shared<Stream>();
  std::map<Stream*, std::shared_ptr<Stream>> all{{legacy.get(), legacy}};
  std::set<std::shared_ptr<Capture>> captures;
  std::map<int64_t, std::weak_ptr<Graph>> graphs;
  int64_t last_graph = 0;
  std::thread::id runs;
  std::condition_variable idle;
};

inline Streams& streams() {
  static auto& one = *new Streams;
  return one;
}

inline Stream* stream_of(void* handle) {
  if (reinterpret_cast<uintptr_t>(handle) <= 2) return streams().legacy.get();  // null, legacy, per thread
  auto found = streams().all.find(static_cast<Stream*>(handle));
  return found == streams().all.end() ? nullptr : found->first;
}

// --- What runs when something waits

inline void run_until(const Point& point) {
  auto stream = point.stream;
  while (stream->done < point.number) {
    Work work = std::move(stream->queue.front());
    stream->queue.pop_front();
    for (auto& other : work.after) run_until(other);
    if (!state().broken) work.run();
    stream->done++;
  }
}

// Kernels are run by Python, without the lock; another thread that waits meanwhile waits for this one. What Python frees
// while it runs one (a graph, a module) waits for nothing: no stream can get ahead of its own work.
inline void wait_for(const std::vector<Point>& points) {
  auto& s = streams();
  auto me = std::this_thread::get_id();
  if (s.runs == me) return;
  std::unique_lock lock(state().mutex, std::adopt_lock);
  s.idle.wait(lock, [&] { return s.runs == std::thread::id(); });
  s.runs = me;
  for (auto& point : points) run_until(point);
  s.runs = {};
  lock.release();
  s.idle.notify_all();
}

inline void wait_for(Stream* stream) { wait_for({Point{stream->shared_from_this(), stream->issued}}); }

inline std::vector<Point> everything() {
  std::vector<Point> found;
  for (auto& [_, stream] : streams().all) found.push_back({stream, stream->issued});
  return found;
}

// --- Captures

inline void break_capture(Capture& capture, int code) {
  if (!capture.broken) capture.broken = code;
}

// Calls that a capture forbids: those that wait, that allocate, that ask.
inline int forbidden(const char* name) {
  auto me = std::this_thread::get_id();
  int code = SUCCESS;
  for (auto& capture : streams().captures)
    if (capture->mode == GLOBAL || (capture->mode == THREAD_LOCAL && capture->thread == me)) {
      break_capture(*capture, CAPTURE_INVALIDATED);
      code = CAPTURE_UNSUPPORTED;
    }
  return code ? fail(code, "%s during a capture", name) : SUCCESS;
}

inline int forbidden_in(const char* name, Stream* stream) {
  if (!stream->capture) return SUCCESS;
  break_capture(*stream->capture, CAPTURE_INVALIDATED);
  return fail(CAPTURE_UNSUPPORTED, "%s in a stream that is captured", name);
}

// --- Work

inline int submit(const char* name, Stream* stream, Task task) {
  auto& s = streams();
  if (auto capture = stream->capture) {
    if (capture->broken) return fail(CAPTURE_INVALIDATED, "%s after what the capture refused", name);
    capture->graph->nodes.push_back(std::move(task));
    stream->captured++;
    return SUCCESS;
  }
  Work work{std::move(task), std::move(stream->next_after)};
  stream->next_after.clear();
  if (stream == s.legacy.get()) {
    for (auto& [_, other] : s.all) {
      if (!other->blocking || other.get() == stream) continue;
      if (other->capture) {
        break_capture(*other->capture, CAPTURE_INVALIDATED);
        return fail(CAPTURE_IMPLICIT, "%s in the legacy stream", name);
      }
      work.after.push_back({other, other->issued});
    }
    for (auto& capture : s.captures)
      if (capture->thread == std::this_thread::get_id())  // a GPU runs it now, and never again
        return fail(CAPTURE_IMPLICIT, "%s in the legacy stream, while its thread captures another", name);
  } else if (stream->blocking) {
    work.after.push_back({s.legacy, s.legacy->issued});
  }
  stream->queue.push_back(std::move(work));
  stream->issued++;
  return SUCCESS;
}

// --- Graphs' memory

// What a graph allocated is its own until it is gone; what it handed out, until that is freed as well.
inline void release_graph(Graph& graph) {
  if (graph.released) return;
  graph.released = true;
  auto& memory = state().memory;
  std::vector<Block*> mine;
  memory.each([&](Block& block) {
    if (block.graph == graph.id && !block.held) mine.push_back(&block);
  });
  for (auto block : mine) memory.forget(*block);
}

inline bool graph_lives(int64_t id) {
  auto found = streams().graphs.find(id);
  auto graph = found == streams().graphs.end() ? nullptr : found->second.lock();
  return graph && !graph->released;
}

}  // namespace stand_in
