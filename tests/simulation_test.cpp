// Thousands of whole runs on a virtual clock: any configuration, any failure, killed and stopped at
// any moment, resumed from the last checkpoint. Each is determined by its seed, and invariants are
// checked throughout. `scripts/replay_history SEED` replays a single failing history.
#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <limits>
#include <set>

#include "orchestrator/fake_system.h"
#include "orchestrator/loop.h"
#include "orchestrator/schedule_state_json.h"

namespace leeway {
namespace {

using namespace leeway::testing;

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr uint64_t kHistories = 1000;
#else
constexpr uint64_t kHistories = 10000;
#endif
constexpr int64_t kMostLooks = 2000000;  // of one run between two interruptions
constexpr double kForEver = std::numeric_limits<double>::infinity();

// Everything that a history's seed determines in advance.
struct Plan {
  explicit Plan(uint64_t of) : seed(of) {
    Rng rng(mixed_seed({seed, 77}));
    const auto number = [&](int64_t from, int64_t to) {
      return from + static_cast<int64_t>(rng.below(static_cast<uint64_t>(to - from + 1)));
    };
    table.schedule = number(0, 1) == 0 ? RolloutSchedule::free : RolloutSchedule::lockstep;
    table.max_off_policy_steps = number(0, 3);
    table.group_size = number(1, 4);
    table.prompts_per_batch = number(1, 4);
    if (number(0, 2) == 0) table.max_inflight = table.group_size + number(0, 6);
    if (const int64_t cap = number(1, 4); cap < 4) {
      table.max_error_reschedule_attempts = cap;
    } else {
      table.max_error_reschedule_attempts.reset();
    }
    table.min_group_size = number(0, table.group_size);
    table.max_prompt_failures = number(1, 3);
    table.zero_progress_batches = number(0, 3) == 0 ? 1.0 : 4.0;
    table.retry_backoff = number(0, 1) == 0 ? 0.0 : 0.01;
    steps = number(1, 4);
    filter = number(0, 3) == 0;
    turns = number(0, 3) == 0;
    if (number(0, 2) == 0) prompts = static_cast<uint64_t>(number(1, 8));
    const double shares[] = {0.0, 0.01, 0.04, 0.12};
    trouble = shares[number(0, 3)];
    hangs = trouble > 0.0 && number(0, 2) == 0 ? 0.02 : 0.0;
    poison = trouble > 0.0 && number(0, 2) == 0 ? static_cast<uint64_t>(number(2, 5)) : 0;
    // Backoffs of up to a minute are left to other tests: here polling through them would take too
    // long.
    if (poison > 0 && !table.max_error_reschedule_attempts) table.retry_backoff = 0.0;
    slow_answers = number(0, 2) == 0;
    slowest = 0.01 + 0.3 * rng.uniform();
    learner_seconds = 0.4 * rng.uniform();
    checkpoint_every = number(1, 3);
    interruptions = number(0, 3);
    if (number(0, 9) == 0) learner_fails = number(1, steps);
    asks = number(0, 2) == 0;
    scores_groups = asks && number(0, 1) == 0;
  }
  bool lockstep() const { return table.schedule == RolloutSchedule::lockstep; }
  std::string text() const {
    return fmt::format(
        "{}, {} steps of {} x {}, off-policy {}, in flight {}, cap {}, at least {}, quarantine {}, "
        "zero progress {}, back-off {}; {} prompts, turns {}, trouble {}, hangs {}, poison {}, "
        "slow answers {}, checkpoint every {}, {} interruptions, learner fails {}, asks {}, scores "
        "groups {}",
        name_of(table.schedule), steps, table.prompts_per_batch, table.group_size,
        table.max_off_policy_steps, table.max_inflight,
        table.max_error_reschedule_attempts.value_or(0), table.min_group_size,
        table.max_prompt_failures, table.zero_progress_batches, table.retry_backoff, prompts, turns,
        trouble, hangs, poison, slow_answers, checkpoint_every, interruptions, learner_fails, asks,
        scores_groups);
  }

  uint64_t seed;
  OrchestratorTable table;
  int64_t steps;
  bool filter, turns, slow_answers;
  bool asks, scores_groups;  // of its episodes
  uint64_t prompts = 0;      // 0: endless
  double trouble, hangs;     // fractions of replies of each kind
  uint64_t poison;           // one prompt in this many never starts; 0: none
  double slowest, learner_seconds;
  int64_t checkpoint_every, interruptions;
  int64_t learner_fails = 0;  // the step, once; 0: never
};

double share_of(uint64_t seed, uint64_t purpose) {
  return Rng(mixed_seed({seed, purpose})).uniform();
}

struct Killed {};

// Failures reported by a record, by metric name; "group 7" means that it was given up.
using Troubles = std::map<std::string, int64_t>;

// What still counts of everything that happened.
struct Timeline {
  std::vector<std::string> steps;            // what was trained, as text
  std::vector<std::vector<int64_t>> groups;  // group numbers by step
  std::vector<Troubles> troubles;            // by step

  Troubles all_troubles() const {
    Troubles sum;
    for (const Troubles& step : troubles) {
      for (const auto& [name, count] : step) sum[name] += count;
    }
    return sum;
  }
  std::optional<std::pair<int64_t, std::string>> saved;
};

struct Tally {
  int64_t finished = 0, gave_up = 0, kills = 0, stops = 0, resumes = 0, compared = 0;
  int64_t stale = 0, dropped = 0, partial = 0, quarantined = 0, retried_steps = 0;
  int64_t looks = 0, most_looks = 0, scored = 0;
  std::map<FailureKind, int64_t> failures;
};

std::string words_of(const StepRecord& record) {
  std::string text;
  for (const Group& group : record.batch.groups) {
    text += fmt::format("group {} example {}:", group.number, group.example.index);
    for (const Rollout& rollout : group.rollouts) {
      text += fmt::format(" {} {:?}", rollout.reward, rollout.text);
      for (const TrajectoryStep& step : rollout.steps) {
        text += fmt::format(" {} {}", step.completion, step.versions);
      }
    }
    text += "\n";
  }
  return text;
}

Troubles troubles_of(const StepRecord& record) {
  Troubles troubles;
  for (const auto& [name, value] : record.metrics) {
    for (const char* kind : {"errored_rollouts/", "empty_rollouts/", "dropped_groups/",
                             "cancelled_rollouts/", "failures/", "partial_", "quarantined_"}) {
      if (!name.starts_with(kind) || name.ends_with("/rate")) continue;  // rates do not add up
      troubles[name] = static_cast<int64_t>(value);
    }
  }
  for (const DroppedGroup& group : record.given_up) {
    ++troubles[fmt::format("group {}", group.number)];
    ++troubles["given up"];
  }
  return troubles;
}

// One process: from its start or a checkpoint until it ends or is killed.
class Process {
 public:
  enum class Fate { none, kill, kill_at_step, kill_before_saving, kill_after_saving, stop };

  Process(const Plan& plan, Timeline& timeline, Tally& tally, uint64_t delays, bool log)
      : plan_(plan), timeline_(timeline), tally_(tally), log_(log) {
    FakeOptions options{.table = plan.table, .max_batches = plan.steps, .seed = plan.seed};
    options.rendered = plan.turns;
    options.members.push_back({"letters", 1.0, std::move(owned_)});
    options.rollouts.max_turns = 3;
    options.rollouts.timeout = plan.hangs > 0.0 ? 3.0 : 0.0;
    system_ = std::make_unique<FakeSystem>(
        std::move(options), [&](const FakeTalk& talk) { return policy(talk, delays); });
    prepare(delays);
  }

  // Returns nothing if killed. `at` is the poll, step or checkpoint at which its fate occurs.
  std::optional<LoopResult> run(Fate fate, int64_t at, int64_t failing_step) {
    LoopOptions options;
    options.max_steps = plan_.steps;
    options.steps_before = begin_;
    options.batch.filter_zero_advantages = plan_.filter;
    system_->learner.failure_of = [=](int64_t step) {
      return step == failing_step ? std::string("the loss is not finite") : std::string();
    };
    LoopEvents events;
    int64_t steps = 0, checkpoints = 0;
    events.should_stop = [&] {
      look();
      if (fate == Fate::kill && looks_ >= at) throw Killed();
      return fate == Fate::stop && looks_ >= at;
    };
    events.on_step = [&](const StepRecord& record) {
      take(record);
      if (fate == Fate::kill_at_step && steps++ == at % 3) throw Killed();
    };
    events.wants_checkpoint = [&](int64_t step) { return step % plan_.checkpoint_every == 0; };
    events.on_checkpoint = [&](int64_t step, const ScheduleState& state) {
      const bool doomed = checkpoints++ == at % 2;
      if (fate == Fate::kill_before_saving && doomed) throw Killed();
      save(step, state);
      if (fate == Fate::kill_after_saving && doomed) throw Killed();
    };
    std::optional<LoopResult> result;
    try {
      result = run_loop(system_->scheduler, system_->learner, system_->clock, system_->ids(),
                        options, events);
      check_end(*result);
    } catch (const Killed&) {
      say("killed");
    }
    tally_.looks += looks_;
    tally_.most_looks = std::max(tally_.most_looks, looks_);
    const ScheduleTotals& totals = system_->scheduler.totals();
    tally_.scored += environment_->groups_scored;
    tally_.stale += totals.groups_stale;
    tally_.dropped += totals.groups_dropped;
    tally_.partial += totals.groups_partial;
    tally_.quarantined += totals.quarantined_prompts;
    return result;
  }

 private:
  template <class... Args>
  void say(fmt::format_string<Args...> format, Args&&... args) const {
    if (!log_) return;
    fmt::print("{:9.3f} {}\n", system_->clock.now(),
               fmt::format(format, std::forward<Args>(args)...));
  }

  // The request's seed determines what is sampled, `delays` when.
  FakePolicy policy(const FakeTalk& talk, uint64_t delays) const {
    const RandomPolicy random{talk, delays, plan_.trouble, plan_.turns ? 0.3 : 0.0, plan_.slowest};
    return [random, hangs = plan_.hangs](const Request& request, int64_t number, int64_t sample) {
      FakeReply reply = random(request, number, sample);
      if (share_of(request.seed + static_cast<uint64_t>(sample), 5) < hangs) reply.wait = kForEver;
      return reply;
    };
  }

  void prepare(uint64_t delays) {
    environment_->clock = &system_->clock;
    environment_->asks = plan_.asks;
    environment_->scores_groups = plan_.scores_groups;
    environment_->score_failure_of = [trouble = plan_.trouble](const auto& texts) {
      const uint64_t group = prompt_hash(fmt::format("{}", fmt::join(texts, " ")));
      return share_of(group, 7) < trouble ? std::string("the scorer is away") : std::string();
    };
    if (plan_.prompts > 0) environment_->train_size = plan_.prompts;
    environment_->on_start = [poison = plan_.poison](const Example& example) {
      if (poison > 0 && example.index % poison == 1) throw std::runtime_error("poison");
    };
    if (plan_.slow_answers) {
      environment_->wait_of = [hangs = plan_.hangs](const Reply& reply, int64_t turn) {
        const double share = share_of(prompt_hash(reply.text), static_cast<uint64_t>(turn));
        return share < hangs ? kForEver : share < 0.4 ? 0.05 * share : 0.0;
      };
    }
    system_->sampler.on_submit = [this](const Request& request) {
      if (share_of(request.seed, 6) < plan_.trouble) throw Error("the request is refused");
    };
    system_->learner.seconds_of = [this, delays](int64_t step) {
      return plan_.learner_seconds * share_of(delays, 100 + static_cast<uint64_t>(step));
    };
    if (timeline_.saved) {
      begin_ = static_cast<PolicyVersion>(timeline_.saved->first);
      system_->sampler.begin_at(begin_);
      system_->learner.begin_at(begin_);
      system_->scheduler.restore(
          parse_schedule_state("schedule.json", timeline_.saved->second, system_->mix));
      EXPECT_EQ(system_->scheduler.version(), begin_);
    }
    tally_.retried_steps += static_cast<int64_t>(timeline_.steps.size()) - begin_;
    timeline_.steps.resize(static_cast<size_t>(begin_));
    timeline_.groups.resize(static_cast<size_t>(begin_));
    timeline_.troubles.resize(static_cast<size_t>(begin_));
    version_ = begin_;
    system_->sampler.on_update = [this](int64_t version) {
      EXPECT_EQ(version, ++version_) << "versions rise by one";
    };
    say("begins at step {}", begin_);
  }

  void look() {
    if (++looks_ > kMostLooks) {
      ADD_FAILURE() << "the run does not end";
      throw Killed();
    }
    const ScheduleTotals& t = system_->scheduler.totals();
    const int64_t running = system_->scheduler.running();
    bool good = t.admitted == t.completed + t.failed + t.cancelled + running;
    good = good && t.completed - t.batched - t.stale - t.dropped >= 0 && t.filtered <= t.batched;
    good = good && (plan_.table.max_inflight == 0 || running <= plan_.table.max_inflight);
    const int64_t places = t.groups_opened - (t.groups_dropped - t.groups_partial) - t.groups_stale;
    good = good &&
           places <= plan_.table.prompts_per_batch * std::min(plan_.table.max_off_policy_steps + 1 +
                                                                  system_->scheduler.version(),
                                                              plan_.steps);
    if (!good) {
      ADD_FAILURE() << "the counters do not add up";
      throw Killed();
    }
  }

  void check(const ScheduleState& state) const {
    const ScheduleTotals& t = state.totals;
    int64_t waiting = 0;
    std::set<int64_t> numbers;
    for (const Group& group : state.finished) {
      waiting += static_cast<int64_t>(group.rollouts.size());
      EXPECT_TRUE(numbers.insert(group.number).second);
    }
    for (const auto& [number, rounds] : state.open) EXPECT_TRUE(numbers.insert(number).second);
    for (const auto& step : timeline_.groups) {
      for (int64_t number : step) {
        EXPECT_FALSE(numbers.contains(number)) << "group " << number << " was trained";
      }
    }
    EXPECT_EQ(t.admitted, t.completed + t.failed + t.cancelled);
    EXPECT_EQ(t.completed, t.batched + t.stale + t.dropped + waiting);
    EXPECT_EQ(t.groups_opened, t.groups_batched + t.groups_dropped - t.groups_partial +
                                   t.groups_stale + static_cast<int64_t>(state.finished.size()));
    const int64_t drawn = t.groups_opened + static_cast<int64_t>(state.open.size());
    EXPECT_GE(state.next_group, drawn);
    if (plan_.prompts == 0) {
      EXPECT_EQ(state.next_group, drawn) << "a prompt is lost";
    }
    EXPECT_EQ(t.groups_batched, state.batches_taken * plan_.table.prompts_per_batch);
    // Failures that no record has reported yet are reported by the next one.
    Troubles told = timeline_.all_troubles();
    const ScheduleCounts& counts = state.counts;
    EXPECT_EQ(t.groups_dropped, told["given up"] + static_cast<int64_t>(counts.given_up.size()));
    EXPECT_EQ(t.cancelled,
              told["cancelled_rollouts/all"] + counts.cancelled_stale + counts.cancelled_dropped);
    EXPECT_EQ(t.groups_partial, told["partial_groups"] + counts.partial_groups);
  }

  void save(int64_t step, const ScheduleState& state) {
    EXPECT_EQ(step, static_cast<int64_t>(timeline_.steps.size()));
    EXPECT_EQ(state.version, step);
    EXPECT_EQ(state.batches_taken, step);
    EXPECT_FALSE(system_->learner.busy());
    check(state);
    timeline_.saved = {step, schedule_state_json(state, system_->ids())};
    say("checkpoint of step {}: {} groups finished, {} open", step, state.finished.size(),
        state.open.size());
  }

  void take(const StepRecord& record) {
    const int64_t step = static_cast<int64_t>(timeline_.steps.size()) + 1;
    EXPECT_EQ(record.step, step);
    EXPECT_EQ(record.learned.version, step);
    EXPECT_EQ(static_cast<int64_t>(record.batch.groups.size()), plan_.table.prompts_per_batch);
    const int64_t oldest = step - 1 - plan_.table.max_off_policy_steps;
    const int64_t fewest =
        plan_.table.min_group_size > 0 ? plan_.table.min_group_size : plan_.table.group_size;
    std::vector<int64_t>& numbers = timeline_.groups.emplace_back();
    for (const Group& group : record.batch.groups) {
      numbers.push_back(group.number);
      const auto count = static_cast<int64_t>(group.rollouts.size());
      EXPECT_TRUE(count >= fewest && count <= plan_.table.group_size);
      for (const Rollout& rollout : group.rollouts) check(rollout, oldest, step - 1);
    }
    timeline_.steps.push_back(words_of(record));
    timeline_.troubles.push_back(troubles_of(record));
    for (const auto& [kind, count] : failures_of(record)) tally_.failures[kind] += count;
    say("step {}: groups {}, {} given up", step, numbers, record.given_up.size());
  }

  static std::map<FailureKind, int64_t> failures_of(const StepRecord& record) {
    std::map<FailureKind, int64_t> counts;
    for (const FailureKind kind :
         {FailureKind::environment_error, FailureKind::empty, FailureKind::exception,
          FailureKind::timeout, FailureKind::bad_answer, FailureKind::sampler_error}) {
      const std::string wanted = std::string("failures/") + name_of(kind);
      for (const auto& [name, value] : record.metrics) {
        if (name == wanted) counts[kind] += static_cast<int64_t>(value);
      }
    }
    return counts;
  }

  void check(const Rollout& rollout, int64_t oldest, int64_t newest) const {
    EXPECT_FALSE(rollout.steps.empty());
    for (const TrajectoryStep& step : rollout.steps) {
      EXPECT_EQ(step.versions.size(), step.completion.size());
      for (const int32_t version : step.versions) {
        EXPECT_TRUE(version >= oldest && version <= newest) << "a token of version " << version;
        if (plan_.lockstep()) {
          EXPECT_EQ(version, std::max<int64_t>(0, oldest));
        }
      }
    }
    const bool earned = !rollout.rewards.empty() && rollout.text.find('a') != std::string::npos;
    EXPECT_EQ(rollout.reward, earned ? 1.0 : 0.0);
    EXPECT_EQ(std::string("FXN").find(rollout.text.front()), std::string::npos);
  }

  void check_end(const LoopResult& result) {
    const char* names[] = {"finished", "stopped", "gave up"};
    say("{} after step {}: {}", names[static_cast<int>(result.end)], result.steps, result.reason);
    const auto steps = static_cast<int64_t>(timeline_.steps.size());
    EXPECT_EQ(result.steps, steps);
    check(system_->scheduler.state());
    if (result.end == LoopResult::End::gave_up) {
      EXPECT_FALSE(result.reason.empty());
      return;
    }
    EXPECT_FALSE(system_->learner.busy());
    EXPECT_EQ(timeline_.saved ? timeline_.saved->first : 0, steps) << "what was learned is saved";
    if (result.end == LoopResult::End::finished) {
      EXPECT_EQ(steps, plan_.steps);
      EXPECT_EQ(system_->scheduler.running(), 0);
      EXPECT_EQ(system_->sampler.in_flight(), 0);
    }
  }

  const Plan& plan_;
  Timeline& timeline_;
  Tally& tally_;
  bool log_;
  std::unique_ptr<FakeEnvironment> owned_ =
      std::make_unique<FakeEnvironment>("letters", respond_by_letter);
  FakeEnvironment* environment_ = owned_.get();
  std::unique_ptr<FakeSystem> system_;
  PolicyVersion begin_ = 0, version_ = 0;
  int64_t looks_ = 0;
};

void check_groups(const Plan& plan, const Timeline& timeline) {
  std::vector<int64_t> all;
  for (const auto& step : timeline.groups) all.insert(all.end(), step.begin(), step.end());
  const std::set<int64_t> once(all.begin(), all.end());
  EXPECT_EQ(once.size(), all.size()) << "a group is trained twice";
  if (plan.lockstep() && plan.trouble == 0.0) {
    for (size_t i = 0; i < all.size(); ++i) EXPECT_EQ(all[i], static_cast<int64_t>(i));
  }
}

void play_history(uint64_t seed, Tally& tally, bool log) {
  const Plan plan(seed);
  if (log) fmt::print("{}\n", plan.text());
  Timeline timeline;
  Rng rng(mixed_seed({seed, 78}));
  int64_t failing_step = plan.learner_fails;
  bool interrupted = false, finished = false;
  for (int64_t life = 0;; ++life) {
    using Fate = Process::Fate;
    const Fate fates[] = {Fate::kill,
                          Fate::kill,
                          Fate::kill_at_step,
                          Fate::kill_before_saving,
                          Fate::kill_after_saving,
                          Fate::stop};
    const Fate fate = life < plan.interruptions ? fates[rng.below(6)] : Fate::none;
    const auto at = static_cast<int64_t>(1 + rng.below(rng.below(2) == 0 ? 60 : 400));
    Process process(plan, timeline, tally, mixed_seed({seed, 79, static_cast<uint64_t>(life)}),
                    log);
    const std::optional<LoopResult> result = process.run(fate, at, failing_step);
    check_groups(plan, timeline);
    if (::testing::Test::HasFailure()) return;
    tally.kills += result ? 0 : 1;
    if (result && result->end == LoopResult::End::finished) {
      ++tally.finished;
      finished = true;
      break;
    }
    if (result && result->end == LoopResult::End::gave_up) {
      if (!result->reason.starts_with("the loss is not finite")) {
        ++tally.gave_up;
        EXPECT_GT(plan.trouble, 0.0) << result->reason;
        break;
      }
      failing_step = 0;  // the problem is fixed
    }
    tally.stops += result && result->end == LoopResult::End::stopped ? 1 : 0;
    tally.resumes += timeline.saved ? 1 : 0;
    interrupted = true;
  }
  if (!plan.lockstep() || !interrupted) return;
  if (log) fmt::print("once more, without interruptions and with other delays\n");
  Timeline whole;
  const auto result =
      Process(plan, whole, tally, mixed_seed({seed, 80}), log).run(Process::Fate::none, 0, 0);
  // One of them may have given up earlier: only that depends on timing.
  const size_t common = std::min(whole.steps.size(), timeline.steps.size());
  for (size_t i = 0; i < common; ++i) EXPECT_EQ(timeline.steps[i], whole.steps[i]) << "step " << i;
  tally.compared += static_cast<int64_t>(common);
  // Which step reports a failure depends on timing, unless sampling and learning alternate.
  for (size_t i = 0; i < common && plan.table.max_off_policy_steps == 0; ++i) {
    EXPECT_EQ(timeline.troubles[i], whole.troubles[i]) << "step " << i;
  }
  if (finished && result && result->end == LoopResult::End::finished) {
    EXPECT_EQ(timeline.all_troubles(), whole.all_troubles());
  }
}

TEST(Simulation, HoldsItsPromisesInEveryHistory) {
  Tally tally;
  const char* wanted = std::getenv("LEEWAY_HISTORY");
  const uint64_t first = wanted != nullptr ? std::strtoull(wanted, nullptr, 10) : 0;
  const uint64_t end = wanted != nullptr ? first + 1 : kHistories;
  for (uint64_t seed = first; seed < end; ++seed) {
    play_history(seed, tally, wanted != nullptr);
    if (HasFailure()) {
      ADD_FAILURE() << "history " << seed << "; alone, with a log: scripts/replay_history " << seed;
      return;
    }
  }
  fmt::print(
      "{} histories: {} finished, {} gave up; {} kills, {} stops, {} resumes; {} steps made again; "
      "{} steps compared with a run never killed; groups: {} stale, {} dropped, {} partial; {} "
      "prompts quarantined; {} groups scored together; {} looks, at most {}\n",
      end - first, tally.finished, tally.gave_up, tally.kills, tally.stops, tally.resumes,
      tally.retried_steps, tally.compared, tally.stale, tally.dropped, tally.partial,
      tally.quarantined, tally.scored, tally.looks, tally.most_looks);
  for (const auto& [kind, count] : tally.failures) fmt::print("  {}: {}\n", name_of(kind), count);
  if (wanted != nullptr) return;
  EXPECT_EQ(tally.failures.size(), 6u);
  EXPECT_GT(std::min({tally.kills, tally.stops, tally.resumes, tally.retried_steps, tally.compared,
                      tally.stale, tally.dropped, tally.partial, tally.quarantined, tally.gave_up,
                      tally.scored}),
            static_cast<int64_t>(kHistories / 100))
      << "the histories are too tame";
}

}  // namespace
}  // namespace leeway
