#include <fmt/format.h>

#include <cmath>
#include <map>
#include <set>

#include "leeway/error.h"
#include "leeway/presets.h"
#include "orchestrator/environment.h"
#include "orchestrator/environment_factories.h"
#include "orchestrator/split.h"

namespace leeway {
namespace {

std::unique_ptr<Environment> make_by_name(const EnvironmentTable& table, uint64_t seed) {
  if (table.name == "sort") return make_sort_environment(table, seed);
  if (table.name == "arithmetic") return make_arithmetic_environment(table, seed);
  if (table.name == "calculator") return make_calculator_environment(table, seed);
  if (table.name == "jsonl") return make_jsonl_environment(table);
  if (table.name == "process") return make_process_environment(table);
  const std::string near =
      nearest_name(table.name, {"sort", "arithmetic", "calculator", "jsonl", "process"});
  throw Error(fmt::format(
      "no environment is called \"{}\"{}; there are: sort, arithmetic, calculator, jsonl, process",
      table.name, near.empty() ? "" : fmt::format("; did you mean {}?", near)));
}

// The tables' own ids, or their names, numbered where several tables without an id share one.
std::vector<std::string> ids_of(const std::vector<EnvironmentTable>& tables) {
  std::map<std::string, int> sharers, given_out;
  for (const EnvironmentTable& table : tables) {
    if (table.id.empty()) ++sharers[table.name];
  }
  std::vector<std::string> ids;
  for (const EnvironmentTable& table : tables) {
    if (!table.id.empty()) {
      ids.push_back(table.id);
    } else if (sharers[table.name] == 1) {
      ids.push_back(table.name);
    } else {
      ids.push_back(fmt::format("{}_{}", table.name, ++given_out[table.name]));
    }
  }
  return ids;
}

}  // namespace

std::unique_ptr<GroupScoring> Environment::score_group(const std::vector<Episode*>&) const {
  throw Error("this environment does not score groups");
}

std::unique_ptr<Environment> make_environment(const EnvironmentTable& table, uint64_t seed) {
  if (!(table.format_weight >= 0.0) || !std::isfinite(table.format_weight)) {
    throw Error(fmt::format("format_weight = {}: it must be 0 (off) or a positive number",
                            table.format_weight));
  }
  return make_by_name(table, seed);
}

EnvironmentMix make_environments(const std::vector<EnvironmentTable>& tables, uint64_t seed) {
  const std::vector<std::string> ids = ids_of(tables);
  std::set<std::string> seen;
  std::vector<EnvironmentMix::Member> members;
  for (size_t i = 0; i < tables.size(); ++i) {
    try {
      if (!seen.insert(ids[i]).second) {
        throw Error(fmt::format("the id \"{}\" is taken by another: give it an id", ids[i]));
      }
      // Two tables of one kind draw different prompts.
      members.push_back(
          {ids[i], tables[i].weight, make_environment(tables[i], mixed_seed({seed, i}))});
    } catch (const Error& error) {
      throw Error(fmt::format("environment.{} ({}): {}", i, tables[i].name, error.what()));
    }
  }
  return EnvironmentMix(std::move(members), seed);
}

}  // namespace leeway
