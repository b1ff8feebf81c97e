#include "rounds.h"

#include <algorithm>

namespace eagle3 {
namespace {

Ids part(const Ids& ids, int64_t first, int64_t last) { return Ids(ids.begin() + first, ids.begin() + last); }

/// The number of tokens of the next call for a prompt with `left` tokens left: the longest chunk, or for a rest shorter
/// than the least chunk a verify window.
int64_t chunk(int64_t left, const Metadata& metadata) {
  return std::min(left, left >= metadata.min_prefill ? metadata.max_prefill : metadata.window);
}

}  // namespace

Rounds::Rounds(Session& session, ChainLength& chain, Choice& choice, CachedTokens& cached, Stats& stats)
    : session_(session), metadata_(session.metadata), chain_(chain), choice_(choice), cached_(cached), stats_(stats) {}

void Rounds::run(const Ids& prompt, const Emit& emit) {
  chain_.begin();
  try {
    std::optional<int64_t> anchor = prefill(prompt, emit);
    if (!anchor || !emit({*anchor})) return;
    double start = now();
    Ids window = propose(true);  // writes the prompt's draft slots now, in case the generation is stopped early
    double drafting = now() - start;
    while (!window.empty()) {
      if (fused_round_fits(window.size())) {
        if (!fused_rounds(window, emit)) return;
        drafting = 0;
        continue;
      }
      start = now();
      Ids ids = verify_window(window);
      int64_t proposed = window.size() - 1, accepted = ids.size() - 1;
      chain_.record(proposed, accepted, drafting + now() - start);
      start = now();
      window = propose(false);
      drafting = now() - start;
      stats_.record(proposed, accepted);
      if (!emit(ids)) return;
    }
  } catch (...) {
    cached_.clear();
    throw;
  }
}

/// Writes the prompt into both caches, except the last chunk's draft slots. Returns the token after the prompt; nothing
/// if `emit` ended the rounds between two chunks.
std::optional<int64_t> Rounds::prefill(const Ids& prompt, const Emit& emit) {
  const bool seeds = chain_.speculates() && metadata_.has_draft_cache;
  const int64_t end = prompt.size();
  int64_t start = cached_.reuse(prompt, metadata_, seeds);
  stats_.prompt_tokens += end;
  stats_.reused_prompt_tokens += start;
  while (true) {
    const int64_t stop = start + chunk(end - start, metadata_);
    const Ids tokens = part(prompt, start, stop);
    Step step;
    if (stop - start < metadata_.min_prefill) {
      step = verify(tokens, start);
    } else {
      cached_.run(start, stop - start, metadata_.rollback_rows);
      step = session_.prefill(tokens, start);
    }
    if (stop == end) {
      const Ids anchor = choice_.target(step, 1);
      cached_.tokens = prompt;
      accept(anchor);
      seed_ = {start, {}, {}};
      Ids following = part(prompt, start + 1, end);
      following.push_back(anchor[0]);
      keep(following, step.feature, following.size());
      return anchor[0];
    }
    cached_.tokens = part(prompt, 0, stop + 1);
    if (seeds) {
      cached_.reach(stop - 1 + metadata_.proposals - 1);
      session_.draft_decode(part(prompt, start + 1, stop + 1), step.feature, start);
      cached_.draft_slots = stop;
    }
    if (!emit({})) return std::nullopt;
    start = stop;
  }
}

bool Rounds::fused_round_fits(int64_t rows) const {
  return metadata_.has_speculate && choice_.greedy() && rows == metadata_.chain_len + 1 &&
      anchor_pos() + 2 * rows <= metadata_.max_seq_len;
}

/// Runs `speculate` as long as rounds fit and the chain length stays the same. `window` becomes the next round's.
/// Returns false if `emit` ended the rounds.
bool Rounds::fused_rounds(Ids& window, const Emit& emit) {
  const int64_t longest = window.size() - 1;
  Ids positions;
  for (int64_t row = 0; row <= longest; row++) positions.push_back(anchor_pos() + row);
  int64_t wanted = longest;
  while (fused_round_fits(1 + wanted)) {
    double start = now();
    cached_.run(anchor_pos(), 1 + longest, metadata_.rollback_rows);
    cached_.reach(anchor_pos() + (metadata_.has_draft_cache ? 2 * longest - 1 : longest));
    FusedRound round = session_.speculate(window, positions);
    const int64_t accepted = common_prefix(part(window, 1, longest + 1), round.ids);
    const Ids ids = part(round.ids, 0, accepted + 1);
    accept(ids);
    cached_.draft_slots = anchor_pos();
    chain_.record(longest, accepted, now() - start);
    window = round.window;
    positions = round.positions;
    wanted = chain_.next();
    stats_.record(longest, accepted);
    if (!emit(ids)) return false;
  }
  seed_ = {anchor_pos(), {}, {}};
  window.resize(1 + wanted);
  return true;
}

/// Verifies a window, whose first token, the anchor, is the last one accepted. Returns the accepted proposals and the
/// target's token after them.
Ids Rounds::verify_window(const Ids& window) {
  Step step = verify(window, anchor_pos());
  Ids chosen = choice_.target(step, window.size());
  const int64_t rows = common_prefix(part(window, 1, window.size()), chosen) + 1;
  const Ids ids = part(chosen, 0, rows);
  accept(ids);
  keep(ids, step.feature, rows);
  return ids;
}

/// Runs the target on a window; a single token by `decode`, or without one by `target_verify`, whose second row is
/// written again later.
Step Rounds::verify(const Ids& tokens, int64_t start) {
  const int64_t rows = tokens.size();
  cached_.run(start, std::max<int64_t>(rows, 2), metadata_.rollback_rows);
  if (rows > 1) return session_.target_verify(tokens, start);
  if (metadata_.has_decode) return session_.decode(tokens, start);
  Step step = session_.target_verify({tokens[0], tokens[0]}, start), first = step;
  first.ids.resize(1);
  first.rows = std::min<int64_t>(step.rows, 1);
  if (metadata_.has_draft) {
    first.feature = {};
    first.feature.add(step.feature, 0, 1);
  }
  return first;
}

/// Writes the seed's draft slots, then chains draft steps on the draft's own features. Returns the next window: the
/// anchor and the proposals; [] if the context ends at the anchor.
Ids Rounds::propose(bool write_all) {
  const int64_t anchor = cached_.tokens.back(), room = metadata_.max_seq_len - 1 - anchor_pos();
  if (room < 1) return {};
  if (!chain_.speculates()) {
    seed_ = {anchor_pos(), {}, {}};
    return {anchor};
  }
  const int64_t wanted = std::min(chain_.next(), room);
  const bool seed_can_wait = !write_all && (int64_t)seed_.tokens.size() + wanted < metadata_.max_prefill;
  Ids window{anchor};
  if (!wanted && seed_can_wait) return window;
  Step step = write_slots(wanted);
  if (!wanted) return window;
  Ids drafted = choice_.draft(step, 0);
  if (metadata_.proposals > 1) drafted.resize(std::min<int64_t>(drafted.size(), wanted));
  window.insert(window.end(), drafted.begin(), drafted.end());
  for (int64_t call = 1; (int64_t)window.size() < 1 + wanted; call++) {
    const int64_t at = metadata_.has_draft_cache ? anchor_pos() + call - 1 : anchor_pos() - 1;
    step = session_.draft_decode(drafted, step.feature, at);
    drafted = choice_.draft(step, call);
    window.insert(window.end(), drafted.begin(), drafted.end());
  }
  return window;
}

/// Writes the slots of the seed and returns that draft step. Up to `wanted` draft steps may follow.
Step Rounds::write_slots(int64_t wanted) {
  if (metadata_.has_draft_cache) cached_.reach(anchor_pos() + std::max(wanted, metadata_.proposals - 1));
  Step step = session_.draft_decode(seed_.tokens, seed_.feature, seed_.slot);
  cached_.draft_slots = anchor_pos();
  seed_ = {anchor_pos(), {}, {}};
  return step;
}

/// Adds the draft slots up to the anchor's to the seed. A draft without a cache needs only the last one.
void Rounds::keep(const Ids& tokens, const Feature& feature, int64_t rows) {
  int64_t first = 0;
  if (!metadata_.has_draft_cache) {
    seed_ = {anchor_pos() - 1, {}, {}};
    first = rows - 1;
  }
  seed_.tokens.insert(seed_.tokens.end(), tokens.begin() + first, tokens.begin() + rows);
  if (metadata_.has_draft && chain_.speculates()) seed_.feature.add(feature, first, rows);
}

void Rounds::accept(const Ids& ids) {
  cached_.tokens.insert(cached_.tokens.end(), ids.begin(), ids.end());
  choice_.accept(ids.size());
}

}  // namespace eagle3
