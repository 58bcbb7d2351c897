#include "config/run_reader.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <unordered_map>

#include "base/files.h"
#include "base/json.h"
#include "config/toml_text.h"
#include "leeway/error.h"

namespace leeway {
namespace {

// Assigns a value to its key's target if it has the right type and is in range.
class Assign {
 public:
  Assign(const Field& field, const Given& given) : field_(field), given_(given) {}

  void operator()(bool* target) const {
    const auto* flag = std::get_if<bool>(&given_.value);
    if (flag == nullptr) refuse(given_, demand(field_));
    *target = *flag;
  }
  void operator()(int64_t* target) const {
    const auto* integer = std::get_if<int64_t>(&given_.value);
    if (integer == nullptr || !field_.range.holds(static_cast<double>(*integer))) {
      const bool real = std::holds_alternative<double>(given_.value);
      refuse(given_, demand(field_) + (real ? ", without decimal point or exponent" : ""));
    }
    *target = *integer;
  }
  void operator()(std::optional<int64_t>* target) const {
    if (given_.value == Scalar("unlimited")) {
      target->reset();
      return;
    }
    int64_t integer = 0;
    (*this)(&integer);
    *target = integer;
  }
  void operator()(AutoNumber* target) const {
    if (given_.value == Scalar("auto")) {
      *target = auto_number();
      return;
    }
    double number = 0.0;
    (*this)(&number);
    *target = number;
  }
  void operator()(double* target) const {
    const auto* integer = std::get_if<int64_t>(&given_.value);
    const auto* number = std::get_if<double>(&given_.value);
    if (integer == nullptr && number == nullptr) refuse(given_, demand(field_));
    // The addition turns -0 into 0, as an integer would be.
    const double value = 0.0 + (integer != nullptr ? static_cast<double>(*integer) : *number);
    if (!field_.range.holds(value)) refuse(given_, demand(field_));
    *target = value;
  }
  void operator()(std::string* target) const { *target = text(); }
  // One text stands for a list of one.
  void operator()(std::vector<std::string>* target) const {
    const auto* one = std::get_if<std::string>(&given_.value);
    const auto* list = std::get_if<std::vector<std::string>>(&given_.value);
    if (one == nullptr && list == nullptr) refuse(given_, demand(field_));
    *target = one != nullptr ? std::vector<std::string>{*one} : *list;
    for (const std::string& text : *target) {
      if (!is_toml_text(text)) refuse(given_, "must be UTF-8 text without a NUL character");
    }
  }
  void operator()(const EnumTarget& target) const {
    const auto* flag = std::get_if<bool>(&given_.value);
    const bool named = flag == nullptr || field_.if_true.empty();
    const auto place = std::find(field_.choices.begin(), field_.choices.end(),
                                 named   ? text()
                                 : *flag ? field_.if_true
                                         : field_.choices.front());
    target.set(target.value, static_cast<size_t>(place - field_.choices.begin()));
  }

 private:
  // Checked: one of the choices, where there are some.
  const std::string& text() const {
    const auto* text = std::get_if<std::string>(&given_.value);
    if (text == nullptr) {
      refuse(given_, demand(field_) + "; write it in quotes, as in \"" +
                         (field_.choices.empty() ? "text" : field_.choices.front()) + "\"");
    }
    if (!is_toml_text(*text)) {
      refuse(given_, "must be UTF-8 text without a NUL character");
    }
    if (field_.choices.empty()) {
      if (text->empty() && !field_.may_be_empty) refuse(given_, demand(field_));
    } else if (std::find(field_.choices.begin(), field_.choices.end(), *text) ==
               field_.choices.end()) {
      // By its letters "gpu" is nearer to "cpu".
      const bool gpu = field_.key == "device" && (*text == "gpu" || *text == "GPU");
      const std::string near = gpu ? "cuda" : nearest_name(*text, field_.choices);
      refuse(given_, demand(field_) + (near.empty() ? "" : "; did you mean " + near + "?"));
    }
    return *text;
  }

  const Field& field_;
  const Given& given_;
};

std::vector<Section> all_sections(RunConfig& run, RendererConfig& renderer) {
  std::vector<Section> sections = describe(run, renderer);
  for (size_t i = 0; i < run.environments.size(); ++i) {
    sections.push_back(describe(run.environments[i], i));
  }
  return sections;
}

// Environments without an id get their name, numbered if several share it.
void fill_ids(std::vector<EnvironmentTable>& environments) {
  std::map<std::string, size_t> counts, before;
  for (const EnvironmentTable& table : environments) ++counts[table.name];
  for (EnvironmentTable& table : environments) {
    const size_t number = ++before[table.name];
    if (!table.id.empty()) continue;
    table.id = counts[table.name] == 1 ? table.name : fmt::format("{}_{}", table.name, number);
  }
}

// Finds sections by the path of their values.
class SectionIndex {
 public:
  explicit SectionIndex(const std::vector<Section>& sections) {
    for (const Section& section : sections) by_prefix_.emplace(section.prefix(), &section);
  }
  const Section& of(const Given& given) const {
    const auto found = by_prefix_.find(given.path);
    LEEWAY_CHECK(found != by_prefix_.end(), fmt::format("{} is in no table", given.name()));
    return *found->second;
  }

 private:
  std::unordered_map<std::string, const Section*> by_prefix_;
};

// The path relative to the file's folder if it exists there, else relative to the working
// directory. Paths that cannot be written into a configuration stay unchanged.
std::string resolved(const std::string& path, const std::string& folder) {
  namespace fs = std::filesystem;
  std::error_code unknown;  // whoever opens the path will report errors
  const fs::path beside = fs::path(folder) / path;
  const bool there = !folder.empty() && fs::exists(beside, unknown);
  const std::string whole = fs::absolute(there ? beside : fs::path(path), unknown).string();
  return unknown || !is_toml_text(whole) ? path : whole;
}

// The width of the model in a Hugging Face folder; 0 if unknown, which is an error when the model
// is loaded.
int64_t hidden_size_of(const std::string& folder) {
  try {
    const std::string name = folder + "/config.json";
    const rapidjson::Document json = parse_json(name, read_file(name));
    if (!json.IsObject() || !json.HasMember("hidden_size")) return 0;
    const auto& size = json["hidden_size"];
    return size.IsInt64() && size.GetInt64() > 0 ? size.GetInt64() : 0;
  } catch (const Error&) {
    return 0;
  }
}

// Makes the two spellings of [orchestrator.renderer] agree, or says that they do not.
void unite_thinking_keys(const Document& document, RendererConfig& renderer, Problems& problems) {
  const std::string table = "orchestrator.renderer.";
  const Given* retention = document.find(table + "thinking_retention");
  if (retention == nullptr) {
    renderer.thinking_retention = renderer.preserve_all_thinking ? KeptThinking::all
                                  : renderer.preserve_thinking_between_tool_calls
                                      ? KeptThinking::between_tool_calls
                                      : KeptThinking::last;
    return;
  }
  if (problems.blames(retention->name())) return;
  const KeptThinking kept = renderer.thinking_retention;
  const auto unite = [&](const char* key, bool& flag, bool wanted) {
    const Given* given = document.find(table + key);
    if (given != nullptr && !problems.blames(given->name()) && flag != wanted) {
      problems.add(*retention, fmt::format("contradicts {} = {} ({}); leave one of the two out",
                                           given->name(), flag, given->place));
    }
    flag = wanted;
  };
  unite("preserve_all_thinking", renderer.preserve_all_thinking, kept == KeptThinking::all);
  // With all thinking kept, the other flag has nothing to add.
  if (kept == KeptThinking::all) return;
  unite("preserve_thinking_between_tool_calls", renderer.preserve_thinking_between_tool_calls,
        kept == KeptThinking::between_tool_calls);
}

}  // namespace

void read_run(const Document& document, RunConfig& run, RendererConfig& renderer,
              Findings& findings) {
  run.environments.resize(document.environments.size());
  std::vector<Section> sections = all_sections(run, renderer);
  for (const Section& section : sections) {
    if (section.given != nullptr && document.has_table(section.path)) *section.given = true;
  }
  const SectionIndex targets(sections);
  for (const Given& given : document.values()) {
    const Section& section = targets.of(given);
    if (section.open) continue;
    const Field* field = section.find(given.key);
    LEEWAY_CHECK(field != nullptr, fmt::format("{} is no key", given.name()));
    findings.problems.attempt(given, [&] { std::visit(Assign(*field, given), field->target); });
  }
  for (size_t i = 0; i < run.environments.size(); ++i) {
    const std::string key = fmt::format("environment.{}.name", i);
    if (!run.environments[i].name.empty() || findings.problems.blames(key)) continue;
    const Section section = describe(run.environments[i], i);
    const auto& [place, order] = document.environments[i];
    findings.problems.add(order, fmt::format("{}: environment.{} has no name; name {}", place, i,
                                             demand(*section.find("name"))));
    findings.problems.blame(key);
  }
  unite_thinking_keys(document, renderer, findings.problems);
  // Which keys have no effect depends on all values.
  sections = all_sections(run, renderer);
  const SectionIndex finished(sections);
  for (const Given& given : document.values()) {
    const Section& section = finished.of(given);
    if (section.open || document.find(given.name()) != &given) continue;
    const Field* field = section.find(given.key);
    if (field->inert.empty()) continue;
    findings.inert(document, given, {field->inert_by}, field->inert);
  }
  fill_ids(run.environments);
  const Given* name = document.find("orchestrator.renderer.name");
  if (name == nullptr) return;
  renderer.where = name->where();
  if (renderer.name == "auto" && run.model.path.empty() &&
      !findings.problems.blames("model.path")) {
    findings.problems.add(*name,
                          "takes the renderer of a model folder, but model.path is empty; set "
                          "model.path, or name a renderer");
  }
}

void decide_automatic(RunConfig& run) {
  AutoNumber& rate = run.trainer.optimizer.learning_rate;
  if (!rate.automatic) return;
  const ModelTable& model = run.model;
  const int64_t width = model.path.empty() ? model.hidden_size : hidden_size_of(model.path);
  // Two digits: the rule is no more precise than that, and they are easy to read.
  const double factor = model.lora.enabled ? kAdapterRate : 1.0;
  if (width > 0) {
    rate.value = std::stod(fmt::format("{:.1e}", factor * automatic_learning_rate(width)));
  }
}

void resolve_paths(const Document& document, const std::string& file, RunConfig& run,
                   RendererConfig& renderer) {
  const std::string folder = std::filesystem::path(file).parent_path().string();
  for (const Section& section : all_sections(run, renderer)) {
    for (const Field& field : section.fields) {
      if (!field.input_path) continue;
      std::string& path = *std::get<std::string*>(field.target);
      const auto& words = field.no_paths;
      if (path.empty() || std::find(words.begin(), words.end(), path) != words.end()) continue;
      const Given* given = document.find(section.prefix() + field.key);
      path = resolved(path, given != nullptr && given->in_file() ? folder : "");
    }
  }
}

std::vector<EffectiveValue> effective_values(const Document& document, RunConfig& run,
                                             RendererConfig& renderer,
                                             const std::vector<EffectiveValue>& loss_values) {
  std::vector<EffectiveValue> values;
  for (const Section& section : all_sections(run, renderer)) {
    if (section.open) values.insert(values.end(), loss_values.begin(), loss_values.end());
    if (!section.present) continue;
    for (const Field& field : section.fields) {
      if (!field.inert.empty() || !field.in_dump) continue;
      const std::string name = section.prefix() + field.key;
      const Given* given = document.find(name);
      if (given == nullptr && !field.synonym.empty()) given = document.find(field.synonym);
      std::string origin = given == nullptr ? "default" : given->place;
      const auto* number = std::get_if<AutoNumber*>(&field.target);
      if (number != nullptr && (*number)->automatic) origin += ", auto";
      values.push_back({name, toml_text(field), origin});
    }
  }
  return values;
}

}  // namespace leeway
