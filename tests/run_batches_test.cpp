// Batches of runs written as files: rollouts and whole batches, and the loss commands that read
// them.

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <set>

#include "base/files.h"
#include "base/utf8.h"
#include "cli_helpers.h"
#include "tiny_model.h"

namespace leeway {
namespace {

// Random weights produce any byte, and a letter or a digit about half of the time, so groups have
// mixed rewards from the first step on.
constexpr const char* kConfig =
    "output_dir = \"run\"\n" LEEWAY_TINY_MODEL
    "[trainer]\nmax_steps = 2\nlearning_rate = 3e-3\n"
    "[orchestrator]\nprompts_per_batch = 3\ngroup_size = 4\nmax_off_policy_steps = 0\n"
    "[rollout]\nmax_new_tokens = 5\nstop = \"\\n\"\n"
    "[eval]\nprompts = 2\n"
    "[output]\nrollouts_every = 1\nrollouts_groups = 1\n"
    "[[environment]]\nname = \"jsonl\"\ndata = \"data.jsonl\"\nverifier = \"regex\"\n";

class RunBatches : public ::testing::Test {
 protected:
  RunBatches() {
    std::string lines;
    for (char c = 'a'; c <= 'z'; ++c) {
      lines += std::string("{\"prompt\": \"") + c + "=\", \"answer\": \"[a-z0-9]\"}\n";
    }
    folder_.write("data.jsonl", lines);
    std::string config = kConfig;
    const std::string narrow = "vocab_size = 128";
    folder_.write("run.toml",
                  config.replace(config.find(narrow), narrow.size(), "vocab_size = 256"));
  }
  RunResult leeway(std::vector<std::string> args) const {
    return run_program(args, {.directory = folder_.path().string()});
  }
  RunResult train(const std::vector<std::string>& sets = {}) const {
    std::vector<std::string> args = {"train", "run.toml", "--json"};
    for (const std::string& set : sets) args.insert(args.end(), {"--set", set});
    return leeway(args);
  }
  std::string text_of_file(const std::string& name) const {
    return read_file((folder_.path() / name).string());
  }
  std::vector<Document> rows(const std::string& name) const {
    std::vector<Document> out;
    for (const std::string& line : lines_of(text_of_file(name))) out.push_back(json_of(line));
    return out;
  }
  // `loss eval` on the first step's file of this name.
  Document eval(const std::string& file, std::vector<std::string> args) const {
    args.insert(args.begin(), {"loss", "eval", "--batch", file});
    const RunResult result = leeway(args);
    EXPECT_EQ(result.code, 0) << result;
    return json_of(result.out);
  }

  TempFolder folder_;
};

TEST_F(RunBatches, RolloutsAndPagesAreValidUtf8AndIdsCarryTheTruth) {
  ASSERT_EQ(train({"output.rollouts_groups=0"}).code, 0);
  const std::string replacement = "\xEF\xBF\xBD";
  size_t replaced = 0;
  for (const std::string name : {"run/rollouts/step_1.jsonl", "run/rollouts/step_2.jsonl"}) {
    const std::string text = text_of_file(name);
    EXPECT_EQ(valid_utf8_prefix(text), text.size()) << name;
    for (const Document& rollout : rows(name)) {
      for (const Json& sample : rollout["samples"].GetArray()) {
        for (rapidjson::SizeType t = 0; t < sample["ids"].Size(); ++t) {
          const int id = sample["ids"][t].GetInt();
          const std::string token = sample["tokens"][t].GetString();
          EXPECT_EQ(token,
                    id < 128 ? std::string(id == 0 ? 0 : 1, static_cast<char>(id)) : replacement);
          replaced += token == replacement;
        }
      }
    }
  }
  EXPECT_GT(replaced, 0u);
  const std::string page = text_of_file("run/report.html");
  EXPECT_EQ(valid_utf8_prefix(page), page.size());
  EXPECT_NE(page.find(replacement), std::string::npos);
}

TEST_F(RunBatches, LossCommandsReadRolloutsAndSayHowManyOfTheBatchTheyAre) {
  ASSERT_EQ(train({"trainer.loss.preset=grpo"}).code, 0);
  const std::string file = "run/rollouts/step_2.jsonl";
  const RunResult by_step = leeway({"loss", "compare", "--run", "run", "--step", "2", "--json"});
  ASSERT_EQ(by_step.code, 0) << by_step;
  const RunResult by_name = leeway({"loss", "compare", "--batch", file, "--json"});
  EXPECT_EQ(by_step.out, by_name.out);
  const Document compared = json_of(by_step.out);
  EXPECT_EQ(compared["rollouts"].GetInt(), 4);
  EXPECT_EQ(compared["batch_rollouts"].GetInt(), 12);
  double trained = 0.0;
  for (const Document& rollout : rows(file)) {
    for (const Json& sample : rollout["samples"].GetArray()) {
      for (const Json& mask : sample["loss_mask"].GetArray()) trained += mask.GetDouble();
    }
  }
  EXPECT_EQ(compared["tokens"].GetDouble(), trained);
  // Presets that need a stream which such files lack are refused with the reason; the rest is
  // shown.
  std::set<std::string> shown, refused;
  for (const Json& preset : compared["presets"].GetArray()) {
    const bool is_shown = preset["unavailable"].IsNull();
    (is_shown ? shown : refused).insert(preset["preset"].GetString());
    if (!is_shown) {
      EXPECT_NE(std::string(preset["unavailable"].GetString()).find("output.batches_every"),
                std::string::npos);
    }
  }
  EXPECT_TRUE(shown.contains("icepop") && shown.contains("grpo")) << by_step.out;
  EXPECT_TRUE(refused.contains("m2po") && refused.contains("grpo+tis")) << by_step.out;

  const RunResult table = leeway({"loss", "compare", "--run", "run", "--step", "1"});
  EXPECT_NE(table.out.find("4 of the batch's 12 rollouts"), std::string::npos) << table;
  EXPECT_NE(table.out.find("not shown: m2po: needs the stream prox"), std::string::npos) << table;

  const RunResult evaluated = leeway({"loss", "eval", "--preset", "icepop", "--batch", file});
  EXPECT_EQ(evaluated.code, 0) << evaluated;
  EXPECT_NE(evaluated.err.find("4 of the batch's 12 rollouts"), std::string::npos) << evaluated;
  expect_mistake(leeway({"loss", "eval", "--preset", "ppo", "--batch", file}),
                 {file, "ppo", "prox", "output.batches_every"});
  expect_mistake(leeway({"loss", "compare", "--run", "run", "--step", "7"}),
                 {"run", "step 7", "rollouts of steps: 1, 2", "output.batches_every"});
  expect_mistake(leeway({"loss", "compare", "--run", "run"}), {"--step"});
  expect_mistake(leeway({"loss", "compare", "--run", "nowhere", "--step", "1"}), {"nowhere"});
}

TEST_F(RunBatches, RolloutsSayOfEachTokenWhatTheTrainerDidWithIt) {
  // The masks of m2po depend on all tokens of a minibatch; with prox_forward = "never" and rollouts
  // of older policies prox is neither the policy that is trained nor the one before the batch.
  const std::map<std::string, std::vector<std::string>> runs = {
      {"minibatches",
       {"trainer.loss.preset=m2po", "trainer.loss.m2_threshold=1e-4", "trainer.minibatches=4",
        "trainer.optimizer_steps=minibatch"}},
      {"never",
       {"trainer.loss.preset=grpo", "trainer.loss.eps_low=0.01", "trainer.loss.eps_high=0.01",
        "trainer.prox_forward=never", "orchestrator.max_off_policy_steps=2",
        "orchestrator.schedule=lockstep"}}};
  for (const auto& [folder, settings] : runs) {
    std::vector<std::string> sets = settings;
    sets.insert(sets.end(),
                {"output_dir=" + folder, "output.rollouts_groups=0", "trainer.max_steps=4",
                 "trainer.warmup_steps=0", "trainer.learning_rate=0.02"});
    const RunResult result = train(sets);
    ASSERT_EQ(result.code, 0) << result;
    bool any_dropped = false;
    int step = 0;
    for (const Document& metrics : rows(folder + "/metrics.jsonl")) {
      double kept = 0.0, trained = 0.0;
      for (const Document& rollout :
           rows(folder + "/rollouts/step_" + std::to_string(++step) + ".jsonl")) {
        for (const Json& sample : rollout["samples"].GetArray()) {
          for (rapidjson::SizeType t = 0; t < sample["kept"].Size(); ++t) {
            kept += sample["kept"][t].GetDouble();
            trained += sample["loss_mask"][t].GetDouble();
            EXPECT_LE(sample["kept"][t].GetDouble(), sample["loss_mask"][t].GetDouble());
          }
        }
      }
      EXPECT_NEAR(metrics["kept_share"].GetDouble(), kept / trained, 1e-12) << "step " << step;
      any_dropped = any_dropped || kept < trained;
    }
    EXPECT_EQ(step, 4);
    EXPECT_TRUE(any_dropped);
  }
}

TEST_F(RunBatches, WholeBatchesHoldEveryStreamThatTheLossRead) {
  const std::vector<std::string> settings = {"trainer.loss.preset=grpo+tis",
                                             "trainer.loss.ref_kl=0.1", "trainer.warmup_steps=0",
                                             "output.batches_every=2"};
  ASSERT_EQ(train(settings).code, 0);
  const auto metrics = rows("run/metrics.jsonl");
  for (const int step : {1, 2}) {
    const std::string name = "run/batches/step_" + std::to_string(step) + ".json";
    const Document batch = json_of(text_of_file(name));
    std::set<int> rollouts;
    bool moved = false;
    for (const Json& sequence : batch["sequences"].GetArray()) {
      rollouts.insert(sequence["rollout_id"].GetInt());
      for (const char* stream : {"pi", "rollout", "prox", "ref"}) {
        EXPECT_EQ(sequence[stream].Size(), sequence["mask"].Size());
      }
      EXPECT_FALSE(sequence.HasMember("teacher"));
      EXPECT_EQ(sequence["prompt_len"].GetInt(), 2);
      EXPECT_TRUE(sequence["prox"] == sequence["pi"]);  // one optimizer step follows each batch
      moved = moved || sequence["ref"] != sequence["pi"];
    }
    EXPECT_EQ(rollouts.size(), 12u);
    EXPECT_EQ(moved, step == 2);  // the reference is the policy at step 0
    // What the trainer computed, recomputed by the reference implementation.
    const Json& row = metrics[static_cast<size_t>(step - 1)];
    const Document again = eval(name, {"--preset", "grpo+tis", "--set", "ref_kl=0.1"});
    EXPECT_NEAR(again["loss"].GetDouble(), row["loss"].GetDouble(), 1e-4) << step;
    EXPECT_EQ(again["metrics"]["tokens"].GetDouble(), row["tokens"].GetDouble());
    const RunResult compared =
        leeway({"loss", "compare", "--run", "run", "--step", std::to_string(step), "--json"});
    ASSERT_EQ(compared.code, 0) << compared;
    EXPECT_STREQ(json_of(compared.out)["batch"].GetString(), name.c_str());
    EXPECT_EQ(compared.out.find("needs the stream prox"), std::string::npos);
  }
}

TEST_F(RunBatches, WholeBatchesHoldTheProximalPolicyThatSeveralUpdatesLookAt) {
  ASSERT_EQ(train({"trainer.loss.preset=ppo", "trainer.epochs=2", "trainer.warmup_steps=0",
                   "trainer.max_steps=1", "output.batches_every=1"})
                .code,
            0);
  const Document batch = json_of(text_of_file("run/batches/step_1.json"));
  for (const Json& sequence : batch["sequences"].GetArray()) {
    EXPECT_TRUE(sequence["prox"] == sequence["pi"]);  // from the first epoch, before any step
    EXPECT_FALSE(sequence.HasMember("ref"));
  }
}

TEST_F(RunBatches, DamagedRolloutsAreNamedByFileAndLine) {
  ASSERT_EQ(train().code, 0);
  const std::string good = lines_of(text_of_file("run/rollouts/step_1.jsonl")).front();
  const auto with = [&](const std::string& from, const std::string& to) {
    std::string line = good;
    const size_t at = line.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    return line.replace(at, from.size(), to);
  };
  const std::vector<std::pair<std::string, std::string>> damaged = {
      {"[]", "is not an object"},
      {"{\"advantage\": 1}", "samples"},
      {with("\"advantage\": ", "\"advantage\": \"x\", \"a\": "), "advantage"},
      {with("\"pi\": [", "\"pi\": [0, "), "pi"},
      {with("\"loss_mask\": [0", "\"loss_mask\": [2"), "loss_mask"},
      {with("\"versions\": [-1", "\"versions\": [0.5"), "versions"},
      {good.substr(0, good.size() / 2), "column"},
  };
  for (const auto& [line, word] : damaged) {
    folder_.write("bad.jsonl", good + "\n" + line + "\n");
    expect_mistake(leeway({"loss", "compare", "--batch", "bad.jsonl"}), {"bad.jsonl line 2", word});
  }
  folder_.write("bad.jsonl", "\n");
  expect_mistake(leeway({"loss", "compare", "--batch", "bad.jsonl"}), {"bad.jsonl", "no trained"});
}

TEST_F(RunBatches, PresetsThatLookPastTheMaskTrainOnNoPrompt) {
  for (const std::string preset : {"cookbook_PR169/grpo", "cookbook_PR169/gspo", "tinker/dro"}) {
    ASSERT_EQ(train({"output_dir=" + preset, "trainer.max_steps=1", "trainer.loss.preset=" + preset,
                     "trainer.loss.tis_level=sequence"})
                  .code,
              0);
    const auto metrics = rows(preset + "/metrics.jsonl");
    ASSERT_EQ(metrics.size(), 1u);
    EXPECT_EQ(metrics[0]["tokens"].GetDouble(), metrics[0]["batch/trained_tokens"].GetDouble());
    EXPECT_EQ(metrics[0]["mismatch_kl/all/mean"].GetDouble(), 0.0) << preset;
    if (metrics[0].HasMember("weight_mean")) {
      EXPECT_EQ(metrics[0]["weight_mean"].GetDouble(), 1.0) << preset;
    }
  }
}

}  // namespace
}  // namespace leeway
