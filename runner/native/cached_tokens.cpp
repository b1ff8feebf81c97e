#include "cached_tokens.h"

#include <algorithm>

namespace eagle3 {
namespace {

/// True if a ring of two windows, written up to `highest`, still holds the window before `position`. An unknown window
/// counts as not held, window 0 is full attention.
bool still_held(int64_t position, std::optional<int64_t> window, int64_t highest) {
  if (!window) return false;
  int64_t oldest = std::max<int64_t>(0, position - *window + 1);
  return *window == 0 || oldest + 2 * *window > highest;
}

}  // namespace

int64_t common_prefix(const Ids& a, const Ids& b) {
  auto end = a.begin() + std::min(a.size(), b.size());
  return std::mismatch(a.begin(), end, b.begin()).first - a.begin();
}

void CachedTokens::clear() {
  tokens.clear();
  draft_slots = 0;
  highest_ = -1;
  committed_ = saved_ = 0;
}

void CachedTokens::restore(const Ids& held, const Counters& counters) {
  tokens = held;
  draft_slots = counters.draft_slots;
  highest_ = counters.slots - 1;
  committed_ = counters.committed;
  saved_ = counters.saved;
}

void CachedTokens::run(int64_t start, int64_t rows, const std::optional<int64_t>& rollback_rows) {
  reach(start + rows - 1);
  committed_ = start;
  if (rollback_rows && rows > *rollback_rows) committed_ = saved_ = start + rows - *rollback_rows;
}

void CachedTokens::reach(int64_t position) { highest_ = std::max(highest_, position); }

int64_t CachedTokens::reuse(const Ids& prompt, const Metadata& metadata, bool draft) {
  int64_t size = prompt.size(), held = tokens.size(), common = common_prefix(prompt, tokens);
  int64_t kept = std::min({common, size - 1, held - 1});
  if (draft) kept = std::min({kept, common - 1, draft_slots});
  if (metadata.rollback_rows && kept < committed_) {
    bool readable = saved_ <= kept && size - saved_ >= metadata.min_prefill;
    kept = readable ? saved_ : 0;
  }
  bool holds = still_held(kept, metadata.sliding_window, highest_) &&
      (!draft || still_held(kept, metadata.draft_sliding_window, highest_));
  if (kept <= 0 || !holds) {
    clear();
    return 0;
  }
  tokens.resize(kept + 1);
  draft_slots = std::min({draft_slots, kept, common - 1});
  return kept;
}

}  // namespace eagle3
