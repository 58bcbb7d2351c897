// Which requests the engine can take, and what they hold of it.
#pragma once

#include <cstdint>

#include "data/sampling.h"

namespace leeway {

// Blocks that a request holds from its admission on. The last token of a sample is never fed back
// and needs no position.
struct BlockNeed {
  int64_t shared = 0;  // by all samples: those that the prompt fills
  int64_t own = 0;     // of each sample
  int64_t of(int64_t samples) const { return shared + samples * own; }
};
BlockNeed block_need(const Request& request);

struct RequestLimits {
  int64_t vocabulary = 0;
  int64_t positions = 0;  // max_position_embeddings
  int64_t sequences = 0;  // max_sequences
  int64_t blocks = 0;     // in all
  int64_t block_bytes = 0;
};
// Throws Error naming the member, its value and the limit.
void check_request(const Request& request, const RequestLimits& limits);

}  // namespace leeway
