#include <cmath>
#include <cstdio>

#include "eagle3.h"

namespace eagle3 {
namespace {

/// A number rounded to `digits`, as Python's json prints it.
std::string number(double value, int digits) {
  char text[64];
  snprintf(text, sizeof text, "%.*f", digits, value);
  std::string shown = text;
  while (shown.back() == '0' && shown[shown.size() - 2] != '.') shown.pop_back();
  return shown;
}

std::string list(const Ids& ids) {
  std::string text = "[";
  for (int64_t id : ids) text += (text.size() > 1 ? ", " : "") + std::to_string(id);
  return text + "]";
}

}  // namespace

void Stats::record(int64_t proposed, int64_t accepted) {
  if (!proposed) {
    num_undrafted++;
    return;
  }
  num_drafts++;
  num_draft_tokens += proposed;
  num_accepted_tokens += accepted;
  if (proposed > (int64_t)accepted_at.size()) accepted_at.resize(proposed, 0);
  for (int64_t position = 0; position < accepted; position++) accepted_at[position]++;
}

std::string Stats::json() const {
  std::string rates, timed;
  for (int64_t count : accepted_at) rates += (rates.empty() ? "" : ", ") + number((double)count / num_drafts, 4);
  double in_methods = 0;
  for (const Calls& each : methods) {
    timed += (timed.empty() ? "\"" : ", \"") + each.method + "\": {\"calls\": " + std::to_string(each.count) +
        ", \"mean_ms\": " + number(1000 * each.seconds / each.count, 4) + "}";
    in_methods += each.seconds;
  }
  const double seconds = prefill_seconds + decode_seconds;
  const double later = generation_tokens > 1 ? generation_tokens - 1 : 0;
  const double computed = prompt_tokens - reused_prompt_tokens;
  std::string text = "{\"prompt_tokens\": " + std::to_string(prompt_tokens);
  auto add = [&](const char* name, const std::string& value) { text += std::string(", \"") + name + "\": " + value; };
  add("reused_prompt_tokens", std::to_string(reused_prompt_tokens));
  add("generation_tokens", std::to_string(generation_tokens));
  add("num_undrafted_steps", std::to_string(num_undrafted));
  add("num_drafts", std::to_string(num_drafts));
  add("num_draft_tokens", std::to_string(num_draft_tokens));
  add("num_accepted_tokens", std::to_string(num_accepted_tokens));
  add("mean_acceptance_length", number(num_drafts ? 1 + (double)num_accepted_tokens / num_drafts : 1, 4));
  add("acceptance_rate_per_position", "[" + rates + "]");
  add("time_to_first_token_seconds", number(prefill_seconds, 6));
  add("time_per_output_token_seconds", number(later ? decode_seconds / later : 0, 6));
  add("prefill_tokens_per_second", number(prefill_seconds ? computed / prefill_seconds : 0, 1));
  add("decode_tokens_per_second", number(decode_seconds ? later / decode_seconds : 0, 1));
  add("methods", "{" + timed + "}");
  add("loop_share", number(seconds ? 1 - in_methods / seconds : 0, 4));
  return text + "}";
}

std::string Result::json() const {
  std::string text = "{\"token_ids\": " + list(token_ids) + ", \"text\": null, \"finish_reason\": \"" + finish_reason + "\"";
  if (stop_reason) text += ", \"stop_reason\": " + std::to_string(*stop_reason);
  if (seed) text += ", \"seed\": " + std::to_string(*seed);
  return text + ", \"stats\": " + stats.json() + "}";
}

}  // namespace eagle3
