// The scheduler with a model made of hashes: a position's key encodes its token, its position and
// the weights it was computed with, and the logits of a row encode all keys that it sees. A wrong
// block, a missing copy or a stale key is always detected.

#include "engine/scheduler.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>

namespace leeway {
namespace {

constexpr uint64_t kVocabulary = 50;

uint64_t mix(uint64_t a, uint64_t b) {
  return Rng(Rng(a).next() ^ (b * 0x9e3779b97f4a7c15u)).next();
}

class HashModel {
 public:
  explicit HashModel(int64_t blocks) : keys_(static_cast<size_t>(blocks * kBlockKeys), 0) {}

  // The first weights, and the next.
  void swap() { ++weights_; }
  uint64_t weights() const { return weights_; }

  // Writes the keys of all rows, then gives the digest of each row of logits.
  std::vector<uint64_t> run(const StepRows& rows) {
    for (const SequenceRows& s : rows.sequences) {
      for (int64_t i = 0; i < s.rows; ++i) {
        key(s, s.first_position + i) = key_of(rows.tokens[s.first_row + i], s.first_position + i);
      }
    }
    std::vector<uint64_t> digests;
    for (const int32_t row : rows.logit_rows) {
      const auto s = std::find_if(rows.sequences.begin(), rows.sequences.end(), [&](const auto& t) {
        return row >= t.first_row && row < t.first_row + t.rows;
      });
      uint64_t digest = 0;
      const int64_t last = s->first_position + row - s->first_row;
      for (int64_t position = 0; position <= last; ++position)
        digest = mix(digest, key(*s, position));
      digests.push_back(digest);
    }
    return digests;
  }

  // What a row must see after these tokens, if all of them were computed with the current weights.
  uint64_t expected(const std::vector<int32_t>& prompt, const std::vector<int32_t>& ids) const {
    uint64_t digest = 0;
    int64_t position = 0;
    for (const auto* part : {&prompt, &ids}) {
      for (int32_t token : *part) digest = mix(digest, key_of(token, position++));
    }
    return digest;
  }

  void copy(const BlockCopy& copy) {
    std::copy_n(&keys_[copy.from * kBlockKeys], kBlockKeys, &keys_[copy.to * kBlockKeys]);
  }

 private:
  uint64_t key_of(int32_t token, int64_t position) const {
    return mix(weights_, mix(static_cast<uint64_t>(token), static_cast<uint64_t>(position)));
  }
  uint64_t& key(const SequenceRows& s, int64_t position) {
    return keys_[s.blocks[position / kBlockKeys] * kBlockKeys + position % kBlockKeys];
  }

  uint64_t weights_ = 1;
  std::vector<uint64_t> keys_;
};

// A scheduler, its model and what is known about its requests.
struct World {
  World(int64_t blocks, int64_t max_sequences, int64_t max_rows)
      : most_sequences(max_sequences),
        most_rows(max_rows),
        scheduler(blocks, max_sequences, max_rows),
        model(blocks) {}

  int64_t most_sequences, most_rows;
  Scheduler scheduler;
  HashModel model;
  std::map<int64_t, Request> requests;
  std::vector<SampledSequence> ended;
  int64_t prompt_rows = 0, decode_rows = 0;
  uint64_t failing = kVocabulary;  // draws whose token would be this one fail

  void submit(Request request) {
    const auto id = static_cast<int64_t>(requests.size());
    requests.emplace(id, request);
    scheduler.enqueue(id, std::move(request));
  }

  void check_layout(const StepRows& rows) const {
    ASSERT_LE(static_cast<int64_t>(rows.tokens.size()), most_rows);
    ASSERT_EQ(static_cast<int64_t>(rows.tokens.size()), rows.prompt_rows + rows.decode_rows);
    int64_t next = 0;
    std::set<int32_t> written;
    for (const SequenceRows& s : rows.sequences) {
      ASSERT_EQ(s.first_row, next);
      ASSERT_GT(s.rows, 0);
      next += s.rows;
      for (int64_t b = s.first_position / kBlockKeys;
           b <= (s.first_position + s.rows - 1) / kBlockKeys; ++b) {
        ASSERT_TRUE(written.insert(s.blocks[b]).second) << "two sequences write one block";
        ASSERT_GT(scheduler.pool().owners(s.blocks[b]), 0);
      }
    }
    ASSERT_EQ(next, static_cast<int64_t>(rows.tokens.size()));
    ASSERT_LE(scheduler.running(), most_sequences);
  }

  // Returns whether there was anything to do.
  bool step() {
    scheduler.admit();
    const StepRows& rows = scheduler.plan();
    check_layout(rows);
    prompt_rows += rows.prompt_rows;
    decode_rows += rows.decode_rows;
    if (rows.tokens.empty()) return false;
    const std::vector<uint64_t> digests = model.run(rows);
    std::vector<Drawn> drawn(rows.draws.size());
    for (size_t i = 0; i < drawn.size(); ++i) {
      const Draw& draw = rows.draws[i];
      const std::vector<int32_t>& ids = draw.sample->result.ids;
      EXPECT_EQ(digests[draw.logits], model.expected(draw.request->request.prompt, ids))
          << "request " << draw.request->id << " sample " << draw.sample->result.sample << " token "
          << ids.size();
      const uint64_t token = mix(digests[draw.logits], draw.sample->rng.next()) % kVocabulary;
      drawn[i].token.id = static_cast<int32_t>(token);
      if (token == failing) drawn[i].failure = "no token";
    }
    const auto version = static_cast<PolicyVersion>(model.weights());
    for (const BlockCopy& copy : scheduler.commit(drawn, version, ended)) model.copy(copy);
    return true;
  }

  void run_to_the_end() {
    for (int steps = 0; step(); ++steps) {
      ASSERT_LT(steps, 10000) << "the scheduler does not come to an end";
      if (testing::Test::HasFailure()) return;
    }
  }

  // Every requested sample ended once, with as many tokens as its finish reason implies.
  void check_end() const {
    std::set<std::pair<int64_t, int64_t>> seen;
    for (const SampledSequence& result : ended) {
      ASSERT_TRUE(seen.emplace(result.request, result.sample).second);
      const Request& request = requests.at(result.request);
      const auto count = static_cast<int64_t>(result.ids.size());
      ASSERT_EQ(result.versions.size(), result.ids.size());
      ASSERT_EQ(result.raw_logprobs.size(), result.ids.size());
      ASSERT_EQ(result.processed_logprobs.size(), result.ids.size());
      ASSERT_TRUE(std::is_sorted(result.versions.begin(), result.versions.end()));
      const auto stops = [&](int32_t id) {
        return std::count(request.stop_ids.begin(), request.stop_ids.end(), id) > 0;
      };
      switch (result.finish) {
        case Finish::stop: ASSERT_TRUE(stops(result.ids.back())); break;
        case Finish::length: ASSERT_EQ(count, request.max_new_tokens); break;
        case Finish::cancelled: ASSERT_LT(count, request.max_new_tokens); break;
        case Finish::failed: FAIL() << "the engine ends samples as cancelled"; break;
      }
      for (int64_t i = 0; i + 1 < count; ++i) ASSERT_FALSE(stops(result.ids[i]));
    }
    size_t expected = 0;
    for (const auto& [id, request] : requests) expected += static_cast<size_t>(request.samples);
    ASSERT_EQ(seen.size(), expected);
    ASSERT_EQ(scheduler.running(), 0);
    ASSERT_EQ(scheduler.queued(), 0);
    ASSERT_EQ(scheduler.pool().free(), scheduler.pool().blocks());
  }

  // By request and sample.
  std::map<std::pair<int64_t, int64_t>, SampledSequence> results() const {
    std::map<std::pair<int64_t, int64_t>, SampledSequence> map;
    for (const SampledSequence& result : ended) map[{result.request, result.sample}] = result;
    return map;
  }
};

Request make_request(int64_t prompt, int64_t tokens, int64_t samples, uint64_t seed) {
  Request request;
  Rng rng(seed);
  for (int64_t i = 0; i < prompt; ++i) {
    request.prompt.push_back(static_cast<int32_t>(rng.below(kVocabulary)));
  }
  request.max_new_tokens = tokens;
  request.samples = samples;
  request.seed = seed;
  return request;
}

Request random_request(Rng& rng) {
  Request request =
      make_request(1 + static_cast<int64_t>(rng.below(40)), 1 + static_cast<int64_t>(rng.below(30)),
                   1 + static_cast<int64_t>(rng.below(4)), rng.next());
  for (uint64_t i = rng.below(3); i > 0; --i) {
    request.stop_ids.push_back(static_cast<int32_t>(rng.below(kVocabulary)));
  }
  return request;
}

TEST(Scheduler, ShowsEverySampleItsOwnTokensThroughRandomHistories) {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE(fmt::format("history {}", seed));
    Rng rng(seed);
    const auto sequences = 4 + static_cast<int64_t>(rng.below(8));
    World world(20 + static_cast<int64_t>(rng.below(30)), sequences,
                1 + static_cast<int64_t>(rng.below(40)));
    if (seed % 4 == 0) world.failing = rng.below(kVocabulary);
    for (int action = 0; action < 120; ++action) {
      const uint64_t kind = rng.below(12);
      if (kind < 2) {
        world.submit(random_request(rng));
      } else if (kind == 2 && !world.requests.empty()) {
        const auto id = static_cast<int64_t>(rng.below(world.requests.size() + 2));
        world.scheduler.cancel(id, world.ended);
      } else if (kind == 3) {
        world.model.swap();
        world.scheduler.restart();
      } else {
        world.step();
      }
      const BlockPool& pool = world.scheduler.pool();
      ASSERT_GE(pool.free(), 0);
      ASSERT_LE(pool.free(), pool.blocks());
      if (HasFailure()) return;
    }
    world.run_to_the_end();
    world.check_end();
    if (HasFailure()) return;
  }
}

TEST(Scheduler, GivesASampleTheSameTokensWhateverRunsBesideIt) {
  std::vector<Request> requests;
  Rng rng(4);
  for (int i = 0; i < 12; ++i) requests.push_back(random_request(rng));
  std::vector<SampledSequence> alone;
  for (const Request& request : requests) {
    World world(100, 8, 512);
    world.submit(request);
    world.run_to_the_end();
    for (const auto& [key, result] : world.results()) alone.push_back(result);
  }
  for (int64_t rows : {1, 2, 5, 16, 64}) {
    for (int64_t blocks : {24, 300}) {
      World world(blocks, 5, rows);
      for (const Request& request : requests) world.submit(request);
      world.run_to_the_end();
      world.check_end();
      size_t i = 0;
      for (const auto& [key, result] : world.results()) {
        ASSERT_EQ(result.ids, alone[i].ids) << "rows " << rows << " blocks " << blocks;
        ASSERT_EQ(result.finish, alone[i++].finish);
      }
    }
  }
}

TEST(Scheduler, ComputesAPromptOnceForAllItsSamples) {
  for (int64_t prompt : {1, 15, 16, 17, 32, 40}) {
    World world(200, 16, 7);
    world.submit(make_request(prompt, 9, 6, 1));
    world.submit(make_request(prompt + 3, 1, 6, 2));
    world.run_to_the_end();
    world.check_end();
    EXPECT_EQ(world.prompt_rows, 2 * prompt + 3);
  }
}

TEST(Scheduler, NeverComputesATokenAgainWithoutARestart) {
  World world(200, 16, 64);
  const Request request = make_request(20, 12, 4, 5);
  world.submit(request);
  world.run_to_the_end();
  EXPECT_EQ(world.prompt_rows, 20);
  EXPECT_EQ(world.decode_rows, 4 * 11);  // the last token of each is never fed back
}

TEST(Scheduler, KeepsTokensAndRandomNumbersOverARestart) {
  const auto run = [](int restart_at) {
    World world(200, 16, 6);
    Rng rng(9);
    for (int i = 0; i < 5; ++i) world.submit(random_request(rng));
    for (int step = 0; step < 10000 && world.step(); ++step) {
      if (step == restart_at) world.scheduler.restart();
    }
    world.check_end();
    return world.results();
  };
  const auto undisturbed = run(-1);
  for (int restart_at = 0; restart_at < 40; ++restart_at) {
    const auto results = run(restart_at);
    for (const auto& [key, result] : undisturbed) {
      ASSERT_EQ(results.at(key).ids, result.ids) << "restart after step " << restart_at;
    }
  }
}

TEST(Scheduler, AdmitsInOrderAndOnlyWholeRequests) {
  World world(10, 4, 64);
  world.submit(make_request(16, 49, 1, 1));  // 4 blocks, one place
  world.submit(make_request(16, 17, 4, 2));  // 5 blocks, four places: only three are free
  world.submit(make_request(1, 1, 1, 3));    // would fit at once, but came later
  world.step();
  EXPECT_EQ(world.scheduler.running(), 1);
  EXPECT_EQ(world.scheduler.queued(), 5);
  EXPECT_EQ(world.scheduler.pool().free(), 6);
  world.scheduler.cancel(0, world.ended);
  EXPECT_EQ(world.scheduler.pool().free(), 10);
  world.step();
  EXPECT_EQ(world.scheduler.running(), 4);
  EXPECT_EQ(world.scheduler.queued(), 1);
  EXPECT_EQ(world.scheduler.pool().free(), 5);
  world.run_to_the_end();
  world.check_end();
}

TEST(Scheduler, CancelsQueuedRunningAndUnknownRequests) {
  World world(12, 8, 4);
  world.submit(make_request(10, 30, 2, 1));
  world.submit(make_request(10, 30, 3, 2));
  for (int i = 0; i < 8; ++i) world.step();
  world.scheduler.cancel(77, world.ended);
  EXPECT_TRUE(world.ended.empty());
  world.scheduler.cancel(1, world.ended);
  ASSERT_EQ(world.ended.size(), 3u);
  for (const SampledSequence& result : world.ended) EXPECT_TRUE(result.ids.empty());
  world.scheduler.cancel(0, world.ended);
  ASSERT_EQ(world.ended.size(), 5u);
  EXPECT_EQ(world.ended[3].finish, Finish::cancelled);
  EXPECT_GT(world.ended[3].ids.size(), 2u);
  EXPECT_FALSE(world.step());
  world.check_end();
}

TEST(Scheduler, EndsAFailingRequestAndLeavesTheOthersAlone) {
  const auto run = [](uint64_t failing) {
    World world(100, 16, 20);
    Rng rng(21);
    for (int i = 0; i < 10; ++i) world.submit(random_request(rng));
    world.failing = failing;
    world.run_to_the_end();
    world.check_end();
    return world.results();
  };
  const auto undisturbed = run(kVocabulary);
  const auto results = run(13);
  std::set<int64_t> failed, whole;
  for (const auto& [key, result] : results) {
    const std::vector<int32_t>& expected = undisturbed.at(key).ids;
    if (result.finish == Finish::cancelled) {
      failed.insert(result.request);
      ASSERT_TRUE(std::equal(result.ids.begin(), result.ids.end(), expected.begin()));
    } else {
      whole.insert(result.request);
      ASSERT_EQ(result.ids, expected);
    }
  }
  EXPECT_FALSE(failed.empty());
  EXPECT_FALSE(whole.empty());
}

}  // namespace
}  // namespace leeway
