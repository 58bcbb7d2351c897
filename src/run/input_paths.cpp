#include "run/input_paths.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>

#include "base/files.h"
#include "config/given.h"
#include "leeway/error.h"
#include "model/model_config.h"

namespace leeway {
namespace {

namespace fs = std::filesystem;

// Empty: a default, or a key that is not there.
std::string origin_of(const Config& config, const std::string& key) {
  const auto found = std::find_if(config.effective.begin(), config.effective.end(),
                                  [&](const EffectiveValue& value) { return value.key == key; });
  if (found == config.effective.end() || found->origin.starts_with("default")) return "";
  return found->origin;
}

void check_folder(const Config& config, const std::string& key, const std::string& folder) {
  if (!folder.empty()) check_model_folder(given_text(config, key, folder), folder);
}

// A path of a file is looked for in the file's folder, then in the working directory, and is the
// latter's where it is in neither.
std::string tried_text(const std::string& origin, const std::string& path) {
  std::error_code unknown;
  const size_t line = origin.rfind(" line ");
  const fs::path here = fs::current_path(unknown);
  const fs::path relative = fs::path(path).lexically_relative(here);
  if (unknown || line == std::string::npos || relative.empty() || *relative.begin() == "..") {
    return "looked for " + path;
  }
  const fs::path folder = fs::path(origin.substr(0, line)).parent_path();
  const std::string beside = fs::absolute(folder / relative, unknown).lexically_normal().string();
  if (unknown || beside == fs::path(path).lexically_normal().string()) return "looked for " + path;
  return fmt::format("looked for {} and {}", beside, path);
}

void check_file(const Config& config, const std::string& key, const std::string& path) {
  if (path.empty() || is_present(path)) return;
  throw Error(fmt::format("{}: there is no such file; {}", given_text(config, key, path),
                          tried_text(origin_of(config, key), path)));
}

}  // namespace

std::string given_text(const Config& config, const std::string& key, const std::string& value) {
  const std::string origin = origin_of(config, key);
  const char* then = origin.empty() ? "" : origin == "--set" ? " " : ": ";
  return fmt::format("{}{}{} = {}", origin, then, key, toml_string(value));
}

void check_input_paths(const Config& config) {
  const RunConfig& run = config.run;
  check_folder(config, "model.path", run.model.path);
  check_folder(config, "model.lora.path", run.model.lora.path);
  const std::string& reference = run.trainer.reference;
  if (reference != "initial" && reference != "base") {
    check_folder(config, "trainer.reference", reference);
  }
  check_folder(config, "trainer.teacher", run.trainer.teacher);
  if (run.model.tokenizer != "byte") check_file(config, "model.tokenizer", run.model.tokenizer);
  if (run.sft.enabled) check_file(config, "sft.data", run.sft.data);
  for (size_t i = 0; i < run.environments.size(); ++i) {
    const std::string table = fmt::format("environment.{}.", i);
    check_file(config, table + "data", run.environments[i].data);
    check_file(config, table + "eval_data", run.environments[i].eval_data);
  }
}

}  // namespace leeway
