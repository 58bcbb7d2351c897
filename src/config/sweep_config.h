// A sweep: one run configuration, varied by rows of tables and repeated over seeds. This reads the
// file and checks the configuration of every run; it does not run them.
//
//   base = "base.toml"            # a run configuration, relative to this file
//   output_dir = "runs/off_policy"
//   seeds = [1, 2, 3]
//   keep_weights = false          # optional: true
//   [[table]]
//   name = "reuse"
//   title = "Each batch used eight times"      # optional: the name
//   set = ["trainer.epochs=8"]                 # optional; for all its rows, as for --set
//   [[table.row]]
//   name = "icepop"
//   title = "icepop [0.2, 5]"
//   set = ["trainer.loss.preset=icepop"]       # after the table's: the last value of a key wins
//
// Names consist of letters, digits, _ and -, since folders are named after them.
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
  std::vector<SweepRow> rows;  // at least one; names are unique within the table
};

struct SweepConfig {
  std::string base;        // as the file gives it
  std::string output_dir;  // relative to the working directory, like a run's
  std::vector<int64_t> seeds;
  // If false, weights and checkpoints of a run are removed when it has finished: its metrics and
  // evaluations are what a sweep is read for, and those of a large model are gigabytes a run.
  bool keep_weights = true;
  std::vector<SweepTable> tables;  // at least one; names are unique
};

// `text` is the file's content, `name` its name in messages. Throws ConfigError with file, line,
// key and remedy for every problem: an unknown or missing key, a value of the wrong type, an
// invalid or repeated name, and a `set` of seed or output_dir, which the sweep sets for each run.
// Throws Error if the file is not valid TOML.
SweepConfig parse_sweep(const std::string& name, std::string_view text);

// The assignments of one run in order: the table's, the row's, the seed.
std::vector<std::string> sweep_sets(const SweepTable& table, const SweepRow& row, int64_t seed);

// The configuration that `leeway train BASE --set ..` would see. Throws ConfigError that names the
// place, table and row before what is wrong with the row.
Config sweep_run_config(const Catalog& catalog, const SweepTable& table, const SweepRow& row,
                        int64_t seed, const std::string& base_name, std::string_view base_text);

// The problems of a sweep's runs, each reported once: runs share their base, and seeds share their
// row.
class SweepProblems {
 public:
  void add(const ConfigError& error);
  // Throws ConfigError with all of them.
  void throw_if_any() const;

 private:
  std::vector<std::string> problems_;
};

}  // namespace leeway
