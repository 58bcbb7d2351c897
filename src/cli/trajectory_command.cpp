#include <fmt/format.h>

#include "base/files.h"
#include "cli/commands.h"
#include "cli/output.h"
#include "report/trajectory_page.h"
#include "text/trajectory_text.h"

namespace leeway {

void add_trajectory(CLI::App& app, Program&) {
  auto* command = app.add_subcommand(
      "trajectory",
      "The steps of rollouts: where the prefix holds or breaks and why, and the samples");
  struct Options {
    std::string file, tokenizer, html;
    bool json = false;
  };
  auto options = std::make_shared<Options>();
  command->add_option("file", options->file, "JSON lines of steps; see docs/formats.md")
      ->required();
  command->add_option("--tokenizer", options->tokenizer,
                      "A tokenizer.json, or \"byte\", to show text");
  command->add_flag("--json", options->json, "Print JSON, samples included");
  command->add_option("--html", options->html, "Also write a page that shows every token");
  command->callback([options] {
    std::unique_ptr<Tokenizer> tokenizer;
    if (!options->tokenizer.empty()) tokenizer = named_tokenizer(options->tokenizer);
    const auto rollouts = split_rollouts(options->file, read_file(options->file));
    std::string json;
    if (options->json || !options->html.empty()) json = trajectory_json(rollouts, tokenizer.get());
    if (!options->html.empty()) {
      write_file_atomically(options->html, trajectory_page(json));
      say(fmt::format("Wrote {}", options->html));
    }
    print(options->json ? json : trajectory_text(rollouts, tokenizer.get()));
  });
}

}  // namespace leeway
