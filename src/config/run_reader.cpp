#include "config/run_reader.h"

#include <fmt/format.h>
#include <toml++/toml.h>

#include <algorithm>

#include "leeway/error.h"

namespace leeway {
namespace {

bool is_toml_text(const std::string& text) {
  try {
    return toml::parse("value = " + toml_string(text)).size() == 1;
  } catch (const toml::parse_error&) {
    return false;
  }
}

// Puts a value where its key lives, if it is of the right type and in range.
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
      refuse(given_, demand(field_) + (real ? ", without point or exponent" : ""));
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
  void operator()(double* target) const {
    const auto* integer = std::get_if<int64_t>(&given_.value);
    const auto* number = std::get_if<double>(&given_.value);
    if (integer == nullptr && number == nullptr) refuse(given_, demand(field_));
    // The sum turns -0 into 0, which an integer key would have been.
    const double value = 0.0 + (integer != nullptr ? static_cast<double>(*integer) : *number);
    if (!field_.range.holds(value)) refuse(given_, demand(field_));
    *target = value;
  }
  void operator()(std::string* target) const {
    const auto* text = std::get_if<std::string>(&given_.value);
    if (text == nullptr) {
      refuse(given_, demand(field_) + "; write it in quotes, as in \"" +
                         (field_.choices.empty() ? "text" : field_.choices.front()) + "\"");
    }
    if (text->find('\0') != std::string::npos || !is_toml_text(*text)) {
      refuse(given_, "must be UTF-8 text without a NUL character");
    }
    if (field_.choices.empty()) {
      if (text->empty() && !field_.may_be_empty) refuse(given_, demand(field_));
    } else if (std::find(field_.choices.begin(), field_.choices.end(), *text) ==
               field_.choices.end()) {
      const std::string near = nearest_name(*text, field_.choices);
      refuse(given_, demand(field_) + (near.empty() ? "" : "; did you mean " + near + "?"));
    }
    *target = *text;
  }

 private:
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

// Environments without an id get their name, with a number if the name comes twice.
void fill_ids(std::vector<EnvironmentTable>& environments) {
  for (size_t i = 0; i < environments.size(); ++i) {
    if (!environments[i].id.empty()) continue;
    size_t before = 0, count = 0;
    for (size_t j = 0; j < environments.size(); ++j) {
      if (environments[j].name != environments[i].name) continue;
      ++count;
      before += j < i;
    }
    const std::string& name = environments[i].name;
    environments[i].id = count == 1 ? name : fmt::format("{}_{}", name, before + 1);
  }
}

}  // namespace

void read_run(const Document& document, RunConfig& run, RendererConfig& renderer) {
  run.environments.resize(document.environments.size());
  std::vector<Section> sections = all_sections(run, renderer);
  auto section_of = [&](const Given& given) -> const Section& {
    for (const Section& section : sections) {
      if (section.prefix() == given.path) return section;
    }
    LEEWAY_CHECK(false, fmt::format("{} is in no table", given.name()));
  };
  for (const Section& section : sections) {
    if (section.given != nullptr && document.has_table(section.path)) *section.given = true;
  }
  for (const Given& given : document.values) {
    const Section& section = section_of(given);
    if (section.open) continue;
    const Field* field = section.find(given.key);
    LEEWAY_CHECK(field != nullptr, fmt::format("{} is no key", given.name()));
    std::visit(Assign(*field, given), field->target);
  }
  for (size_t i = 0; i < run.environments.size(); ++i) {
    if (!run.environments[i].name.empty()) continue;
    const Section section = describe(run.environments[i], i);
    throw Error(fmt::format("{}: environment.{} has no name; name {}", document.environments[i], i,
                            demand(*section.find("name"))));
  }
  // Which keys have no effect depends on all values.
  sections = all_sections(run, renderer);
  for (const Given& given : document.values) {
    const Section& section = section_of(given);
    if (section.open) continue;
    const Field* field = section.find(given.key);
    if (!field->inert.empty()) refuse(*document.find(given.name()), field->inert);
  }
  fill_ids(run.environments);
  const Given* name = document.find("orchestrator.renderer.name");
  if (name != nullptr) renderer.where = name->where();
}

std::vector<EffectiveValue> effective_values(const Document& document, RunConfig& run,
                                             RendererConfig& renderer,
                                             const std::vector<EffectiveValue>& loss_values) {
  std::vector<EffectiveValue> values;
  for (const Section& section : all_sections(run, renderer)) {
    if (section.open) values.insert(values.end(), loss_values.begin(), loss_values.end());
    if (!section.present) continue;
    for (const Field& field : section.fields) {
      if (!field.inert.empty()) continue;
      const std::string name = section.prefix() + field.key;
      const Given* given = document.find(name);
      values.push_back({name, toml_text(field), given == nullptr ? "default" : given->place});
    }
  }
  return values;
}

}  // namespace leeway
