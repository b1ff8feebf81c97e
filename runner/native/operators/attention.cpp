#define EAGLE3_VERSION baseline
#include "attention_rows.h"

#include <memory>
#include <vector>

namespace eagle3::operators {
#ifdef EAGLE3_X86
namespace avx2 {
void part(const Attention& a, int64_t batch, int64_t head, int64_t first, int64_t count, float* memory);
}
namespace avx512 {
void part(const Attention& a, int64_t batch, int64_t head, int64_t first, int64_t count, float* memory);
}
#endif
namespace {

using Part = void (*)(const Attention&, int64_t, int64_t, int64_t, int64_t, float*);

const std::vector<Part>& parts_for_this_processor() {
  static const std::vector<Part> found = [] {
    std::vector<Part> parts{baseline::part};
#ifdef EAGLE3_X86
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) parts.push_back(avx2::part);
    if (parts.size() == 2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl")) {
      parts.push_back(avx512::part);
    }
#endif
    return parts;
  }();
  return found;
}

int64_t rows_of_a_head(const Attention& a) { return a.T * (a.Hq / a.Hk); }

int64_t divided(int64_t count, int64_t by) { return (count + by - 1) / by; }

}  // namespace

int Attention::versions() { return parts_for_this_processor().size(); }

void Attention::divide(int64_t threads) {
  const int64_t rows = rows_of_a_head(*this), of_each_head = std::max(divided(threads, B * Hk), divided(rows, kRows));
  part_rows = divided(rows, std::min(rows, of_each_head));
}

int64_t Attention::parts() const { return B * Hk * divided(rows_of_a_head(*this), part_rows); }

int64_t Attention::work() const { return B * T * Hq * D * (mask ? S : std::min(S, start + T)); }

void Attention::compute(int64_t first_part, int64_t last_part, int version) const {
  const std::vector<Part>& found = parts_for_this_processor();
  const Part part = version < 0 ? found.back() : found[version];
  const int64_t rows = rows_of_a_head(*this), each = divided(rows, part_rows);
  constexpr uintptr_t kLine = 64;  // a vector that lies in two cache lines loads at half the speed
  const std::unique_ptr<float[]> memory(new float[memory_of_a_part(D) + kLine / sizeof(float)]);
  float* aligned = (float*)(((uintptr_t)memory.get() + kLine - 1) / kLine * kLine);
  for (int64_t at = first_part; at < last_part; at++) {
    const int64_t first = at % each * part_rows;
    part(*this, at / each / Hk, at / each % Hk, first, std::min(part_rows, rows - first), aligned);
  }
}

}  // namespace eagle3::operators
