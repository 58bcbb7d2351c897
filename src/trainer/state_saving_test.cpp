// States that ranks save and load together: any number of ranks loads what any other has saved, no
// rank holds more than its part and one parameter, and what is damaged is named.
#include "trainer/state_saving.h"

#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <set>
#include <thread>

#include "base/files.h"
#include "base/folders.h"
#include "model/adapter_io.h"
#include "ranks/local_ranks.h"
#include "trainer/ranks_backend.h"
#include "trainer/saved_state.h"
#include "trainer/state_loading.h"
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

// The same over such a model.
Parameters large_adapter() {
  Parameters adapter(std::make_shared<const Parameters>(large_policy()),
                     {.rank = 24, .alpha = 48.0, .targets = {"q_proj", "up_proj", "down_proj"}});
  initialise(adapter, 3);
  return adapter;
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

std::string part(const char* stem, int r, int size) {
  return stored_part_name(stem, static_cast<size_t>(r), static_cast<size_t>(size));
}

TEST(StateSaving, WhatAnyNumberSavesAnyOtherLoads) {
  for (const Parameters& policy : {large_policy(), large_adapter()}) {
    const char* const stem = policy.lora() != nullptr ? "adapter_model" : "model";
    const auto samples = [&](uint64_t seed) { return rolled_out(policy, seed, 12); };
    Trainer alone(policy, loss(), table_of_eight());
    ASSERT_EQ(alone.train_batch(samples(1)).failure, "");
    const TrainingState expected = alone.state();
    ASSERT_EQ(alone.train_batch(samples(2)).failure, "");
    for (const int saved : {1, 2, 4, 8}) {
      const TestFolder folder;
      lead({.size = saved}, policy, [&](Trainer& trainer) {
        ASSERT_EQ(trainer.train_batch(samples(1)).failure, "");
        trainer.save(folder.path());
        trainer.save(folder.path());  // over the first
      });
      for (const char* each : {stem, "optimizer"}) {
        const std::string single = folder.path() + "/" + each + ".safetensors";
        EXPECT_EQ(path_exists(single), saved == 1);
        EXPECT_EQ(path_exists(single + ".index.json"), saved > 1);
        EXPECT_EQ(path_exists(folder.path() + "/" + part(each, 0, saved)), saved > 1);
      }
      // As any command reads a folder of a model.
      EXPECT_TRUE(same_bits(load_like(policy, folder.path()), expected.policy)) << saved;
      for (const int loaded : {1, 2, 4, 8}) {
        lead({.size = loaded}, policy, [&](Trainer& trainer) {
          trainer.load(folder.path());
          const TrainingState state = trainer.state();
          EXPECT_TRUE(same_bits(state.policy, expected.policy)) << saved << " to " << loaded;
          EXPECT_TRUE(same_bits(state.optimizer.first_moment(), expected.optimizer.first_moment()));
          EXPECT_TRUE(
              same_bits(state.optimizer.second_moment(), expected.optimizer.second_moment()));
          ASSERT_EQ(trainer.train_batch(samples(2)).failure, "");
          EXPECT_TRUE(same_bits(trainer.parameters(), alone.parameters()))
              << saved << " to " << loaded;
        });
      }
    }
  }
}

// A folder that one number of ranks has written, then another: nothing of the first is left.
TEST(StateSaving, ASaveRemovesThePartsOfAnotherNumber) {
  for (const Parameters& policy : {large_policy(), large_adapter()}) {
    const TestFolder folder;
    std::vector<std::vector<std::string>> names;
    for (const int size : {1, 4, 2, 1}) {
      lead({.size = size}, policy, [&](Trainer& trainer) { trainer.save(folder.path()); });
      names.push_back(folder.names());
      EXPECT_TRUE(same_bits(load_like(policy, folder.path()), policy)) << size;
    }
    EXPECT_EQ(names[1].size(), names[2].size() + 4);
    EXPECT_EQ(names[0], names[3]);
  }
}

TEST(StateSaving, ARankWithoutTheFolderGivesAndTakesTensorByTensor) {
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
      EXPECT_TRUE(same_bits(trainer.parameters(), expected->policy));
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

TEST(StateSaving, NoRankHoldsMoreThanItsShardAndAParameter) {
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
        for (const auto& file : complete_state(own, made.share->shard())) {
          for (const TensorOfState& each : file) {
            held[static_cast<size_t>(r)] += each.values.size();
          }
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    size_t sum = 0;
    for (const size_t numbers : held) {
      EXPECT_LE(numbers, 3 * (all / static_cast<size_t>(size) * 12 / 10 + largest)) << size;
      sum += numbers;
    }
    EXPECT_EQ(sum, 3 * all);
  }
}

TEST(StateSaving, MissingAndTruncatedPartsAreNamedAndChangeNothing) {
  const Parameters policy = large_policy();
  const TestFolder folder;
  lead({.size = 4}, policy, [&](Trainer& trainer) {
    ASSERT_EQ(trainer.train_batch(rolled_out(policy, 1, 12)).failure, "");
    trainer.save(folder.path());
  });
  for (const char* stem : {"model", "optimizer"}) {
    const std::string name = part(stem, 2, 4), path = folder.path() + "/" + name;
    const std::string whole = read_file(path);
    const std::string foreign = read_file(folder.path() + "/" + part(stem, 1, 4));
    std::string nan = whole;
    const float not_finite = std::numeric_limits<float>::quiet_NaN();
    std::memcpy(nan.data() + nan.size() - sizeof not_finite, &not_finite, sizeof not_finite);
    for (const Group& group :
         {Group{.size = 1}, Group{.size = 2}, Group{.size = 4}, Group{.size = 4, .elsewhere = 3}}) {
      lead(group, policy, [&](Trainer& trainer) {
        const TrainingState before = trainer.state();
        const auto refused = [&] {
          testing::expect_refused([&] { trainer.load(folder.path()); }, {name.c_str()});
          const TrainingState after = trainer.state();
          EXPECT_TRUE(same_bits(after.policy, before.policy));
          EXPECT_TRUE(same_bits(after.optimizer.second_moment(), before.optimizer.second_moment()));
          EXPECT_EQ(trainer.optimizer_steps(), 0);
        };
        remove_tree(path);
        refused();
        write_file_atomically(path, whole.substr(0, whole.size() - 5));
        refused();
        write_file_atomically(path, nan);
        refused();
        write_file_atomically(path, foreign);
        refused();
        write_file_atomically(path, whole);
        EXPECT_NO_THROW(trainer.load(folder.path()));
      });
    }
  }
}

TEST(StateSaving, AStateOfAnotherModelIsRefused) {
  const Parameters policy = large_policy(), adapter = large_adapter();
  Parameters other(adapter.base(), {.rank = 24, .alpha = 24.0, .targets = adapter.lora()->targets});
  const TestFolder folder, of_adapter;
  lead({.size = 2}, policy, [&](Trainer& trainer) { trainer.save(folder.path()); });
  lead({.size = 2}, adapter, [&](Trainer& trainer) { trainer.save(of_adapter.path()); });
  const auto refused = [](const Parameters& by, const TestFolder& from, const char* word) {
    lead({.size = 2}, by, [&](Trainer& trainer) {
      testing::expect_refused([&] { trainer.load(from.path()); }, {word});
    });
  };
  ModelConfig config = policy.config();
  config.rope_theta *= 2;
  refused(testing::small_parameters(config, 1), folder, "a different model");
  refused(other, of_adapter, "a different model");
  refused(adapter, folder, "adapter_config.json");
  refused(policy, of_adapter, "config.json");
}

// A save that was ordered and never written, as when a disk is full, leaves all ranks ready.
TEST(StateSaving, ASaveThatIsDroppedOrFailsIsFollowedByOthers) {
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

// Parts that were written are no state without the files that are written last.
TEST(StateSaving, ARankThatIsLostWhileItSavesLeavesNoState) {
  const Parameters policy = large_policy();
  const TestFolder folder;
  const auto ranks = make_local_ranks(2);
  std::thread other([&] {
    const RankBackend made = cpu_rank_backend()(*ranks[1], {policy}, table_of_eight());
    complete_state(*ranks[1], made.share->shard());
    ranks[1]->receive(0, Channel::saving);  // the folder
    ranks[1]->abort("rank 1: gone");
  });
  const RankBackend made = cpu_rank_backend()(*ranks[0], {policy}, table_of_eight());
  StateSave save(*ranks[0], made.share->shard(), 0);
  EXPECT_THROW(save.write(folder.path()), Lost);
  other.join();
  EXPECT_TRUE(path_exists(folder.path() + "/" + part("model", 0, 2)));
  for (const char* name : {"/trainer.json", "/config.json", "/model.safetensors.index.json"}) {
    EXPECT_FALSE(path_exists(folder.path() + name)) << name;
  }
}

TEST(StateSaving, ANumberThatIsNotFiniteIsNotSaved) {
  const Parameters policy = large_policy();
  const TestFolder folder;
  for (const StateKind kind : kStateKinds) {
    const auto ranks = make_local_ranks(2);
    std::thread other([&] {
      const RankBackend made = cpu_rank_backend()(*ranks[1], {policy}, table_of_eight());
      made.share->shard().prepare([&](StateKind each, const StatePiece&, std::span<float> to) {
        const float bad = std::numeric_limits<float>::infinity();
        std::fill(to.begin(), to.end(), each == kind ? bad : 0.0f);
      })();
      StateWriter(*ranks[1]).begin(made.share->shard());
    });
    const RankBackend made = cpu_rank_backend()(*ranks[0], {policy}, table_of_eight());
    StateSave save(*ranks[0], made.share->shard(), 0);
    testing::expect_refused(
        [&] { save.write(folder.path()); },
        {"rank 1", kind == StateKind::weight ? "weight" : "moment of", "holds inf"});
    other.join();
    EXPECT_FALSE(path_exists(folder.path() + "/trainer.json"));
  }
}

}  // namespace
}  // namespace leeway
