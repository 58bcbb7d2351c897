// The part of a trainer's state that one rank has: numbers of the weights and of the optimizer's
// moments. Each number is on one rank as far as saving is concerned: ranks save and load theirs
// without anybody holding all of them.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "ranks/ranks.h"
#include "trainer/optimizer.h"

namespace leeway {

// What a parameter has in the state.
enum class StateKind { weight, first_moment, second_moment };
inline constexpr StateKind kStateKinds[] = {StateKind::weight, StateKind::first_moment,
                                            StateKind::second_moment};
inline constexpr StateKind kMoments[] = {StateKind::first_moment, StateKind::second_moment};

// What is trained: all weights, or an adapter's. A view.
struct StateModel {
  const ModelConfig& config;
  const LoraSettings* lora;  // null: all weights
  const std::vector<ParameterInfo>& table;
};
inline StateModel state_model(const Parameters& policy) {
  return {policy.config(), policy.lora(), policy.table()};
}

// Numbers of one parameter, by its place in the table.
struct StatePiece {
  size_t parameter = 0;
  size_t first = 0, count = 0;
};

// Fills `to` [piece.count].
using ReadState = std::function<void(StateKind kind, const StatePiece& piece, std::span<float> to)>;

class StateShard {
 public:
  virtual ~StateShard() = default;
  virtual StateModel model() const = 0;
  // What `rank` has, in the order of the table; the same answer on all ranks.
  virtual std::vector<StatePiece> pieces(int rank) const = 0;
  // One of the own pieces.
  virtual void read(StateKind kind, const StatePiece& piece, std::span<float> to) const = 0;
  // Reads all of the own pieces; they are this rank's state when the function that it returns is
  // called. What other ranks have of the weights is not changed by that.
  virtual std::function<void()> prepare(const ReadState& read) = 0;
};

// The pieces between `begin` and `end` of parameters that lie at `offsets` of one long row.
std::vector<StatePiece> pieces_between(const std::vector<ParameterInfo>& table,
                                       std::span<const size_t> offsets, size_t begin, size_t end);

// All of the moments on rank 0, into `all`, to which the others, where it is null, give theirs.
void collect_moments(Ranks& ranks, const StateShard& shard, AdamW* all);

}  // namespace leeway
