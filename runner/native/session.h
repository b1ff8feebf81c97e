// Runs the methods of an artifact by ExecuTorch's Module, and counts and times the calls.
#pragma once

#include <executorch/extension/module/module.h>

#include <chrono>

#include "eagle3.h"

namespace eagle3 {

/// Seconds of a clock that never goes back.
inline double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// Rows of features, copied out of a method's memory, which the next call writes again.
struct Feature {
  std::vector<uint8_t> data;
  int64_t rows = 0, width = 0;
  executorch::aten::ScalarType type = executorch::aten::ScalarType::Float;

  size_t row_bytes() const { return rows ? data.size() / rows : 0; }
  /// Appends rows `first` to `last` (not included) of another feature.
  void add(const Feature& other, int64_t first, int64_t last);
};

/// The outputs of a method. `logits` points into the method's memory until the next call.
struct Step {
  Ids ids;
  Feature feature;
  const float* logits = nullptr;  // [rows, vocabulary]
  int64_t rows = 0, vocabulary = 0;
};

/// The greedy ids, the next window and its positions.
struct FusedRound {
  Ids ids, window, positions;
};

class Session {
 public:
  /// Opens the program at `path` and reads its metadata. Throws Refused.
  Session(const std::string& path, bool separate_arenas);

  Metadata metadata;
  std::vector<Stats::Calls> calls;
  double load_seconds = 0;

  // Tokens at positions `start`, `start` + 1, ...
  Step prefill(const Ids& tokens, int64_t start) { return target("prefill", tokens, start); }
  Step target_verify(const Ids& tokens, int64_t start) { return target("target_verify", tokens, start); }
  Step decode(const Ids& tokens, int64_t start) { return target("decode", tokens, start); }
  /// `tokens`[i] is the token after position `start` + i, whose feature is row i.
  Step draft_decode(const Ids& tokens, const Feature& feature, int64_t start);
  FusedRound speculate(const Ids& window, const Ids& positions);

  /// A piece of each buffer of the state; a number of a piece for each group (state.cpp).
  using Pieces = std::vector<std::vector<uint8_t>>;
  Pieces read_state(const Ids& pieces);
  /// Writes a piece of each buffer. `read_state` was called before.
  void write_state(const Ids& pieces, Pieces& values);

 private:
  using Values = std::vector<executorch::runtime::EValue>;
  void read_metadata();
  void load_method(const std::string& name);
  Values run(const std::string& name, const Values& inputs);
  Values constant(const std::string& name);
  Step target(const char* name, const Ids& tokens, int64_t start);

  struct PieceType {
    std::vector<executorch::aten::SizesType> sizes;
    executorch::aten::ScalarType type;
  };
  std::vector<PieceType> piece_types_;  // of write_state's inputs, as read_state returned them
  std::string path_;
  executorch::extension::Module module_;
};

}  // namespace eagle3
