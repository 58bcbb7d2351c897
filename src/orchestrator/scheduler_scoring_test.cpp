// Groups whose rollouts get their rewards together, in the scheduler and in evaluations.
#include <gtest/gtest.h>

#include "orchestrator/fake_system.h"
#include "orchestrator/held_out.h"
#include "orchestrator/schedule_state_json.h"

namespace leeway {
namespace {

using namespace leeway::testing;

constexpr RolloutSchedule kSchedules[] = {RolloutSchedule::free, RolloutSchedule::lockstep};

OrchestratorTable one_group(RolloutSchedule schedule, int64_t group_size = 4) {
  OrchestratorTable table;
  table.schedule = schedule;
  table.prompts_per_batch = 1;
  table.group_size = group_size;
  table.max_off_policy_steps = 0;
  table.retry_backoff = 0.0;
  return table;
}

// One environment that scores groups; replies fail as `fails` says, by the number of the request.
struct Scored {
  Scored(const OrchestratorTable& table, std::function<bool(int64_t request)> fails)
      : environment(nullptr), system(options(table), [=](const FakeTalk& talk) {
          return [=, &talk](const Request&, int64_t request, int64_t) {
            FakeReply reply{talk.reply_of("abc"), 1.0};
            // Later than the others, so that those have ended before in both schedules.
            if (fails(request)) reply = {.wait = 3.0, .failure = "bad moment"};
            return reply;
          };
        }) {}
  FakeOptions options(const OrchestratorTable& table) {
    auto made = std::make_unique<FakeEnvironment>("letters", respond_by_letter);
    environment = made.get();
    environment->asks = environment->scores_groups = true;
    FakeOptions options{.table = table, .max_batches = 3};
    options.members.push_back({"letters", 1.0, std::move(made)});
    return options;
  }
  std::optional<std::vector<Group>> next_batch() {
    for (int pumps = 0; pumps < 100000; ++pumps) {
      system.scheduler.pump(0.01);
      const ScheduleTotals& t = system.scheduler.totals();
      EXPECT_EQ(t.admitted, t.completed + t.failed + t.cancelled + system.scheduler.running());
      if (auto batch = system.scheduler.take_batch()) return batch;
      if (!system.scheduler.dead_end().empty()) return std::nullopt;
    }
    ADD_FAILURE() << "neither a batch nor an end";
    return std::nullopt;
  }
  FakeEnvironment* environment;
  FakeSystem system;
};

TEST(GroupScoring, AFailedMemberIsRetriedBeforeTheGroupIsScored) {
  for (const RolloutSchedule schedule : kSchedules) {
    Scored scored(one_group(schedule), [](int64_t request) { return request == 2; });
    const auto batch = scored.next_batch();
    ASSERT_TRUE(batch);
    ASSERT_EQ(batch->at(0).rollouts.size(), 4u);
    for (const Rollout& rollout : batch->at(0).rollouts) EXPECT_EQ(rollout.reward, 1.0);
    EXPECT_EQ(scored.environment->groups_scored, 1);
    EXPECT_EQ(scored.system.scheduler.totals().failed, 1);
  }
}

TEST(GroupScoring, SurvivorsAreScoredIfTheyAreEnough) {
  for (const RolloutSchedule schedule : kSchedules) {
    for (const int64_t enough : {0, 3, 4}) {
      OrchestratorTable table = one_group(schedule);
      table.max_error_reschedule_attempts = 1;
      table.min_group_size = enough;
      Scored scored(table, [](int64_t request) { return request == 3; });
      const auto batch = scored.next_batch();
      ASSERT_TRUE(batch);
      const bool kept = enough == 3;
      EXPECT_EQ(batch->at(0).number, kept ? 0 : 1);
      EXPECT_EQ(batch->at(0).rollouts.size(), kept ? 3u : 4u);
      EXPECT_EQ(scored.environment->groups_scored, 1);
      const ScheduleTotals& totals = scored.system.scheduler.totals();
      EXPECT_EQ(totals.groups_partial, kept ? 1 : 0);
      EXPECT_EQ(totals.cancelled, kept ? 0 : 3) << "without a reward they have not completed";
    }
  }
}

TEST(GroupScoring, AFailedScoreIsAFailedRoundOfAllMembers) {
  for (const RolloutSchedule schedule : kSchedules) {
    for (const int64_t failures : {1, 2, 3}) {
      OrchestratorTable table = one_group(schedule);
      table.max_error_reschedule_attempts = 3;
      Scored scored(table, [](int64_t) { return false; });
      scored.environment->score_failure_of = [&](const auto&) {
        return scored.environment->groups_scored <= failures ? "no scorer" : "";
      };
      const auto batch = scored.next_batch();
      ASSERT_TRUE(batch);
      EXPECT_EQ(batch->at(0).number, failures == 3 ? 1 : 0) << "given up after 3 rounds";
      EXPECT_EQ(scored.system.scheduler.totals().failed, 4 * failures);
      EXPECT_EQ(scored.system.scheduler.totals().completed, 4);
    }
  }
}

// The others of its group wait for it; that does not keep the run from ending.
TEST(GroupScoring, AMemberThatNeverWorksEndsTheRun) {
  for (const RolloutSchedule schedule : kSchedules) {
    OrchestratorTable table = one_group(schedule);
    table.max_error_reschedule_attempts.reset();
    table.zero_progress_batches = 5.0;
    Scored scored(table, [](int64_t request) { return request >= 3; });
    EXPECT_FALSE(scored.next_batch());
    EXPECT_NE(scored.system.scheduler.dead_end().find("in a row failed"), std::string::npos);
    EXPECT_EQ(scored.environment->groups_scored, 0);
  }
}

TEST(GroupScoring, UnscoredRolloutsAreSampledAgainAfterAResume) {
  for (const RolloutSchedule schedule : kSchedules) {
    Scored first(one_group(schedule), [](int64_t) { return false; });
    first.environment->clock = &first.system.clock;
    // Three members wait for the fourth, which never ends.
    first.environment->wait_of = [n = 0](const Reply&, int64_t) mutable {
      return ++n == 4 ? std::numeric_limits<double>::infinity() : 0.0;
    };
    for (int i = 0; i < 1000; ++i) first.system.scheduler.pump(0.01);
    EXPECT_EQ(first.system.scheduler.running(), 4);
    const ScheduleState state = first.system.scheduler.state();
    EXPECT_EQ(state.totals.admitted, 0);
    EXPECT_EQ(state.totals.completed, 0);
    ASSERT_EQ(state.open.size(), 1u);
    Scored second(one_group(schedule), [](int64_t) { return false; });
    second.system.scheduler.restore(parse_schedule_state(
        "schedule.json", schedule_state_json(state, first.system.ids()), second.system.mix));
    const auto batch = second.next_batch();
    ASSERT_TRUE(batch);
    EXPECT_EQ(batch->at(0).number, 0);
    EXPECT_EQ(batch->at(0).rollouts.size(), 4u);
  }
}

TEST(GroupScoring, EvaluationsScoreGroupsToo) {
  Scored scored(one_group(RolloutSchedule::free), [](int64_t request) { return request % 7 == 3; });
  const EvaluationOptions options{.prompts = 10, .samples = 3, .max_attempts = 4};
  const HeldOutResult result = sample_held_out(scored.system.mix, scored.system.driver,
                                               scored.system.clock, options, [](auto...) {});
  EXPECT_EQ(result.completed, 30);
  EXPECT_EQ(scored.environment->groups_scored, 10);
  for (const PromptResult& prompt : result.prompts) EXPECT_EQ(prompt.rewards.size(), 3u);
  EXPECT_EQ(scored.system.driver.running(), 0);

  scored.environment->score_failure_of = [](const auto&) { return "no scorer"; };
  const HeldOutResult failed = sample_held_out(scored.system.mix, scored.system.driver,
                                               scored.system.clock, options, [](auto...) {});
  EXPECT_EQ(failed.completed, 0);
  EXPECT_EQ(failed.failed, 30);
  EXPECT_NE(failed.last_failure.find("no scorer"), std::string::npos);
}

}  // namespace
}  // namespace leeway
