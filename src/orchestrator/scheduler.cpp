#include "orchestrator/scheduler.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <numeric>

#include "leeway/error.h"
#include "orchestrator/split.h"

namespace leeway {

RolloutScheduler::RolloutScheduler(const OrchestratorTable& table, uint64_t seed,
                                   int64_t max_batches, EnvironmentMix& mix, RolloutDriver& driver,
                                   Sampler& sampler)
    : table_(table),
      seed_(seed),
      max_batches_(max_batches),
      mix_(mix),
      driver_(driver),
      sampler_(sampler),
      counts_(mix.members().size()) {}

int64_t RolloutScheduler::places_taken() const {
  const auto groups = static_cast<int64_t>(open_.size() + finished_.size());
  return batches_taken_ * batch_places() + groups * table_.group_size;
}

void RolloutScheduler::pump(double seconds) {
  swap_weights();
  admit();
  for (RolloutOutcome& outcome : driver_.poll(seconds)) take(std::move(outcome));
  const int64_t ended = totals_.completed + totals_.failed + totals_.cancelled;
  LEEWAY_CHECK(totals_.admitted == ended + driver_.running(), "every rollout has one outcome");
}

void RolloutScheduler::admit() {
  const int64_t room =
      table_.max_inflight > 0 ? table_.max_inflight : std::numeric_limits<int64_t>::max();
  int64_t waiting = 0;  // retries whose group has rollouts that must end first
  for (auto& [number, open] : open_) {
    const auto missing = static_cast<int64_t>(open.missing.size());
    if (missing == 0) continue;
    if (lockstep() && !open.running.empty()) {
      waiting += missing;
      continue;
    }
    if (driver_.running() + missing > room) return;
    dispatch(open);
  }
  const int64_t most = std::min(table_.max_off_policy_steps + version_ + 1, max_batches_);
  while (places_taken() + table_.group_size <= most * batch_places() &&
         driver_.running() + waiting + table_.group_size <= room) {
    const int64_t number = next_group_++;
    const EnvironmentMix::Draw draw = mix_.draw(static_cast<uint64_t>(number));
    Open& open = open_[number];
    open.group.number = number;
    open.group.environment = draw.member;
    open.group.rollouts.resize(static_cast<size_t>(table_.group_size));
    open.missing.resize(static_cast<size_t>(table_.group_size));
    std::iota(open.missing.begin(), open.missing.end(), int64_t{0});
    open.started_version = version_;
    open.group.example =
        mix_.members()[draw.member].environment->example(Split::train, draw.example);
    ++totals_.groups_opened;
    dispatch(open);
  }
}

void RolloutScheduler::dispatch(Open& open) {
  std::vector<int64_t> members = std::exchange(open.missing, {}), rollouts;
  std::sort(members.begin(), members.end());
  for (int64_t member : members) {
    rollouts.push_back(next_rollout_++);
    places_[rollouts.back()] = {open.group.number, open.round, member};
  }
  open.running.insert(open.running.end(), rollouts.begin(), rollouts.end());
  totals_.admitted += static_cast<int64_t>(rollouts.size());
  const Environment& environment = *mix_.members()[open.group.environment].environment;
  const auto group = static_cast<uint64_t>(open.group.number);
  if (open.round == 0) {
    driver_.start(environment, open.group.example, rollouts, mixed_seed({seed_, group}));
    return;
  }
  // Each retry has a seed of its own, whichever others fail with it.
  for (size_t i = 0; i < members.size(); ++i) {
    const uint64_t seed = mixed_seed(
        {seed_, group, static_cast<uint64_t>(open.round), static_cast<uint64_t>(members[i])});
    driver_.start(environment, open.group.example, {rollouts[i]}, seed);
  }
}

void RolloutScheduler::take(RolloutOutcome&& outcome) {
  const auto found = places_.find(outcome.rollout);
  if (found == places_.end()) {
    LEEWAY_CHECK(outcome.outcome == Outcome::cancelled, "an outcome is of an admitted rollout");
    return;  // counted when its group was given up
  }
  const Place place = found->second;
  places_.erase(found);
  LEEWAY_CHECK(outcome.outcome != Outcome::cancelled, "groups are given up as a whole");
  ++(outcome.outcome == Outcome::completed ? totals_.completed : totals_.failed);
  const auto group = open_.find(place.group);
  if (group == open_.end()) return;  // given up before this one was looked at
  Open& open = group->second;
  std::erase(open.running, outcome.rollout);
  if (outcome.outcome == Outcome::failed) return finish_failed(open, place, outcome);
  totals_.sampled_tokens += outcome.result.sampled_tokens();
  open.group.rollouts[static_cast<size_t>(place.member)] = std::move(outcome.result);
  if (++open.finished < table_.group_size) return;
  finished_.push_back(std::move(open.group));
  totals_.drops_in_a_row = 0;
  open_.erase(group);
}

// Rounds with a failure are counted, not failures: one bad moment that takes several rollouts of a
// group with it is one.
void RolloutScheduler::finish_failed(Open& open, const Place& place,
                                     const RolloutOutcome& outcome) {
  const size_t environment = open.group.environment;
  ++(outcome.kind == FailureKind::empty ? counts_.empty : counts_.errored)[environment];
  last_failure_ = fmt::format("{}, prompt {}: {}: {}", mix_.members()[environment].id,
                              open.group.number, name_of(outcome.kind), outcome.message);
  if (place.round > open.last_failed_round) {
    ++open.failed_rounds;
    open.last_failed_round = open.round;
  }
  const auto& cap = table_.max_error_reschedule_attempts;
  if (cap && open.failed_rounds >= *cap) {
    ++counts_.dropped_groups[environment];
    ++totals_.groups_dropped;
    ++totals_.drops_in_a_row;
    counts_.cancelled_dropped += drop(open.group.number, "dropped");
    return;
  }
  open.round = open.last_failed_round + 1;
  open.missing.push_back(place.member);
}

int64_t RolloutScheduler::drop(int64_t group, const std::string& reason) {
  const auto found = open_.find(group);
  const std::vector<int64_t> running = std::move(found->second.running);
  open_.erase(found);
  int64_t cancelled = 0;
  for (int64_t rollout : running) {
    if (!driver_.cancel(rollout, reason)) continue;  // it has ended: its outcome is on the way
    places_.erase(rollout);
    ++cancelled;
  }
  totals_.cancelled += cancelled;
  return cancelled;
}

bool RolloutScheduler::too_old(int32_t oldest_version) const {
  return batches_taken_ - oldest_version > table_.max_off_policy_steps;
}

std::optional<std::vector<Group>> RolloutScheduler::take_batch() {
  std::erase_if(finished_, [&](const Group& group) {
    const bool stale = std::any_of(group.rollouts.begin(), group.rollouts.end(),
                                   [&](const Rollout& r) { return too_old(r.oldest_version()); });
    if (stale) ++totals_.groups_stale;
    return stale;
  });
  const auto count = static_cast<size_t>(table_.prompts_per_batch);
  if (finished_.size() < count || batches_taken_ >= max_batches_) return std::nullopt;
  if (lockstep()) {
    std::sort(finished_.begin(), finished_.end(),
              [](const Group& a, const Group& b) { return a.number < b.number; });
    const bool earlier_runs = !open_.empty() && open_.begin()->first < finished_[count - 1].number;
    if (earlier_runs) return std::nullopt;
  }
  std::vector<Group> batch;
  for (size_t i = 0; i < count; ++i) {
    batch.push_back(std::move(finished_.front()));
    finished_.pop_front();
  }
  ++batches_taken_;
  totals_.groups_batched += static_cast<int64_t>(count);
  return batch;
}

void RolloutScheduler::offer_weights(const PolicyWeights& weights, int64_t version) {
  offered_.emplace_back(version, weights);
  swap_weights();
}

void RolloutScheduler::swap_weights() {
  if (offered_.empty()) return;
  if (lockstep() &&
      (!open_.empty() ||
       places_taken() <
           std::min(table_.max_off_policy_steps + version_ + 1, max_batches_) * batch_places())) {
    return;  // this version has rollouts to give
  }
  if (!lockstep()) offered_.erase(offered_.begin(), offered_.end() - 1);  // the newest
  // Stale work ends before the swap: it must not take a step with the new weights.
  std::vector<int64_t> stale;
  for (const auto& [number, open] : open_) {
    if (too_old(static_cast<int32_t>(open.started_version))) stale.push_back(number);
  }
  for (int64_t number : stale) {
    ++totals_.groups_stale;
    counts_.cancelled_stale += drop(number, "stale");
  }
  version_ = offered_.front().first;
  sampler_.update_weights(offered_.front().second, version_);
  offered_.pop_front();
}

ScheduleCounts RolloutScheduler::take_counts() {
  return std::exchange(counts_, ScheduleCounts(mix_.members().size()));
}

}  // namespace leeway
