// What a scheduler hands over to the one that continues in its place.
#include <gtest/gtest.h>

#include "orchestrator/fake_system.h"
#include "orchestrator/schedule_state_json.h"

namespace leeway {
namespace {

using namespace leeway::testing;

// Nothing more comes after so many. Prompts that do not start fail without ever running.
constexpr int kIdlePumps = 20;

// Sampling up to its end or a part of it. A third of one environment's prompts never work, and
// every rollout may fail.
class Half {
 public:
  explicit Half(const OrchestratorTable& table)
      : system_(options(table), [](const FakeTalk& talk) {
          return RandomPolicy{talk, 1, 0.05};
        }) {}

  void go_on(const std::string& json) {
    system_.scheduler.restore(parse_schedule_state("schedule.json", json, system_.mix));
  }
  // Samples until `enough` or everything that may be sampled has been; returns whether `enough` was
  // reached.
  template <class Enough>
  bool sample_until(Enough&& enough) {
    for (int pumps = 0, idle = 0; pumps < 100000 && idle < kIdlePumps; ++pumps) {
      system_.scheduler.pump(0.01);
      if (enough(system_.scheduler)) return true;
      idle = system_.scheduler.running() == 0 ? idle + 1 : 0;
    }
    return false;
  }
  void sample_all() {
    sample_until([](const RolloutScheduler&) { return false; });
  }
  std::string state() const {
    return schedule_state_json(system_.scheduler.state(), system_.ids());
  }
  RolloutScheduler& scheduler() { return system_.scheduler; }

 private:
  static FakeOptions options(const OrchestratorTable& table) {
    FakeOptions options{.table = table, .max_batches = 3, .seed = 5};
    auto environment = std::make_unique<FakeEnvironment>("letters", respond_by_letter);
    environment->train_size = 12;
    environment->on_start = [](const Example& example) {
      if (example.index % 3 == 1) throw std::runtime_error("poison");
    };
    options.members.push_back({"letters", 1.0, std::move(environment)});
    options.members.push_back(fake_member("others", 1.0));
    return options;
  }
  FakeSystem system_;
};

OrchestratorTable table_of(RolloutSchedule schedule) {
  OrchestratorTable table;
  table.schedule = schedule;
  table.retry_backoff = 0.0;
  table.prompts_per_batch = 6;
  table.group_size = 3;
  table.max_off_policy_steps = 2;
  table.min_group_size = 2;
  table.max_error_reschedule_attempts = 2;
  table.max_prompt_failures = 1;
  table.zero_progress_batches = 100.0;
  return table;
}

// All of it in words.
std::string words_of(const ScheduleCounts& counts) {
  std::string text;
  for (size_t e = 0; e < counts.errored.size(); ++e) {
    text += fmt::format("{}: {} errored, {} empty, {} dropped\n", e, counts.errored[e],
                        counts.empty[e], counts.dropped_groups[e]);
  }
  for (const auto& [kind, count] : counts.failures) {
    text += fmt::format("{} {}\n", name_of(kind), count);
  }
  text += fmt::format("cancelled {} {}, partial {}, passed over {}\n", counts.cancelled_stale,
                      counts.cancelled_dropped, counts.partial_groups, counts.quarantined_draws);
  std::map<int64_t, std::string> groups;  // the order of completion is not guaranteed
  for (const DroppedGroup& group : counts.given_up) {
    groups[group.number] =
        fmt::format("group {} of {}, example {}: {} {} {}\n", group.number, group.environment,
                    group.example, group.survivors, group.trained, group.message);
  }
  for (const auto& [number, words] : groups) text += words;
  return text;
}

TEST(ScheduleState, HoldsTheCountsThatWereNotTaken) {
  for (const RolloutSchedule schedule : {RolloutSchedule::free, RolloutSchedule::lockstep}) {
    SCOPED_TRACE(name_of(schedule));
    Half first(table_of(schedule));
    first.sample_all();
    const std::string saved = first.state();
    const ScheduleCounts counts = first.scheduler().take_counts();
    EXPECT_GT(counts.failures.size(), 2u);
    EXPECT_GT(std::min({counts.given_up.size(), static_cast<size_t>(counts.partial_groups),
                        static_cast<size_t>(counts.dropped_groups.at(0))}),
              0u);
    Half second(table_of(schedule));
    second.go_on(saved);
    EXPECT_EQ(words_of(second.scheduler().take_counts()), words_of(counts));
    EXPECT_EQ(words_of(second.scheduler().take_counts()), words_of(ScheduleCounts(2)));
    // What was taken is not left to another.
    Half third(table_of(schedule));
    third.go_on(first.state());
    EXPECT_EQ(words_of(third.scheduler().take_counts()), words_of(ScheduleCounts(2)));
  }
}

// In lockstep an unfinished group restarts, with everything that happened to it.
TEST(ScheduleState, CountsNoFailureTwiceInLockstep) {
  Half whole(table_of(RolloutSchedule::lockstep));
  whole.sample_all();
  const std::string wanted = words_of(whole.scheduler().take_counts());
  int repeated = 0;  // states with failures that happen again
  for (int64_t ended = 1;; ++ended) {
    Half first(table_of(RolloutSchedule::lockstep));
    const bool going_on = first.sample_until([&](const RolloutScheduler& scheduler) {
      return scheduler.totals().completed + scheduler.totals().failed >= ended;
    });
    const ScheduleState state = first.scheduler().state();
    repeated += words_of(state.counts) != words_of(first.scheduler().take_counts()) ? 1 : 0;
    Half second(table_of(RolloutSchedule::lockstep));
    second.go_on(schedule_state_json(state, {"letters", "others"}));
    second.sample_all();
    ASSERT_EQ(words_of(second.scheduler().take_counts()), wanted) << ended;
    if (!going_on) break;
  }
  EXPECT_GT(repeated, 3);
}

// A state that is made by hand need not have vectors.
TEST(ScheduleState, OfNothingIsAStart) {
  Half whole(table_of(RolloutSchedule::free)), restored(table_of(RolloutSchedule::free));
  restored.scheduler().restore(ScheduleState());
  whole.sample_all();
  restored.sample_all();
  EXPECT_EQ(words_of(restored.scheduler().take_counts()),
            words_of(whole.scheduler().take_counts()));
}

}  // namespace
}  // namespace leeway
