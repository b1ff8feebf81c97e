// The image for sm_90a of int4_records_small_m_kernel (kernel.py): weights come by bulk copies into a ring in shared
// memory. Entry, parameters, grid and the order of all sums are Triton's, so that results have the same bits.
//
// A warp takes a group of 32 of K, as in Triton's kernel. Eight warps have no room for a ninth: three programs of 288
// threads would have 72 registers a thread. So the warps take turns as the producer: the one whose turn it is waits until
// all have loaded a block, and has the next one copied to that block's stage. All stages are on the way before the wait
// for the kernel in front.
//
// bulk_copy.py defines N, K, PROGRAMS, ROWS, STAGES, SHARED, OF_NEXT, EARLY, ACTIVATION, SHARED_BYTES, and M if it is
// constant. Tests compile this file for a CPU, with the functions up to the line below replaced (EMULATED).
#ifndef EMULATED
#include <cstdint>

using Place = uint32_t;  // an address in shared memory

__device__ Place shared_memory() {
  extern __shared__ uint8_t memory[];
  return static_cast<Place>(__cvta_generic_to_shared(memory));
}
__device__ uint4 load4(Place at) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at));
  return v;
}
__device__ uint32_t load1(Place at) {
  uint32_t v;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(at));
  return v;
}
__device__ uint32_t load_half(Place at) {
  uint16_t v;
  asm volatile("ld.shared.b16 %0, [%1];" : "=h"(v) : "r"(at));
  return v;
}
__device__ void store4(Place at, float x, float y, float z, float w) {
  asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(at), "f"(x), "f"(y), "f"(z), "f"(w) : "memory");
}
__device__ void store1(Place at, uint32_t value) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(value) : "memory");
}
__device__ float number(uint32_t bits) { return __uint_as_float(bits); }
__device__ void sync_threads() { __syncthreads(); }
__device__ void sync_warp() { __syncwarp(); }

__device__ void init(Place bar, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
__device__ void show_bars() {  // to the engine that copies
  asm volatile("fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ void arrive(Place bar) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory"); }
__device__ void arrive_expecting(Place bar, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
__device__ void wait(Place bar, int phase) {
  asm volatile(
      "{ .reg .pred p; W: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @!p bra W; }" ::"r"(bar), "r"(phase)
      : "memory");
}
__device__ void copy(Place to, const void* from, int bytes, Place bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(bar)
               : "memory");
}
__device__ void ask_l2(const void* from, int bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}
__device__ void release_next_kernel() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ void wait_for_kernel_in_front() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

__device__ uint4 load_x(const uint16_t* x, int block) {
  uint4 v;
  asm volatile("{ .reg .b64 a; mad.wide.s32 a, %5, 512, %4; ld.global.v4.b32 {%0,%1,%2,%3}, [a]; }"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(x), "r"(block));
  return v;
}
__device__ float load_part(const float* from) {  // of another program: past L1
  float part;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(part) : "l"(from) : "memory");
  return part;
}
template <typename T>
__device__ void store(T* to, T value) {
  *to = value;
}
__device__ int add_one(int* counter) {
  int before;
  asm volatile("atom.global.gpu.acq_rel.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}

template <typename T>
__device__ T kept(T value) {  // in a register: the compiler would compute it anew for each block
  if constexpr (sizeof(T) == 8)
    asm volatile("" : "+l"(value));
  else
    asm volatile("" : "+r"(value));
  return value;
}
__device__ void mma(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ uint32_t times(uint32_t two_bf16, uint32_t two_powers) {
  uint32_t product;
  asm("mul.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(two_bf16), "r"(two_powers));
  return product;
}
__device__ float float_of_half(uint32_t half) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(static_cast<uint16_t>(half)));
  return value;
}
__device__ float float_of_byte(uint32_t bytes, int place, uint32_t magic) {  // exactly: 2^23 + byte, less 2^23
  return __uint_as_float(__byte_perm(bytes, magic, 0x7540 | place)) - 8388608.0f;
}
__device__ uint16_t bf16_of(float value) {
  uint16_t rounded;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(rounded) : "f"(value));
  return rounded;
}
__device__ float float_of_bf16(uint16_t value) { return __uint_as_float(static_cast<uint32_t>(value) << 16); }

// The instructions that Triton takes for exp, tanh, division and add_rn.
__device__ float exp_of(float x) {
  float y;
  asm("{ .reg .f32 a, b, c; fma.rn.ftz.f32 a, %1, 0f3BBB989D, 0f3F000000; cvt.ftz.sat.f32.f32 a, a;"
      "fma.rm.ftz.f32 a, a, 0f437C0000, 0f4B400001; add.f32 b, a, 0fCB40007F; neg.f32 b, b;"
      "fma.rn.ftz.f32 b, %1, 0f3FB8AA3B, b; fma.rn.ftz.f32 b, %1, 0f32A57060, b; ex2.approx.ftz.f32 b, b;"
      ".reg .b32 d; mov.b32 d, a; shl.b32 d, d, 23; mov.b32 c, d; mul.f32 %0, b, c; }"
      : "=f"(y)
      : "f"(x));
  return y;
}
__device__ float tanh_of(float x) {
  float y;
  asm("{ .reg .f32 a, b, c; .reg .b32 d, e; .reg .pred p; abs.ftz.f32 a, %1; mul.f32 b, a, 0f4038AA3B;"
      "ex2.approx.ftz.f32 b, b; add.f32 b, b, 0f3F800000; rcp.approx.ftz.f32 b, b;"
      "fma.rn.ftz.f32 b, b, 0fC0000000, 0f3F800000; setp.ge.f32 p, a, 0f41102CB4; selp.f32 b, 0f3F800000, b, p;"
      "mov.b32 d, b; mov.b32 e, %1; and.b32 e, e, -2147483648; or.b32 d, d, e; mov.b32 b, d;"
      "mul.f32 c, %1, %1; .reg .f32 f; fma.rn.ftz.f32 f, 0f3C80F082, c, 0fBD563CAE; fma.rn.ftz.f32 f, f, c, 0f3E085941;"
      "fma.rn.ftz.f32 f, f, c, 0fBEAAA9ED; fma.rn.ftz.f32 f, f, c, 0f00000000; fma.rn.ftz.f32 f, f, %1, %1;"
      "setp.ltu.f32 p, a, 0f3F19999A; selp.f32 %0, f, b, p; }"
      : "=f"(y)
      : "f"(x));
  return y;
}
__device__ float quotient(float x, float y) {
  float z;
  asm("div.full.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}
__device__ float sum(float x, float y) {
  float z;
  asm("add.rn.ftz.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}
#endif  // what tests replace

constexpr int WARPS = 8, WORDS = 4096, CODES = 512, RECORD = 4736;  // layout.py
#define BLOCKS (K / 256)
#define TILES (N / 64)
#define TOTAL (static_cast<int64_t>(TILES) * BLOCKS)  // blocks, of two records each
constexpr int EIGHTS = ROWS / 8;
constexpr float UP = 8589934592.0f;                      // 2^33
constexpr uint32_t LOW = 0x71807180, HIGH = 0x6F806F80;  // two bf16 each: 2^100, 2^96

// Shared memory: the stages of the ring, each two records and two barriers; then sums [warp][row][PITCH], in whose place
// a warp's terms of two blocks in turn are until then, with no two rows in one bank; then a number of arrivals.
constexpr int FULL = 2 * RECORD, EMPTY = FULL + 8, STAGE = FULL + 16, RING = STAGES * STAGE;
constexpr int PITCH = 36, OF_WARP = ROWS * PITCH * 4, ARRIVED = RING + WARPS * OF_WARP, TERMS = 512;
static_assert(ARRIVED + 16 == SHARED_BYTES && OF_WARP >= 2 * TERMS, "bulk_copy.py has the size");

// A program's blocks: two stretches of memory, of ``count`` records each.
struct Run {
  const uint8_t* records;
  int count;

  __device__ void start(int block, Place stage) const {
    arrive_expecting(stage + FULL, 2 * RECORD);
    const uint8_t* from = records + static_cast<int64_t>(block) * RECORD;
    copy(stage, from, RECORD, stage + FULL);
    copy(stage + RECORD, from + TOTAL * RECORD, RECORD, stage + FULL);
  }
  __device__ void begin(Place ring) const {  // by one thread
    for (Place stage = ring; stage < ring + RING; stage += STAGE) {
      init(stage + FULL, 1);
      init(stage + EMPTY, WARPS);
    }
    show_bars();
    for (int block = 0; block < STAGES && block < count; ++block) start(block, ring + block * STAGE);
  }
};

struct Terms {  // z and s of an output of a group, for both halves
  float z[2], s[2];

  __device__ Terms(Place codes_at, Place steps_at, uint32_t magic) {
    for (int half = 0; half < 2; ++half) {
      const uint32_t codes = load_half(codes_at + half * RECORD), steps = load1(steps_at + half * RECORD);
      z[half] = float_of_byte(codes, 1, magic) * float_of_half(steps >> 16);
      s[half] = float_of_byte(codes, 0, magic) * float_of_half(steps & 0xFFFF);
    }
  }
};

struct Sums {
  float of[2][2][EIGHTS][4] = {};  // half, 16 rows of the tile (mid 2 and r 8), rows of x, as the instruction leaves them

  // Adds a block: words of a group, its terms, and x as operands.
  __device__ void add(const uint4 (&words)[2], Place terms, const uint32_t (&b)[EIGHTS][4]) {
    float sum_x[EIGHTS][4] = {};
    for (int rows = 0; rows < EIGHTS; ++rows)
      for (int i = 0; i < 4; i += 2)  // 1 as weights are 1
        mma(sum_x[rows], 0x00010001, 0x00010001, 0x00100010, 0x00100010, b[rows][i], b[rows][i + 1]);
    for (int mids = 0; mids < 2; ++mids) {
      const uint4 first = load4(terms + mids * 32), second = load4(terms + mids * 32 + 16);
      for (int half = 0; half < 2; ++half) {
        const uint32_t one = mids ? words[half].z : words[half].x, other = mids ? words[half].w : words[half].y;
        float part[EIGHTS][4] = {};
        for (int shift = 0; shift < 16; shift += 8)
          for (int rows = 0; rows < EIGHTS; ++rows)
            mma(part[rows], one >> shift & 0x000F000F, other >> shift & 0x000F000F, one >> shift & 0x00F000F0,
                other >> shift & 0x00F000F0, b[rows][shift / 4], b[rows][shift / 4 + 1]);
        for (int rows = 0; rows < EIGHTS; ++rows)
          for (int i = 0; i < 4; ++i) {
            const uint4& mine = i < 2 ? first : second;
            const float z = number(half ? mine.z : mine.x), s = number(half ? mine.w : mine.y);
            float& to = of[half][mids][rows][i];
            to = fmaf(fmaf(z, -sum_x[rows][i], part[rows][i]), s, to);
          }
      }
    }
  }

  // Returns the sums over groups of rows ``warp`` and ``warp + 8`` and of output ``lane`` of a half. All threads take part.
  __device__ void over_groups(Place sums, int half, int warp, int lane, float (&total)[EIGHTS]) const {
    sync_warp();  // all lanes have their terms
    for (int rows = 0; rows < EIGHTS; ++rows)
      for (int j = 0; j < 2; ++j) {
        const Place to = sums + warp * OF_WARP + ((rows * 8 + lane % 4 * 2 + j) * PITCH + lane / 4 * 4) * 4;
        store4(to, of[half][0][rows][j], of[half][0][rows][2 + j], of[half][1][rows][j], of[half][1][rows][2 + j]);
      }
    sync_threads();
    for (int rows = 0; rows < EIGHTS; ++rows) {
      float s[WARPS];
      for (int group = 0; group < WARPS; ++group)
        s[group] = number(load1(sums + group * OF_WARP + ((rows * 8 + warp) * PITCH + lane) * 4));
      total[rows] = (((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7]))) * UP;
    }
    sync_threads();
  }
};

// sums.gate_of
__device__ uint16_t gated(float gate, float up) {
  gate = float_of_bf16(bf16_of(gate));
  if (ACTIVATION == 1) {
    gate = quotient(gate, sum(exp_of(0.0f - gate), 1.0f));
  } else {
    const float inner = 0.7978845608028654f * sum(gate, 0.044715f * (gate * gate * gate));
    gate = 0.5f * gate * (1.0f + tanh_of(inner));
  }
  return bf16_of(float_of_bf16(bf16_of(gate)) * float_of_bf16(bf16_of(up)));
}

// Stores a tile's sums; the last of the programs that share the tile adds them first, in the order of K.
__device__ void finish(Place shared, const Sums& sums, int tile, int m0, int rows_left, int m_all, int* counters,
                       float* parts, uint16_t* out) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, program = blockIdx.y;
  float total[2][EIGHTS];
  for (int half = 0; half < 2; ++half) sums.over_groups(shared + RING, half, warp, lane, total[half]);
  if (SHARED) {
    const int64_t first = static_cast<int64_t>(tile) * BLOCKS;
    const int lowest = static_cast<int>((first * PROGRAMS + PROGRAMS - 1) / TOTAL);
    const int highest = static_cast<int>(((first + BLOCKS) * PROGRAMS - 1) / TOTAL);
    if (lowest != highest) {
      const int64_t size = static_cast<int64_t>(N) * m_all;
      float* place = parts + static_cast<int64_t>(m0 + warp) * N + tile * 32 + lane;
      for (int half = 0; half < 2; ++half)
        for (int rows = 0; rows < EIGHTS; ++rows)
          if (rows * 8 + warp < rows_left)
            store(place + (program - lowest) * size + rows * 8 * int64_t(N) + half * (N / 2), total[half][rows]);
      int* counter = counters + blockIdx.x * TILES + tile;
      sync_threads();
      if (threadIdx.x == 0) store1(shared + ARRIVED, add_one(counter));
      sync_threads();
      if (static_cast<int>(load1(shared + ARRIVED)) != highest - lowest) return;
      for (int half = 0; half < 2; ++half)
        for (int rows = 0; rows < EIGHTS; ++rows)
          if (rows * 8 + warp < rows_left) {
            const float* from = place + rows * 8 * int64_t(N) + half * (N / 2);
            total[half][rows] = load_part(from);
            for (int part = 1; part <= highest - lowest; ++part) total[half][rows] += load_part(from + part * size);
          }
      if (threadIdx.x == 0) store(counter, 0);
    }
  }
  for (int rows = 0; rows < EIGHTS; ++rows) {
    const int row = rows * 8 + warp;
    if (row >= rows_left) continue;
    const int64_t m = m0 + row;
    if (ACTIVATION) {
      store(out + m * (N / 2) + tile * 32 + lane, gated(total[0][rows], total[1][rows]));
    } else {
      for (int half = 0; half < 2; ++half)
        store(out + m * N + half * (N / 2) + tile * 32 + lane, bf16_of(total[half][rows]));
    }
  }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, ROWS == 8 ? 3 : 2)
    int4_records_small_m_kernel(const uint16_t* x, const uint8_t* records, const uint8_t* next, int* counters, float* parts,
                                uint16_t* out,
#ifndef M
                                int M,
#endif
                                void*, void*) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, program = blockIdx.y, m0 = blockIdx.x * ROWS;
  const int64_t start = program * TOTAL / PROGRAMS, end = (program + 1) * TOTAL / PROGRAMS;
  const Run run{records + start * RECORD, static_cast<int>(end - start)};
  const Place ring = shared_memory();
  release_next_kernel();
  if (!EARLY) wait_for_kernel_in_front();
  if (threadIdx.x == 0) run.begin(ring);
  sync_threads();
  if (EARLY) wait_for_kernel_in_front();

  const uint16_t* from[EIGHTS];
  for (int rows = 0; rows < EIGHTS; ++rows) {
    // Rows past the last are the last, of the same lines, and not stored.
    const int row = m0 + rows * 8 + lane / 4;
    from[rows] = kept(x + static_cast<int64_t>(row < M ? row : M - 1) * K + warp * 32 + lane % 4 * 8);
  }
  const uint32_t words_at = kept(warp * 512 + lane * 16), codes_at = kept(WORDS + warp * 64 + lane * 2);
  const uint32_t steps_at = kept(WORDS + CODES + lane * 4), magic = kept(0x4B000000);
  const int turn = kept(lane ? WARPS : warp);
  Place terms = kept(ring + RING + warp * OF_WARP + lane * 16);
  const Place both = kept(2 * terms + TERMS);
  const int to_read = kept(lane / 4 * 64 - lane * 16);
  int tile = static_cast<int>(start / BLOCKS), left = run.count;
  int behind = static_cast<int>(start % BLOCKS) + left;  // the block of K is behind - left
  uint4 inputs[EIGHTS];
  for (int rows = 0; rows < EIGHTS; ++rows) inputs[rows] = load_x(from[rows], behind - left);
  const Place end_of_ring = kept(ring + RING);
  Place stage = ring;
  int phase = 0;
  while (left > 0) {
    Sums sums;
    const int until = kept(behind > BLOCKS ? behind - BLOCKS : 0);
    do {
      uint32_t b[EIGHTS][4];
      const int after = left - 1 > until ? behind - left + 1 : 0;  // of this tile, or the first of the next
      for (int rows = 0; rows < EIGHTS; ++rows) {
        b[rows][0] = times(inputs[rows].x, LOW), b[rows][1] = times(inputs[rows].y, HIGH);
        b[rows][2] = times(inputs[rows].z, LOW), b[rows][3] = times(inputs[rows].w, HIGH);
        inputs[rows] = load_x(from[rows], after);
      }
      wait(stage + FULL, phase);
      const uint4 words[2] = {load4(stage + words_at), load4(stage + words_at + RECORD)};
      const Terms mine(stage + codes_at, stage + steps_at, magic);
      store4(terms, mine.z[0], mine.s[0], mine.z[1], mine.s[1]);
      sync_warp();
      if (lane == 0) arrive(stage + EMPTY);
      sums.add(words, terms + to_read, b);
      if ((left & (WARPS - 1)) == turn && left > STAGES) {  // this warp's turn
        wait(stage + EMPTY, phase);
        run.start(run.count - left + STAGES, stage);
      }
      terms = both - terms;
      stage += STAGE;
      if (stage == end_of_ring) stage -= RING, phase ^= 1;
    } while (--left > until);
    if (OF_NEXT > 0 && left == 0 && threadIdx.x == 0) ask_l2(next + static_cast<int64_t>(program) * OF_NEXT, OF_NEXT);
    finish(ring, sums, tile, m0, M - m0, M, counters, parts, out);
    ++tile;
    behind = left;
  }
}
