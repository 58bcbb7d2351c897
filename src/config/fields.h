// Describes a run's configuration: every table, and for every key its binding to a struct, its
// allowed values and its meaning. The reader, the dump and the reference page all use this
// description, so that a key exists in all three or in none.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "config/config.h"

namespace leeway {

// The ends are allowed values unless they are open.
struct Range {
  double low = -std::numeric_limits<double>::infinity();
  double high = std::numeric_limits<double>::infinity();
  bool open_low = false, open_high = false;

  bool holds(double value) const;
  std::string text() const;  // "at least 0", "above 0", "0 to 1", "0 to below 1"; "" if unbounded
};

// Where a value of some enum lives; the value is known by its place in the enum.
struct EnumTarget {
  void* value;
  size_t (*get)(const void* value);
  void (*set)(void* value, size_t place);
};

// One key. `target` points to its value and must outlive the field.
struct Field {
  // An empty optional integer is written "unlimited".
  using Target = std::variant<bool*, int64_t*, double*, std::string*, std::vector<std::string>*,
                              std::optional<int64_t>*, AutoNumber*, EnumTarget>;

  std::string key;
  Target target;
  std::string meaning;               // one sentence
  Range range;                       // for numbers
  std::vector<std::string> choices;  // of text, none: any; of an enum, the names of its values
  std::string if_true;               // of an enum: what `true` means, `false` being the first
  bool may_be_empty = true;          // for text
  std::vector<std::string> owners;   // [[environment]]: names that have the key; empty: all
  // Why the key has no effect given the current values of the others, with the remedy. Such a key
  // is refused if given and omitted from the dump. Empty if it has an effect.
  std::string inert;
  std::string inert_by;               // full name of the key that decides it
  bool input_path = false;            // for text: a file or folder that is read
  std::vector<std::string> no_paths;  // with input_path: values that are not paths
  // Full name of a key that may say the same in other words; the dump shows this one.
  std::string synonym;
  bool in_dump = true;  // false: other keys of the dump say the same
};

struct Section {
  std::string path;   // "trainer", "environment.0", or "" for the top level
  std::string about;  // a paragraph for the reference page
  std::vector<Field> fields;
  bool open = false;      // [trainer.loss]: its keys depend on the preset, which checks them
  bool present = true;    // false: the dump omits the table
  bool* given = nullptr;  // set to true if the file or --set has the table

  std::string prefix() const { return path.empty() ? "" : path + "."; }
  const Field* find(const std::string& key) const;
};

// All tables except [[environment]], in the order of the dump, bound to the arguments.
std::vector<Section> describe(RunConfig& run, RendererConfig& renderer);
// [[environment]] number `number`, counted from 0.
Section describe(EnvironmentTable& table, size_t number);

// "integer", "number", "text", "list of text", "true or false"
std::string type_text(const Field& field);
std::string values_text(const Field& field);  // "1 to 4096", "one of a, b"; "" if unrestricted
// "must be an integer, 1 to 4096", for error messages.
std::string demand(const Field& field);
// The value as TOML that parses back to the same value.
std::string toml_text(const Field& field);

}  // namespace leeway
