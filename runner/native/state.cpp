#include "state.h"

#include <executorch/extension/tensor/tensor.h>

#include <algorithm>

namespace eagle3 {
namespace {

using executorch::extension::from_blob;
using executorch::extension::TensorPtr;

/// The number of pieces of each group that hold the state of `slots` positions.
Ids counts_of(const Metadata& metadata, int64_t slots) {
  Ids counts;
  for (const StateGroup& group : metadata.state_groups) {
    const int64_t rows = group.by_position ? std::min(group.rows, slots + 1) : group.rows;
    counts.push_back((rows + group.piece_rows - 1) / group.piece_rows);
  }
  return counts;
}

Ids pieces_at(int64_t step, const Ids& counts) {
  Ids pieces;
  for (int64_t count : counts) pieces.push_back(std::min(step, count - 1));
  return pieces;
}

/// Calls `use` with each value that has a piece at `step`.
template <class Use>
void in_use(const Metadata& metadata, const Ids& counts, int64_t step, Session::Pieces& values, const Use& use) {
  size_t buffer = 0;
  for (size_t group = 0; group < counts.size(); group++) {
    for (int64_t i = 0; i < metadata.state_groups[group].buffers; i++, buffer++) {
      if (step < counts[group]) use(values[buffer]);
    }
  }
}

int64_t steps(const Ids& counts) { return *std::max_element(counts.begin(), counts.end()); }

}  // namespace

Session::Pieces Session::read_state(const Ids& pieces) {
  Ids given = pieces;
  auto input = from_blob(given.data(), {(int)given.size()}, executorch::aten::ScalarType::Long);
  Values outputs = run("read_state", {input});
  Pieces found;
  piece_types_.clear();
  for (const auto& output : outputs) {
    const auto& tensor = output.toTensor();
    const uint8_t* first = (const uint8_t*)tensor.const_data_ptr();
    found.emplace_back(first, first + tensor.nbytes());
    piece_types_.push_back({{tensor.sizes().begin(), tensor.sizes().end()}, tensor.scalar_type()});
  }
  return found;
}

void Session::write_state(const Ids& pieces, Pieces& values) {
  Ids given = pieces;
  std::vector<TensorPtr> tensors{from_blob(given.data(), {(int)given.size()}, executorch::aten::ScalarType::Long)};
  for (size_t i = 0; i < values.size(); i++) {
    tensors.push_back(from_blob(values[i].data(), piece_types_[i].sizes, piece_types_[i].type));
  }
  run("write_state", Values(tensors.begin(), tensors.end()));
}

int64_t state_bytes(Session& session, int64_t slots) {
  const Ids counts = counts_of(session.metadata, slots);
  Session::Pieces values = session.read_state(pieces_at(0, counts));
  int64_t size = 0;
  for (int64_t step = 0; step < steps(counts); step++) {
    in_use(session.metadata, counts, step, values, [&](std::vector<uint8_t>& value) { size += value.size(); });
  }
  return size;
}

void read_pieces(Session& session, int64_t slots, const Bytes& give) {
  const Ids counts = counts_of(session.metadata, slots);
  for (int64_t step = 0; step < steps(counts); step++) {
    Session::Pieces values = session.read_state(pieces_at(step, counts));
    in_use(session.metadata, counts, step, values,
           [&](std::vector<uint8_t>& value) { give(value.data(), value.size()); });
  }
}

void write_pieces(Session& session, int64_t slots, const Bytes& take) {
  const Ids counts = counts_of(session.metadata, slots);
  Session::Pieces values = session.read_state(pieces_at(0, counts));
  for (int64_t step = 0; step < steps(counts); step++) {
    in_use(session.metadata, counts, step, values,
           [&](std::vector<uint8_t>& value) { take(value.data(), value.size()); });
    session.write_state(pieces_at(step, counts), values);
  }
}

}  // namespace eagle3
