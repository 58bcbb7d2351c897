// Known failure modes of retrying rollouts in other systems, each with what happens here instead.
#include <gtest/gtest.h>

#include <limits>
#include <set>

#include "base/files.h"
#include "orchestrator/fake_system.h"
#include "orchestrator/loop.h"
#include "orchestrator/schedule_state_json.h"

namespace leeway {
namespace {

using namespace leeway::testing;

constexpr double kForEver = std::numeric_limits<double>::infinity();

OrchestratorTable one_group(int64_t group_size, std::optional<int64_t> cap,
                            RolloutSchedule schedule = RolloutSchedule::free) {
  OrchestratorTable table;
  table.prompts_per_batch = 1;
  table.group_size = group_size;
  table.max_off_policy_steps = 0;
  table.max_error_reschedule_attempts = cap;
  table.retry_backoff = 0.0;
  table.schedule = schedule;
  return table;
}

// Replies "abc" after a second, as modified by `change`. The first request of a prompt comes from
// its group; later ones are retries.
using Change = std::function<void(FakeReply& reply, int64_t request, int64_t sample)>;
FakeSystem::MakePolicy replies(Change change) {
  return [=](const FakeTalk& talk) {
    return [=, &talk](const Request&, int64_t request, int64_t sample) {
      FakeReply reply{talk.reply_of("abc"), 1.0};
      change(reply, request, sample);
      return reply;
    };
  };
}
FakeSystem::MakePolicy failing(std::function<bool(int64_t request, int64_t sample)> fails) {
  return replies([=](FakeReply& reply, int64_t request, int64_t sample) {
    if (fails(request, sample)) reply.failure = "bad moment";
  });
}

std::optional<std::vector<Group>> next_batch(FakeSystem& system) {
  for (int pumps = 0; pumps < 200000; ++pumps) {
    system.scheduler.pump(0.01);
    if (auto batch = system.scheduler.take_batch()) return batch;
    if (!system.scheduler.dead_end().empty()) return std::nullopt;
  }
  ADD_FAILURE() << "neither a batch nor an end";
  return std::nullopt;
}

struct Played {
  LoopResult result;
  std::vector<StepRecord> steps;
};
Played play(FakeSystem& system, int64_t steps) {
  Played out;
  int64_t looks = 0;
  LoopEvents events;
  events.on_step = [&](const StepRecord& record) { out.steps.push_back(record); };
  events.should_stop = [&] { return ++looks > 400000; };
  events.wants_checkpoint = [](int64_t) { return false; };
  events.on_checkpoint = [](int64_t, const ScheduleState&) {};
  LoopOptions options;
  options.max_steps = steps;
  out.result =
      run_loop(system.scheduler, system.learner, system.clock, system.ids(), options, events);
  EXPECT_LE(looks, 400000) << "the run does not end";
  return out;
}

double metric(const StepRecord& record, const std::string& wanted) {
  for (const auto& [name, value] : record.metrics) {
    if (name == wanted) return value;
  }
  ADD_FAILURE() << wanted << " is not reported";
  return 0.0;
}

// An environment with `size` prompts (0: endless), and options for it alone.
struct OneEnvironment {
  explicit OneEnvironment(uint64_t size)
      : made(std::make_unique<FakeEnvironment>("letters", respond_by_letter)), at(made.get()) {
    if (size > 0) at->train_size = size;
  }
  std::vector<EnvironmentMix::Member> members() {
    std::vector<EnvironmentMix::Member> all;
    all.push_back({"letters", 1.0, std::move(made)});
    return all;
  }
  std::unique_ptr<FakeEnvironment> made;
  FakeEnvironment* at;
};

TEST(FailureMode, N01_OneBadMomentIsOneRound) {
  for (const RolloutSchedule schedule : {RolloutSchedule::free, RolloutSchedule::lockstep}) {
    for (const int64_t failures : {1, 3, 8, 16}) {
      FakeSystem system({.table = one_group(16, 3, schedule), .max_batches = 1},
                        failing([=](int64_t request, int64_t sample) {
                          return request == 0 && sample < failures;
                        }));
      const auto batch = next_batch(system);
      ASSERT_TRUE(batch);
      EXPECT_EQ(batch->at(0).number, 0) << failures << " failures at once are one round";
      EXPECT_EQ(batch->at(0).rollouts.size(), 16u);
      EXPECT_EQ(system.scheduler.totals().failed, failures);
      EXPECT_EQ(system.scheduler.totals().groups_dropped, 0);
    }
  }
}

// Retry rounds of a group add up, whatever completes in between; those of other groups do not
// count.
TEST(FailureMode, N02_RoundsOfAGroupAddUpAsTheManualSays) {
  for (const RolloutSchedule schedule : {RolloutSchedule::free, RolloutSchedule::lockstep}) {
    for (int64_t rounds = 1; rounds <= 4; ++rounds) {
      OrchestratorTable table = one_group(3, 3, schedule);
      table.prompts_per_batch = 2;
      FakeSystem system({.table = table, .max_batches = 1}, [&](const FakeTalk& talk) {
        return [&](const Request& request, int64_t, int64_t sample) {
          FakeReply reply{talk.reply_of("abc"), 1.0};
          // Sample 0 of both groups fails; the other samples complete meanwhile.
          int64_t before = 0;
          for (const auto& sent : system.sampler.sent()) {
            before += sent.request.prompt == request.prompt ? 1 : 0;
          }
          if (sample == 0 && before <= rounds) reply.failure = "now and then";
          return reply;
        };
      });
      const bool kept = rounds < 3;
      if (kept) {
        const auto batch = next_batch(system);
        ASSERT_TRUE(batch);
        EXPECT_EQ(batch->at(0).number + batch->at(1).number, 1);
        EXPECT_EQ(system.scheduler.totals().failed, 2 * rounds);
      } else {
        while (system.scheduler.totals().groups_dropped == 0) system.scheduler.pump(0.01);
        EXPECT_EQ(system.scheduler.take_counts().given_up.at(0).survivors, 2);
      }
    }
  }
  const std::string page = read_file(std::string(LEEWAY_SOURCE_DIR) + "/docs/configuration.md");
  const size_t line = page.find("`max_error_reschedule_attempts`");
  ASSERT_NE(line, std::string::npos);
  EXPECT_NE(page.substr(line, page.find('\n', line) - line).find("Rounds with a failure"),
            std::string::npos);
}

TEST(FailureMode, N03_ExceptionsGoTheWayOfErrorResults) {
  struct Case {
    FailureKind kind;
    std::string reply, failure;
    bool submit_throws = false, start_throws = false, hangs = false;
  };
  for (const RolloutSchedule schedule : {RolloutSchedule::free, RolloutSchedule::lockstep}) {
    for (const int64_t cap : {1, 2}) {
      for (const Case& c : std::vector<Case>{{FailureKind::sampler_error, "abc", "no route"},
                                             {FailureKind::environment_error, "Fa", ""},
                                             {FailureKind::bad_answer, "Na", ""},
                                             {FailureKind::exception, "Xa", ""},
                                             {FailureKind::empty, "", ""},
                                             {FailureKind::exception, "abc", "", true},
                                             {FailureKind::exception, "abc", "", false, true},
                                             {FailureKind::timeout, "a", "", false, false, true}}) {
        for (const int asks : {0, 1, 2}) {  // 2: and groups are scored together
          SCOPED_TRACE(fmt::format("{} {} {:?} {}", name_of(schedule), cap, c.reply, asks));
          bool down = true;
          OneEnvironment environment(0);
          environment.at->asks = asks > 0;
          environment.at->scores_groups = asks > 1;
          environment.at->on_start = [&](const Example&) {
            if (down && c.start_throws) throw std::runtime_error("no process");
          };
          FakeOptions options{.table = one_group(2, cap, schedule), .max_batches = 1};
          options.members = environment.members();
          options.rollouts.timeout = 5.0;
          FakeSystem system(std::move(options), [&](const FakeTalk& talk) {
            return [&](const Request&, int64_t, int64_t) {
              FakeReply reply{talk.reply_of("abc")};
              if (!down || c.submit_throws || c.start_throws) return reply;
              reply.ids = c.reply.empty() ? std::vector<int32_t>{} : talk.reply_of(c.reply);
              reply.failure = c.failure;
              reply.wait = c.hangs ? kForEver : 0.0;
              return reply;
            };
          });
          system.sampler.on_submit = [&](const Request&) {
            if (down && c.submit_throws) throw Error("refused");
          };
          while (system.scheduler.totals().failed == 0) system.scheduler.pump(0.01);
          down = false;
          EXPECT_EQ(system.scheduler.totals().groups_dropped, cap == 1 ? 1 : 0);
          const auto batch = next_batch(system);
          ASSERT_TRUE(batch);
          EXPECT_EQ(batch->at(0).number, cap == 1 ? 1 : 0);
          const ScheduleCounts counts = system.scheduler.take_counts();
          ASSERT_EQ(counts.failures.size(), 1u);
          EXPECT_EQ(counts.failures.begin()->first, c.kind);
        }
      }
    }
  }
}

// The second request shares nothing with the first, so it may be served elsewhere.
TEST(FailureMode, N04_ARetryIsANewRequest) {
  FakeSystem system({.table = one_group(2, 3), .max_batches = 1},
                    failing([](int64_t request, int64_t) { return request == 0; }));
  ASSERT_TRUE(next_batch(system));
  const auto& sent = system.sampler.sent();
  ASSERT_EQ(sent.size(), 3u);
  std::set<uint64_t> seeds;
  for (const auto& one : sent) {
    EXPECT_EQ(one.request.prompt, sent[0].request.prompt);
    EXPECT_FALSE(one.cancelled);
    seeds.insert(one.request.seed);
  }
  EXPECT_EQ(seeds.size(), 3u);
}

TEST(FailureMode, N05_TheWaitBeforeARetryDoubles) {
  for (const RolloutSchedule schedule : {RolloutSchedule::free, RolloutSchedule::lockstep}) {
    OrchestratorTable table = one_group(1, std::nullopt, schedule);
    table.retry_backoff = 0.5;
    table.zero_progress_batches = 100.0;
    std::vector<double> times;
    FakeSystem system({.table = table, .max_batches = 1},
                      replies([](FakeReply& reply, int64_t request, int64_t) {
                        reply.wait = 0.0;
                        if (request < 10) reply.failure = "bad moment";
                      }));
    system.sampler.on_submit = [&](const Request&) { times.push_back(system.clock.now()); };
    ASSERT_TRUE(next_batch(system));
    ASSERT_EQ(times.size(), 11u);
    double expected = 0.5;
    for (size_t i = 1; i < times.size(); ++i) {
      EXPECT_NEAR(times[i] - times[i - 1], std::min(expected, 60.0), 0.011) << "one slice";
      expected *= 2.0;
    }
  }
}

TEST(FailureMode, N06_SurvivorsAreTrainedIfTheyAreEnough) {
  for (const RolloutSchedule schedule : {RolloutSchedule::free, RolloutSchedule::lockstep}) {
    for (const int64_t enough : {0, 2, 3, 4}) {
      OrchestratorTable table = one_group(4, 1, schedule);
      table.min_group_size = enough;
      // The last one to end, so that the others have ended before in both schedules.
      FakeSystem system({.table = table, .max_batches = 1},
                        replies([](FakeReply& reply, int64_t request, int64_t sample) {
                          if (request > 0 || sample != 1) return;
                          reply.wait = 3.0;
                          reply.failure = "bad moment";
                        }));
      const auto batch = next_batch(system);
      ASSERT_TRUE(batch);
      const bool kept = enough == 2 || enough == 3;
      EXPECT_EQ(batch->at(0).number, kept ? 0 : 1);
      EXPECT_EQ(batch->at(0).rollouts.size(), kept ? 3u : 4u);
      const ScheduleTotals& totals = system.scheduler.totals();
      EXPECT_EQ(totals.groups_partial, kept ? 1 : 0);
      EXPECT_EQ(totals.dropped, kept ? 0 : 3) << "finished rollouts that went are counted";
      const ScheduleCounts counts = system.scheduler.take_counts();
      EXPECT_EQ(counts.given_up.at(0).survivors, 3);
      EXPECT_EQ(counts.given_up.at(0).trained, kept);
      EXPECT_EQ(counts.dropped_groups.at(0), kept ? 0 : 1);
    }
  }
}

TEST(FailureMode, N06_RolloutsThatEndWithAGroupAreCounted) {
  FakeSystem system({.table = one_group(4, 1), .max_batches = 1},
                    replies([](FakeReply& reply, int64_t request, int64_t sample) {
                      reply.wait = 1.0 + static_cast<double>(sample);
                      if (request == 0 && sample == 1) reply.failure = "bad moment";
                    }));
  ASSERT_TRUE(next_batch(system));
  EXPECT_EQ(system.scheduler.take_counts().cancelled_dropped, 2);
  EXPECT_EQ(system.scheduler.totals().dropped, 1);
}

TEST(FailureMode, N07_APoisonousPromptIsLeftOutAlsoAfterAResume) {
  for (const RolloutSchedule schedule : {RolloutSchedule::free, RolloutSchedule::lockstep}) {
    OrchestratorTable table = one_group(2, 2, schedule);
    table.max_prompt_failures = 2;
    int64_t starts = 0;
    const auto make = [&] {
      OneEnvironment environment(3);
      environment.at->on_start = [&](const Example& example) {
        if (example.index != 1) return;
        ++starts;
        throw std::runtime_error("poison");
      };
      FakeOptions options{.table = table, .max_batches = 40};
      options.members = environment.members();
      return std::make_unique<FakeSystem>(std::move(options),
                                          replies([](FakeReply&, int64_t, int64_t) {}));
    };
    const auto run = [](FakeSystem& system, PolicyVersion from, PolicyVersion to) {
      for (PolicyVersion step = from; step < to; ++step) {
        const auto batch = next_batch(system);
        ASSERT_TRUE(batch);
        EXPECT_NE(batch->at(0).example.index, 1u);
        system.scheduler.offer_weights(nullptr, step + 1);
      }
    };
    std::string saved;
    {
      const auto system = make();
      run(*system, 0, 20);
      EXPECT_EQ(system->scheduler.totals().groups_dropped, 2);
      EXPECT_GT(starts, 0);
      EXPECT_EQ(system->scheduler.totals().quarantined_prompts, 1);
      EXPECT_GT(system->scheduler.take_counts().quarantined_draws, 2);
      saved = schedule_state_json(system->scheduler.state(), system->ids());
    }
    const auto system = make();
    system->sampler.begin_at(20);
    system->scheduler.restore(parse_schedule_state("schedule.json", saved, system->mix));
    starts = 0;
    run(*system, 20, 40);
    EXPECT_EQ(starts, 0);
    EXPECT_EQ(system->scheduler.totals().quarantined_prompts, 1);
  }
}

TEST(FailureMode, N08_DroppedGroupsAreReportedOnce) {
  OneEnvironment environment(0);
  environment.at->on_start = [](const Example& example) {
    if (example.index == 2) throw std::runtime_error("poison");
  };
  FakeOptions options{.table = one_group(2, 2), .max_batches = 6};
  options.members = environment.members();
  FakeSystem system(std::move(options), replies([](FakeReply&, int64_t, int64_t) {}));
  const Played played = play(system, 6);
  EXPECT_EQ(played.result.end, LoopResult::End::finished);
  double reported = 0.0;
  std::vector<DroppedGroup> dropped;
  for (const StepRecord& record : played.steps) {
    reported += metric(record, "dropped_groups/letters");
    EXPECT_EQ(metric(record, "dropped_groups/all"), static_cast<double>(record.given_up.size()));
    dropped.insert(dropped.end(), record.given_up.begin(), record.given_up.end());
  }
  EXPECT_EQ(reported, 1.0);
  ASSERT_EQ(dropped.size(), 1u);
  EXPECT_EQ(dropped[0].number, 2);
  EXPECT_EQ(dropped[0].example, 2u);
  EXPECT_EQ(dropped[0].message, "exception: poison");
}

TEST(FailureMode, N09_UnlimitedRetriesOfAPoisonousPromptEnd) {
  for (const RolloutSchedule schedule : {RolloutSchedule::free, RolloutSchedule::lockstep}) {
    for (const int64_t off_policy : {0, 2}) {
      OrchestratorTable table = one_group(2, std::nullopt, schedule);
      table.prompts_per_batch = 3;
      table.max_off_policy_steps = off_policy;
      table.retry_backoff = 0.1;
      OneEnvironment environment(0);
      environment.at->on_start = [](const Example& example) {
        if (example.index == 1) throw std::runtime_error("poison");
      };
      FakeOptions options{.table = table, .max_batches = 1000};
      options.members = environment.members();
      FakeSystem system(std::move(options), replies([](FakeReply&, int64_t, int64_t) {}));
      if (schedule == RolloutSchedule::free && off_policy > 0) {
        // Others are trained meanwhile, so it becomes stale.
        EXPECT_EQ(play(system, 20).result.end, LoopResult::End::finished);
        EXPECT_EQ(system.scheduler.totals().groups_stale, 1);
        continue;
      }
      const Played played = play(system, 1000);
      EXPECT_EQ(played.result.end, LoopResult::End::gave_up);
      EXPECT_NE(played.result.reason.find("letters, example 1: exception: poison"),
                std::string::npos)
          << played.result.reason;
      EXPECT_NE(played.result.reason.find("orchestrator.zero_progress_batches = 4"),
                std::string::npos);
      EXPECT_LT(system.clock.now(), 1200.0);
    }
  }
}

TEST(FailureMode, N10_ARunWhoseGroupsAllFailEnds) {
  for (const RolloutSchedule schedule : {RolloutSchedule::free, RolloutSchedule::lockstep}) {
    for (const int64_t cap : {1, 3}) {
      for (const bool some_complete : {false, true}) {
        SCOPED_TRACE(fmt::format("{} {} {}", name_of(schedule), cap, some_complete));
        OrchestratorTable table = one_group(3, cap, schedule);
        table.prompts_per_batch = 2;
        table.max_off_policy_steps = 1;
        table.retry_backoff = 0.1;
        FakeSystem system({.table = table, .max_batches = 9}, [&](const FakeTalk& talk) {
          return [&](const Request& request, int64_t, int64_t sample) {
            // Only one sample is retried; the others of the group have completed by then.
            FakeReply reply{talk.reply_of("abc")};
            if (some_complete && request.samples > 1 && sample > 0) return reply;
            reply.wait = 1.0;
            reply.failure = "no route to the judge";
            return reply;
          };
        });
        const Played played = play(system, 9);
        EXPECT_EQ(played.result.end, LoopResult::End::gave_up);
        EXPECT_NE(played.result.reason.find("no route to the judge"), std::string::npos);
        EXPECT_NE(played.result.reason.find("in a row"), std::string::npos);
        EXPECT_EQ(system.learner.batches().size(), 0u);
        EXPECT_LT(system.clock.now(), 60.0);
      }
    }
  }
}

TEST(FailureMode, N11_OneFailingMemberDoesNotDiscardTheOthers) {
  for (const RolloutSchedule schedule : {RolloutSchedule::free, RolloutSchedule::lockstep}) {
    FakeSystem system({.table = one_group(4, 3, schedule), .max_batches = 1},
                      failing([](int64_t request, int64_t sample) {
                        return request == 0 ? sample == 2 : request == 1;
                      }));
    const auto batch = next_batch(system);
    ASSERT_TRUE(batch);
    EXPECT_EQ(batch->at(0).rollouts.size(), 4u);
    EXPECT_EQ(system.scheduler.totals().admitted, 6) << "the three others are sampled once";
    EXPECT_EQ(system.scheduler.totals().failed, 2);
    ASSERT_EQ(system.sampler.sent().size(), 3u);
    EXPECT_EQ(system.sampler.sent()[1].request.samples, 1);
    EXPECT_EQ(system.sampler.sent()[2].request.samples, 1);
  }
}

TEST(FailureMode, N12_LateOriginalsAreOfTheFirstRound) {
  // Sample 0 fails first and is retried while samples 1 and 2 are still in their first attempt.
  const auto late = [](FakeReply& reply, int64_t request, int64_t sample) {
    reply.wait = request == 0 ? 1.0 + 5.0 * static_cast<double>(sample) : 0.5;
    if (request == 0 && sample < 3) reply.failure = "bad moment";
  };
  FakeSystem system({.table = one_group(4, 2), .max_batches = 1}, replies(late));
  const auto batch = next_batch(system);
  ASSERT_TRUE(batch);
  EXPECT_EQ(batch->at(0).number, 0) << "one round, below the cap of two";
  EXPECT_EQ(system.scheduler.totals().failed, 3);
  // A retry that fails counts as a second round.
  FakeSystem worse({.table = one_group(4, 2), .max_batches = 1},
                   replies([&](FakeReply& reply, int64_t request, int64_t sample) {
                     late(reply, request, sample);
                     if (request == 1) reply.failure = "bad moment";
                   }));
  const auto other = next_batch(worse);
  ASSERT_TRUE(other);
  EXPECT_EQ(other->at(0).number, 1);
}

// A checkpoint may have been written when many rollouts had failed and others were still running.
TEST(FailureMode, FailuresBeforeAResumeDoNotEndTheRunAfterIt) {
  FakeSystem system({.table = one_group(2, 3), .max_batches = 1},
                    replies([](FakeReply&, int64_t, int64_t) {}));
  ScheduleState state;
  state.totals.failures_in_a_row = 1000;
  system.scheduler.restore(state);
  EXPECT_EQ(system.scheduler.dead_end(), "");
  EXPECT_TRUE(next_batch(system));
}

// Rollouts that fail immediately, with no wait in between, leave time for others: here the clock
// advances only while the sampler works or someone sleeps.
TEST(FailureMode, FailuresAtOnceDoNotStarveTheOthers) {
  for (const bool answers_pend : {false, true}) {
    OrchestratorTable table = one_group(1, std::nullopt);
    table.prompts_per_batch = 2;
    OneEnvironment environment(0);
    FakeEnvironment* at = environment.at;
    at->on_start = [](const Example& example) {
      if (example.index == 1) throw std::runtime_error("poison");
    };
    if (answers_pend) at->wait_of = [](const Reply&, int64_t) { return 2.0; };
    FakeOptions options{.table = table, .max_batches = 1};
    options.members = environment.members();
    FakeSystem system(std::move(options), replies([](FakeReply&, int64_t, int64_t) {}));
    at->clock = &system.clock;
    const Played played = play(system, 1);
    EXPECT_EQ(played.result.end, LoopResult::End::gave_up);
    EXPECT_EQ(system.scheduler.totals().completed, 1);
    EXPECT_LT(system.clock.now(), 10.0);
  }
}

TEST(FailureMode, AHangIsATimeoutWithAName) {
  for (const bool environment_hangs : {false, true}) {
    OneEnvironment environment(0);
    bool down = true;
    if (environment_hangs) {
      environment.at->wait_of = [&](const Reply&, int64_t) { return down ? kForEver : 0.0; };
    }
    FakeOptions options{.table = one_group(2, 2), .max_batches = 1};
    FakeEnvironment* at = environment.at;
    options.members = environment.members();
    options.rollouts.timeout = 8.0;
    FakeSystem system(std::move(options), replies([&](FakeReply& reply, int64_t, int64_t) {
                        if (down && !environment_hangs) reply.wait = kForEver;
                      }));
    at->clock = &system.clock;
    while (system.scheduler.totals().failed == 0 && system.clock.now() < 60.0) {
      system.scheduler.pump(0.01);
    }
    EXPECT_NEAR(system.clock.now(), 8.0, 0.2);
    EXPECT_EQ(system.scheduler.last_failure(),
              fmt::format("letters, example 0: timeout: orchestrator.rollout_timeout: no end after "
                          "8 s, in turn 1, waiting for the {}",
                          environment_hangs ? "environment" : "sampler"));
    EXPECT_EQ(system.scheduler.take_counts().failures.at(FailureKind::timeout), 2);
    down = false;
    ASSERT_TRUE(next_batch(system)) << "and is tried again";
    EXPECT_EQ(system.sampler.in_flight(), 0) << "nobody works for what was given up";
  }
}

TEST(FailureMode, NoFailureIsEverAReward) {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    OrchestratorTable table =
        one_group(3, 2, seed % 2 == 0 ? RolloutSchedule::free : RolloutSchedule::lockstep);
    table.min_group_size = 1;
    table.prompts_per_batch = 3;
    FakeSystem system({.table = table, .max_batches = 6, .seed = seed}, [&](const FakeTalk& talk) {
      return RandomPolicy{talk, seed, 0.08};
    });
    const Played played = play(system, 6);
    int64_t rollouts = 0;
    for (const StepRecord& record : played.steps) {
      for (const Group& group : record.batch.groups) {
        for (const Rollout& rollout : group.rollouts) {
          ++rollouts;
          ASSERT_FALSE(rollout.text.empty());
          EXPECT_EQ(std::string("FXN").find(rollout.text.front()), std::string::npos);
          EXPECT_EQ(rollout.reward, rollout.text.find('a') == std::string::npos ? 0.0 : 1.0);
        }
      }
    }
    EXPECT_GT(rollouts, 20);
    EXPECT_GT(system.scheduler.totals().failed, 0);
  }
}

TEST(FailureMode, WithoutAPromptLeftTheRunEnds) {
  for (const RolloutSchedule schedule : {RolloutSchedule::free, RolloutSchedule::lockstep}) {
    for (const int64_t off_policy : {0, 1, 3}) {
      SCOPED_TRACE(fmt::format("{} {}", name_of(schedule), off_policy));
      OrchestratorTable table = one_group(2, 1, schedule);
      table.prompts_per_batch = 2;
      table.max_off_policy_steps = off_policy;
      table.max_prompt_failures = 1;
      table.zero_progress_batches = 1000.0;
      OneEnvironment environment(12);
      environment.at->on_start = [n = 0](const Example&) mutable {
        if (++n > 9) throw std::runtime_error("the disk is gone");
      };
      FakeOptions options{.table = table, .max_batches = 50};
      options.members = environment.members();
      FakeSystem system(std::move(options), replies([](FakeReply&, int64_t, int64_t) {}));
      int64_t checkpoints = 0, looks = 0;
      LoopEvents events;
      events.on_step = [](const StepRecord&) {};
      events.should_stop = [&] { return ++looks > 100000; };
      events.wants_checkpoint = [](int64_t) { return true; };
      events.on_checkpoint = [&](int64_t, const ScheduleState&) { ++checkpoints; };
      LoopOptions loop;
      loop.max_steps = 50;
      const LoopResult result =
          run_loop(system.scheduler, system.learner, system.clock, system.ids(), loop, events);
      EXPECT_EQ(result.end, LoopResult::End::gave_up);
      EXPECT_NE(result.reason.find("orchestrator.max_prompt_failures"), std::string::npos)
          << result.reason;
      EXPECT_NE(result.reason.find("the disk is gone"), std::string::npos);
      EXPECT_GE(result.steps, 1) << "what had completed is trained";
      EXPECT_GE(checkpoints, result.steps - 1);
      EXPECT_LT(looks, 5000);
      EXPECT_LE(system.scheduler.state().next_group, 100000 + 50) << "it draws once, not for ever";
    }
  }
}

}  // namespace
}  // namespace leeway
