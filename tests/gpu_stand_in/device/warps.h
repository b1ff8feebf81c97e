// Stands for a multiprocessor of sm_90: runs the source of a CUDA kernel on a CPU (``emulated_kernel.py``).
//
// A lane is a fiber. Lanes of a warp meet at its collective instructions, all lanes at barriers. Bulk copies fill their
// place with 0xFF when they are issued, and land later, each in two pieces. ``order`` says which warp goes on, which
// piece lands and which program is next; it is deterministic. What the hardware leaves undefined is an error.
#pragma once
#define EMULATED
#define __device__
#define __global__
#define __launch_bounds__(...)
#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

using Place = uint32_t;
struct Index { unsigned x, y, z; };
struct uint4 { uint32_t x, y, z, w; };

struct Launch {
  const uint16_t* x;
  const uint8_t *records, *next;
  int* counters;
  float* parts;
  uint16_t* out;
  int64_t x_bytes, records_bytes, next_bytes, counters_bytes, parts_bytes, out_bytes;
  int m, n, k, programs, shared, of_next, early, activation, row_tiles, order;
  int64_t copied, copied_early, asked;  // bytes
};

constexpr int LANES = 256, WARP = 32, SHARED_MOST = 227 << 10, STACK = 64 << 10;
enum State { READY, IN_WARP, IN_BLOCK, AT_BAR, DONE };
struct Lane { jmp_buf at; ucontext_t begin; State state; bool started, waited, released; Place bar; int phase; uint64_t met; };
struct Warp { int count; uint64_t met; int kind; uint32_t a[WARP][4], b[WARP][2]; float* d[WARP]; };
struct Barrier { int count, pending; int64_t expected; int phase; };
struct Piece { Place to; const uint8_t* from; int bytes; Place bar; };

static Launch* launch;
static Index threadIdx, blockIdx;
static char error[200];
static Lane lanes[LANES];
static Warp warps[LANES / WARP];
static int block_count, running;
static uint64_t block_met, stored_at, arrived_at, random_state;
static bool shown;
static uint8_t shared_bytes[SHARED_MOST], *stacks;
static Barrier barriers[SHARED_MOST / 8];
static std::vector<Piece> on_the_way;
static jmp_buf scheduler;

[[noreturn]] static void fail(const char* what) {
  snprintf(error, sizeof error, "%s (program %u, thread %d)", what, blockIdx.y, running);
  longjmp(scheduler, 2);
}
static void stop(State state) {  // until the scheduler goes on with this lane
  lanes[running].state = state;
  if (!setjmp(lanes[running].at)) longjmp(scheduler, 1);
}
static unsigned chance(unsigned among) {
  random_state = random_state * 6364136223846793005u + 1442695040888963407u;
  return static_cast<unsigned>(random_state >> 33) % among;
}
static void check(const void* at, int64_t bytes, const void* home, int64_t size, const char* what) {
  const auto *first = static_cast<const uint8_t*>(at), *begin = static_cast<const uint8_t*>(home);
  if (first < begin || first + bytes > begin + size) fail(what);
}
static uint8_t* shared_at(Place at, int bytes) {
  if (at % bytes || at + bytes > SHARED_BYTES) fail("shared memory is accessed out of bounds or unaligned");
  return shared_bytes + at;
}

enum Kind { SYNC = 1, MMA };
static float decoded(uint32_t bits) { float f; bits <<= 16; memcpy(&f, &bits, 4); return f; }
static void multiply(Warp& w) {  // m16n8k16; the sum of a row by a column is rounded once
  double a[16][16], b[8][16];
  for (int lane = 0; lane < WARP; ++lane) {
    const int row = lane / 4, k = lane % 4 * 2;
    for (int odd = 0; odd < 2; ++odd) {
      for (int r = 0; r < 4; ++r) a[row + r % 2 * 8][k + r / 2 * 8 + odd] = decoded(w.a[lane][r] >> 16 * odd & 0xFFFF);
      for (int r = 0; r < 2; ++r) b[row][k + r * 8 + odd] = decoded(w.b[lane][r] >> 16 * odd & 0xFFFF);
    }
  }
  for (int lane = 0; lane < WARP; ++lane)
    for (int r = 0; r < 4; ++r) {
      double sum = 0;
      for (int k = 0; k < 16; ++k) sum += a[lane / 4 + r / 2 * 8][k] * b[lane % 4 * 2 + r % 2][k];
      w.d[lane][r] = static_cast<float>(sum + w.d[lane][r]);
    }
}
static void meet(Kind kind) {  // the lanes of a warp
  Warp& w = warps[running / WARP];
  if (w.count && w.kind != kind) fail("lanes of a warp are at different instructions");
  w.kind = kind;
  if (++w.count < WARP) {
    lanes[running].met = w.met;
    stop(IN_WARP);
    return;
  }
  if (kind == MMA) multiply(w);
  w.count = 0;
  ++w.met;
  lanes[running].met = w.met - 1;
  stop(IN_WARP);  // another warp may go on
}

// What the source calls, in the order of its own definitions.
static Place shared_memory() { return 0; }
static uint4 load4(Place at) { uint4 v; memcpy(&v, shared_at(at, 16), 16); return v; }
static uint32_t load1(Place at) { uint32_t v; memcpy(&v, shared_at(at, 4), 4); return v; }
static uint32_t load_half(Place at) { uint16_t v; memcpy(&v, shared_at(at, 2), 2); return v; }
static void store4(Place at, float x, float y, float z, float w) {
  const float v[4] = {x, y, z, w};
  memcpy(shared_at(at, 16), v, 16);
}
static void store1(Place at, uint32_t value) { memcpy(shared_at(at, 4), &value, 4); }
static float number(uint32_t bits) { float f; memcpy(&f, &bits, 4); return f; }
static void sync_threads() {
  lanes[running].met = block_met;
  if (++block_count == LANES) block_count = 0, ++block_met;
  stop(IN_BLOCK);
}
static void sync_warp() { meet(SYNC); }
static Barrier& set_up(Place at) {
  Barrier& bar = barriers[at / 8];
  if (at % 8 || at + 8 > SHARED_BYTES || !bar.count) fail("a barrier is used before it is set up");
  return bar;
}
static void turn(Barrier& bar) {
  if (bar.pending || bar.expected) return;
  bar.phase ^= 1;
  bar.pending = bar.count;
}
static void init(Place at, int count) { barriers[at / 8] = {count, count, 0, 0}; shown = false; }
static void show_bars() { shown = true; }
static void arrive(Place at) {
  Barrier& bar = set_up(at);
  --bar.pending;
  turn(bar);
}
static void arrive_expecting(Place at, int bytes) {
  set_up(at).expected += bytes;
  arrive(at);
}
static void wait(Place at, int phase) {
  if (set_up(at).phase != phase) {
    if (launch->order == 3) stop(READY);  // the lanes of a warp part
    return;
  }
  lanes[running].bar = at, lanes[running].phase = phase;
  stop(AT_BAR);
}
static void copy(Place to, const void* from, int bytes, Place at) {
  set_up(at);
  if (!shown) fail("a copy begins before its barrier is shown to the engine");
  check(from, bytes, launch->records, launch->records_bytes, "a copy reads outside the weight");
  if (to % 16 || bytes % 16 || reinterpret_cast<uintptr_t>(from) % 16) fail("a copy is not of multiples of 16");
  if (to + bytes > SHARED_BYTES) fail("a copy writes outside shared memory");
  for (const Piece& each : on_the_way)
    if (to < each.to + each.bytes && each.to < to + bytes) fail("two copies to one place are on the way");
  memset(shared_bytes + to, 0xFF, bytes);
  launch->copied += bytes;
  if (!lanes[running].waited) launch->copied_early += bytes;
  const int half = bytes / 32 * 16;
  const auto* bytes_from = static_cast<const uint8_t*>(from);
  on_the_way.push_back({to, bytes_from, half, at});
  on_the_way.push_back({to + half, bytes_from + half, bytes - half, at});
}
static void land(size_t which) {
  const Piece piece = on_the_way[which];
  on_the_way.erase(on_the_way.begin() + which);
  memcpy(shared_bytes + piece.to, piece.from, piece.bytes);
  Barrier& bar = barriers[piece.bar / 8];
  bar.expected -= piece.bytes;
  if (bar.expected < 0) fail("bytes land that no barrier expects");
  turn(bar);
}
static void ask_l2(const void* from, int bytes) {
  check(from, bytes, launch->next, launch->next_bytes, "L2 is asked for bytes outside the next weight");
  launch->asked += bytes;
}
static void release_next_kernel() { lanes[running].released = true; }
static void wait_for_kernel_in_front() { lanes[running].waited = true; }
static void check_waited() {
  if (!lanes[running].waited) fail("memory is accessed before the wait for the kernel in front");
}
static uint4 load_x(const uint16_t* x, int block) {
  check_waited();
  check(x + block * 256, 16, launch->x, launch->x_bytes, "x is read outside its bounds");
  uint4 v;
  memcpy(&v, x + block * 256, 16);
  return v;
}
static float load_part(const float* from) {
  check_waited();
  check(from, 4, launch->parts, launch->parts_bytes, "sums are read outside their bounds");
  return *from;
}
static void store(float* to, float value) {
  check_waited();
  check(to, 4, launch->parts, launch->parts_bytes, "sums are written outside their bounds");
  if (arrived_at == block_met) fail("sums are stored and no barrier is between that and the arrival");
  stored_at = block_met;
  *to = value;
}
static void store(uint16_t* to, uint16_t value) {
  check_waited();
  check(to, 2, launch->out, launch->out_bytes, "results are written outside their bounds");
  *to = value;
}
static void store(int* to, int value) {
  check_waited();
  check(to, 4, launch->counters, launch->counters_bytes, "a counter is written outside its bounds");
  *to = value;
}
static int add_one(int* counter) {
  check_waited();
  check(counter, 4, launch->counters, launch->counters_bytes, "a counter is written outside its bounds");
  if (stored_at == block_met) fail("sums are stored and no barrier is between that and the arrival");
  arrived_at = block_met;
  return (*counter)++;
}
template <typename T>
static T kept(T value) { return value; }
static void mma(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  Warp& w = warps[running / WARP];
  const uint32_t a[4] = {a0, a1, a2, a3}, b[2] = {b0, b1};
  memcpy(w.a[running % WARP], a, sizeof a);
  memcpy(w.b[running % WARP], b, sizeof b);
  w.d[running % WARP] = d;
  meet(MMA);
}
static uint16_t bf16_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  if (value != value) return 0x7FC0;
  return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}
static float float_of_bf16(uint16_t value) { return decoded(value); }
static uint32_t times(uint32_t two, uint32_t powers) {
  return bf16_of(decoded(two & 0xFFFF) * decoded(powers & 0xFFFF)) |
         static_cast<uint32_t>(bf16_of(decoded(two >> 16) * decoded(powers >> 16))) << 16;
}
static float float_of_half(uint32_t half) {
  const int exponent = half >> 10 & 31, fraction = half & 1023;
  float f = exponent == 31 ? (fraction ? NAN : INFINITY) : ldexpf(exponent ? fraction + 1024 : fraction, (exponent ? exponent : 1) - 25);
  return half >> 15 & 1 ? -f : f;
}
static float float_of_byte(uint32_t bytes, int place, uint32_t) { return static_cast<float>(bytes >> 8 * place & 255); }
static float exp_of(float x) { return expf(x); }
static float tanh_of(float x) { return tanhf(x); }
static float quotient(float x, float y) { return x / y; }
static float sum(float x, float y) { return x + y; }

#define N launch->n
#define K launch->k
#define PROGRAMS launch->programs
#define SHARED launch->shared
#define OF_NEXT launch->of_next
#define EARLY launch->early
#define ACTIVATION launch->activation
