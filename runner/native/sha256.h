// SHA-256 (FIPS 180-4): the checksum of a conversation's file, and what tells artifacts apart.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace eagle3 {

using Digest = std::array<uint8_t, 32>;

class Sha256 {
 public:
  void add(const void* data, size_t size);
  /// The digest of everything that was added. Nothing can be added afterwards.
  Digest digest();

 private:
  void block(const uint8_t* bytes);

  uint32_t state_[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  uint8_t rest_[64] = {};
  uint64_t size_ = 0;
};

std::string hexadecimal(const Digest& digest);

}  // namespace eagle3
