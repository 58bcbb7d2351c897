#include "trainer/ranks_backend.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <numeric>
#include <utility>

#include "core/explain_text.h"
#include "leeway/error.h"
#include "trainer/cpu_backend.h"
#include "trainer/state_saving.h"
#include "trainer/training_messages.h"

namespace leeway {
namespace {

double now_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// A rank's slots of a pass; `most` as in PassOrder. What fails in a slot is in its result; what
// fails around them ends the group, since the others may wait for this rank within their passes.
std::vector<SlotResult> run_share(Ranks& ranks, const RankBackend& local, const PackedBatch& batch,
                                  std::span<const GradientSlot> slots, const SlotPass& pass,
                                  int64_t most, std::span<const float> g) {
  try {
    local.share->begin_passes(pass, micro_batches_of(slots), most);
    std::vector<SlotResult> results = run_each_slot(*local.backend, batch, slots, pass, g);
    local.share->end_passes();
    return results;
  } catch (const Lost&) {
    throw;
  } catch (const Error& error) {
    ranks.abort(error.what());
    throw;
  }
}

std::string order(TrainingOrder kind) {
  ByteWriter message;
  message.put(kind);
  return message.take();
}

}  // namespace

class RanksBackend : public TrainingBackend {
 public:
  RanksBackend(RanksTraining& group, TrainingWeights weights, const TrainerTable& table)
      : group_(group), ranks_(group.ranks_) {
    for (const LossSpec* spec : group.specs_) specs_.push_back(explain_text(*spec));
    {
      const std::lock_guard lock(group_.mutex_);
      group_.kept_.clear();
    }
    ByteWriter message;
    message.put(TrainingOrder::make);
    put_weights(message, weights, table);
    tell(message.take());
    local_ = group.make_(ranks_, std::move(weights), table);
  }
  ~RanksBackend() override {
    try {
      tell(order(TrainingOrder::drop));
    } catch (const Lost&) {
      // A destructor must not throw. The next call that needs the group throws the same Lost.
    }
  }

  const Parameters& parameters() override {
    if (local_.share->needs_weights()) tell(order(TrainingOrder::weights));
    return here().parameters();
  }
  const ModelConfig& config() const override { return local_.backend->config(); }
  std::shared_ptr<const PolicySnapshot> snapshot(PolicyVersion version) override {
    if (local_.share->needs_weights()) tell(order(TrainingOrder::weights));
    auto snapshot = here().snapshot(version);
    if (group_.keep(version)) {
      ByteWriter message;
      message.put(TrainingOrder::snapshot);
      message.put(version);
      tell(message.take());
      local_.share->bring_snapshot();
    }
    return snapshot;
  }

  void score(PolicyKind, const MicroBatch&, RowValues&) override {
    LEEWAY_CHECK(false, "ranks make passes over slots");
  }
  double loss_pass(const MicroBatch&, const LossPass&, MetricSums&, RowValues&) override {
    LEEWAY_CHECK(false, "ranks make passes over slots");
  }
  void gradient_pass(const MicroBatch&, std::span<const float>, double, RowValues&) override {
    LEEWAY_CHECK(false, "ranks make passes over slots");
  }

  int64_t slots() const override { return local_.backend->slots(); }
  std::vector<SlotResult> run_slots(const PackedBatch& batch, std::span<const GradientSlot> slots,
                                    const SlotPass& pass, std::span<const float> g) override {
    const size_t share = slots.size() / static_cast<size_t>(ranks_.size());
    const uint8_t spec = number_of(pass);
    std::vector<std::span<const float>> rows;  // of g, by rank
    int64_t most = 0;
    for (int r = 0; r < ranks_.size(); ++r) {
      const auto of_rank = slots.subspan(static_cast<size_t>(r) * share, share);
      most = std::max(most, micro_batches_of(of_rank));
      size_t count = 0;
      for (const GradientSlot& slot : of_rank) count += g.empty() ? 0 : rows_of(batch, slot);
      rows.push_back(g.first(count));
      g = g.subspan(count);
    }
    for (int r = 1; r < ranks_.size(); ++r) {
      ByteWriter message;
      message.put(TrainingOrder::pass);
      put_pass(message, batch, slots.subspan(static_cast<size_t>(r) * share, share), pass, spec,
               most, rows[static_cast<size_t>(r)]);
      ranks_.send(r, Channel::training, message.take());
    }
    const double begin = now_seconds();
    std::vector<SlotResult> results =
        run_share(ranks_, local_, batch, slots.first(share), pass, most, rows[0]);
    const double waits = now_seconds();
    std::vector<double> taken = {waits - begin};
    for (int r = 1; r < ranks_.size(); ++r) {
      auto more = read_results(ranks_.receive(r, Channel::training), &taken.emplace_back());
      std::move(more.begin(), more.end(), std::back_inserter(results));
    }
    const double waited = now_seconds() - waits;
    const bool failed = std::any_of(results.begin(), results.end(),
                                    [](const SlotResult& each) { return !each.failure.empty(); });
    if (!failed && pass.kind != PassKind::score) {
      tell(order(TrainingOrder::join));
      here().end_pass();
    }
    const std::lock_guard lock(group_.mutex_);
    for (size_t r = 0; r < taken.size(); ++r) group_.pass_seconds_[r] += taken[r];
    group_.wait_seconds_ += waited;
    group_.collective_seconds_ += local_.share->take_seconds();
    return results;
  }

  double gradient_norm() override {
    tell(order(TrainingOrder::norm));
    return here().gradient_norm();
  }
  void zero_gradients() override {
    tell(order(TrainingOrder::zero));
    here().zero_gradients();
  }
  void step(const OptimizerTable& table, double rate, double scale) override {
    ByteWriter message;
    message.put(TrainingOrder::step);
    for (double value :
         {rate, scale, table.beta1, table.beta2, table.epsilon, table.weight_decay}) {
      message.put(value);
    }
    tell(message.take());
    here().step(table, rate, scale);
    const std::lock_guard lock(group_.mutex_);
    group_.collective_seconds_ += local_.share->take_seconds();
  }
  int64_t steps() const override { return local_.backend->steps(); }

  TrainingState state() override {
    parameters();  // what they are in the state
    tell(order(TrainingOrder::state));
    return here().state();
  }
  std::function<FileSums(const std::string&)> save_later() override {
    tell(order(TrainingOrder::save));
    auto save = std::make_shared<StateSave>(ranks_, local_.share->shard(), steps());
    return [save](const std::string& folder) { return save->write(folder); };
  }
  void load(const std::string& folder) override {
    tell(order(TrainingOrder::load));
    here().load(folder);
  }

 private:
  TrainingBackend& here() { return *local_.backend; }

  void tell(const std::string& message) {
    for (int r = 1; r < ranks_.size(); ++r) ranks_.send(r, Channel::training, message);
  }

  uint8_t number_of(const SlotPass& pass) {
    if (pass.loss.spec == nullptr) return 0;
    if (pass.loss.spec != known_) {
      known_ = pass.loss.spec;
      const auto found = std::find(specs_.begin(), specs_.end(), explain_text(*known_));
      LEEWAY_CHECK(found != specs_.end(), "the ranks know the loss");
      known_number_ = static_cast<uint8_t>(found - specs_.begin());
    }
    return known_number_;
  }

  RanksTraining& group_;
  Ranks& ranks_;
  std::vector<std::string> specs_;  // as text, which has all that makes a loss what it is
  const LossSpec* known_ = nullptr;
  uint8_t known_number_ = 0;
  RankBackend local_;
};

namespace {

OptimizerTable read_step(ByteReader& from, double& rate, double& scale) {
  OptimizerTable table;
  for (double* value :
       {&rate, &scale, &table.beta1, &table.beta2, &table.epsilon, &table.weight_decay}) {
    *value = from.get<double>();
  }
  return table;
}

// One order; false at the end.
bool serve(Ranks& ranks, const ServeTraining& options, KeptSnapshots& snapshots,
           StateWriter& writer, RankBackend& local) {
  const std::string message = ranks.receive(0, Channel::training);
  ByteReader from(message);
  const auto kind = from.get_enum(TrainingOrder::end);
  const bool needs_backend =
      kind != TrainingOrder::make && kind != TrainingOrder::drop && kind != TrainingOrder::end;
  if (needs_backend && !local.backend) throw Error("an order for a trainer that was not made");
  switch (kind) {
    case TrainingOrder::make: {
      TrainerTable table;
      table.threads = options.threads;
      TrainingWeights weights = get_weights(from, *options.like, table);
      local = {};
      local = options.make(ranks, std::move(weights), table);
      snapshots.clear();
      break;
    }
    case TrainingOrder::drop: local = {}; break;
    case TrainingOrder::pass: {
      PassOrder pass = get_pass(from);
      if (pass.spec >= options.specs.size()) throw Error("an order with a loss that is not known");
      pass.pass.loss.spec = options.specs[pass.spec];
      const double begin = now_seconds();
      const auto results =
          run_share(ranks, local, pass.batch, pass.slots, pass.pass, pass.most, pass.g);
      ranks.send(0, Channel::training, results_message(results, now_seconds() - begin));
      break;
    }
    case TrainingOrder::join: local.backend->end_pass(); break;
    case TrainingOrder::zero: local.backend->zero_gradients(); break;
    case TrainingOrder::norm: local.backend->gradient_norm(); break;
    case TrainingOrder::step: {
      double rate = 0.0, scale = 0.0;
      const OptimizerTable table = read_step(from, rate, scale);
      local.backend->step(table, rate, scale);
      break;
    }
    case TrainingOrder::snapshot:
      snapshots.add(local.backend->snapshot(from.get<PolicyVersion>()));
      break;
    case TrainingOrder::state: collect_moments(ranks, local.share->shard(), nullptr); break;
    case TrainingOrder::save: writer.begin(local.share->shard()); break;
    case TrainingOrder::weights: local.share->bring_weights(); break;
    case TrainingOrder::load: local.backend->load(""); break;
    case TrainingOrder::end: return false;
  }
  from.end();
  return true;
}

}  // namespace

void check_ranks(int ranks, const RunConfig& run) {
  if (run.model.device == Device::cuda) {
    if (ranks == 1 && run.trainer.sharding == Sharding::weights) {
      throw Error(
          "trainer.sharding = \"weights\": there is one process, which has all weights; start "
          "several (--ranks N, or a launcher), or set trainer.sharding = \"optimizer\"");
    }
    if (kMostGpuRanks % ranks == 0) return;
    throw Error(
        fmt::format("{} ranks with a GPU each cannot share a step: use a power of two, at most {}",
                    ranks, kMostGpuRanks));
  }
  const int64_t slots = slots_of(run.trainer);
  if (slots % ranks == 0) return;
  std::vector<int64_t> fitting;
  for (int64_t n = 1; n <= slots; n *= 2) fitting.push_back(n);
  const bool could = std::has_single_bit(static_cast<unsigned>(ranks));
  throw Error(fmt::format(
      "{} ranks cannot share the {} slots of a step (trainer.gradient_slots): use {} ranks{}",
      ranks, slots, fmt::join(fitting, ", "),
      could ? fmt::format(", or set trainer.gradient_slots = {}", ranks) : ""));
}

void KeptSnapshots::add(std::shared_ptr<const PolicySnapshot> snapshot) {
  const std::lock_guard lock(mutex_);
  kept_.push_back(std::move(snapshot));
  changed_.notify_all();
}

std::shared_ptr<const PolicySnapshot> KeptSnapshots::take(PolicyVersion version) {
  std::unique_lock lock(mutex_);
  const auto is_it = [&](const auto& each) { return each->version() == version; };
  const auto found = [&] { return std::find_if(kept_.begin(), kept_.end(), is_it); };
  changed_.wait(lock, [&] {
    return over_ || found() != kept_.end() ||
           (!kept_.empty() && kept_.front()->version() > version);
  });
  const auto place = found();
  if (place == kept_.end()) return nullptr;
  auto snapshot = *place;
  kept_.erase(kept_.begin(), place);
  return snapshot;
}

void KeptSnapshots::clear() {
  const std::lock_guard lock(mutex_);
  kept_.clear();
}

void KeptSnapshots::end() {
  const std::lock_guard lock(mutex_);
  over_ = true;
  changed_.notify_all();
}

RanksTraining::RanksTraining(Ranks& ranks, std::vector<const LossSpec*> specs, MakeRankBackend make)
    : ranks_(ranks),
      specs_(std::move(specs)),
      make_(std::move(make)),
      pass_seconds_(static_cast<size_t>(ranks.size()), 0.0) {}

MakeTrainingBackend RanksTraining::backends() {
  return [this](TrainingWeights weights, const TrainerTable& table) {
    return std::make_unique<RanksBackend>(*this, std::move(weights), table);
  };
}

void RanksTraining::keep_snapshots() {
  const std::lock_guard lock(mutex_);
  keeps_ = true;
}

bool RanksTraining::keep(PolicyVersion version) {
  const std::lock_guard lock(mutex_);
  if (keeps_) kept_.insert(version);
  return keeps_;
}

bool RanksTraining::others_keep(PolicyVersion version) {
  const std::lock_guard lock(mutex_);
  const auto found = kept_.find(version);
  if (found == kept_.end()) return false;
  kept_.erase(kept_.begin(), found);
  return true;
}

Metrics RanksTraining::take_metrics() {
  const std::lock_guard lock(mutex_);
  const double sum = std::accumulate(pass_seconds_.begin(), pass_seconds_.end(), 0.0);
  const double largest = *std::max_element(pass_seconds_.begin(), pass_seconds_.end());
  Metrics metrics = {{"time/ranks_collectives", std::exchange(collective_seconds_, 0.0)},
                     {"time/ranks_wait", std::exchange(wait_seconds_, 0.0)}};
  if (sum > 0.0) {
    metrics.emplace_back("ranks/train_imbalance",
                         largest * static_cast<double>(pass_seconds_.size()) / sum);
  }
  note_slow(sum);
  std::fill(pass_seconds_.begin(), pass_seconds_.end(), 0.0);
  return metrics;
}

void RanksTraining::note_slow(double sum) {
  const auto slowest = static_cast<size_t>(
      std::max_element(pass_seconds_.begin(), pass_seconds_.end()) - pass_seconds_.begin());
  const double own = pass_seconds_[slowest];
  const double others = (sum - own) / static_cast<double>(pass_seconds_.size() - 1);
  if (own <= kSlow * others) {
    slow_steps_ = 0;
    return;
  }
  slow_steps_ = slowest == slow_rank_ ? slow_steps_ + 1 : 1;
  slow_rank_ = slowest;
  if (slow_steps_ < kSlowSteps || !told_.insert(slowest).second) return;
  warning_ = fmt::format(
      "warning: rank {} is slow: in each of the last {} steps its passes took longest, {:.1f} "
      "times "
      "the others' mean in the last one; all wait for it",
      slowest, kSlowSteps, own / others);
}

std::string RanksTraining::take_warning() {
  const std::lock_guard lock(mutex_);
  return std::exchange(warning_, {});
}

void RanksTraining::end() {
  for (int r = 1; r < ranks_.size(); ++r) {
    ranks_.send(r, Channel::training, order(TrainingOrder::end));
  }
}

void serve_training(Ranks& ranks, const ServeTraining& options, KeptSnapshots& snapshots) {
  StateWriter writer(ranks);
  RankBackend local;
  try {
    while (serve(ranks, options, snapshots, writer, local)) {
    }
  } catch (const Lost&) {
    throw;
  } catch (const std::exception& error) {
    ranks.abort(fmt::format("rank {}: {}", ranks.rank(), error.what()));
    throw;
  }
}

}  // namespace leeway
