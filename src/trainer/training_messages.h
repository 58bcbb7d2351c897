// What the leader of a group of ranks says to the others on Channel::training, and what they
// answer. The first byte of an order is its kind; the rest is what the functions here write and
// read.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "trainer/backend.h"

namespace leeway {

enum class TrainingOrder {
  make,      // a backend with these weights
  drop,      // the backend ends
  pass,      // slots: answered by their results
  join,      // the sum over ranks of the pass's gradients
  zero,      // gradients
  norm,      // answered by nobody: the leader takes part
  step,      // AdamW
  snapshot,  // to be kept for the sampler
  state,     // answered by this rank's part of the moments
  save,      // a copy of its part of weights and moments, to be written when the leader says where
  weights,   // answered by this rank's part of them
  load,      // a state that the leader reads
  end        // of the group
};

// A backend's weights, and of its table what a rank cannot know by itself. Of weights in parts the
// shapes alone: rank 0 hands the parts out when all have made their backends.
void put_weights(ByteWriter& to, const TrainingWeights& weights, const TrainerTable& table);
// `like` has the policy's shape and, of an adapter, its base. Throws Error if the base is another
// one than the leader's.
TrainingWeights get_weights(ByteReader& from, const Parameters& like, TrainerTable& table);

// Slots with their samples alone. `spec` is the number of the pass's loss among those that both
// sides know.
struct PassOrder {
  PackedBatch batch;
  std::vector<GradientSlot> slots;
  SlotPass pass;
  uint8_t spec = 0;
  int64_t most = 0;  // micro-batches of the rank that has most
  std::vector<float> g;
};
void put_pass(ByteWriter& to, const PackedBatch& batch, std::span<const GradientSlot> slots,
              const SlotPass& pass, uint8_t spec, int64_t most, std::span<const float> g);
PassOrder get_pass(ByteReader& from);

// `seconds` that the slots took.
std::string results_message(const std::vector<SlotResult>& results, double seconds);
std::vector<SlotResult> read_results(const std::string& message, double* seconds);

}  // namespace leeway
