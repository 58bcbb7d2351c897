#include "trainer/cpu_backend.h"

#include <algorithm>
#include <utility>

#include "core/cpu/policy_head.h"
#include "leeway/error.h"
#include "leeway/evaluator.h"
#include "trainer/gradient_tree.h"
#include "trainer/optimizer.h"
#include "trainer/state_files.h"

namespace leeway {
namespace {

class CpuBackend : public TrainingBackend {
 public:
  CpuBackend(TrainingWeights weights, const TrainerTable& table, const MakeGradientUpdate& update)
      : pool_(static_cast<int>(table.threads)),
        evaluator_(1),
        policy_(std::move(weights.policy)),
        slots_(slots_of(table)),
        tree_(policy_),
        update_(update ? update(policy_) : std::make_unique<WholeUpdate>(policy_)),
        reference_(std::move(weights.reference)),
        teacher_(std::move(weights.teacher)) {
    if (table.numerics == Numerics::fast) require_blas();
    options_.numerics = table.numerics;
    options_.recompute_activations = table.recompute_activations == Recompute::layer;
    options_.recompute_gate_up = table.recompute_activations == Recompute::selective;
  }

  const Parameters& parameters() override { return policy_; }
  std::shared_ptr<const PolicySnapshot> snapshot(PolicyVersion version) override {
    return std::make_shared<const PolicySnapshot>(policy_, version);
  }
  const ModelConfig& config() const override { return policy_.config(); }

  void score(PolicyKind policy, const MicroBatch& batch, RowValues& values) override {
    const Parameters& weights = weights_of(policy);
    decode(weights, batch, nullptr, values);
    values.entropy.clear();
    head_logprobs(pool_, head_of(weights, batch), values.logprobs, {});
  }

  double loss_pass(const MicroBatch& batch, const LossPass& pass, MetricSums& metrics,
                   RowValues& values) override {
    decode(policy_, batch, &activations_, values);
    const HeadProblem problem = head_of(policy_, batch);
    const BatchView<float> view = batch.view(values.logprobs, pass.prox_is_pi);
    values.kept.resize(values.logprobs.size());
    double loss = 0.0;
    if (pass.entropy_gradient == 0.0) {
      const HeadResult head =
          policy_head(pool_, problem, *pass.spec, view, pass.denominator, values.logprobs,
                      values.entropy, d_hidden_of(batch), d_head(), values.kept);
      loss = head.loss;
      metrics.merge(head.metrics);
    } else {
      head_logprobs(pool_, problem, values.logprobs, values.entropy);
      g_.resize(values.logprobs.size());
      loss = evaluator_.evaluate(*pass.spec, view, g_, pass.denominator, &metrics, values.kept);
      add_head_gradient(batch, problem, g_, pass.entropy_gradient);
    }
    backward(batch);
    return loss;
  }

  void gradient_pass(const MicroBatch& batch, std::span<const float> g, double entropy_gradient,
                     RowValues& values) override {
    decode(policy_, batch, &activations_, values);
    const HeadProblem problem = head_of(policy_, batch);
    head_logprobs(pool_, problem, values.logprobs, values.entropy);
    add_head_gradient(batch, problem, g, entropy_gradient);
    backward(batch);
  }

  int64_t slots() const override { return slots_; }
  void end_slot(bool any) override { tree_.end_slot(pool_, any); }
  void end_pass() override { update_->add(pool_, tree_.take_sum(), tree_); }

  double gradient_norm() override { return update_->norm(pool_); }
  void zero_gradients() override {
    tree_.clear();
    update_->zero();
  }
  void step(const OptimizerTable& table, double rate, double scale) override {
    update_->step(pool_, table, rate, scale, policy_);
  }
  int64_t steps() const override { return update_->steps(); }

  TrainingState state() override { return update_->state(policy_); }
  void load(const std::string& folder) override { update_->load(folder, policy_); }

 private:
  const Parameters& weights_of(PolicyKind policy) const {
    if (policy == PolicyKind::current) return policy_;
    const auto& other = policy == PolicyKind::reference ? reference_ : teacher_;
    LEEWAY_CHECK(other != nullptr, "the backend must have been made with this policy");
    return *other;
  }

  HeadProblem head_of(const Parameters& weights, const MicroBatch& batch) {
    HeadProblem problem;
    problem.tokens = batch.size();
    problem.hidden_size = weights.config().hidden_size;
    problem.vocabulary = weights.config().vocab_size;
    problem.hidden = rows_of(hidden_.data(), problem.hidden_size);
    problem.weight = rows_of(network_of(weights).head, problem.hidden_size);
    problem.targets = batch.targets;
    problem.rows = batch.rows;
    problem.all_rows = false;
    problem.temperature = batch.temperature;
    return problem;
  }

  // Hidden states of a micro-batch; with `kept`, also stores what the backward pass needs.
  void decode(const Parameters& weights, const MicroBatch& batch, Activations* kept,
              RowValues& values) {
    const size_t numbers = static_cast<size_t>(batch.size() * weights.config().hidden_size);
    if (hidden_.size() < numbers) hidden_.resize(numbers);
    training_forward(pool_, weights, batch.packed(), options_,
                     std::span<float>(hidden_).first(numbers), kept);
    values.logprobs.resize(static_cast<size_t>(batch.size()));
    values.entropy.resize(values.logprobs.size());
  }

  void backward(const MicroBatch& batch) {
    training_backward(pool_, policy_, batch.packed(), d_hidden_of(batch), activations_,
                      gradient_of_slot());
  }
  std::span<float> d_hidden_of(const MicroBatch& batch) {
    const size_t numbers = static_cast<size_t>(batch.size() * policy_.config().hidden_size);
    if (d_hidden_.size() < numbers) d_hidden_.resize(numbers);
    return std::span<float>(d_hidden_).first(numbers);
  }
  // With one slot gradients add up in place.
  Parameters& gradient_of_slot() { return slots_ > 1 ? tree_.current() : update_->in_place(); }
  // Empty where the head is frozen.
  std::span<float> d_head() {
    if (policy_.lora() != nullptr) return {};
    const auto& config = policy_.config();
    return {network_of(gradient_of_slot()).head,
            static_cast<size_t>(config.vocab_size * config.hidden_size)};
  }

  void add_head_gradient(const MicroBatch& batch, const HeadProblem& problem,
                         std::span<const float> g, double entropy_gradient) {
    g_entropy_ = batch.entropy_gradients(entropy_gradient);
    head_backward(pool_, problem, g, g_entropy_, d_hidden_of(batch), d_head());
  }

  ThreadPool pool_;
  Evaluator evaluator_;
  Parameters policy_;
  int64_t slots_;
  GradientTree tree_;  // of the slots of the pass at hand
  std::unique_ptr<GradientUpdate> update_;
  std::shared_ptr<const Parameters> reference_, teacher_;
  TrainingOptions options_;
  Activations activations_;
  AlignedVector<float> hidden_, d_hidden_;
  std::vector<float> g_, g_entropy_;
};

}  // namespace

std::unique_ptr<TrainingBackend> make_cpu_training(TrainingWeights weights,
                                                   const TrainerTable& table,
                                                   const MakeGradientUpdate& update) {
  return std::make_unique<CpuBackend>(std::move(weights), table, update);
}

}  // namespace leeway
