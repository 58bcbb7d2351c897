// The weights that servers load: one folder per version, in Hugging Face layout and float32, so
// that every bit arrives. Where servers can copy them from the memory of the GPU they are on, the
// folder is written only when a server needs it.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "model/shared_weights.h"

namespace leeway {

// A version that servers can load.
struct PublishedWeights {
  PolicyVersion version = -1;
  std::string folder;  // absolute; empty: not written
  uint32_t checksum = 0;
  std::optional<SharedWeights> shared;  // absent: in no memory that others can copy from
};

// Used by one thread.
class WeightStore {
 public:
  virtual ~WeightStore() = default;
  // In shared memory, or as a folder. Throws Error, for a full disk most often.
  virtual PublishedWeights publish(const std::shared_ptr<const PolicySnapshot>& weights,
                                   PolicyVersion version) = 0;
  // Writes the folder of published weights that have none. Throws Error.
  virtual void write(PublishedWeights& published) = 0;
  // Removes the folders of all versions but these, and gives their memory back.
  virtual void keep_only(const std::set<PolicyVersion>& versions) = 0;
  // What to tell of since the last call.
  virtual std::vector<std::string> take_log() { return {}; }
};

// FOLDER/step_N with the model's files and checksum.json
// ({"files": {NAME: {"bytes", "crc32c"}}, "version": N}). A folder appears whole or not at all.
class WeightFolders : public WeightStore {
 public:
  using Share = std::function<SharedWeights(const PolicySnapshot&)>;
  // What an earlier process left in `folder` is removed. `share`: as WeightSharing's; may be empty.
  // Without it folders are written at once. With it, when a server needs one, those of weights on
  // the host too; snapshots live until `keep_only` leaves their version out.
  explicit WeightFolders(std::string folder, Share share = {});
  // Removes what it has written.
  ~WeightFolders() override;
  PublishedWeights publish(const std::shared_ptr<const PolicySnapshot>& weights,
                           PolicyVersion version) override;
  void write(PublishedWeights& published) override;
  void keep_only(const std::set<PolicyVersion>& versions) override;
  std::vector<std::string> take_log() override { return std::exchange(log_, {}); }
  const std::string& folder() const { return folder_; }  // absolute

 private:
  std::string path_of(PolicyVersion version) const;
  std::string write_folder(const PolicySnapshot& weights);

  std::string folder_;
  Share share_;  // emptied when it fails
  std::set<PolicyVersion> there_;
  std::map<PolicyVersion, std::shared_ptr<const PolicySnapshot>>
      kept_;  // without a folder, or shared
  std::vector<std::string> log_;
};

}  // namespace leeway
