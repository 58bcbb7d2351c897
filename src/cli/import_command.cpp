#include <fmt/format.h>

#include <algorithm>

#include "base/files.h"
#include "cli/commands.h"
#include "cli/output.h"
#include "run/batch_import.h"

namespace leeway {

void add_import(CLI::App& app, Program&) {
  auto* command = app.add_subcommand(
      "import",
      "Another trainer's dump, or a run's rollouts, as a batch for loss compare and eval");
  struct Options {
    std::string kind, path, output;
  };
  auto options = std::make_shared<Options>();
  command
      ->add_option(
          "kind", options->kind,
          "prime-rl: token_exports/step_N; slime: a file of --save-debug-train-data; leeway: "
          "a rollouts file")
      ->required()
      ->type_name("KIND");
  command->add_option("path", options->path, "The dump")->required()->type_name("PATH");
  command->add_option("--output", options->output, "The batch to write, as JSON")
      ->required()
      ->type_name("BATCH.json");
  command->callback([options] {
    const ImportedBatch imported = import_batch(options->kind, options->path);
    for (const std::string& note : imported.notes) say("leeway: note: " + note);
    const Batch& batch = imported.batch;
    write_file_atomically(options->output, batch_text(batch));
    const auto trained = std::count(batch.mask.begin(), batch.mask.end(), uint8_t{1});
    say(fmt::format("Wrote {}: {} sequences, {} trained tokens", options->output,
                    batch.offsets.size() - 1, trained));
  });
}

}  // namespace leeway
