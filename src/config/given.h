// Values as a file or the command line gives them, each with its place, before anything is made
// of them.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "config/config.h"
#include "config/fields.h"

namespace leeway {

// Integers stay integers: some keys take no others.
using Scalar = std::variant<bool, int64_t, double, std::string>;

struct Given {
  std::string path;  // table with a dot: "trainer.", "environment.0.", "" at the top level
  std::string key;
  Scalar value;
  std::string place;  // "run.toml line 3" or "--set"

  std::string name() const { return path + key; }
  // What Setting::where holds: the words before the key.
  std::string where() const { return place + (place == "--set" ? " " : ": ") + path; }
};

// Throws Error "PLACE: NAME = VALUE: problem".
[[noreturn]] void refuse(const Given& given, const std::string& problem);

// What is known, for hints: all tables, one [[environment]] and the keys of native losses.
struct Known {
  std::vector<Section> sections;
  Section environment;
  std::vector<std::string> loss_keys;

  const Section* find(const std::string& path) const;
};

// Everything that a file and --set say, in their order; the last of a key counts.
struct Document {
  std::vector<Given> values;
  std::vector<std::string> tables;        // paths that are there
  std::vector<std::string> environments;  // the places of [[environment]] tables

  bool has_table(const std::string& path) const;
  // The last value of a full name, or nullptr.
  const Given* find(const std::string& name) const;
};

// Reads TOML. With loss_only, nothing but [trainer.loss] is looked at. Throws Error for what is no
// TOML, a table or key that is not known, and a table or list where a value belongs.
Document read_document(const Known& known, const std::string& name, std::string_view text,
                       ConfigScope scope);
// Adds one --set. With loss_only, a key without a path is one of the loss. Throws Error.
void add_assignment(const Known& known, const std::string& assignment, ConfigScope scope,
                    Document& document);

Value to_value(const Scalar& scalar);
std::string scalar_text(const Scalar& scalar);     // TOML
std::string toml_string(const std::string& text);  // quoted and escaped

}  // namespace leeway
