#include "torch/torch_training.h"

#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "leeway/error.h"
#include "leeway/evaluator.h"
#include "torch/compat.h"
#include "torch/device_weights.h"
#include "torch/tensor_head.h"
#include "torch/torch_decoder.h"
#include "torch/torch_errors.h"
#include "trainer/optimizer.h"
#include "trainer/state_files.h"

#ifdef LEEWAY_CUDA
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace leeway {
namespace {

using torch::Tensor;

constexpr int64_t kAlignment = 64;               // numbers; vector loads want more than one
constexpr int64_t kNormPart = int64_t{1} << 24;  // numbers turned to float64 at a time

// Zeros in the shapes of all parameters, in one piece.
struct FlatTensors {
  FlatTensors(const std::vector<ParameterInfo>& table, torch::Device device) {
    const auto padded = [](const ParameterInfo& info) {
      return (info.size() + kAlignment - 1) / kAlignment * kAlignment;
    };
    int64_t end = 0;
    for (const ParameterInfo& info : table) end += padded(info);
    flat = at::zeros({end}, at::TensorOptions(device).dtype(at::kFloat));
    int64_t first = 0;
    for (const ParameterInfo& info : table) {
      parts.push_back(flat.narrow(0, first, info.size()).view(info.shape));
      first += padded(info);
    }
  }

  void copy_to(Parameters& host) const {
    for (size_t i = 0; i < parts.size(); ++i) view_of(host, i).copy_(parts[i]);
  }
  void copy_from(Parameters& host) {
    for (size_t i = 0; i < parts.size(); ++i) parts[i].copy_(view_of(host, i));
  }

  Tensor flat;
  std::vector<Tensor> parts;

 private:
  static Tensor view_of(Parameters& host, size_t i) {
    return at::from_blob(host.of(i).data(), host.table()[i].shape, at::kFloat);
  }
};

// What training needs besides the weights.
struct LearningState {
  LearningState(const std::vector<ParameterInfo>& table, torch::Device device)
      : gradients(table, device), first_moment(table, device), second_moment(table, device) {}
  FlatTensors gradients;  // those of the decoder's leaves
  FlatTensors first_moment, second_moment;
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

bool decays(const ParameterInfo& info) {
  return info.role != ParameterInfo::Role::norm && info.role != ParameterInfo::Role::bias;
}

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
                           "trainer.recompute_activations");
}

class TorchTrainingBackend : public TrainingBackend {
 public:
  TorchTrainingBackend(TrainingWeights weights, const TrainerTable& table, torch::Device device,
                       torch::ScalarType compute)
      : device_(device),
        recompute_(table.recompute_activations),
        pool_(device.is_cpu() ? static_cast<int>(table.threads) : 1),
        evaluator_(1),
        host_(std::move(weights.policy)),
        decoder_(host_, device, compute) {
    if (weights.reference) reference_.emplace(*weights.reference, device, compute, false);
    if (weights.teacher) teacher_.emplace(*weights.teacher, device, compute, false);
  }

  const Parameters& parameters() override {
    if (!host_is_current_) decoder_.copy_to(host_);
    host_is_current_ = true;
    return host_;
  }
  std::shared_ptr<const PolicySnapshot> snapshot(PolicyVersion version) override {
    return in_words([&] {
      return std::make_shared<const PolicySnapshot>(
          config(), std::make_unique<TorchDeviceWeights>(host_.table(), decoder_.parameters()),
          version);
    });
  }
  const ModelConfig& config() const override { return host_.config(); }

  void score(PolicyKind policy, const MicroBatch& batch, RowValues& values) override {
    in_words([&] {
      const at::NoGradGuard guard;
      const TorchDecoder& decoder = decoder_of(policy);
      const BatchOnDevice on(batch, device_, false);
      const Tensor hidden = decoder.forward(on.tokens, batch.cu_seqlens, false);
      values.logprobs =
          floats_of(fetch({head_logprobs(pool_, {on, hidden, decoder.head_weight()}).logprobs}));
      values.entropy.clear();
    });
  }

  double loss_pass(const MicroBatch& batch, const LossPass& pass, MetricSums& metrics,
                   RowValues& values) override {
    return in_words([&] {
      const BatchOnDevice on(batch, device_, pass.entropy_gradient == 0.0);
      const Tensor hidden = decoder_.forward(on.tokens, batch.cu_seqlens, recompute_);
      const HeadOnDevice head = head_of(on, hidden);
      return pass.entropy_gradient == 0.0 ? loss_on_device(head, hidden, pass, metrics, values)
                                          : loss_on_host(head, hidden, pass, metrics, values);
    });
  }

  void gradient_pass(const MicroBatch& batch, std::span<const float> g, double entropy_gradient,
                     RowValues& values) override {
    in_words([&] {
      const BatchOnDevice on(batch, device_, false);
      const Tensor hidden = decoder_.forward(on.tokens, batch.cu_seqlens, recompute_);
      const HeadOnDevice head = head_of(on, hidden);
      const HeadValues found = head_logprobs(pool_, head);
      backward(hidden,
               head_backward(pool_, head, g, batch.entropy_gradients(entropy_gradient), d_head()));
      set_values(fetch({found.logprobs, found.entropy}), values);
    });
  }

  double gradient_norm() override {
    return in_words([&] {
      std::vector<Tensor> parts;
      for (const Tensor& part : learning().gradients.flat.split(kNormPart)) {
        parts.push_back(part.to(at::kDouble).square().sum());
      }
      return std::sqrt(at::stack(parts).sum().item<double>());
    });
  }

  void zero_gradients() override { learning().gradients.flat.zero_(); }

  void step(const OptimizerTable& table, double rate, double scale) override {
    in_words([&] {
      const at::NoGradGuard guard;
      ++steps_;
      if (scale != 1.0) learning().gradients.flat.mul_(scale);
      for (const bool matrices : {true, false}) {
        const OptimizedTensors tensors = tensors_of(matrices);
        const double weight_decay = matrices ? table.weight_decay : 0.0;
        if (has_fused_adamw(device_)) {
          fused_adamw(tensors, steps_, rate, table.beta1, table.beta2, weight_decay, table.epsilon);
        } else {
          plain_adamw(tensors, table, rate, weight_decay);
        }
      }
      decoder_.weights_changed();
      host_is_current_ = false;
    });
  }
  int64_t steps() const override { return steps_; }

  TrainingState state() override {
    TrainingState state{parameters(), AdamW(config())};
    learning().first_moment.copy_to(state.optimizer.first_moment());
    learning().second_moment.copy_to(state.optimizer.second_moment());
    state.optimizer.set_steps(steps_);
    return state;
  }

  std::function<TrainingState()> state_later() override {
    if (!device_.is_cuda()) return TrainingBackend::state_later();
    struct Copies {
      std::shared_ptr<const PolicySnapshot> policy;
      FlatTensors first_moment, second_moment;
    };
    std::shared_ptr<Copies> copies;
    try {
      const at::NoGradGuard guard;
      const auto copy_of = [&](const FlatTensors& from) {
        FlatTensors copy(host_.table(), device_);
        copy.flat.copy_(from.flat);
        return copy;
      };
      copies = std::make_shared<Copies>(
          Copies{nullptr, copy_of(learning().first_moment), copy_of(learning().second_moment)});
      copies->policy = snapshot(0);    // waits for the device, so that any stream may read
    } catch (const std::exception&) {  // no room for a second copy there
      return TrainingBackend::state_later();
    }
    return [this, copies, steps = steps_]() mutable {
      return in_words([&] {
        const OtherStream beside(device_);
        TrainingState state{Parameters(config()), AdamW(config())};
        copies->policy->device()->copy_to(state.policy);
        copies->first_moment.copy_to(state.optimizer.first_moment());
        copies->second_moment.copy_to(state.optimizer.second_moment());
        state.optimizer.set_steps(steps);
        copies.reset();
        return state;
      });
    };
  }

  void load(const std::string& folder) override {
    AdamW state(config());
    load_state(folder, host_, state);
    decoder_.copy_from(host_);
    host_is_current_ = true;
    learning().first_moment.copy_from(state.first_moment());
    learning().second_moment.copy_from(state.second_moment());
    steps_ = state.steps();
  }

 private:
  const TorchDecoder& decoder_of(PolicyKind policy) const {
    if (policy == PolicyKind::current) return decoder_;
    const auto& other = policy == PolicyKind::reference ? reference_ : teacher_;
    LEEWAY_CHECK(other.has_value(), "a policy that the backend was made with");
    return *other;
  }

  // Created on first use: backends that only score do without it.
  LearningState& learning() {
    if (!learning_) {
      learning_.emplace(host_.table(), device_);
      for (size_t i = 0; i < host_.table().size(); ++i) {
        Tensor leaf = decoder_.parameters()[i];
        leaf.mutable_grad() = learning_->gradients.parts[i];
      }
    }
    return *learning_;
  }
  Tensor d_head() {
    learning();
    return decoder_.head_parameter().grad();
  }

  HeadOnDevice head_of(const BatchOnDevice& on, const Tensor& hidden) const {
    return {on, hidden.detach(), decoder_.head_weight().detach()};
  }

  double loss_on_device(const HeadOnDevice& head, const Tensor& hidden, const LossPass& pass,
                        MetricSums& metrics, RowValues& values) {
    const HeadLoss found =
        head_loss(pool_, head, *pass.spec, pass.prox_is_pi, pass.denominator, d_head());
    backward(hidden, found.d_hidden);
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

  // The loss in between is computed on the host: its gradient and that of the entropy go back
  // together.
  double loss_on_host(const HeadOnDevice& head, const Tensor& hidden, const LossPass& pass,
                      MetricSums& metrics, RowValues& values) {
    const MicroBatch& batch = head.on.batch;
    const HeadValues found = head_logprobs(pool_, head);
    set_values(fetch({found.logprobs, found.entropy}), values);
    std::vector<float> g(values.logprobs.size());
    values.kept.resize(values.logprobs.size());
    const double loss =
        evaluator_.evaluate(*pass.spec, batch.view(values.logprobs, pass.prox_is_pi), g,
                            pass.denominator, &metrics, values.kept);
    backward(hidden, head_backward(pool_, head, g, batch.entropy_gradients(pass.entropy_gradient),
                                   d_head()));
    return loss;
  }

  static void backward(const Tensor& hidden, const Tensor& d_hidden) {
    torch::autograd::backward({hidden}, {d_hidden});
  }

  // Log-probabilities, then entropies.
  static void set_values(std::span<const double> numbers, RowValues& values) {
    values.logprobs = floats_of(numbers.first(numbers.size() / 2));
    values.entropy = floats_of(numbers.subspan(numbers.size() / 2));
  }

  OptimizedTensors tensors_of(bool matrices) {
    OptimizedTensors out;
    const LearningState& state = learning();
    for (size_t i = 0; i < host_.table().size(); ++i) {
      if (decays(host_.table()[i]) != matrices) continue;
      out.parameters.push_back(decoder_.parameters()[i]);
      out.gradients.push_back(state.gradients.parts[i]);
      out.first_moments.push_back(state.first_moment.parts[i]);
      out.second_moments.push_back(state.second_moment.parts[i]);
    }
    return out;
  }

  void plain_adamw(const OptimizedTensors& tensors, const OptimizerTable& table, double rate,
                   double weight_decay) const {
    const double n = static_cast<double>(steps_);
    const double step_size = rate / (1.0 - std::pow(table.beta1, n));
    const double root = 1.0 / std::sqrt(1.0 - std::pow(table.beta2, n));
    for (size_t i = 0; i < tensors.parameters.size(); ++i) {
      Tensor p = tensors.parameters[i], m = tensors.first_moments[i], v = tensors.second_moments[i];
      const Tensor& g = tensors.gradients[i];
      m.mul_(table.beta1).add_(g, 1.0 - table.beta1);
      v.mul_(table.beta2).addcmul_(g, g, 1.0 - table.beta2);
      p.mul_(1.0 - rate * weight_decay)
          .addcdiv_(m, v.sqrt().mul_(root).add_(table.epsilon), -step_size);
    }
  }

  torch::Device device_;
  bool recompute_;
  ThreadPool pool_;
  Evaluator evaluator_;
  Parameters host_;  // older than the device's weights after a step, until requested
  bool host_is_current_ = true;
  TorchDecoder decoder_;
  std::optional<TorchDecoder> reference_, teacher_;
  std::optional<LearningState> learning_;
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

}  // namespace leeway
