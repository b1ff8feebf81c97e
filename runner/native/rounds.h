// The shifted loop: prefill and seed, then rounds that verify, accept, reseed and chain. As runner/loop/rounds.py, without
// the lookup in the text.
#pragma once

#include "cached_tokens.h"
#include "chain.h"
#include "sampling.h"

namespace eagle3 {

class Rounds {
 public:
  /// Takes the tokens that a round accepted, [] between chunks of the prompt; false ends the rounds.
  using Emit = std::function<bool(const Ids&)>;

  Rounds(Session& session, ChainLength& chain, Choice& choice, CachedTokens& cached, Stats& stats);

  /// Runs until `emit` returns false. An exception leaves the caches forgotten.
  void run(const Ids& prompt, const Emit& emit);

 private:
  /// Draft slots from `slot` on that are not written yet: for each, the token after it and the target's feature.
  struct Seed {
    int64_t slot = 0;
    Ids tokens;
    Feature feature;
  };

  std::optional<int64_t> prefill(const Ids& prompt, const Emit& emit);
  bool fused_rounds(Ids& window, const Emit& emit);
  bool fused_round_fits(int64_t rows) const;
  Ids verify_window(const Ids& window);
  Step verify(const Ids& tokens, int64_t start);
  Ids propose(bool write_slots);
  Step write_slots(int64_t wanted);
  void keep(const Ids& tokens, const Feature& feature, int64_t rows);
  void accept(const Ids& ids);
  int64_t anchor_pos() const { return (int64_t)cached_.tokens.size() - 1; }

  Session& session_;
  const Metadata& metadata_;
  ChainLength& chain_;
  Choice& choice_;
  CachedTokens& cached_;
  Stats& stats_;
  Seed seed_;
};

}  // namespace eagle3
