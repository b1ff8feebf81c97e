// SHAKE128 (FIPS 202), the hash that makes the noise's keys from a seed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace eagle3 {

/// The first `length` bytes of SHAKE128 of up to 167 bytes.
std::vector<uint8_t> shake128(const uint8_t* message, size_t size, size_t length);

}  // namespace eagle3
