// Parts of the native runner, with inputs that the test gives.
//
//   internals chain LONGEST                          reads lines "accepted seconds", prints the length of each next round
//   internals rates LONGEST                          reads lines "proposed accepted" (-1: another text), prints the tokens
//                                                    that rounds of each length are expected to yield
//   internals rounds ARTIFACT BUDGET LENGTHS ID...   runs rounds of these chain lengths in turn; prints ids, then counts
//   internals cached MIN_PREFILL WINDOW DRAFT_WINDOW ROLLBACK    reads calls (-1: no such key), prints what is kept
//   internals draw T K P MIN_P SEED PROMPT VOCABULARY STRIDE     reads rows of float32 logits, prints the target's ids and
//                                                                the draft's, whose ids are 1, 1 + STRIDE, ...
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <iterator>
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
  std::cerr << adaptive.note();
}

void rates(int64_t longest) {
  eagle3::AcceptanceRates rates(longest);
  std::cout.precision(17);
  int64_t proposed, accepted;
  do {
    for (double tokens : rates.tokens()) std::cout << tokens << ' ';
    if (!(std::cin >> proposed >> accepted)) break;
    if (proposed < 0) rates.forget_text();
    else rates.record(proposed, accepted);
  } while (true);
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

/// Lines: "run START ROWS", "reach POSITION", "slots COUNT", "text ID...", "reuse DRAFT ID...".
void cached(char** argv) {
  eagle3::Metadata metadata;
  metadata.min_prefill = std::atoll(argv[0]);
  metadata.sliding_window = std::atoll(argv[1]);
  const int64_t draft_window = std::atoll(argv[2]), rollback = std::atoll(argv[3]);
  if (draft_window >= 0) metadata.draft_sliding_window = draft_window;
  if (rollback >= 0) metadata.rollback_rows = rollback;
  eagle3::CachedTokens cached;
  for (std::string line, call; std::getline(std::cin, line);) {
    std::istringstream stream(line);
    stream >> call;
    eagle3::Ids given;
    for (int64_t number; stream >> number;) given.push_back(number);
    if (call == "run") cached.run(given[0], given[1], metadata.rollback_rows);
    else if (call == "reach") cached.reach(given[0]);
    else if (call == "slots") cached.draft_slots = given[0];
    else if (call == "text") cached.tokens = given;
    else if (call == "reuse") {
      const eagle3::Ids prompt(given.begin() + 1, given.end());
      const int64_t kept = cached.reuse(prompt, metadata, given[0]);
      std::cout << kept << ' ' << cached.tokens.size() << ' ' << cached.draft_slots << ' ';
    }
  }
  std::cout << std::endl;
}

void draw(char** argv) {
  eagle3::Options options;
  options.temperature = std::atof(argv[0]);
  options.top_k = std::atoll(argv[1]);
  options.top_p = std::atof(argv[2]);
  options.min_p = std::atof(argv[3]);
  options.seed = std::strtoull(argv[4], nullptr, 10);
  eagle3::Metadata metadata;
  metadata.has_logits = true;
  metadata.vocab_size = std::atoll(argv[6]);
  const int64_t stride = std::atoll(argv[7]);
  for (int64_t column = 0; column < metadata.vocab_size; column++) metadata.draft_ids.push_back(1 + stride * column);
  const std::string bytes((std::istreambuf_iterator<char>(std::cin)), {});
  std::vector<float> logits(bytes.size() / sizeof(float));
  std::memcpy(logits.data(), bytes.data(), bytes.size());
  eagle3::Step step;
  step.logits = logits.data();
  step.vocabulary = metadata.vocab_size;
  step.rows = logits.size() / step.vocabulary;
  metadata.proposals = step.rows;
  std::unique_ptr<eagle3::Choice> choice = eagle3::choice_of(options, metadata, std::atoll(argv[5]));
  for (int64_t id : choice->target(step, step.rows)) std::cout << id << ' ';
  choice->accept(2);
  for (int64_t drafted : {0, 1}) {
    for (int64_t id : choice->draft(step, drafted)) std::cout << id << ' ';
  }
  std::cout << std::endl;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string part = argc > 2 ? argv[1] : "";
  if (part == "chain") {
    chain(std::atoll(argv[2]));
  } else if (part == "rates") {
    rates(std::atoll(argv[2]));
  } else if (part == "cached" && argc == 6) {
    cached(argv + 2);
  } else if (part == "draw" && argc == 10) {
    draw(argv + 2);
  } else if (part == "rounds" && argc > 5) {
    eagle3::Ids prompt;
    for (int i = 5; i < argc; i++) prompt.push_back(std::atoll(argv[i]));
    rounds(argv[2], std::atoll(argv[3]), argv[4], prompt);
  } else {
    return 2;
  }
}
