#include <fmt/format.h>

#include "base/files.h"
#include "base/json.h"
#include "cli/commands.h"
#include "cli/config_options.h"
#include "cli/output.h"
#include "core/foreign/foreign.h"
#include "core/own_metrics.h"
#include "leeway/error.h"
#include "leeway/metrics.h"
#include "run/batch_files.h"

namespace leeway {
namespace {

void write_metrics(JsonWriter& json, const LossSpec& spec, const Batch& batch,
                   const LossResult& result, const MetricSums& sums) {
  json.key("metrics").begin_object();
  if (spec.preset.find('/') == std::string::npos) {
    for (const auto& [name, value] : finalize_metrics(spec, sums, !batch.rollout.empty(),
                                                      !batch.ref.empty(), !batch.teacher.empty())) {
      json.key(name).value(value);
    }
  } else {
    for (const ForeignMetric& metric : foreign_metrics(spec, batch.view(), result)) {
      json.key(metric.name);
      if (!metric.list) {
        json.value(metric.values.front());
        continue;
      }
      json.begin_array();
      for (double value : metric.values) json.value(value);
      json.end_array();
    }
  }
  for (const auto& [name, value] : own_metrics(spec, batch.view())) json.key(name).value(value);
  json.end_object();
}

}  // namespace

void add_loss_eval(CLI::App& loss, Program& program) {
  auto* command = loss.add_subcommand(
      "eval", "Loss, gradient and metrics of a preset on a batch, in double precision, as JSON");
  struct Options {
    std::string preset, batch;
    ConfigSource config;
  };
  auto options = std::make_shared<Options>();
  auto* preset =
      command->add_option("--preset", options->preset, "A preset; see `leeway loss list`");
  auto* config = command
                     ->add_option("--config", options->config.file,
                                  "A TOML file; its [trainer.loss] table is used")
                     ->excludes(preset);
  command
      ->add_option("--batch", options->batch,
                   "A batch as JSON (docs/formats.md), or a run's rollouts/step_N.jsonl")
      ->required();
  add_override_options(*command, options->config);
  add_plugin_option(*command, program);
  command->get_option("--unset")->needs(config);
  command->callback([&program, options] {
    LossSpec spec;
    if (!options->config.file.empty()) {
      spec = load_config(program.catalog, options->config, ConfigScope::loss_only).loss_spec;
    } else {
      if (options->preset.empty()) throw Error("loss eval: give --preset or --config");
      Settings settings;
      for (const std::string& set : options->config.sets) settings.push_back(parse_assignment(set));
      refuse_second_preset(settings);
      spec = program.catalog.make_spec(options->preset, settings);
    }
    for (const std::string& warning : spec.warnings) warn(spec.preset + ": " + warning);
    const BatchFile file = read_batch_file(options->batch);
    for (const std::string& warning : file.warnings) warn(options->batch + ": " + warning);
    if (const std::string reason = missing_stream(file, spec); !reason.empty()) {
      throw Error(fmt::format("{}: preset {} {}", options->batch, spec.preset, reason));
    }
    if (file.rollouts) say(fmt::format("{}: {}", options->batch, file.part_of_batch()));
    const Batch& batch = file.batch;
    MetricSums sums;
    LossResult result;
    try {
      result = evaluate_reference(spec, batch.view(), {}, &sums, true);
    } catch (const Error& error) {
      throw Error(fmt::format("{}: {}", options->batch, error.what()));
    }

    JsonWriter json;
    json.begin_object().key("preset").value(spec.preset).key("loss").value(result.loss);
    json.key("grad").begin_array();
    for (size_t s = 0; s + 1 < batch.offsets.size(); ++s) {
      json.begin_array();
      for (int64_t i = batch.offsets[s]; i < batch.offsets[s + 1]; ++i) {
        json.value(result.grad[static_cast<size_t>(i)]);
      }
      json.end_array();
    }
    json.end_array();
    write_metrics(json, spec, batch, result, sums);
    json.key("denominator").value(result.denominator);
    json.key("inert").begin_array();
    for (const std::string& key : spec.inert) json.value(key);
    json.end_array().end_object();
    print(json.text() + "\n");
  });
}

}  // namespace leeway
