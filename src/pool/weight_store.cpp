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

WeightFolders::WeightFolders(std::string folder, Share share) : share_(std::move(share)) {
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
  PublishedWeights published{.version = version};
  if (share_) {
    try {
      if (weights->device() != nullptr) published.shared = share_(*weights);
      published.checksum = weights->checksum();
      kept_[version] = weights;
      return published;
    } catch (const Error& error) {
      share_ = {};
      log_.push_back(fmt::format("servers take weights from files, not from the GPU's memory: {}",
                                 error.what()));
    }
  }
  published.folder = write_folder(*weights);
  published.checksum = weights->checksum();
  return published;
}

void WeightFolders::write(PublishedWeights& published) {
  if (!published.folder.empty()) return;
  const auto weights = kept_.find(published.version);
  LEEWAY_CHECK(weights != kept_.end(), "weights that were published");
  published.folder = write_folder(*weights->second);
}

std::string WeightFolders::write_folder(const PolicySnapshot& weights) {
  const PolicyVersion version = weights.version();
  const std::string to = path_of(version), temporary = to + ".partial";
  if (there_.contains(version)) return to;
  const Parameters& host = weights.host();
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
  return to;
}

void WeightFolders::keep_only(const std::set<PolicyVersion>& versions) {
  std::erase_if(kept_, [&](const auto& each) { return !versions.contains(each.first); });
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
