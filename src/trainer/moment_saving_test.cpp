// States that ranks save and load together: any number of ranks loads what any other has saved, no
// rank holds more than its part of the moments and one tensor, and what is damaged is named.
#include "trainer/moment_saving.h"

#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <set>
#include <thread>

#include "base/files.h"
#include "base/folders.h"
#include "ranks/local_ranks.h"
#include "trainer/moment_loading.h"
#include "trainer/ranks_backend.h"
#include "trainer/test_support.h"

namespace leeway {
namespace {

using testing::rolled_out;
using testing::same_bits;
using testing::small_table;
using testing::spec_of;
using testing::TestFolder;

// A rank on a host without rank 0's disk: folders that it is told of are not there.
class RankElsewhere : public Ranks {
 public:
  explicit RankElsewhere(Ranks& ranks) : ranks_(ranks) {}
  int rank() const override { return ranks_.rank(); }
  int size() const override { return ranks_.size(); }
  void broadcast(std::span<std::byte> data, int from) override { ranks_.broadcast(data, from); }
  std::vector<std::string> all_gather(const std::string& own) override {
    std::vector<std::string> all = ranks_.all_gather(own);
    if (all[0].find(hidden) != std::string::npos) all[0].replace(all[0].find(hidden), 4, "????");
    return all;
  }
  void all_gather(std::span<float> whole, std::span<const size_t> bounds) override {
    ranks_.all_gather(whole, bounds);
  }
  bool reduce_scatter(std::span<const float> whole, std::span<const size_t> bounds,
                      std::span<float> part) override {
    return ranks_.reduce_scatter(whole, bounds, part);
  }
  void barrier() override { ranks_.barrier(); }
  void send(int to, Channel channel, const std::string& message) override {
    ranks_.send(to, channel, message);
  }
  std::string receive(int from, Channel channel) override {
    std::string message = ranks_.receive(from, channel);
    if (channel == Channel::saving && message.find(hidden) != std::string::npos) {
      message.replace(message.find(hidden), 4, "????");
    }
    return message;
  }
  void abort(const std::string& reason) override { ranks_.abort(reason); }

  std::string hidden = "////";  // in the names of folders that are not there; 4 bytes

 private:
  Ranks& ranks_;
};

struct Group {
  int size = 2;
  int elsewhere = -1;  // the rank that does not see rank 0's folders
};

// So large that eight ranks have a part each, and that parts end within parameters.
Parameters large_policy() {
  ModelConfig config = testing::small_config(Family::llama, false);
  config.intermediate_size = 1500;
  config.num_hidden_layers = 4;
  return testing::small_parameters(config, 1);
}

const LossSpec& loss() {
  static const LossSpec spec = spec_of("icepop");
  return spec;
}

TrainerTable table_of_eight() {
  TrainerTable table = small_table();
  table.gradient_slots = 8;
  return table;
}

// Runs `work` with a trainer on rank 0; the others serve it. One rank: without a group.
void lead(const Group& group, const Parameters& policy, const std::function<void(Trainer&)>& work) {
  if (group.size == 1) {
    Trainer trainer(policy, loss(), table_of_eight());
    return work(trainer);
  }
  const auto ranks = make_local_ranks(group.size);
  std::vector<std::thread> threads;
  for (int r = 1; r < group.size; ++r) {
    threads.emplace_back([&, r] {
      RankElsewhere there(*ranks[static_cast<size_t>(r)]);
      if (r == group.elsewhere) there.hidden = "leew";
      KeptSnapshots snapshots;
      serve_training(there, {.like = &policy, .specs = {&loss()}}, snapshots);
    });
  }
  {
    RanksTraining training(*ranks[0], {&loss()});
    {
      Trainer trainer(policy, loss(), table_of_eight(), training.backends());
      work(trainer);
    }
    training.end();
  }
  for (std::thread& thread : threads) thread.join();
}

std::string part(int r, int size) {
  return stored_part_name("optimizer", static_cast<size_t>(r), static_cast<size_t>(size));
}

TEST(MomentSaving, WhatAnyNumberSavesAnyOtherLoads) {
  const Parameters policy = large_policy();
  Trainer alone(policy, loss(), table_of_eight());
  ASSERT_EQ(alone.train_batch(rolled_out(policy, 1, 12)).failure, "");
  const TrainingState expected = alone.state();
  ASSERT_EQ(alone.train_batch(rolled_out(policy, 2, 12)).failure, "");
  std::set<std::string> weights;  // files' contents
  for (const int saved : {1, 2, 4, 8}) {
    const TestFolder folder;
    lead({.size = saved}, policy, [&](Trainer& trainer) {
      ASSERT_EQ(trainer.train_batch(rolled_out(policy, 1, 12)).failure, "");
      trainer.save(folder.path());
      trainer.save(folder.path());  // over the first
    });
    weights.insert(read_file(folder.path() + "/model.safetensors"));
    EXPECT_EQ(path_exists(folder.path() + "/optimizer.safetensors"), saved == 1);
    EXPECT_EQ(path_exists(folder.path() + "/" + part(0, saved)), saved > 1);
    for (const int loaded : {1, 2, 4, 8}) {
      lead({.size = loaded}, policy, [&](Trainer& trainer) {
        trainer.load(folder.path());
        const TrainingState state = trainer.state();
        EXPECT_TRUE(same_bits(state.policy, expected.policy)) << saved << " to " << loaded;
        EXPECT_TRUE(same_bits(state.optimizer.first_moment(), expected.optimizer.first_moment()));
        EXPECT_TRUE(same_bits(state.optimizer.second_moment(), expected.optimizer.second_moment()));
        ASSERT_EQ(trainer.train_batch(rolled_out(policy, 2, 12)).failure, "");
        EXPECT_TRUE(same_bits(trainer.parameters(), alone.parameters()))
            << saved << " to " << loaded;
      });
    }
  }
  EXPECT_EQ(weights.size(), 1u);
}

TEST(MomentSaving, ARankWithoutTheFolderGivesAndTakesTensorByTensor) {
  const Parameters policy = large_policy();
  const TestFolder folder, other;
  std::optional<TrainingState> expected;
  lead({.size = 4}, policy, [&](Trainer& trainer) {
    ASSERT_EQ(trainer.train_batch(rolled_out(policy, 1, 12)).failure, "");
    expected = trainer.state();
    trainer.save(folder.path());
  });
  for (const int elsewhere : {1, 3}) {
    lead({.size = 4, .elsewhere = elsewhere}, policy, [&](Trainer& trainer) {
      trainer.load(folder.path());
      EXPECT_TRUE(
          same_bits(trainer.state().optimizer.first_moment(), expected->optimizer.first_moment()));
      EXPECT_TRUE(same_bits(trainer.state().optimizer.second_moment(),
                            expected->optimizer.second_moment()));
      trainer.save(other.path());
    });
    for (const std::string& name : folder.names()) {
      EXPECT_EQ(read_file(folder.path() + "/" + name), read_file(other.path() + "/" + name))
          << name;
    }
    EXPECT_EQ(folder.names(), other.names());
  }
}

TEST(MomentSaving, NoRankHoldsMoreThanItsShardAndATensor) {
  const Parameters policy = large_policy();
  size_t largest = 0, all = 0;
  for (const ParameterInfo& info : policy.table()) {
    largest = std::max(largest, static_cast<size_t>(info.size()));
    all += static_cast<size_t>(info.size());
  }
  for (const int size : {2, 4, 8}) {
    const auto ranks = make_local_ranks(size);
    std::vector<std::thread> threads;
    std::vector<size_t> held(static_cast<size_t>(size));
    for (int r = 0; r < size; ++r) {
      threads.emplace_back([&, r] {
        Ranks& own = *ranks[static_cast<size_t>(r)];
        const RankBackend made = cpu_rank_backend()(own, {policy}, table_of_eight());
        for (const MomentsOfParameter& each : complete_moments(own, made.share->moments())) {
          held[static_cast<size_t>(r)] += each.first.size();
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    size_t sum = 0;
    for (const size_t numbers : held) {
      EXPECT_LE(numbers, all / static_cast<size_t>(size) * 12 / 10 + largest) << size;
      sum += numbers;
    }
    EXPECT_EQ(sum, all);
  }
}

TEST(MomentSaving, MissingAndTruncatedPartsAreNamedAndChangeNothing) {
  const Parameters policy = large_policy();
  const TestFolder folder;
  lead({.size = 4}, policy, [&](Trainer& trainer) {
    ASSERT_EQ(trainer.train_batch(rolled_out(policy, 1, 12)).failure, "");
    trainer.save(folder.path());
  });
  const std::string name = part(2, 4), path = folder.path() + "/" + name;
  const std::string whole = read_file(path);
  std::string nan = whole;
  const float not_finite = std::numeric_limits<float>::quiet_NaN();
  std::memcpy(nan.data() + nan.size() - sizeof not_finite, &not_finite, sizeof not_finite);
  for (const int size : {1, 2, 4}) {
    lead({.size = size}, policy, [&](Trainer& trainer) {
      const TrainingState before = trainer.state();
      const auto refused = [&] {
        testing::expect_refused([&] { trainer.load(folder.path()); }, {name.c_str()});
        EXPECT_TRUE(same_bits(trainer.state().policy, before.policy));
        EXPECT_TRUE(
            same_bits(trainer.state().optimizer.second_moment(), before.optimizer.second_moment()));
        EXPECT_EQ(trainer.optimizer_steps(), 0);
      };
      remove_tree(path);
      refused();
      write_file_atomically(path, whole.substr(0, whole.size() - 5));
      refused();
      write_file_atomically(path, nan);
      refused();
      write_file_atomically(path, whole);
      EXPECT_NO_THROW(trainer.load(folder.path()));
    });
  }
}

// A save that was ordered and never written, as when a disk is full, leaves all ranks ready.
TEST(MomentSaving, ASaveThatIsDroppedOrFailsIsFollowedByOthers) {
  const Parameters policy = large_policy();
  const TestFolder folder;
  lead({.size = 4}, policy, [&](Trainer& trainer) {
    { const auto dropped = trainer.save_later(); }
    testing::expect_refused([&] { trainer.save("/proc/nothing/here"); }, {"/proc/nothing"});
    trainer.save(folder.path());
    const auto save = trainer.save_later();
    ASSERT_EQ(trainer.train_batch(rolled_out(policy, 1, 12)).failure, "");
    save(folder.path());  // the state before the step
    trainer.load(folder.path());
    EXPECT_EQ(trainer.optimizer_steps(), 0);
  });
}

TEST(MomentSaving, AMomentThatIsNotFiniteIsNotSaved) {
  const Parameters policy = large_policy();
  const TestFolder folder;
  const auto ranks = make_local_ranks(2);
  std::thread other([&] {
    const RankBackend made = cpu_rank_backend()(*ranks[1], {policy}, table_of_eight());
    made.share->moments().prepare([](Moment, const MomentPiece&, std::span<float> to) {
      std::fill(to.begin(), to.end(), std::numeric_limits<float>::infinity());
    })();
    MomentWriter(*ranks[1]).begin(made.share->moments());
  });
  const RankBackend made = cpu_rank_backend()(*ranks[0], {policy}, table_of_eight());
  MomentSave save(*ranks[0], made.share->moments());
  testing::expect_refused([&] { save.write(folder.path()); }, {"rank 1", "moment of", "holds inf"});
  other.join();
}

}  // namespace
}  // namespace leeway
