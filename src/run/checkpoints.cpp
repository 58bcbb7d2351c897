#include "run/checkpoints.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <filesystem>

#include "base/files.h"
#include "base/json.h"
#include "leeway/error.h"

namespace leeway {
namespace {

namespace fs = std::filesystem;

constexpr const char* kManifest = "manifest.json";
constexpr std::string_view kPrefixes[] = {"sft_", "step_"};  // by phase
constexpr std::string_view kWriting = ".writing_";

const char* name_of(Phase phase) { return phase == Phase::sft ? "sft" : "rl"; }

void sync_path(const std::string& path) {
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) return;
  ::fsync(file);
  ::close(file);
}

std::string manifest_of(Phase phase, int64_t step, const std::string& folder, FileSums sums,
                        const std::optional<RunIdentity>& identity) {
  for (const auto& entry : fs::directory_iterator(folder)) {
    const std::string name = entry.path().filename().string();
    if (!sums.contains(name)) sums[name] = sum_of_file(entry.path().string());
  }
  JsonWriter json;
  json.begin_object().key("format").value(1.0).key("step").value(static_cast<double>(step));
  json.key("phase").value(name_of(phase));
  if (identity) {
    json.key("run_id").value(identity->run_id);
    json.key("config_hash").value(static_cast<double>(identity->config_hashes.back()));
    json.key("data_hash").value(static_cast<double>(identity->data_hash()));
  }
  json.key("files");
  write_sums(json, sums);
  return json.end_object().text() + "\n";
}

// Throws Error for a checkpoint of another run. Older checkpoints do not say which run they belong
// to.
void verify_identity(const std::string& name, const rapidjson::Value& manifest,
                     const RunIdentity& identity) {
  if (!manifest.HasMember("run_id")) return;
  const auto hash = [&](const char* key) {
    return manifest.HasMember(key) && manifest[key].IsNumber() ? manifest[key].GetDouble() : -1.0;
  };
  const rapidjson::Value& id = manifest["run_id"];
  if (!id.IsString() || id.GetString() != identity.run_id) {
    throw Error(fmt::format("{}: belongs to another run, {}; this one is {}", name,
                            id.IsString() ? id.GetString() : "?", identity.run_id));
  }
  const auto is_now = [&](uint32_t known) { return hash("config_hash") == known; };
  if (std::none_of(identity.config_hashes.begin(), identity.config_hashes.end(), is_now)) {
    throw Error(name + ": was written with a different configuration");
  }
  if (hash("data_hash") != identity.data_hash()) {
    throw Error(name + ": was written by a run on different data");
  }
}

// Throws Error if there is something wrong with a checkpoint.
void verify(const Checkpoint& checkpoint, const std::optional<RunIdentity>& identity) {
  const std::string name = checkpoint.folder + "/" + kManifest;
  const auto manifest = parse_json(name, read_file(name));
  const auto number = [&](const char* key) {
    if (!manifest.IsObject() || !manifest.HasMember(key) || !manifest[key].IsNumber()) {
      throw Error(fmt::format("{}: \"{}\" is missing", name, key));
    }
    return manifest[key].GetDouble();
  };
  if (number("format") != 1.0) throw Error(name + ": has another format");
  if (number("step") != static_cast<double>(checkpoint.step)) {
    throw Error(name + ": belongs to another step");
  }
  // Older checkpoints are all from RL.
  const bool says = manifest.HasMember("phase") && manifest["phase"].IsString();
  if ((says ? manifest["phase"].GetString() : "rl") != std::string(name_of(checkpoint.phase))) {
    throw Error(name + ": belongs to another phase");
  }
  if (!manifest.HasMember("files")) throw Error(name + ": lists no files");
  if (identity) verify_identity(name, manifest, *identity);
  check_sums(checkpoint.folder, read_sums(name, manifest["files"]));
}

}  // namespace

std::string Checkpoint::name() const {
  return fmt::format("{} {}", phase == Phase::sft ? "supervised step" : "step", step);
}

void adopt_identity(const Checkpoint& checkpoint, RunIdentity& identity) {
  const std::string name = checkpoint.folder + "/" + kManifest;
  const auto manifest = parse_json(name, read_file(name));
  if (!manifest.IsObject() || !manifest.HasMember("run_id") || !manifest["run_id"].IsString() ||
      !manifest.HasMember("config_hash") || !manifest["config_hash"].IsNumber()) {
    return;
  }
  const double hash = manifest["config_hash"].GetDouble();
  if (!(hash >= 0.0 && hash <= 0xffffffffu)) return;
  identity.run_id = manifest["run_id"].GetString();
  identity.config_hashes.insert(identity.config_hashes.begin(), static_cast<uint32_t>(hash));
}

CheckpointStore::CheckpointStore(const std::string& run_folder, const CheckpointTable& table,
                                 std::optional<RunIdentity> identity)
    : folder_(run_folder + "/checkpoints"), table_(table), identity_(std::move(identity)) {}

bool CheckpointStore::wanted(int64_t step) const {
  return table_.every > 0 && step % table_.every == 0;
}

void CheckpointStore::save(Phase phase, int64_t step,
                           const std::function<FileSums(const std::string& folder)>& fill) const {
  const std::string name =
      fmt::format("{}/{}{}", folder_, kPrefixes[static_cast<size_t>(phase)], step);
  const std::string temporary = fmt::format("{}/{}{}", folder_, kWriting, ::getpid());
  remove_half_written();
  try {
    fs::create_directories(temporary);
    const FileSums sums = fill(temporary);
    write_file_atomically(temporary + "/" + kManifest,
                          manifest_of(phase, step, temporary, sums, identity_));
    sync_path(temporary);
    // The same step, written before a resume from an earlier checkpoint.
    if (!is_link()) fs::remove_all(name);
    fs::rename(temporary, name);
    sync_path(folder_);
  } catch (const fs::filesystem_error& error) {
    std::error_code ignored;
    fs::remove_all(temporary, ignored);
    throw Error(fmt::format("{}: {}", name, error.code().message()));
  } catch (const Error&) {
    std::error_code ignored;
    fs::remove_all(temporary, ignored);
    throw;
  }
  remove_others({phase, step, name});
}

bool CheckpointStore::is_link() const {
  std::error_code ignored;
  return fs::is_symlink(folder_, ignored);
}

void CheckpointStore::remove_half_written() const {
  if (is_link()) return;
  std::error_code ignored;
  std::vector<fs::path> found;
  for (const auto& entry : fs::directory_iterator(folder_, ignored)) {
    if (entry.path().filename().string().starts_with(kWriting)) found.push_back(entry.path());
  }
  for (const fs::path& path : found) fs::remove_all(path, ignored);
}

std::vector<Checkpoint> CheckpointStore::all() const {
  std::vector<Checkpoint> found;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder_, error)) {
    const std::string name = entry.path().filename().string();
    for (const Phase phase : {Phase::sft, Phase::rl}) {
      const std::string_view prefix = kPrefixes[static_cast<size_t>(phase)];
      if (!name.starts_with(prefix)) continue;
      int64_t step = -1;
      const char* end = name.data() + name.size();
      const auto parsed = std::from_chars(name.data() + prefix.size(), end, step);
      if (parsed.ec != std::errc() || parsed.ptr != end || step < 0) continue;
      found.push_back({phase, step, entry.path().string()});
    }
  }
  std::sort(found.begin(), found.end(),
            [](const Checkpoint& a, const Checkpoint& b) { return a.before(b); });
  return found;
}

void CheckpointStore::remove_others(const Checkpoint& newest) const {
  if (is_link()) return;
  std::vector<Checkpoint> found = all();
  // A later one is not part of this run. Counted among the last, it would displace the new one.
  while (!found.empty() && newest.before(found.back())) found.pop_back();
  const auto keep = static_cast<size_t>(table_.keep_last);
  for (size_t i = 0; i + keep < found.size(); ++i) {
    const bool for_good = table_.keep_every > 0 && found[i].phase == newest.phase &&
                          found[i].step % table_.keep_every == 0;
    if (for_good) continue;
    std::error_code ignored;
    fs::remove_all(found[i].folder, ignored);
  }
}

std::optional<Checkpoint> CheckpointStore::newest(
    std::vector<std::string>& notes, const std::function<void(const Checkpoint&)>& check) const {
  std::vector<Checkpoint> found = all();
  for (auto checkpoint = found.rbegin(); checkpoint != found.rend(); ++checkpoint) {
    try {
      verify(*checkpoint, identity_);
      if (check) check(*checkpoint);
      return *checkpoint;
    } catch (const Error& error) {
      notes.push_back(
          fmt::format("checkpoint of {} is skipped: {}", checkpoint->name(), error.what()));
    }
  }
  return std::nullopt;
}

}  // namespace leeway
