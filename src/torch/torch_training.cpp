// Passes and steps of a TorchTrainingBackend (torch_training_backend.h). Its state is in
// torch_training_state.cpp, what it does as a rank among others in torch_training_ranks.cpp.
#include "torch/torch_training.h"

#include <algorithm>

#include "core/float32/plan.h"
#include "torch/torch_training_backend.h"

#ifdef LEEWAY_CUDA
#include <c10/cuda/CUDAStream.h>
#endif

namespace leeway {

using torch::Tensor;

namespace {

// Of the device's multiprocessors, while a sampler computes on it too: decode steps read memory,
// for which the others suffice.
constexpr double kShareBesideSampler = 0.7;

// Numbers of several tensors, copied to the host together. [sum of sizes]
std::vector<double> fetch(const std::vector<Tensor>& tensors) {
  std::vector<Tensor> wide;
  for (const Tensor& tensor : tensors) wide.push_back(tensor.to(at::kDouble).flatten());
  const Tensor host = at::cat(wide).cpu();
  return {host.data_ptr<double>(), host.data_ptr<double>() + host.numel()};
}

std::vector<float> floats_of(std::span<const double> values) {
  std::vector<float> out(values.size());
  std::transform(values.begin(), values.end(), out.begin(),
                 [](double value) { return static_cast<float>(value); });
  return out;
}

}  // namespace

TorchTrainingBackend::TorchTrainingBackend(TrainingWeights weights, const TrainerTable& table,
                                           torch::Device device, torch::ScalarType compute,
                                           std::unique_ptr<ShardExchange> exchange,
                                           SnapshotUse snapshots)
    : device_(device),
      exchange_(std::move(exchange)),
      sharding_(exchange_ ? table.sharding : Sharding::optimizer),
      snapshots_(snapshots),
      recompute_(table.recompute_activations),
      optimizer_state_(table.optimizer_state),
      pool_(device.is_cpu() ? static_cast<int>(table.threads) : 1),
      evaluator_(1),
      host_(std::move(weights.policy)),
      policy_(host_, host_.base(), device, compute, true, place()) {
  if (exchange_) {
    shard_.emplace(policy_.layout(), exchange_->rank(), exchange_->size(),
                   [this] { return own_state(); });
  }
  // Below an adapter a policy's base may be the same, which is on the device once.
  const auto make = [&](const std::shared_ptr<const Parameters>& other) {
    const auto& whole = host_.base() ? other : nullptr;
    return PolicyNetwork(*other, other->base() ? other->base() : whole, device, compute, false,
                         is_sharded() ? place() : RankPlace{});
  };
  if (weights.reference) reference_.emplace(make(weights.reference));
  if (weights.teacher) teacher_.emplace(make(weights.teacher));
  if (!is_sharded()) return;
  spread(host_, policy_);
  if (weights.reference) spread(*weights.reference, *reference_);
  if (weights.teacher) spread(*weights.teacher, *teacher_);
}

void TorchTrainingBackend::score(PolicyKind policy, const MicroBatch& batch, RowValues& values) {
  const PolicyNetwork& network = network_of(policy);
  in_turn(network, false, [&] {
    const at::NoGradGuard guard;
    const BatchOnDevice on(batch, device_, false);
    const Tensor hidden = network.forward(on.tokens, batch.cu_seqlens);
    const HeadOnDevice head{on, hidden, network.head_weight(false), network.products()};
    values.logprobs = floats_of(fetch({head_logprobs(pool_, head).logprobs}));
    values.entropy.clear();
  });
}

double TorchTrainingBackend::loss_pass(const MicroBatch& batch, const LossPass& pass,
                                       MetricSums& metrics, RowValues& values) {
  double loss = 0.0;
  in_turn(policy_, true, [&] {
    const bool is_on_device = pass.entropy_gradient == 0.0 && has_complete_plan(*pass.spec);
    const BatchOnDevice on(batch, device_, is_on_device);
    RecordedPass forward = policy_.record(on.tokens, batch.cu_seqlens, recompute_);
    const HeadOnDevice head = head_of(on, forward);
    loss = is_on_device ? loss_on_device(head, std::move(forward), pass, metrics, values)
                        : loss_on_host(head, std::move(forward), pass, metrics, values);
  });
  return loss;
}

void TorchTrainingBackend::gradient_pass(const MicroBatch& batch, std::span<const float> g,
                                         double entropy_gradient, RowValues& values) {
  in_turn(policy_, true, [&] {
    const BatchOnDevice on(batch, device_, false);
    RecordedPass forward = policy_.record(on.tokens, batch.cu_seqlens, recompute_);
    const HeadOnDevice head = head_of(on, forward);
    const HeadValues found = head_logprobs(pool_, head);
    const bool are_new = begin_gradients();
    policy_.backward(std::move(forward),
                     head_backward(pool_, head, g, batch.entropy_gradients(entropy_gradient),
                                   gradients_->network.head, are_new),
                     *gradients_, are_new, sums_of_pass());
    set_values(fetch({found.logprobs, found.entropy}), values);
  });
}

double TorchTrainingBackend::gradient_norm() {
  return in_words(stream_, [&] {
    sum_gradients();
    const double own = norm_of(own_part(learning().gradients));
    return exchange_ ? exchange_->norm(own) : own;
  });
}

void TorchTrainingBackend::step(const OptimizerTable& table, double rate, double scale) {
  in_words(stream_, [&] {
    const at::NoGradGuard guard;
    sum_gradients();
    ++steps_;
    FlatAdamW step = own_state();
    step.gradients = own_part(learning().gradients);
    adamw_step(step, table, steps_, rate, scale);
    host_is_current_ = false;
    if (exchange_) return hand_out();
    wait();  // so that its time is not counted where something waits next
  });
}

bool TorchTrainingBackend::leave_room(bool leaves) {
  // Only the trunk's products have the same bits on a part of the device as on the whole.
  const bool can = !exchange_ && policy_.has_trunk();
  const PartStream wanted = in_words(
      [&] { return leaves && can ? PartStream(device_, kShareBesideSampler) : PartStream(); });
  if (wanted.is_part() == stream_.is_part()) return stream_.is_part();
  in_words(stream_, [&] { settle(device_); });
  stream_ = wanted;
  for (const PolicyNetwork* network : networks()) network->change_stream();
  return stream_.is_part();
}

void TorchTrainingBackend::wait() const {
#ifdef LEEWAY_CUDA
  if (device_.is_cuda()) c10::cuda::getCurrentCUDAStream(device_.index()).synchronize();
#endif
}

std::vector<const PolicyNetwork*> TorchTrainingBackend::networks() const {
  std::vector<const PolicyNetwork*> all = {&policy_};
  if (reference_) all.push_back(&*reference_);
  if (teacher_) all.push_back(&*teacher_);
  return all;
}

const PolicyNetwork& TorchTrainingBackend::network_of(PolicyKind policy) const {
  if (policy == PolicyKind::current) return policy_;
  const auto& other = policy == PolicyKind::reference ? reference_ : teacher_;
  LEEWAY_CHECK(other.has_value(), "a policy that the backend was made with");
  return *other;
}

LearningState& TorchTrainingBackend::learning() {
  if (learning_) return *learning_;
  learning_.emplace(policy_, device_, optimizer_state_);
  gradients_ = policy_.use_gradients(learning_->gradients);
  return *learning_;
}

void TorchTrainingBackend::fill_old_gradients() {
  if (!std::exchange(gradients_are_old_, false)) return;
  // Sums of a step that failed may still be on their way.
  if (is_sharded()) policy_.sharded()->wait_for_sums();
  learning().gradients.zero_();
  if (is_sharded()) policy_.sharded()->rest_gradients().zero_();
}

bool TorchTrainingBackend::begin_gradients() {
  const Tensor& flat = learning().gradients;
  LEEWAY_CHECK(!gradients_are_summed_, "gradients of one step");
  if (is_sharded()) {  // a piece is written, and added to the part when it is summed
    fill_old_gradients();
    return true;
  }
  if (!gradients_are_old_ || !policy_.can_overwrite_gradients()) {
    fill_old_gradients();
    return false;
  }
  gradients_are_old_ = false;
  const int64_t decaying = policy_.layout().decaying;
  flat.narrow(0, decaying, flat.numel() - decaying).zero_();
  const Tensor& embedding = gradients_->network.embedding;
  if (embedding.defined() && !config().tie_word_embeddings) embedding.zero_();
  return true;
}

HeadOnDevice TorchTrainingBackend::head_of(const BatchOnDevice& on,
                                           const RecordedPass& pass) const {
  return {on, pass.hidden.detach(), policy_.head_weight(true), policy_.products()};
}

double TorchTrainingBackend::loss_on_device(const HeadOnDevice& head, RecordedPass&& forward,
                                            const LossPass& pass, MetricSums& metrics,
                                            RowValues& values) {
  const bool are_new = begin_gradients();
  const HeadLoss found = head_loss(pool_, head, *pass.spec, pass.prox_is_pi, pass.denominator,
                                   gradients_->network.head, are_new);
  policy_.backward(std::move(forward), found.d_hidden, *gradients_, are_new, sums_of_pass());
  const std::vector<double> numbers =
      fetch({found.loss, found.metrics, found.values.logprobs, found.values.entropy, found.kept});
  const std::span<const double> all = numbers;
  MetricSums sums = MetricSums::from_flat(all.subspan(1, MetricSums::kFlatSize));
  // A device's row marks streams that it lacks as NaN, for callers that merge many rows.
  for (const Slot slot : {Slot::ref_kl, Slot::teacher_kl}) {
    const bool there = slot == Slot::ref_kl ? head.on.ref.defined() : head.on.teacher.defined();
    if (!there) sums[slot] = 0.0;
  }
  metrics.merge(sums);
  const size_t tokens = static_cast<size_t>(found.kept.numel());
  set_values(all.subspan(1 + MetricSums::kFlatSize, 2 * tokens), values);
  const std::span<const double> kept = all.last(tokens);
  values.kept.assign(kept.begin(), kept.end());
  return numbers[0];
}

double TorchTrainingBackend::loss_on_host(const HeadOnDevice& head, RecordedPass&& forward,
                                          const LossPass& pass, MetricSums& metrics,
                                          RowValues& values) {
  const MicroBatch& batch = head.on.batch;
  const HeadValues found = head_logprobs(pool_, head);
  set_values(fetch({found.logprobs, found.entropy}), values);
  std::vector<float> g(values.logprobs.size());
  values.kept.resize(values.logprobs.size());
  const double loss = evaluator_.evaluate(*pass.spec, batch.view(values.logprobs, pass.prox_is_pi),
                                          g, pass.denominator, &metrics, values.kept);
  const bool are_new = begin_gradients();
  policy_.backward(std::move(forward),
                   head_backward(pool_, head, g, batch.entropy_gradients(pass.entropy_gradient),
                                 gradients_->network.head, are_new),
                   *gradients_, are_new, sums_of_pass());
  return loss;
}

void TorchTrainingBackend::set_values(std::span<const double> numbers, RowValues& values) {
  values.logprobs = floats_of(numbers.first(numbers.size() / 2));
  values.entropy = floats_of(numbers.subspan(numbers.size() / 2));
}

std::unique_ptr<TrainingBackend> make_torch_training(TrainingWeights weights,
                                                     const TrainerTable& table,
                                                     torch::Device device,
                                                     torch::ScalarType compute,
                                                     SnapshotUse snapshots) {
  return in_words([&] {
    return std::make_unique<TorchTrainingBackend>(std::move(weights), table, device, compute,
                                                  nullptr, snapshots);
  });
}

RankBackend make_torch_rank(Ranks& ranks, std::unique_ptr<DeviceGroup> group,
                            TrainingWeights weights, const TrainerTable& table,
                            torch::Device device, torch::ScalarType compute) {
  return in_words([&] {
    auto backend = std::make_unique<TorchTrainingBackend>(
        std::move(weights), table, device, compute,
        std::make_unique<ShardExchange>(ranks, std::move(group)));
    RankShare* const share = backend.get();
    return RankBackend{std::move(backend), share};
  });
}

}  // namespace leeway
