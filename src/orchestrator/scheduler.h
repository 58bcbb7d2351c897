// Which prompts are sampled when, and which finished groups make a batch.
//
// A group is one prompt and `group_size` rollouts. A group takes `group_size` places from the
// moment it is opened until it is dropped, or for good once its batch is handed out.
//
// Admission: groups with rollouts to retry are served first; a new group opens while
//   places taken + group_size <= (max_off_policy_steps + version + 1) * batch, and
//   running + group_size      <= max_inflight,
// where version is that of the sampler's weights and batch = prompts_per_batch * group_size.
//
// Staleness: batch number b (0, 1, ..) is trained by weights of version b. No token older than
// b - max_off_policy_steps is ever in it: running groups that would be too old are cancelled before
// weights are swapped, finished ones are dropped when a batch is made.
//
// Schedules: `free` swaps weights as soon as they are there, and batches take groups as they
// finish. `lockstep` swaps when everything admitted has ended, and batches take groups in the order
// of their numbers: batch b is sampled by version max(0, b - max_off_policy_steps) alone. A group
// then retries, or is given up, when all of its rollouts have ended, and prompts are drawn when all
// groups have, so that timing decides nothing: a run can be repeated bit for bit.
//
// Failures of all kinds go one way. Rounds of a group in which a rollout failed are counted; before
// each retry there is a wait that doubles. At max_error_reschedule_attempts rounds the group is
// given up: what runs is cancelled, its finished rollouts are trained if they are at least
// min_group_size, and its prompt is passed over from max_prompt_failures such groups on. Endless
// failures end the run instead of hanging it: zero_progress_batches batches' worth of rollouts that
// failed, or of groups given up for nothing, in a row.
//
// Groups that are scored together: rollouts that ended without a reward wait, and count as running,
// until all of their group have ended; then one call scores them. A failed member is retried first;
// when the group is given up, the others are scored if they are at least min_group_size. If scoring
// fails, all of them have failed.
//
// Invariant: admitted = completed + failed + cancelled + running, at any time.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "config/run_config.h"
#include "orchestrator/environment.h"
#include "orchestrator/interfaces.h"
#include "orchestrator/rollouts.h"

namespace leeway {

// One prompt with its finished rollouts.
struct Group {
  int64_t number = 0;      // of the draw
  size_t environment = 0;  // member of the mix
  Example example;
  std::vector<Rollout> rollouts;
};

// A group that was given up.
struct DroppedGroup {
  int64_t number = 0;
  size_t environment = 0;
  uint64_t example = 0;
  int64_t survivors = 0;  // finished rollouts; trained if there are enough
  bool trained = false;
  std::string message;  // of its last failure
};

// A rollout that failed, and is tried again.
struct RolloutFailure {
  FailureKind kind = FailureKind::environment_error;
  size_t environment = 0;
  uint64_t example = 0;
  std::string message;
};

// Counts since the last `take_counts`; vectors are indexed by environment.
struct ScheduleCounts {
  explicit ScheduleCounts(size_t environments = 0)
      : errored(environments),
        empty(environments),
        completed(environments),
        dropped_groups(environments),
        unasked_answers(environments) {}
  // Counts failed rollouts.
  void add(size_t environment, FailureKind kind, int64_t number);

  std::vector<int64_t> errored, empty, completed;  // rollouts, by how they ended
  std::vector<int64_t> dropped_groups;
  std::vector<int64_t> unasked_answers;  // of the environments' programs; filled by take_counts
  std::map<FailureKind, int64_t> failures;
  int64_t cancelled_stale = 0, cancelled_dropped = 0;
  int64_t partial_groups = 0;     // given up, and trained with their survivors
  int64_t quarantined_draws = 0;  // prompts skipped
  std::vector<DroppedGroup> given_up;
};

// Totals since the start of the run, resumes included. Rollouts are accounted for:
//   admitted = completed + failed + cancelled + running
//   completed = batched + stale + dropped with their group + waiting;  filtered: of the batched
struct ScheduleTotals {
  int64_t admitted = 0, completed = 0, failed = 0, cancelled = 0;  // rollouts
  int64_t batched = 0, filtered = 0, stale = 0, dropped = 0;       // completed rollouts, by fate
  int64_t groups_opened = 0, groups_dropped = 0, groups_stale = 0, groups_batched = 0;
  int64_t groups_partial = 0, quarantined_prompts = 0;
  int64_t sampled_tokens = 0;     // of completed rollouts
  int64_t failures_in_a_row = 0;  // rollouts failed since one completed
};

// Which prompt: environment (member of the mix) and example.
using PromptKey = std::pair<size_t, uint64_t>;

// What a scheduler needs to continue where another one stopped.
struct ScheduleState {
  PolicyVersion version = 0;  // of the weights used for sampling
  int64_t batches_taken = 0, next_group = 0, next_rollout = 0;
  ScheduleTotals totals;
  std::vector<Group> finished;
  // Unfinished groups with their failed rounds so far; their rollouts are sampled again.
  std::vector<std::pair<int64_t, int64_t>> open;
  std::map<PromptKey, int64_t> prompt_failures;
  // Counts not taken yet; empty vectors mean zeros. In lockstep without the failures of open
  // groups, which will repeat.
  ScheduleCounts counts;
};

// Not thread-safe. Everything it is constructed with must outlive it.
class RolloutScheduler {
 public:
  RolloutScheduler(const OrchestratorTable& table, uint64_t seed, int64_t max_batches,
                   EnvironmentMix& mix, RolloutDriver& driver, Sampler& sampler, Clock& clock);

  // Complete when the learner is idle and the sampler has the newest weights; running rollouts are
  // excluded from the totals, since they will be admitted again.
  ScheduleState state() const;
  // Call instead of starting from scratch; the sampler must have the weights of state.version.
  void restore(const ScheduleState& state);

  // Admits what may be admitted, lets the sampler work for up to about `seconds`, and processes
  // outcomes.
  void pump(double seconds);
  // Seconds of `pump` since the start in which nothing was sampled: all rollouts were with their
  // environments, or waited to be tried again.
  double waited() const { return waited_for_retries_ + driver_.waited_for_environments(); }

  // The next batch, when enough groups have finished.
  std::optional<std::vector<Group>> take_batch();
  // Puts a batch that was not trained back as if it had not been taken; before the next is taken.
  void give_back(std::vector<Group> batch);

  // New weights from the learner; the schedule decides when they are swapped in. Versions increase
  // by one.
  void offer_weights(std::shared_ptr<const PolicySnapshot> weights, PolicyVersion version);
  // Version of the weights used for sampling.
  PolicyVersion version() const { return version_; }

  // Counts rollouts of batches that were excluded from the update.
  void note_filtered(int64_t rollouts) { totals_.filtered += rollouts; }

  ScheduleCounts take_counts();
  // Failures since the last call.
  std::vector<RolloutFailure> take_failures() { return std::exchange(failures_, {}); }
  const ScheduleTotals& totals() const { return totals_; }
  int64_t running() const { return driver_.running(); }
  // Message of the last failure, for messages. May be empty.
  const std::string& last_failure() const { return last_failure_; }
  // If not empty, no further batch will come, for this reason.
  std::string dead_end() const;

 private:
  struct Open {
    Group group;                    // rollouts by member, in whatever order they finished
    int64_t finished = 0;           // of them
    std::vector<int64_t> running;   // rollouts
    std::vector<int64_t> missing;   // members to be started
    std::vector<int64_t> unscored;  // of the running ones: they wait for the others
    bool given_up = false;          // when its survivors are scored, nothing else is waited for
    int64_t round = 0;              // of the dispatch in progress
    int64_t failed_rounds = 0;
    int64_t last_failed_round = -1;
    PolicyVersion started_version = 0;  // when its first rollout began
    double retry_at = 0.0;              // not before
    std::string last_failure;
    std::map<FailureKind, int64_t> failures;  // those in counts_
    int64_t completed = 0;                    // those in counts_
  };
  struct Place {
    int64_t group;
    int64_t round;
    int64_t member;
    bool unscored = false;
  };
  bool lockstep() const { return table_.schedule == RolloutSchedule::lockstep; }
  int64_t batch_places() const { return table_.prompts_per_batch * table_.group_size; }
  int64_t places_taken() const;
  void admit();
  void dispatch(Open& open);
  void take(RolloutOutcome&& outcome);
  void finish_failed(Open& open, const Place& place, const RolloutOutcome& outcome);
  void give_up(Open& open);
  void take_unscored();
  void score(Open& open);
  void end_round(Open& open);
  int64_t enough() const;   // rollouts, for a group to be trained
  void finish(Open& open);  // called when it can be trained
  Open& open_group(int64_t number, const EnvironmentMix::Draw& draw);
  bool quarantined(const PromptKey& prompt) const;
  // Draws group next_group_ and increments that; nothing if all prompts are quarantined.
  std::optional<EnvironmentMix::Draw> next_prompt();
  void wait_for_retries(double seconds);
  // Cancels those running rollouts of a group, and returns the number of those that still ran.
  int64_t cancel(Open& open, const std::vector<int64_t>& rollouts, const std::string& reason);
  void swap_weights();
  bool too_old(PolicyVersion oldest_version) const;

  OrchestratorTable table_;
  uint64_t seed_;
  int64_t max_batches_;
  EnvironmentMix& mix_;
  RolloutDriver& driver_;
  Sampler& sampler_;
  Clock& clock_;
  double waited_for_retries_ = 0.0;
  bool no_prompt_left_ = false;
  int64_t streak_begin_ = 0;   // first rollout started after the failures in a row began
  int64_t lost_in_a_row_ = 0;  // groups given up since one could be trained
  int64_t lost_begin_ = 0;     // first group drawn after they began
  std::map<PromptKey, int64_t> prompt_failures_;  // groups given up
  PolicyVersion version_ = 0;
  int64_t batches_taken_ = 0, next_group_ = 0, next_rollout_ = 0;
  std::map<int64_t, Open> open_;     // by group number
  std::map<int64_t, Place> places_;  // by rollout
  std::deque<Group> finished_;       // in the order they ended
  std::deque<std::pair<PolicyVersion, std::shared_ptr<const PolicySnapshot>>> offered_;
  ScheduleCounts counts_;
  ScheduleTotals totals_;
  std::string last_failure_;
  std::vector<RolloutFailure> failures_;
};

}  // namespace leeway
