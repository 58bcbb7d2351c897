// The part of the optimizer's moments that one rank has. Each number is on one rank: ranks save and
// load theirs without anybody holding all of them.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "ranks/ranks.h"
#include "trainer/optimizer.h"

namespace leeway {

enum class Moment { first, second };
inline constexpr Moment kMoments[] = {Moment::first, Moment::second};

// Numbers of one parameter, by its place in the table.
struct MomentPiece {
  size_t parameter = 0;
  size_t first = 0, count = 0;
};

// Fills `to` [piece.count].
using ReadMoment = std::function<void(Moment which, const MomentPiece& piece, std::span<float> to)>;

class MomentShard {
 public:
  virtual ~MomentShard() = default;
  virtual const std::vector<ParameterInfo>& table() const = 0;
  // What `rank` has, in the order of the table; the same answer on all ranks.
  virtual std::vector<MomentPiece> pieces(int rank) const = 0;
  // One of the own pieces.
  virtual void read(Moment which, const MomentPiece& piece, std::span<float> to) const = 0;
  // Reads all of the own pieces; they are this rank's moments when the function that it returns is
  // called.
  virtual std::function<void()> prepare(const ReadMoment& read) = 0;
};

// The pieces between `begin` and `end` of parameters that lie at `offsets` of one long row.
std::vector<MomentPiece> pieces_between(const std::vector<ParameterInfo>& table,
                                        std::span<const size_t> offsets, size_t begin, size_t end);

// All of the moments on rank 0, into `all`, to which the others, where it is null, give theirs.
void collect_moments(Ranks& ranks, const MomentShard& shard, AdamW* all);

}  // namespace leeway
