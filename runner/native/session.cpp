#include "session.h"

#include <executorch/extension/tensor/tensor.h>
#include <executorch/runtime/backend/interface.h>
#include <executorch/runtime/backend/options.h>
#include <executorch/runtime/platform/platform.h>
#include <executorch/runtime/platform/runtime.h>

#include <cstring>

#include "manifest.h"

namespace eagle3 {
namespace {

using executorch::aten::ScalarType;
using executorch::aten::Tensor;
using executorch::extension::from_blob;
using executorch::extension::Module;
using executorch::extension::TensorPtr;
using executorch::runtime::Error;
using executorch::runtime::EValue;

constexpr int kOldestFormat = 1, kNewestFormat = 8;  // runner/contract/: FORMAT_VERSION to NEWEST_VERSION

using executorch::runtime::PalImpl;

thread_local std::string logged;  // the errors since a LogKept began on this thread; others may run other models
thread_local int keepers = 0;
PalImpl before;

void keep_log(
    et_timestamp_t time, et_pal_log_level_t level, const char* file, const char* function, size_t line,
    const char* message, size_t length) {
  if (!keepers) return before.emit_log_message(time, level, file, function, line, message, length);
  if (level == kError || level == kFatal) logged += (logged.empty() ? "" : "; ") + std::string(message, length);
}

/// Keeps ExecuTorch's log from stderr for a time. Its errors become part of the message: the runtime itself returns only
/// a number, and the log has the names of missing operators.
class LogKept {
 public:
  LogKept() {
    [[maybe_unused]] static const bool once = [] {
      before = *executorch::runtime::get_pal_impl();
      return executorch::runtime::register_pal(PalImpl::create(keep_log, __FILE__));
    }();
    logged.clear();
    keepers++;
  }
  ~LogKept() { keepers--; }
};

std::string reason(Error error) {
  char code[16];
  snprintf(code, sizeof code, "error 0x%x", (int)error);
  return logged.empty() ? code : code + std::string(": ") + logged;
}

/// Lets the methods that load while it is on share one packed copy of each weight.
void share_packed_weights(bool on) {
  executorch::runtime::BackendOptions<1> options;
  (void)options.set_option("weight_cache_enabled", on);
  (void)executorch::runtime::set_option("XnnpackBackend", options.view());  // another backend has no such option
}

Ids longs(const EValue& value) {
  const Tensor& tensor = value.toTensor();
  const int64_t* first = tensor.const_data_ptr<int64_t>();
  return Ids(first, first + tensor.numel());
}

TensorPtr row(Ids& ids) { return from_blob(ids.data(), {1, (int)ids.size()}, ScalarType::Long); }

TensorPtr vector(Ids& ids) { return from_blob(ids.data(), {(int)ids.size()}, ScalarType::Long); }

Ids from(int64_t start, size_t count) {
  Ids positions(count);
  for (size_t i = 0; i < count; i++) positions[i] = start + i;
  return positions;
}

}  // namespace

void Feature::add(const Feature& other, int64_t first, int64_t last) {
  size_t bytes = other.row_bytes();
  data.insert(data.end(), other.data.begin() + first * bytes, other.data.begin() + last * bytes);
  rows += last - first;
  width = other.width;
  type = other.type;
}

Session::Session(const std::string& path, bool separate_arenas)
    : path_(path), module_(path, Module::LoadMode::Mmap, nullptr, nullptr, nullptr, !separate_arenas) {
  executorch::runtime::runtime_init();
  LogKept kept;
  Error error = module_.load(executorch::runtime::Program::Verification::InternalConsistency);
  if (error != Error::Ok) {
    throw Refused(path_ + " does not load (" + reason(error) + "): damaged or another file, copy or export it again");
  }
  read_metadata();
}

Session::Values Session::constant(const std::string& name) {
  auto result = module_.execute(name);
  if (!result.ok()) throw Refused(path_ + ": a method does not load (" + reason(result.error()) + "): export it again");
  return std::move(result.get());
}

void Session::read_metadata() {
  auto listed = module_.method_names();
  if (!listed.ok()) throw Refused(path_ + " does not load (" + reason(listed.error()) + "): export it again");
  const auto& names = listed.get();
  auto need = [&](const std::string& name) {
    if (!names.count(name)) {
      throw Refused("the program has no constant method '" + name + "': not made by eagle3-export, or by another version");
    }
    return constant(name);
  };
  auto optional = [&](const std::string& name) -> std::optional<int64_t> {
    if (!names.count(name)) return std::nullopt;
    EValue value = constant(name)[0];
    return value.isBool() ? int64_t{value.toBool()} : value.toInt();
  };
  Metadata& m = metadata;
  m.max_seq_len = need("get_max_seq_len")[0].toInt();
  m.vocab_size = need("get_vocab_size")[0].toInt();
  m.n_layers = need("get_n_layers")[0].toInt();
  m.min_prefill = need("get_min_prefill_chunk")[0].toInt();
  m.max_prefill = need("get_max_prefill_chunk")[0].toInt();
  m.sliding_window = need("get_sliding_window")[0].toInt();
  m.chain_len = need("get_chain_len")[0].toInt();
  m.draft_vocab_size = need("get_draft_vocab_size")[0].toInt();
  m.bos_id = need("get_bos_id")[0].toInt();
  for (const EValue& value : need("get_eos_ids")) m.eos_ids.push_back(value.toInt());
  auto text = need("get_manifest")[0].toString();
  m.manifest.assign(text.data(), text.size());
  for (const char* name : {"use_kv_cache", "use_sdpa_with_kv_cache", "enable_dynamic_shape"}) need(name);
  m.proposals = optional("get_proposals").value_or(1);
  m.draft_sliding_window = optional("get_draft_sliding_window");
  m.has_draft = optional("get_has_draft").value_or(1);
  m.has_draft_cache = optional("get_has_draft_cache").value_or(1);
  m.has_logits = optional("get_has_logits").value_or(0);
  if (names.count("get_draft_ids")) m.draft_ids = longs(constant("get_draft_ids")[0]);
  m.window = optional("get_verify_rows").value_or(m.chain_len + 1);
  m.rollback_rows = optional("get_rollback_rows");
  if (auto slots = optional("get_max_context_len")) m.max_seq_len = *slots;  // with `forward` the names are ExecuTorch's
  if (names.count("get_state_groups")) {
    const Values numbers = constant("get_state_groups");
    for (size_t at = 0; at + 4 <= numbers.size(); at += 4) {
      m.state_groups.push_back(
          {numbers[at].toInt(), numbers[at + 1].toInt(), numbers[at + 2].toInt() != 0, numbers[at + 3].toInt()});
    }
  }
  m.has_decode = names.count("decode");
  m.has_speculate = names.count("speculate");

  std::string version = json_value(m.manifest, "format_version").value_or("None");
  int number = version.size() < 4 ? std::atoi(version.c_str()) : 0;
  if (number < kOldestFormat || number > kNewestFormat) {
    throw Refused("the artifact has format version " + version + ", this runner reads " + std::to_string(kOldestFormat) +
        " to " + std::to_string(kNewestFormat) + ": export it again, or install the eagle3-export that made it");
  }
  if (std::string backend = json_value(m.manifest, "backend").value_or("xnnpack"); backend != "xnnpack") {
    throw Refused(path_ + " is for " + backend + ", this runner runs artifacts for xnnpack: run it by eagle3-run");
  }
  for (const char* name : {"prefill", "target_verify", "draft_decode"}) {
    bool needed = m.has_draft || std::strcmp(name, "draft_decode");
    if (needed && !names.count(name)) throw Refused(path_ + " has no method " + name + ": export it again");
  }
}

void Session::load_method(const std::string& name) {
  if (module_.is_method_loaded(name)) return;
  double start = now();
  LogKept kept;
  share_packed_weights(true);
  Error error = module_.load_method(name);
  share_packed_weights(false);
  if (error != Error::Ok) {
    std::string advice = error == Error::OperatorMissing ? "link that operator, or run it by eagle3-run" : "export it again";
    throw Refused(path_ + ": a method does not load (" + reason(error) + "): " + advice);
  }
  load_seconds += now() - start;
}

Session::Values Session::run(const std::string& name, const Values& inputs) {
  load_method(name);
  LogKept kept;
  double start = now();
  auto result = module_.execute(name, inputs);
  double seconds = now() - start;
  if (!result.ok()) throw std::runtime_error(name + " failed: " + reason(result.error()));
  for (Stats::Calls& each : calls) {
    if (each.method == name) {
      each.count++;
      each.seconds += seconds;
      return std::move(result.get());
    }
  }
  calls.push_back({name, 1, seconds});
  return std::move(result.get());
}

namespace {

Step step_of(const std::vector<EValue>& outputs, bool has_feature) {
  Step step;
  step.ids = longs(outputs[0]);
  size_t next = 1;
  if (has_feature) {
    const Tensor& tensor = outputs[next++].toTensor();  // [1, rows, width]
    const uint8_t* first = (const uint8_t*)tensor.const_data_ptr();
    step.feature = {{first, first + tensor.nbytes()}, tensor.size(1), tensor.size(2), tensor.scalar_type()};
  }
  if (next < outputs.size()) {
    const Tensor& tensor = outputs[next].toTensor();  // [1, rows, vocabulary]
    step.logits = tensor.const_data_ptr<float>();
    step.rows = tensor.size(1);
    step.vocabulary = tensor.size(2);
  }
  return step;
}

}  // namespace

Step Session::target(const char* name, const Ids& tokens, int64_t start) {
  Ids given = tokens, positions = from(start, tokens.size());
  return step_of(run(name, {row(given), vector(positions)}), metadata.has_draft);
}

Step Session::draft_decode(const Ids& tokens, const Feature& feature, int64_t start) {
  Ids given = tokens, positions = from(start, tokens.size());
  auto rows = from_blob(
      const_cast<uint8_t*>(feature.data.data()), {1, (int)feature.rows, (int)feature.width}, feature.type);
  return step_of(run("draft_decode", {row(given), rows, vector(positions)}), true);
}

FusedRound Session::speculate(const Ids& window, const Ids& positions) {
  Ids given = window, where = positions;
  Values outputs = run("speculate", {row(given), vector(where)});
  Ids both = longs(outputs[0]);  // [2, rows]
  auto middle = both.begin() + both.size() / 2;
  return {Ids(both.begin(), middle), Ids(middle, both.end()), longs(outputs[2])};
}

}  // namespace eagle3
