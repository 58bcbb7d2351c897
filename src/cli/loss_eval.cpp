#include <fmt/format.h>

#include "base/files.h"
#include "base/json.h"
#include "cli/commands.h"
#include "cli/output.h"
#include "config/config.h"
#include "core/batch_json.h"
#include "core/foreign/foreign.h"
#include "leeway/error.h"
#include "leeway/metrics.h"

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
  json.end_object();
}

}  // namespace

void add_loss_eval(CLI::App& loss, Program& program) {
  auto* command = loss.add_subcommand(
      "eval", "Loss, gradient and metrics of a preset on a batch, in double precision, as JSON");
  struct Options {
    std::string preset, config, batch;
    std::vector<std::string> sets;
  };
  auto options = std::make_shared<Options>();
  auto* preset =
      command->add_option("--preset", options->preset, "A preset; see `leeway loss list`");
  command->add_option("--config", options->config, "A TOML file; its [trainer.loss] table is used")
      ->excludes(preset);
  command->add_option("--batch", options->batch, "A batch as JSON; see docs/formats.md")
      ->required();
  command
      ->add_option("--set", options->sets, "key=value; may be repeated, the last of a key counts")
      ->type_name("KEY=VALUE");
  command->callback([&program, options] {
    LossSpec spec;
    if (!options->config.empty()) {
      spec = parse_config(program.catalog, options->config, read_file(options->config),
                          options->sets, ConfigScope::loss_only)
                 .loss_spec;
    } else {
      if (options->preset.empty()) throw Error("loss eval: give --preset or --config");
      Settings settings;
      for (const std::string& set : options->sets) settings.push_back(parse_assignment(set));
      refuse_second_preset(settings);
      spec = program.catalog.make_spec(options->preset, settings);
    }
    const LoadedBatch loaded = parse_batch(options->batch, read_file(options->batch));
    for (const std::string& warning : loaded.warnings) warn(options->batch + ": " + warning);
    const Batch& batch = loaded.batch;
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
