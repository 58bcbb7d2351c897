// Ranks that are threads of this process: the same bits for any number of them.
#include "trainer/ranks_backend.h"

#include <gtest/gtest.h>

#include <thread>

#include "ranks/local_ranks.h"
#include "trainer/loss_cases.h"
#include "trainer/test_support.h"
#include "trainer/training_messages.h"

namespace leeway {
namespace {

using testing::loss_cases;
using testing::LossCase;
using testing::make_policy;
using testing::rolled_out;
using testing::small_table;
using testing::spec_of;

// The other ranks, each served by a thread.
class Group {
 public:
  Group(int size, Parameters like, const LossSpec& spec)
      : ranks_(make_local_ranks(size)), training(*ranks_[0], {&spec}) {
    for (int r = 1; r < size; ++r) {
      threads_.emplace_back([this, r, like, &spec] {
        try {
          KeptSnapshots others;
          serve_training(*ranks_[static_cast<size_t>(r)], {.like = &like, .specs = {&spec}},
                         r == 1 ? snapshots : others);
        } catch (const Error& error) {
          if (r == 1) failure_ = error.what();
        }
      });
    }
  }
  ~Group() { end(); }
  Ranks& leader() { return *ranks_[0]; }
  void end() {
    if (threads_.empty()) return;
    try {
      training.end();
    } catch (const Lost&) {
    }
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
  }
  // Of rank 1, after the end.
  const std::string& failure() const { return failure_; }

 private:
  std::vector<std::unique_ptr<Ranks>> ranks_;

 public:
  RanksTraining training;
  KeptSnapshots snapshots;  // of rank 1

 private:
  std::vector<std::thread> threads_;
  std::string failure_;
};

// All that a trainer of some steps gives.
struct Trained {
  std::vector<float> policy, m, v;
  std::vector<double> numbers;  // losses, norms, metrics of each batch
  std::vector<TokenValues> logprobs;
  std::vector<TokenFlags> kept;
  bool operator==(const Trained&) const = default;
};

Trained train(Trainer& trainer, const Parameters& policy, int batches, uint64_t seed) {
  Trained out;
  for (int k = 0; k < batches; ++k) {
    const BatchResult result =
        trainer.train_batch(rolled_out(policy, seed + static_cast<uint64_t>(k), 13));
    EXPECT_EQ(result.failure, "");
    out.numbers.insert(out.numbers.end(), {result.loss, result.grad_norm, result.passes.entropy,
                                           static_cast<double>(result.passes.tokens)});
    const std::vector<double> metrics = result.passes.metrics.flatten();
    out.numbers.insert(out.numbers.end(), metrics.begin(), metrics.end());
    out.logprobs.push_back(result.passes.logprobs);
    out.kept.push_back(result.passes.kept);
  }
  const TrainingState state = trainer.state();
  const auto list = [](const Parameters& from) {
    return std::vector<float>(from.flat().begin(), from.flat().end());
  };
  out.policy = list(state.policy);
  out.m = list(state.optimizer.first_moment());
  out.v = list(state.optimizer.second_moment());
  return out;
}

TEST(RanksBackend, AnyNumberOfRanksGivesTheSameBits) {
  const Parameters policy = make_policy();
  const testing::TestFolder folder;
  save_parameters(policy, folder.path());
  for (const LossCase& loss : loss_cases()) {
    if (loss.clean) continue;  // rolled_out has NaN where nothing is trained
    const LossSpec spec = spec_of(loss.preset);
    for (const bool many_steps : {false, true}) {
      TrainerTable table = small_table();
      if (spec.reads(Stream::teacher)) table.teacher = folder.path();
      table.entropy_bonus = many_steps ? 0.01 : 0.0;
      table.epochs = many_steps ? 2 : 1;
      table.minibatches = 2;
      table.optimizer_steps = many_steps ? OptimizerSteps::minibatch : OptimizerSteps::batch;
      Trainer alone(policy, spec, table);
      const Trained expected = train(alone, policy, 2, 7);
      for (const int size : {2, 4}) {
        Group group(size, policy, spec);
        Trainer trainer(policy, spec, table, group.training.backends());
        EXPECT_TRUE(train(trainer, policy, 2, 7) == expected)
            << loss.preset.label() << " with " << size << " ranks, several steps " << many_steps;
      }
    }
  }
}

TEST(RanksBackend, MoreSlotsThanRanksAndEmptyOnesToo) {
  const Parameters policy = make_policy();
  const LossSpec spec = spec_of("icepop");
  TrainerTable table = small_table();
  table.gradient_slots = 16;  // more than there are rollouts
  table.max_tokens = 25;
  Trainer alone(policy, spec, table);
  const Trained expected = train(alone, policy, 3, 40);
  for (const int size : {2, 8, 16}) {
    Group group(size, policy, spec);
    Trainer trainer(policy, spec, table, group.training.backends());
    EXPECT_TRUE(train(trainer, policy, 3, 40) == expected) << size;
  }
}

TEST(RanksBackend, AnAdapterAndItsReferenceToo) {
  auto base = std::make_shared<const Parameters>(make_policy());
  Parameters policy(base, {.rank = 3, .alpha = 6.0, .targets = {"q_proj", "o_proj", "down_proj"}});
  initialise(policy, 4);
  const LossSpec spec = spec_of(testing::with("grpo+tis", {{"ref_kl", 0.1}}));
  Trainer alone(policy, spec, small_table());
  const Trained expected = train(alone, *base, 3, 11);
  for (const int size : {2, 4}) {
    Group group(size, policy, spec);
    Trainer trainer(policy, spec, small_table(), group.training.backends());
    EXPECT_TRUE(train(trainer, *base, 3, 11) == expected) << size;
  }
}

TEST(RanksBackend, AStateIsLoadedByAnyOtherNumberOfRanks) {
  const Parameters policy = make_policy();
  const LossSpec spec = spec_of("icepop");
  const testing::TestFolder folder;
  Trainer alone(policy, spec, small_table());
  train(alone, policy, 2, 3);
  const Trained expected = train(alone, policy, 2, 5);
  for (const int saving : {1, 2, 4}) {
    const std::string saved = folder.path() + "/by_" + std::to_string(saving);
    {
      Group group(saving, policy, spec);
      Trainer trainer(policy, spec, small_table(), group.training.backends());
      train(trainer, policy, 2, 3);
      trainer.save(saved);
    }
    for (const int loading : {1, 2, 4}) {
      Group group(loading, policy, spec);
      Trainer trainer(policy, spec, small_table(), group.training.backends());
      trainer.load(saved);
      EXPECT_EQ(trainer.optimizer_steps(), 2);
      EXPECT_TRUE(train(trainer, policy, 2, 5) == expected) << saving << " to " << loading;
    }
  }
}

TEST(RanksBackend, AFolderThatCannotBeReadChangesNothing) {
  const Parameters policy = make_policy();
  const LossSpec spec = spec_of("icepop");
  Trainer alone(policy, spec, small_table());
  const Trained expected = train(alone, policy, 1, 3);
  Group group(2, policy, spec);
  Trainer trainer(policy, spec, small_table(), group.training.backends());
  EXPECT_THROW(trainer.load("/no/such/folder"), Error);
  EXPECT_TRUE(train(trainer, policy, 1, 3) == expected);
}

TEST(RanksBackend, ANumberThatIsNotFiniteStopsTheStepOnAllRanks) {
  const Parameters policy = make_policy();
  const LossSpec spec = spec_of("reinforce");
  std::vector<Sample> bad = rolled_out(policy, 3, 12);
  for (float& value : bad.back().advantages) value = 3e38f;
  for (float& value : bad[bad.size() - 2].advantages) value = 3e38f;
  Trainer alone(policy, spec, small_table());
  const std::string failure = alone.train_batch(bad).failure;
  EXPECT_NE(failure, "");
  const Trained expected = train(alone, policy, 1, 3);
  for (const int size : {2, 4}) {
    Group group(size, policy, spec);
    Trainer trainer(policy, spec, small_table(), group.training.backends());
    EXPECT_EQ(trainer.train_batch(bad).failure, failure);
    EXPECT_TRUE(train(trainer, policy, 1, 3) == expected) << size;
  }
}

TEST(RanksBackend, OtherRanksKeepTheSnapshotsOfTheLeader) {
  const Parameters policy = make_policy();
  const LossSpec spec = spec_of("icepop");
  Group group(2, policy, spec);
  uint32_t expected = 0;
  {
    Trainer trainer(policy, spec, small_table(), group.training.backends());
    trainer.snapshot(4);  // nobody samples yet
    group.training.keep_snapshots();
    train(trainer, policy, 2, 8);
    trainer.snapshot(4);
    expected = trainer.snapshot(5)->checksum();
  }
  EXPECT_TRUE(group.training.others_keep(5));
  EXPECT_FALSE(group.training.others_keep(4));
  const auto kept = group.snapshots.take(5);  // waits until the other rank has made it
  ASSERT_NE(kept, nullptr);
  EXPECT_EQ(kept->checksum(), expected);
  EXPECT_EQ(group.snapshots.take(4), nullptr);
  group.snapshots.end();
  EXPECT_EQ(group.snapshots.take(6), nullptr);
  for (const auto& [name, value] : group.training.take_metrics()) {
    EXPECT_GE(value, name == "ranks/train_imbalance" ? 1.0 : 0.0) << name;
  }
}

TEST(RanksBackend, ANumberOfRanksThatDoesNotDivideTheSlotsIsRefused) {
  RunConfig run;
  EXPECT_NO_THROW(check_ranks(4, run));
  for (const int size : {3, 8}) {
    try {
      check_ranks(size, run);
      ADD_FAILURE() << size;
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("use 1, 2, 4 ranks"), std::string::npos)
          << error.what();
    }
  }
}

TEST(RanksBackend, RanksOnGpusAreAPowerOfTwo) {
  RunConfig run;
  run.model.device = Device::cuda;
  for (const int size : {2, 4, 8, 64}) EXPECT_NO_THROW(check_ranks(size, run)) << size;
  for (const int size : {3, 6, 128}) {
    testing::expect_refused([&] { check_ranks(size, run); }, {"a power of two, at most 64"});
  }
  EXPECT_NO_THROW(check_ranks(1, run));
  run.trainer.sharding = Sharding::weights;
  EXPECT_NO_THROW(check_ranks(2, run));
  testing::expect_refused([&] { check_ranks(1, run); },
                          {"trainer.sharding", "one process", "--ranks N", "\"optimizer\""});
}

TEST(RanksBackend, ALostRankEndsTheStepWithItsReason) {
  const Parameters policy = make_policy();
  const LossSpec spec = spec_of("icepop");
  Group group(2, policy, spec);
  Trainer trainer(policy, spec, small_table(), group.training.backends());
  group.leader().abort("rank 1: gone");
  std::string failure;
  try {
    failure = trainer.train_batch(rolled_out(policy, 3, 12)).failure;
  } catch (const Lost& lost) {
    failure = lost.what();
  }
  EXPECT_NE(failure.find("rank 1: gone"), std::string::npos) << failure;
}

// Local ranks of one process, of which one has all the work: the batch has one rollout.
TEST(RanksBackend, ARankThatAllWaitForIsNamedOnce) {
  const Parameters policy = make_policy();
  const LossSpec spec = spec_of("icepop");
  Group group(2, policy, spec);
  Trainer trainer(policy, spec, small_table(), group.training.backends());
  std::vector<Sample> samples = rolled_out(policy, 3, 1);
  samples[0].rollout_id = 0;
  std::string said;
  for (int step = 0; step < 40; ++step) {
    ASSERT_EQ(trainer.train_batch(samples).failure, "");
    group.training.take_metrics();
    said += group.training.take_warning();
  }
  const size_t first = said.find("is slow");
  EXPECT_NE(first, std::string::npos);
  EXPECT_EQ(said.find("is slow", first + 1), std::string::npos) << said;
}

// Orders that no leader gives end a rank with an error, not otherwise.
TEST(RanksBackend, MalformedOrdersAreErrors) {
  const Parameters policy = make_policy();
  const LossSpec spec = spec_of("icepop");
  const std::vector<Sample> samples = rolled_out(policy, 3, 6);
  const PackedBatch batch = pack_samples(samples, false);
  ByteWriter writer;
  SlotPass pass{.kind = PassKind::loss, .policy = PolicyKind::current, .loss = {.spec = &spec}};
  put_pass(writer, batch, plan_slots(batch, 2, 100), pass, 0, 1, {});
  const std::string good = writer.take();
  ByteReader whole(good);
  EXPECT_EQ(get_pass(whole).batch.tokens.size(), batch.tokens.size());
  Rng rng(1);
  for (int round = 0; round < 2000; ++round) {
    std::string bad = good;
    for (uint64_t k = 0; k <= rng.below(3); ++k) {
      bad[rng.below(bad.size())] = static_cast<char>(rng.below(256));
    }
    if (round % 2 == 0) bad.resize(rng.below(bad.size()));
    try {
      ByteReader reader(bad);
      get_pass(reader);
    } catch (const Error&) {
    }
  }
  for (const char* message : {"", "\x63", "\x02", "\x02\x01\x01"}) {
    Group group(2, policy, spec);
    group.leader().send(1, Channel::training, message);
    EXPECT_THROW(group.leader().receive(1, Channel::training), Lost);
    group.end();
    EXPECT_NE(group.failure(), "");
  }
}

// A rank's share that fails before its passes.
class FailingShare : public RankShare {
 public:
  explicit FailingShare(RankShare& share) : share_(share) {}
  double take_seconds() override { return share_.take_seconds(); }
  StateShard& shard() override { return share_.shard(); }
  bool needs_weights() const override { return share_.needs_weights(); }
  void bring_weights() override { share_.bring_weights(); }
  void begin_passes(const SlotPass&, int64_t, int64_t) override { throw Error("no memory"); }
  void end_passes() override { share_.end_passes(); }
  void bring_snapshot() override { share_.bring_snapshot(); }

 private:
  RankShare& share_;
};

// Else the other ranks would wait within their passes for ever.
TEST(RanksBackend, WhatFailsAroundAPassEndsTheGroup) {
  const Parameters policy = make_policy();
  const LossSpec spec = spec_of("icepop");
  for (const int failing : {0, 1}) {
    const auto ranks = make_local_ranks(2);
    std::unique_ptr<FailingShare> share;
    const auto make = [&](Ranks& own, TrainingWeights weights, const TrainerTable& table) {
      RankBackend made = cpu_rank_backend()(own, std::move(weights), table);
      if (own.rank() == failing) {
        share = std::make_unique<FailingShare>(*made.share);
        made.share = share.get();
      }
      return made;
    };
    std::string seen_by_other;
    std::thread other([&] {
      try {
        KeptSnapshots snapshots;
        serve_training(*ranks[1], {.like = &policy, .specs = {&spec}, .make = make}, snapshots);
      } catch (const Error& error) {
        seen_by_other = error.what();
      }
    });
    RanksTraining training(*ranks[0], {&spec}, make);
    std::string seen_by_leader;
    try {
      Trainer trainer(policy, spec, small_table(), training.backends());
      seen_by_leader = trainer.train_batch(rolled_out(policy, 0, 9)).failure;
    } catch (const Error& error) {
      seen_by_leader = error.what();
    }
    other.join();
    EXPECT_NE(seen_by_leader.find("no memory"), std::string::npos) << seen_by_leader;
    EXPECT_NE(seen_by_other.find("no memory"), std::string::npos) << seen_by_other;
  }
}

}  // namespace
}  // namespace leeway
