// The commands of the program, one file each. `add_*` registers a command; its callback sets
// `exit_code` and throws leeway::Error for user errors.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "leeway/presets.h"

namespace leeway {

struct Program {
  Catalog catalog;
  int exit_code = 0;
};

// `--set a=1 b=2 FILE`: a list option takes every word after it. A word without an equals sign is
// not an assignment, so it must be the missing positional argument.
inline void reclaim_positional(std::vector<std::string>& sets, std::string& positional) {
  for (auto word = sets.begin(); word != sets.end() && positional.empty(); ++word) {
    if (word->find('=') != std::string::npos) continue;
    positional = *word;
    sets.erase(word);
    return;
  }
}

// --plugin: the catalog gets a library's presets and corrections while the command line is read.
void add_plugin_option(CLI::App& command, Program& program);

void add_loss_list(CLI::App& loss, Program& program);
void add_loss_explain(CLI::App& loss, Program& program);
void add_loss_eval(CLI::App& loss, Program& program);
void add_loss_check(CLI::App& loss, Program& program);
void add_loss_compare(CLI::App& loss, Program& program);
void add_config(CLI::App& app, Program& program);
void add_tokenize(CLI::App& app, Program& program);
void add_render(CLI::App& app, Program& program);
void add_import(CLI::App& app, Program& program);
void add_init(CLI::App& app, Program& program);
void add_convert(CLI::App& app, Program& program);
void add_logprobs(CLI::App& app, Program& program);
void add_generate(CLI::App& app, Program& program);
void add_merge(CLI::App& app, Program& program);
void add_serve(CLI::App& app, Program& program);
void add_trajectory(CLI::App& app, Program& program);
void add_report(CLI::App& app, Program& program);
void add_train(CLI::App& app, Program& program);
void add_sft(CLI::App& app, Program& program);
void add_eval(CLI::App& app, Program& program);
void add_sweep(CLI::App& app, Program& program);
void add_completion(CLI::App& app, Program& program);
void add_man(CLI::App& app, Program& program);

}  // namespace leeway
