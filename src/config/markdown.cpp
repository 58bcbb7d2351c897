// The reference page, from the description that reading and the dump use.

#include <fmt/format.h>

#include "config/config.h"
#include "config/fields.h"
#include "config/given.h"

namespace leeway {
namespace {

constexpr const char* kOpening =
    "# Configuration\n\n"
    "This page is printed by `leeway config --reference`; a test compares it.\n\n"
    "A run is described by one TOML file. All keys are optional unless said otherwise; a file "
    "that\n"
    "is empty has all the defaults below. What is unknown, of the wrong type, out of range,\n"
    "contradictory or without effect is refused with file, line, key, value and remedy, all of it\n"
    "at once. Integers are taken where a number is asked for, not the other way round. Numbers "
    "are\n"
    "finite.\n\n"
    "Paths of what is read (`data`, `eval_data`, `path`, `tokenizer`, `reference`, `teacher`) are\n"
    "relative to the file where they exist there, and else to the folder in which the program "
    "runs;\n"
    "those of `--set`, `output_dir` and `command` always are relative to the latter. The\n"
    "configuration that a run keeps has them absolute.\n\n"
    "```sh\n"
    "leeway config --example\n"
    "leeway config --example --set trainer.learning_rate=3e-4 --set orchestrator.group_size=16\n"
    "```\n\n"
    "`leeway config FILE` prints every value that has an effect and, in a comment, its origin:\n"
    "`default` for the values below, `FILE line N`, or `--set`. What it prints is itself a\n"
    "configuration with the same values. Keys without effect are left out: those of a model's "
    "shape\n"
    "where `model.path` is given, say, and all of `[sft]` where there is no such table.\n\n"
    "`--set PATH=VALUE` replaces what the file says, the last of a key counts. PATH is the table, "
    "a\n"
    "dot and the key: `trainer.max_steps=50`, and the key alone at the top level: `seed=7`. VALUE "
    "is\n"
    "a TOML value or a bare word. Environments are numbered from 0: `environment.1.weight=2`; "
    "where\n"
    "there is only one, `environment.weight=2` will do; `environment.N.name=sort` with the next\n"
    "number adds one. Where it leaves keys of the file without effect, as another preset does to "
    "the\n"
    "keys of the one before, they are left out, and a note says which.\n\n"
    "`--unset PATH` leaves out a key or a table of the file: `--unset sft`, `--unset\n"
    "trainer.schedule`, `--unset environment.1`. It comes before `--set`, whose numbers of\n"
    "environments are those of what is left.\n";

std::string cell(std::string text) {
  for (size_t at = 0; (at = text.find('|', at)) != std::string::npos; at += 2) {
    text.replace(at, 1, "\\|");
  }
  return text;
}

std::string key_table(const Section& section) {
  const bool environment = section.path.starts_with("environment.");
  std::string out = environment ? "| key | of | type | default | values | meaning |\n"
                                  "|---|---|---|---|---|---|\n"
                                : "| key | type | default | values | meaning |\n"
                                  "|---|---|---|---|---|\n";
  for (const Field& field : section.fields) {
    const std::string owners =
        field.owners.empty() ? "all" : fmt::format("{}", fmt::join(field.owners, ", "));
    out += fmt::format("| `{}` |{} {} | `{}` | {} | {} |\n", field.key,
                       environment ? fmt::format(" {} |", owners) : "", type_text(field),
                       cell(toml_text(field)), cell(values_text(field)), cell(field.meaning));
  }
  return out;
}

std::string loss_part(const Catalog& catalog, const Config& defaults) {
  std::vector<std::string> presets, corrections;
  for (const PresetInfo& preset : catalog.presets()) presets.push_back("`" + preset.name + "`");
  for (const CorrectionInfo& correction : catalog.corrections()) {
    corrections.push_back("`+" + correction.name + "`");
  }
  return fmt::format(
      "`preset` is text, by default `\"{}\"`: a base, with up to two corrections, or another code\n"
      "base's loss. [losses](losses.md) has all of them with their keys, defaults and meanings.\n\n"
      "Bases: {}.\n\nCorrections: {}.\n",
      defaults.preset, fmt::join(presets, ", "), fmt::join(corrections, ", "));
}

}  // namespace

std::string configuration_markdown(const Catalog& catalog) {
  Config defaults;
  EnvironmentTable environment;
  std::string out = kOpening;
  auto add = [&](const std::string& title, const Section& section) {
    out += fmt::format("\n## {}\n\n{}\n\n{}", title, section.about,
                       section.open ? loss_part(catalog, defaults) : key_table(section));
  };
  for (const Section& section : describe(defaults.run, defaults.renderer)) {
    add(section.path.empty() ? "Top level" : "[" + section.path + "]", section);
  }
  add("[[environment]]", describe(environment, 0));
  return out;
}

}  // namespace leeway
