// The reference page, generated from the description that the reader and the dump use.

#include <fmt/format.h>

#include "config/config.h"
#include "config/fields.h"
#include "config/given.h"

namespace leeway {
namespace {

constexpr const char* kOpening =
    "# Configuration\n\n"
    "This page is printed by `leeway config --reference`; a test compares it.\n\n"
    "One TOML file describes a run. All keys are optional unless marked as required; an empty\n"
    "file has all the defaults below. Keys and values that are unknown, of the wrong type, out "
    "of\n"
    "range, contradictory or without effect are refused with file, line, key, value and remedy, "
    "all\n"
    "of them at once. An integer is accepted where a number is expected, but not the reverse.\n"
    "Numbers must be finite.\n\n"
    "That is what `leeway config` checks. `leeway train` begins with what needs more than the\n"
    "file, and stops at the first problem: that models, tokenizer and data are there and can be\n"
    "read, that memory is enough, that environments' programs and servers answer, and that\n"
    "rollouts can be trained on (an `[[environment]]`, a token that ends a reply, no `top_p`).\n"
    "`leeway train FILE --dry-run` does this, prints what the run would do and writes nothing.\n\n"
    "Input paths (`data`, `eval_data`, `path`, `tokenizer`, `reference`, `teacher`) are relative "
    "to\n"
    "the configuration file if they exist there, otherwise to the working directory; those of\n"
    "`--set`, `output_dir` and `command` are always relative to the working directory. The\n"
    "configuration stored with a run contains absolute paths.\n\n"
    "```sh\n"
    "leeway config --example\n"
    "leeway config --example --set trainer.learning_rate=3e-4 --set orchestrator.group_size=16\n"
    "```\n\n"
    "`leeway config FILE` prints every value that has an effect and, in a comment, its origin:\n"
    "`default` for the values below, `FILE line N`, or `--set`. The output is\n"
    "itself a configuration with the same values. Keys without effect are omitted: for example "
    "the\n"
    "keys of a model's shape if `model.path` is set, and all of `[sft]` without that table.\n\n"
    "`--set PATH=VALUE` overrides the file; the last one for a key wins. PATH is the table, a "
    "dot\n"
    "and the key (`trainer.max_steps=50`), or only the key at the top level (`seed=7`). VALUE is "
    "a\n"
    "TOML value or a bare word. Environments are numbered from 0 (`environment.1.weight=2`); if "
    "there\n"
    "is only one, `environment.weight=2` is enough; `environment.N.name=sort` with the next "
    "number\n"
    "adds one. If `--set` leaves keys of the file without effect, as another preset does to the "
    "keys\n"
    "of the previous one, they are dropped, and a note says which. Of a file that has every key\n"
    "of its preset, as a run's `config.toml`, so are those that have its defaults, if another\n"
    "preset on the command line has others.\n\n"
    "`--unset PATH` removes a key or a table of the file: `--unset sft`, `--unset\n"
    "trainer.schedule`, `--unset environment.1`. It applies before `--set`, which numbers the\n"
    "remaining environments.\n";

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
      "Bases: {}.\n\nCorrections: {}.\n\n"
      "`plugin` is the path of a library with presets and corrections of one's own\n"
      "([extending](extending.md#a-correction-of-your-own)); they and their keys are then known "
      "here as\nbuilt-in ones are.\n",
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
