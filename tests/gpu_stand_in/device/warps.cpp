// Runs one of the kernels ENTRIES, whose sources and ``warps.h`` were put in front.
#undef N
#undef K
#undef M

static void (*const entries[])(const uint16_t*, const uint8_t*, const uint8_t*, int*, float*, uint16_t*, int, void*,
                               void*) = {ENTRIES};
static int chosen;

static void enter() {
  entries[chosen](launch->x, launch->records, launch->next, launch->counters, launch->parts, launch->out, launch->m,
                  nullptr, nullptr);
  lanes[running].state = DONE;
  longjmp(scheduler, 1);
}
static bool can_go_on(int lane) {
  const Lane& each = lanes[lane];
  switch (each.state) {
    case READY: return true;
    case IN_WARP: return warps[lane / WARP].met != each.met;
    case IN_BLOCK: return block_met != each.met;
    case AT_BAR: return barriers[each.bar / 8].phase != each.phase;
    default: return false;
  }
}
static bool go_on(int warp) {  // with each lane of a warp that can
  bool any = false;
  for (int i = 0; i < WARP; ++i) {
    const int lane = warp * WARP + (launch->order == 1 ? WARP - 1 - i : i);
    if (!can_go_on(lane)) continue;
    any = true;
    if (launch->order == 3 && chance(3) == 0) continue;
    running = lane;
    threadIdx.x = lane;
    Lane& each = lanes[lane];
    if (int why = setjmp(scheduler); why == 2) return true;
    else if (why) continue;
    if (each.started) longjmp(each.at, 1);
    each.started = true;
    setcontext(&each.begin);
  }
  return any;
}
static bool one_step(int& last) {  // false if nothing can go on
  constexpr int COUNT = LANES / WARP;
  const int order = launch->order, first = order == 3 ? chance(COUNT) : order == 2 ? 0 : last + 1;
  bool any = false;
  for (int i = 0; i < COUNT && !any; ++i) {
    last = (first + i) % COUNT;
    any = go_on(order == 1 ? COUNT - 1 - last : last);
    if (*error) return true;
  }
  const size_t pieces = on_the_way.size();
  if (pieces && (order == 0 || !any || (order == 3 && chance(8) == 0))) {
    if (int why = setjmp(scheduler); why) return true;
    land(order == 2 ? pieces - 1 : order == 3 ? chance(pieces) : 0);  // 0, 1: the oldest
    return true;
  }
  return any;
}
static void run_program() {
  memset(shared_bytes, 0xFF, sizeof shared_bytes);
  memset(barriers, 0, sizeof barriers);
  memset(warps, 0, sizeof warps);
  on_the_way.clear();
  block_count = 0, block_met = 0, stored_at = arrived_at = ~0ull, shown = false;
  for (int lane = 0; lane < LANES; ++lane) {
    Lane& each = lanes[lane];
    each.state = READY, each.started = each.waited = each.released = false;
    getcontext(&each.begin);
    each.begin.uc_stack.ss_sp = stacks + lane * STACK;
    each.begin.uc_stack.ss_size = STACK;
    makecontext(&each.begin, enter, 0);
  }
  int last = -1;
  while (one_step(last) && !*error) {}
  if (*error) return;
  for (running = 0; running < LANES; ++running) {
    if (lanes[running].state != DONE) snprintf(error, sizeof error, "the warps wait for each other (program %u, thread %d)", blockIdx.y, running);
    if (*error) return;
    if (!lanes[running].waited || !lanes[running].released)
      snprintf(error, sizeof error, "a thread does not wait for the kernel in front, or does not release the next");
  }
}
extern "C" const char* run(Launch* given, int entry) {
  chosen = entry;
  launch = given;
  *error = 0;
  random_state = 1;
  if (!stacks) stacks = static_cast<uint8_t*>(malloc(static_cast<size_t>(LANES) * STACK));
  for (int row = 0; row < given->row_tiles && !*error; ++row)
    for (int i = 0; i < given->programs && !*error; ++i) {
      const int half = given->programs / 2;
      const int program = given->order == 1 ? given->programs - 1 - i : given->order == 3 ? (i + half) % given->programs : i;
      blockIdx = {static_cast<unsigned>(row), static_cast<unsigned>(program), 0};
      run_program();
    }
  return error;
}
extern "C" void fused(const float* a, const float* b, const float* c, float* out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) out[i] = fmaf(a[i], b[i], c[i]);
}
extern "C" void exps(const float* x, float* out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) out[i] = exp_of(x[i]);
}
extern "C" void tanhs(const float* x, float* out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) out[i] = tanh_of(x[i]);
}
