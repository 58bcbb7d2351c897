// What a trainer computes with: the policy's weights, their gradients, the optimizer state, the
// reference and the teacher, all on one device, and the passes over micro-batches there.
//
// The trainer decides what is computed and checks the numbers; a backend computes. `cpu_backend.h`
// is the one without torch; src/torch has the one for torch devices.
//
// Threads: one call at a time per object, from any thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/checked_files.h"
#include "config/run_config.h"
#include "leeway/error.h"
#include "leeway/loss.h"
#include "leeway/metrics.h"
#include "model/policy_snapshot.h"
#include "trainer/micro_batch.h"
#include "trainer/slots.h"
#include "trainer/state_files.h"

namespace leeway {

class TrainingBackend {
 public:
  virtual ~TrainingBackend() = default;

  // The policy's weights on the host. The reference stays valid as long as the backend, and
  // reflects the last call.
  virtual const Parameters& parameters() = 0;
  // A copy of the policy's weights, made where they are: on another device than the CPU no weight
  // comes to the host.
  virtual std::shared_ptr<const PolicySnapshot> snapshot(PolicyVersion version) = 0;
  virtual const ModelConfig& config() const = 0;

  // Logprobs under one of the policies that the backend was made with. `values.entropy` is left
  // empty.
  virtual void score(PolicyKind policy, const MicroBatch& batch, RowValues& values) = 0;

  // Forward, loss and backward: returns the loss (without the entropy's share), adds to the
  // gradients and to `metrics`, and fills `values`. Numbers that are not finite give an Error or a
  // loss that is not finite; the gradients are unusable then.
  virtual double loss_pass(const MicroBatch& batch, const LossPass& pass, MetricSums& metrics,
                           RowValues& values) = 0;

  // The same for a gradient that is known: g [N] = d loss / d logprobs. Fills `values` except
  // `kept`.
  virtual void gradient_pass(const MicroBatch& batch, std::span<const float> g,
                             double entropy_gradient, RowValues& values) = 0;

  // The slots of a step, in order: calls the functions above for their micro-batches and joins the
  // gradients; `g` has the rows of all slots. Ends at the first slot that fails: `zero_gradients`
  // comes next then.
  virtual std::vector<SlotResult> run_slots(const PackedBatch& batch,
                                            std::span<const GradientSlot> slots,
                                            const SlotPass& pass, std::span<const float> g);
  // How many slots a step has (slots.h). With one, gradients add up in place.
  virtual int64_t slots() const { return 1; }
  // Between slots, and after the last of a pass. `any`: the slot had samples.
  virtual void end_slot(bool any);
  virtual void end_pass();

  // The Euclidean norm of all gradients, summed in double; not finite if any number is not.
  virtual double gradient_norm() = 0;
  virtual void zero_gradients() = 0;
  // One step of AdamW (optimizer.h) with gradients times `scale`. The gradients are
  // unspecified afterwards.
  virtual void step(const OptimizerTable& table, double rate, double scale) = 0;
  virtual int64_t steps() const = 0;  // taken so far

  // From the next pass on, whether passes leave some of the device to another that computes there
  // at the same time; returns whether they do. A matter of speed alone.
  virtual bool leave_room(bool) { return false; }

  // Weights and optimizer state on the host, in the same form for every backend: one can load what
  // another saved (state_files.h). Throws Error; a `load` that throws has changed nothing.
  virtual TrainingState state() = 0;
  // The state of this moment for a thread that saves it while training goes on: the function, to be
  // called once, gives what `state` would have given now. What training changes is copied before
  // this returns, on another device than the CPU without the host.
  virtual std::function<TrainingState()> state_later() {
    auto now = std::make_shared<TrainingState>(state());
    return [now] { return std::move(*now); };
  }
  // The same to a folder, which the function is called with once: writes the files of state_files.h
  // and returns their sums. Throws Error, for numbers that are not finite too.
  virtual std::function<FileSums(const std::string& folder)> save_later() {
    return [later = state_later()](const std::string& folder) {
      const TrainingState now = later();
      if (const std::string bad = not_finite_text(now); !bad.empty()) throw Error(bad);
      return save_state(folder, now.policy, now.optimizer);
    };
  }
  virtual void load(const std::string& folder) = 0;

 private:
  friend SlotResult run_slot(TrainingBackend& backend, const PackedBatch& batch,
                             const GradientSlot& slot, const SlotPass& pass,
                             std::span<const float> g);
  // Of the micro-batch at hand; their memory is used again.
  MicroBatch part_;
  RowValues values_;
};

// Reference and teacher, if the loss reads them. Where the policy is an adapter, the base alone can
// be the reference: it is shared, not copied.
struct TrainingWeights {
  Parameters policy;
  std::shared_ptr<const Parameters> reference, teacher;
};

// Makes a backend with these weights. Of `table` it uses threads, numerics, recompute_activations,
// optimizer_state, sharding and gradient_slots.
using MakeTrainingBackend = std::function<std::unique_ptr<TrainingBackend>(
    TrainingWeights weights, const TrainerTable& table)>;

}  // namespace leeway
