// `leeway train`, `sft` and `eval` as users run them, on models small enough for a test.

#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "base/files.h"
#include "cli_helpers.h"
#include "tiny_model.h"

namespace leeway {
namespace {

namespace fs = std::filesystem;

constexpr const char* kModel = LEEWAY_TINY_MODEL;

constexpr const char* kLoop = R"(
[sft]
max_steps = 4
batch_size = 8
[trainer]
max_steps = 5
learning_rate = 3e-3
warmup_steps = 0
[orchestrator]
prompts_per_batch = 4
group_size = 4
[rollout]
max_new_tokens = 6
stop = "\n"
[eval]
prompts = 8
samples = 2
[output]
rollouts_every = 2
)";

constexpr const char* kSort = "[[environment]]\nname = \"sort\"\nmin_length = 2\nmax_length = 3\n";

// A task that random weights sometimes solve: a reply that contains a lowercase letter or a digit.
constexpr const char* kLetters =
    "[[environment]]\nname = \"jsonl\"\nid = \"letters\"\ndata = \"letters.jsonl\"\n"
    "verifier = \"regex\"\n";
std::string letters_file() {
  std::string lines;
  for (char c = 'a'; c <= 'z'; ++c) {
    lines += std::string("{\"prompt\": \"") + c +
             "=\", \"answer\": \"[a-z0-9]\", \"completion\": \"x\\n\"}\n";
  }
  return lines;
}

// A working folder that contains `run.toml`.
class LoopTest : public ::testing::Test {
 protected:
  std::string path(const std::string& name) const { return (folder_.path() / name).string(); }
  void write(const std::string& name, const std::string& text) const { folder_.write(name, text); }
  void write_config(const std::string& tables = kLetters) const {
    write("letters.jsonl", letters_file());
    write("run.toml", "output_dir = \"run\"\n" + std::string(kModel) + kLoop + tables);
  }
  RunResult leeway(std::vector<std::string> args) const {
    return run_program(args, {.directory = folder_.path().string()});
  }
  // `train run.toml --json` with settings.
  RunResult train(const std::vector<std::string>& sets = {}) const {
    std::vector<std::string> args = {"train", "run.toml", "--json"};
    for (const std::string& set : sets) args.insert(args.end(), {"--set", set});
    return leeway(args);
  }
  std::vector<Document> jsonl(const std::string& name) const {
    std::vector<Document> rows;
    for (const std::string& line : lines_of(read_file(path(name)))) rows.push_back(json_of(line));
    return rows;
  }

  TempFolder folder_;
};

double number(const Json& object, const char* key) {
  EXPECT_TRUE(object.HasMember(key)) << key;
  return object.HasMember(key) && object[key].IsNumber() ? object[key].GetDouble() : std::nan("");
}

TEST_F(LoopTest, ARunLeavesAFolderThatCanBeRead) {
  write_config();
  const RunResult result = train();
  ASSERT_EQ(result.code, 0) << result;
  const Document summary = json_of(result.out);
  EXPECT_STREQ(summary["end"].GetString(), "finished");
  EXPECT_EQ(number(summary, "steps"), 5);
  EXPECT_EQ(number(summary, "rollouts"), 5 * 16);

  const auto metrics = jsonl("run/metrics.jsonl");
  ASSERT_EQ(metrics.size(), 5u);
  for (size_t i = 0; i < metrics.size(); ++i) {
    EXPECT_EQ(number(metrics[i], "step"), static_cast<double>(i + 1));
    EXPECT_EQ(number(metrics[i], "batch/rollouts"), 16);
    EXPECT_LE(number(metrics[i], "off_policy_level/all/max"), 1);
    EXPECT_GT(number(metrics[i], "grad_norm"), 0);
  }
  EXPECT_EQ(jsonl("run/sft.jsonl").size(), 4u);
  const auto evals = jsonl("run/eval.jsonl");
  ASSERT_EQ(evals.size(), 2u);
  EXPECT_EQ(number(evals[1], "step"), 5);
  EXPECT_GE(number(evals[1], "eval/all/prompts"), 1);
  EXPECT_TRUE(fs::exists(path("run/weights/step_5/model.safetensors")));
  EXPECT_TRUE(contains(read_file(path("run/report.html")), "</html>"));
  EXPECT_TRUE(contains(read_file(path("run/objective.txt")), "pi/rollout"));
  EXPECT_TRUE(contains(read_file(path("run/log.txt")), "step 5/5"));

  for (const Document& rollout : jsonl("run/rollouts/step_4.jsonl")) {
    for (const Json& sample : rollout["samples"].GetArray()) {
      const size_t size = sample["ids"].Size();
      for (const char* list : {"tokens", "loss_mask", "rollout", "pi", "kept", "versions"}) {
        EXPECT_EQ(sample[list].Size(), size) << list;
      }
    }
  }
  // The effective configuration is itself a configuration for the same run.
  const RunResult again = leeway({"config", "run/config.toml"});
  EXPECT_EQ(again.code, 0) << again;
}

TEST_F(LoopTest, EveryMetricIsDocumented) {
  write_config();
  ASSERT_EQ(train({"trainer.loss.preset=grpo+tis", "trainer.loss.ref_kl=0.01"}).code, 0);
  const std::string runs = read_file(LEEWAY_SOURCE_DIR "/docs/runs.md"),
                    losses = read_file(LEEWAY_SOURCE_DIR "/docs/losses.md");
  // `a/{b,c}/d` in docs/runs.md means a/b/d and a/c/d; {env}, {part} and {reason} mean anything.
  std::vector<std::string> patterns;
  for (size_t at = runs.find('`'); at != std::string::npos; at = runs.find('`', at + 1)) {
    const size_t end = runs.find('`', at + 1);
    patterns.push_back(runs.substr(at + 1, end - at - 1));
    at = end;
  }
  const auto matches = [&](const std::string& name) {
    for (std::string pattern : patterns) {
      std::vector<std::string> open = {pattern}, done;
      while (!open.empty()) {
        const std::string one = open.back();
        open.pop_back();
        const size_t brace = one.find('{'), close = one.find('}');
        if (brace == std::string::npos || close == std::string::npos) {
          done.push_back(one);
          continue;
        }
        std::string inside = one.substr(brace + 1, close - brace - 1) + ",";
        for (size_t comma; (comma = inside.find(',')) != std::string::npos;
             inside.erase(0, comma + 1)) {
          std::string word = inside.substr(0, comma);
          if (word == "env") word = "letters";
          if (word == "part") word = "regex";
          open.push_back(one.substr(0, brace) + word + one.substr(close + 1));
        }
      }
      if (std::find(done.begin(), done.end(), name) != done.end()) return true;
    }
    return contains(losses, "`" + name + "`") || contains(losses, "| " + name + " |");
  };
  const auto metrics = jsonl("run/metrics.jsonl");
  for (const auto& member : metrics.front().GetObject()) {
    EXPECT_TRUE(matches(member.name.GetString())) << member.name.GetString();
  }
}

TEST_F(LoopTest, OnPolicyExactRunsHaveNoMismatchAtAll) {
  write_config();
  const std::vector<std::vector<std::string>> variants = {
      {},
      {"rollout.temperature=0.7"},
      {"trainer.max_tokens=64"},
      {"trainer.recompute_activations=true", "rollout.max_sequences=5"},
      {"trainer.loss.preset=grpo+tis", "trainer.loss.ref_kl=0.1"},
      {"orchestrator.schedule=free", "trainer.threads=1", "rollout.threads=2"},
  };
  for (std::vector<std::string> sets : variants) {
    fs::remove_all(path("run"));
    sets.push_back("orchestrator.max_off_policy_steps=0");
    const RunResult result = train(sets);
    ASSERT_EQ(result.code, 0) << result;
    const auto metrics = jsonl("run/metrics.jsonl");
    ASSERT_EQ(metrics.size(), 5u);
    for (const Document& row : metrics) {
      EXPECT_EQ(number(row, "mismatch_kl/all/mean"), 0.0) << ::testing::PrintToString(sets);
      EXPECT_EQ(number(row, "mismatch_kl/all/max"), 0.0);
      EXPECT_EQ(number(row, "off_policy_level/all/max"), 0.0);
      EXPECT_EQ(number(row, "ratio_max"), 1.0);
    }
  }
}

TEST_F(LoopTest, QuantisedRolloutsAreSeenAsMismatch) {
  write_config();
  for (const char* precision : {"bf16", "int8"}) {
    fs::remove_all(path("run"));
    ASSERT_EQ(train({"orchestrator.max_off_policy_steps=0",
                     std::string("rollout.precision=") + precision})
                  .code,
              0);
    for (const Document& row : jsonl("run/metrics.jsonl")) {
      EXPECT_GT(number(row, "mismatch_kl/all/mean"), 0.0);
      EXPECT_LT(number(row, "mismatch_kl/all/mean"), 0.1);
    }
  }
}

// All numbers except times and rates.
std::map<std::string, std::string> results_of(const Document& row) {
  std::map<std::string, std::string> values;
  for (const auto& member : row.GetObject()) {
    const std::string name = member.name.GetString();
    if (name.starts_with("time/") || name.starts_with("perf/")) continue;
    // How far sampling is ahead depends on timing.
    if (name.starts_with("progress/") || name.starts_with("account/")) continue;
    values[name] = text_of(member.value);
  }
  return values;
}

TEST_F(LoopTest, LockstepRunsRepeatBitForBitWhateverTheThreads) {
  write_config();
  std::vector<std::map<std::string, std::string>> first;
  std::string weights;
  for (const char* threads : {"1", "2", "3"}) {
    fs::remove_all(path("run"));
    const std::string setting(threads);
    ASSERT_EQ(train({"orchestrator.max_off_policy_steps=2", "trainer.threads=" + setting,
                     "rollout.threads=" + setting})
                  .code,
              0);
    std::vector<std::map<std::string, std::string>> rows;
    for (const Document& row : jsonl("run/metrics.jsonl")) rows.push_back(results_of(row));
    const std::string saved = read_file(path("run/weights/step_5/model.safetensors"));
    if (first.empty()) {
      first = rows;
      weights = saved;
    }
    EXPECT_EQ(rows, first);
    EXPECT_TRUE(saved == weights);
  }
}

TEST_F(LoopTest, LagIsExactInLockstepAndBoundedInFree) {
  write_config();
  ASSERT_EQ(train({"orchestrator.max_off_policy_steps=3"}).code, 0);
  const auto lockstep = jsonl("run/metrics.jsonl");
  for (size_t i = 0; i < lockstep.size(); ++i) {
    const double lag = std::min<double>(3, static_cast<double>(i));
    EXPECT_EQ(number(lockstep[i], "off_policy_level/all/mean"), lag);
  }
  fs::remove_all(path("run"));
  ASSERT_EQ(train({"orchestrator.max_off_policy_steps=2", "orchestrator.schedule=free"}).code, 0);
  for (const Document& row : jsonl("run/metrics.jsonl")) {
    EXPECT_LE(number(row, "off_policy_level/all/max"), 2);
  }
}

TEST_F(LoopTest, ReuseTakesSeveralStepsPerBatchAndSaysWhatIsInert) {
  write_config();
  RunResult result = train({"trainer.epochs=3", "trainer.minibatches=2",
                            "trainer.optimizer_steps=minibatch", "trainer.loss.preset=ppo"});
  ASSERT_EQ(result.code, 0) << result;
  EXPECT_EQ(number(jsonl("run/metrics.jsonl")[0], "batch/optimizer_steps"), 6);
  EXPECT_FALSE(contains(result.err, "cannot act")) << result.err;

  result = train({"trainer.loss.preset=ppo"});
  EXPECT_TRUE(contains(result.err, "pi/prox is always 1")) << result.err;
  EXPECT_TRUE(contains(result.err, "the clip cannot act")) << result.err;
  // A folder that contains a run is not overwritten.
  EXPECT_TRUE(fs::exists(path("run-2/metrics.jsonl")));
  EXPECT_STREQ(json_of(result.out)["run"].GetString(), "run-2");
}

TEST_F(LoopTest, EnvironmentsAreMixedByWeight) {
  write_config(std::string(kSort) + "weight = 3\n" + kLetters +
               "[[environment]]\nname = \"arithmetic\"\nmax_operand = 5\nweight = 2\n");
  const RunResult result = train({"orchestrator.prompts_per_batch=60", "trainer.max_steps=1"});
  ASSERT_EQ(result.code, 0) << result;
  std::map<std::string, int> rollouts;
  ASSERT_EQ(train({"orchestrator.prompts_per_batch=60", "trainer.max_steps=1",
                   "output.rollouts_groups=0"})
                .code,
            0);
  for (const Document& rollout : jsonl("run-2/rollouts/step_1.jsonl")) {
    ++rollouts[rollout["environment"].GetString()];
  }
  EXPECT_EQ(rollouts.size(), 3u);
  EXPECT_GT(rollouts["sort"], rollouts["letters"]);
  const auto metrics = jsonl("run/metrics.jsonl");
  for (const char* name :
       {"reward/sort/exact", "reward/arithmetic/exact", "reward/letters/regex"}) {
    EXPECT_TRUE(metrics[0].HasMember(name)) << name;
  }
}

TEST_F(LoopTest, AWarmStartNeedsDemonstrations) {
  write("data.jsonl", "{\"prompt\": \"1+1=\", \"answer\": 2}\n");
  write_config("[[environment]]\nname = \"jsonl\"\nid = \"sums\"\ndata = \"data.jsonl\"\n");
  expect_mistake(train(), {"[sft]", "sums", "sft.data"});
}

TEST_F(LoopTest, ToolTurnsOfARolloutAreOneSampleUnlessThePrefixBreaks) {
  std::string config = "output_dir = \"run\"\n" + std::string(kModel) + kLoop +
                       "[[environment]]\nname = \"calculator\"\nmax_operand = 3\n"
                       "[orchestrator.renderer]\nname = \"qwen3\"\n";
  for (const auto& [from, to] : std::map<std::string, std::string>{
           {"vocab_size = 128\n", ""},
           {"max_position_embeddings = 48", "max_position_embeddings = 1024"},
           {"stop = \"\\n\"\n", ""},
           {"max_new_tokens = 6", "max_new_tokens = 64"}}) {
    config.replace(config.find(from), from.size(), to);
  }
  write("run.toml", config);
  const RunResult result = train({"trainer.max_steps=2", "sft.max_steps=30", "sft.batch_size=4",
                                  "sft.learning_rate=5e-3", "orchestrator.prompts_per_batch=2"});
  ASSERT_EQ(result.code, 0) << result;
  for (const Document& row : jsonl("run/metrics.jsonl")) {
    // One sample each, plus one for every rendered turn that could not extend what was sampled.
    EXPECT_EQ(number(row, "samples_per_rollout"),
              1.0 + number(row, "prefix_breaks/all") / number(row, "batch/rollouts"));
    EXPECT_EQ(number(row, "errored_rollouts/all"), 0.0);
  }
}

TEST_F(LoopTest, ANumberThatIsNotFiniteEndsTheRunWithTheLastGoodWeights) {
  write_config();
  // The second batch was sampled before the step that ruins the weights.
  const RunResult result = train({"trainer.learning_rate=1e30", "trainer.max_grad_norm=0",
                                  "orchestrator.max_off_policy_steps=1"});
  EXPECT_EQ(result.code, 3) << result;
  EXPECT_TRUE(contains(result.err, "gave up")) << result.err;
  const Document summary = json_of(result.out);
  EXPECT_STREQ(summary["end"].GetString(), "gave_up");
  const std::string reason = summary["reason"].GetString();
  EXPECT_TRUE(contains(reason, "step ") && contains(reason, "the batch of 4 groups from"))
      << reason;
  const std::string weights = path(summary["weights"].GetString());
  EXPECT_TRUE(fs::exists(weights + "/model.safetensors"));
  EXPECT_EQ(lines_of(read_file(path("run/metrics.jsonl"))).size(),
            static_cast<size_t>(number(summary, "steps")));
}

TEST_F(LoopTest, CtrlCFinishesTheStepAndSaves) {
  write_config();
  for (const char* signal : {"INT", "TERM"}) {
    fs::remove_all(path("run"));
    const RunResult result =
        run_program({"--preserve-status", "-s", signal, "1.5", leeway_program(), "train",
                     "run.toml", "--json", "--set", "trainer.max_steps=100000"},
                    {.directory = folder_.path().string(), .program = "timeout"});
    ASSERT_EQ(result.code, 0) << result;
    EXPECT_TRUE(contains(result.err, "finishing this step")) << result.err;
    const Document summary = json_of(result.out);
    EXPECT_STREQ(summary["end"].GetString(), "stopped");
    const auto metrics = jsonl("run/metrics.jsonl");
    EXPECT_EQ(static_cast<double>(metrics.size()), number(summary, "steps"));
    EXPECT_TRUE(fs::exists(path(std::string(summary["weights"].GetString()) + "/config.json")));
  }
}

TEST_F(LoopTest, MistakesAreNamedBeforeAnythingIsWritten) {
  write_config();
  expect_mistake(leeway({"train", "absent.toml"}), {"absent.toml"});
  expect_mistake(train({"trainer.max_step=3"}), {"max_step", "did you mean", "max_steps"});
  expect_mistake(train({"rollout.top_p=0.9"}), {"top_p", "refused"});
  expect_mistake(train({"rollout.temperature=0"}), {"temperature", "above 0"});
  expect_mistake(train({"model.path=nowhere", "model.vocab_size=128"}), {"model.path"});
  expect_mistake(train({"rollout.stop="}), {"nothing ends a reply", "rollout.stop"});
  write_config("");
  expect_mistake(train(), {"[[environment]]", "sort"});
  write_config("[[environment]]\nname = \"calculator\"\n");
  expect_mistake(train(), {"calculator", "orchestrator.renderer.name", "qwen3"});
  write_config("[[environment]]\nname = \"jsonl\"\ndata = \"absent.jsonl\"\n");
  expect_mistake(train(), {"environment", "absent.jsonl"});
  write("bad.jsonl", "{\"prompt\": \"a\", \"answer\": \"b\"}\n\nnonsense\n");
  write_config("[[environment]]\nname = \"jsonl\"\ndata = \"bad.jsonl\"\n");
  expect_mistake(train(), {"bad.jsonl line 3"});
  EXPECT_FALSE(fs::exists(path("run")));
}

TEST_F(LoopTest, SftLearnsFromFilesAndEvalMeasuresIt) {
  std::string lines;
  for (int i = 0; i < 64; ++i) {
    lines += R"({"prompt": "a=", "completion": "b\n"})"
             "\n";
    lines += R"({"messages": [{"role": "user", "content": "c="}, )"
             R"({"role": "assistant", "content": "d\n"}]})"
             "\n";
  }
  write("demos.jsonl", lines);
  write("run.toml", "output_dir = \"run\"\n" + std::string(kModel) +
                        "[sft]\ndata = \"demos.jsonl\"\nmax_steps = 60\nbatch_size = 8\n"
                        "learning_rate = 1e-2\n[rollout]\nmax_new_tokens = 4\nstop = \"\\n\"\n");
  const RunResult sft = leeway({"sft", "run.toml", "--json"});
  ASSERT_EQ(sft.code, 0) << sft;
  EXPECT_LT(number(json_of(sft.out), "loss"), 0.1);

  write("eval.jsonl",
        "{\"prompt\": \"a=\", \"answer\": \"b\"}\n{\"prompt\": \"c=\", \"answer\": \"d\"}\n");
  write("train.jsonl", "{\"prompt\": \"e=\", \"answer\": \"b\"}\n");
  write("eval.toml", std::string(kModel) +
                         "[rollout]\nmax_new_tokens = 4\nstop = \"\\n\"\n[eval]\nsamples = 4\n"
                         "[[environment]]\nname = \"jsonl\"\ndata = \"train.jsonl\"\n"
                         "eval_data = \"eval.jsonl\"\n");
  const std::string weights = json_of(sft.out)["weights"].GetString();
  const RunResult eval = leeway({"eval", "eval.toml", "--weights", weights, "--json"});
  ASSERT_EQ(eval.code, 0) << eval;
  const Document metrics = json_of(eval.out);
  EXPECT_EQ(number(metrics, "eval/all/prompts"), 2);
  EXPECT_GT(number(metrics, "eval/all/reward/mean"), 0.9);
  EXPECT_EQ(number(metrics, "eval/all/greedy/mean"), 1.0);
  EXPECT_GE(number(metrics, "eval/all/pass@4"), number(metrics, "eval/all/pass@1"));
  const RunResult table = leeway({"eval", "eval.toml", "--weights", weights});
  EXPECT_TRUE(contains(table.out, "pass@4")) << table;

  write("demos.jsonl", lines + "{\"prompt\": \"x\"}\n");
  expect_mistake(leeway({"sft", "run.toml"}), {"demos.jsonl line 129", "completion"});
}

TEST_F(LoopTest, TensorBoardFilesAreWrittenOnRequest) {
  write_config();
  ASSERT_EQ(train({"output.tensorboard=true", "trainer.max_steps=2"}).code, 0);
  size_t files = 0;
  for (const auto& entry : fs::directory_iterator(path("run/tensorboard"))) {
    files += entry.path().filename().string().starts_with("events.out.tfevents.") ? 1 : 0;
    EXPECT_GT(entry.file_size(), 1000u);
  }
  EXPECT_EQ(files, 1u);
}

TEST_F(LoopTest, TheQuickStartIsTheExample) {
  const RunResult example = leeway({"config", "--example"});
  expect_quiet_success(example);
  EXPECT_EQ(example.out, read_file(LEEWAY_SOURCE_DIR "/examples/01_sort/config.toml"));
  const RunResult result =
      leeway({"train", "--json", "--set", "trainer.max_steps=2", "--set", "sft.max_steps=2"});
  ASSERT_EQ(result.code, 0) << result;
  EXPECT_STREQ(json_of(result.out)["run"].GetString(), "runs/sort");
}

}  // namespace
}  // namespace leeway
