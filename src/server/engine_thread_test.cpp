#include "server/engine_thread.h"

#include <condition_variable>
#include <map>
#include <mutex>

#include "engine/test_support.h"

namespace leeway {
namespace {

using namespace testing;

// Collects what an engine's thread reports.
class Reports {
 public:
  EngineThread::Report listener() {
    return [this](std::vector<EngineUpdate> updates, const EngineStatus& status) {
      const std::lock_guard lock(mutex_);
      for (EngineUpdate& update : updates) {
        const std::pair key(update.job, update.sequence.sample);
        if (update.ended) {
          EXPECT_TRUE(ended_.emplace(key, std::move(update.sequence)).second) << "ended twice";
        } else {
          auto& ids = streamed_[key];
          ids.insert(ids.end(), update.sequence.ids.begin(), update.sequence.ids.end());
        }
      }
      status_ = status;
      changed_.notify_all();
      if (on_report) on_report();
    };
  }
  EngineThread::Done told() {
    return [this](const std::string& failure) {
      const std::lock_guard lock(mutex_);
      told_.push_back(failure);
      changed_.notify_all();
    };
  }
  template <class Condition>
  bool wait(const Condition& condition) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, std::chrono::seconds(60), condition);
  }
  bool wait_ended(size_t count) {
    return wait([&] { return ended_.size() >= count; });
  }
  bool wait_told(size_t count) {
    return wait([&] { return told_.size() >= count; });
  }
  std::function<void()> on_report;  // on the engine's thread, between two steps
  std::map<std::pair<int64_t, int64_t>, SampledSequence> ended_;
  std::map<std::pair<int64_t, int64_t>, std::vector<int32_t>> streamed_;
  std::vector<std::string> told_;
  EngineStatus status_;

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
};

std::shared_ptr<const PolicySnapshot> snapshot(uint64_t seed, PolicyVersion version) {
  return std::make_shared<const PolicySnapshot>(tiny_weights(Family::qwen3, seed), version);
}

TEST(EngineThread, SamplesWhatTheEngineSamples) {
  const std::vector<Request> requests = assorted(30, 9);
  const Results expected = run_all(tiny_weights(Family::qwen3, 3), options_of(64), requests);
  Reports reports;
  EngineThread engine(snapshot(3, 0), options_of(64), nullptr, reports.listener());
  for (size_t i = 0; i < requests.size(); ++i) {
    engine.submit({static_cast<int64_t>(i), requests[i], i % 2 == 0, {}});
  }
  ASSERT_TRUE(reports.wait_ended(expected.size()));
  for (const auto& [key, sequence] : expected) {
    expect_same(reports.ended_.at(key), sequence);
    const auto& streamed = reports.streamed_[key];
    ASSERT_LE(streamed.size(), sequence.ids.size());
    EXPECT_TRUE(std::equal(streamed.begin(), streamed.end(), sequence.ids.begin()));
  }
}

TEST(EngineThread, RefusesWhatTheEngineRefuses) {
  Reports reports;
  EngineThread engine(snapshot(3, 0), options_of(64), nullptr, reports.listener());
  EXPECT_THROW(engine.submit({1, make_request(kPositions, 5, 1, 1), false, {}}), Error);
  EXPECT_THROW(engine.submit({1, {}, false, {}}), Error);
}

TEST(EngineThread, PausesInEachMode) {
  Reports reports;
  EngineThread engine(snapshot(3, 0), options_of(64), nullptr, reports.listener());
  // keep: nothing is sampled while it is paused, and nothing is lost.
  engine.pause(PauseMode::keep, reports.told());
  ASSERT_TRUE(reports.wait_told(1));
  EXPECT_TRUE(reports.status_.paused);
  engine.submit({1, make_request(4, 10, 2, 1), false, {}});
  engine.submit({2, make_request(4, 10, 1, 1), false, {}});
  ASSERT_TRUE(reports.wait([&] { return reports.status_.queued == 3; }));
  EXPECT_TRUE(reports.ended_.empty());
  // One that waits can be cancelled.
  engine.cancel(2);
  ASSERT_TRUE(reports.wait_ended(1));
  EXPECT_EQ(reports.ended_.at({2, 0}).finish, Finish::cancelled);
  engine.resume(reports.told());
  ASSERT_TRUE(reports.wait_ended(3));
  EXPECT_EQ(reports.ended_.at({1, 1}).finish, Finish::length);
  // wait: those that run are finished before it is told; those that come later wait.
  engine.submit({3, make_request(4, 60, 2, 1), false, {}});
  engine.pause(PauseMode::wait, reports.told());
  engine.submit({4, make_request(4, 4, 1, 1), false, {}});
  ASSERT_TRUE(reports.wait_told(3));
  EXPECT_EQ(reports.ended_.size(), 5u);
  EXPECT_EQ(reports.ended_.at({3, 0}).finish, Finish::length);
  // abort: they end with what they have.
  engine.pause(PauseMode::abort, reports.told());
  ASSERT_TRUE(reports.wait_ended(6));
  EXPECT_EQ(reports.ended_.at({4, 0}).finish, Finish::cancelled);
  engine.resume(reports.told());
  engine.submit({5, make_request(4, 4, 1, 1), false, {}});
  ASSERT_TRUE(reports.wait_ended(7));
  EXPECT_EQ(reports.ended_.at({5, 0}).finish, Finish::length);
}

TEST(EngineThread, StampsTokensWithTheVersionAndRefusesOtherNetworks) {
  Reports reports;
  EngineThread engine(snapshot(3, 0), options_of(64), nullptr, reports.listener());
  engine.update_weights(std::make_shared<const PolicySnapshot>(tiny_weights(Family::llama, 3), 4),
                        reports.told());
  engine.update_weights(snapshot(4, 7), reports.told());
  ASSERT_TRUE(reports.wait_told(2));
  EXPECT_FALSE(reports.told_[0].empty());
  EXPECT_EQ(reports.told_[1], "");
  EXPECT_EQ(reports.status_.version, 7);
  engine.submit({1, make_request(4, 5, 1, 1), false, {}});
  ASSERT_TRUE(reports.wait_ended(1));
  EXPECT_EQ(reports.ended_.at({1, 0}).versions, std::vector<PolicyVersion>(5, 7));
}

// A pause that recomputes, with new weights: the rest is what the new policy gives to the tokens.
TEST(EngineThread, RecomputesKeysAndValuesOnDemand) {
  const Request request = make_request(5, 80, 1, 2);
  Reports reports;
  EngineThread engine(snapshot(3, 0), options_of(64), nullptr, reports.listener());
  bool updated = false;
  reports.on_report = [&] {
    if (reports.streamed_[{1, 0}].size() < 3 || std::exchange(updated, true)) return;
    engine.pause(PauseMode::recompute, reports.told());
    engine.update_weights(snapshot(4, 1), reports.told());
    engine.resume(reports.told());
  };
  engine.submit({1, request, true, {}});
  ASSERT_TRUE(reports.wait_ended(1));
  const SampledSequence& result = reports.ended_.at({1, 0});
  const auto first = static_cast<size_t>(
      std::find(result.versions.begin(), result.versions.end(), 1) - result.versions.begin());
  ASSERT_LT(first, result.ids.size()) << "the update came after the last token";
  WholePass after(tiny_weights(Family::qwen3, 4), Precision::float32);
  const std::vector<float> expected = after.logprobs(request, result, first);
  const std::vector<float> got(result.raw_logprobs.begin() + static_cast<std::ptrdiff_t>(first),
                               result.raw_logprobs.end());
  EXPECT_EQ(bits(got), bits(expected));
}

TEST(EngineThread, WeightsThatFailEndTheRequestAndNotTheEngine) {
  Parameters broken = tiny_weights(Family::qwen3, 3);
  broken.flat()[0] = std::numeric_limits<float>::quiet_NaN();
  Reports reports;
  EngineThread engine(snapshot(3, 0), options_of(64), nullptr, reports.listener());
  engine.update_weights(std::make_shared<const PolicySnapshot>(std::move(broken), 1),
                        reports.told());
  Request request = make_request(4, 5, 2, 1);
  request.prompt = {0, 0, 0};
  engine.submit({1, request, false, {}});
  ASSERT_TRUE(reports.wait_ended(2));
  EXPECT_EQ(reports.ended_.at({1, 0}).finish, Finish::failed);
  EXPECT_FALSE(reports.ended_.at({1, 0}).failure.empty());
  engine.update_weights(snapshot(3, 2), reports.told());
  engine.submit({2, request, false, {}});
  ASSERT_TRUE(reports.wait_ended(4));
  EXPECT_EQ(reports.ended_.at({2, 0}).finish, Finish::length);
}

}  // namespace
}  // namespace leeway
