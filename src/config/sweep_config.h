// A sweep: one run configuration, varied by rows of tables and repeated over seeds. This reads the
// file and checks every run it asks for; running them is not done here.
//
//   base = "base.toml"            # a run configuration, relative to this file
//   output_dir = "runs/off_policy"
//   seeds = [1, 2, 3]
//   [[table]]
//   name = "reuse"
//   title = "Each batch used eight times"      # optional: the name
//   set = ["trainer.epochs=8"]                 # optional; of all its rows, as --set takes them
//   [[table.row]]
//   name = "icepop"
//   title = "icepop [0.2, 5]"
//   set = ["trainer.loss.preset=icepop"]       # after the table's: the last of a key counts
//
// Names hold letters, digits, _ and -, since they name folders too.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "config/config.h"

namespace leeway {

struct SweepRow {
  std::string name, title;
  std::vector<std::string> sets;
  std::string place;  // "sweep.toml line 12"
};

struct SweepTable {
  std::string name, title;
  std::vector<std::string> sets;
  std::vector<SweepRow> rows;  // at least one; names are unique in the table
};

struct SweepConfig {
  std::string base;        // as the file gives it
  std::string output_dir;  // relative to the working directory, as that of a run
  std::vector<int64_t> seeds;
  std::vector<SweepTable> tables;  // at least one; names are unique
};

// `text` is the file's content, `name` what messages call it. Throws ConfigError with file, line,
// key and remedy of everything that is wrong: an unknown or missing key, a value of another type, a
// name that is no name or comes twice, and a `set` of seed or output_dir, which each run gets from
// the sweep; Error for what is no TOML.
SweepConfig parse_sweep(const std::string& name, std::string_view text);

// The assignments of one run in their order: the table's, the row's, the seed.
std::vector<std::string> sweep_sets(const SweepTable& table, const SweepRow& row, int64_t seed);

// The configuration that `leeway train BASE --set ..` would see. Throws ConfigError that names the
// row's place, table and row before what is wrong with the row.
Config sweep_run_config(const Catalog& catalog, const SweepTable& table, const SweepRow& row,
                        int64_t seed, const std::string& base_name, std::string_view base_text);

// What is wrong with the runs of a sweep, once each: runs share their base, and seeds their row.
class SweepProblems {
 public:
  void add(const ConfigError& error);
  // Throws ConfigError with all of them.
  void throw_if_any() const;

 private:
  std::vector<std::string> problems_;
};

}  // namespace leeway
