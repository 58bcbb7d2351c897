#include <fmt/format.h>

#include <filesystem>
#include <memory>

#include "base/files.h"
#include "cli/commands.h"
#include "cli/output.h"
#include "report/run_folder.h"
#include "report/run_page.h"

namespace leeway {

void add_report(CLI::App& app, Program&) {
  auto* command = app.add_subcommand(
      "report", "One HTML page of a run, or of several overlaid, that opens offline");
  struct Options {
    std::vector<std::string> runs;
    std::string output;
  };
  auto options = std::make_shared<Options>();
  command->add_option("run", options->runs, "Run folders; see docs/runs.md")
      ->required()
      ->type_name("RUN");
  command
      ->add_option("--output", options->output,
                   "The page; default: report.html in the run, with several runs in this folder")
      ->type_name("FILE");
  command->callback([options] {
    std::string output = options->output;
    if (output.empty()) {
      const bool is_one = options->runs.size() == 1;
      output = is_one ? (std::filesystem::path(options->runs[0]) / "report.html").string()
                      : "report.html";
    }
    ReportNotes notes;
    write_file_atomically(output, run_page(run_folders_json(options->runs, {}, &notes)));
    for (const std::string& note : notes) warn(note);
    print(output + "\n");
  });
}

}  // namespace leeway
