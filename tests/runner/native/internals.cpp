// Parts of the native runner whose behaviour depends on measured times, with times and lengths that the test gives.
//
//   internals chain LONGEST                          reads lines "accepted seconds", prints the length of each next round
//   internals rounds ARTIFACT BUDGET LENGTHS ID...   runs rounds of these chain lengths in turn; prints ids, then counts
#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <sstream>

#include "rounds.h"

namespace {

/// As told_chain.py.
class Told : public eagle3::ChainLength {
 public:
  explicit Told(const std::string& lengths) {
    std::istringstream stream(lengths);
    for (std::string part; std::getline(stream, part, ',');) lengths_.push_back(std::atoll(part.c_str()));
  }
  bool speculates() const override { return true; }
  int64_t next() const override { return lengths_[rounds_ % lengths_.size()]; }
  void record(int64_t, int64_t, double) override { rounds_++; }

 private:
  std::vector<int64_t> lengths_;
  size_t rounds_ = 0;
};

void chain(int64_t longest) {
  eagle3::AdaptiveChain adaptive(longest);
  adaptive.begin();
  int64_t accepted;
  double seconds;
  while (std::cin >> accepted >> seconds) {
    const int64_t proposed = adaptive.next();
    if (accepted < 0) adaptive.begin();
    adaptive.record(proposed, std::clamp<int64_t>(accepted, 0, proposed), seconds * (1 + 0.25 * proposed));
    std::cout << adaptive.next() << ' ';
  }
  std::cout << std::endl;
}

void rounds(const std::string& artifact, size_t budget, const std::string& lengths, const eagle3::Ids& prompt) {
  eagle3::Session session(artifact, false);
  eagle3::CachedTokens cached;
  eagle3::Stats stats;
  Told told(lengths);
  std::unique_ptr<eagle3::Choice> greedy = eagle3::choice_of({}, session.metadata, prompt.size());
  size_t made = 0;
  eagle3::Rounds(session, told, *greedy, cached, stats).run(prompt, [&](const eagle3::Ids& fresh) {
    for (int64_t id : fresh) std::cout << id << ' ';
    made += fresh.size();
    return made < budget;
  });
  stats.methods = session.calls;
  std::cout << std::endl << stats.json() << std::endl;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string part = argc > 2 ? argv[1] : "";
  if (part == "chain") {
    chain(std::atoll(argv[2]));
  } else if (part == "rounds" && argc > 5) {
    eagle3::Ids prompt;
    for (int i = 5; i < argc; i++) prompt.push_back(std::atoll(argv[i]));
    rounds(argv[2], std::atoll(argv[3]), argv[4], prompt);
  } else {
    return 2;
  }
}
