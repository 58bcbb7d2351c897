#include "orchestrator/schedule_checks.h"

#include <gtest/gtest.h>

#include <functional>

#include "leeway/error.h"
#include "orchestrator/fake_system.h"
#include "orchestrator/schedule_state_json.h"

namespace leeway {
namespace {

using namespace leeway::testing;

constexpr int64_t kVocabulary = 1 << 20;  // of the fake sampler's tokens: none is beyond

OrchestratorTable table_of(RolloutSchedule schedule) {
  OrchestratorTable table;
  table.schedule = schedule;
  table.retry_backoff = 0.0;
  table.prompts_per_batch = 4;
  table.group_size = 3;
  table.max_off_policy_steps = 2;
  table.min_group_size = 2;
  table.max_error_reschedule_attempts = 2;
  table.max_prompt_failures = 1;
  table.zero_progress_batches = 100.0;
  return table;
}

// Rollouts of which `failing` of all turns fail.
std::unique_ptr<FakeSystem> system_of(const OrchestratorTable& table, double failing) {
  FakeOptions options{.table = table, .max_batches = 20, .seed = 5};
  options.members.push_back(fake_member("letters", 1.0));
  options.members.push_back(fake_member("others", 2.0));
  return std::make_unique<FakeSystem>(std::move(options), [failing](const FakeTalk& talk) {
    return RandomPolicy{talk, 1, failing};
  });
}

std::string error_of(const ScheduleState& state, int64_t step) {
  try {
    check_schedule_state("schedule.json", state, table_of(RolloutSchedule::lockstep), step,
                         kVocabulary);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

// A state after two batches, with finished and open groups.
ScheduleState state_after_two_batches() {
  auto system = system_of(table_of(RolloutSchedule::free), 0.0);
  for (PolicyVersion step = 1; step <= 2; ++step) {
    while (!system->scheduler.take_batch()) system->scheduler.pump(0.01);
    system->scheduler.offer_weights(nullptr, step);
  }
  while (system->scheduler.state().finished.empty() || system->scheduler.state().open.empty()) {
    system->scheduler.pump(0.001);
  }
  return system->scheduler.state();
}

TEST(ScheduleChecks, EveryStateOfARunIsPossible) {
  for (const RolloutSchedule schedule : {RolloutSchedule::free, RolloutSchedule::lockstep}) {
    for (const double failing : {0.0, 0.05, 0.2}) {
      SCOPED_TRACE(fmt::format("{} {}", name_of(schedule), failing));
      auto system = system_of(table_of(schedule), failing);
      PolicyVersion step = 0;
      int64_t looks = 0;
      for (int pumps = 0; pumps < 3000 && step < 6; ++pumps) {
        system->scheduler.pump(0.002);
        if (system->scheduler.take_batch()) system->scheduler.offer_weights(nullptr, ++step);
        // Saved states are of moments at which the sampler has the newest weights.
        if (system->scheduler.version() != step) continue;
        ASSERT_EQ(error_of(system->scheduler.state(), step), "");
        ++looks;
      }
      EXPECT_GT(looks, 10);
      EXPECT_GT(step, 1);
    }
  }
}

TEST(ScheduleChecks, NamesWhatCannotBe) {
  const ScheduleState good = state_after_two_batches();
  ASSERT_EQ(error_of(good, 2), "");
  ASSERT_FALSE(good.open.empty());
  struct Case {
    std::function<void(ScheduleState&)> change;
    const char* words;
  };
  const Case cases[] = {
      {[](ScheduleState& s) { s.totals.admitted = 0; }, "\"admitted\" = 0"},
      {[](ScheduleState& s) { s.next_group = int64_t{1} << 40; }, "\"next_group\" = 1099511627776"},
      {[](ScheduleState& s) {
         s.next_group = s.totals.groups_stale = s.totals.groups_opened = int64_t{1} << 40;
       },
       "\"groups_opened\""},
      {[](ScheduleState& s) {
         s.totals.groups_stale += int64_t{1} << 40;
         s.totals.groups_opened += int64_t{1} << 40;
         s.next_group += int64_t{1} << 40;
       },
       "is above"},
      {[](ScheduleState& s) { s.version = 3; }, "\"version\" = 3"},
      {[](ScheduleState& s) { s.batches_taken = 1; }, "\"batches_taken\" = 1"},
      {[](ScheduleState& s) {
         ++s.totals.completed;
         ++s.totals.admitted;
       },
       "\"completed\""},
      {[](ScheduleState& s) { s.totals.filtered = 1000; }, "\"filtered\" = 1000"},
      {[](ScheduleState& s) { s.next_rollout = 0; }, "\"admitted\""},
      {[](ScheduleState& s) { s.next_group = 0; }, "\"next_group\" = 0"},
      {[](ScheduleState& s) { s.totals.groups_batched = 7; }, "\"groups_batched\" = 7"},
      {[](ScheduleState& s) { s.finished.push_back(s.finished.back()); }, "\"completed\""},
      {[](ScheduleState& s) { s.finished.back().number = s.open.back().first; }, "there twice"},
      {[](ScheduleState& s) { s.finished.back().number = s.next_group; }, "was not drawn"},
      {[](ScheduleState& s) { s.finished[0].rollouts[0].reward = std::nan(""); }, "\"reward\""},
      {[](ScheduleState& s) { s.finished[0].rollouts[0].steps[0].completion[0] = -1; },
       "-1 is not a token"},
      {[](ScheduleState& s) { s.finished[0].rollouts[0].steps[0].prompt = {kVocabulary}; },
       "1048576 is not a token"},
      {[](ScheduleState& s) { s.finished[0].rollouts[0].steps[0].versions[0] = 9; },
       "\"versions\" holds 9"},
      {[](ScheduleState& s) { s.finished[0].rollouts[0].steps[0].loss_mask = {2}; },
       "\"loss_mask\" holds 2"},
      {[](ScheduleState& s) {
         s.finished[0].rollouts[0].metrics = {{"x", std::nan("")}};
       },
       "the metric \"x\""},
      {[](ScheduleState& s) {
         s.finished[0].rollouts[0].credit = {{std::nan(""), {}}};
       },
       "\"credit\""},
  };
  for (const Case& each : cases) {
    ScheduleState state = good;
    each.change(state);
    const std::string error = error_of(state, 2);
    EXPECT_NE(error.find(each.words), std::string::npos) << each.words << ": " << error;
    EXPECT_EQ(error.find("schedule.json: "), 0u) << error;
  }
  EXPECT_NE(error_of(good, 3), "");
}

// Whatever of the numbers is changed: it is refused, or a scheduler goes on from it.
TEST(ScheduleChecks, WhatIsNotRefusedIsGoneOnFrom) {
  const std::string good = schedule_state_json(state_after_two_batches(), {"letters", "others"});
  Rng rng(11);
  int accepted = 0, refused = 0;
  for (int round = 0; round < 1500; ++round) {
    std::string json = good;
    for (uint64_t change = 1 + rng.below(3); change > 0; --change) {
      // A digit somewhere: most of the text is tokens, so that the counters at its start are chosen
      // as often.
      const size_t reach = rng.below(2) == 0 ? json.size() : std::min<size_t>(json.size(), 700);
      const size_t at = json.find_first_of("0123456789", rng.below(reach));
      if (at == std::string::npos) continue;
      const char digit = static_cast<char>('0' + rng.below(10));
      rng.below(3) == 0 ? json.insert(at, 1, digit) : json.replace(at, 1, 1, digit);
    }
    auto system = system_of(table_of(RolloutSchedule::free), 0.0);
    try {
      ScheduleState state = parse_schedule_state("schedule.json", json, system->mix);
      check_schedule_state("schedule.json", state, table_of(RolloutSchedule::free), 2, kVocabulary);
      system->scheduler.restore(state);
    } catch (const Error&) {
      ++refused;
      continue;
    }
    ++accepted;
    for (int pump = 0; pump < 20; ++pump) {
      system->scheduler.pump(0.01);
      system->scheduler.take_batch();
    }
  }
  EXPECT_GT(std::min(accepted, refused), 100);
}

}  // namespace
}  // namespace leeway
