// The weights that servers load: one folder per version, in Hugging Face layout and float32, so
// that every bit arrives.
#pragma once

#include <cstdint>
#include <memory>
#include <set>
#include <string>

#include "model/policy_snapshot.h"

namespace leeway {

// A version that servers can load.
struct PublishedWeights {
  PolicyVersion version = -1;
  std::string folder;  // absolute
  uint32_t checksum = 0;
};

// Used by one thread.
class WeightStore {
 public:
  virtual ~WeightStore() = default;
  // Throws Error, for a full disk most often.
  virtual PublishedWeights publish(const std::shared_ptr<const PolicySnapshot>& weights,
                                   PolicyVersion version) = 0;
  // Removes the folders of all versions but these.
  virtual void keep_only(const std::set<PolicyVersion>& versions) = 0;
};

// FOLDER/step_N with the model's files and checksum.json
// ({"files": {NAME: {"bytes", "crc32c"}}, "version": N}). A folder appears whole or not at all.
class WeightFolders : public WeightStore {
 public:
  // What an earlier process left in `folder` is removed.
  explicit WeightFolders(std::string folder);
  // Removes what it has written.
  ~WeightFolders() override;
  PublishedWeights publish(const std::shared_ptr<const PolicySnapshot>& weights,
                           PolicyVersion version) override;
  void keep_only(const std::set<PolicyVersion>& versions) override;
  const std::string& folder() const { return folder_; }  // absolute

 private:
  std::string path_of(PolicyVersion version) const;

  std::string folder_;
  std::set<PolicyVersion> there_;
};

}  // namespace leeway
