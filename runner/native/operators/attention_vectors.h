// Vectors of EAGLE3_LANES floats, once for each kind of processor (attention_rows.h).
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "attention.h"
#include "versions.h"

#ifndef EAGLE3_LANES
#define EAGLE3_LANES 8
#endif

namespace eagle3::operators {

constexpr int kKeys = 64;  // keys of a block

/// Floats that a part needs: sums [kRows, D] and queries [D, kRows].
inline int64_t memory_of_a_part(int64_t D) { return 2 * kRows * D; }

namespace EAGLE3_VERSION {

constexpr int kLanes = EAGLE3_LANES;
constexpr float kNothing = -std::numeric_limits<float>::infinity();

typedef float Floats __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
typedef int32_t Integers __attribute__((vector_size(4 * kLanes)));

EAGLE3_INLINE Floats all(float value) { return Floats{} + value; }

EAGLE3_INLINE Floats& at(float* place) { return *(Floats*)place; }
EAGLE3_INLINE const Floats& at(const float* place) { return *(const Floats*)place; }

EAGLE3_INLINE Floats larger(Floats a, Floats b) { return a > b ? a : b; }

EAGLE3_INLINE float largest(Floats x) {
  float most = x[0];
  for (int lane = 1; lane < kLanes; lane++) most = std::max(most, x[lane]);
  return most;
}

EAGLE3_INLINE float sum(Floats x) {
  typedef float Eight __attribute__((vector_size(32)));
  Eight halves[kLanes / 8];
  std::memcpy(halves, &x, sizeof x);
  const Eight y = kLanes == 16 ? halves[0] + halves[kLanes / 8 - 1] : halves[0];
  return ((y[0] + y[4]) + (y[1] + y[5])) + ((y[2] + y[6]) + (y[3] + y[7]));
}

/// e^x for x <= 0, to 2 units in the last place; 0 below -87.
EAGLE3_INLINE Floats exponential(Floats x) {
  const Floats bound = all(-87.0f), clamped = x < bound ? bound : x;
  const Floats magic = all(12582912.0f), n = (clamped * 1.44269504f + magic) - magic;  // rounds to an integer
  const Floats r = clamped - n * 0.693359375f + n * 2.12194440e-4f;
  Floats y = all(1.9875691500e-4f);
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * (r * r) + r + 1.0f;
  const Integers exponent = (__builtin_convertvector(n, Integers) + 127) << 23;
  Floats power;
  std::memcpy(&power, &exponent, sizeof power);
  return x < bound ? Floats{} : y * power;
}

}  // namespace EAGLE3_VERSION
}  // namespace eagle3::operators
