// A state that ranks save together, each its part, while training goes on. On an order that all get
// at once, ranks copy what they have of weights and moments and complete tensors that two of them
// share; then a thread of each writes them when rank 0 names the folder, or drops them. Ranks that
// do not see the folder, because it is on another host's disk, give their tensors to rank 0 to
// write, one after another.
//
// Beside its shard a rank needs memory for the copy: of its shard, and of at most one parameter
// more.
#pragma once

#include <array>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/checked_files.h"
#include "model/safetensors.h"
#include "ranks/ranks.h"
#include "trainer/state_shard.h"

namespace leeway {

// The parameters that `rank` saves: those that it has the most numbers of, of several the first
// rank.
std::vector<size_t> saved_by(const StateShard& shard, int rank, int ranks);

// A whole tensor.
struct TensorOfState {
  StateKind kind = StateKind::weight;
  std::string parameter;
  std::string name;  // in its file
  std::vector<int64_t> shape;
  std::vector<float> values;
};

// Each rank writes a file of weights and one of moments.
inline constexpr size_t kStateFiles = 2;
using StateFiles = std::array<std::vector<TensorOfState>, kStateFiles>;  // as they lie in the files

// What this rank saves, whole. On all ranks at once.
StateFiles complete_state(Ranks& ranks, const StateShard& shard);

// Rank 0's side of one save. Must not outlive `ranks`.
class StateSave {
 public:
  // On all ranks at once. `steps` of the optimizer.
  StateSave(Ranks& ranks, const StateShard& shard, int64_t steps);
  // Drops what was not written.
  ~StateSave();
  StateSave(const StateSave&) = delete;
  StateSave& operator=(const StateSave&) = delete;

  // From any thread, once: writes all files of state_files.h. Throws Error, naming the rank whose
  // part could not be written, and Lost.
  FileSums write(const std::string& folder);

 private:
  using Plan = std::vector<TensorPlan>;
  struct Parts;  // of a save that is being written

  void write_parts(const std::string& where, Parts& parts);
  void take_part(int rank, size_t file, const std::string& path, Parts& parts);
  const LoraSettings* lora() const { return lora_ ? &*lora_ : nullptr; }

  Ranks& ranks_;
  const ModelConfig config_;
  const std::optional<LoraSettings> lora_;
  const int64_t steps_;
  std::vector<std::array<Plan, kStateFiles>> plans_;  // by rank
  StateFiles own_;
  bool told_ = false;  // the other ranks, where to write
};

// The side of another rank.
class StateWriter {
 public:
  explicit StateWriter(Ranks& ranks) : ranks_(ranks) {}
  // Waits for a save that is still being written, unless rank 0 is lost.
  ~StateWriter() { wait(); }
  StateWriter(const StateWriter&) = delete;
  StateWriter& operator=(const StateWriter&) = delete;

  // While rank 0 makes a StateSave: copies, and begins to wait for its folder.
  void begin(const StateShard& shard);

 private:
  void wait();
  void serve(const std::array<std::string, kStateFiles>& names, StateFiles own);

  Ranks& ranks_;
  std::thread thread_;
};

}  // namespace leeway
