// How many draft tokens a round proposes: a fixed number, or the one that is expected to be fastest. As
// runner/loop/adaptive_chain.py and acceptance_rates.py, which have the reasons. The tokens do not depend on it.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace eagle3 {

class ChainLength {
 public:
  virtual ~ChainLength() = default;
  /// False if no round proposes anything, so that nothing is kept for the draft.
  virtual bool speculates() const = 0;
  /// Starts another generation.
  virtual void begin() {}
  virtual int64_t next() const = 0;
  /// Records a round and the seconds of its drafts and its verification.
  virtual void record(int64_t /*proposed*/, int64_t /*accepted*/, double /*seconds*/) {}
};

class FixedChain : public ChainLength {
 public:
  explicit FixedChain(int64_t length) : length_(length) {}
  bool speculates() const override { return length_ > 0; }
  int64_t next() const override { return length_; }

 private:
  int64_t length_;
};

/// Counts how often proposals are accepted, position by position: in this text, and usually.
class AcceptanceRates {
 public:
  explicit AcceptanceRates(int64_t longest);
  void forget_text();
  void record(int64_t proposed, int64_t accepted);
  /// The tokens that a round of each length is expected to yield, from length 0 on.
  std::vector<double> tokens() const;

 private:
  using Counts = std::vector<std::pair<double, double>>;  // accepted and observed proposals at each position
  Counts usual_, now_;
};

class AdaptiveChain : public ChainLength {
 public:
  explicit AdaptiveChain(int64_t longest);
  bool speculates() const override { return true; }
  void begin() override;
  int64_t next() const override { return medians_.size() == 1 ? other_ : length_; }
  void record(int64_t proposed, int64_t accepted, double seconds) override;
  /// A line on what was measured and chosen; empty as long as that is not known.
  std::string note() const;

 private:
  int64_t best(const std::set<int64_t>& lengths) const;
  void choose(double taken);
  int64_t to_compare() const;  // -1: none
  void learn(double before, double seconds, double after);
  void interpolate_costs();

  int64_t length_, other_, rounds_ = 0, last_ = -1;
  AcceptanceRates rates_;
  std::set<int64_t> lengths_, compared_;
  std::vector<double> costs_, due_, seconds_, medians_;
  bool doubted_ = false;
};

}  // namespace eagle3
