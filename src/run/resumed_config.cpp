#include "run/resumed_config.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "base/files.h"
#include "leeway/error.h"
#include "run/run_identity.h"

namespace leeway {
namespace {

// Throws Error with the keys in which a configuration differs from that of the run it resumes.
// Files known to `identity` are compared by content, not by name.
void refuse_changes(const std::string& folder, const Config& saved, const Config& now,
                    const std::optional<RunIdentity>& identity) {
  std::map<std::string, std::pair<std::string, std::string>> values;  // before, now
  for (const EffectiveValue& value : saved.effective) values[value.key].first = value.value;
  for (const EffectiveValue& value : now.effective) values[value.key].second = value.value;
  std::map<std::string, DataSum> sums;
  if (identity) sums = data_sums(now);
  std::vector<std::string> changed;
  for (const auto& [key, pair] : values) {
    if (pair.first == pair.second || may_change_on_resume(key)) continue;
    if (identity && sums.contains(key) && identity->data.contains(key)) continue;
    changed.push_back(fmt::format("{}: {} in the run, {} now", key,
                                  pair.first.empty() ? "absent" : pair.first,
                                  pair.second.empty() ? "absent" : pair.second));
  }
  if (!changed.empty()) {
    throw Error(
        fmt::format("--resume {}: the configuration differs from the run's:\n  {}\nA run continues "
                    "with its own settings; "
                    "for other settings start a new one from its weights: leeway train --from {}",
                    folder, fmt::join(changed, "\n  "), folder));
  }
  if (identity) refuse_other_data(folder, *identity, sums);
}

}  // namespace

ResumedConfig resumed_config(const Catalog& catalog, const std::string& folder,
                             const std::string& file, const std::vector<std::string>& sets,
                             const std::vector<std::string>& unsets) {
  const std::string saved_name = folder + "/config.toml";
  if (!is_present(saved_name)) {
    throw Error(
        fmt::format("--resume {}: there is no {}; name the folder of a run", folder, saved_name));
  }
  const std::string saved_text = read_file(saved_name);
  const Config saved = parse_config(catalog, saved_name, saved_text, {}, ConfigScope::whole);
  const std::string name = file.empty() ? saved_name : file;
  Config now = parse_config(catalog, name, file.empty() ? saved_text : read_file(name), sets,
                            ConfigScope::whole, unsets);
  const auto identity = read_identity(folder);
  if (identity) {
    const auto& hashes = identity->config_hashes;
    if (std::find(hashes.begin(), hashes.end(), configuration_hash(saved, true)) == hashes.end()) {
      throw Error(
          fmt::format("--resume {}: {} was changed since the run wrote it: a key that must not "
                      "change has another value; "
                      "put it back, or start a new run: leeway train --from {}",
                      folder, saved_name, folder));
    }
  }
  refuse_changes(folder, saved, now, identity);
  return {std::move(now), saved.run.trainer.max_steps, saved.run.sft.max_steps};
}

}  // namespace leeway
