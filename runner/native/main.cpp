// eagle3-native: runs prompts of token ids through an artifact. The flags are those of eagle3-run that it has.
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <sstream>

#include "eagle3.h"

namespace {

constexpr const char* kUsage =
    "Usage: eagle3-native ARTIFACT --prompt-tokens 1,2,3 [--max-new-tokens N] [--temperature T] [--top-k K] [--top-p P]\n"
    "         [--min-p P] [--seed N] [--stop-token-ids 1,2] [--ignore-eos] [--chain-len K|auto] [--session FILE]\n"
    "         [--check-caches] [--json]\n"
    "Prints token ids, or with --json one JSON object a prompt, as eagle3-run does. With several --prompt-tokens each is\n"
    "run after the other, and takes up the beginning that the caches hold. --session takes up what FILE holds, and writes\n"
    "it at the end.\n";

volatile std::sig_atomic_t interrupted = 0;

struct UsageError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

template <class Number>
Number number(const std::string& flag, const std::string& text) {
  std::istringstream stream(text);
  Number value;
  if (!(stream >> value) || !stream.eof()) throw UsageError("Invalid value for '" + flag + "': '" + text + "' is no number");
  return value;
}

eagle3::Ids ids(const std::string& text) {
  eagle3::Ids found;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, ',');) {
    if (part.find_first_not_of(' ') == std::string::npos) continue;
    try {
      found.push_back(number<int64_t>("--prompt-tokens", part));
    } catch (const UsageError&) {
      throw UsageError("'" + text + "' is no list of token ids such as 1,2,3");
    }
  }
  return found;
}

struct Command {
  std::string artifact, session;
  std::vector<eagle3::Ids> prompts;
  eagle3::Options options;
  eagle3::LoadOptions load;
  bool json = false, check_caches = false;
};

/// Sets one option of a generation; false for an unknown flag.
bool set(eagle3::Options& options, const std::string& flag, const std::string& value) {
  if (flag == "--max-new-tokens") options.max_new_tokens = number<int64_t>(flag, value);
  else if (flag == "--temperature") options.temperature = number<double>(flag, value);
  else if (flag == "--top-k") options.top_k = number<int64_t>(flag, value);
  else if (flag == "--top-p") options.top_p = number<double>(flag, value);
  else if (flag == "--min-p") options.min_p = number<double>(flag, value);
  else if (flag == "--seed") options.seed = number<uint64_t>(flag, value);
  else if (flag == "--stop-token-ids") options.stop_token_ids = ids(value);
  else if (flag == "--chain-len" && value == "auto") options.adaptive_chain = true;
  else if (flag == "--chain-len") options.chain_len = number<int64_t>(flag, value);
  else return false;
  return true;
}

Command parse(int argc, char** argv) {
  Command command;
  for (int i = 1; i < argc; i++) {
    const std::string flag = argv[i];
    if (flag == "--help") {
      std::cout << kUsage;
      std::exit(0);
    }
    if (flag == "--json") command.json = true;
    else if (flag == "--ignore-eos") command.options.ignore_eos = true;
    else if (flag == "--check-caches") command.check_caches = true;
    else if (flag == "--separate-arenas") command.load.separate_arenas = true;
    else if (flag.rfind("--", 0) != 0 && command.artifact.empty()) command.artifact = flag;
    else if (i + 1 == argc) throw UsageError("unknown argument or missing value: " + flag);
    else if (flag == "--session") command.session = argv[++i];
    else if (flag == "--prompt-tokens") command.prompts.push_back(ids(argv[++i]));
    else if (!set(command.options, flag, argv[++i])) throw UsageError("No such option: " + flag);
  }
  if (command.artifact.empty()) throw UsageError("Missing argument 'ARTIFACT'.");
  if (command.prompts.empty() && !command.check_caches) throw UsageError("give --prompt-tokens");
  return command;
}

void say(const std::string& path, const eagle3::Saved& saved) {
  std::cerr << path << ": " << saved.tokens << " tokens, " << saved.bytes << " bytes" << std::endl;
}

/// Returns the exit code: 130 after Ctrl-C.
int generate(eagle3::Model& model, const Command& command) {
  for (const eagle3::Ids& prompt : command.prompts) {
    eagle3::Result result = model.generate(prompt, command.options, [&](const eagle3::Ids& fresh) {
      if (!command.json) {
        for (int64_t id : fresh) std::cout << id << ' ';
        std::cout << std::flush;
      }
      return !interrupted;
    });
    std::cout << (command.json ? result.json() : "") << std::endl;
    if (!command.json && result.seed) std::cerr << "seed " << *result.seed << std::endl;
    if (!result.note.empty()) std::cerr << result.note << std::endl;
    if (result.finish_reason == "abort") return 130;
  }
  return 0;
}

int run(const Command& command) {
  eagle3::Model model = eagle3::load(command.artifact, command.load);
  if (command.check_caches) model.check_caches();
  const std::string& session = command.session;
  std::string note;
  if (std::ifstream(session).good()) {
    eagle3::Saved saved = model.resume(session);
    note = saved.note;  // eagle3-run keeps a dialogue's messages there
    say(session, saved);
  }
  const int code = generate(model, command);
  if (!session.empty()) say(session, model.save(session, note));
  return code;
}

}  // namespace

int main(int argc, char** argv) {
  std::signal(SIGINT, [](int) { interrupted = 1; });
  try {
    return run(parse(argc, argv));
  } catch (const UsageError& error) {
    std::cerr << kUsage << "Error: " << error.what() << std::endl;
    return 2;
  } catch (const std::exception& error) {
    std::cerr << "Error: " << error.what() << std::endl;
    return 1;
  }
}
