#include "record.h"

#include <filesystem>
#include <fstream>
#include <locale>
#include <sstream>
#include <vector>

#include "eagle3.h"
#include "manifest.h"
#include "sha256.h"

namespace eagle3 {
namespace {

constexpr const char* kRecord = "export.json";

/// The number at a path of keys; 0 without it.
template <class Number>
Number number(std::string json, std::initializer_list<const char*> keys) {
  for (const char* key : keys) {
    std::optional<std::string> value = json_value(json, key);
    if (!value || *value == "null") return 0;
    json = *value;
  }
  std::istringstream stream(json);
  stream.imbue(std::locale::classic());
  Number found = 0;
  stream >> found;
  return stream ? found : 0;
}

/// The text of the export.json beside `model`; "" without one.
std::string record_beside(const std::filesystem::path& model) {
  std::stringstream text;
  text << std::ifstream(model.parent_path() / kRecord, std::ios::binary).rdbuf();
  return text.str();
}

}  // namespace

std::string grouped(int64_t value) {
  std::string text = std::to_string(value);
  for (int64_t at = (int64_t)text.size() - 3; at > 0; at -= 3) text.insert(at, ",");
  return text;
}

std::string model_sha256(const std::string& model) {
  const std::filesystem::path path(model);
  std::string json = record_beside(path);
  if (!json.empty()) {
    for (const std::string& key : {std::string("files"), path.filename().string(), std::string("sha256")}) {
      json = json_value(json, key).value_or("{}");
    }
    if (json != "{}") return json;
  }
  std::ifstream file(model, std::ios::binary);
  std::vector<char> part(1 << 20);
  Sha256 hash;
  while (file.read(part.data(), part.size()) || file.gcount()) hash.add(part.data(), file.gcount());
  return hexadecimal(hash.digest());
}

Record read_record(const std::string& model) {
  const std::filesystem::path path(model);
  if (!std::filesystem::exists(path.parent_path() / kRecord)) return {};
  const std::string text = record_beside(path);
  Record record;
  uint64_t recorded = 0;
  try {
    recorded = number<uint64_t>(text, {"files", path.filename().string().c_str(), "bytes"});
    record.acceptance = number<double>(text, {"check", "mean_acceptance_length"});
  } catch (const Refused&) {
    throw Refused((path.parent_path() / kRecord).string() + " is not what eagle3-export writes: copy or export it again");
  }
  const uint64_t size = std::filesystem::file_size(path);
  if (recorded && recorded != size) {
    throw Refused(model + " is damaged, or was edited after the export (" + grouped(size) + " bytes, " + kRecord + " says " +
        grouped(recorded) + "): copy or export it again");
  }
  return record;
}

}  // namespace eagle3
