// Reads single keys of a JSON object, which is all that a runner needs of an artifact's manifest.
#pragma once

#include <optional>
#include <string>

namespace eagle3 {

/// The text of the value of `key` in the object `json`, quotes of a string left out; nothing if there is no such key.
/// Throws Refused for text that is no JSON object.
std::optional<std::string> json_value(const std::string& json, const std::string& key);

}  // namespace eagle3
