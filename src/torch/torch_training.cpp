#include "torch/torch_training.h"

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
#include "torch/early_sums.h"
#include "torch/flat_adamw.h"
#include "torch/part_stream.h"
#include "torch/policy_network.h"
#include "torch/shard_exchange.h"
#include "torch/tensor_head.h"
#include "torch/torch_errors.h"
#include "torch/torch_state_shard.h"
#include "trainer/optimizer.h"
#include "trainer/state_files.h"
#include "trainer/state_loading.h"

#ifdef LEEWAY_CUDA
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace leeway {
namespace {

using torch::Tensor;

// Of the device's multiprocessors, while a sampler computes on it too: decode steps read memory,
// for which the others suffice.
constexpr double kShareBesideSampler = 0.7;

// What training needs besides the weights: zeros in their layout.
struct LearningState {
  LearningState(const PolicyNetwork& policy, torch::Device device, OptimizerState state)
      : gradients(at::zeros({policy.sharded() ? policy.own().count : policy.layout().size},
                            at::TensorOptions(device).dtype(at::kFloat))),
        moments(make_moments(policy.layout(), device, state, policy.own())) {}
  Tensor gradients;  // of all weights, or of the own part of those that are in parts
  FlatMoments moments;
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
                       torch::ScalarType compute, std::unique_ptr<ShardExchange> exchange = nullptr)
      : device_(device),
        exchange_(std::move(exchange)),
        sharding_(exchange_ ? table.sharding : Sharding::optimizer),
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

  const Parameters& parameters() override {
    if (!host_is_current_) {
      in_words(stream_, [&] {
        if (!has_part()) return policy_.copy_to(host_);
        collect([&](int64_t begin, const Tensor& numbers) {
          copy_part_to_host(policy_.layout(), begin, numbers, host_);
        });
      });
    }
    host_is_current_ = true;
    return host_;
  }
  std::shared_ptr<const PolicySnapshot> snapshot(PolicyVersion version) override {
    return in_words(stream_, [&] {
      // A rank whose part of the masters is not all of them gives what passes read to its sampler.
      if (has_part() && exchange_->rank() != 0) return on_device(copy_of_read(), version);
      SnapshotForm form =
          snapshot_form(spare_bytes(device_), policy_.layout().size, !last_snapshot_.expired());
      const bool has_halves = !exchange_ && policy_.low().defined();
      if (has_part() && host_is_current_) form = SnapshotForm::on_host;
      if (form == SnapshotForm::rounded && has_halves) return on_device(copy_of_read(), version);
      if (form != SnapshotForm::full) {
        return std::make_shared<const PolicySnapshot>(Parameters(parameters()), version);
      }
      auto snapshot = on_device(copy(), version);
      last_snapshot_ = snapshot;
      return snapshot;
    });
  }
  const ModelConfig& config() const override { return host_.config(); }

  void score(PolicyKind policy, const MicroBatch& batch, RowValues& values) override {
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

  double loss_pass(const MicroBatch& batch, const LossPass& pass, MetricSums& metrics,
                   RowValues& values) override {
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

  void gradient_pass(const MicroBatch& batch, std::span<const float> g, double entropy_gradient,
                     RowValues& values) override {
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

  // Ranks add their slots up in place and sum over ranks when the step needs it.
  int64_t slots() const override { return exchange_ ? exchange_->size() : 1; }
  void end_slot(bool) override {}
  void end_pass() override {}

  double gradient_norm() override {
    return in_words(stream_, [&] {
      sum_gradients();
      const double own = norm_of(own_part(learning().gradients));
      return exchange_ ? exchange_->norm(own) : own;
    });
  }

  // The next pass overwrites them.
  void zero_gradients() override { gradients_are_old_ = true, gradients_are_summed_ = false; }

  void step(const OptimizerTable& table, double rate, double scale) override {
    in_words(stream_, [&] {
      const at::NoGradGuard guard;
      sum_gradients();
      ++steps_;
      FlatAdamW step = own_state();
      step.gradients = own_part(learning().gradients);
      adamw_step(step, table, steps_, rate, scale);
      host_is_current_ = false;
      if (exchange_) return hand_out();
      wait();  // what comes next would, and its time is not theirs
    });
  }
  int64_t steps() const override { return steps_; }

  void leave_room(bool leaves) override {
    if (exchange_ || leaves == leaves_room_) return;
    leaves_room_ = leaves;
    in_words(stream_, [&] { settle(device_); });
    stream_ = leaves ? PartStream(device_, kShareBesideSampler) : PartStream();
    for (const PolicyNetwork* network : networks()) network->change_stream();
  }

  TrainingState state() override {
    TrainingState state{parameters(), AdamW(host_)};
    in_words(stream_, [&] {
      if (exchange_) return collect_moments(exchange_->ranks(), *shard_, &state.optimizer);
      copy_to_host(policy_.layout(), learning().moments, state.optimizer);
    });
    state.optimizer.set_steps(steps_);
    return state;
  }

  std::function<TrainingState()> state_later() override {
    if (exchange_ || !device_.is_cuda() ||
        spare_bytes(device_) < 4 * policy_.layout().size + learning().moments.bytes()) {
      return TrainingBackend::state_later();
    }
    struct Copies {
      std::shared_ptr<const PolicySnapshot> policy;
      FlatMoments moments;
    };
    std::shared_ptr<Copies> copies;
    try {
      const PartStream::Scope scope(stream_);
      const at::NoGradGuard guard;
      copies = std::make_shared<Copies>(Copies{nullptr, learning().moments.clone()});
      copies->policy = on_device(copy(), 0);  // waits for the device, so that any stream may read
    } catch (const std::exception&) {         // no room for a second copy there
      return TrainingBackend::state_later();
    }
    return [this, copies, steps = steps_]() mutable {
      return in_words([&] {
        const OtherStream beside(device_);
        Parameters policy = copies->policy->device()->make_host(config());
        copies->policy->device()->copy_to(policy);
        AdamW optimizer(policy);
        TrainingState state{std::move(policy), std::move(optimizer)};
        copy_to_host(policy_.layout(), copies->moments, state.optimizer);
        state.optimizer.set_steps(steps);
        copies.reset();
        return state;
      });
    };
  }

  void load(const std::string& folder) override {
    if (exchange_) {
      in_words(stream_, [&] {
        const auto steps = load_sharded(exchange_->ranks(), folder, *shard_);
        if (!steps) return;
        steps_ = *steps;
        host_is_current_ = false;
        hand_out();
      });
      return;
    }
    AdamW state(host_);
    load_state(folder, host_, state);
    in_words(stream_, [&] {
      policy_.copy_from(host_);
      copy_to_flat(policy_.layout(), state, learning().moments);
    });
    host_is_current_ = true;
    steps_ = state.steps();
  }

  double take_seconds() override { return exchange_->take_seconds(); }
  StateShard& shard() override { return *shard_; }
  bool needs_weights() const override { return has_part() && !host_is_current_; }
  void bring_weights() override {
    in_words(stream_, [&] { collect({}); });
  }
  void begin_passes(const SlotPass& pass, int64_t own, int64_t most) override {
    order_ = pass, own_left_ = own, most_left_ = most;
    // Memory that is not there is missed before the others count on this rank's passes.
    if (is_sharded() && pass.kind != PassKind::score) in_words(stream_, [&] { learning(); });
    if (sums_early()) in_words(stream_, [&] { early_sums().begin(); });
  }
  void end_passes() override {
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
  void bring_snapshot() override {
    if (is_sharded())
      in_words(stream_, [&] { policy_.sharded()->read_all([](int64_t, const Tensor&) {}); });
  }

 private:
  bool is_sharded() const { return sharding_ == Sharding::weights; }
  RankPlace place() const {
    if (!exchange_) return {};
    return {exchange_->rank(), exchange_->size(), is_sharded() ? &exchange_->group() : nullptr};
  }
  // Whether other ranks have a part of the masters.
  bool has_part() const { return exchange_ && (policy_.low().defined() || is_sharded()); }
  Tensor own_part(const Tensor& flat) const {
    return is_sharded() ? flat : flat.narrow(0, policy_.own().begin, policy_.own().count);
  }
  // Weights and moments of the own part.
  FlatAdamW own_state() {
    FlatAdamW own = policy_.weights_to_step();
    own.moments = learning().moments;
    return own;
  }
  // The own part of the weights goes to all ranks; of weights in parts, what all have whole.
  void hand_out() {
    if (ShardedWeights* const sharded = policy_.sharded()) {
      sharded->weights_changed();
      exchange_->timed(policy_.high(), [&] { sharded->hand_out_rest(); });
    }
    for (const Tensor& weights : policy_.weights_to_hand_out()) exchange_->hand_out(weights);
  }

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
  bool sums_early() const {
    return exchange_ && !is_sharded() && !policy_.layout().lora && order_.ends_step;
  }
  EarlySums& early_sums() {
    const Tensor& gradients = learning().gradients;
    if (!early_sums_) early_sums_.emplace(policy_.layout(), gradients, exchange_->group());
    return *early_sums_;
  }
  // Of the pass that is the rank's last; else null.
  PassPieces* sums_of_pass() { return sums_early() && own_left_ == 0 ? &early_sums() : nullptr; }

  void collect(const std::function<void(int64_t, const Tensor&)>& each) {
    exchange_->collect(policy_.layout(), policy_.high(), policy_.low(), each);
  }
  // From rank 0's host to all ranks, of which each takes its part.
  void spread(const Parameters& host, PolicyNetwork& network) {
    exchange_->spread(network.layout(), host, device_,
                      [&](int64_t at, const Tensor& numbers) { network.copy_from(at, numbers); });
    network.sharded()->weights_changed();
    network.sharded()->hand_out_rest();
  }
  // Of the weights, in float32.
  Tensor copy() {
    if (!has_part()) return policy_.copy();
    const Tensor full =
        at::zeros({policy_.layout().size}, at::TensorOptions(device_).dtype(at::kFloat));
    collect([&](int64_t begin, const Tensor& numbers) {
      full.narrow(0, begin, numbers.numel()).copy_(numbers);
    });
    return full;
  }
  std::shared_ptr<const PolicySnapshot> on_device(const Tensor& weights, PolicyVersion version) {
    return std::make_shared<const PolicySnapshot>(
        config(), std::make_unique<TorchDeviceWeights>(policy_.layout(), weights, host_.base()),
        version);
  }
  // Of what passes read, whole.
  Tensor copy_of_read() {
    if (!is_sharded()) return policy_.high().detach().clone();
    const Tensor whole = at::zeros({policy_.layout().size}, policy_.high().options());
    policy_.sharded()->read_all([&](int64_t begin, const Tensor& numbers) {
      whole.narrow(0, begin, numbers.numel()).copy_(numbers);
    });
    return whole;
  }
  // The own part of the gradients becomes that of all ranks.
  void sum_gradients() {
    fill_old_gradients();
    if (!exchange_ || std::exchange(gradients_are_summed_, true)) return;
    const Tensor& gradients = learning().gradients;
    if (!is_sharded()) return exchange_->sum(gradients);
    exchange_->timed(gradients, [&] { policy_.sharded()->sum_rest(); });
  }

  void wait() const {
#ifdef LEEWAY_CUDA
    if (device_.is_cuda()) c10::cuda::getCurrentCUDAStream(device_.index()).synchronize();
#endif
  }

  std::vector<const PolicyNetwork*> networks() const {
    std::vector<const PolicyNetwork*> all = {&policy_};
    if (reference_) all.push_back(&*reference_);
    if (teacher_) all.push_back(&*teacher_);
    return all;
  }
  const PolicyNetwork& network_of(PolicyKind policy) const {
    if (policy == PolicyKind::current) return policy_;
    const auto& other = policy == PolicyKind::reference ? reference_ : teacher_;
    LEEWAY_CHECK(other.has_value(), "a policy that the backend was made with");
    return *other;
  }

  // Created on first use: backends that only score do without it.
  LearningState& learning() {
    if (learning_) return *learning_;
    learning_.emplace(policy_, device_, optimizer_state_);
    gradients_ = policy_.use_gradients(learning_->gradients);
    return *learning_;
  }

  void fill_old_gradients() {
    if (!std::exchange(gradients_are_old_, false)) return;
    // Sums of a step that failed may still be on their way.
    if (is_sharded()) policy_.sharded()->wait_for_sums();
    learning().gradients.zero_();
    if (is_sharded()) policy_.sharded()->rest_gradients().zero_();
  }
  // Before a backward pass. Returns whether it writes the gradients of matrices instead of adding
  // to them; the others are zero then.
  bool begin_gradients() {
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

  HeadOnDevice head_of(const BatchOnDevice& on, const RecordedPass& pass) const {
    return {on, pass.hidden.detach(), policy_.head_weight(true), policy_.products()};
  }

  double loss_on_device(const HeadOnDevice& head, RecordedPass&& forward, const LossPass& pass,
                        MetricSums& metrics, RowValues& values) {
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
    policy_.backward(std::move(forward),
                     head_backward(pool_, head, g, batch.entropy_gradients(pass.entropy_gradient),
                                   gradients_->network.head, are_new),
                     *gradients_, are_new, sums_of_pass());
    return loss;
  }

  // Log-probabilities, then entropies.
  static void set_values(std::span<const double> numbers, RowValues& values) {
    values.logprobs = floats_of(numbers.first(numbers.size() / 2));
    values.entropy = floats_of(numbers.subspan(numbers.size() / 2));
  }

  torch::Device device_;
  PartStream stream_;  // of all the backend's work
  bool leaves_room_ = false;
  std::unique_ptr<ShardExchange> exchange_;  // of a rank among others; else null
  Sharding sharding_;                        // of a rank among others
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
