// The trainer: samples in, better weights out.
//
//   batch -> ref_forward, teacher_forward if the loss reads them
//         -> prox_forward: auto | always | never
//         -> epochs x minibatches: forward_backward      (gradients add up)
//         -> optim_step: clip, AdamW                     after all minibatches, or after each
//
// `train_batch` is that whole flow; its parts are public, for loops of one's own
// (examples/trainer_loop.cpp).
//
// Invariants:
// - How a batch is cut into micro-batches changes nothing but memory: denominators are those of all
//   samples of an optimizer step, metrics are joined sums.
// - Work is done for tokens that need it: rows after the last trained token are not computed, and
//   the head sees trained tokens only.
// - A pass or a step that is not finite changes no weight: it is reported, and the weights are the
//   last good ones.
//
// Threads: one call at a time per object; each call uses all of the backend's threads.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "config/run_config.h"
#include "data/sample.h"
#include "leeway/metrics.h"
#include "model/policy_snapshot.h"
#include "trainer/backend.h"
#include "trainer/micro_batch.h"
#include "trainer/optimizer.h"

namespace leeway {

// The result of one or more forward and backward passes, combined by `merge`.
struct PassResult {
  double loss = 0.0;
  MetricSums metrics;
  double entropy = 0.0;  // sum over trained tokens
  int64_t tokens = 0;    // computed
  int64_t trained_tokens = 0;
  int64_t micro_batches = 0, largest_micro_batch = 0;
  TokenValues logprobs;  // of the samples, under the policy before the step
  TokenFlags kept;       // whether a token's policy term carried gradient
  std::string failure;   // not empty: a number was not finite; gradients are unusable
  void merge(PassResult&& other);
};

struct OptimResult {
  double grad_norm = 0.0;  // before clipping
  double learning_rate = 0.0;
  std::string failure;  // not empty: the norm was not finite or its square overflows float32, or
                        // a pass had failed; nothing was changed
};

// What `train_batch` did. Seconds are wall time.
struct BatchResult {
  PassResult passes;  // all of them; logprobs and kept are the first epoch's
  double loss = 0.0;  // mean over optimizer steps
  double grad_norm = 0.0, largest_grad_norm = 0.0, learning_rate = 0.0;
  int64_t optimizer_steps = 0;
  PolicyStreams streams;  // as the loss read them
  double ref_seconds = 0, teacher_seconds = 0, prox_seconds = 0, pass_seconds = 0, step_seconds = 0;
  std::string failure;  // not empty: training stopped before the step that would have used it
};

class Trainer {
 public:
  // `spec` is the loss, `table` the settings. Loads a reference or teacher folder if the loss needs
  // one. Throws Error for a folder that cannot be read or does not fit the policy's vocabulary, and
  // for a missing BLAS (numerics = "fast"). `backend` determines where numbers live and are
  // computed; empty: on the CPU.
  Trainer(Parameters initial, LossSpec spec, TrainerTable table,
          const MakeTrainingBackend& backend = {});
  ~Trainer();

  // On the host. Where the policy is on another device it is copied from there at each call after a
  // step.
  const Parameters& parameters() const;
  const ModelConfig& config() const;
  // The policy as it is now, to be handed on while training goes on: a copy on its own device.
  std::shared_ptr<const PolicySnapshot> snapshot(PolicyVersion version) const;
  const LossSpec& spec() const;
  int64_t optimizer_steps() const;  // taken so far

  // Logprobs of trained tokens under the current policy. Throws Error (check_samples).
  TokenValues forward(std::span<const Sample> samples);
  // The same under the reference or the teacher; aborts if the loss does not read it.
  TokenValues ref_forward(std::span<const Sample> samples);
  TokenValues teacher_forward(std::span<const Sample> samples);

  // Adds the gradient of the loss over `samples`. `denominator` is that of all samples of the
  // optimizer step if these are only some of them (`denominator_of_samples`); an entropy bonus is
  // nevertheless divided by the trained tokens of these samples. Throws Error (check_samples), also
  // for a stream that the loss reads and that is missing or does not fit the samples.
  PassResult forward_backward(std::span<const Sample> samples, const PolicyStreams& streams,
                              std::optional<double> denominator = {});
  // Also throws Error if it depends on logprobs (`denominator = "kept"`).
  double denominator_of_samples(std::span<const Sample> samples);

  // Clips, steps, and zeroes the gradients (also after a failure). If a pass since the last step
  // has failed, the step fails with the same message.
  OptimResult optim_step();

  // The whole flow of the table for one batch. A batch without a trained token changes nothing: no
  // step, and zeros for every id in logprobs and kept.
  BatchResult train_batch(std::span<const Sample> samples);

  // A copy of everything that training changes, which can be saved while training continues.
  TrainingState state() const;
  // The same without waiting for a copy to the host: the function gives the state of this moment,
  // is called once, from any thread, and may outlive the trainer's next calls but not the trainer.
  std::function<TrainingState()> state_later() const;
  // The same for a function that writes it to a folder, which ranks do together, and returns the
  // sums of the files. That throws Error, for numbers that are not finite too.
  std::function<FileSums(const std::string& folder)> save_later() const;

  // From the next pass on, whether passes leave some of their device to a sampler that works there
  // at the same time: the trainer becomes slower, and the sampler faster. Returns whether they do:
  // not every device can be divided.
  bool leave_room(bool leaves);

  // The learning rate schedule counts optimizer steps from here on: 0, or those that came with the
  // moments of another run.
  void set_schedule_begin(int64_t optimizer_steps);

  // Saves the weights as a Hugging Face folder together with the optimizer state, and loads them.
  // Throws Error for an invalid folder or one of a different model and, when saving, for numbers
  // that are not finite.
  void save(const std::string& folder) const;
  void load(const std::string& folder);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Optimizer steps per batch.
int64_t optimizer_steps_per_batch(const TrainerTable& table);

// Parts of the loss that have no effect in this configuration, and its own warnings, as text for
// the user.
// `on_policy`: rollouts come from the weights that train on them, in the same numerics.
std::vector<std::string> inert_parts(const LossSpec& spec, const TrainerTable& table,
                                     bool on_policy);

}  // namespace leeway
