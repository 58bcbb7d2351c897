#include "orchestrator/schedule_checks.h"

#include <fmt/format.h>

#include <cmath>
#include <set>

#include "leeway/error.h"

namespace leeway {
namespace {

// On resume all draws up to the next one are repeated; a count that would take longer than seconds
// is not from a real run.
constexpr int64_t kMostDraws = int64_t{1} << 28;

class Checker {
 public:
  Checker(const std::string& name, const ScheduleState& state, const OrchestratorTable& table,
          int64_t step, int64_t vocabulary)
      : name_(name), state_(state), table_(table), step_(step), vocabulary_(vocabulary) {}

  void check() const {
    const ScheduleTotals& t = state_.totals;
    equal("version", state_.version, step_, "the checkpoint's step");
    equal("batches_taken", state_.batches_taken, step_, "the checkpoint's step");
    equal("admitted", t.admitted, t.completed + t.failed + t.cancelled,
          "completed, failed and cancelled together");
    int64_t waiting = 0;
    for (const Group& group : state_.finished) {
      waiting += static_cast<int64_t>(group.rollouts.size());
    }
    equal("completed", t.completed, t.batched + t.stale + t.dropped + waiting,
          "batched, stale, dropped and waiting ones together");
    at_most("filtered", t.filtered, t.batched);
    at_most("groups_partial", t.groups_partial, t.groups_dropped);
    at_most("admitted", t.admitted, state_.next_rollout);
    equal("groups_batched", t.groups_batched, step_ * table_.prompts_per_batch,
          "the groups of that many batches");
    const auto finished = static_cast<int64_t>(state_.finished.size());
    equal("groups_opened", t.groups_opened,
          t.groups_batched + t.groups_stale + t.groups_dropped - t.groups_partial + finished,
          "the groups of every fate together");
    // Draws that open no group are those of prompts that failed before.
    const int64_t drawn = t.groups_opened + static_cast<int64_t>(state_.open.size());
    if (state_.prompt_failures.empty()) {
      equal("next_group", state_.next_group, drawn, "the groups that were drawn");
    }
    at_most("next_group", state_.next_group, kMostDraws);
    if (state_.next_group < drawn) {
      fail(fmt::format("\"next_group\" = {}: {} groups were drawn", state_.next_group, drawn));
    }
    check_groups();
  }

 private:
  [[noreturn]] void fail(const std::string& problem) const {
    throw Error(fmt::format("{}: {}", name_, problem));
  }
  void equal(const char* key, int64_t value, int64_t wanted, const char* what) const {
    if (value != wanted) fail(fmt::format("\"{}\" = {} is not {}, {}", key, value, wanted, what));
  }
  void at_most(const char* key, int64_t value, int64_t most) const {
    if (value > most) fail(fmt::format("\"{}\" = {} is above {}", key, value, most));
  }

  void check_groups() const {
    std::set<int64_t> numbers;
    for (const auto& [number, failed_rounds] : state_.open) numbers.insert(number);
    for (const Group& group : state_.finished) {
      if (group.number >= state_.next_group || !numbers.insert(group.number).second) {
        fail(fmt::format("\"finished\": group {} was not drawn, or is there twice", group.number));
      }
      if (static_cast<int64_t>(group.rollouts.size()) > table_.group_size) {
        fail(fmt::format("\"finished\": group {} has {} rollouts, of a group_size of {}",
                         group.number, group.rollouts.size(), table_.group_size));
      }
      for (const Rollout& rollout : group.rollouts) check_rollout(group.number, rollout);
    }
  }

  void check_rollout(int64_t group, const Rollout& rollout) const {
    const auto refuse = [&](const std::string& problem) {
      fail(fmt::format("\"finished\": group {}: {}", group, problem));
    };
    if (!std::isfinite(rollout.reward)) refuse("\"reward\" is not finite");
    for (const RewardPart& part : rollout.rewards) {
      if (!std::isfinite(part.value) || !std::isfinite(part.weight)) {
        refuse(fmt::format("the part \"{}\" of a reward is not finite", part.name));
      }
    }
    for (const auto& [name, value] : rollout.metrics) {
      if (!std::isfinite(value)) refuse(fmt::format("the metric \"{}\" is not finite", name));
    }
    for (const StepCredit& credit : rollout.credit) {
      bool finite = std::isfinite(credit.reward.value_or(0.0));
      for (double advantage : credit.advantages) finite = finite && std::isfinite(advantage);
      if (!finite) refuse("\"credit\" has a number that is not finite");
    }
    for (const TrajectoryStep& step : rollout.steps) {
      for (const uint8_t trained : step.loss_mask) {
        if (trained > 1) refuse(fmt::format("\"loss_mask\" holds {}, not 0 or 1", trained));
      }
      for (const auto* ids : {&step.prompt, &step.completion}) {
        for (const int32_t id : *ids) {
          if (id < 0 || id >= vocabulary_) {
            refuse(fmt::format("{} is not a token of a vocabulary of {}", id, vocabulary_));
          }
        }
      }
      for (const PolicyVersion version : step.versions) {
        if (version < 0 || version > step_) {
          refuse(fmt::format("\"versions\" holds {}, and {} is the newest", version, step_));
        }
      }
    }
  }

  const std::string& name_;
  const ScheduleState& state_;
  const OrchestratorTable& table_;
  int64_t step_, vocabulary_;
};

}  // namespace

void check_schedule_state(const std::string& name, const ScheduleState& state,
                          const OrchestratorTable& table, int64_t step, int64_t vocabulary) {
  Checker(name, state, table, step, vocabulary).check();
}

}  // namespace leeway
