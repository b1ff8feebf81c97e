#include "shake128.h"

#include <algorithm>

namespace eagle3 {
namespace {

constexpr size_t kRate = 168;  // bytes of the state that take or give data between two permutations
constexpr uint64_t kRoundConstants[24] = {
    0x0000000000000001, 0x0000000000008082, 0x800000000000808a, 0x8000000080008000, 0x000000000000808b,
    0x0000000080000001, 0x8000000080008081, 0x8000000000008009, 0x000000000000008a, 0x0000000000000088,
    0x0000000080008009, 0x000000008000000a, 0x000000008000808b, 0x800000000000008b, 0x8000000000008089,
    0x8000000000008003, 0x8000000000008002, 0x8000000000000080, 0x000000000000800a, 0x800000008000000a,
    0x8000000080008081, 0x8000000000008080, 0x0000000080000001, 0x8000000080008008};
constexpr int kRotations[24] = {1, 3, 6, 10, 15, 21, 28, 36, 45, 55, 2, 14, 27, 41, 56, 8, 25, 43, 62, 18, 39, 61, 20, 44};
constexpr int kLanes[24] = {10, 7, 11, 17, 18, 3, 5, 16, 8, 21, 24, 4, 15, 23, 19, 13, 12, 2, 20, 14, 22, 9, 6, 1};

uint64_t rotated(uint64_t lane, int by) { return (lane << by) | (lane >> (64 - by)); }

/// Keccak-f[1600].
void permute(uint64_t (&state)[25]) {
  for (uint64_t constant : kRoundConstants) {
    uint64_t column[5];
    for (int x = 0; x < 5; x++) column[x] = state[x] ^ state[x + 5] ^ state[x + 10] ^ state[x + 15] ^ state[x + 20];
    for (int x = 0; x < 5; x++) {
      uint64_t mixed = column[(x + 4) % 5] ^ rotated(column[(x + 1) % 5], 1);
      for (int y = 0; y < 25; y += 5) state[x + y] ^= mixed;
    }
    uint64_t lane = state[1];
    for (int i = 0; i < 24; i++) {
      uint64_t next = state[kLanes[i]];
      state[kLanes[i]] = rotated(lane, kRotations[i]);
      lane = next;
    }
    for (int y = 0; y < 25; y += 5) {
      uint64_t row[5];
      std::copy(state + y, state + y + 5, row);
      for (int x = 0; x < 5; x++) state[x + y] = row[x] ^ (~row[(x + 1) % 5] & row[(x + 2) % 5]);
    }
    state[0] ^= constant;
  }
}

void add(uint64_t (&state)[25], size_t at, uint8_t byte) { state[at / 8] ^= uint64_t{byte} << (8 * (at % 8)); }

}  // namespace

std::vector<uint8_t> shake128(const uint8_t* message, size_t size, size_t length) {
  uint64_t state[25] = {};
  for (size_t i = 0; i < size; i++) add(state, i, message[i]);
  add(state, size, 0x1f);
  add(state, kRate - 1, 0x80);
  std::vector<uint8_t> digest;
  while (digest.size() < length) {
    permute(state);
    for (size_t i = 0; i < kRate && digest.size() < length; i++) digest.push_back(state[i / 8] >> (8 * (i % 8)));
  }
  return digest;
}

}  // namespace eagle3
