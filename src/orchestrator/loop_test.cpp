#include "orchestrator/loop.h"

#include <gtest/gtest.h>

#include <map>
#include <set>

#include "base/files.h"
#include "orchestrator/fake_system.h"
#include "orchestrator/steady_clock.h"

namespace leeway {
namespace {

using namespace leeway::testing;

struct Played {
  LoopResult result;
  std::vector<StepRecord> steps;
  std::vector<RolloutFailure> failures;
};

OrchestratorTable loop_table(RolloutSchedule schedule, int64_t off_policy) {
  OrchestratorTable table;
  table.prompts_per_batch = 2;
  table.group_size = 3;
  table.max_off_policy_steps = off_policy;
  table.schedule = schedule;
  return table;
}

FakeSystem::MakePolicy random_policy(uint64_t delays, double trouble, double slowest = 0.3) {
  return [=](const FakeTalk& talk) { return RandomPolicy{talk, delays, trouble, 0.0, slowest}; };
}

// A loop that never ends is stopped after many polls, which fails the test.
Played play(FakeSystem& system, int64_t steps, const std::function<bool()>& stop = {},
            AdvantageProgram* program = nullptr, const std::function<void()>& told = {},
            bool saves = false) {
  Played out;
  int64_t looks = 0;
  LoopEvents events;
  events.on_step = [&](const StepRecord& record) {
    out.steps.push_back(record);
    if (told) told();
  };
  events.on_failure = [&](const RolloutFailure& failure) { out.failures.push_back(failure); };
  events.should_stop = [&] { return ++looks > 200000 || (stop && stop()); };
  events.wants_checkpoint = [&](int64_t) { return saves; };
  events.on_checkpoint = [](int64_t, const ScheduleState&) {};
  LoopOptions options;
  options.max_steps = steps;
  options.batch.program = program;
  out.result =
      run_loop(system.scheduler, system.learner, system.clock, system.ids(), options, events);
  EXPECT_LE(looks, 200000);
  return out;
}

double metric(const StepRecord& record, const std::string& wanted) {
  int found = 0;
  double result = 0.0;
  for (const auto& [name, value] : record.metrics) {
    if (name != wanted) continue;
    ++found;
    result = value;
  }
  EXPECT_EQ(found, 1) << wanted;
  return result;
}

void expect_in_order(const Played& played) {
  double elapsed = 0.0;
  for (size_t i = 0; i < played.steps.size(); ++i) {
    const StepRecord& record = played.steps[i];
    EXPECT_EQ(record.step, static_cast<int64_t>(i) + 1);
    EXPECT_EQ(record.batch.learner.step, record.step);
    EXPECT_EQ(record.learned.version, record.step);
    for (const char* name : {"perf/sampler_busy", "perf/trainer_busy"}) {
      EXPECT_GE(metric(record, name), 0.0) << name;
      EXPECT_LE(metric(record, name), 1.0) << name;
    }
    EXPECT_GE(record.batch.learner.waited, 0.0);
    EXPECT_LE(record.batch.learner.waited, metric(record, "time/wait_for_batch") + 1e-6);
    double shares = 0.0;
    for (const char* name : {"sample", "wait_for_environments", "prepare_batch", "report",
                             "checkpoint", "wait_for_trainer", "other"}) {
      const double share = metric(record, std::string("time/") + name);
      EXPECT_GE(share, 0.0) << name;
      shares += share;
    }
    EXPECT_NEAR(shares, metric(record, "time/step"), 1e-6);
    elapsed += metric(record, "time/step");
    EXPECT_NEAR(metric(record, "time/elapsed"), elapsed, 1e-6);
    EXPECT_EQ(metric(record, "progress/prompts"), 2.0 * static_cast<double>(i + 1));
  }
}

TEST(Loop, MakesTheStepsAskedForInEveryHistory) {
  for (uint64_t seed = 0; seed < 150; ++seed) {
    SCOPED_TRACE(fmt::format("seed {}", seed));
    Rng rng(mixed_seed({seed, 4}));
    const OrchestratorTable table =
        loop_table(seed % 2 == 0 ? RolloutSchedule::free : RolloutSchedule::lockstep,
                   static_cast<int64_t>(rng.below(4)));
    const int64_t steps = 1 + static_cast<int64_t>(rng.below(6));
    FakeSystem system({.table = table, .max_batches = steps, .seed = seed},
                      random_policy(seed, seed % 3 == 0 ? 0.04 : 0.0, 0.02 + rng.uniform()));
    system.learner.seconds_of = [&](int64_t) { return rng.uniform() * rng.uniform(); };
    const Played out = play(system, steps);
    EXPECT_EQ(out.result.end, LoopResult::End::finished) << out.result.reason;
    EXPECT_EQ(out.result.steps, steps);
    ASSERT_EQ(static_cast<int64_t>(out.steps.size()), steps);
    expect_in_order(out);
    for (const StepRecord& record : out.steps) {
      EXPECT_LE(metric(record, "off_policy_level/all/max"),
                static_cast<double>(table.max_off_policy_steps));
    }
    if (HasFailure()) return;
  }
}

TEST(Loop, NeverOverlapsWhenStrictlyOnPolicy) {
  for (const RolloutSchedule schedule : {RolloutSchedule::free, RolloutSchedule::lockstep}) {
    FakeSystem system({.table = loop_table(schedule, 0), .max_batches = 6}, random_policy(3, 0.03));
    system.sampler.on_submit = [&](const Request&) { EXPECT_FALSE(system.learner.busy()); };
    system.learner.seconds_of = [&](int64_t) {
      EXPECT_EQ(system.sampler.in_flight(), 0);
      return 0.2;
    };
    const Played out = play(system, 6);
    EXPECT_EQ(out.result.end, LoopResult::End::finished);
    for (const StepRecord& record : out.steps) {
      EXPECT_EQ(metric(record, "off_policy_level/all/max"), 0.0);
      const double waited =
          metric(record, "time/wait_for_environments") / metric(record, "time/step");
      EXPECT_NEAR(
          metric(record, "perf/sampler_busy") + metric(record, "perf/trainer_busy") + waited, 1.0,
          0.01)
          << "one of them works at any time";
    }
  }
}

TEST(Loop, SamplesWhileItLearns) {
  for (const RolloutSchedule schedule : {RolloutSchedule::free, RolloutSchedule::lockstep}) {
    const auto seconds = [&](int64_t off_policy) {
      FakeSystem system({.table = loop_table(schedule, off_policy), .max_batches = 10},
                        random_policy(3, 0.0));
      system.learner.seconds_of = [](int64_t) { return 0.3; };
      EXPECT_EQ(play(system, 10).result.end, LoopResult::End::finished);
      return system.clock.now();
    };
    EXPECT_LT(seconds(1), 0.8 * seconds(0)) << name_of(schedule);
  }
}

// What the loop's thread does otherwise, such as an evaluation, is no waiting for the sampler.
TEST(Loop, ALearnerHasWaitedForItsBatchWhileTheSamplerWorked) {
  constexpr double kTold = 100.0;
  for (const int64_t off_policy : {0, 1}) {
    FakeSystem system({.table = loop_table(RolloutSchedule::free, off_policy), .max_batches = 6},
                      random_policy(3, 0.0));
    system.learner.seconds_of = [](int64_t) { return 1e-3; };
    double waited = 0.0, idle = 0.0;
    const Played out = play(system, 6, {}, nullptr, [&] { system.clock.sleep(kTold); });
    EXPECT_EQ(out.result.end, LoopResult::End::finished) << out.result.reason;
    for (const StepRecord& record : out.steps) {
      waited += record.batch.learner.waited;
      idle += metric(record, "time/wait_for_batch");
    }
    EXPECT_GT(waited, 0.0);
    EXPECT_LT(waited, 0.5 * kTold);
    EXPECT_GT(idle, 4 * kTold);
  }
}

// A step that is saved keeps the learner from the next one until the sampler has its weights.
TEST(Loop, ALearnerDoesNotWaitForItsBatchWhileACheckpointIsDue) {
  constexpr double kSwap = 100.0;
  FakeSystem system({.table = loop_table(RolloutSchedule::free, 1), .max_batches = 6},
                    random_policy(3, 0.0));
  system.learner.seconds_of = [](int64_t) { return 1e-3; };
  system.sampler.on_update = [&](PolicyVersion) { system.clock.sleep(kSwap); };
  double waited = 0.0, idle = 0.0;
  const Played out = play(system, 6, {}, nullptr, {}, /*saves=*/true);
  EXPECT_EQ(out.result.end, LoopResult::End::finished) << out.result.reason;
  for (const StepRecord& record : out.steps) {
    waited += record.batch.learner.waited;
    idle += metric(record, "time/wait_for_batch");
  }
  EXPECT_LT(waited, 0.5 * kSwap);
  EXPECT_GT(idle, 4 * kSwap);
}

TEST(Loop, StopsAfterTheUpdateInProgress) {
  for (size_t after = 0; after < 4; ++after) {
    FakeSystem system({.table = loop_table(RolloutSchedule::free, 1), .max_batches = 10},
                      random_policy(3, 0.0));
    // Asked as soon as update `after` has begun; 0: from the start.
    const Played out = play(system, 10, [&] { return system.learner.batches().size() == after; });
    EXPECT_EQ(out.result.end, LoopResult::End::stopped);
    EXPECT_EQ(out.result.steps, static_cast<int64_t>(after));
    EXPECT_EQ(out.steps.size(), after);
    EXPECT_FALSE(system.learner.busy());
  }
}

// What is not trained is there for a resumed run.
TEST(Loop, StoppedWhileAProgramIsAskedKeepsTheBatch) {
  FakeSystem system({.table = loop_table(RolloutSchedule::free, 1), .max_batches = 10},
                    random_policy(3, 0.0));
  OrchestratorTable table;
  table.advantage_command =
      R"(read -r hello; echo '{"type": "hello", "protocol": 1}'; exec sleep 3600)";
  table.advantage_timeout = 3600.0;
  SteadyClock clock;
  AdvantageProgram program(table, clock);
  bool taken = false;
  const Played out = play(
      system, 10, [&] { return taken |= system.scheduler.totals().groups_batched > 0; }, &program);
  EXPECT_TRUE(taken);
  EXPECT_EQ(out.result.end, LoopResult::End::stopped) << out.result.reason;
  EXPECT_EQ(out.result.steps, 0);
  EXPECT_EQ(system.scheduler.totals().batched, 0);
  EXPECT_EQ(system.scheduler.totals().groups_batched, 0);
  EXPECT_GE(system.scheduler.state().finished.size(), 2u);
}

TEST(Loop, GivesUpWhenTheLearnerFails) {
  FakeSystem system({.table = loop_table(RolloutSchedule::lockstep, 1), .max_batches = 10},
                    random_policy(3, 0.0));
  system.learner.failure_of = [](int64_t step) {
    return step == 3 ? std::string("step 3: the loss is not finite") : std::string();
  };
  const Played out = play(system, 10);
  EXPECT_EQ(out.result.end, LoopResult::End::gave_up);
  EXPECT_TRUE(out.result.reason.starts_with("step 3: the loss is not finite (the batch of"))
      << out.result.reason;
  EXPECT_EQ(out.result.steps, 2);
  EXPECT_EQ(out.steps.size(), 2u);
}

TEST(Loop, GivesUpWhenEveryGroupFails) {
  struct Case {
    std::string name, message;
    FakeReply reply;
    bool refuse = false;
  };
  const FakeTalk talk(false);
  for (const Case& c : std::vector<Case>{
           {"sampler", "sampler_error: no route", {.wait = 0.1, .failure = "no route"}},
           {"environment", "environment_error: the judge is away", {talk.reply_of("Fa")}},
           {"exception", "exception: the judge broke", {talk.reply_of("Xa")}},
           {"empty", "empty: the reply has no token", {.wait = 0.1}},
           {"refused", "exception: never", {}, true}}) {
    for (const RolloutSchedule schedule : {RolloutSchedule::free, RolloutSchedule::lockstep}) {
      SCOPED_TRACE(c.name + " " + name_of(schedule));
      FakeSystem system({.table = loop_table(schedule, 1), .max_batches = 10},
                        [&](const FakeTalk&) {
                          return [&](const Request&, int64_t, int64_t) { return c.reply; };
                        });
      system.sampler.on_submit = [&](const Request&) {
        if (c.refuse) throw Error("never");
      };
      const Played out = play(system, 10);
      EXPECT_EQ(out.result.end, LoopResult::End::gave_up);
      EXPECT_EQ(out.result.steps, 0);
      EXPECT_NE(out.result.reason.find("rollouts in a row failed"), std::string::npos)
          << out.result.reason;
      EXPECT_NE(out.result.reason.find(c.message), std::string::npos) << out.result.reason;
      EXPECT_LT(system.clock.now(), 10.0);
    }
  }
}

TEST(Loop, GoesOnWhenSomeGroupsFail) {
  std::vector<EnvironmentMix::Member> members;
  members.push_back(fake_member("letters", 1.0));
  members.push_back(
      fake_member("away", 1.0, [](const Reply&, int64_t) { return failed_turn("no"); }));
  OrchestratorTable table = loop_table(RolloutSchedule::free, 1);
  table.zero_progress_batches = 20;
  FakeSystem system({.table = table, .max_batches = 40, .members = std::move(members)},
                    random_policy(3, 0.0));
  const Played out = play(system, 40);
  EXPECT_EQ(out.result.end, LoopResult::End::finished) << out.result.reason;
  double errored = 0.0, dropped = 0.0;
  for (const StepRecord& record : out.steps) {
    errored += metric(record, "errored_rollouts/away");
    dropped += metric(record, "dropped_groups/away");
    EXPECT_EQ(metric(record, "errored_rollouts/letters"), 0.0);
    EXPECT_EQ(metric(record, "dropped_groups/all"), metric(record, "dropped_groups/away"));
    EXPECT_EQ(
        metric(record, "cancelled_rollouts/all"),
        metric(record, "cancelled_rollouts/stale") + metric(record, "cancelled_rollouts/dropped"));
  }
  EXPECT_GT(dropped, 20.0) << "more than may fail in a row";
  EXPECT_GE(errored, 3.0 * dropped) << "a failure in each of three rounds";
}

// "a/{b,c}" to "a/b" and "a/c"; what has a name of its own at every run becomes a star.
std::vector<std::string> expanded(const std::string& pattern, const std::string& id) {
  const size_t open = pattern.find('{');
  if (open == std::string::npos) return {pattern};
  const size_t close = pattern.find('}', open);
  std::vector<std::string> all;
  for (size_t start = open + 1; start <= close;) {
    const size_t end = std::min(pattern.find(',', start), close);
    std::string word = pattern.substr(start, end - start);
    if (word == "env") word = id;
    if (word == "part" || word == "reason") word = "*";
    for (std::string& rest :
         expanded(pattern.substr(0, open) + word + pattern.substr(close + 1), id)) {
      all.push_back(std::move(rest));
    }
    start = end + 1;
  }
  return all;
}

std::set<std::string> documented_metrics(const std::string& id) {
  const std::string page = read_file(std::string(LEEWAY_SOURCE_DIR) + "/docs/runs.md");
  const size_t begin = page.find("## metrics.jsonl"), end = page.find("## eval.jsonl");
  std::set<std::string> names;
  for (size_t line = page.find("\n| `", begin); line < end; line = page.find("\n| `", line + 1)) {
    const size_t stop = page.find(" | ", line + 3);
    for (size_t tick = page.find('`', line); tick < stop; tick = page.find('`', tick + 1)) {
      const size_t close = page.find('`', tick + 1);
      for (std::string& name : expanded(page.substr(tick + 1, close - tick - 1), id)) {
        names.insert(std::move(name));
      }
      tick = close;
    }
  }
  return names;
}

TEST(Loop, TellsOfEveryFailureAndItsShare) {
  FakeSystem system({.table = loop_table(RolloutSchedule::lockstep, 0), .max_batches = 6},
                    random_policy(3, 0.1));
  const Played out = play(system, 6);
  ASSERT_EQ(out.result.end, LoopResult::End::finished) << out.result.reason;
  double failed = 0.0;
  for (const StepRecord& record : out.steps) {
    const double errored = metric(record, "errored_rollouts/all");
    const double empty = metric(record, "empty_rollouts/all");
    failed += errored + empty;
    // Strictly on-policy, a step's rollouts end before it: its six completed ones, or more where
    // groups are given up, and those that failed.
    const double rate = metric(record, "errored_rollouts/all/rate");
    EXPECT_EQ(rate == 0.0, errored == 0.0);
    EXPECT_LE(rate, errored / (errored + empty + 6.0) + 1e-12);
    EXPECT_EQ(rate, metric(record, "errored_rollouts/letters/rate")) << "the only environment";
    EXPECT_EQ(metric(record, "empty_rollouts/all/rate") == 0.0, empty == 0.0);
  }
  EXPECT_GT(failed, 0.0);
  EXPECT_EQ(static_cast<double>(out.failures.size()), failed);
  for (const RolloutFailure& failure : out.failures) EXPECT_FALSE(failure.message.empty());
}

TEST(Loop, ReportsMetricsUnderTheNamesOfTheManual) {
  FakeSystem system({.table = loop_table(RolloutSchedule::free, 1), .max_batches = 2},
                    random_policy(3, 0.02));
  const Played out = play(system, 2);
  ASSERT_EQ(out.steps.size(), 2u);
  const std::set<std::string> documented = documented_metrics("letters");
  ASSERT_GT(documented.size(), 40u);
  std::set<std::string> seen;
  for (const auto& [name, value] : out.steps[1].metrics) {
    EXPECT_TRUE(seen.insert(name).second) << name << " is there twice";
    const std::string any = name.substr(0, name.rfind('/')) + "/*";
    EXPECT_TRUE(documented.contains(name) || documented.contains(any)) << name;
  }
  for (const char* name : {"reward/all/mean",
                           "reward/letters/exact",
                           "loss",
                           "off_policy_level/letters/max",
                           "samples_per_rollout",
                           "prefix_breaks/all",
                           "turns/all/mean",
                           "seq_len/all/max",
                           "decode_len/all/mean",
                           "is_truncated/all",
                           "errored_rollouts/all",
                           "empty_rollouts/letters",
                           "dropped_groups/all",
                           "cancelled_rollouts/stale",
                           "singleton_groups",
                           "zero_advantage_groups",
                           "filtered_groups",
                           "batch/rollouts",
                           "batch/samples",
                           "progress/prompts",
                           "progress/rollouts",
                           "progress/sampled_tokens",
                           "perf/sampled_tokens_per_second",
                           "perf/sampler_busy",
                           "perf/trainer_busy",
                           "time/step",
                           "time/wait_for_batch",
                           "time/elapsed"}) {
    EXPECT_TRUE(seen.contains(name)) << name;
  }
  EXPECT_EQ(metric(out.steps[1], "progress/prompts"), 4.0);
}

}  // namespace
}  // namespace leeway
