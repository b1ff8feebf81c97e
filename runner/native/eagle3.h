// Runs an artifact of eagle3-export in C++: opens it, generates tokens by speculative decoding, counts what it did.
//
//   eagle3::Model model = eagle3::load("out");
//   eagle3::Result result = model.generate({2, 45, 17}, {}, [](const std::vector<int64_t>& fresh) { ...; return true; });
//
// The tokens are those of eagle3-run for the same artifact and options, greedy or sampled. A model has one KV cache: it
// runs one generation at a time, on one thread. Text is outside: prompts and results are token ids.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace eagle3 {

using Ids = std::vector<int64_t>;

/// An artifact, a prompt or an option that cannot be run. `what()` is one line, in the words of eagle3-run.
struct Refused : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// Buffers of the state, which runner/contract/ describes.
struct StateGroup {
  int64_t rows = 0, piece_rows = 0;
  bool by_position = false;
  int64_t buffers = 0;
};

/// The constant methods of an artifact. Lengths are in tokens. runner/contract/ has the meaning of each.
struct Metadata {
  int64_t max_seq_len = 0, vocab_size = 0, n_layers = 0, min_prefill = 0, max_prefill = 0, sliding_window = 0;
  int64_t chain_len = 0, draft_vocab_size = 0, bos_id = -1, proposals = 1;
  int64_t window = 0;  ///< the most rows of `target_verify`
  Ids eos_ids;
  std::optional<int64_t> draft_sliding_window, rollback_rows;
  bool has_draft = true, has_draft_cache = true, has_logits = false, has_decode = false, has_speculate = false;
  Ids draft_ids;  ///< the target's id of each draft id; empty if they are the same
  std::string manifest;  ///< JSON
  std::vector<StateGroup> state_groups;  ///< empty if the artifact cannot give its state
};

/// The options of a generation, under the names of eagle3-run. `generate` refuses values out of bounds.
struct Options {
  int64_t max_new_tokens = 128;
  double temperature = 0;  ///< 0 is greedy decoding
  int64_t top_k = 0;  ///< 0: all
  double top_p = 1, min_p = 0;
  std::optional<uint64_t> seed;  ///< below 2^63; without one a sampled generation draws one
  Ids stop_token_ids;  ///< end tokens besides the artifact's
  bool ignore_eos = false;  ///< do not end at the artifact's end tokens
  std::optional<int64_t> chain_len;  ///< draft tokens per round; default: the artifact's
  bool adaptive_chain = false;  ///< `--chain-len auto`: the number that is expected to be fastest
};

/// Counts and seconds of one generation, under the names of runner/loop/statistics.py.
struct Stats {
  int64_t prompt_tokens = 0, reused_prompt_tokens = 0, generation_tokens = 0;
  int64_t num_drafts = 0, num_draft_tokens = 0, num_accepted_tokens = 0, num_undrafted = 0;
  std::vector<int64_t> accepted_at;  ///< for each position, the drafts whose proposal there was accepted
  double prefill_seconds = 0, decode_seconds = 0;
  struct Calls {
    std::string method;
    int64_t count;
    double seconds;
  };
  std::vector<Calls> methods;

  /// One JSON object, as eagle3-run --json prints it.
  std::string json() const;
  void record(int64_t proposed, int64_t accepted);
};

struct Result {
  Ids token_ids;  ///< the new tokens, including a stop token
  std::string finish_reason;  ///< "stop", "length", or "abort" if the callback returned false
  std::optional<int64_t> stop_reason;  ///< the stop token
  std::optional<uint64_t> seed;  ///< of a sampled generation
  Stats stats;
  std::string note;  ///< a line for the user if far fewer proposals were accepted than export.json says, or on the
                     ///< adaptive chain length after twenty rounds; usually empty

  std::string json() const;
};

/// A conversation that was written to a file or read from one.
struct Saved {
  int64_t tokens = 0;  ///< in the caches, with the newest, which is not computed yet
  int64_t bytes = 0;  ///< the size of the file
  std::string note;  ///< the text that was saved with it
};

/// Called after each round with the tokens that it accepted, and between the chunks of a long prompt with none. The
/// generation ends if it returns false; the caches stay valid for the next call.
using Callback = std::function<bool(const Ids& fresh)>;

/// An opened artifact.
class Model {
 public:
  struct Impl;
  explicit Model(std::unique_ptr<Impl> impl);
  Model(Model&&) noexcept;
  Model& operator=(Model&&) noexcept;
  ~Model();

  const Metadata& metadata() const;

  /// Generates tokens after `prompt`. A beginning that the caches still hold is not computed again. Throws Refused for a
  /// prompt or an option that the artifact does not take, and while another generation of this model runs;
  /// std::runtime_error if a method fails.
  Result generate(const Ids& prompt, const Options& options = {}, const Callback& callback = {});

  /// Writes the tokens and the state of the caches into a file, whole or not at all, which its owner alone may read. It
  /// keeps `note` with it. The Python runner resumes it too. Throws Refused.
  Saved save(const std::string& path, const std::string& note = "");

  /// Writes the state that `save` kept into the caches; what they held is forgotten. Throws Refused for a file that is
  /// damaged, cut or of another artifact, and then changes nothing.
  Saved resume(const std::string& path);

  /// Forgets the tokens in the caches, so that the next prompt is computed from its beginning.
  void forget();

  /// Throws Refused unless the methods share their caches (a behavioural check, runner/contract.md). It computes two
  /// short chunks and two verify windows, and forgets the tokens in the caches.
  void check_caches();

 private:
  std::unique_ptr<Impl> impl_;
};

struct LoadOptions {
  /// Methods with caches of their own, as ExecuTorch's Module opens a program by default. The text would be wrong: this
  /// exists for the test of check_caches.
  bool separate_arenas = false;
};

/// Opens an artifact for the CPU: its folder or its model.pte. Methods load at their first call. Throws Refused.
Model load(const std::string& artifact, const LoadOptions& options = {});

}  // namespace eagle3
