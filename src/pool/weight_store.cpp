#include "pool/weight_store.h"

#include <fmt/format.h>

#include <filesystem>
#include <vector>

#include "base/checked_files.h"
#include "base/files.h"
#include "base/json.h"
#include "leeway/error.h"

namespace leeway {
namespace {

namespace fs = std::filesystem;

void remove_folder(const std::string& path) {
  std::error_code ignored;  // what stays is removed with the next run
  fs::remove_all(path, ignored);
}

}  // namespace

WeightFolders::WeightFolders(std::string folder) {
  std::error_code error;
  remove_folder(folder);
  fs::create_directories(folder, error);
  if (!error) folder_ = fs::canonical(folder, error).string();
  if (error) throw Error(fmt::format("{}: cannot be made: {}", folder, error.message()));
}

WeightFolders::~WeightFolders() { remove_folder(folder_); }

std::string WeightFolders::path_of(PolicyVersion version) const {
  return fmt::format("{}/step_{}", folder_, version);
}

PublishedWeights WeightFolders::publish(const std::shared_ptr<const PolicySnapshot>& weights,
                                        PolicyVersion version) {
  LEEWAY_CHECK(weights != nullptr && weights->version() == version, "weights of this version");
  const std::string to = path_of(version), temporary = to + ".partial";
  if (there_.contains(version)) return {version, to, weights->checksum()};
  const Parameters& host = weights->host();
  refuse_full_disk(folder_, sizeof(float) * static_cast<uint64_t>(host.count()));
  remove_folder(temporary);
  const FileSums sums = save_parameters(host, temporary);
  JsonWriter json;
  json.begin_object().key("files");
  write_sums(json, sums);
  json.key("version").value(static_cast<double>(version)).end_object();
  write_file_atomically(temporary + "/checksum.json", json.text() + "\n");
  remove_folder(to);
  std::error_code error;
  fs::rename(temporary, to, error);
  if (error) throw Error(fmt::format("{}: cannot be renamed: {}", temporary, error.message()));
  there_.insert(version);
  return {version, to, weights->checksum()};
}

void WeightFolders::keep_only(const std::set<PolicyVersion>& versions) {
  std::vector<PolicyVersion> old;
  for (PolicyVersion version : there_) {
    if (!versions.contains(version)) old.push_back(version);
  }
  for (PolicyVersion version : old) {
    remove_folder(path_of(version));
    there_.erase(version);
  }
}

}  // namespace leeway
