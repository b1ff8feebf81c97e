// The rows of attention.h, compiled once for each kind of processor: attention.cpp and attention_avx2.cpp include this
// file, each with a name of its own for EAGLE3_VERSION and with its own compiler flags.
//
// Keys and values are read once for up to kRows rows: the query heads that share them, times the rows of the call. The
// softmax is computed block by block of keys, so memory does not grow with the context (as in FlashAttention).
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "attention.h"

#define EAGLE3_INLINE static inline __attribute__((always_inline))

namespace eagle3::operators::EAGLE3_VERSION {


constexpr int kKeys = 64;  // keys of a block
constexpr float kNothing = -std::numeric_limits<float>::infinity();

typedef float Floats __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t Integers __attribute__((vector_size(32)));

EAGLE3_INLINE Floats all(float value) { return Floats{} + value; }

EAGLE3_INLINE float sum(Floats x) { return ((x[0] + x[4]) + (x[1] + x[5])) + ((x[2] + x[6]) + (x[3] + x[7])); }

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

/// scores[r][j] = q[r] . k[j] for R rows and C keys.
template <int R, int C>
EAGLE3_INLINE void dots(const float* const* q, const float* k, int64_t stride, int64_t D, float (*scores)[kKeys]) {
  Floats sums[R][C] = {};
  int64_t d = 0;
  for (; d + 8 <= D; d += 8) {
    for (int c = 0; c < C; c++) {
      const Floats key = *(const Floats*)(k + c * stride + d);
      for (int r = 0; r < R; r++) sums[r][c] += key * *(const Floats*)(q[r] + d);
    }
  }
  for (int r = 0; r < R; r++) {
    for (int c = 0; c < C; c++) {
      float dot = sum(sums[r][c]);
      for (int64_t rest = d; rest < D; rest++) dot += q[r][rest] * k[c * stride + rest];
      scores[r][c] = dot;
    }
  }
}

template <int R>
EAGLE3_INLINE void products(
    const float* const* q, const float* k, int64_t stride, int64_t D, int64_t keys, float (*scores)[kKeys]) {
  int64_t j = 0;
  for (; j + 2 <= keys; j += 2) dots<R, 2>(q, k + j * stride, stride, D, (float(*)[kKeys])(scores[0] + j));
  for (; j < keys; j++) dots<R, 1>(q, k + j * stride, stride, D, (float(*)[kKeys])(scores[0] + j));
}

/// sums[r] += weights[r] . v for R rows, with columns in groups of W * 8.
template <int R, int W>
EAGLE3_INLINE int64_t weighted(
    const float (*weights)[kKeys], const float* v, int64_t stride, int64_t D, int64_t keys, float* sums, int64_t d) {
  for (; d + 8 * W <= D; d += 8 * W) {
    Floats columns[R][W];
    for (int r = 0; r < R; r++)
      for (int w = 0; w < W; w++) columns[r][w] = *(const Floats*)(sums + r * D + d + 8 * w);
    for (int64_t j = 0; j < keys; j++) {
      for (int w = 0; w < W; w++) {
        const Floats value = *(const Floats*)(v + j * stride + d + 8 * w);
        for (int r = 0; r < R; r++) columns[r][w] += value * weights[r][j];
      }
    }
    for (int r = 0; r < R; r++)
      for (int w = 0; w < W; w++) *(Floats*)(sums + r * D + d + 8 * w) = columns[r][w];
  }
  return d;
}

template <int R>
EAGLE3_INLINE void add_values(
    const float (*weights)[kKeys], const float* v, int64_t stride, int64_t D, int64_t keys, float* sums) {
  int64_t d = weighted<R, 2>(weights, v, stride, D, keys, sums, 0);
  d = weighted<R, 1>(weights, v, stride, D, keys, sums, d);
  for (; d < D; d++) {
    for (int r = 0; r < R; r++)
      for (int64_t j = 0; j < keys; j++) sums[r * D + d] += weights[r][j] * v[j * stride + d];
  }
}

/// Turns a row's scores into weights e^(score - most), for a maximum over all blocks so far. `sums` [D] and `total` are
/// scaled to the new maximum. The row has `keys` scores, with room for a multiple of 8.
EAGLE3_INLINE void soften(float* scores, int64_t keys, int64_t D, float& most, float& total, float* sums) {
  float highest = most;
  for (int64_t j = 0; j < keys; j++) highest = std::max(highest, scores[j]);
  if (highest == kNothing) {
    std::fill(scores, scores + keys, 0.0f);
    return;
  }
  for (int64_t j = keys; j % 8; j++) scores[j] = kNothing;
  Floats added{};
  for (int64_t j = 0; j < keys; j += 8) {
    const Floats weights = exponential(*(const Floats*)(scores + j) - highest);
    *(Floats*)(scores + j) = weights;
    added += weights;
  }
  if (highest > most) {
    const float factor = std::exp(most - highest);
    total *= factor;
    for (int64_t d = 0; d < D; d++) sums[d] *= factor;
    most = highest;
  }
  total += sum(added);
}

/// Rows `first` to `first` + `count` of one head of keys. Row r is row r / G of the call, query head r % G of the group.
void part(const Attention& a, int64_t batch, int64_t head, int64_t first, int64_t count, float* sums) {
  const int64_t group = a.Hq / a.Hk, stride = a.Hk * a.D;
  const float* k = a.k + (batch * a.S * a.Hk + head) * a.D;
  const float* v = a.v + (batch * a.S * a.Hk + head) * a.D;
  const float* q[kRows];
  int64_t seen[kRows], offsets[kRows], most_seen = 0;
  float most[kRows], total[kRows] = {}, scores[kRows][kKeys];
  for (int64_t r = 0; r < count; r++) {
    const int64_t t = (first + r) / group, query_head = head * group + (first + r) % group;
    offsets[r] = ((batch * a.T + t) * a.Hq + query_head) * a.D;
    q[r] = a.q + offsets[r];
    seen[r] = std::min(a.S, a.causal ? a.start + t + 1 : a.mask ? a.S : a.start + a.T);
    most_seen = std::max(most_seen, seen[r]);
    most[r] = kNothing;
  }
  std::fill(sums, sums + count * a.D, 0.0f);
  for (int64_t s = 0; s < most_seen; s += kKeys) {
    const int64_t keys = std::min<int64_t>(kKeys, most_seen - s);
    const float *block = k + s * stride, *values = v + s * stride;
    int64_t r = 0;
    for (; r + 4 <= count; r += 4) products<4>(q + r, block, stride, a.D, keys, scores + r);
    for (; r < count; r++) products<1>(q + r, block, stride, a.D, keys, scores + r);
    for (r = 0; r < count; r++) {
      const float* mask = a.mask ? a.mask + (first + r) / group * a.S + s : nullptr;
      for (int64_t j = 0; j < keys; j++) scores[r][j] = scores[r][j] * a.scale + (mask ? mask[j] : 0.0f);
      for (int64_t j = std::max<int64_t>(0, seen[r] - s); j < keys; j++) scores[r][j] = kNothing;
      soften(scores[r], keys, a.D, most[r], total[r], sums + r * a.D);
    }
    for (r = 0; r + 4 <= count; r += 4) add_values<4>(scores + r, values, stride, a.D, keys, sums + r * a.D);
    for (; r < count; r++) add_values<1>(scores + r, values, stride, a.D, keys, sums + r * a.D);
  }
  for (int64_t r = 0; r < count; r++) {
    const float factor = total[r] > 0 ? 1 / total[r] : 0;
    for (int64_t d = 0; d < a.D; d++) a.out[offsets[r] + d] = sums[r * a.D + d] * factor;
  }
}

}  // namespace eagle3::operators::EAGLE3_VERSION
