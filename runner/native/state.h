// A session's state as a sequence of bytes: what the caches hold, read from the methods and written back. As
// runner/loop/state.py, which has the order.
#pragma once

#include "session.h"

namespace eagle3 {

/// Takes or fills `size` bytes at `data`.
using Bytes = std::function<void(uint8_t* data, size_t size)>;

/// The number of bytes that hold the state of a text written at positions 0 to `slots` - 1.
int64_t state_bytes(Session& session, int64_t slots);

void read_pieces(Session& session, int64_t slots, const Bytes& give);

void write_pieces(Session& session, int64_t slots, const Bytes& take);

}  // namespace eagle3
