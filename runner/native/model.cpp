#include <algorithm>
#include <atomic>
#include <cctype>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <random>

#include "eagle3.h"
#include "record.h"
#include "rounds.h"
#include "session_file.h"

namespace eagle3 {

struct Model::Impl {
  Impl(const std::string& path, bool separate_arenas)
      : path(path), record(read_record(path)), session(path, separate_arenas), adaptive(session.metadata.chain_len) {}

  std::string path;  // of model.pte
  Record record;
  Session session;
  CachedTokens cached;
  AdaptiveChain adaptive;  // keeps what it learned
  std::atomic<bool> running{false};
};

namespace {

/// Reserves a model's KV caches. Throws Refused if a generation has them, such as the one that calls the callback.
class Reserved {
 public:
  explicit Reserved(std::atomic<bool>& running) : running_(running) {
    if (running_.exchange(true)) {
      throw Refused("a generation of this model is running, and the model has one KV cache: end it first, or load the "
          "artifact a second time");
    }
  }
  ~Reserved() { running_ = false; }

 private:
  std::atomic<bool>& running_;
};

std::string shown(double value) {
  char text[32];
  snprintf(text, sizeof text, "%g", value);
  return text;
}

void check_prompt(const Metadata& metadata, const Ids& prompt) {
  if (prompt.empty()) throw Refused("the prompt is empty: give at least one token");
  if ((int64_t)prompt.size() >= metadata.max_seq_len) {
    throw Refused("the prompt has " + std::to_string(prompt.size()) + " tokens, the artifact's context " +
        std::to_string(metadata.max_seq_len) + ": shorten the prompt, or export with a larger --max-seq-len");
  }
  const std::string bounds = " is outside the vocabulary 0.." + std::to_string(metadata.vocab_size - 1);
  for (int64_t token : prompt) {
    if (token < 0 || token >= metadata.vocab_size) throw Refused("token id " + std::to_string(token) + bounds);
  }
}

void check_options(const Metadata& metadata, const Options& options) {
  auto need = [](bool holds, const std::string& name, const std::string& value, const std::string& bounds) {
    if (!holds) throw Refused(name + " is " + value + ", but must be " + bounds);
  };
  const double t = options.temperature;
  need(t == 0 || (t >= 1e-9 && t <= 1e9), "temperature", shown(t), "a number 0 or from 1e-09 to 1e+09");
  need(options.top_k >= 0, "top_k", std::to_string(options.top_k), "an integer 0 (all) or more");
  need(options.top_p > 0 && options.top_p <= 1, "top_p", shown(options.top_p), "a number above 0 and at most 1");
  need(options.min_p >= 0 && options.min_p < 1, "min_p", shown(options.min_p), "a number at least 0 and below 1");
  const uint64_t seed = options.seed.value_or(0);
  need(seed < uint64_t{1} << 63, "seed", std::to_string(seed), "an integer from 0 to 2**63 - 1");
  const int64_t budget = options.max_new_tokens;
  need(budget >= 1, "max_new_tokens", std::to_string(budget), "a whole number, 1 or more");
  for (int64_t token : options.stop_token_ids) {
    if (token < 0 || token >= metadata.vocab_size) {
      throw Refused("id " + std::to_string(token) + " of stop_token_ids is outside the vocabulary 0.." +
          std::to_string(metadata.vocab_size - 1));
    }
  }
  if (!options.chain_len) return;
  const int64_t length = *options.chain_len;
  need(length >= 0, "chain_len", std::to_string(length), "a whole number, 0 or more");
  const std::string given = "chain length " + std::to_string(length);
  if (length && !metadata.has_draft) {
    throw Refused(given + ", but the artifact has no draft head (--draft none): leave it out, or give --ngram for "
        "proposals from the text");
  }
  if (length > metadata.chain_len) {
    throw Refused(given + ", but the artifact verifies at most " + std::to_string(metadata.chain_len) +
        " draft tokens a round: export it with a larger --chain-len");
  }
}

constexpr double kMild = 0.7, kFarBelow = 1.0 / 3;  // as in runner/model.py
constexpr int64_t kNotedRounds = 20;

/// A line if far fewer proposals were accepted than `measured` tokens a round say; empty otherwise, or if that is 0.
std::string acceptance_note(const Stats& stats, double measured) {
  const double accepted = stats.num_drafts ? (double)stats.num_accepted_tokens / stats.num_drafts : 0;
  if (stats.num_drafts < kNotedRounds || accepted >= (measured - 1) * kFarBelow) return "";
  char line[300];
  snprintf(line, sizeof line,
           "few proposals are accepted: %.2f a round in %lld rounds, %.2f on the prompts of the export. Text of another kind "
           "can be the cause; if every text shows it, this processor computes the draft head otherwise",
           accepted, (long long)stats.num_drafts, measured - 1);
  return line;
}

/// The calls of a session since its counters had the values `before`.
std::vector<Stats::Calls> calls_since(std::vector<Stats::Calls> calls, const std::vector<Stats::Calls>& before) {
  for (size_t i = 0; i < before.size(); i++) {
    calls[i].count -= before[i].count;
    calls[i].seconds -= before[i].seconds;
  }
  calls.erase(
      std::remove_if(calls.begin(), calls.end(), [](const Stats::Calls& each) { return !each.count; }), calls.end());
  return calls;
}

std::string model_file(const std::string& artifact) {
  namespace fs = std::filesystem;
  const fs::path path(artifact), model = fs::is_directory(path) ? path / "model.pte" : path;
  if (!fs::is_regular_file(model)) {
    throw Refused(model.string() + " is missing: ARTIFACT is a folder that eagle3-export made, or its model.pte");
  }
  char head[8] = {};
  std::ifstream(model, std::ios::binary).read(head, sizeof head);
  if (head[4] != 'E' || head[5] != 'T' || !std::isdigit((unsigned char)head[6]) ||
      !std::isdigit((unsigned char)head[7])) {
    throw Refused(model.string() + " is no ExecuTorch program (no ET identifier in its header): damaged or another file, "
        "copy or export it again");
  }
  return model.string();
}

}  // namespace

Model::Model(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Model::Model(Model&&) noexcept = default;
Model& Model::operator=(Model&&) noexcept = default;
Model::~Model() = default;

const Metadata& Model::metadata() const { return impl_->session.metadata; }

Saved Model::save(const std::string& path, const std::string& note) {
  Reserved reserved(impl_->running);
  return save_session(path, impl_->session, impl_->cached, model_sha256(impl_->path), note);
}

Saved Model::resume(const std::string& path) {
  Reserved reserved(impl_->running);
  return resume_session(path, impl_->session, impl_->cached, model_sha256(impl_->path));
}

void Model::forget() {
  Reserved reserved(impl_->running);
  impl_->cached.clear();
}

Result Model::generate(const Ids& prompt, const Options& given, const Callback& callback) {
  Reserved reserved(impl_->running);
  Session& session = impl_->session;
  const Metadata& metadata = session.metadata;
  check_prompt(metadata, prompt);
  check_options(metadata, given);
  Options options = given;
  if (options.temperature != 0 && !options.seed) {
    std::random_device entropy;
    options.seed = (uint64_t{entropy()} << 32 | entropy()) >> 1;
  }
  Result result;
  if (options.temperature != 0) result.seed = options.seed;
  Stats& stats = result.stats;
  FixedChain fixed(metadata.has_draft ? options.chain_len.value_or(metadata.chain_len) : 0);
  ChainLength& chain = options.adaptive_chain && metadata.has_draft ? (ChainLength&)impl_->adaptive : fixed;
  std::unique_ptr<Choice> choice = choice_of(options, metadata, prompt.size());
  Ids stops = options.stop_token_ids;
  if (!options.ignore_eos) stops.insert(stops.end(), metadata.eos_ids.begin(), metadata.eos_ids.end());
  const size_t budget = std::min<int64_t>(options.max_new_tokens, metadata.max_seq_len - prompt.size());

  double start = now(), loaded = session.load_seconds;
  const std::vector<Stats::Calls> before = session.calls;
  Rounds rounds(session, chain, *choice, impl_->cached, stats);
  rounds.run(prompt, [&](const Ids& accepted) {
    Ids fresh(accepted.begin(), accepted.begin() + std::min(accepted.size(), budget - result.token_ids.size()));
    auto stop = std::find_first_of(fresh.begin(), fresh.end(), stops.begin(), stops.end());
    if (stop != fresh.end()) {
      fresh.erase(stop + 1, fresh.end());
      result.finish_reason = "stop";
      result.stop_reason = fresh.back();
    }
    const double seconds = now() - start - (session.load_seconds - loaded);
    (result.token_ids.empty() ? stats.prefill_seconds : stats.decode_seconds) += seconds;
    result.token_ids.insert(result.token_ids.end(), fresh.begin(), fresh.end());
    if (result.finish_reason.empty() && result.token_ids.size() == budget) result.finish_reason = "length";
    const bool goes_on = !callback || callback(fresh);
    start = now();
    loaded = session.load_seconds;
    return goes_on && result.finish_reason.empty();
  });
  if (result.finish_reason.empty()) result.finish_reason = "abort";
  stats.generation_tokens = result.token_ids.size();
  stats.methods = calls_since(session.calls, before);
  if (!options.chain_len && !options.adaptive_chain && options.temperature <= kMild) {
    result.note = acceptance_note(stats, impl_->record.acceptance);
  }
  if (&chain == &impl_->adaptive) result.note = impl_->adaptive.note();
  return result;
}

void Model::check_caches() {
  Reserved reserved(impl_->running);
  Session& session = impl_->session;
  const Metadata& metadata = session.metadata;
  impl_->cached.clear();
  const Ids chunk(metadata.min_prefill, 0);
  if (2 + metadata.min_prefill >= metadata.max_seq_len) return;
  // A chunk at positions 2.. attends to positions 0 and 1, which the verify window before it has written.
  std::vector<uint8_t> seen[2];
  for (int64_t token : {0, 1}) {
    session.target_verify({token, token}, 0);
    Step step = session.prefill(chunk, 2);
    if (!metadata.has_draft && !step.logits) return;  // ids alone may be equal
    seen[token] = step.feature.data;
    if (seen[token].empty() && step.logits) {
      const uint8_t* first = (const uint8_t*)step.logits;
      seen[token].assign(first, first + step.vocabulary * sizeof(float));
    }
  }
  if (seen[0] == seen[1]) {
    throw Refused("the methods have caches of their own, so that the text would be wrong: open the program with "
        "share_memory_arenas");
  }
}

Model load(const std::string& artifact, const LoadOptions& options) {
  return Model(std::make_unique<Model::Impl>(model_file(artifact), options.separate_arenas));
}

}  // namespace eagle3
