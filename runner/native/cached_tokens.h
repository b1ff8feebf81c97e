// The tokens that a session's caches hold, so that a common prefix of prompts is computed once. As
// runner/loop/cached_tokens.py, which has the reasons.
#pragma once

#include "eagle3.h"

namespace eagle3 {

/// What CachedTokens knows besides the tokens, in positions: the draft slots that were written with the target's own
/// features, the positions that were written, and those before which the two states of recurrent layers are valid.
struct Counters {
  int64_t draft_slots = 0, slots = 0, committed = 0, saved = 0;
};

class CachedTokens {
 public:
  Ids tokens;  ///< the target's cache holds all but the last
  int64_t draft_slots = 0;  ///< the first draft slots, which were written with the target's own features

  void clear();

  Counters counters() const { return {draft_slots, highest_ + 1, committed_, saved_}; }

  /// Takes over what another CachedTokens recorded for caches with the same contents.
  void restore(const Ids& held, const Counters& counters);

  /// Records that the target is about to compute `rows` rows from position `start` on.
  void run(int64_t start, int64_t rows, const std::optional<int64_t>& rollback_rows);

  /// Records that a forward is about to write positions up to `position`.
  void reach(int64_t position);

  /// Keeps the common prefix of `prompt` and the caches, forgets the rest, and returns the number of positions kept.
  int64_t reuse(const Ids& prompt, const Metadata& metadata, bool draft);

 private:
  int64_t highest_ = -1, committed_ = 0, saved_ = 0;
};

/// The length of the common prefix of two token sequences.
int64_t common_prefix(const Ids& a, const Ids& b);

}  // namespace eagle3
