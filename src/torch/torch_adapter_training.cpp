#include "torch/torch_adapter_training.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <utility>

#include "leeway/error.h"
#include "leeway/evaluator.h"
#include "torch/compat.h"
#include "torch/device_weights.h"
#include "torch/flat_adamw.h"
#include "torch/shared_base.h"
#include "torch/tensor_head.h"
#include "torch/torch_errors.h"
#include "torch/training_operations.h"
#include "torch/trunk.h"
#include "trainer/optimizer.h"
#include "trainer/state_files.h"

namespace leeway {
namespace {

using torch::Tensor;

template <class Work>
auto in_words(Work&& work) {
  return with_plain_errors(std::forward<Work>(work),
                           "; lower trainer.max_tokens or rollout.kv_bytes, or set "
                           "trainer.recompute_activations");
}

// Numbers of several tensors, copied to the host together. [sum of sizes]
std::vector<double> fetch(const std::vector<Tensor>& tensors) {
  std::vector<Tensor> wide;
  for (const Tensor& tensor : tensors) wide.push_back(tensor.to(at::kDouble).flatten());
  const Tensor host = at::cat(wide).cpu();
  return {host.data_ptr<double>(), host.data_ptr<double>() + host.numel()};
}

std::vector<float> floats_of(std::span<const double> values) {
  return {values.begin(), values.end()};
}

// A policy that is read: a base, and perhaps an adapter over it.
struct Policy {
  Policy(const Parameters& weights, const std::shared_ptr<const Parameters>& base_weights,
         torch::Device device, torch::ScalarType compute)
      : base(base_on_device(base_weights, device, compute)) {
    const TorchRopeTable rope(weights.config(), device);
    if (weights.lora() == nullptr) {
      trunk.emplace(weights.config(), base->network, rope);
      return;
    }
    layout.emplace(weights);
    adapter = at::zeros({layout->size}, at::device(device).dtype(compute));
    copy_to_flat(*layout, weights, adapter);
    trunk.emplace(weights.config(), base->network, rope, adapter_views(*layout, adapter));
  }
  static Policy of(const std::shared_ptr<const Parameters>& weights, torch::Device device,
                   torch::ScalarType compute) {
    return {*weights, weights->base() ? weights->base() : weights, device, compute};
  }

  std::shared_ptr<const SharedBase> base;
  std::optional<FlatLayout> layout;  // of the adapter
  Tensor adapter;                    // in the compute type
  std::optional<Trunk> trunk;
};

// Where the gradients of a frozen network go: norms have a place, since their kernels give one
// whatever becomes of it; matrices, biases and the embedding have none.
NetworkTensors frozen_gradients(const NetworkTensors& network) {
  const auto room = [](const Tensor& like) {
    return like.defined() ? at::zeros(like.sizes(), like.options().dtype(at::kFloat)) : Tensor();
  };
  NetworkTensors out;
  out.final_norm = room(network.final_norm);
  for (const LayerTensors& layer : network.layers) {
    LayerTensors gradients;
    gradients.input_norm = room(layer.input_norm), gradients.post_norm = room(layer.post_norm);
    gradients.q_norm = room(layer.q_norm), gradients.k_norm = room(layer.k_norm);
    out.layers.push_back(std::move(gradients));
  }
  return out;
}

class TorchAdapterBackend : public TrainingBackend {
 public:
  TorchAdapterBackend(TrainingWeights weights, const TrainerTable& table, torch::Device device,
                      torch::ScalarType compute)
      : device_(device),
        recompute_(table.recompute_activations),
        pool_(device.is_cpu() ? static_cast<int>(table.threads) : 1),
        evaluator_(1),
        host_(std::move(weights.policy)),
        policy_(host_, host_.base(), device, compute) {
    const at::NoGradGuard guard;
    const auto zeros = [&] {
      return at::zeros({policy_.layout->size}, at::device(device).dtype(at::kFloat));
    };
    masters_ = zeros(), gradients_ = zeros(), first_moment_ = zeros(), second_moment_ = zeros();
    copy_to_flat(*policy_.layout, host_, masters_);
    adapter_gradients_ = adapter_views(*policy_.layout, gradients_);
    frozen_ = frozen_gradients(policy_.base->network);
    if (weights.reference) reference_.emplace(Policy::of(weights.reference, device, compute));
    if (weights.teacher) teacher_.emplace(Policy::of(weights.teacher, device, compute));
  }

  const Parameters& parameters() override {
    if (!host_is_current_) copy_to_host(*policy_.layout, masters_, host_);
    host_is_current_ = true;
    return host_;
  }
  std::shared_ptr<const PolicySnapshot> snapshot(PolicyVersion version) override {
    return in_words([&] {
      return std::make_shared<const PolicySnapshot>(
          config(), std::make_unique<TorchDeviceWeights>(*policy_.layout, masters_, host_.base()),
          version);
    });
  }
  const ModelConfig& config() const override { return host_.config(); }

  void score(PolicyKind kind, const MicroBatch& batch, RowValues& values) override {
    in_words([&] {
      const Policy& policy = policy_of(kind);
      const BatchOnDevice on(batch, device_, false);
      const Tensor hidden = policy.trunk->forward(on.tokens, batch.cu_seqlens);
      const HeadOnDevice head{on, hidden, policy.trunk->head_weight(), policy.trunk->products()};
      values.logprobs = floats_of(fetch({head_logprobs(pool_, head).logprobs}));
      values.entropy.clear();
    });
  }

  double loss_pass(const MicroBatch& batch, const LossPass& pass, MetricSums& metrics,
                   RowValues& values) override {
    return in_words([&] {
      const bool on_device = pass.entropy_gradient == 0.0;
      const BatchOnDevice on(batch, device_, on_device);
      TrunkRecord record;
      const HeadOnDevice head = forward(on, record);
      return on_device ? loss_on_device(head, std::move(record), pass, metrics, values)
                       : loss_on_host(head, std::move(record), pass, metrics, values);
    });
  }

  void gradient_pass(const MicroBatch& batch, std::span<const float> g, double entropy_gradient,
                     RowValues& values) override {
    in_words([&] {
      const BatchOnDevice on(batch, device_, false);
      TrunkRecord record;
      const HeadOnDevice head = forward(on, record);
      const HeadValues found = head_logprobs(pool_, head);
      backward(std::move(record),
               head_backward(pool_, head, g, batch.entropy_gradients(entropy_gradient), Tensor()));
      set_values(fetch({found.logprobs, found.entropy}), values);
    });
  }

  double gradient_norm() override {
    return in_words([&] { return norm_of(gradients_); });
  }
  void zero_gradients() override { gradients_.zero_(); }

  void step(const OptimizerTable& table, double rate, double scale) override {
    in_words([&] {
      const at::NoGradGuard guard;
      ++steps_;
      FlatAdamW step;
      step.parameters = masters_;
      step.copy = policy_.adapter;
      step.gradients = gradients_;
      step.first_moment = first_moment_, step.second_moment = second_moment_;
      step.decaying = policy_.layout->decaying;
      adamw_step(step, table, steps_, rate, scale);
      host_is_current_ = false;
    });
  }
  int64_t steps() const override { return steps_; }

  TrainingState state() override {
    TrainingState state{parameters(), AdamW(host_)};
    copy_to_host(*policy_.layout, first_moment_, state.optimizer.first_moment());
    copy_to_host(*policy_.layout, second_moment_, state.optimizer.second_moment());
    state.optimizer.set_steps(steps_);
    return state;
  }

  void load(const std::string& folder) override {
    AdamW state(host_);
    load_state(folder, host_, state);
    host_is_current_ = true;
    copy_to_flat(*policy_.layout, host_, masters_);
    copy_to_flat(*policy_.layout, host_, policy_.adapter);
    copy_to_flat(*policy_.layout, state.first_moment(), first_moment_);
    copy_to_flat(*policy_.layout, state.second_moment(), second_moment_);
    steps_ = state.steps();
  }

 private:
  const Policy& policy_of(PolicyKind kind) const {
    if (kind == PolicyKind::current) return policy_;
    const auto& other = kind == PolicyKind::reference ? reference_ : teacher_;
    LEEWAY_CHECK(other.has_value(), "a policy that the backend was made with");
    return *other;
  }

  HeadOnDevice forward(const BatchOnDevice& on, TrunkRecord& record) const {
    const Tensor hidden =
        policy_.trunk->forward(on.tokens, on.batch.cu_seqlens, recompute_, &record);
    return {on, hidden, policy_.trunk->head_weight(), policy_.trunk->products()};
  }

  void backward(TrunkRecord&& record, const Tensor& d_hidden) const {
    policy_.trunk->backward(std::move(record), d_hidden, frozen_, false, adapter_gradients_);
  }

  double loss_on_device(const HeadOnDevice& head, TrunkRecord&& record, const LossPass& pass,
                        MetricSums& metrics, RowValues& values) {
    const HeadLoss found =
        head_loss(pool_, head, *pass.spec, pass.prox_is_pi, pass.denominator, Tensor());
    backward(std::move(record), found.d_hidden);
    const std::vector<double> numbers =
        fetch({found.loss, found.metrics, found.values.logprobs, found.values.entropy, found.kept});
    const std::span<const double> all = numbers;
    MetricSums sums = MetricSums::from_flat(all.subspan(1, MetricSums::kFlatSize));
    // A device's row marks streams that it lacks as NaN, for callers that merge many rows.
    for (const Slot slot : {Slot::ref_kl, Slot::teacher_kl}) {
      const bool there = slot == Slot::ref_kl ? head.on.ref.defined() : head.on.teacher.defined();
      if (!there && device_.is_cuda()) sums[slot] = 0.0;
    }
    metrics.merge(sums);
    const size_t tokens = static_cast<size_t>(found.kept.numel());
    set_values(all.subspan(1 + MetricSums::kFlatSize, 2 * tokens), values);
    const std::span<const double> kept = all.last(tokens);
    values.kept.assign(kept.begin(), kept.end());
    return numbers[0];
  }

  double loss_on_host(const HeadOnDevice& head, TrunkRecord&& record, const LossPass& pass,
                      MetricSums& metrics, RowValues& values) {
    const MicroBatch& batch = head.on.batch;
    const HeadValues found = head_logprobs(pool_, head);
    set_values(fetch({found.logprobs, found.entropy}), values);
    std::vector<float> g(values.logprobs.size());
    values.kept.resize(values.logprobs.size());
    const double loss =
        evaluator_.evaluate(*pass.spec, batch.view(values.logprobs, pass.prox_is_pi), g,
                            pass.denominator, &metrics, values.kept);
    backward(
        std::move(record),
        head_backward(pool_, head, g, batch.entropy_gradients(pass.entropy_gradient), Tensor()));
    return loss;
  }

  // Log-probabilities, then entropies.
  static void set_values(std::span<const double> numbers, RowValues& values) {
    values.logprobs = floats_of(numbers.first(numbers.size() / 2));
    values.entropy = floats_of(numbers.subspan(numbers.size() / 2));
  }

  torch::Device device_;
  bool recompute_;
  ThreadPool pool_;
  Evaluator evaluator_;
  Parameters host_;  // older than the device's weights after a step, until requested
  bool host_is_current_ = true;
  Policy policy_;
  std::optional<Policy> reference_, teacher_;
  Tensor masters_, gradients_, first_moment_, second_moment_;  // float32, in the adapter's layout
  AdapterTensors adapter_gradients_;
  NetworkTensors frozen_;
  int64_t steps_ = 0;
};

}  // namespace

std::unique_ptr<TrainingBackend> make_torch_adapter_training(TrainingWeights weights,
                                                             const TrainerTable& table,
                                                             torch::Device device,
                                                             torch::ScalarType compute) {
  const ModelConfig& config = weights.policy.config();
  if (device.is_cuda() && !has_training_kernels(config, device, compute)) {
    throw Error(
        "[model.lora] on cuda: adapters are trained in bf16, over models whose sizes are multiples "
        "of 8; train on the CPU");
  }
  const int64_t rank = weights.policy.lora()->rank;
  if (device.is_cuda() && rank % 8 != 0) {
    throw Error(fmt::format(
        "model.lora.rank = {}: on cuda it must be a multiple of 8, for products that sampling and "
        "training have in common",
        rank));
  }
  return in_words([&] {
    return std::make_unique<TorchAdapterBackend>(std::move(weights), table, device, compute);
  });
}

}  // namespace leeway
