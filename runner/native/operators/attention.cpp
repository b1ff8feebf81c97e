#define EAGLE3_VERSION baseline
#include "attention_rows.h"

namespace eagle3::operators {
#ifdef EAGLE3_AVX2
namespace avx2 {
void part(const Attention& a, int64_t batch, int64_t head, int64_t first, int64_t count, float* sums);
}
#endif
namespace {

constexpr int64_t kMostColumns = 1024;  // the largest D that is computed without the heap

using Part = void (*)(const Attention&, int64_t, int64_t, int64_t, int64_t, float*);

Part part_for_this_processor() {
#ifdef EAGLE3_AVX2
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return avx2::part;
#endif
  return baseline::part;
}

int64_t blocks(const Attention& a) { return (a.T * (a.Hq / a.Hk) + kRows - 1) / kRows; }

}  // namespace

int64_t Attention::parts() const { return B * Hk * blocks(*this); }

int64_t Attention::work() const { return B * T * Hq * D * (mask ? S : std::min(S, start + T)); }

void Attention::compute(int64_t first_part, int64_t last_part) const {
  static const Part part = part_for_this_processor();
  const int64_t rows = T * (Hq / Hk), each = blocks(*this);
  float on_stack[kRows * kMostColumns];
  float* sums = D <= kMostColumns ? on_stack : new float[kRows * D];
  for (int64_t at = first_part; at < last_part; at++) {
    const int64_t first = at % each * kRows;
    part(*this, at / each / Hk, at / each % Hk, first, std::min<int64_t>(kRows, rows - first), sums);
  }
  if (sums != on_stack) delete[] sums;
}

}  // namespace eagle3::operators
