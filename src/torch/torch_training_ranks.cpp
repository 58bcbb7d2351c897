// What a TorchTrainingBackend does as a rank among others: it sums gradients, and hands out and
// collects weights. Passes and steps are in torch_training.cpp, state in torch_training_state.cpp.

#include "torch/torch_training_backend.h"

namespace leeway {

using torch::Tensor;

void TorchTrainingBackend::bring_weights() {
  in_words(stream_, [&] { collect({}); });
}

void TorchTrainingBackend::begin_passes(const SlotPass& pass, int64_t own, int64_t most) {
  order_ = pass, own_left_ = own, most_left_ = most;
  // Memory that is not there is missed before the others count on this rank's passes.
  if (is_sharded() && pass.kind != PassKind::score) in_words(stream_, [&] { learning(); });
  if (sums_early()) in_words(stream_, [&] { early_sums().begin(); });
}

void TorchTrainingBackend::end_passes() {
  if (sums_early()) {
    in_words(stream_, [&] {
      fill_old_gradients();
      exchange_->timed(learning().gradients, [&] { early_sums().finish(); });
      gradients_are_summed_ = true;
    });
  }
  if (!is_sharded()) return;
  const bool trains = order_.kind != PassKind::score;
  const PolicyNetwork& network = trains ? policy_ : network_of(order_.policy);
  while (most_left_ > 0) in_turn(network, trains, [] {});
}

void TorchTrainingBackend::bring_snapshot() {
  if (is_sharded())
    in_words(stream_, [&] { policy_.sharded()->read_all([](int64_t, const Tensor&) {}); });
}

RankPlace TorchTrainingBackend::place() const {
  if (!exchange_) return {};
  return {exchange_->rank(), exchange_->size(), is_sharded() ? &exchange_->group() : nullptr};
}

void TorchTrainingBackend::hand_out() {
  if (ShardedWeights* const sharded = policy_.sharded()) {
    sharded->weights_changed();
    exchange_->timed(policy_.high(), [&] { sharded->hand_out_rest(); });
  }
  for (const Tensor& weights : policy_.weights_to_hand_out()) exchange_->hand_out(weights);
}

bool TorchTrainingBackend::sums_early() const {
  return exchange_ && !is_sharded() && !policy_.layout().lora && order_.ends_step;
}

EarlySums& TorchTrainingBackend::early_sums() {
  const Tensor& gradients = learning().gradients;
  if (!early_sums_) early_sums_.emplace(policy_.layout(), gradients, exchange_->group());
  return *early_sums_;
}

void TorchTrainingBackend::collect(const std::function<void(int64_t, const Tensor&)>& each) {
  exchange_->collect(policy_.layout(), policy_.high(), policy_.low(), each);
}

void TorchTrainingBackend::spread(const Parameters& host, PolicyNetwork& network) {
  exchange_->spread(network.layout(), host, device_,
                    [&](int64_t at, const Tensor& numbers) { network.copy_from(at, numbers); });
  network.sharded()->weights_changed();
  network.sharded()->hand_out_rest();
}

void TorchTrainingBackend::sum_gradients() {
  fill_old_gradients();
  if (!exchange_ || std::exchange(gradients_are_summed_, true)) return;
  const Tensor& gradients = learning().gradients;
  if (!is_sharded()) return exchange_->sum(gradients);
  exchange_->timed(gradients, [&] { policy_.sharded()->sum_rest(); });
}

}  // namespace leeway
