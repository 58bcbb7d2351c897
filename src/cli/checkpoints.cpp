#include "cli/checkpoints.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <filesystem>

#include "base/crc32c.h"
#include "base/files.h"
#include "base/json.h"
#include "leeway/error.h"

namespace leeway {
namespace {

namespace fs = std::filesystem;

constexpr const char* kManifest = "manifest.json";
constexpr std::string_view kPrefix = "step_";
constexpr std::string_view kWriting = ".writing_";

void sync_path(const std::string& path) {
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) return;
  ::fsync(file);
  ::close(file);
}

std::string manifest_of(int64_t step, const std::string& folder) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) {
    names.push_back(entry.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  JsonWriter json;
  json.begin_object().key("format").value(1.0).key("step").value(static_cast<double>(step));
  json.key("files").begin_object();
  for (const std::string& name : names) {
    const std::string content = read_file(folder + "/" + name);
    json.key(name).begin_object();
    json.key("bytes").value(static_cast<double>(content.size()));
    json.key("crc32c").value(static_cast<double>(crc32c(content))).end_object();
  }
  return json.end_object().end_object().text() + "\n";
}

// Throws Error saying what is wrong with a checkpoint.
void verify(const Checkpoint& checkpoint) {
  const std::string name = checkpoint.folder + "/" + kManifest;
  const auto manifest = parse_json(name, read_file(name));
  const auto number = [&](const rapidjson::Value& object, const char* key) {
    if (!object.IsObject() || !object.HasMember(key) || !object[key].IsNumber()) {
      throw Error(fmt::format("{}: \"{}\" is missing", name, key));
    }
    return object[key].GetDouble();
  };
  if (number(manifest, "format") != 1.0) throw Error(name + ": is of another format");
  if (number(manifest, "step") != static_cast<double>(checkpoint.step)) {
    throw Error(name + ": is of another step");
  }
  if (!manifest.HasMember("files") || !manifest["files"].IsObject()) {
    throw Error(name + ": lists no files");
  }
  for (const auto& file : manifest["files"].GetObject()) {
    const std::string path = checkpoint.folder + "/" + file.name.GetString();
    const std::string content = read_file(path);
    if (static_cast<double>(content.size()) != number(file.value, "bytes")) {
      throw Error(fmt::format("{}: has {} bytes, the manifest says {}", path, content.size(),
                              number(file.value, "bytes")));
    }
    if (static_cast<double>(crc32c(content)) != number(file.value, "crc32c")) {
      throw Error(path + ": is damaged: its checksum is not the manifest's");
    }
  }
}

}  // namespace

CheckpointStore::CheckpointStore(const std::string& run_folder, const CheckpointTable& table)
    : folder_(run_folder + "/checkpoints"), table_(table) {}

bool CheckpointStore::wanted(int64_t step) const {
  return table_.every > 0 && step % table_.every == 0;
}

void CheckpointStore::save(int64_t step,
                           const std::function<void(const std::string& folder)>& fill) const {
  const std::string name = fmt::format("{}/{}{}", folder_, kPrefix, step);
  const std::string temporary = fmt::format("{}/{}{}", folder_, kWriting, ::getpid());
  remove_half_written();
  try {
    fs::create_directories(temporary);
    fill(temporary);
    write_file_atomically(temporary + "/" + kManifest, manifest_of(step, temporary));
    sync_path(temporary);
    // A folder of an earlier life of the run, from which it was resumed before this step.
    fs::remove_all(name);
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
  remove_others(step);
}

void CheckpointStore::remove_half_written() const {
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
    if (!name.starts_with(kPrefix)) continue;
    int64_t step = -1;
    const char* end = name.data() + name.size();
    const auto parsed = std::from_chars(name.data() + kPrefix.size(), end, step);
    if (parsed.ec != std::errc() || parsed.ptr != end || step < 0) continue;
    found.push_back({step, entry.path().string()});
  }
  std::sort(found.begin(), found.end(),
            [](const Checkpoint& a, const Checkpoint& b) { return a.step < b.step; });
  return found;
}

void CheckpointStore::remove_others(int64_t newest) const {
  std::vector<Checkpoint> found = all();
  // Checkpoints of later steps are damaged ones that the run was not resumed from. Counted among
  // the last, they would push out the new one.
  for (; !found.empty() && found.back().step > newest; found.pop_back()) {
    std::error_code ignored;
    fs::remove_all(found.back().folder, ignored);
  }
  const auto keep = static_cast<size_t>(table_.keep_last);
  for (size_t i = 0; i + keep < found.size(); ++i) {
    if (table_.keep_every > 0 && found[i].step % table_.keep_every == 0) continue;
    std::error_code ignored;
    fs::remove_all(found[i].folder, ignored);
  }
}

std::optional<Checkpoint> CheckpointStore::newest(std::vector<std::string>& notes) const {
  std::vector<Checkpoint> found = all();
  for (auto checkpoint = found.rbegin(); checkpoint != found.rend(); ++checkpoint) {
    try {
      verify(*checkpoint);
      return *checkpoint;
    } catch (const Error& error) {
      notes.push_back(
          fmt::format("checkpoint of step {} is passed over: {}", checkpoint->step, error.what()));
    }
  }
  return std::nullopt;
}

}  // namespace leeway
