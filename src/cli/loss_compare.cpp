#include <fmt/format.h>

#include <cstdlib>

#include "base/files.h"
#include "cli/commands.h"
#include "cli/output.h"
#include "cli/terminal_progress.h"
#include "config/config.h"
#include "core/compare.h"
#include "core/example_batch.h"
#include "leeway/error.h"
#include "report/compare_page.h"
#include "run/batch_files.h"
#include "run/compare_text.h"

namespace leeway {
namespace {

// "PRESET" or "PRESET:key=value,key=value".
PresetRequest parse_request(const std::string& text) {
  const size_t colon = text.find(':');
  PresetRequest request{text.substr(0, colon), {}};
  if (colon == std::string::npos) return request;
  if (colon + 1 == text.size()) {
    throw Error(fmt::format("--preset {}: nothing follows the colon", text));
  }
  std::string part;
  for (const char c : text.substr(colon + 1) + ",") {
    if (c != ',') {
      part += c;
      continue;
    }
    if (part.find('=') == std::string::npos || part.front() == '=') {
      throw Error(fmt::format("--preset {}: write the settings as key=value,key=value", text));
    }
    Setting setting = parse_assignment(part);
    setting.where = fmt::format("--preset {}: ", request.preset);
    refuse_second_preset({setting});
    request.settings.push_back(std::move(setting));
    part.clear();
  }
  return request;
}

// "0.5%" or "0.005".
double parse_share(const std::string& text) {
  char* end = nullptr;
  double value = std::strtod(text.c_str(), &end);
  const std::string rest = end;
  if (rest == "%") value /= 100.0;
  if (end == text.c_str() || (!rest.empty() && rest != "%") || !(value >= 0.0 && value < 1.0)) {
    throw Error(
        fmt::format("--target-masked {}: write a fraction like 0.5% or 0.005, below 1", text));
  }
  return value;
}

}  // namespace

void add_loss_compare(CLI::App& loss, Program& program) {
  auto* command =
      loss.add_subcommand("compare", "What each correction does to your batch, side by side");
  struct Options {
    std::string batch, html, run;
    std::optional<int64_t> step;
    std::optional<std::string> target;
    std::vector<std::string> presets;
    bool json = false;
  };
  auto options = std::make_shared<Options>();
  auto* batch_option =
      command->add_option("--batch", options->batch,
                          "A batch as JSON (docs/formats.md), or a run's rollouts/step_N.jsonl; "
                          "without it, a built-in example");
  auto* run_option =
      command
          ->add_option("--run", options->run,
                       "A run's folder: its batch of --step, or the rollouts kept of it")
          ->excludes(batch_option);
  command->add_option("--step", options->step, "The step of --run")->needs(run_option);
  command
      ->add_option("--preset", options->presets,
                   "A preset, with settings if need be: grpo:anchor=rollout,eps_high=0.28; may be "
                   "repeated. Default: every native one")
      ->type_name("PRESET[:KEY=VALUE,..]");
  command->add_option("--target-masked", options->target,
                      "Also find, for each preset, the threshold that masks this share (0.5%)");
  command->add_flag("--json", options->json, "Print JSON");
  add_plugin_option(*command, program);
  command->add_option("--html", options->html, "Also write a page with charts: one file, offline");
  command->callback([&program, options] {
    std::optional<double> target;
    if (options->target) target = parse_share(*options->target);
    std::string name = options->batch;
    if (!options->run.empty()) name = batch_file_of_run(options->run, options->step);
    BatchFile file;
    if (name.empty()) {
      name = "built-in example";
      file.batch = example_batch(256, 160, 1);
      say("No --batch given: comparing on a built-in example of stale, noisy rollouts.");
    } else {
      file = read_batch_file(name);
      for (const std::string& warning : file.warnings) warn(name + ": " + warning);
    }
    std::vector<PresetRequest> requests;
    for (const std::string& preset : options->presets) requests.push_back(parse_request(preset));
    if (requests.empty()) requests = default_requests(program.catalog, file.batch);
    // Report a misspelt preset before evaluating the ones in front of it.
    for (const PresetRequest& r : requests) {
      const LossSpec spec = program.catalog.make_spec(r.preset, r.settings);
      for (const std::string& warning : spec.warnings) warn(r.preset + ": " + warning);
    }

    Comparison comparison;
    try {
      TerminalProgress progress;
      comparison = compare_presets(
          program.catalog, file.batch, requests, target,
          [&](size_t done, size_t total) { progress.count("comparing", "presets", done, total); });
    } catch (const Error& error) {
      throw Error(fmt::format("{}: {}", name, error.what()));
    }
    for (size_t k = 0; k < requests.size(); ++k) {
      const LossSpec spec = program.catalog.make_spec(requests[k].preset, requests[k].settings);
      const std::string reason = missing_stream(file, spec);
      if (!reason.empty()) comparison.presets[k].unavailable = reason;
    }
    const std::string json = compare_json(name, file, comparison);
    if (!options->html.empty()) {
      write_file_atomically(options->html, compare_page(json));
      say(fmt::format("Wrote {}", options->html));
    }
    print(options->json ? json : compare_text(name, file, comparison));
  });
}

}  // namespace leeway
