// Continuing with other settings: more steps of the same run, and `leeway train --from RUN`.

#include <gtest/gtest.h>

#include "resume_support.h"

namespace leeway {
namespace {

class FromRunTest : public ResumeFixture {
 protected:
  RunResult from(const std::vector<std::string>& args,
                 const std::vector<std::string>& sets = {}) const {
    std::vector<std::string> all = {"--from", "run", "--json"};
    all.insert(all.end(), args.begin(), args.end());
    return leeway(arguments(all, sets));
  }
  std::string file(const std::string& name) const { return read_file(path(name)); }
};

TEST_F(FromRunTest, MoreStepsGoOnWithTheSameRun) {
  const Outcome wanted = undisturbed({"orchestrator.max_off_policy_steps=0"});
  ASSERT_EQ(train({"orchestrator.max_off_policy_steps=0", "trainer.max_steps=6"}).code, 0);
  const RunResult result = resume({"trainer.max_steps=12", "eval.every=6"});
  ASSERT_EQ(result.code, 0) << result;
  EXPECT_TRUE(contains(result.err, "trainer.max_steps is 12 now, 6 before")) << result.err;
  EXPECT_FALSE(contains(result.err, "learning rate")) << result.err;
  EXPECT_TRUE(contains(result.err, "resumed from step 6")) << result.err;
  // On-policy and with a constant learning rate, the two runs are indistinguishable.
  EXPECT_TRUE(outcome().weights == wanted.weights);
  EXPECT_EQ(outcome().metrics, wanted.metrics);
  EXPECT_TRUE(contains(file("run/config.toml"), "max_steps = 12"));
  EXPECT_EQ(resume().code, 0);
  // Checkpoints from before the change still belong to the run.
  fs::remove_all(path("run/checkpoints/step_12"));
  fs::remove(path("run/end.json"));
  EXPECT_EQ(resume({"trainer.max_steps=14"}).code, 0);
}

TEST_F(FromRunTest, ACourseOfTheRateThatEndsWithTheStepsFollowsTheNewEnd) {
  ASSERT_EQ(train({"trainer.schedule=linear", "trainer.max_steps=4"}).code, 0);
  const RunResult result = resume({"trainer.max_steps=8"});
  ASSERT_EQ(result.code, 0) << result;
  EXPECT_TRUE(
      contains(result.err, "from here on the learning rate follows the schedule to the new"))
      << result.err;
  std::vector<double> rates;
  for (const std::string& line : lines_of(file("run/metrics.jsonl"))) {
    rates.push_back(json_of(line)["learning_rate"].GetDouble());
  }
  ASSERT_EQ(rates.size(), 8u);
  EXPECT_NEAR(rates[3], 0.0, 1e-12);           // the old end
  EXPECT_NEAR(rates[4], 3e-3 * 3 / 8, 1e-12);  // step 5 of 8
  EXPECT_NEAR(rates[7], 0.0, 1e-12);
  expect_mistake(resume({"trainer.max_steps=7"}),
                 {"trainer.max_steps = 7: the run has already done 8 steps"});
}

TEST_F(FromRunTest, ANewRunStartsWithTheWeightsOfAnother) {
  ASSERT_EQ(train().code, 0);
  const auto before = content_of(path("run"));
  const RunResult result = from({}, {"trainer.learning_rate=1e-3", "trainer.max_steps=3"});
  ASSERT_EQ(result.code, 0) << result;
  EXPECT_TRUE(contains(result.err, "starts from step 12 of run: run/weights/step_12"))
      << result.err;
  EXPECT_TRUE(contains(result.err, "note: [sft] of run/config.toml is not repeated")) << result.err;
  EXPECT_TRUE(content_of(path("run")) == before);
  EXPECT_STREQ(json_of(result.out)["run"].GetString(), "run-2");
  EXPECT_EQ(json_of(result.out)["steps"].GetInt(), 3);
  EXPECT_FALSE(fs::exists(path("run-2/sft.jsonl")));
  EXPECT_TRUE(file("run-2/weights/step_0/model.safetensors") ==
              file("run/weights/step_12/model.safetensors"));
  const std::string config = file("run-2/config.toml");
  EXPECT_TRUE(contains(config, "run-2/weights/step_0\"")) << config;
  EXPECT_FALSE(contains(config, "[sft]")) << config;
  EXPECT_FALSE(contains(config, "hidden_size")) << config;
  // It does not depend on any other folder, and can be resumed and used as a start itself.
  fs::remove_all(path("run"));
  fs::remove_all(path("run-2/checkpoints/step_3"));
  const RunResult more = leeway(arguments({"--resume", "run-2"}, {"trainer.max_steps=5"}));
  ASSERT_EQ(more.code, 0) << more;
  EXPECT_EQ(leeway({"train", "--from", "run-2", "--set", "trainer.max_steps=1"}).code, 0);
}

TEST_F(FromRunTest, MomentsAreKeptWhereTheyAreAskedForAndTheRateBeginsAnew) {
  ASSERT_EQ(train({"trainer.warmup_steps=2"}).code, 0);
  const auto first_rate = [&](const std::string& run) {
    return json_of(lines_of(file(run + "/metrics.jsonl"))[0])["learning_rate"].GetDouble();
  };
  ASSERT_EQ(from({}, {"trainer.max_steps=2"}).code, 0);
  const RunResult kept = from({"--keep-optimizer"}, {"trainer.max_steps=2"});
  ASSERT_EQ(kept.code, 0) << kept;
  EXPECT_TRUE(contains(kept.err, "with the optimizer's moments")) << kept.err;
  for (const char* run : {"run-2", "run-3"}) EXPECT_NEAR(first_rate(run), 1.5e-3, 1e-12);
  EXPECT_FALSE(file("run-2/weights/step_2/model.safetensors") ==
               file("run-3/weights/step_2/model.safetensors"));
  const auto steps = [&](const std::string& run) {
    return json_of(file(run + "/checkpoints/step_2/trainer.json"))["optimizer_steps"].GetInt();
  };
  EXPECT_EQ(steps("run-2"), 2);
  EXPECT_EQ(steps("run-3"), 14);
  // After a resume, the learning-rate schedule continues where it was.
  ASSERT_EQ(leeway(arguments({"--resume", "run-3"}, {"trainer.max_steps=3"})).code, 0);
  const auto rows = lines_of(file("run-3/metrics.jsonl"));
  EXPECT_NEAR(json_of(rows[2])["learning_rate"].GetDouble(), 3e-3, 1e-12);
  fs::remove_all(path("run/checkpoints"));
  expect_mistake(from({"--keep-optimizer"}), {"--from run", "leave --keep-optimizer out"});
  expect_mistake(leeway({"train", "run.toml", "--keep-optimizer"}), {"needs --from RUN"});
}

TEST_F(FromRunTest, ASupervisedRunAndAnotherConfiguration) {
  ASSERT_EQ(leeway({"sft", "run.toml"}).code, 0);
  std::string other = kResumeConfig;
  other.replace(other.find("preset = \"grpo\"\nref_kl = 0.05"), 29, "preset = \"icepop\"");
  other.replace(other.find("output_dir = \"run\""), 18, "output_dir = \"next\"");
  write("other.toml", other);
  const RunResult result = from({"other.toml"}, {"trainer.max_steps=2"});
  ASSERT_EQ(result.code, 0) << result;
  EXPECT_TRUE(contains(result.err, "starts from supervised step 4 of run")) << result.err;
  EXPECT_STREQ(json_of(result.out)["run"].GetString(), "next");
  EXPECT_TRUE(contains(file("next/config.toml"), "icepop"));
  // A run killed in its supervised phase has only a checkpoint.
  fs::remove_all(path("run/weights"));
  EXPECT_EQ(from({"other.toml"}, {"trainer.max_steps=1"}).code, 0);
  fs::remove_all(path("run/checkpoints"));
  expect_mistake(from({}), {"--from run: the run has no weights yet"});
  expect_mistake(leeway({"train", "--from", "nowhere"}), {"nowhere/config.toml"});
}

TEST_F(FromRunTest, AFolderOfWeightsKnowsItsTokenizerAndItsRenderer) {
  ASSERT_EQ(train({"trainer.max_steps=1", "orchestrator.renderer.name=qwen3", "model.vocab_size=0",
                   "model.max_position_embeddings=200"})
                .code,
            0);
  const Document card = json_of(file("run/weights/step_1/leeway.json"));
  EXPECT_STREQ(card["tokenizer"].GetString(), "byte");
  EXPECT_GT(card["control_tokens"].Size(), 0u);
  EXPECT_STREQ(card["renderer"]["name"].GetString(), "qwen3");
  std::string config = kResumeConfig;
  const size_t model = config.find("[model]");
  config.replace(model, config.find("[sft]") - model, "[model]\npath = \"run/weights/step_1\"\n");
  write("next.toml", config);
  const RunResult result = leeway(
      arguments({"next.toml"}, {"output_dir=next", "trainer.max_steps=1", "sft.max_steps=1"}));
  ASSERT_EQ(result.code, 0) << result;
  EXPECT_TRUE(contains(file("next/config.toml"), "name = \"qwen3\"")) << file("next/config.toml");
  EXPECT_EQ(file("next/weights/step_1/leeway.json"), file("run/weights/step_1/leeway.json"));
  const RunResult eval = leeway({"eval", "next.toml", "--set", "eval.prompts=2"});
  EXPECT_EQ(eval.code, 0) << eval;
}

}  // namespace
}  // namespace leeway
