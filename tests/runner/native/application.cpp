// An application that embeds the native runner: cancels a generation after two rounds, in which it asks for a second one in
// vain, then continues its text, then runs the same prompt again without an interruption. Prints a line of ids for each, and the reused tokens of the second.
#include <eagle3.h>

#include <cstdlib>
#include <iostream>

namespace {

void print(const eagle3::Ids& ids) {
  for (int64_t id : ids) std::cout << id << ' ';
  std::cout << std::endl;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) return 2;
  eagle3::Model model = eagle3::load(argv[1]);
  eagle3::Ids prompt;
  for (int i = 2; i < argc; i++) prompt.push_back(std::atoll(argv[i]));
  eagle3::Options options;
  options.max_new_tokens = 40;
  int rounds = 0;
  eagle3::Result cut = model.generate(prompt, options, [&](const eagle3::Ids& fresh) {
    for (bool forgets : {false, true}) {  // both would spoil the caches of the running generation
      try {
        forgets ? model.forget() : (void)model.generate(prompt);
        std::cout << "not refused ";
      } catch (const eagle3::Refused&) {
      }
    }
    return fresh.empty() || ++rounds < 3;
  });
  eagle3::Ids longer = prompt;
  longer.insert(longer.end(), cut.token_ids.begin(), cut.token_ids.end());
  options.max_new_tokens -= cut.token_ids.size();
  eagle3::Result rest = model.generate(longer, options);
  cut.token_ids.insert(cut.token_ids.end(), rest.token_ids.begin(), rest.token_ids.end());
  print(cut.token_ids);
  std::cout << cut.finish_reason << ' ' << rest.stats.reused_prompt_tokens << std::endl;
  model.forget();
  options.max_new_tokens = 40;
  print(model.generate(prompt, options).token_ids);
}
