// Moments that ranks save together, each its part, while training goes on. On an order that all get
// at once, ranks copy what they have and complete tensors that two of them share; then a thread of
// each writes them when rank 0 names the folder, or drops them. Ranks that do not see the folder,
// because it is on another host's disk, give their tensors to rank 0 to write, one after another.
//
// Beside its shard a rank needs memory for the copy: of its shard, and of at most one tensor more.
#pragma once

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/checked_files.h"
#include "ranks/ranks.h"
#include "trainer/moment_shard.h"
#include "trainer/saved_moments.h"

namespace leeway {

// The parameters whose moments `rank` saves: those that it has the most numbers of, of several the
// first rank.
std::vector<size_t> saved_by(const MomentShard& shard, int rank, int ranks);

// Whole moments of the parameters that this rank saves. On all ranks at once.
std::vector<MomentsOfParameter> complete_moments(Ranks& ranks, const MomentShard& shard);

// Rank 0's side of one save. Must not outlive `ranks`.
class MomentSave {
 public:
  // On all ranks at once.
  MomentSave(Ranks& ranks, const MomentShard& shard);
  // Drops what was not written.
  ~MomentSave();
  MomentSave(const MomentSave&) = delete;
  MomentSave& operator=(const MomentSave&) = delete;

  // From any thread, once: writes the parts and their index. Throws Error, naming the rank whose
  // part could not be written, and Lost.
  FileSums write(const std::string& folder);

 private:
  Ranks& ranks_;
  const std::vector<ParameterInfo> table_;
  std::vector<std::vector<size_t>> saved_;  // by rank
  std::vector<MomentsOfParameter> own_;
  bool written_ = false;
};

// The side of another rank.
class MomentWriter {
 public:
  explicit MomentWriter(Ranks& ranks) : ranks_(ranks) {}
  // Waits for a save that is still being written, unless rank 0 is lost.
  ~MomentWriter() { wait(); }
  MomentWriter(const MomentWriter&) = delete;
  MomentWriter& operator=(const MomentWriter&) = delete;

  // While rank 0 makes a MomentSave: copies, and begins to wait for its folder.
  void begin(const MomentShard& shard);

 private:
  void wait();
  void serve(const std::vector<ParameterInfo>& table, std::vector<MomentsOfParameter> own);

  Ranks& ranks_;
  std::thread thread_;
};

}  // namespace leeway
