// What a pass says of the pieces of a network while it goes through them: when it reads a piece's
// weights and when a gradient is complete. ShardedWeights gathers the weights in time by that, and
// EarlySums sums gradients over ranks while the pass goes on.
#pragma once

#include <cstdint>

namespace leeway {

// The number of a layer, or one of these. A tied head is the embedding.
inline constexpr int64_t kEmbeddingPiece = -1, kHeadPiece = -2;

enum class PieceAct {
  read,   // its matrices are read from here on, until those of another piece are
  work,   // the same, and their gradient is written
  write,  // the gradient alone is added to
  give    // the gradient is complete
};

class PassPieces {
 public:
  virtual ~PassPieces() = default;
  virtual void at(PieceAct act, int64_t piece) = 0;
};

}  // namespace leeway
