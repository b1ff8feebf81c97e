// Reads from export.json, which lies beside a model.pte, what a runner compares. As runner/artifact/record.py, but without
// hashes.
#pragma once

#include <cstdint>
#include <string>

namespace eagle3 {

struct Record {
  double acceptance = 0;  ///< tokens a round on the export's own prompts; 0: not measured
};

/// Reads the record of the program at `model`; one without values if there is none. Throws Refused if the file's size is
/// another one than recorded: a program cut short would be read past its end.
Record read_record(const std::string& model);

/// The sha256 of the program at `model` in hexadecimal digits, as its export.json says; without one the file's own.
std::string model_sha256(const std::string& model);

/// A number as 1,234,567.
std::string grouped(int64_t value);

}  // namespace eagle3
