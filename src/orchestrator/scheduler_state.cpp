// What a scheduler reports and what it leaves behind for another one to continue.
#include <utility>

#include "leeway/error.h"
#include "orchestrator/scheduler.h"

namespace leeway {

void ScheduleCounts::add(size_t environment, FailureKind kind, int64_t number) {
  (kind == FailureKind::empty ? empty : errored)[environment] += number;
  // A kind is listed only while its count is not zero.
  if ((failures[kind] += number) == 0) failures.erase(kind);
}

ScheduleCounts RolloutScheduler::take_counts() {
  for (auto& [number, open] : open_) {
    open.failures.clear();
    open.completed = 0;
  }
  counts_.unasked_answers.resize(mix_.members().size());
  for (size_t e = 0; e < mix_.members().size(); ++e) {
    counts_.unasked_answers[e] += mix_.members()[e].environment->take_unasked_answers();
  }
  return std::exchange(counts_, ScheduleCounts(mix_.members().size()));
}

ScheduleState RolloutScheduler::state() const {
  ScheduleState state;
  state.version = version_;
  state.batches_taken = batches_taken_;
  state.next_group = next_group_;
  state.next_rollout = next_rollout_;
  state.totals = totals_;
  state.totals.admitted -= driver_.running();
  state.finished.assign(finished_.begin(), finished_.end());
  state.counts = counts_;
  for (const auto& [number, open] : open_) {
    // Finished members of an unfinished group are sampled again with it.
    state.totals.dropped += open.finished;
    --state.totals.groups_opened;
    // In lockstep a group restarts with the same seeds, and therefore the same failures.
    state.open.emplace_back(number, lockstep() ? 0 : open.failed_rounds);
    if (!lockstep()) continue;
    state.counts.completed[open.group.environment] -= open.completed;
    for (const auto& [kind, failures] : open.failures) {
      state.counts.add(open.group.environment, kind, -failures);
    }
  }
  state.prompt_failures = prompt_failures_;
  return state;
}

void RolloutScheduler::restore(const ScheduleState& state) {
  LEEWAY_CHECK(totals_.admitted == 0, "a scheduler is restored before it begins");
  version_ = state.version;
  batches_taken_ = state.batches_taken;
  next_group_ = state.next_group;
  next_rollout_ = state.next_rollout;
  totals_ = state.totals;
  totals_.failures_in_a_row = 0;  // the cause may have been fixed since
  finished_.assign(state.finished.begin(), state.finished.end());
  prompt_failures_ = state.prompt_failures;
  counts_ = state.counts;
  for (std::vector<int64_t>* each :
       {&counts_.errored, &counts_.empty, &counts_.completed, &counts_.dropped_groups}) {
    each->resize(mix_.members().size());
  }
  for (const auto& [number, failed_rounds] : state.open) {
    Open& open = open_group(number, mix_.draw(static_cast<uint64_t>(number)));
    ++totals_.groups_opened;
    open.failed_rounds = failed_rounds;
    open.last_failed_round = failed_rounds - 1;
    open.round = failed_rounds;
  }
}

}  // namespace leeway
