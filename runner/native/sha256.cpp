#include "sha256.h"

#include <algorithm>
#include <cstring>

namespace eagle3 {
namespace {

constexpr uint32_t kRounds[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01,
    0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc,
    0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147,
    0x06ca6351, 0x14292967, 0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116, 0x1e376c08,
    0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208,
    0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

uint32_t turned(uint32_t value, int bits) { return value >> bits | value << (32 - bits); }

}  // namespace

void Sha256::block(const uint8_t* bytes) {
  uint32_t w[64];
  for (int i = 0; i < 16; i++) {
    w[i] = (uint32_t)bytes[4 * i] << 24 | bytes[4 * i + 1] << 16 | bytes[4 * i + 2] << 8 | bytes[4 * i + 3];
  }
  for (int i = 16; i < 64; i++) {
    const uint32_t a = w[i - 15], b = w[i - 2];
    w[i] = w[i - 16] + (turned(a, 7) ^ turned(a, 18) ^ a >> 3) + w[i - 7] + (turned(b, 17) ^ turned(b, 19) ^ b >> 10);
  }
  uint32_t v[8];
  std::memcpy(v, state_, sizeof v);
  for (int i = 0; i < 64; i++) {
    const uint32_t e = v[4], a = v[0];
    const uint32_t first = v[7] + (turned(e, 6) ^ turned(e, 11) ^ turned(e, 25)) + ((e & v[5]) ^ (~e & v[6])) +
        kRounds[i] + w[i];
    const uint32_t second =
        (turned(a, 2) ^ turned(a, 13) ^ turned(a, 22)) + ((a & v[1]) ^ (a & v[2]) ^ (v[1] & v[2]));
    std::memmove(v + 1, v, 7 * sizeof *v);
    v[4] += first;
    v[0] = first + second;
  }
  for (int i = 0; i < 8; i++) state_[i] += v[i];
}

void Sha256::add(const void* data, size_t size) {
  const uint8_t* bytes = (const uint8_t*)data;
  size_t held = size_ % 64;
  size_ += size;
  if (held) {
    const size_t taken = std::min(size, 64 - held);
    std::memcpy(rest_ + held, bytes, taken);
    bytes += taken;
    size -= taken;
    if (held + taken < 64) return;
    block(rest_);
  }
  for (; size >= 64; size -= 64, bytes += 64) block(bytes);
  if (size) std::memcpy(rest_, bytes, size);
}

Digest Sha256::digest() {
  const uint64_t bits = size_ * 8;
  uint8_t padding[72] = {0x80};
  const size_t zeros = (119 - size_ % 64) % 64;  // up to a length of 56 bytes modulo 64
  for (int i = 0; i < 8; i++) padding[1 + zeros + i] = bits >> (56 - 8 * i);
  add(padding, 1 + zeros + 8);
  Digest found;
  for (int i = 0; i < 32; i++) found[i] = state_[i / 4] >> (24 - 8 * (i % 4));
  return found;
}

std::string hexadecimal(const Digest& digest) {
  std::string text;
  for (uint8_t byte : digest) {
    text += "0123456789abcdef"[byte >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  return text;
}

}  // namespace eagle3
