// The rows of attention.h, compiled once for each kind of processor: attention.cpp, attention_avx2.cpp and
// attention_avx512.cpp include this file, each with a name of its own for EAGLE3_VERSION and with its own compiler flags.
//
// Keys and values are read once for the rows of a part: the query heads that share them, times the rows of the call. The
// softmax is computed block by block of keys, so memory does not grow with the context (as in FlashAttention).
//
// A part of few rows (here) takes products of a row and a key along D, as the numbers lie in memory. One of many rows
// (attention_tiles.h) has a row in each lane of a vector.
#include "attention_tiles.h"

namespace eagle3::operators::EAGLE3_VERSION {

/// scores[r][j] = q[r] . k[j] for R rows and C keys.
template <int R, int C>
EAGLE3_INLINE void dots(const float* const* q, const float* k, int64_t stride, int64_t D, float (*scores)[kKeys]) {
  Floats sums[R][C] = {};
  int64_t d = 0;
  for (; d + kLanes <= D; d += kLanes) {
    for (int c = 0; c < C; c++) {
      const Floats key = at(k + c * stride + d);
      for (int r = 0; r < R; r++) sums[r][c] += key * at(q[r] + d);
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

template <int R, int C>
EAGLE3_INLINE void products(
    const float* const* q, const float* k, int64_t stride, int64_t D, int64_t keys, float (*scores)[kKeys]) {
  int64_t j = 0;
  for (; j + C <= keys; j += C) dots<R, C>(q, k + j * stride, stride, D, (float(*)[kKeys])(scores[0] + j));
  for (; j < keys; j++) dots<R, 1>(q, k + j * stride, stride, D, (float(*)[kKeys])(scores[0] + j));
}

/// sums[r] += weights[r] . v for R rows, from column `d` on in groups of W * kLanes. Returns the first column that is left.
template <int R, int W>
EAGLE3_INLINE int64_t weighted(
    const float (*weights)[kKeys], const float* v, int64_t stride, int64_t D, int64_t keys, float* sums, int64_t d) {
  for (; d + kLanes * W <= D; d += kLanes * W) {
    Floats columns[R][W];
    for (int r = 0; r < R; r++)
      for (int w = 0; w < W; w++) columns[r][w] = at(sums + r * D + d + kLanes * w);
    for (int64_t j = 0; j < keys; j++) {
      for (int w = 0; w < W; w++) {
        const Floats value = at(v + j * stride + d + kLanes * w);
        for (int r = 0; r < R; r++) columns[r][w] += value * weights[r][j];
      }
    }
    for (int r = 0; r < R; r++)
      for (int w = 0; w < W; w++) at(sums + r * D + d + kLanes * w) = columns[r][w];
  }
  return d;
}

template <int R, int W>
EAGLE3_INLINE void add_values(
    const float (*weights)[kKeys], const float* v, int64_t stride, int64_t D, int64_t keys, float* sums) {
  int64_t d = weighted<R, W>(weights, v, stride, D, keys, sums, 0);
  d = weighted<R, 1>(weights, v, stride, D, keys, sums, d);
  for (; d < D; d++) {
    for (int r = 0; r < R; r++)
      for (int64_t j = 0; j < keys; j++) sums[r * D + d] += weights[r][j] * v[j * stride + d];
  }
}

/// Turns a row's scores into weights e^(score - most), for a maximum over all blocks so far. `sums` [D] and `total` are
/// scaled to the new maximum. The first `seen` of the row's `keys` scores count; `mask` [keys] may be null.
EAGLE3_INLINE void soften(
    float* scores, int64_t keys, int64_t seen, float scale, const float* mask, int64_t D, float& most, float& total,
    float* sums) {
  for (int64_t j = 0; j < keys; j++) scores[j] = scores[j] * scale + (mask ? mask[j] : 0.0f);
  for (int64_t j = std::clamp<int64_t>(seen, 0, keys); j < keys || j % kLanes; j++) scores[j] = kNothing;
  Floats highest_of_lane = all(most), added{};
  for (int64_t j = 0; j < keys; j += kLanes) highest_of_lane = larger(at(scores + j), highest_of_lane);
  const float highest = largest(highest_of_lane);
  if (highest == kNothing) {
    std::fill(scores, scores + keys, 0.0f);
    return;
  }
  for (int64_t j = 0; j < keys; j += kLanes) {
    at(scores + j) = exponential(at(scores + j) - highest);
    added += at(scores + j);
  }
  if (highest > most) {
    const float factor = std::exp(most - highest);
    total *= factor;
    for (int64_t d = 0; d < D; d++) sums[d] *= factor;
    most = highest;
  }
  total += sum(added);
}

/// As `part`, for up to kFewRows rows.
void few_rows(const Attention& a, const Rows& rows, float* sums) {
  alignas(64) float scores[kFewRows][kKeys], most[kFewRows], total[kFewRows] = {};
  const int64_t count = rows.count, stride = rows.stride;
  std::fill(most, most + count, kNothing);
  std::fill(sums, sums + count * a.D, 0.0f);
  for (int64_t s = 0; s < rows.most_seen; s += kKeys) {
    const int64_t keys = std::min<int64_t>(kKeys, rows.most_seen - s);
    const float *block = rows.k + s * stride, *values = rows.v + s * stride;
    int64_t r = 0;
    for (; r + 4 <= count; r += 4) products<4, kLanes / 4>(rows.q + r, block, stride, a.D, keys, scores + r);
    for (; r < count; r++) products<1, 8>(rows.q + r, block, stride, a.D, keys, scores + r);
    for (r = 0; r < count; r++) {
      const float* mask = rows.mask[r] ? rows.mask[r] + s : nullptr;
      soften(scores[r], keys, rows.seen[r] - s, a.scale, mask, a.D, most[r], total[r], sums + r * a.D);
    }
    for (r = 0; r + 4 <= count; r += 4) add_values<4, kLanes / 4>(scores + r, values, stride, a.D, keys, sums + r * a.D);
    for (; r < count; r++) add_values<1, 8>(scores + r, values, stride, a.D, keys, sums + r * a.D);
  }
  write_rows(a, rows, sums, total);
}

/// Rows `first` to `first` + `count` of one head of keys. Row r is row r / G of the call, query head r % G of the group.
/// `memory` has memory_of_a_part(D) floats.
void part(const Attention& a, int64_t batch, int64_t head, int64_t first, int64_t count, float* memory) {
  const Rows rows(a, batch, head, first, count);
  if (count <= kFewRows) few_rows(a, rows, memory);
  else many_rows(a, rows, memory, memory + kRows * a.D);
}

}  // namespace eagle3::operators::EAGLE3_VERSION
