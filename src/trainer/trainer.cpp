#include "trainer/trainer.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <utility>

#include "core/participation.h"
#include "leeway/error.h"
#include "leeway/evaluator.h"
#include "ranks/ranks.h"
#include "trainer/cpu_backend.h"
#include "trainer/minibatches.h"
#include "trainer/sample_checks.h"

namespace leeway {
namespace {

// The square of a gradient must be finite in float32; otherwise the second moment would stay
// infinite for good.
constexpr double kLargestNorm = 1e19;

class Stopwatch {
 public:
  double seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

// The denominator includes the longest sequence of the batch, with its masked tokens.
bool divides_by_longest(const LossSpec& spec) {
  return spec.reduction.kind == ReductionKind::padded_length_mean ||
         (spec.reduction.kind == ReductionKind::fixed_length && spec.reduction.fixed_length == 0.0);
}

// Whether a token's gradient can depend on tokens of other micro-batches, so that all logprobs must
// be computed first.
bool needs_whole_batch(const LossSpec& spec) {
  return spec.denominator_depends_on_pi() ||
         spec.weight_normalisation != WeightNormalisation::none || spec.m2_threshold ||
         spec.covariance_selection || divides_by_longest(spec);
}

// Whether the loss looks at tokens that are not trained, as some code bases do, or at their number.
bool looks_at_every_row(const LossSpec& spec) {
  const auto everywhere = [](const Correction& correction) {
    return !correction.weight || correction.weight->over == Positions::all;
  };
  return spec.positions == Positions::all || spec.ratio.over == Positions::all ||
         divides_by_longest(spec) ||
         std::any_of(spec.corrections.begin(), spec.corrections.end(), everywhere);
}

// The policy of the first step. An adapter that has learned nothing yet is its base.
std::shared_ptr<const Parameters> initial_policy(const Parameters& policy) {
  const auto is_zero = [&](size_t i) {
    const std::span<const float> values = policy.of(i);
    return is_lora_a(policy.table()[i].name) ||
           std::all_of(values.begin(), values.end(), [](float value) { return value == 0.0f; });
  };
  bool learned = policy.lora() == nullptr;
  for (size_t i = 0; i < policy.table().size() && !learned; ++i) learned = !is_zero(i);
  return learned ? std::make_shared<const Parameters>(policy) : policy.base();
}

std::shared_ptr<const Parameters> load_other_policy(const std::string& key,
                                                    const std::string& folder,
                                                    const ModelConfig& policy) {
  auto other = std::make_shared<const Parameters>(load_parameters(folder));
  if (other->config().vocab_size != policy.vocab_size) {
    throw Error(fmt::format("trainer.{} = \"{}\": has a vocabulary of {}, the policy one of {}",
                            key, folder, other->config().vocab_size, policy.vocab_size));
  }
  return other;
}

void check_stream(const char* name, bool is_read, const std::string& preset,
                  const TokenValues& values, std::span<const Sample> samples) {
  if (values.empty()) {
    if (!is_read || samples.empty()) return;
    throw Error(fmt::format("preset {} reads {}: its logprobs are missing", preset, name));
  }
  if (values.size() != samples.size()) {
    throw Error(fmt::format("{} has {} lists for {} samples", name, values.size(), samples.size()));
  }
  for (size_t i = 0; i < samples.size(); ++i) {
    if (values[i].size() == samples[i].ids.size()) continue;
    throw Error(fmt::format("sample {}: {} has {} entries for {} ids", i, name, values[i].size(),
                            samples[i].ids.size()));
  }
}

// A zero per id of the samples `only`, or of all if there are none; other samples' lists are empty.
template <class Lists>
Lists zeros_of(std::span<const Sample> samples, std::span<const size_t> only) {
  Lists lists(samples.size());
  for (size_t i = 0; i < samples.size() && only.empty(); ++i)
    lists[i].resize(samples[i].ids.size());
  for (size_t number : only) lists[number].resize(samples[number].ids.size());
  return lists;
}

// Lists that `into` does not have yet.
template <class Lists>
void take_missing(Lists&& from, Lists& into) {
  into.resize(std::max(into.size(), from.size()));
  for (size_t i = 0; i < from.size(); ++i) {
    if (into[i].empty()) into[i] = std::move(from[i]);
  }
}

}  // namespace

void PassResult::merge(PassResult&& other) {
  loss += other.loss;
  metrics.merge(other.metrics);
  entropy += other.entropy;
  tokens += other.tokens;
  trained_tokens += other.trained_tokens;
  micro_batches += other.micro_batches;
  largest_micro_batch = std::max(largest_micro_batch, other.largest_micro_batch);
  take_missing(std::move(other.logprobs), logprobs);
  take_missing(std::move(other.kept), kept);
  if (failure.empty()) failure = std::move(other.failure);
}

int64_t optimizer_steps_per_batch(const TrainerTable& table) {
  return table.epochs *
         (table.optimizer_steps == OptimizerSteps::minibatch ? table.minibatches : 1);
}

struct Trainer::Impl {
  Impl(Parameters initial, LossSpec loss, TrainerTable settings, const MakeTrainingBackend& make)
      : evaluator(1), spec(std::move(loss)), table(std::move(settings)) {
    every_row = looks_at_every_row(spec);
    TrainingWeights weights{std::move(initial)};
    const ModelConfig& config = weights.policy.config();
    if (spec.reads(Stream::ref)) {
      if (table.reference == "base") {
        LEEWAY_CHECK(weights.policy.base() != nullptr, "an adapter has a base");
        weights.reference = weights.policy.base();
      } else {
        weights.reference = table.reference == "initial"
                                ? initial_policy(weights.policy)
                                : load_other_policy("reference", table.reference, config);
      }
    }
    if (spec.reads(Stream::teacher)) {
      LEEWAY_CHECK(!table.teacher.empty(),
                   "a loss that reads a teacher needs one in the configuration");
      weights.teacher = load_other_policy("teacher", table.teacher, config);
    }
    backend = make ? make(std::move(weights), table) : make_cpu_training(std::move(weights), table);
  }

  // Sample numbers of the micro-batches of a pass.
  using Plan = std::vector<std::vector<size_t>>;

  std::vector<GradientSlot> plan(const PackedBatch& batch,
                                 std::span<const size_t> only = {}) const {
    return plan_slots(batch, backend->slots(), table.max_tokens, only);
  }

  // Calls visit(slot, sample, first row in the slot, rows) for each sample, in the slots' order.
  template <class Visit>
  static void for_samples(const PackedBatch& batch, std::span<const GradientSlot> slots,
                          const Visit& visit) {
    for (size_t s = 0; s < slots.size(); ++s) {
      size_t first = 0;
      for (const std::vector<size_t>& samples : slots[s]) {
        for (size_t number : samples) {
          const auto count = static_cast<size_t>(batch.rows_of(number));
          visit(s, number, first, count);
          first += count;
        }
      }
    }
  }

  // Log-probabilities of the batch's rows [N]. Throws Error.
  std::vector<float> score(PolicyKind policy, const PackedBatch& batch) {
    std::vector<float> result(batch.tokens.size());
    const std::vector<GradientSlot> slots = plan(batch);
    const auto scored = backend->run_slots(batch, slots, {PassKind::score, policy}, {});
    for (const SlotResult& each : scored) {
      if (!each.failure.empty()) throw Error(each.failure);
    }
    for_samples(batch, slots, [&](size_t slot, size_t number, size_t first, size_t count) {
      const auto from = scored[slot].values.logprobs.begin() + static_cast<std::ptrdiff_t>(first);
      std::copy(from, from + static_cast<std::ptrdiff_t>(count),
                result.begin() + batch.first_row[number]);
    });
    return result;
  }

  TokenValues score(PolicyKind policy, std::span<const Sample> samples) {
    check_samples(backend->config(), samples);
    const PackedBatch batch = pack_samples(samples, every_row);
    return unpack_values(batch, samples, score(policy, batch));
  }

  void check_rollouts(std::span<const Sample> samples, const char* reader) const {
    if (samples.empty() || !samples[0].rollout.empty()) return;
    throw Error(fmt::format("sample 0: rollout is empty, and {} reads it", reader));
  }

  // Two passes: all log-probabilities, the loss of the whole minibatch, then gradients.
  void pass_together(const PackedBatch& batch, std::span<const GradientSlot> slots,
                     const LossPass& how, bool ends_step, PassResult& result) {
    std::vector<float> pi;
    for (const SlotResult& each : backend->run_slots(batch, slots, {}, {})) {
      if (!each.failure.empty()) throw Error(each.failure);
      pi.insert(pi.end(), each.values.logprobs.begin(), each.values.logprobs.end());
    }
    std::vector<size_t> all;
    for_samples(batch, slots,
                [&](size_t, size_t number, size_t, size_t) { all.push_back(number); });
    std::vector<float> gradient(pi.size());
    std::vector<uint8_t> kept(pi.size());
    gather(batch, all, micro_batch);
    result.loss += evaluator.evaluate(spec, micro_batch.view(pi, how.prox_is_pi), gradient,
                                      how.denominator, &result.metrics, kept);
    scatter(micro_batch, kept, result.kept);
    const SlotPass pass{PassKind::gradient, PolicyKind::current, how, ends_step};
    take(batch, slots, backend->run_slots(batch, slots, pass, gradient), result);
  }

  // Adds what the slots gave, in their order, and throws Error for one that failed.
  void take(const PackedBatch& batch, std::span<const GradientSlot> slots,
            const std::vector<SlotResult>& results, PassResult& result) const {
    for (const SlotResult& each : results) {
      if (!each.failure.empty()) throw Error(each.failure);
      result.loss += each.loss;
      result.metrics.merge(each.metrics);
    }
    for_samples(batch, slots, [&](size_t slot, size_t number, size_t first, size_t count) {
      const RowValues& values = results[slot].values;
      const auto copy = [&](const auto& from, auto& to) {
        if (from.empty()) return;
        const auto begin = from.begin() + static_cast<std::ptrdiff_t>(first);
        std::copy(begin, begin + static_cast<std::ptrdiff_t>(count), to.begin() + 1);
      };
      copy(values.logprobs, result.logprobs[number]);
      copy(values.kept, result.kept[number]);
      const auto row = static_cast<size_t>(batch.first_row[number]);
      for (size_t t = 0; t < count; ++t) {
        if (batch.mask[row + t] != 0) result.entropy += values.entropy[first + t];
      }
    });
  }

  double denominator_of(const PackedBatch& batch, const Plan& plan) {
    if (spec.reduction.kind == ReductionKind::sum) return 1.0;
    double total = 0.0;
    for (const std::vector<size_t>& samples : plan) {
      gather(batch, samples, micro_batch);
      const BatchView<float> view = micro_batch.view(micro_batch.advantages, true);
      total += count_denominator(spec, view, participating(spec, view));
    }
    return total;
  }

  // What a pass is of its optimizer step. The numbers are those of the whole step, if the pass has
  // only some of its samples.
  struct OfStep {
    std::optional<double> denominator;
    std::optional<int64_t> trained;  // tokens
    bool ends = false;               // the step comes next
  };
  // One pass over the batch, or over the samples `only`.
  PassResult pass(std::span<const Sample> samples, const PackedBatch& batch,
                  std::span<const size_t> only, bool prox_is_pi, const OfStep& of_step) {
    PassResult result;
    // `merge` takes the lists of other samples from the passes that make them.
    result.logprobs = zeros_of<TokenValues>(samples, only);
    result.kept = zeros_of<TokenFlags>(samples, only);
    const std::vector<GradientSlot> slots = plan(batch, only);
    Plan plan;
    for (const GradientSlot& slot : slots) plan.insert(plan.end(), slot.begin(), slot.end());
    for (const std::vector<size_t>& part : plan) {
      int64_t rows = 0;
      for (size_t number : part) {
        rows += batch.rows_of(number);
        result.trained_tokens += batch.trained_of(number);
      }
      result.tokens += rows;
      result.largest_micro_batch = std::max(result.largest_micro_batch, rows);
    }
    result.micro_batches = static_cast<int64_t>(plan.size());
    if (plan.empty()) return result;
    const double trained =
        static_cast<double>(of_step.trained ? *of_step.trained : result.trained_tokens);
    // Without a trained token there may be no step.
    const bool ends_step = of_step.ends && result.trained_tokens > 0;
    LossPass how{&spec, prox_is_pi, of_step.denominator, 0.0};
    if (table.entropy_bonus != 0.0) how.entropy_gradient = -table.entropy_bonus / trained;
    try {
      if (needs_whole_batch(spec) && plan.size() > 1) {
        pass_together(batch, slots, how, ends_step, result);
      } else {
        if (!how.denominator && !needs_whole_batch(spec)) {
          how.denominator = denominator_of(batch, plan);
        }
        const SlotPass pass{PassKind::loss, PolicyKind::current, how, ends_step};
        take(batch, slots, backend->run_slots(batch, slots, pass, {}), result);
      }
      result.loss -= table.entropy_bonus * result.entropy / trained;
      if (!std::isfinite(result.loss)) result.failure = fmt::format("the loss is {}", result.loss);
    } catch (const Error& error) {
      // The inputs were checked, so a number is not finite.
      result.failure = error.what();
    }
    return result;
  }

  Evaluator evaluator;
  LossSpec spec;
  TrainerTable table;
  bool every_row = false;
  std::unique_ptr<TrainingBackend> backend;
  MicroBatch micro_batch;      // the one at hand
  std::string pass_failure;    // of a pass since the last step: the gradients are unusable
  int64_t schedule_begin = 0;  // optimizer steps before the learning rate schedule began
};

Trainer::Trainer(Parameters initial, LossSpec spec, TrainerTable table,
                 const MakeTrainingBackend& backend)
    : impl_(
          std::make_unique<Impl>(std::move(initial), std::move(spec), std::move(table), backend)) {}
Trainer::~Trainer() = default;

const Parameters& Trainer::parameters() const { return impl_->backend->parameters(); }
const ModelConfig& Trainer::config() const { return impl_->backend->config(); }
std::shared_ptr<const PolicySnapshot> Trainer::snapshot(PolicyVersion version) const {
  return impl_->backend->snapshot(version);
}
const LossSpec& Trainer::spec() const { return impl_->spec; }
int64_t Trainer::optimizer_steps() const { return impl_->backend->steps(); }

TokenValues Trainer::forward(std::span<const Sample> samples) {
  return impl_->score(PolicyKind::current, samples);
}

TokenValues Trainer::ref_forward(std::span<const Sample> samples) {
  LEEWAY_CHECK(impl_->spec.reads(Stream::ref), "the loss reads ref");
  return impl_->score(PolicyKind::reference, samples);
}

TokenValues Trainer::teacher_forward(std::span<const Sample> samples) {
  LEEWAY_CHECK(impl_->spec.reads(Stream::teacher), "the loss reads teacher");
  return impl_->score(PolicyKind::teacher, samples);
}

PassResult Trainer::forward_backward(std::span<const Sample> samples, const PolicyStreams& streams,
                                     std::optional<double> denominator) {
  check_samples(impl_->backend->config(), samples);
  const LossSpec& spec = impl_->spec;
  if (spec.reads(Stream::rollout)) impl_->check_rollouts(samples, spec.preset.c_str());
  check_stream("prox", spec.reads(Stream::prox) && !streams.prox_is_pi, spec.preset, streams.prox,
               samples);
  check_stream("ref", spec.reads(Stream::ref), spec.preset, streams.ref, samples);
  check_stream("teacher", spec.reads(Stream::teacher), spec.preset, streams.teacher, samples);
  PackedBatch batch = pack_samples(samples, impl_->every_row);
  batch.prox = pack_values(batch, streams.prox);
  batch.ref = pack_values(batch, streams.ref);
  batch.teacher = pack_values(batch, streams.teacher);
  PassResult result = impl_->pass(samples, batch, {}, streams.prox_is_pi, {denominator, {}});
  if (impl_->pass_failure.empty()) impl_->pass_failure = result.failure;
  return result;
}

double Trainer::denominator_of_samples(std::span<const Sample> samples) {
  check_samples(impl_->backend->config(), samples);
  if (impl_->spec.denominator_depends_on_pi()) {
    throw Error(
        fmt::format("preset {}: its denominator depends on the logprobs, so only a pass over all "
                    "samples of a step can compute it; pass them to one forward_backward, without "
                    "a denominator",
                    impl_->spec.preset));
  }
  // In one piece: the longest sequence is that of all samples.
  const PackedBatch batch = pack_samples(samples, impl_->every_row);
  return impl_->denominator_of(batch,
                               plan_micro_batches(batch, std::numeric_limits<int64_t>::max()));
}

OptimResult Trainer::optim_step() {
  OptimResult result;
  const OptimizerTable& settings = impl_->table.optimizer;
  result.grad_norm = impl_->backend->gradient_norm();
  const double scale = settings.max_grad_norm > 0.0 && result.grad_norm > settings.max_grad_norm
                           ? settings.max_grad_norm / result.grad_norm
                           : 1.0;
  if (!impl_->pass_failure.empty()) {
    result.failure = std::exchange(impl_->pass_failure, {});
  } else if (std::isfinite(result.grad_norm) && scale * result.grad_norm < kLargestNorm) {
    result.learning_rate =
        learning_rate(settings, impl_->backend->steps() + 1 - impl_->schedule_begin,
                      impl_->table.max_steps * optimizer_steps_per_batch(impl_->table));
    impl_->backend->step(settings, result.learning_rate, scale);
  } else {
    const bool may_clip = settings.max_grad_norm == 0.0 && std::isfinite(result.grad_norm);
    result.failure = fmt::format(
        "the norm of the gradient is {}: the weights may have diverged; lower the learning "
        "rate{}",
        std::abs(result.grad_norm),  // the sign of NaN is meaningless
        may_clip ? ", or set max_grad_norm" : "");
  }
  impl_->backend->zero_gradients();
  return result;
}

BatchResult Trainer::train_batch(std::span<const Sample> samples) {
  Impl& impl = *impl_;
  check_samples(impl.backend->config(), samples);
  if (impl.spec.reads(Stream::rollout)) impl.check_rollouts(samples, impl.spec.preset.c_str());
  BatchResult result;
  PolicyStreams& streams = result.streams;
  PackedBatch batch = pack_samples(samples, impl.every_row);
  const auto timed = [](double& seconds, auto&& work) {
    const Stopwatch watch;
    auto value = work();
    seconds += watch.seconds();
    return value;
  };
  const auto score = [&](PolicyKind policy, double& seconds, TokenValues& lists) {
    std::vector<float> rows = timed(seconds, [&] { return impl.score(policy, batch); });
    lists = unpack_values(batch, samples, rows);
    return rows;
  };
  if (impl.spec.reads(Stream::ref)) {
    batch.ref = score(PolicyKind::reference, result.ref_seconds, streams.ref);
  }
  if (impl.spec.reads(Stream::teacher)) {
    batch.teacher = score(PolicyKind::teacher, result.teacher_seconds, streams.teacher);
  }
  const int64_t steps = optimizer_steps_per_batch(impl.table);
  if (impl.spec.reads(Stream::prox)) {
    if (impl.table.prox_forward == ProxForward::never) {
      impl.check_rollouts(samples, "prox_forward = \"never\"");
      batch.prox = batch.rollout;
      for (const Sample& sample : samples) streams.prox.push_back(sample.rollout);
    } else if (impl.table.prox_forward == ProxForward::always || steps > 1) {
      batch.prox = score(PolicyKind::current, result.prox_seconds, streams.prox);
    } else {
      streams.prox_is_pi = true;
    }
  }

  const bool step_each = impl.table.optimizer_steps == OptimizerSteps::minibatch;
  const double denominator =
      impl.denominator_of(batch, plan_micro_batches(batch, impl.table.max_tokens));
  const int64_t trained = std::count(batch.mask.begin(), batch.mask.end(), uint8_t{1});
  if (trained == 0) {
    result.passes.logprobs = zeros_of<TokenValues>(samples, {});
    result.passes.kept = zeros_of<TokenFlags>(samples, {});
    return result;
  }
  // If the whole batch is one step, a spec that looks across it must see it in one piece.
  const int64_t parts = !step_each && needs_whole_batch(impl.spec) ? 1 : impl.table.minibatches;
  const auto step = [&] {
    const OptimResult optim = timed(result.step_seconds, [&] { return optim_step(); });
    if (!optim.failure.empty()) {
      result.failure = optim.failure;
      return false;
    }
    result.grad_norm += optim.grad_norm;
    result.largest_grad_norm = std::max(result.largest_grad_norm, optim.grad_norm);
    result.learning_rate = optim.learning_rate;
    ++result.optimizer_steps;
    return true;
  };
  for (int64_t epoch = 0; epoch < impl.table.epochs; ++epoch) {
    const auto minibatches =
        split_minibatches(samples, parts, static_cast<uint64_t>(impl.backend->steps() + epoch));
    for (const std::vector<size_t>& minibatch : minibatches) {
      Impl::OfStep of_step;
      if (!step_each) {
        of_step.trained = trained;
        if (!needs_whole_batch(impl.spec)) of_step.denominator = denominator;
      }
      of_step.ends = step_each || &minibatch == &minibatches.back();
      PassResult pass = timed(result.pass_seconds, [&] {
        return impl.pass(samples, batch, minibatch, streams.prox_is_pi, of_step);
      });
      const bool trains = pass.trained_tokens > 0;
      result.passes.merge(std::move(pass));
      if (!result.passes.failure.empty()) {
        result.failure = result.passes.failure;
        impl.backend->zero_gradients();
        return result;
      }
      if (step_each && trains && !step()) return result;
    }
    if (!step_each && !step()) return result;
  }
  const double taken = static_cast<double>(std::max<int64_t>(1, result.optimizer_steps));
  result.loss = result.passes.loss / taken;
  result.grad_norm /= taken;
  return result;
}

bool Trainer::leave_room(bool leaves) { return impl_->backend->leave_room(leaves); }

void Trainer::set_schedule_begin(int64_t optimizer_steps) {
  impl_->schedule_begin = optimizer_steps;
}

TrainingState Trainer::state() const { return impl_->backend->state(); }

std::function<TrainingState()> Trainer::state_later() const {
  return impl_->backend->state_later();
}

std::function<FileSums(const std::string&)> Trainer::save_later() const {
  return impl_->backend->save_later();
}

void Trainer::save(const std::string& folder) const {
  try {
    save_later()(folder);
  } catch (const Lost&) {
    throw;
  } catch (const Error& error) {
    throw Error(fmt::format("{}: not saved: {}", folder, error.what()));
  }
}

void Trainer::load(const std::string& folder) { impl_->backend->load(folder); }

}  // namespace leeway
