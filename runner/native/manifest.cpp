#include "manifest.h"

#include <cctype>

#include "eagle3.h"

namespace eagle3 {
namespace {

class Reader {
 public:
  explicit Reader(const std::string& text) : text_(text) {}

  std::optional<std::string> value_of(const std::string& key) {
    std::optional<std::string> found;
    expect('{');
    while (peek() != '}') {
      std::string name = string();
      expect(':');
      std::string value = skipped();
      if (name == key) found = value;
      if (peek() != '}') expect(',');
    }
    return found;
  }

 private:
  [[noreturn]] void refuse() const { throw Refused("the manifest is no JSON object"); }

  char peek() {
    while (at_ < text_.size() && std::isspace((unsigned char)text_[at_])) at_++;
    if (at_ == text_.size()) refuse();
    return text_[at_];
  }

  void expect(char wanted) {
    if (peek() != wanted) refuse();
    at_++;
  }

  /// The text between two quotes, escapes as they are.
  std::string string() {
    expect('"');
    size_t first = at_;
    while (at_ < text_.size() && text_[at_] != '"') at_ += text_[at_] == '\\' ? 2 : 1;
    if (at_ >= text_.size()) refuse();
    return text_.substr(first, at_++ - first);
  }

  /// Moves behind a value and returns its text.
  std::string skipped() {
    if (peek() == '"') return string();
    size_t first = at_;
    int depth = 0;
    while (true) {
      char next = peek();
      if (depth == 0 && at_ > first && (next == ',' || next == '}')) break;
      if (next == '"') {
        string();
        continue;
      }
      depth += (next == '{' || next == '[') - (next == '}' || next == ']');
      at_++;
    }
    return text_.substr(first, at_ - first);
  }

  const std::string& text_;
  size_t at_ = 0;
};

}  // namespace

std::optional<std::string> json_value(const std::string& json, const std::string& key) {
  return Reader(json).value_of(key);
}

}  // namespace eagle3
