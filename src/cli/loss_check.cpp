#include <fmt/format.h>

#include "base/files.h"
#include "base/json.h"
#include "cli/commands.h"
#include "cli/output.h"
#include "core/conformance.h"

namespace leeway {
namespace {

void write_rows(JsonWriter& json, const char* key, const std::vector<std::vector<double>>& rows) {
  json.key(key).begin_array();
  for (const auto& row : rows) {
    json.begin_array();
    for (double value : row) json.value(value);
    json.end_array();
  }
  json.end_array();
}

std::string check_json(const std::vector<CaseResult>& results) {
  JsonWriter json;
  json.begin_object().key("cases").begin_array();
  for (const CaseResult& r : results) {
    json.begin_object().key("name").value(r.name);
    if (r.has_loss) {
      json.key("loss").value(r.loss);
      write_rows(json, "grad", r.grad);
      write_rows(json, "weights", r.weights);
      write_rows(json, "mask", r.mask);
    } else {
      json.key("loss").null().key("grad").null();
    }
    json.key("metrics").begin_object();
    for (const ForeignMetric& metric : r.metrics) {
      json.key(metric.name);
      if (metric.list) json.begin_array();
      for (double value : metric.values) json.value(value);
      if (metric.list) json.end_array();
    }
    json.end_object();
    if (!r.outputs.empty()) {
      json.key("outputs").begin_object();
      for (const auto& [name, values] : r.outputs) write_rows(json, name.c_str(), {values});
      json.end_object();
    }
    json.key("inert").begin_array();
    for (const std::string& key : r.inert) json.value(key);
    json.end_array().key("ok").value(r.ok);
    if (!r.ok) json.key("difference").value(r.difference);
    json.end_object();
  }
  json.end_array().end_object();
  return json.text() + "\n";
}

}  // namespace

void add_loss_check(CLI::App& loss, Program& program) {
  auto* command = loss.add_subcommand(
      "check", "Compare with another code base's numbers; exit 1 if any case differs");
  auto file = std::make_shared<std::string>();
  auto json = std::make_shared<bool>(false);
  command->add_option("golden", *file, "A golden file: a fixture and cases; see docs/formats.md")
      ->required();
  command->add_flag("--json", *json, "Print what was computed, case by case, as JSON");
  command->callback([&program, file, json] {
    const auto results = run_golden(program.catalog, *file, read_file(*file));
    size_t differ = 0, numbers = 0;
    std::string out;
    for (const CaseResult& r : results) {
      differ += !r.ok;
      numbers += static_cast<size_t>(r.compared_numbers);
      out += r.ok ? fmt::format("ok    {}  {} numbers\n", r.name, r.compared_numbers)
                  : fmt::format("DIFF  {}  {}\n", r.name, r.difference);
    }
    out += fmt::format("{} cases, {} agree, {} differ; {} numbers compared\n", results.size(),
                       results.size() - differ, differ, numbers);
    print(*json ? check_json(results) : out);
    program.exit_code = differ > 0 ? 1 : 0;
  });
}

}  // namespace leeway
