#include "sampling.h"

#include <algorithm>
#include <cmath>

#include "shake128.h"

namespace eagle3 {
namespace {

constexpr int64_t kKeyed = 512;  // positions whose keys come from one hash
constexpr uint32_t kMultipliers[2] = {0x7FEB352D, 0x846CA68B};  // of Chris Wellons's lowbias32
constexpr uint32_t kSignAndOdd = 0x80000001;
constexpr float kUnit = 0x1p-31f * (1 - 0x1p-23f);  // maps words to (-1, 0)
constexpr int32_t kLoudWord = -(1 << 21);  // noise is loud if its word is nearer to zero
constexpr float kLoud = 6.94f, kLeast = -2.78f;  // no noise that is not loud is above kLoud, none is below kLeast

/// A hash of an id in which every bit depends on every bit of the id.
uint32_t spread(uint32_t id) {
  id = (id ^ (id >> 16)) * kMultipliers[0];
  id = (id ^ (id >> 15)) * kMultipliers[1];
  return id ^ (id >> 16);
}

struct Keys {
  uint32_t first, second;
};

/// A random odd negative number for an id at the position of `keys`.
int32_t word(Keys keys, uint32_t spread_id) {
  uint32_t mixed = (spread_id ^ keys.first) * kMultipliers[0];
  mixed = (mixed ^ (mixed >> 15)) * keys.second;
  return (int32_t)(mixed | kSignAndOdd);
}

/// Gumbel noise times the temperature. Words nearer to zero have larger noise.
float gumbel(int32_t word, float temperature) {
  float noise = (float)word * kUnit;
  return std::log(-std::log1p(noise)) * -temperature;
}

/// The draws from one vocabulary.
class Draw {
 public:
  /// `ids`: the target's id of each column; empty if they are the same.
  Draw(const Options& options, int64_t size, const Ids& ids) : options_(options) {
    for (int64_t column = 0; column < size; column++) spread_.push_back(spread(ids.empty() ? column : ids[column]));
  }

  /// The column of the largest logit plus noise, among those that the filters keep.
  int64_t operator()(const float* logits, int64_t position) {
    const int64_t size = spread_.size();
    const float temperature = options_.temperature, floor = threshold(logits);
    const Keys keys = keys_at(position);
    // An id whose noise is not loud can win only if its logit plus kLoud reaches the best sum so far.
    const float most = *std::max_element(logits, logits + size);
    float best = -INFINITY, to_beat = most + temperature * kLeast;
    int64_t chosen = 0;
    for (int64_t column = 0; column < size; column++) {
      if (!(logits[column] >= floor)) continue;
      const int32_t drawn = word(keys, spread_[column]);
      const float rounding = 1e-6f * std::fabs(to_beat);
      if (drawn <= kLoudWord && logits[column] + temperature * kLoud < to_beat - rounding) continue;
      const float score = logits[column] + gumbel(drawn, temperature);
      if (score > best) {
        best = score;
        to_beat = std::max(to_beat, best);
        chosen = column;
      }
    }
    return chosen;
  }

 private:
  Keys keys_at(int64_t position) {
    auto& digest = digests_[position / kKeyed];
    if (digest.empty()) {
      uint8_t message[16];
      const uint64_t parts[2] = {*options_.seed, (uint64_t)(position / kKeyed)};
      for (int i = 0; i < 16; i++) message[i] = parts[i / 8] >> (8 * (i % 8));
      digest = shake128(message, 16, 8 * kKeyed);
    }
    const uint8_t* at = digest.data() + 8 * (position % kKeyed);
    auto number = [](const uint8_t* bytes) {
      return bytes[0] | uint32_t{bytes[1]} << 8 | uint32_t{bytes[2]} << 16 | uint32_t{bytes[3]} << 24;
    };
    return {number(at), number(at + 4) | 1};
  }

  /// The least logit that top-k, top-p and min-p keep; -inf without filters.
  float threshold(const float* logits) {
    const int64_t size = spread_.size(), top_k = options_.top_k < size ? options_.top_k : 0;
    float least = -INFINITY;
    if (options_.top_p < 1) {
      least = by_top_p(logits, top_k);
    } else if (top_k) {
      least = largest(logits, top_k)[0];
    }
    if (options_.min_p > 0) {
      const float most = *std::max_element(logits, logits + size);
      least = std::max(least, most + (float)(options_.temperature * std::log(options_.min_p)));
    }
    return least;
  }

  /// The `count` largest logits, ascending.
  const std::vector<float>& largest(const float* logits, int64_t count) {
    top_.assign(logits, logits + spread_.size());
    std::nth_element(top_.begin(), top_.end() - count, top_.end());
    top_.erase(top_.begin(), top_.end() - count);
    std::sort(top_.begin(), top_.end());
    return top_;
  }

  /// Probabilities are summed from the least; ids above a sum of 1 - top_p are kept.
  float by_top_p(const float* logits, int64_t top_k) {
    const int64_t size = spread_.size();
    const float temperature = options_.temperature;
    for (int64_t count : {top_k ? top_k : std::min<int64_t>(256, size), top_k ? top_k : size}) {
      const std::vector<float>& top = largest(logits, count);
      const float most = top.back();
      std::vector<float> up_to(count);
      float sum = 0, outside = 0;
      for (int64_t i = 0; i < count; i++) up_to[i] = sum += std::exp((top[i] - most) / temperature);
      if (top_k) {
        const int64_t equal = std::count_if(logits, logits + size, [&](float each) { return each >= top[0]; });
        outside = up_to[0] * (float)(equal - count);
      } else {
        double every = 0;
        for (int64_t i = 0; i < size; i++) every += std::exp((logits[i] - most) / temperature);
        outside = (float)every - up_to.back();
      }
      const float limit = (float)(1 - options_.top_p) * (up_to.back() + outside);
      if (count < size && !top_k && up_to[0] + outside > limit) continue;  // the first ones are not enough
      for (int64_t i = 0; i < count; i++) {
        if (up_to[i] + outside > limit) return top[i];
      }
      return most;
    }
    return -INFINITY;
  }

  Options options_;
  std::vector<uint32_t> spread_;
  std::vector<float> top_;
  std::map<int64_t, std::vector<uint8_t>> digests_;
};

class Greedy : public Choice {
 public:
  bool greedy() const override { return true; }
  Ids target(const Step& step, int64_t rows) override { return Ids(step.ids.end() - rows, step.ids.end()); }
  Ids draft(const Step& step, int64_t) override { return step.ids; }
  void accept(int64_t) override {}
};

class Sampler : public Choice {
 public:
  Sampler(const Options& options, const Metadata& metadata, int64_t prompt)
      : target_(options, metadata.vocab_size, {}),
        draft_ids_(metadata.draft_ids),
        draft_(options, draft_ids_.empty() ? metadata.vocab_size : draft_ids_.size(), draft_ids_),
        proposals_(metadata.proposals),
        length_(prompt) {}

  bool greedy() const override { return false; }

  Ids target(const Step& step, int64_t rows) override {
    Ids chosen;
    for (int64_t row = step.rows - rows; row < step.rows; row++) {
      chosen.push_back(target_(step.logits + row * step.vocabulary, length_ + (int64_t)chosen.size()));
    }
    return chosen;
  }

  Ids draft(const Step& step, int64_t drafted) override {
    Ids chosen;
    for (int64_t row = 0; row < step.rows; row++) {
      int64_t column = draft_(step.logits + row * step.vocabulary, length_ + drafted * proposals_ + row);
      chosen.push_back(draft_ids_.empty() ? column : draft_ids_[column]);
    }
    return chosen;
  }

  void accept(int64_t count) override { length_ += count; }

 private:
  Draw target_;
  Ids draft_ids_;
  Draw draft_;
  int64_t proposals_, length_;
};

}  // namespace

std::unique_ptr<Choice> choice_of(const Options& options, const Metadata& metadata, int64_t prompt) {
  if (options.temperature == 0) return std::make_unique<Greedy>();
  if (!metadata.has_logits) {
    throw Refused(
        "sampling, a bias or a penalty needs logits, which this artifact lacks: export it again without --no-logits");
  }
  return std::make_unique<Sampler>(options, metadata, prompt);
}

}  // namespace eagle3
