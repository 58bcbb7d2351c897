// Slots: the parts of an optimizer step's samples whose gradients are summed on their own.
//
// A slot's samples depend on the batch alone, its gradient begins with zero, and slots are joined
// in a binary tree (gradient_tree.h). Who computes a slot therefore changes no bit: one process
// computes all of them, N ranks S / N each.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "data/packed_batch.h"
#include "leeway/loss.h"
#include "leeway/metrics.h"

namespace leeway {

class TrainingBackend;
enum class PolicyKind { current, reference, teacher };

// Values for the rows of a micro-batch [N]; 0 at rows that are not computed.
struct RowValues {
  std::vector<float> logprobs, entropy;
  std::vector<uint8_t> kept;  // of a loss pass: the token's policy term carries gradient
};

// How to train on one micro-batch.
struct LossPass {
  const LossSpec* spec = nullptr;
  bool prox_is_pi = false;            // use the pass's own logprobs as prox
  std::optional<double> denominator;  // empty: the micro-batch's own
  double entropy_gradient = 0.0;      // d loss / d entropy of each trained token
};

// Sample numbers of each of its micro-batches; empty: no sample.
using GradientSlot = std::vector<std::vector<size_t>>;

// `count` slots, a power of two, of about the same number of rows, rollouts kept whole and in
// order; within a slot micro-batches of at most `max_tokens` rows. `only` as in
// `plan_micro_batches`. There may be fewer rollouts than slots.
std::vector<GradientSlot> plan_slots(const PackedBatch& batch, int64_t count, int64_t max_tokens,
                                     std::span<const size_t> only = {});

int64_t micro_batches_of(std::span<const GradientSlot> slots);
// The rows of a slot, in its order.
size_t rows_of(const PackedBatch& batch, const GradientSlot& slot);

// What is done with each micro-batch.
enum class PassKind { score, loss, gradient };
struct SlotPass {
  PassKind kind = PassKind::score;
  PolicyKind policy = PolicyKind::current;  // score: whose log-probabilities
  LossPass loss;                            // loss; gradient: its entropy_gradient
  bool ends_step = false;                   // the gradients of the next step are complete with this
};

struct SlotResult {
  double loss = 0.0;  // without the entropy's share
  MetricSums metrics;
  RowValues values;     // of all its rows, in its order
  std::string failure;  // not empty: a number was not finite, and the gradient is unusable
};

// One slot on one backend. `g` [rows]: d loss / d logprobs, of a gradient pass.
SlotResult run_slot(TrainingBackend& backend, const PackedBatch& batch, const GradientSlot& slot,
                    const SlotPass& pass, std::span<const float> g);
// The slots one after the other, each ended if the backend has several; `g` has the rows of all.
// Ends at the first that fails. The caller ends the pass.
std::vector<SlotResult> run_each_slot(TrainingBackend& backend, const PackedBatch& batch,
                                      std::span<const GradientSlot> slots, const SlotPass& pass,
                                      std::span<const float> g);

}  // namespace leeway
