// Many rows of attention_rows.h: a row in each lane of a vector, so that a key's number multiplies a vector of queries,
// and the softmax needs no sums across lanes.
#include "attention_vectors.h"

namespace eagle3::operators::EAGLE3_VERSION {

constexpr int kFewRows = 8;  // up to so many rows products along D are faster
constexpr int kSums = kLanes;  // vectors of sums that the registers hold

/// Where the rows of a part, their keys and values are.
struct Rows {
  int64_t count, stride, most_seen = 0, least_seen;
  const float *k, *v;
  const float *q[kRows], *mask[kRows];
  float* out[kRows];
  int64_t seen[kRows];

  Rows(const Attention& a, int64_t batch, int64_t head, int64_t first, int64_t count)
      : count(count), stride(a.Hk * a.D), least_seen(a.S), k(a.k + (batch * a.S * a.Hk + head) * a.D),
        v(a.v + (batch * a.S * a.Hk + head) * a.D) {
    const int64_t group = a.Hq / a.Hk;
    for (int64_t r = 0; r < count; r++) {
      const int64_t t = (first + r) / group, query_head = head * group + (first + r) % group;
      const int64_t offset = ((batch * a.T + t) * a.Hq + query_head) * a.D;
      q[r] = a.q + offset;
      out[r] = a.out + offset;
      mask[r] = a.mask ? a.mask + t * a.S : nullptr;
      seen[r] = std::min(a.S, a.causal ? a.start + t + 1 : a.mask ? a.S : a.start + a.T);
      most_seen = std::max(most_seen, seen[r]);
      least_seen = std::min(least_seen, seen[r]);
    }
  }
};

EAGLE3_INLINE void write_rows(const Attention& a, const Rows& rows, const float* sums, const float* total) {
  for (int64_t r = 0; r < rows.count; r++) {
    const float factor = total[r] > 0 ? 1 / total[r] : 0;
    for (int64_t d = 0; d < a.D; d++) rows.out[r][d] = sums[r * a.D + d] * factor;
  }
}

/// scores[j][lane] = k[j] . queries[:, lane] for K keys and W vectors of rows.
template <int W, int K>
EAGLE3_INLINE void key_products(const float* queries, const float* k, int64_t stride, int64_t D, float* scores) {
  Floats sums[K][W] = {};
  for (int64_t d = 0; d < D; d++) {
    for (int w = 0; w < W; w++) {
      const Floats asked = at(queries + d * kRows + kLanes * w);
      for (int j = 0; j < K; j++) sums[j][w] += asked * k[j * stride + d];
    }
  }
  for (int j = 0; j < K; j++)
    for (int w = 0; w < W; w++) at(scores + j * kRows + kLanes * w) = sums[j][w];
}

template <int W>
EAGLE3_INLINE void tile_of_scores(
    const float* queries, const float* k, int64_t stride, int64_t D, int64_t keys, float* scores) {
  constexpr int K = kSums / W;
  int64_t j = 0;
  for (; j + K <= keys; j += K) key_products<W, K>(queries, k + j * stride, stride, D, scores + j * kRows);
  for (; j < keys; j++) key_products<W, 1>(queries, k + j * stride, stride, D, scores + j * kRows);
}

/// sums[r] += weights[:, r] . v for four rows and W vectors of columns.
template <int W>
EAGLE3_INLINE void weigh(const float* weights, const float* v, int64_t stride, int64_t D, int64_t keys, float* sums) {
  Floats columns[4][W];
  for (int r = 0; r < 4; r++)
    for (int w = 0; w < W; w++) columns[r][w] = at(sums + r * D + kLanes * w);
  for (int64_t j = 0; j < keys; j++) {
    for (int w = 0; w < W; w++) {
      const Floats value = at(v + j * stride + kLanes * w);
      for (int r = 0; r < 4; r++) columns[r][w] += value * weights[j * kRows + r];
    }
  }
  for (int r = 0; r < 4; r++)
    for (int w = 0; w < W; w++) at(sums + r * D + kLanes * w) = columns[r][w];
}

EAGLE3_INLINE void tile_of_values(
    const float* weights, const float* v, int64_t stride, int64_t D, int64_t keys, int64_t rows, float* sums) {
  constexpr int W = kSums / 4;
  int64_t d = 0;
  for (; d + kLanes * W <= D; d += kLanes * W)
    for (int64_t r = 0; r < rows; r += 4) weigh<W>(weights + r, v + d, stride, D, keys, sums + r * D + d);
  for (; d + kLanes <= D; d += kLanes)
    for (int64_t r = 0; r < rows; r += 4) weigh<1>(weights + r, v + d, stride, D, keys, sums + r * D + d);
  for (; d < D; d++) {
    for (int64_t j = 0; j < keys; j++)
      for (int64_t r = 0; r < rows; r++) sums[r * D + d] += weights[j * kRows + r] * v[j * stride + d];
  }
}

/// Adds the masks of `keys` slots from `s` on; slots that a row does not see get -inf.
EAGLE3_INLINE void mask_tile(const Rows& rows, int64_t s, int64_t keys, float* scores) {
  for (int64_t r = 0; r < rows.count; r++) {
    if (const float* mask = rows.mask[r]) {
      for (int64_t j = 0; j < keys; j++) scores[j * kRows + r] += mask[s + j];
    }
    for (int64_t j = std::max<int64_t>(0, rows.seen[r] - s); j < keys; j++) scores[j * kRows + r] = kNothing;
  }
}

/// `soften` for the rows of one vector; `factors` get what their sums are to be scaled by.
EAGLE3_INLINE void soften_lanes(float* scores, int64_t keys, float* most, float* total, float* factors) {
  Floats highest = at(most), added{};
  for (int64_t j = 0; j < keys; j++) highest = larger(at(scores + j * kRows), highest);
  const Floats nothing = all(kNothing), least = highest == nothing ? Floats{} : highest;
  for (int64_t j = 0; j < keys; j++) {
    const Floats weights = exponential(at(scores + j * kRows) - least);
    at(scores + j * kRows) = weights;
    added += weights;
  }
  at(factors) = exponential(at(most) - least);
  at(total) = at(total) * at(factors) + added;
  at(most) = highest;
}

EAGLE3_INLINE void scale_rows(const float* factors, int64_t rows, int64_t D, float* sums) {
  for (int64_t r = 0; r < rows; r++) {
    if (factors[r] == 1) continue;
    for (int64_t d = 0; d < D; d++) sums[r * D + d] *= factors[r];
  }
}

/// Computes more than kFewRows rows. `sums` [kRows, D] and `queries` [D, kRows] are memory.
void many_rows(const Attention& a, const Rows& rows, float* sums, float* queries) {
  const int64_t vectors = (rows.count + kLanes - 1) / kLanes, fours = (rows.count + 3) / 4 * 4;
  alignas(64) float scores[kKeys * kRows], most[kRows], total[kRows] = {}, factors[kRows];
  std::fill(most, most + kRows, kNothing);
  std::fill(sums, sums + fours * a.D, 0.0f);
  for (int64_t d = 0; d < a.D; d++) {
    for (int64_t r = 0; r < vectors * kLanes; r++)
      queries[d * kRows + r] = r < rows.count ? rows.q[r][d] * a.scale : 0.0f;
  }
  for (int64_t s = 0; s < rows.most_seen; s += kKeys) {
    const int64_t keys = std::min<int64_t>(kKeys, rows.most_seen - s);
    const float* block = rows.k + s * rows.stride;
    constexpr int W = kLanes / 4;  // so that kSums / W keys are four
    int64_t w = 0;
    for (; w + W <= vectors; w += W)
      tile_of_scores<W>(queries + kLanes * w, block, rows.stride, a.D, keys, scores + kLanes * w);
    for (; w < vectors; w++)
      tile_of_scores<1>(queries + kLanes * w, block, rows.stride, a.D, keys, scores + kLanes * w);
    if (a.mask || rows.least_seen < s + keys) mask_tile(rows, s, keys, scores);
    for (w = 0; w < vectors; w++) {
      const int64_t lane = kLanes * w;
      soften_lanes(scores + lane, keys, most + lane, total + lane, factors + lane);
    }
    scale_rows(factors, rows.count, a.D, sums);
    tile_of_values(scores, rows.v + s * rows.stride, rows.stride, a.D, keys, fours, sums);
  }
  write_rows(a, rows, sums, total);
}

}  // namespace eagle3::operators::EAGLE3_VERSION
