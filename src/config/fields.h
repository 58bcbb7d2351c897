// The description of a run's configuration: every table, and of every key its binding to a struct,
// its allowed values and its meaning. Reading, the dump and the reference page go through it, so
// that a key exists in all three or in none.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "config/config.h"

namespace leeway {

// Ends are allowed values unless they are open.
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

// One key. `target` is where its value lives; it must outlive the field.
struct Field {
  // An optional integer is "unlimited" for none.
  using Target = std::variant<bool*, int64_t*, double*, std::string*, std::optional<int64_t>*,
                              AutoNumber*, EnumTarget>;

  std::string key;
  Target target;
  std::string meaning;               // one sentence
  Range range;                       // of numbers
  std::vector<std::string> choices;  // of text, none: any; of an enum, the names of its values
  bool may_be_empty = true;          // text
  std::vector<std::string> owners;   // [[environment]]: names that have the key; none: all
  // Why the key has no effect beside the values that the others have now, with the remedy. Such a
  // key is refused where it is given and left out of the dump. Empty: it has one.
  std::string inert;
  std::string inert_by;     // full name of the key that decides it
  bool input_path = false;  // text: a file or folder that is read
  std::string no_path;      // with input_path: the one word that is none
};

struct Section {
  std::string path;   // "trainer", "" for the top level, "environment.0"
  std::string about;  // a paragraph for the reference page
  std::vector<Field> fields;
  bool open = false;      // [trainer.loss]: its keys depend on the preset and are checked by it
  bool present = true;    // false: the dump leaves the table out
  bool* given = nullptr;  // set where the file or --set has the table

  std::string prefix() const { return path.empty() ? "" : path + "."; }
  const Field* find(const std::string& key) const;
};

// All tables but [[environment]], in the order of the dump, bound to the arguments.
std::vector<Section> describe(RunConfig& run, RendererConfig& renderer);
// [[environment]] number `number`, counted from 0.
Section describe(EnvironmentTable& table, size_t number);

std::string type_text(const Field& field);    // "integer", "number", "text", "true or false"
std::string values_text(const Field& field);  // "1 to 4096", "one of a, b"; "" if any will do
// "must be an integer, 1 to 4096": what a refusal says.
std::string demand(const Field& field);
// The value as TOML that reads back to the same.
std::string toml_text(const Field& field);

}  // namespace leeway
