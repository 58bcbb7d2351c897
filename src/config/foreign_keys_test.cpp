#include "config/foreign_keys.h"

#include <gtest/gtest.h>

#include <set>

#include "config/test_support.h"

namespace leeway {
namespace {

TEST(ForeignKeys, NameKeysOfOursThatExist) {
  const std::vector<std::string> keys = configuration_keys(catalog);
  const std::set<std::string> known(keys.begin(), keys.end());
  EXPECT_EQ(known.size(), keys.size()) << "each key once";
  for (const ForeignKey& key : foreign_keys()) {
    SCOPED_TRACE(std::string(key.code_base) + " " + key.key);
    for (const char* ours : key.ours) EXPECT_TRUE(known.contains(ours)) << ours;
    EXPECT_FALSE(key.ours.empty() && std::string(key.note).empty())
        << "what has no counterpart says why";
  }
}

TEST(ForeignKeys, AreListedOncePerCodeBaseWhoseKeysStandTogether) {
  std::set<std::string> seen;
  std::vector<std::string> order;
  for (const ForeignKey& key : foreign_keys()) {
    EXPECT_TRUE(seen.insert(std::string(key.code_base) + " " + key.key).second) << key.key;
    if (order.empty() || order.back() != key.code_base) order.emplace_back(key.code_base);
  }
  EXPECT_EQ(order, (std::vector<std::string>{"prime-rl", "slime", "cookbook", "tinker-cookbook",
                                             "verl", "TRL", "AReaL"}));
}

TEST(ForeignKeys, AreNamedWithTheirCodeBaseWhereTheyAreMet) {
  struct Case {
    std::string text;
    std::vector<std::string> words;
  };
  for (const Case& c : std::vector<Case>{
           {"[trainer]\nppo_n_minibatches = 4\n",
            {"line 2", "cookbook", "AReaL", "trainer.minibatches", "trainer.optimizer_steps"}},
           {"max_async_level = 2\n", {"prime-rl", "orchestrator.max_off_policy_steps"}},
           {"[[orchestrator.env]]\nid = \"x\"\n", {"line 1", "prime-rl", "[[environment]]"}},
           {"[[env]]\nid = \"x\"\n", {"line 1", "prime-rl", "[[environment]]"}},
           {"[orchestrator]\nrollouts_per_example = 8\n",
            {"line 2", "orchestrator.group_size",
             "(in prime-rl up to version 0.5; how many rollouts a prompt gets)"}},
           {"[trainer.loss]\ntype = \"icepop\"\n", {"prime-rl", "trainer.loss.preset"}},
           {"[trainer.loss]\npreset = \"ppo\"\neps_clip_high = 0.3\n",
            {"slime", "cookbook", "trainer.loss.eps_high"}},
           {"[trainer.loss]\ntoken_mask_high = 8.0\n",
            {"prime-rl", "trainer.loss.icepop_ratio_high"}},
           {"[actor_rollout_ref.actor]\nclip_ratio = 0.2\nuse_kl_loss = true\n",
            {"line 2: actor_rollout_ref.actor.clip_ratio = 0.2", "verl", "trainer.loss.eps_low",
             "line 3: actor_rollout_ref.actor.use_kl_loss", "trainer.loss.ref_kl"}},
           {"[trainer]\nuse_kl_loss = true\n", {"slime and verl", "trainer.loss.ref_kl"}},
           {"[orchestrator]\nnum_generations = 8\n", {"TRL", "orchestrator.group_size"}},
           {"per_device_train_batch_size = 8\n", {"TRL", "orchestrator.prompts_per_batch"}},
           {"[orchestrator]\nbatch_size = 256\n",
            {"prime-rl", "orchestrator.prompts_per_batch and orchestrator.group_size"}},
           {"[trainer.optim]\nlr = 1e-6\n", {"line 2", "prime-rl", "trainer.learning_rate"}},
           {"[trainer]\nlr = 1e-6\n", {"line 2", "slime", "trainer.learning_rate"}},
           {"[model]\nname = \"Qwen/Qwen3-0.6B\"\n", {"line 2", "prime-rl", "model.path"}},
           {"[orchestrator.eval]\ninterval = 10\n", {"line 2", "prime-rl", "eval.every"}},
           {"[orchestrator.client]\nbase_url = [\"http://a:8000/v1\"]\ntimeout = 1200\n",
            {"line 2", "prime-rl", "inference.base_url and inference.pool", "line 3",
             "inference.request_timeout"}},
           {"[client.elastic]\nhostname = \"pool\"\nsync_interval = 5.0\n",
            {"line 2", "prime-rl", "inference.hostname", "line 3", "inference.sync_interval"}},
           {"[eval]\ngroup_size = 4\n", {"line 2", "prime-rl", "eval.samples"}},
           {"[monitors.wandb]\nproject = \"x\"\n", {"prime-rl", "metrics.jsonl"}},
           {"max_completion_tokens = 64\n", {"prime-rl and cookbook", "rollout.max_new_tokens"}},
           {"[tis]\ncap = 5.0\n", {"line 2", "cookbook", "trainer.loss.tis_cap"}},
           {"tensor_model_parallel_size = 2\n", {"slime and verl", "one device"}},
           {"[actor.rejection_sampling]\nupper = 5.0\n",
            {"line 2", "AReaL", "trainer.loss.tis_ratio_high and trainer.loss.tis_cap"}},
           {"[data]\ntrain_files = \"x\"\n", {"verl", "environment.data"}},
           {"[critic.optim]\nlr = 1e-5\n", {"critic", "there is no critic"}},
           {"[trainer]\nn_gpus_per_node = 8\n", {"verl", "without a counterpart", "one device"}},
           {"[rollout]\nmax_head_offpolicyness = 4\n",
            {"AReaL", "orchestrator.max_off_policy_steps"}}}) {
    SCOPED_TRACE(c.text);
    expect_words(error_of(c.text), c.words);
  }
}

TEST(ForeignKeys, AreNamedForSetToo) {
  expect_words(error_of("", {"actor_rollout_ref.actor.clip_ratio_c=3",
                             "trainer.loss.importance_sampling_level=sequence"}),
               {"--set actor_rollout_ref.actor.clip_ratio_c", "verl", "trainer.loss.dual_clip",
                "TRL and AReaL", "gspo"});
}

// Our own keys in the wrong table, and misspelt ones, are told as before.
TEST(ForeignKeys, LeaveOurOwnKeysAlone) {
  EXPECT_EQ(foreign_hint("trainer.max_step"), "");
  EXPECT_EQ(foreign_hint("type"), "");
  expect_words(error_of("[trainer]\ntemperature = 1.0\n"), {"did you mean rollout.temperature?"});
  expect_words(error_of("[loss]\npreset = \"ppo\"\n"), {"did you mean trainer.loss?"});
}

TEST(ForeignKeys, AreOnThePageWithinMarkers) {
  const std::string page = migration_markdown();
  EXPECT_TRUE(page.starts_with("<!-- keys:")) << page.substr(0, 80);
  EXPECT_TRUE(page.ends_with("<!-- end of keys -->\n"));
  for (const ForeignKey& key : foreign_keys()) {
    EXPECT_NE(page.find(std::string("| `") + key.key + "` | "), std::string::npos) << key.key;
  }
}

}  // namespace
}  // namespace leeway
