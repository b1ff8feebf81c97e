#include "chain.h"

#include <algorithm>
#include <cstdio>
#include <iterator>

namespace eagle3 {
namespace {

constexpr double kMemory = 16, kUsualMemory = 1024, kPrior = 0.8, kPriorWeight = 4;
constexpr size_t kRounds = 3;  // timed rounds of one length whose median is taken
constexpr int64_t kNoted = 20;  // rounds after which the note says what was chosen
constexpr double kSurprise = 1.25, kPause = 40, kLostShare = 0.01;

using Counts = std::vector<std::pair<double, double>>;

void count(Counts& counts, int64_t proposed, int64_t accepted, double decay) {
  int64_t observed = std::min(accepted + 1, proposed);
  for (int64_t at = 0; at < (int64_t)counts.size(); at++) {
    counts[at].first = counts[at].first * decay + (at < accepted);
    counts[at].second = counts[at].second * decay + (at < observed);
  }
}

double rate(const std::pair<double, double>& counts, double expected) {
  return (counts.first + kPriorWeight * expected) / (counts.second + kPriorWeight);
}

double apart(double one, double other) { return std::max(one, other) / std::min(one, other); }

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

}  // namespace

AcceptanceRates::AcceptanceRates(int64_t longest) : usual_(longest), now_(longest) {}

void AcceptanceRates::forget_text() { now_.assign(usual_.size(), {0, 0}); }

void AcceptanceRates::record(int64_t proposed, int64_t accepted) {
  if (!proposed) return;
  count(usual_, proposed, accepted, 1 - 1 / kUsualMemory);
  count(now_, proposed, accepted, 1 - 1 / kMemory);
}

std::vector<double> AcceptanceRates::tokens() const {
  std::vector<double> tokens{1.0};
  double reached = 1, usual = kPrior;
  for (size_t at = 0; at < usual_.size(); at++) {
    usual = rate(usual_[at], usual);
    reached *= rate(now_[at], usual);
    tokens.push_back(tokens.back() + reached);
  }
  return tokens;
}

AdaptiveChain::AdaptiveChain(int64_t longest)
    : length_(longest), other_(longest), rates_(longest), compared_{longest}, due_(longest + 1, 0.0) {
  for (int64_t length = 0; length <= longest; length++) {
    lengths_.insert(length);
    costs_.push_back(1 + 0.1 * length);  // guessed until they are compared
  }
}

void AdaptiveChain::begin() {
  last_ = -1;
  rates_.forget_text();
}

void AdaptiveChain::record(int64_t proposed, int64_t accepted, double seconds) {
  rates_.record(proposed, accepted);
  rounds_++;
  if (proposed == last_ && proposed == next() && seconds > 0) seconds_.push_back(seconds);
  last_ = proposed;
  if (seconds_.size() == kRounds) {
    double taken = median(seconds_);
    choose(taken);
    seconds_.clear();
  }
}

std::string AdaptiveChain::note() const {
  if (lengths_.size() == 1 || (length_ && (rounds_ < kNoted || !compared_.count(0)))) return "";
  const int64_t length = length_ ? length_ : best({std::next(lengths_.begin()), lengths_.end()});
  const std::string chosen = "after " + std::to_string(rounds_) + " rounds the chain length is " + std::to_string(length);
  char line[120];
  snprintf(line, sizeof line, ": a round of %lld tokens costs %.2f steps and yields %.2f tokens", (long long)(length + 1),
           costs_[length] / costs_[0], rates_.tokens()[length]);
  return (length_ ? chosen : "speculation is off") + line;
}

int64_t AdaptiveChain::best(const std::set<int64_t>& lengths) const {
  std::vector<double> tokens = rates_.tokens();
  return *std::max_element(lengths.begin(), lengths.end(), [&](int64_t a, int64_t b) {
    return tokens[a] / costs_[a] < tokens[b] / costs_[b];
  });
}

void AdaptiveChain::choose(double taken) {
  if (!medians_.empty()) {
    medians_.push_back(taken);
    if (medians_.size() == 2) return;
    learn(medians_[0], medians_[1], medians_[2]);
    medians_.clear();
    if (doubted_) {
      medians_ = {taken};
      return;
    }
  }
  int64_t fastest = best(compared_);
  if (int64_t other = to_compare(); fastest == length_ && other >= 0) {
    other_ = other;
    medians_ = {taken};
  }
  length_ = fastest;
}

int64_t AdaptiveChain::to_compare() const {
  int64_t fastest = compared_.count(0) ? best(lengths_) : 0;
  if (!compared_.count(fastest)) return fastest;
  int64_t other = -1;
  for (int64_t near : {int64_t{0}, length_ - 1, length_ + 1}) {
    if (near != length_ && lengths_.count(near) && (other < 0 || due_[near] < due_[other])) other = near;
  }
  return other >= 0 && due_[other] <= rounds_ ? other : -1;
}

void AdaptiveChain::learn(double before, double seconds, double after) {
  double ratio = 2 * seconds / (before + after), expected = costs_[other_] / costs_[length_];
  bool changed = apart(before, after) > kSurprise, surprising = apart(ratio, expected) > kSurprise;
  doubted_ = surprising && !changed && !doubted_;
  if (changed || doubted_) return;
  if (surprising && compared_.count(other_)) compared_ = {length_};
  compared_.insert(other_);
  costs_[other_] = costs_[length_] * ratio;
  interpolate_costs();
  std::vector<double> tokens = rates_.tokens();
  double lost = (kRounds + 1) * (ratio - tokens[other_] / tokens[length_]);
  for (double& due : due_) due = std::max(due, rounds_ + kPause);
  due_[other_] += std::max(0.0, lost) / kLostShare;
}

/// Sets the costs of lengths that were not compared, in a line between their compared neighbours.
void AdaptiveChain::interpolate_costs() {
  for (int64_t length : lengths_) {
    auto above = compared_.lower_bound(length);
    if (above != compared_.end() && *above == length) continue;
    if (above == compared_.end() || above == compared_.begin()) {
      costs_[length] = costs_[above == compared_.end() ? *compared_.rbegin() : *above];
      continue;
    }
    int64_t high = *above, low = *std::prev(above);
    costs_[length] = costs_[low] + (costs_[high] - costs_[low]) * (length - low) / (high - low);
  }
}

}  // namespace eagle3
