// Thousands of whole runs that sample from servers, on a virtual clock: servers are killed,
// stopped, started again with other weights, listed and no longer listed, slow, and answer with
// errors, damaged JSON, wrong ids, NaN and other versions. Each history is determined by its seed.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>

#include "orchestrator/fake_system.h"
#include "orchestrator/loop.h"
#include "pool/fake_model.h"
#include "pool/pool_sampler.h"

namespace leeway {
namespace {

using namespace leeway::testing;

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr uint64_t kHistories = 500;
#else
constexpr uint64_t kHistories = 10000;
#endif
constexpr int64_t kMostLooks = 400000;  // of one run
constexpr double kMostSeconds = 4000.0;

struct SimulatedServer {
  FakeModel model;
  bool up = true, stopped = false, listed = true;
  int64_t life = 0;  // starts of its process
};

// What happens to a server at a time.
struct Fate {
  double time = 0.0;
  size_t server = 0;
  enum class Kind { kill, start, stop, go_on, list, unlist } kind = Kind::kill;
};

struct World {
  VirtualClock clock;
  std::vector<SimulatedServer> servers;
  std::vector<Fate> fates;  // by time
  size_t next_fate = 0;
  Rng rng{0};
  double slowest = 0.1;
  double bad = 0.0;  // share of answers that are spoiled

  static std::string url(size_t server) { return fmt::format("http://s{}:1", server); }

  void live() {
    for (; next_fate < fates.size() && fates[next_fate].time <= clock.now(); ++next_fate) {
      const Fate& fate = fates[next_fate];
      SimulatedServer& server = servers[fate.server];
      switch (fate.kind) {
        case Fate::Kind::kill: server.up = false; break;
        case Fate::Kind::start:
          server.up = true;
          server.stopped = false;
          ++server.life;
          server.model.version = 0;
          server.model.checksum = 7;
          server.model.paused = false;
          break;
        case Fate::Kind::stop: server.stopped = true; break;
        case Fate::Kind::go_on: server.stopped = false; break;
        case Fate::Kind::list: server.listed = true; break;
        case Fate::Kind::unlist: server.listed = false; break;
      }
    }
  }
  double next_time() const {
    return next_fate < fates.size() ? fates[next_fate].time
                                    : std::numeric_limits<double>::infinity();
  }

  // Nothing of it may be trained.
  void spoil(FakeAnswer& answer) {
    const auto replace = [&](const std::string& what, const std::string& with) {
      const size_t at = answer.body.find(what);
      if (at == std::string::npos) answer.status = 500;
      if (at != std::string::npos) answer.body.replace(at, what.size(), with);
    };
    switch (rng.below(6)) {
      case 0: answer = {500, "{}"}; break;
      case 1: answer.body.resize(answer.body.size() / 2); break;
      case 2: replace("\"token_ids\":[", "\"token_ids\":[-5,"); break;
      case 3: replace("\"logprob\":-0.25", "\"logprob\":NaN"); break;
      case 4: replace("\"versions\":[", "\"versions\":[77,"); break;
      case 5: replace("\"processed_logprobs\":[-0.25", "\"processed_logprobs\":[0.5"); break;
    }
  }
};

class SimulatedHttp : public Http {
 public:
  explicit SimulatedHttp(World& world) : world_(world) {}

  int64_t start(HttpCall call) override {
    const double now = world_.clock.now();
    const size_t server = std::stoul(call.url.substr(std::string("http://s").size()));
    Open open{.number = next_++, .server = server, .life = world_.servers[server].life};
    const bool up = world_.servers[server].up;
    const double wait = world_.slowest * world_.rng.uniform() * world_.rng.uniform();
    open.deadline = now + call.timeout;
    open.path = call.url.substr(call.url.find(":1/") + 2);
    open.body = std::move(call.body);
    open_.emplace(now + (up ? 0.001 + wait : 0.001), std::move(open));
    return next_ - 1;
  }
  void cancel(int64_t call) override {
    std::erase_if(open_, [&](const auto& each) { return each.second.number == call; });
  }
  std::vector<HttpResult> poll(double seconds) override {
    std::vector<HttpResult> results;
    const double end = world_.clock.now() + seconds;
    while (results.empty() && !open_.empty()) {
      const double next = std::min(open_.begin()->first, world_.next_time());
      if (next > end) break;
      world_.clock.advance_to(next);
      world_.live();
      while (!open_.empty() && open_.begin()->first <= world_.clock.now()) {
        Open open = std::move(open_.begin()->second);
        open_.erase(open_.begin());
        finish(std::move(open), results);
      }
    }
    if (results.empty()) world_.clock.advance_to(end);
    world_.live();
    return results;
  }

 private:
  struct Open {
    int64_t number = 0;
    size_t server = 0;
    int64_t life = 0;
    double deadline = 0.0;
    std::string path, body;
  };

  void finish(Open open, std::vector<HttpResult>& results) {
    SimulatedServer& server = world_.servers[open.server];
    const double now = world_.clock.now();
    const bool generates = open.path.starts_with("/inference");
    if (!server.up || server.life != open.life) {
      results.push_back({.call = open.number, .failure = "connection reset"});
    } else if (server.stopped || (generates && server.model.paused)) {
      if (now >= open.deadline) {
        results.push_back({.call = open.number, .failure = "no answer in time"});
      } else {
        open_.emplace(std::min(now + 0.05, open.deadline), std::move(open));
      }
    } else {
      FakeAnswer answer = server.model.answer(open.path, open.body);
      if (world_.rng.uniform() < world_.bad) world_.spoil(answer);
      results.push_back({.call = open.number, .status = answer.status, .body = answer.body});
    }
  }

  World& world_;
  int64_t next_ = 1;
  std::multimap<double, Open> open_;  // by the time they are looked at next
};

class SimulatedSource : public ServerSource {
 public:
  explicit SimulatedSource(World& world) : world_(world) {}
  std::vector<ServerAddress> servers(double) override {
    world_.live();
    std::vector<ServerAddress> out;
    for (size_t s = 0; s < world_.servers.size(); ++s) {
      if (world_.servers[s].listed) out.push_back({World::url(s), World::url(s)});
    }
    return out;
  }

 private:
  World& world_;
};

struct Ends {
  int64_t finished = 0, gave_up = 0, outages = 0, failures = 0, left = 0, stale = 0;
  int64_t bad_answers = 0, retries = 0;
};

void run_history(uint64_t seed, Ends& ends) {
  SCOPED_TRACE(fmt::format("history {}", seed));
  World world;
  world.rng = Rng(mixed_seed({seed, 3}));
  Rng rng(mixed_seed({seed, 78}));
  const auto number = [&](int64_t from, int64_t to) {
    return from + static_cast<int64_t>(rng.below(static_cast<uint64_t>(to - from + 1)));
  };
  OrchestratorTable table;
  table.schedule = number(0, 1) == 0 ? RolloutSchedule::free : RolloutSchedule::lockstep;
  table.max_off_policy_steps = number(0, 2);
  table.group_size = number(1, 4);
  table.prompts_per_batch = number(1, 4);
  table.max_error_reschedule_attempts = number(1, 4);
  table.min_group_size = number(0, table.group_size);
  table.retry_backoff = 0.05;
  const int64_t steps = number(1, 4);
  FakeTalk talk(false);
  const RandomPolicy policy{talk, seed};
  world.servers.resize(static_cast<size_t>(number(1, 4)));
  for (SimulatedServer& server : world.servers) {
    server.model.vocab_size = 512;
    server.model.ids_of = [&](const Request& request, int64_t sample) {
      return policy(request, 0, sample).ids;
    };
    server.up = number(0, 5) > 0;
    server.listed = number(0, 5) > 0;
  }
  world.slowest = number(0, 1) == 0 ? 0.05 : 0.6;
  const double shares[] = {0.0, 0.0, 0.02, 0.2};
  world.bad = shares[number(0, 3)];
  for (int64_t k = number(0, 8); k > 0; --k) {
    const auto server =
        static_cast<size_t>(number(0, static_cast<int64_t>(world.servers.size()) - 1));
    const double time = 6.0 * rng.uniform(), later = time + 4.0 * rng.uniform();
    const int64_t kind = number(0, 2);
    using Kind = Fate::Kind;
    world.fates.push_back({time, server, std::array{Kind::kill, Kind::stop, Kind::unlist}[kind]});
    if (number(0, 3) == 0) continue;  // for good
    world.fates.push_back({later, server, std::array{Kind::start, Kind::go_on, Kind::list}[kind]});
  }
  std::stable_sort(world.fates.begin(), world.fates.end(),
                   [](const Fate& a, const Fate& b) { return a.time < b.time; });

  PoolContext context;
  context.table.pool = InferencePool::elastic;
  context.table.sync_interval = 0.5;
  context.table.connect_timeout = 0.3;
  context.table.request_timeout = 3.0;
  context.table.update_timeout = 1.0;
  context.table.stall_timeout = 0.3;
  context.table.ready_timeout = 3.0;
  context.table.request_attempts = number(1, 4);
  context.table.outage_timeout = number(0, 1) == 0 ? 4.0 : 1000.0;
  context.model = {.vocab_size = 512, .max_length = 512};
  auto store = std::make_unique<FakeWeights>();
  PoolSampler sampler(context, std::make_unique<SimulatedSource>(world),
                      std::make_unique<SimulatedHttp>(world), std::move(store), world.clock);
  sampler.update_weights(nullptr, 0);

  FakeLearner learner(world.clock);
  learner.seconds_of = [s = 0.3 * rng.uniform()](int64_t) { return s; };
  std::vector<EnvironmentMix::Member> members;
  members.push_back(fake_member("letters", 1.0));
  EnvironmentMix mix(std::move(members), seed);
  RolloutDriver driver(talk.conversation, sampler, world.clock,
                       {.max_new_tokens = 64, .max_length = 512});
  RolloutScheduler scheduler(table, seed, steps, mix, driver, sampler, world.clock);
  LoopOptions options;
  options.max_steps = steps;
  LoopEvents events;
  int64_t looks = 0, trained = 0;
  events.should_stop = [&] {
    EXPECT_LT(++looks, kMostLooks) << "the run does not end";
    EXPECT_LT(world.clock.now(), kMostSeconds) << "the run does not end";
    return looks >= kMostLooks || world.clock.now() >= kMostSeconds;
  };
  events.wants_checkpoint = [](int64_t) { return false; };
  events.on_checkpoint = [](int64_t, const ScheduleState&) {};
  std::set<int64_t> groups;
  events.on_step = [&](const StepRecord& record) {
    ++trained;
    for (const Group& group : record.batch.groups) {
      EXPECT_TRUE(groups.insert(group.number).second) << "a group is trained once";
      for (const Rollout& rollout : group.rollouts) {
        for (const TrajectoryStep& step : rollout.steps) {
          EXPECT_EQ(step.logprobs, std::vector<float>(step.completion.size(), -0.25f));
          for (int32_t id : step.completion) EXPECT_TRUE(id >= 0 && id < 512);
          for (PolicyVersion version : step.versions) {
            EXPECT_GE(version, record.step - 1 - table.max_off_policy_steps);
            EXPECT_LE(version, record.step - 1);
          }
        }
      }
    }
  };
  LoopResult result;
  try {
    result = run_loop(scheduler, learner, world.clock, {"letters"}, options, events);
  } catch (const Error& error) {
    result = {.end = LoopResult::End::gave_up, .steps = trained, .reason = error.what()};
  }
  const ScheduleTotals& totals = scheduler.totals();
  EXPECT_EQ(totals.admitted,
            totals.completed + totals.failed + totals.cancelled + scheduler.running());
  EXPECT_EQ(trained, result.steps);
  if (result.end == LoopResult::End::finished) {
    EXPECT_EQ(result.steps, steps);
    ++ends.finished;
  } else {
    EXPECT_EQ(result.end, LoopResult::End::gave_up);
    const bool outage = result.reason.find("inference.outage_timeout") != std::string::npos;
    EXPECT_TRUE(outage || result.reason.find("in a row") != std::string::npos) << result.reason;
    ++(outage ? ends.outages : ends.gave_up);
  }
  const Metrics metrics = sampler.take_metrics();
  ends.failures += totals.failed;
  ends.left += static_cast<int64_t>(metric_of(metrics, "pool/left"));
  ends.bad_answers += static_cast<int64_t>(metric_of(metrics, "pool/bad_answers"));
  ends.retries += static_cast<int64_t>(metric_of(metrics, "pool/retried_requests"));
  ends.stale += totals.groups_stale;
}

TEST(PoolSimulation, EveryHistoryEndsWithEveryRolloutAccountedFor) {
  Ends ends;
  const char* only = std::getenv("LEEWAY_HISTORY");
  if (only != nullptr) return run_history(std::strtoull(only, nullptr, 10), ends);
  for (uint64_t seed = 1; seed <= kHistories; ++seed) {
    run_history(seed, ends);
    if (::testing::Test::HasFailure()) {
      FAIL() << "LEEWAY_HISTORY=" << seed << " runs it alone";
    }
  }
  fmt::print(
      "{} finished, {} gave up, {} after an outage; {} rollouts failed, {} calls repeated, {} bad "
      "answers, {} times a server left, {} groups too old\n",
      ends.finished, ends.gave_up, ends.outages, ends.failures, ends.retries, ends.bad_answers,
      ends.left, ends.stale);
  // The histories are of every kind.
  EXPECT_GT(ends.finished, static_cast<int64_t>(kHistories) / 2);
  for (int64_t count :
       {ends.gave_up, ends.outages, ends.failures, ends.retries, ends.left, ends.bad_answers}) {
    EXPECT_GT(count, 0);
  }
}

}  // namespace
}  // namespace leeway
