// Values as a file or the command line gives them, each with its place, before they are
// interpreted.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <variant>
#include <vector>

#include "config/config.h"
#include "config/fields.h"

namespace leeway {

// Integers stay integers: some keys accept nothing else. Lists are lists of text.
using Scalar = std::variant<bool, int64_t, double, std::string, std::vector<std::string>>;

struct Given {
  std::string path;  // table with a dot: "trainer.", "environment.0.", "" at the top level
  std::string key;
  Scalar value;
  std::string place;   // "run.toml line 3" or "--set"
  uint64_t order = 0;  // of problems: file order, then command-line order

  bool in_file() const { return place != "--set"; }
  std::string name() const { return path + key; }
  // The prefix of a key in messages, as in Setting::where.
  std::string where() const { return place + (in_file() ? ": " : " ") + path; }
};

// Throws Error "PLACE: NAME = VALUE: problem".
[[noreturn]] void refuse(const Given& given, const std::string& problem);

// What is known, for suggestions: all tables, one [[environment]] and the keys of native losses.
struct Known {
  std::vector<Section> sections;
  Section environment;
  std::vector<std::string> loss_keys;

  const Section* find(const std::string& path) const;
};

// Everything that a file and --set give, in order; the last value of a key wins.
class Document {
 public:
  std::vector<std::string> tables;  // paths that are present
  // The places of [[environment]] tables, and their sort keys for problems.
  std::vector<std::pair<std::string, uint64_t>> environments;
  std::vector<std::string> unset;  // names that --unset removed from the file

  const std::vector<Given>& values() const { return values_; }
  void add(Given given);
  // Removes every value with one of these full names.
  void remove(const std::set<std::string>& names);

  bool has_table(const std::string& path) const;
  // The last value of a full name, or nullptr.
  const Given* find(const std::string& name) const;
  // The command-line option for a key, or for any key of a table if the name ends with a dot:
  // "--set NAME = VALUE" or "--unset NAME"; empty if there is none.
  std::string command_line(const std::string& name) const;

 private:
  std::vector<Given> values_;
  std::unordered_map<std::string, size_t> last_;  // by name
};

// Of a loss, which has no lists: they become text.
Value to_value(const Scalar& scalar);
std::string scalar_text(const Scalar& scalar);     // TOML
std::string toml_string(const std::string& text);  // quoted and escaped

}  // namespace leeway
