// Which parts of a loss a setup leaves without effect.

#include <gtest/gtest.h>

#include "trainer/test_support.h"

namespace leeway {
namespace {

using testing::spec_of;
using testing::with;

constexpr const char* kOneStep = "one optimizer step";
constexpr const char* kNever = "uses rollout as prox";
constexpr const char* kOnPolicy = "weights that train on them";

TEST(InertParts, AreNamedWithTheReason) {
  struct Case {
    testing::NamedPreset preset;
    int64_t steps;
    ProxForward prox_forward;
    bool on_policy;
    std::vector<std::vector<std::string>> notes;  // words of each
  };
  const std::vector<Case> cases = {
      {with("reinforce"), 1, ProxForward::automatic, true, {}},
      {with("icepop"), 1, ProxForward::automatic, false, {}},
      {with("icepop"), 2, ProxForward::automatic, true, {}},
      {with("icepop"),
       1,
       ProxForward::automatic,
       true,
       {{"pi/rollout", "mask drops no token", kOnPolicy}}},
      {with("ppo"), 1, ProxForward::automatic, false, {{"pi/prox", "clip cannot act", kOneStep}}},
      {with("ppo"), 1, ProxForward::always, false, {{"pi/prox", "clip cannot act", kOneStep}}},
      {with("ppo"), 1, ProxForward::never, false, {}},
      {with("ppo"), 1, ProxForward::never, true, {{"pi/prox", "clip cannot act", kOneStep}}},
      {with("ppo"), 2, ProxForward::automatic, true, {}},
      {with("ppo", {{"anchor", std::string("rollout")}}), 1, ProxForward::automatic, false, {}},
      {with("ppo", {{"anchor", std::string("rollout")}}),
       1,
       ProxForward::automatic,
       true,
       {{"pi/rollout", "clip cannot act", kOnPolicy}}},
      {with("grpo+tis"),
       1,
       ProxForward::automatic,
       false,
       {{"pi/prox", "clip cannot act", kOneStep}}},
      {with("grpo+tis"), 2, ProxForward::automatic, false, {}},
      {with("grpo+tis"), 2, ProxForward::never, false, {{"prox/rollout", "weight tis", kNever}}},
      {with("grpo+tis"),
       2,
       ProxForward::automatic,
       true,
       {{"prox/rollout", "weight tis", kOnPolicy}}},
      {with("grpo+tis"),
       1,
       ProxForward::automatic,
       true,
       {{"pi/prox", "clip cannot act", kOneStep}, {"prox/rollout", "weight tis", kOnPolicy}}},
      {with("cispo"),
       1,
       ProxForward::automatic,
       true,
       {{"pi/rollout", "clip cannot act", kOnPolicy}}},
      {with("sapo"), 1, ProxForward::automatic, false, {{"pi/prox", "soft gate", kOneStep}}},
      {with("dppo_kl"),
       1,
       ProxForward::automatic,
       true,
       {{"pi/rollout", "mask drops no token"}, {"pi/rollout", "penalty", "gradient"}}},
      {with("m2po"), 2, ProxForward::automatic, false, {}},
      {with("m2po"), 2, ProxForward::never, false, {{"prox/rollout", "M2PO", kNever}}},
      {with("m2po"), 2, ProxForward::automatic, true, {{"prox/rollout", "M2PO", kOnPolicy}}},
      {with("verl/geo_mean"),
       1,
       ProxForward::automatic,
       false,
       {{"pi/prox", "clip cannot act", kOneStep}}},
  };
  for (const Case& c : cases) {
    TrainerTable table;
    table.epochs = c.steps;
    table.prox_forward = c.prox_forward;
    const std::string where =
        fmt::format("{}, {} steps, prox {}, {}", c.preset.label(), c.steps, name_of(c.prox_forward),
                    c.on_policy ? "on-policy" : "off-policy");
    const std::vector<std::string> notes = inert_parts(spec_of(c.preset), table, c.on_policy);
    ASSERT_EQ(notes.size(), c.notes.size())
        << where << ": " << fmt::format("{}", fmt::join(notes, "; "));
    for (size_t i = 0; i < notes.size(); ++i) {
      for (const std::string& word : c.notes[i]) {
        EXPECT_NE(notes[i].find(word), std::string::npos)
            << where << ": no \"" << word << "\" in " << notes[i];
      }
    }
  }
}

// What is reported as inert really is: without it the step has the same bits.
TEST(InertParts, ChangeNothing) {
  const Parameters policy = testing::make_policy();
  std::vector<Sample> samples = testing::make_samples(2, 10);
  Trainer scorer(policy, spec_of("reinforce"), testing::small_table());
  const TokenValues rollout = scorer.forward(samples);
  for (size_t i = 0; i < samples.size(); ++i) samples[i].rollout = rollout[i];
  const auto train = [&](const testing::NamedPreset& preset) {
    Trainer trainer(policy, spec_of(preset), testing::small_table());
    EXPECT_EQ(trainer.train_batch(samples).failure, "");
    return trainer.parameters();
  };
  const Parameters plain = train(with("is"));
  EXPECT_TRUE(testing::same_bits(train(with("icepop")), plain));
  EXPECT_TRUE(testing::same_bits(train(with("dppo_kl", {{"kl_tau", 0.5}})), plain));
  EXPECT_TRUE(testing::same_bits(train(with("grpo+tis")), train(with("ppo"))));
  EXPECT_TRUE(testing::same_bits(train(with("ppo", {{"eps_low", 0.01}})), train(with("ppo"))));
}

}  // namespace
}  // namespace leeway
