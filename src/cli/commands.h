// The commands of the program, one file each. `add_*` registers a command; its callback sets
// `exit_code` and throws leeway::Error for the user's mistakes.
#pragma once

#include <CLI/CLI.hpp>

#include "leeway/presets.h"

namespace leeway {

struct Program {
  Catalog catalog;
  int exit_code = 0;
};

void add_loss_list(CLI::App& loss, Program& program);
void add_loss_explain(CLI::App& loss, Program& program);
void add_loss_eval(CLI::App& loss, Program& program);
void add_loss_check(CLI::App& loss, Program& program);
void add_loss_compare(CLI::App& loss, Program& program);
void add_config(CLI::App& app, Program& program);
void add_tokenize(CLI::App& app, Program& program);
void add_render(CLI::App& app, Program& program);
void add_trajectory(CLI::App& app, Program& program);

}  // namespace leeway
