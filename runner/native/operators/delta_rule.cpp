#include "delta_rule.h"

#include <algorithm>
#include <vector>

#include "versions.h"

namespace eagle3::operators {
namespace {

/// One row of one state head: decays the state, writes the row into it, and reads it for each query. `held` has V numbers.
EAGLE3_FOR_THIS_CPU void row(const DeltaRule& rule, int64_t head, int64_t t, float* held) {
  const int64_t K = rule.K, V = rule.V, at = head * rule.T + t;
  const float *key = rule.key + at * K, *value = rule.value + at * V;
  const float* decay = rule.decay + (rule.by_channel ? at * K : at);
  float* states = rule.state + head * K * V;
  std::fill(held, held + V, 0.0f);
  for (int64_t k = 0; k < K; k++) {
    float* state = states + k * V;
    const float factor = decay[rule.by_channel ? k : 0], by = key[k];
    for (int64_t v = 0; v < V; v++) held[v] += by * (state[v] *= factor);
  }
  for (int64_t v = 0; v < V; v++) held[v] = (value[v] - held[v]) * rule.beta[at];
  const float* query = rule.query + (head * rule.group * rule.T + t) * K;
  float* out = rule.out + (head * rule.group * rule.T + t) * V;
  const int64_t next_query = rule.T * K, next_out = rule.T * V;
  for (int64_t g = 0; g < rule.group; g++) std::fill(out + g * next_out, out + g * next_out + V, 0.0f);
  for (int64_t k = 0; k < K; k++) {  // the state is written and read in one pass: it is what memory has to move
    float* state = states + k * V;
    const float by = key[k];
    for (int64_t v = 0; v < V; v++) state[v] += by * held[v];
    for (int64_t g = 0; g < rule.group; g++) {
      const float asked = query[g * next_query + k];
      float* read = out + g * next_out;
      for (int64_t v = 0; v < V; v++) read[v] += asked * state[v];
    }
  }
}

}  // namespace

void DeltaRule::compute(int64_t first, int64_t last) const {
  std::vector<float> held(V);
  for (int64_t head = first; head < last; head++) {
    for (int64_t t = 0; t < T; t++) row(*this, head, t, held.data());
  }
}

}  // namespace eagle3::operators
