#include "orchestrator/scheduler.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "leeway/error.h"
#include "orchestrator/split.h"

namespace leeway {
namespace {

constexpr double kLongestBackoff = 60.0;  // seconds
constexpr int64_t kMostDraws = 100000;    // consecutive quarantined prompts that are skipped

}  // namespace

RolloutScheduler::RolloutScheduler(const OrchestratorTable& table, uint64_t seed,
                                   int64_t max_batches, EnvironmentMix& mix, RolloutDriver& driver,
                                   Sampler& sampler, Clock& clock)
    : table_(table),
      seed_(seed),
      max_batches_(max_batches),
      mix_(mix),
      driver_(driver),
      sampler_(sampler),
      clock_(clock),
      counts_(mix.members().size()) {}

int64_t RolloutScheduler::places_taken() const {
  const auto groups = static_cast<int64_t>(open_.size() + finished_.size());
  return batches_taken_ * batch_places() + groups * table_.group_size;
}

void RolloutScheduler::pump(double seconds) {
  swap_weights();
  admit();
  int64_t waiting = 0;  // for others of their group
  for (const auto& [number, open] : open_) waiting += static_cast<int64_t>(open.unscored.size());
  if (driver_.running() == waiting && !open_.empty()) wait_for_retries(seconds);
  for (RolloutOutcome& outcome : driver_.poll(seconds)) take(std::move(outcome));
  take_unscored();
  const int64_t ended = totals_.completed + totals_.failed + totals_.cancelled;
  LEEWAY_CHECK(totals_.admitted == ended + driver_.running(), "every rollout has one outcome");
}

void RolloutScheduler::admit() {
  const int64_t room =
      table_.max_inflight > 0 ? table_.max_inflight : std::numeric_limits<int64_t>::max();
  int64_t waiting = 0;  // retries whose group has rollouts that must end first
  bool full = false;
  for (auto& [number, open] : open_) {
    const auto missing = static_cast<int64_t>(open.missing.size());
    if (missing == 0 || open.given_up) continue;
    const bool others_run = open.running.size() > open.unscored.size();
    if ((lockstep() && others_run) || open.retry_at > clock_.now()) {
      waiting += missing;
      continue;
    }
    const bool retry = open.round > 0;
    if (driver_.running() + missing + (retry ? 0 : waiting) > room) full = true;
    // A retry that fits goes past one that does not: its group may hold places until it has ended.
    if (full && (!retry || driver_.running() + missing > room)) continue;
    dispatch(open);
  }
  if (full) return;
  // In lockstep groups are drawn when all before them have ended: which prompts are quarantined
  // then does not depend on the order in which they ended. Those without room yet are dispatched
  // later, above.
  const bool wave = lockstep();
  if (wave && !open_.empty()) return;
  const int64_t most = std::min(table_.max_off_policy_steps + version_ + 1, max_batches_);
  while (places_taken() + table_.group_size <= most * batch_places()) {
    const bool fits = driver_.running() + waiting + table_.group_size <= room;
    if (!fits && !wave) return;
    const std::optional<EnvironmentMix::Draw> draw = next_prompt();
    if (!draw) return;
    Open& open = open_group(next_group_ - 1, *draw);
    ++totals_.groups_opened;
    if (fits) dispatch(open);
  }
}

RolloutScheduler::Open& RolloutScheduler::open_group(int64_t number,
                                                     const EnvironmentMix::Draw& draw) {
  Open& open = open_[number];
  open.group.number = number;
  open.group.environment = draw.member;
  open.group.rollouts.resize(static_cast<size_t>(table_.group_size));
  open.missing.resize(static_cast<size_t>(table_.group_size));
  std::iota(open.missing.begin(), open.missing.end(), int64_t{0});
  open.started_version = version_;
  open.group.example = mix_.members()[draw.member].environment->example(Split::train, draw.example);
  return open;
}

bool RolloutScheduler::quarantined(const PromptKey& prompt) const {
  const auto failures = prompt_failures_.find(prompt);
  return failures != prompt_failures_.end() && failures->second >= table_.max_prompt_failures;
}

std::optional<EnvironmentMix::Draw> RolloutScheduler::next_prompt() {
  if (no_prompt_left_) return std::nullopt;
  for (int64_t passed = 0; passed < kMostDraws; ++passed) {
    const EnvironmentMix::Draw draw = mix_.draw(static_cast<uint64_t>(next_group_++));
    if (!quarantined({draw.member, draw.example})) return draw;
    ++counts_.quarantined_draws;
  }
  no_prompt_left_ = true;
  return std::nullopt;
}

void RolloutScheduler::wait_for_retries(double seconds) {
  double first = std::numeric_limits<double>::infinity();
  const double now = clock_.now();
  for (const auto& [number, open] : open_) {
    if (open.retry_at > now) first = std::min(first, open.retry_at);
  }
  if (first <= now || !std::isfinite(first)) return;
  clock_.sleep(std::min(seconds, first - now));
  waited_for_retries_ += clock_.now() - now;
}

std::string RolloutScheduler::dead_end() const {
  const double most = table_.zero_progress_batches * static_cast<double>(batch_places());
  // Rollouts that started before the failures began may still complete. Those that wait for others
  // of their group do not.
  const bool older_rollouts_run =
      std::any_of(places_.begin(), places_.lower_bound(streak_begin_),
                  [](const auto& place) { return !place.second.unscored; });
  if (static_cast<double>(totals_.failures_in_a_row) >= most && !older_rollouts_run) {
    return fmt::format(
        "{} rollouts in a row failed, without one that completed "
        "(orchestrator.zero_progress_batches = {}); the last failure: {}",
        totals_.failures_in_a_row, table_.zero_progress_batches, last_failure_);
  }
  const double most_groups =
      table_.zero_progress_batches * static_cast<double>(table_.prompts_per_batch);
  const bool older_groups_open = !open_.empty() && open_.begin()->first < lost_begin_;
  if (static_cast<double>(lost_in_a_row_) >= most_groups && !older_groups_open) {
    return fmt::format(
        "{} groups in a row were given up, without one that can be trained "
        "(orchestrator.zero_progress_batches = {}); the last failure: {}",
        lost_in_a_row_, table_.zero_progress_batches, last_failure_);
  }
  if (no_prompt_left_ && open_.empty() &&
      static_cast<int64_t>(finished_.size()) < table_.prompts_per_batch) {
    return fmt::format(
        "all {} prompts drawn last are left out after {} groups given up each "
        "(orchestrator.max_prompt_failures); the last failure: {}",
        kMostDraws, table_.max_prompt_failures, last_failure_);
  }
  return "";
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
  EpisodePlace place{.group = open.group.number, .members = table_.group_size};
  if (open.round == 0) {
    driver_.start(environment, open.group.example, rollouts, mixed_seed({seed_, group}), place);
    return;
  }
  // Each retry has its own seed, whichever others fail with it.
  for (size_t i = 0; i < members.size(); ++i) {
    const uint64_t seed = mixed_seed(
        {seed_, group, static_cast<uint64_t>(open.round), static_cast<uint64_t>(members[i])});
    place.member = members[i];
    driver_.start(environment, open.group.example, {rollouts[i]}, seed, place);
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
  const bool completed = outcome.outcome == Outcome::completed;
  ++(completed ? totals_.completed : totals_.failed);
  if (completed) totals_.sampled_tokens += outcome.result.sampled_tokens();
  const auto group = open_.find(place.group);
  if (group == open_.end()) {  // given up before this outcome was processed
    totals_.dropped += completed ? 1 : 0;
    return;
  }
  Open& open = group->second;
  std::erase(open.running, outcome.rollout);
  if (completed) {
    totals_.failures_in_a_row = 0;
    ++counts_.completed[open.group.environment];
    ++open.completed;
    open.group.rollouts[static_cast<size_t>(place.member)] = std::move(outcome.result);
    if (++open.finished == table_.group_size) return finish(open);
  } else {
    finish_failed(open, place, outcome);
  }
  end_round(open);
}

void RolloutScheduler::end_round(Open& open) {
  // In lockstep a round is handled when all of it has ended: which rollouts survive must not depend
  // on timing.
  const auto& cap = table_.max_error_reschedule_attempts;
  const bool others_run = open.running.size() > open.unscored.size();
  const bool round_over = open.given_up ? open.running.empty() : !lockstep() || !others_run;
  if (cap && open.failed_rounds >= *cap && round_over) return give_up(open);
  if (!open.unscored.empty() && !others_run && open.missing.empty()) score(open);
}

void RolloutScheduler::take_unscored() {
  for (int64_t rollout : driver_.take_unscored()) {
    const auto place = places_.find(rollout);
    if (place == places_.end()) continue;  // cancelled just now, with its group
    place->second.unscored = true;
    Open& open = open_.at(place->second.group);
    open.unscored.push_back(rollout);
    end_round(open);
  }
}

// From here on they run like others, to a reward or a failure.
void RolloutScheduler::score(Open& open) {
  std::vector<int64_t> rollouts = std::exchange(open.unscored, {});
  for (int64_t rollout : rollouts) places_.at(rollout).unscored = false;
  std::sort(rollouts.begin(), rollouts.end(),
            [&](int64_t a, int64_t b) { return places_.at(a).member < places_.at(b).member; });
  driver_.score(rollouts);
}

void RolloutScheduler::finish(Open& open) {
  const int64_t number = open.group.number;
  finished_.push_back(std::move(open.group));
  open_.erase(number);
  lost_in_a_row_ = 0;
}

// Counts rounds with a failure, not failures: one incident that hits several rollouts of a group
// counts once.
void RolloutScheduler::finish_failed(Open& open, const Place& place,
                                     const RolloutOutcome& outcome) {
  const size_t environment = open.group.environment;
  counts_.add(environment, outcome.kind, 1);
  ++open.failures[outcome.kind];
  failures_.push_back({outcome.kind, environment, open.group.example.index, outcome.message});
  if (totals_.failures_in_a_row++ == 0) streak_begin_ = next_rollout_;
  open.last_failure = fmt::format("{}: {}", name_of(outcome.kind), outcome.message);
  last_failure_ = fmt::format("{}, example {}: {}", mix_.members()[environment].id,
                              open.group.example.index, open.last_failure);
  if (place.round > open.last_failed_round) {
    ++open.failed_rounds;
    open.last_failed_round = open.round;
    const double doubled = std::ldexp(
        table_.retry_backoff, static_cast<int>(std::min<int64_t>(open.failed_rounds, 32)) - 1);
    open.retry_at = clock_.now() + std::min(doubled, kLongestBackoff);
  }
  open.round = open.last_failed_round + 1;
  open.missing.push_back(place.member);
}

void RolloutScheduler::give_up(Open& open) {
  const int64_t number = open.group.number;
  const size_t environment = open.group.environment;
  // Members without a score that could be trained are scored first; the group comes here again
  // then.
  std::vector<int64_t> others = open.running;
  if (!open.given_up && open.finished + static_cast<int64_t>(open.unscored.size()) >= enough()) {
    for (int64_t rollout : open.unscored) std::erase(others, rollout);
  }
  counts_.cancelled_dropped += cancel(open, others, "dropped");
  if (!open.running.empty()) {
    open.given_up = true;
    open.missing.clear();
    return score(open);
  }
  std::vector<Rollout>& rollouts = open.group.rollouts;
  std::erase_if(rollouts, [](const Rollout& rollout) { return rollout.steps.empty(); });
  const auto survivors = static_cast<int64_t>(rollouts.size());
  const bool trained = survivors >= enough();
  counts_.given_up.push_back(
      {number, environment, open.group.example.index, survivors, trained, open.last_failure});
  ++totals_.groups_dropped;
  const PromptKey prompt{environment, open.group.example.index};
  if (++prompt_failures_[prompt] == table_.max_prompt_failures) ++totals_.quarantined_prompts;
  if (trained) {
    ++counts_.partial_groups;
    ++totals_.groups_partial;
    return finish(open);
  }
  ++counts_.dropped_groups[environment];
  totals_.dropped += survivors;
  if (lost_in_a_row_++ == 0) lost_begin_ = next_group_;
  open_.erase(number);
}

int64_t RolloutScheduler::enough() const {
  return table_.min_group_size > 0 ? table_.min_group_size : table_.group_size;
}

int64_t RolloutScheduler::cancel(Open& open, const std::vector<int64_t>& rollouts,
                                 const std::string& reason) {
  int64_t cancelled = 0;
  for (int64_t rollout : rollouts) {
    std::erase(open.running, rollout);
    std::erase(open.unscored, rollout);
    if (!driver_.cancel(rollout, reason))
      continue;  // it has ended; its outcome comes with the next poll
    places_.erase(rollout);
    ++cancelled;
  }
  totals_.cancelled += cancelled;
  return cancelled;
}

bool RolloutScheduler::too_old(PolicyVersion oldest_version) const {
  return batches_taken_ - oldest_version > table_.max_off_policy_steps;
}

std::optional<std::vector<Group>> RolloutScheduler::take_batch() {
  std::erase_if(finished_, [&](const Group& group) {
    const bool stale = std::any_of(group.rollouts.begin(), group.rollouts.end(),
                                   [&](const Rollout& r) { return too_old(r.oldest_version()); });
    if (stale) {
      ++totals_.groups_stale;
      totals_.stale += static_cast<int64_t>(group.rollouts.size());
    }
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
    totals_.batched += static_cast<int64_t>(finished_.front().rollouts.size());
    batch.push_back(std::move(finished_.front()));
    finished_.pop_front();
  }
  ++batches_taken_;
  totals_.groups_batched += static_cast<int64_t>(count);
  return batch;
}

void RolloutScheduler::give_back(std::vector<Group> batch) {
  totals_.groups_batched -= static_cast<int64_t>(batch.size());
  --batches_taken_;
  for (; !batch.empty(); batch.pop_back()) {
    totals_.batched -= static_cast<int64_t>(batch.back().rollouts.size());
    finished_.push_front(std::move(batch.back()));
  }
}

void RolloutScheduler::offer_weights(std::shared_ptr<const PolicySnapshot> weights,
                                     PolicyVersion version) {
  offered_.emplace_back(version, std::move(weights));
  swap_weights();
}

void RolloutScheduler::swap_weights() {
  if (offered_.empty()) return;
  if (lockstep()) {
    const int64_t most = std::min(table_.max_off_policy_steps + version_ + 1, max_batches_);
    const bool more = places_taken() < most * batch_places() && !no_prompt_left_;
    if (!open_.empty() || more) return;  // this version still has rollouts to produce
  }
  if (!lockstep()) offered_.erase(offered_.begin(), offered_.end() - 1);  // the newest
  // Stale work is cancelled before the swap: it must not take a step with the new weights.
  std::vector<int64_t> stale;
  for (const auto& [number, open] : open_) {
    if (too_old(open.started_version)) stale.push_back(number);
  }
  for (int64_t number : stale) {
    Open& open = open_.at(number);
    ++totals_.groups_stale;
    totals_.stale += open.finished;
    counts_.cancelled_stale += cancel(open, std::vector<int64_t>(open.running), "stale");
    open_.erase(number);
  }
  version_ = offered_.front().first;
  sampler_.update_weights(std::move(offered_.front().second), version_);
  offered_.pop_front();
}

}  // namespace leeway
