// Chooses tokens: the artifact's greedy ids, or draws whose noise depends on the seed, the position and the id alone. As
// runner/sampling/ (noise.py, draws.py, sampler.py), which has the reasons.
#pragma once

#include <map>
#include <memory>

#include "session.h"

namespace eagle3 {

class Choice {
 public:
  virtual ~Choice() = default;
  virtual bool greedy() const = 0;
  /// The token after each of the last `rows` rows of a target's step.
  virtual Ids target(const Step& step, int64_t rows) = 0;
  /// The proposals of a draft's step, which follow `drafted` calls of the same chain.
  virtual Ids draft(const Step& step, int64_t drafted) = 0;
  virtual void accept(int64_t count) = 0;
};

/// `prompt`: its number of tokens. Throws Refused if the artifact does not support the options.
std::unique_ptr<Choice> choice_of(const Options& options, const Metadata& metadata, int64_t prompt);

}  // namespace eagle3
