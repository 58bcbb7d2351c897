#include "torch/torch_training.h"

#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "core/float32/plan.h"
#include "leeway/error.h"
#include "leeway/evaluator.h"
#include "torch/compat.h"
#include "torch/device_room.h"
#include "torch/device_weights.h"
#include "torch/flat_adamw.h"
#include "torch/shard_exchange.h"
#include "torch/split_masters.h"
#include "torch/tensor_head.h"
#include "torch/torch_decoder.h"
#include "torch/torch_errors.h"
#include "torch/torch_moment_shard.h"
#include "torch/training_operations.h"
#include "torch/trunk.h"
#include "trainer/moment_loading.h"
#include "trainer/optimizer.h"
#include "trainer/state_files.h"

#ifdef LEEWAY_CUDA
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace leeway {
namespace {

using torch::Tensor;

// What training needs besides the weights: zeros in their layout.
struct LearningState {
  LearningState(const FlatLayout& layout, FlatRange own, torch::Device device, OptimizerState state)
      : gradients(at::zeros({layout.size}, at::TensorOptions(device).dtype(at::kFloat))),
        moments(make_moments(layout, device, state, own)) {}
  Tensor gradients;
  FlatMoments moments;
};

// A policy on the device: the trunk where there are kernels for it, else the decoder and autograd.
// Where it trains, the first has split masters, the second float32 leaves.
struct Network {
  // `exchange`: that of the rank whose part of the masters has a lower half; null: all have.
  Network(const Parameters& weights, torch::Device device, torch::ScalarType compute, bool trains,
          const ShardExchange* exchange = nullptr)
      : Network(weights, device, compute, trains,
                has_training_kernels(weights.config(), device, compute)) {
    own = exchange != nullptr ? decoder.layout().part_of(exchange->rank(), exchange->size())
                              : decoder.layout().part_of(0, 1);
    if (!trains || !trunk) return;
    low = at::zeros({own.count}, decoder.flat_weights().options().dtype(at::kShort));
    copy_from(weights);
  }

  // As float32 on the host; what passes read follows.
  void copy_to(Parameters& host) const {
    if (!low.defined()) return decoder.copy_to(host);
    copy_to_host(decoder.layout(), masters(), host);
  }
  void copy_from(const Parameters& host) {
    if (!low.defined() || own.count < decoder.layout().size) decoder.copy_from(host);
    if (low.defined()) copy_to_flat(decoder.layout(), host, masters(), own.begin);
  }
  // Of what passes read.
  Tensor weights_copy() const { return decoder.flat_weights().detach().clone(); }
  // A float32 copy on the device.
  Tensor copy() const {
    return low.defined() ? joined(masters()) : decoder.flat_parameters().detach().clone();
  }

  // Without a gradient.
  Tensor forward(const Tensor& tokens, std::span<const int64_t> cu_seqlens) const {
    const at::NoGradGuard guard;
    return trunk ? trunk->forward(tokens, cu_seqlens) : decoder.forward(tokens, cu_seqlens, false);
  }

  cuda::Products* products() const { return trunk ? trunk->products() : nullptr; }

  TorchDecoder decoder;
  std::optional<Trunk> trunk;  // views of the decoder's weights
  Tensor low;                  // of the masters whose other half those are; may be undefined
  FlatRange own;               // what `low` is for

  SplitMasters masters() const {
    return {decoder.flat_weights().narrow(0, own.begin, own.count), low};
  }

 private:
  Network(const Parameters& weights, torch::Device device, torch::ScalarType compute, bool trains,
          bool has_trunk)
      : decoder(weights, device, compute, trains && !has_trunk) {
    if (!has_trunk) return;
    trunk.emplace(weights.config(), network_views(decoder.layout(), decoder.flat_weights()),
                  decoder.rope_table());
  }
};

// A forward pass that can be gone back: by the trunk's record, or by the graph of `hidden`.
struct RecordedPass {
  Tensor hidden;
  TrunkRecord record;
};

// While it lives, the calling thread's work is queued beside that of the thread that trains.
struct OtherStream {
  explicit OtherStream([[maybe_unused]] torch::Device device) {
#ifdef LEEWAY_CUDA
    guard.reset_stream(c10::cuda::getStreamFromPool(/*isHighPriority=*/false, device.index()));
  }
  c10::cuda::OptionalCUDAStreamGuard guard;
#else
  }
#endif
};

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

template <class Work>
auto in_words(Work&& work) {
  return with_plain_errors(std::forward<Work>(work),
                           "; lower trainer.max_tokens or rollout.kv_bytes, or set "
                           "trainer.recompute_activations or trainer.optimizer_state");
}

class TorchTrainingBackend : public TrainingBackend, public RankShare {
 public:
  // `exchange`: null for a trainer that is alone.
  TorchTrainingBackend(TrainingWeights weights, const TrainerTable& table, torch::Device device,
                       torch::ScalarType compute, std::unique_ptr<ShardExchange> exchange = nullptr)
      : device_(device),
        exchange_(std::move(exchange)),
        recompute_(table.recompute_activations),
        optimizer_state_(table.optimizer_state),
        pool_(device.is_cpu() ? static_cast<int>(table.threads) : 1),
        evaluator_(1),
        host_(std::move(weights.policy)),
        policy_(host_, device, compute, true, exchange_.get()) {
    if (exchange_) {
      shard_.emplace(policy_.decoder.layout(), exchange_->rank(), exchange_->size(),
                     [this]() -> const FlatMoments& { return learning().moments; });
    }
    if (weights.reference) reference_.emplace(*weights.reference, device, compute, false);
    if (weights.teacher) teacher_.emplace(*weights.teacher, device, compute, false);
  }

  const Parameters& parameters() override {
    if (!host_is_current_) {
      in_words([&] {
        if (!is_split()) return policy_.copy_to(host_);
        collect([&](int64_t begin, const Tensor& numbers) {
          copy_part_to_host(policy_.decoder.layout(), begin, numbers, host_);
        });
      });
    }
    host_is_current_ = true;
    return host_;
  }
  std::shared_ptr<const PolicySnapshot> snapshot(PolicyVersion version) override {
    return in_words([&] {
      // A rank whose part of the masters is not all of them gives what passes read to its sampler.
      const bool leads = !is_split() || exchange_->rank() == 0;
      if (leads && (!has_room_for_copy() || (is_split() && host_is_current_))) {
        return std::make_shared<const PolicySnapshot>(Parameters(parameters()), version);
      }
      return std::make_shared<const PolicySnapshot>(
          config(),
          std::make_unique<TorchDeviceWeights>(policy_.decoder.layout(),
                                               leads ? copy() : policy_.weights_copy()),
          version);
    });
  }
  const ModelConfig& config() const override { return host_.config(); }

  void score(PolicyKind policy, const MicroBatch& batch, RowValues& values) override {
    in_words([&] {
      const at::NoGradGuard guard;
      const Network& network = network_of(policy);
      const BatchOnDevice on(batch, device_, false);
      const Tensor hidden = network.forward(on.tokens, batch.cu_seqlens);
      const HeadOnDevice head{on, hidden, network.decoder.head_weight(), network.products()};
      values.logprobs = floats_of(fetch({head_logprobs(pool_, head).logprobs}));
      values.entropy.clear();
    });
  }

  double loss_pass(const MicroBatch& batch, const LossPass& pass, MetricSums& metrics,
                   RowValues& values) override {
    return in_words([&] {
      const bool is_on_device = pass.entropy_gradient == 0.0 && has_complete_plan(*pass.spec);
      const BatchOnDevice on(batch, device_, is_on_device);
      RecordedPass forward = forward_of(on);
      const HeadOnDevice head = head_of(on, forward);
      return is_on_device ? loss_on_device(head, std::move(forward), pass, metrics, values)
                          : loss_on_host(head, std::move(forward), pass, metrics, values);
    });
  }

  void gradient_pass(const MicroBatch& batch, std::span<const float> g, double entropy_gradient,
                     RowValues& values) override {
    in_words([&] {
      const BatchOnDevice on(batch, device_, false);
      RecordedPass forward = forward_of(on);
      const HeadOnDevice head = head_of(on, forward);
      const HeadValues found = head_logprobs(pool_, head);
      const bool are_new = begin_gradients();
      backward(std::move(forward),
               head_backward(pool_, head, g, batch.entropy_gradients(entropy_gradient),
                             gradients_->head, are_new),
               are_new);
      set_values(fetch({found.logprobs, found.entropy}), values);
    });
  }

  // Ranks add their slots up in place and sum over ranks when the step needs it.
  int64_t slots() const override { return exchange_ ? exchange_->size() : 1; }
  void end_slot(bool) override {}
  void end_pass() override {}

  double gradient_norm() override {
    return in_words([&] {
      sum_gradients();
      const double own = norm_of(own_part(learning().gradients));
      return exchange_ ? exchange_->norm(own) : own;
    });
  }

  // The next pass overwrites them.
  void zero_gradients() override { gradients_are_old_ = true, gradients_are_summed_ = false; }

  void step(const OptimizerTable& table, double rate, double scale) override {
    in_words([&] {
      const at::NoGradGuard guard;
      sum_gradients();
      ++steps_;
      FlatAdamW step;
      const Tensor &weights = policy_.decoder.flat_weights(),
                   &leaves = policy_.decoder.flat_parameters();
      if (policy_.low.defined()) {
        step.copy = own_part(weights), step.low = policy_.low;
      } else {
        step.parameters = own_part(leaves);
        if (!weights.is_same(leaves)) step.copy = own_part(weights);
      }
      step.gradients = own_part(learning().gradients);
      step.moments = learning().moments;
      step.decaying = std::clamp<int64_t>(policy_.decoder.layout().decaying - policy_.own.begin, 0,
                                          policy_.own.count);
      adamw_step(step, table, steps_, rate, scale);
      host_is_current_ = false;
      if (!exchange_) return;
      exchange_->hand_out(weights);
      if (!weights.is_same(leaves)) exchange_->hand_out(leaves);
    });
  }
  int64_t steps() const override { return steps_; }

  TrainingState state() override {
    TrainingState state{parameters(), AdamW(config())};
    if (exchange_) {
      collect_moments(exchange_->ranks(), *shard_, &state.optimizer);
    } else {
      copy_to_host(policy_.decoder.layout(), learning().moments, state.optimizer);
    }
    state.optimizer.set_steps(steps_);
    return state;
  }

  std::function<TrainingState()> state_later() override {
    if (exchange_ || !device_.is_cuda() || !has_room_for_copy(learning().moments.bytes())) {
      return TrainingBackend::state_later();
    }
    struct Copies {
      std::shared_ptr<const PolicySnapshot> policy;
      FlatMoments moments;
    };
    std::shared_ptr<Copies> copies;
    try {
      const at::NoGradGuard guard;
      copies = std::make_shared<Copies>(Copies{nullptr, learning().moments.clone()});
      copies->policy = snapshot(0);    // waits for the device, so that any stream may read
    } catch (const std::exception&) {  // no room for a second copy there
      return TrainingBackend::state_later();
    }
    return [this, copies, steps = steps_]() mutable {
      return in_words([&] {
        const OtherStream beside(device_);
        TrainingState state{Parameters(config()), AdamW(config())};
        copies->policy->device()->copy_to(state.policy);
        copy_to_host(policy_.decoder.layout(), copies->moments, state.optimizer);
        state.optimizer.set_steps(steps);
        copies.reset();
        return state;
      });
    };
  }

  void load(const std::string& folder) override {
    if (exchange_) {
      const auto steps = load_sharded(exchange_->ranks(), folder, *shard_, host_);
      if (!steps) return;
      steps_ = *steps;
      policy_.copy_from(host_);
      host_is_current_ = true;
      return;
    }
    AdamW state(config());
    load_state(folder, host_, state);
    policy_.copy_from(host_);
    host_is_current_ = true;
    copy_to_flat(policy_.decoder.layout(), state, learning().moments);
    steps_ = state.steps();
  }

  double take_seconds() override { return exchange_->take_seconds(); }
  MomentShard& moments() override { return *shard_; }
  bool needs_weights() const override { return is_split() && !host_is_current_; }
  void bring_weights() override {
    in_words([&] { collect({}); });
  }

 private:
  // Whether other ranks have a part of the masters.
  bool is_split() const { return exchange_ && policy_.low.defined(); }
  Tensor own_part(const Tensor& flat) const {
    return flat.narrow(0, policy_.own.begin, policy_.own.count);
  }
  void collect(const std::function<void(int64_t, const Tensor&)>& each) {
    exchange_->collect(policy_.decoder.layout(), policy_.decoder.flat_weights(), policy_.low, each);
  }
  // Of the weights, in float32.
  Tensor copy() {
    if (!is_split()) return policy_.copy();
    const Tensor full =
        at::zeros({policy_.decoder.layout().size}, at::TensorOptions(device_).dtype(at::kFloat));
    collect([&](int64_t begin, const Tensor& numbers) {
      full.narrow(0, begin, numbers.numel()).copy_(numbers);
    });
    return full;
  }
  // The own part of the gradients becomes that of all ranks.
  void sum_gradients() {
    fill_old_gradients();
    if (exchange_ && !std::exchange(gradients_are_summed_, true))
      exchange_->sum(learning().gradients);
  }

  // Whether the device has room for another copy of the weights, and `more`, also while passes are
  // at their largest.
  bool has_room_for_copy(int64_t more = 0) const {
    return spare_bytes(device_) >= 4 * policy_.decoder.layout().size + more;
  }

  const Network& network_of(PolicyKind policy) const {
    if (policy == PolicyKind::current) return policy_;
    const auto& other = policy == PolicyKind::reference ? reference_ : teacher_;
    LEEWAY_CHECK(other.has_value(), "a policy that the backend was made with");
    return *other;
  }

  // Created on first use: backends that only score do without it.
  LearningState& learning() {
    if (learning_) return *learning_;
    learning_.emplace(policy_.decoder.layout(), policy_.own, device_, optimizer_state_);
    gradients_ = network_views(policy_.decoder.layout(), learning_->gradients);
    if (policy_.trunk) return *learning_;
    const std::vector<Tensor> leaves =
        parameter_views(policy_.decoder.layout(), learning_->gradients);
    for (size_t i = 0; i < leaves.size(); ++i) {
      Tensor leaf = policy_.decoder.parameters()[i];
      leaf.mutable_grad() = leaves[i];
    }
    return *learning_;
  }

  void fill_old_gradients() {
    if (std::exchange(gradients_are_old_, false)) learning().gradients.zero_();
  }
  // Before a backward pass. Returns whether it writes the gradients of matrices instead of adding
  // to them; the others are zero then.
  bool begin_gradients() {
    const Tensor& flat = learning().gradients;
    if (!gradients_are_old_ || !policy_.trunk) {
      fill_old_gradients();
      return false;
    }
    gradients_are_old_ = false;
    const int64_t decaying = policy_.decoder.layout().decaying;
    flat.narrow(0, decaying, flat.numel() - decaying).zero_();
    if (!config().tie_word_embeddings) gradients_->embedding.zero_();
    return true;
  }

  RecordedPass forward_of(const BatchOnDevice& on) const {
    RecordedPass pass;
    const std::vector<int64_t>& cu_seqlens = on.batch.cu_seqlens;
    pass.hidden =
        policy_.trunk
            ? policy_.trunk->forward(on.tokens, cu_seqlens, recompute_, &pass.record)
            : policy_.decoder.forward(on.tokens, cu_seqlens, recompute_ != Recompute::off);
    return pass;
  }

  void backward(RecordedPass&& pass, const Tensor& d_hidden, bool are_new) const {
    if (policy_.trunk) {
      policy_.trunk->backward(std::move(pass.record), d_hidden, *gradients_, are_new);
    } else {
      torch::autograd::backward({pass.hidden}, {d_hidden});
    }
  }

  HeadOnDevice head_of(const BatchOnDevice& on, const RecordedPass& pass) const {
    return {on, pass.hidden.detach(), policy_.decoder.head_weight().detach(), policy_.products()};
  }

  double loss_on_device(const HeadOnDevice& head, RecordedPass&& forward, const LossPass& pass,
                        MetricSums& metrics, RowValues& values) {
    const bool are_new = begin_gradients();
    const HeadLoss found = head_loss(pool_, head, *pass.spec, pass.prox_is_pi, pass.denominator,
                                     gradients_->head, are_new);
    backward(std::move(forward), found.d_hidden, are_new);
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

  // The loss in between is computed on the host, where corrections that are functions run: its
  // gradient and that of the entropy go back together.
  double loss_on_host(const HeadOnDevice& head, RecordedPass&& forward, const LossPass& pass,
                      MetricSums& metrics, RowValues& values) {
    const MicroBatch& batch = head.on.batch;
    const HeadValues found = head_logprobs(pool_, head);
    set_values(fetch({found.logprobs, found.entropy}), values);
    std::vector<float> g(values.logprobs.size());
    values.kept.resize(values.logprobs.size());
    const double loss =
        evaluator_.evaluate(*pass.spec, batch.view(values.logprobs, pass.prox_is_pi), g,
                            pass.denominator, &metrics, values.kept);
    const bool are_new = begin_gradients();
    backward(std::move(forward),
             head_backward(pool_, head, g, batch.entropy_gradients(pass.entropy_gradient),
                           gradients_->head, are_new),
             are_new);
    return loss;
  }

  // Log-probabilities, then entropies.
  static void set_values(std::span<const double> numbers, RowValues& values) {
    values.logprobs = floats_of(numbers.first(numbers.size() / 2));
    values.entropy = floats_of(numbers.subspan(numbers.size() / 2));
  }

  torch::Device device_;
  std::unique_ptr<ShardExchange> exchange_;  // of a rank among others; else null
  Recompute recompute_;
  OptimizerState optimizer_state_;
  ThreadPool pool_;
  Evaluator evaluator_;
  Parameters host_;  // older than the device's weights after a step, until requested
  bool host_is_current_ = true;
  Network policy_;
  std::optional<Network> reference_, teacher_;
  std::optional<LearningState> learning_;
  std::optional<NetworkTensors> gradients_;  // views of the learning state's
  bool gradients_are_old_ = true;            // to be taken for zeros
  bool gradients_are_summed_ = false;        // over ranks
  std::optional<TorchMomentShard> shard_;    // of a rank among others
  int64_t steps_ = 0;
};

}  // namespace

std::unique_ptr<TrainingBackend> make_torch_training(TrainingWeights weights,
                                                     const TrainerTable& table,
                                                     torch::Device device,
                                                     torch::ScalarType compute) {
  return in_words([&] {
    return std::make_unique<TorchTrainingBackend>(std::move(weights), table, device, compute);
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
