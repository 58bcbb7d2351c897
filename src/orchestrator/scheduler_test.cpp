#include "orchestrator/scheduler.h"

#include <gtest/gtest.h>

#include <ctime>
#include <map>
#include <set>

#include "orchestrator/fake_system.h"

namespace leeway {
namespace {

using namespace leeway::testing;

OrchestratorTable small_table(RolloutSchedule schedule, int64_t off_policy, int64_t prompts = 2,
                              int64_t group_size = 3) {
  OrchestratorTable table;
  table.retry_backoff = 0.0;
  table.prompts_per_batch = prompts;
  table.group_size = group_size;
  table.max_off_policy_steps = off_policy;
  table.schedule = schedule;
  return table;
}

using Batches = std::vector<std::vector<Group>>;

// A run of scheduler and learner in random order, with invariants checked throughout.
class History {
 public:
  History(const OrchestratorTable& table, int64_t batches, uint64_t seed, uint64_t delays,
          double trouble, double slowest = 0.3)
      : table_(table),
        most_(batches),
        rng_(mixed_seed({seed, delays})),
        system_({.table = table, .max_batches = batches, .seed = seed}, [=](const FakeTalk& talk) {
          return RandomPolicy{talk, delays, trouble, 0.0, slowest};
        }) {
    system_.sampler.on_submit = [this](const Request& request) { see(request); };
    system_.sampler.on_update = [this](int64_t) { see_update(); };
    system_.learner.seconds_of = [this](int64_t) { return 0.5 * rng_.uniform(); };
  }

  const Batches& play() {
    RolloutScheduler& scheduler = system_.scheduler;
    for (int move = 0; move < 20000 && scheduler.version() < most_; ++move) {
      scheduler.pump(0.05 * rng_.uniform());
      look();
      if (!system_.learner.busy()) {
        if (auto batch = scheduler.take_batch()) take(std::move(*batch));
        look();
      }
      const bool idle = scheduler.running() == 0;
      if (auto learned = system_.learner.poll(idle ? 0.05 : 0.0)) {
        scheduler.offer_weights(learned->weights, learned->version);
        look();
      }
    }
    EXPECT_EQ(scheduler.version(), most_) << "the history does not end";
    EXPECT_EQ(static_cast<int64_t>(batches_.size()), most_);
    EXPECT_EQ(system_.sampler.in_flight(), 0) << "sampled beyond the last batch";
    EXPECT_FALSE(scheduler.take_batch());
    return batches_;
  }
  FakeSystem& system() { return system_; }
  int64_t mixed_rollouts() const { return mixed_; }

 private:
  void see(const Request& request) {
    // Prompts are of one group each.
    const auto [first, fresh] = opened_.emplace(request.prompt, system_.scheduler.version());
    if (fresh) {
      EXPECT_EQ(request.samples, table_.group_size) << "a group opens whole";
    } else {
      EXPECT_EQ(request.samples, 1);
    }
    EXPECT_TRUE(seeds_.insert(request.seed).second) << "requests have seeds of their own";
  }
  void see_update() {
    for (const FakeSampler::Sent& sent : system_.sampler.sent()) {
      if (sent.open == 0) continue;
      EXPECT_NE(table_.schedule, RolloutSchedule::lockstep)
          << "weights are swapped when all have ended";
      const int64_t age = static_cast<int64_t>(batches_.size()) - opened_.at(sent.request.prompt);
      EXPECT_LE(age, table_.max_off_policy_steps) << "stale work is cancelled before the swap";
    }
  }
  void look() {
    const ScheduleTotals& t = system_.scheduler.totals();
    const int64_t batch = table_.prompts_per_batch * table_.group_size;
    const int64_t places =
        (t.groups_opened - t.groups_dropped - t.groups_stale) * table_.group_size;
    const int64_t version = system_.scheduler.version();
    EXPECT_LE(places, std::min(table_.max_off_policy_steps + version + 1, most_) * batch);
    EXPECT_EQ(t.admitted, t.completed + t.failed + t.cancelled + system_.scheduler.running());
    if (table_.max_inflight > 0) {
      EXPECT_LE(system_.scheduler.running(), table_.max_inflight);
    }
    EXPECT_EQ(t.groups_batched, static_cast<int64_t>(batches_.size()) * table_.prompts_per_batch);
  }
  void take(std::vector<Group>&& batch) {
    const auto number = static_cast<int32_t>(batches_.size());
    const auto oldest = number - static_cast<int32_t>(table_.max_off_policy_steps);
    EXPECT_EQ(static_cast<int64_t>(batch.size()), table_.prompts_per_batch);
    for (const Group& group : batch) {
      EXPECT_EQ(static_cast<int64_t>(group.rollouts.size()), table_.group_size);
      for (const Rollout& rollout : group.rollouts) {
        std::set<int32_t> versions;
        for (const TrajectoryStep& step : rollout.steps) {
          versions.insert(step.versions.begin(), step.versions.end());
        }
        ASSERT_FALSE(versions.empty());
        EXPECT_GE(*versions.begin(), oldest);
        EXPECT_LE(*versions.rbegin(), number);
        mixed_ += versions.size() > 1 ? 1 : 0;
        if (table_.schedule == RolloutSchedule::lockstep) {
          EXPECT_EQ(versions, std::set<int32_t>{std::max(0, oldest)});
        }
      }
    }
    batches_.push_back(std::move(batch));
    system_.learner.start({.step = number + 1});
  }

  OrchestratorTable table_;
  int64_t most_;
  Rng rng_;
  FakeSystem system_;
  Batches batches_;
  std::map<std::vector<int32_t>, int64_t> opened_;  // version by prompt
  std::set<uint64_t> seeds_;
  int64_t mixed_ = 0;
};

TEST(Scheduler, KeepsToItsBoundsInEveryHistory) {
  int64_t stale = 0, dropped = 0, failed = 0, mixed = 0;
  for (uint64_t seed = 0; seed < 320; ++seed) {
    SCOPED_TRACE(fmt::format("seed {}", seed));
    Rng rng(mixed_seed({seed, 2}));
    const int64_t group_size = 1 + static_cast<int64_t>(rng.below(4));
    OrchestratorTable table =
        small_table(seed % 2 == 0 ? RolloutSchedule::free : RolloutSchedule::lockstep,
                    std::vector<int64_t>{0, 1, 3, 8}[seed / 2 % 4],
                    1 + static_cast<int64_t>(rng.below(3)), group_size);
    if (rng.below(2) == 0) {
      table.max_inflight = group_size + static_cast<int64_t>(rng.below(9));
    }
    const std::vector<std::optional<int64_t>> caps = {1, 2, 3, std::nullopt};
    table.max_error_reschedule_attempts = caps[rng.below(4)];
    History history(table, 5, seed, rng.next(), 0.04 * static_cast<double>(rng.below(2)),
                    rng.below(2) == 0 ? 0.3 : 2.0);
    history.play();
    const ScheduleTotals& totals = history.system().scheduler.totals();
    stale += totals.groups_stale;
    dropped += totals.groups_dropped;
    failed += totals.failed;
    mixed += history.mixed_rollouts();
    if (table.schedule == RolloutSchedule::lockstep) {
      EXPECT_EQ(totals.groups_stale, 0);
    }
    if (HasFailure()) return;
  }
  EXPECT_GT(std::min({stale, dropped, failed, mixed}), 20) << "the histories are too tame";
}

std::string summary_of(const Batches& batches) {
  std::string text;
  for (const auto& batch : batches) {
    for (const Group& group : batch) {
      text += fmt::format("group {}:", group.number);
      for (const Rollout& rollout : group.rollouts) {
        text += fmt::format(" {} {:?}", rollout.reward, rollout.text);
        for (int32_t version : rollout.steps.at(0).versions) text += fmt::format(" {}", version);
      }
      text += "\n";
    }
    text += "--\n";
  }
  return text;
}

TEST(Scheduler, GivesTheSameBatchesInLockstepWhateverTheDelays) {
  for (uint64_t seed = 0; seed < 60; ++seed) {
    OrchestratorTable table =
        small_table(RolloutSchedule::lockstep, static_cast<int64_t>(seed % 4));
    table.max_inflight = seed % 3 == 0 ? 7 : 0;
    const double trouble = seed % 2 == 0 ? 0.0 : 0.05;
    const std::string first = summary_of(History(table, 5, seed, 1, trouble).play());
    for (uint64_t delays = 2; delays < 5; ++delays) {
      const double slowest = 0.2 * static_cast<double>(delays);
      ASSERT_EQ(first, summary_of(History(table, 5, seed, delays, trouble, slowest).play()))
          << "seed " << seed << ", delays " << delays;
    }
    EXPECT_NE(first, summary_of(History(table, 5, seed + 1000, 1, trouble).play()));
  }
}

// Replies "abc" unless the script makes it fail, by request and sample. Requests of one prompt
// follow each other: the first is the group's, later ones are retries.
FakeSystem::MakePolicy scripted(std::function<bool(int64_t request, int64_t sample)> fails,
                                double stagger = 0.0) {
  return [=](const FakeTalk& talk) {
    return [=, &talk](const Request&, int64_t number, int64_t sample) {
      FakeReply reply{talk.reply_of("abc")};
      reply.wait = 1.0 + stagger * static_cast<double>(sample);
      if (fails(number, sample)) reply.failure = "bad moment";
      return reply;
    };
  };
}

// Until nothing is in flight and nothing more is admitted.
void run_out(FakeSystem& system) {
  for (int pumps = 0, idle = 0; pumps < 100000 && idle < 3; ++pumps) {
    system.scheduler.pump(0.01);
    idle = system.scheduler.running() == 0 ? idle + 1 : 0;
  }
  EXPECT_EQ(system.scheduler.running(), 0);
}

TEST(Scheduler, CountsFailedRoundsNotFailedRollouts) {
  struct Case {
    int64_t cap, failures;
    bool kept;
  };
  for (const Case& c : std::vector<Case>{
           {1, 1, false}, {3, 1, true}, {3, 3, true}, {8, 3, true}, {8, 8, true}, {3, 16, true}}) {
    for (const RolloutSchedule schedule : {RolloutSchedule::free, RolloutSchedule::lockstep}) {
      for (const double stagger : {0.0, 0.3}) {  // at once, or one after the other
        SCOPED_TRACE(fmt::format("cap {}, {} failures, {}, {}", c.cap, c.failures,
                                 name_of(schedule), stagger));
        OrchestratorTable table = small_table(schedule, 0, 1, 16);
        table.max_error_reschedule_attempts = c.cap;
        FakeSystem system(
            {.table = table, .max_batches = 1},
            scripted([&](int64_t request,
                         int64_t sample) { return request == 0 && sample < c.failures; },
                     stagger));
        run_out(system);
        EXPECT_EQ(system.scheduler.totals().groups_dropped, c.kept ? 0 : 1);
        const auto batch = system.scheduler.take_batch();
        ASSERT_TRUE(batch) << "the batch fills, with another group if need be";
        EXPECT_EQ(batch->at(0).number, c.kept ? 0 : 1);
        EXPECT_EQ(system.scheduler.take_counts().errored.at(0), c.failures);
      }
    }
  }
}

TEST(Scheduler, DropsAGroupAtTheCapOfFailedRounds) {
  for (const RolloutSchedule schedule : {RolloutSchedule::free, RolloutSchedule::lockstep}) {
    for (int64_t cap = 1; cap <= 4; ++cap) {
      for (int64_t rounds = 1; rounds <= 5; ++rounds) {
        for (const int64_t failures : {1, 2, 5}) {
          SCOPED_TRACE(fmt::format("{}: cap {}, {} in each of {} rounds", name_of(schedule), cap,
                                   failures, rounds));
          OrchestratorTable table = small_table(schedule, 0, 1, 5);
          table.max_error_reschedule_attempts = cap;
          // Retries are requests of one sample, `failures` of them in each round.
          FakeSystem system({.table = table, .max_batches = 1},
                            scripted([&](int64_t request, int64_t sample) {
                              if (request == 0) return sample < failures;
                              return request <= (std::min(rounds, cap) - 1) * failures;
                            }));
          run_out(system);
          const bool dropped = rounds >= cap;
          EXPECT_EQ(system.scheduler.totals().groups_dropped, dropped ? 1 : 0);
          EXPECT_EQ(system.scheduler.take_counts().dropped_groups.at(0), dropped ? 1 : 0);
          EXPECT_TRUE(system.scheduler.take_batch());
        }
      }
    }
  }
}

TEST(Scheduler, CancelsWhatIsLeftOfADroppedGroup) {
  OrchestratorTable table = small_table(RolloutSchedule::free, 0, 1, 4);
  table.max_error_reschedule_attempts = 1;
  FakeSystem system(
      {.table = table, .max_batches = 1},
      scripted([](int64_t request, int64_t sample) { return request == 0 && sample == 1; }, 0.5));
  run_out(system);
  const ScheduleTotals& totals = system.scheduler.totals();
  EXPECT_EQ(totals.admitted, 8);
  EXPECT_EQ(totals.completed, 5) << "one before the failure, four of the next group";
  EXPECT_EQ(totals.failed, 1);
  EXPECT_EQ(totals.cancelled, 2);
  const ScheduleCounts counts = system.scheduler.take_counts();
  EXPECT_EQ(counts.cancelled_dropped, 2);
  EXPECT_EQ(counts.cancelled_stale, 0);
  EXPECT_EQ(system.scheduler.last_failure(), "letters, example 0: sampler_error: bad moment");
  EXPECT_TRUE(system.scheduler.take_batch());
  EXPECT_EQ(system.scheduler.take_counts().cancelled_dropped, 0) << "counts begin anew";
}

// The first failure drops the group; what ended at the same moment was not cancelled.
TEST(Scheduler, CountsWhatEndedWithTheFailureAsEnded) {
  OrchestratorTable table = small_table(RolloutSchedule::free, 0, 1, 4);
  table.max_error_reschedule_attempts = 1;
  FakeSystem system({.table = table, .max_batches = 1},
                    scripted([](int64_t request, int64_t) { return request == 0; }));
  run_out(system);
  EXPECT_EQ(system.scheduler.totals().failed, 4);
  EXPECT_EQ(system.scheduler.totals().cancelled, 0);
  EXPECT_EQ(system.scheduler.take_counts().cancelled_dropped, 0);
}

TEST(Scheduler, RetriesWithoutEndWhereThatIsWritten) {
  OrchestratorTable table = small_table(RolloutSchedule::free, 0, 1, 2);
  table.max_error_reschedule_attempts.reset();
  FakeSystem system(
      {.table = table, .max_batches = 1},
      scripted([](int64_t request, int64_t sample) { return request < 200 && sample == 0; }));
  run_out(system);
  EXPECT_EQ(system.scheduler.totals().failed, 200);
  EXPECT_EQ(system.scheduler.totals().groups_dropped, 0);
  ASSERT_TRUE(system.scheduler.take_batch());
  EXPECT_EQ(system.sampler.sent().size(), 201u);
}

TEST(Scheduler, ServesRetriesBeforeNewGroups) {
  for (const RolloutSchedule schedule : {RolloutSchedule::free, RolloutSchedule::lockstep}) {
    OrchestratorTable table = small_table(schedule, 0, 6, 2);
    table.max_inflight = 4;
    FakeSystem system({.table = table, .max_batches = 1},
                      scripted([](int64_t request, int64_t) { return request == 0; }, 0.1));
    system.scheduler.pump(0.0);
    EXPECT_EQ(system.sampler.sent().size(), 2u) << "no room for a third group";
    run_out(system);
    const auto& sent = system.sampler.sent();
    ASSERT_EQ(sent.size(), 8u);
    EXPECT_EQ(sent[2].request.prompt, sent[0].request.prompt);
    EXPECT_EQ(sent[3].request.prompt, sent[0].request.prompt);
    EXPECT_TRUE(system.scheduler.take_batch());
  }
}

TEST(Scheduler, LetsRetriesWaitForRoom) {
  OrchestratorTable table = small_table(RolloutSchedule::free, 3, 2, 3);
  table.max_inflight = 4;
  FakeSystem system({.table = table, .max_batches = 4},
                    scripted([](int64_t, int64_t) { return false; }));
  bool down = true;  // every start fails at once, in all groups that staleness allows
  system.sampler.on_submit = [&](const Request&) {
    if (down) throw Error("the server is gone");
  };
  system.scheduler.pump(0.0);
  EXPECT_EQ(system.scheduler.totals().failed, 24);
  down = false;
  for (int i = 0; i < 2000; ++i) {
    system.scheduler.pump(0.01);
    ASSERT_LE(system.scheduler.running(), 4);
  }
  EXPECT_TRUE(system.scheduler.take_batch());
  EXPECT_EQ(system.scheduler.totals().groups_opened, 8);
}

TEST(Scheduler, GivesEachRetryASeedOfItsOwn) {
  // Three members fail one after the other: each is started again when it has failed.
  FakeSystem system(
      {.table = small_table(RolloutSchedule::free, 0, 1, 4), .max_batches = 1},
      scripted([](int64_t request, int64_t sample) { return request == 0 && sample < 3; }, 0.2));
  run_out(system);
  std::set<uint64_t> seeds;
  for (const auto& sent : system.sampler.sent()) seeds.insert(sent.request.seed);
  EXPECT_EQ(system.sampler.sent().size(), 4u);
  EXPECT_EQ(seeds.size(), 4u);
}

TEST(Scheduler, TakesGroupsAsTheyFinishOrByNumber) {
  const auto first_batch = [](RolloutSchedule schedule) {
    FakeSystem system(
        {.table = small_table(schedule, 1, 2, 1), .max_batches = 4}, [](const FakeTalk& talk) {
          return [&talk](const Request&, int64_t number, int64_t) {
            FakeReply reply{talk.reply_of("abc")};
            reply.wait = 4.0 - static_cast<double>(number);  // the last one is the first to end
            return reply;
          };
        });
    system.scheduler.pump(0.0);
    std::vector<int64_t> numbers;
    for (int i = 0; i < 1000 && numbers.empty(); ++i) {
      system.scheduler.pump(0.01);
      const auto batch = system.scheduler.take_batch();
      if (!batch) continue;
      for (const Group& group : *batch) numbers.push_back(group.number);
    }
    return numbers;
  };
  EXPECT_EQ(first_batch(RolloutSchedule::free), (std::vector<int64_t>{3, 2}));
  EXPECT_EQ(first_batch(RolloutSchedule::lockstep), (std::vector<int64_t>{0, 1}));
}

// One group begun with version 0 is slow: batches 0 and 1 are made without it, and its first token
// is too old for batch 2.
TEST(Scheduler, GivesUpWhatBecomesTooOld) {
  for (const bool ends_in_time : {false, true}) {  // before the swap to version 2, or not at all
    FakeSystem system({.table = small_table(RolloutSchedule::free, 1, 1, 1), .max_batches = 9},
                      [&](const FakeTalk& talk) {
                        return [&](const Request&, int64_t number, int64_t) {
                          FakeReply reply{talk.reply_of("abc")};
                          reply.wait = number > 0 ? 1.0 : 0.0;
                          if (number == 0) reply.per_token = ends_in_time ? 0.6 : 25.0;
                          return reply;
                        };
                      });
    RolloutScheduler& scheduler = system.scheduler;
    std::vector<bool> cancelled;  // by the time of each swap
    system.sampler.on_update = [&](int64_t) {
      cancelled.push_back(system.sampler.sent()[0].cancelled);
    };
    const auto next_batch = [&] {
      for (int i = 0; i < 1000; ++i) {
        scheduler.pump(0.01);
        if (const auto batch = scheduler.take_batch()) return batch->at(0).number;
      }
      return int64_t{-1};
    };
    EXPECT_EQ(next_batch(), 1);
    scheduler.offer_weights(nullptr, 1);
    EXPECT_EQ(next_batch(), 2);
    for (int i = 0; i < 100 && system.clock.now() < 2.9; ++i) scheduler.pump(0.05);
    scheduler.offer_weights(nullptr, 2);
    EXPECT_EQ(cancelled, (std::vector<bool>{false, !ends_in_time}));
    EXPECT_EQ(next_batch(), 3);
    EXPECT_EQ(scheduler.totals().groups_stale, 1);
    EXPECT_EQ(scheduler.take_counts().cancelled_stale, ends_in_time ? 0 : 1);
  }
}

TEST(Scheduler, SwapsToTheNewestWeightsWhenFree) {
  FakeSystem system({.table = small_table(RolloutSchedule::free, 2), .max_batches = 9},
                    scripted([](int64_t, int64_t) { return false; }));
  system.scheduler.offer_weights(nullptr, 1);
  EXPECT_EQ(system.scheduler.version(), 1) << "at once";
  system.scheduler.offer_weights(nullptr, 2);
  EXPECT_EQ(system.scheduler.version(), 2);
  EXPECT_EQ(system.sampler.swaps().size(), 3u);
}

// Prints the time for information; asserts nothing about it.
TEST(Scheduler, TellsWhatItCostsWithAThousandRollouts) {
  OrchestratorTable table = small_table(RolloutSchedule::free, 0, 125, 8);
  FakeSystem system({.table = table, .max_batches = 5}, [](const FakeTalk& talk) {
    return RandomPolicy{talk, 1, 0.01, 0.0, 5.0};
  });
  double seconds = 0.0;
  int64_t pumps = 0;
  for (int64_t batch = 1; batch <= 5; ++batch) {
    while (!system.scheduler.take_batch()) {
      const std::clock_t begin = std::clock();
      system.scheduler.pump(0.005);
      seconds += static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC;
      ASSERT_LT(++pumps, 100000);
    }
    system.scheduler.offer_weights(nullptr, static_cast<PolicyVersion>(batch));
  }
  const int64_t ended = system.scheduler.totals().completed;
  fmt::print("{} rollouts, 1000 in flight, {} pumps: {:.2f} us of CPU time each\n", ended, pumps,
             1e6 * seconds / static_cast<double>(ended));
}

}  // namespace
}  // namespace leeway
