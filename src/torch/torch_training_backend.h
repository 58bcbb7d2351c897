// The class behind make_torch_training and make_torch_rank. Its functions are in three files:
// passes and steps in torch_training.cpp, weights and optimizer state as they leave and come back
// in torch_training_state.cpp, and what it does as a rank among others in torch_training_ranks.cpp.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "base/thread_pool.h"
#include "leeway/error.h"
#include "leeway/evaluator.h"
#include "torch/early_sums.h"
#include "torch/flat_adamw.h"
#include "torch/part_stream.h"
#include "torch/policy_network.h"
#include "torch/shard_exchange.h"
#include "torch/tensor_head.h"
#include "torch/torch_errors.h"
#include "torch/torch_state_shard.h"
#include "torch/torch_training.h"

namespace leeway {

// What training needs besides the weights: zeros in their layout.
struct LearningState {
  LearningState(const PolicyNetwork& policy, torch::Device device, OptimizerState state)
      : gradients(at::zeros({policy.sharded() ? policy.own().count : policy.layout().size},
                            at::TensorOptions(device).dtype(at::kFloat))),
        moments(make_moments(policy.layout(), device, state, policy.own())) {}
  torch::Tensor gradients;  // of all weights, or of the own part of those that are in parts
  FlatMoments moments;
};

template <class Work>
auto in_words(Work&& work) {
  return with_plain_errors(std::forward<Work>(work),
                           "; lower trainer.max_tokens or rollout.kv_bytes, or set "
                           "trainer.recompute_activations or trainer.optimizer_state");
}

// The same, computed on `stream`.
template <class Work>
auto in_words(const PartStream& stream, Work&& work) {
  const PartStream::Scope scope(stream);
  return in_words(std::forward<Work>(work));
}

class TorchTrainingBackend : public TrainingBackend, public RankShare {
 public:
  // `exchange`: null for a trainer that is alone.
  TorchTrainingBackend(TrainingWeights weights, const TrainerTable& table, torch::Device device,
                       torch::ScalarType compute, std::unique_ptr<ShardExchange> exchange = nullptr,
                       SnapshotUse snapshots = {});

  const Parameters& parameters() override;
  std::shared_ptr<const PolicySnapshot> snapshot(PolicyVersion version) override;
  const ModelConfig& config() const override { return host_.config(); }

  void score(PolicyKind policy, const MicroBatch& batch, RowValues& values) override;
  double loss_pass(const MicroBatch& batch, const LossPass& pass, MetricSums& metrics,
                   RowValues& values) override;
  void gradient_pass(const MicroBatch& batch, std::span<const float> g, double entropy_gradient,
                     RowValues& values) override;

  // Ranks add their slots up in place and sum over ranks when the step needs it.
  int64_t slots() const override { return exchange_ ? exchange_->size() : 1; }
  void end_slot(bool) override {}
  void end_pass() override {}

  double gradient_norm() override;
  // The next pass overwrites them.
  void zero_gradients() override { gradients_are_old_ = true, gradients_are_summed_ = false; }

  void step(const OptimizerTable& table, double rate, double scale) override;
  int64_t steps() const override { return steps_; }
  bool leave_room(bool leaves) override;

  TrainingState state() override;
  std::function<TrainingState()> state_later() override;
  void load(const std::string& folder) override;

  // As a rank.
  double take_seconds() override { return exchange_->take_seconds(); }
  StateShard& shard() override { return *shard_; }
  bool needs_weights() const override { return has_part() && !host_is_current_; }
  void bring_weights() override;
  void begin_passes(const SlotPass& pass, int64_t own, int64_t most) override;
  void end_passes() override;
  void bring_snapshot() override;

 protected:
  virtual int64_t spare() const;  // spare_bytes of device_room.h, where no test says otherwise

 private:
  bool is_sharded() const { return sharding_ == Sharding::weights; }
  RankPlace place() const;
  // Whether other ranks have a part of the masters.
  bool has_part() const { return exchange_ && (policy_.low().defined() || is_sharded()); }
  torch::Tensor own_part(const torch::Tensor& flat) const;
  // Weights and moments of the own part.
  FlatAdamW own_state();
  // The own part of the weights goes to all ranks; of weights in parts, what all have whole.
  void hand_out();

  // One pass. Where weights are in parts all ranks make it at once: what is left of one that fails,
  // or that computes nothing, is made up for.
  template <class Work>
  void in_turn(const PolicyNetwork& network, bool trains, const Work& work) {
    --own_left_, --most_left_;
    ShardedWeights* const sharded = network.sharded();
    if (sharded == nullptr) return in_words(stream_, work);
    in_words(stream_, [&] {
      if (trains) begin_gradients();
      sharded->begin(trains);
    });
    try {
      in_words(stream_, work);
    } catch (const Lost&) {
      throw;
    } catch (const Error&) {
      in_words(stream_, [&] { sharded->finish(); });
      throw;
    }
    in_words(stream_, [&] { sharded->finish(); });
  }

  // Whether gradients are summed over ranks while the last passes of the order go on. Those of an
  // adapter are few.
  bool sums_early() const;
  EarlySums& early_sums();
  // Of the pass that is the rank's last; else null.
  PassPieces* sums_of_pass() { return sums_early() && own_left_ == 0 ? &early_sums() : nullptr; }

  void collect(const std::function<void(int64_t, const torch::Tensor&)>& each);
  // From rank 0's host to all ranks, of which each takes its part.
  void spread(const Parameters& host, PolicyNetwork& network);
  // Of the weights, in float32.
  torch::Tensor copy();
  std::shared_ptr<const PolicySnapshot> on_device(const torch::Tensor& weights,
                                                  PolicyVersion version);
  // Of what passes read, whole.
  torch::Tensor copy_of_read();
  // The own part of the gradients becomes that of all ranks.
  void sum_gradients();

  void wait() const;  // for what is queued on the device

  std::vector<const PolicyNetwork*> networks() const;
  const PolicyNetwork& network_of(PolicyKind policy) const;

  // Created on first use: backends that only score do without it.
  LearningState& learning();

  void fill_old_gradients();  // with the zeros that they stand for
  // Before a backward pass. Returns whether it writes the gradients of matrices instead of adding
  // to them; the others are zero then.
  bool begin_gradients();

  HeadOnDevice head_of(const BatchOnDevice& on, const RecordedPass& pass) const;
  double loss_on_device(const HeadOnDevice& head, RecordedPass&& forward, const LossPass& pass,
                        MetricSums& metrics, RowValues& values);
  // The loss in between is computed on the host, where corrections that are functions run: its
  // gradient and that of the entropy go back together.
  double loss_on_host(const HeadOnDevice& head, RecordedPass&& forward, const LossPass& pass,
                      MetricSums& metrics, RowValues& values);
  // Log-probabilities, then entropies.
  static void set_values(std::span<const double> numbers, RowValues& values);

  torch::Device device_;
  PartStream stream_;                        // of all the backend's work
  std::unique_ptr<ShardExchange> exchange_;  // of a rank among others; else null
  Sharding sharding_;                        // of a rank among others
  SnapshotUse snapshots_;
  Recompute recompute_;
  OptimizerState optimizer_state_;
  ThreadPool pool_;
  Evaluator evaluator_;
  Parameters host_;  // older than the device's weights after a step, until requested
  bool host_is_current_ = true;
  std::weak_ptr<const PolicySnapshot> last_snapshot_;  // that the device has with all digits
  PolicyNetwork policy_;
  std::optional<PolicyNetwork> reference_, teacher_;
  std::optional<LearningState> learning_;
  std::optional<PolicyGradients> gradients_;  // views of the learning state's
  bool gradients_are_old_ = false;            // to be taken for zeros
  bool gradients_are_summed_ = false;         // over ranks
  std::optional<TorchStateShard> shard_;      // of a rank among others
  std::optional<EarlySums> early_sums_;       // of a rank whose weights are whole
  SlotPass order_;                            // whose passes are made
  int64_t own_left_ = 0, most_left_ = 0;      // passes of this rank, and of all ranks
  int64_t steps_ = 0;
};

}  // namespace leeway
