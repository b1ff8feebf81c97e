// What a driver reads of a kernel's machine code: fatbins, and in a cubin (an ELF file) its parameters and resources.

#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace stand_in {

struct Parameter {
  unsigned offset, size;
  bool operator==(const Parameter&) const = default;
};

struct Code {
  std::vector<Parameter> parameters;
  unsigned registers = 0, static_shared = 0, required_threads = 0, most_threads = 1024;
};

template <typename T>
T at(const char* data, uint64_t offset) {
  T value;
  memcpy(&value, data + offset, sizeof(T));
  return value;
}

struct Image {
  const char* data = nullptr;
  uint64_t size = 0;
  bool machine_code = false;
  unsigned arch = 0;  // 90 is sm_90
  char variant = 0;

  // Machine code runs on its major version from its minor version on, that for Tegra and on Tegra (8.7) on its own
  // alone; PTX runs on every later one.
  bool runs_on(unsigned device) const {
    if (variant == 'a') return arch == device;
    if (machine_code && (arch == 87 || device == 87)) return arch == device;
    return arch <= device && (!machine_code && !variant ? true : arch / 10 == device / 10);
  }
};

inline std::vector<Image> images_of(const char* data) {
  constexpr uint32_t FATBIN = 0xBA55ED50;
  std::vector<Image> found;
  if (!memcmp(data, "\x7f" "ELF", 4)) {
    auto size = at<uint64_t>(data, 0x28) + at<uint16_t>(data, 0x3a) * uint64_t(at<uint16_t>(data, 0x3c));
    auto programs = at<uint64_t>(data, 0x20) + at<uint16_t>(data, 0x36) * uint64_t(at<uint16_t>(data, 0x38));
    unsigned flags = at<uint32_t>(data, 0x30), arch = data[8] < 8 ? flags : flags >> 8;  // since CUDA 13 one byte up
    found.push_back({data, std::max(size, programs), true, arch & 0xff, 0});
  } else if (at<uint32_t>(data, 0) == FATBIN) {
    uint64_t place = at<uint16_t>(data, 6), end = place + at<uint64_t>(data, 8);
    while (place < end) {
      auto kind = at<uint16_t>(data, place);
      auto header = at<uint32_t>(data, place + 4);
      auto payload = at<uint64_t>(data, place + 8), flags = at<uint64_t>(data, place + 40);
      char variant = flags & 0x100000 ? 'a' : flags & 0x200000 ? 'f' : 0;
      found.push_back({data + place + header, payload, kind == 2, at<uint32_t>(data, place + 28), variant});
      if (!header) break;
      place += header + payload;
    }
  }
  return found;
}

// Section types and attributes as nvcc 13.0 writes them and cuobjdump -elf names them.
inline bool read_code(const Image& image, const std::string& kernel, Code& code) {
  constexpr uint8_t PARAMETER = 0x17, REQUIRED_THREADS = 0x10, MOST_THREADS = 0x05, WITH_SIZE = 4;
  auto elf = image.data;
  if (memcmp(elf, "\x7f" "ELF", 4)) return false;
  auto sections = at<uint64_t>(elf, 0x28);
  auto size = at<uint16_t>(elf, 0x3a), count = at<uint16_t>(elf, 0x3c), names = at<uint16_t>(elf, 0x3e);
  auto strings = at<uint64_t>(elf, sections + names * size + 24);
  bool found = false;
  for (unsigned index = 0; index < count; index++) {
    auto section = sections + index * size;
    std::string name = elf + strings + at<uint32_t>(elf, section);
    auto offset = at<uint64_t>(elf, section + 24), extent = at<uint64_t>(elf, section + 32);
    if (name == ".text." + kernel) {
      code.registers = at<uint32_t>(elf, section + 44) >> 24;
      found = true;
    } else if (name == ".nv.shared." + kernel) {
      code.static_shared = extent;
    } else if (name == ".nv.info." + kernel) {
      for (auto place = offset; place < offset + extent;) {
        auto format = at<uint8_t>(elf, place), attribute = at<uint8_t>(elf, place + 1);
        auto length = format == WITH_SIZE ? at<uint16_t>(elf, place + 2) : 0;
        auto value = place + 4;
        if (attribute == PARAMETER) {
          unsigned ordinal = at<uint16_t>(elf, value + 4);
          if (code.parameters.size() <= ordinal) code.parameters.resize(ordinal + 1);
          code.parameters[ordinal] = {at<uint16_t>(elf, value + 6), at<uint32_t>(elf, value + 8) >> 18};
        } else if (attribute == REQUIRED_THREADS || attribute == MOST_THREADS) {
          auto threads = at<uint32_t>(elf, value) * at<uint32_t>(elf, value + 4) * at<uint32_t>(elf, value + 8);
          (attribute == REQUIRED_THREADS ? code.required_threads : code.most_threads) = threads;
        }
        place = value + length;
      }
    }
  }
  return found;
}

}  // namespace stand_in
