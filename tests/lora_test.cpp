// Adapters from end to end with the program: trained, resumed, used, merged and served.

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "base/files.h"
#include "resume_support.h"

namespace leeway {
namespace {

constexpr const char* kBase = R"({"architectures": ["LlamaForCausalLM"], "model_type": "llama",
  "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
  "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 48, "vocab_size": 128,
  "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu",
  "tie_word_embeddings": false})";

constexpr const char* kConfig = R"(
output_dir = "run"
[model]
path = "base"
tokenizer = "byte"
[model.lora]
rank = 4
alpha = 8
[sft]
max_steps = 3
batch_size = 8
learning_rate = 1e-2
[trainer]
max_steps = 6
learning_rate = 1e-2
warmup_steps = 0
weight_decay = 0.01
[trainer.loss]
preset = "grpo"
ref_kl = 0.05
[orchestrator]
prompts_per_batch = 4
group_size = 4
max_off_policy_steps = 1
[rollout]
max_new_tokens = 6
stop = "\n"
[eval]
prompts = 8
[output]
rollouts_every = 1
rollouts_groups = 0
weights_every = 3
[checkpoint]
every = 2
[[environment]]
name = "jsonl"
data = "letters.jsonl"
verifier = "regex"
)";

class LoraRun : public ResumeFixture {
 protected:
  void SetUp() override {
    ResumeFixture::SetUp();
    write("config.json", kBase);
    write("run.toml", kConfig);
    const RunResult made = leeway({"init", "--config", "config.json", "--output", "base"});
    ASSERT_EQ(made.code, 0) << made;
  }
  std::string weights(const std::string& run, int step) const {
    return read_file(
        path(run + "/weights/step_" + std::to_string(step) + "/adapter_model.safetensors"));
  }
  std::vector<std::string> metrics() const { return results_of(path("run/metrics.jsonl")); }
};

TEST_F(LoraRun, TrainsTheAdapterAndWritesItAsPeftDoes) {
  const std::string base = read_file(path("base/model.safetensors"));
  const RunResult result = train();
  ASSERT_EQ(result.code, 0) << result;
  EXPECT_TRUE(read_file(path("base/model.safetensors")) == base);
  EXPECT_NE(weights("run", 6), weights("run", 3));
  EXPECT_NE(weights("run", 6), weights("run", 0));
  for (const char* folder : {"run/weights/step_6", "run/checkpoints/step_6"}) {
    EXPECT_FALSE(fs::exists(path(std::string(folder) + "/model.safetensors"))) << folder;
    const Document json = json_of(read_file(path(std::string(folder) + "/adapter_config.json")));
    EXPECT_EQ(json["r"].GetInt(), 4);
    EXPECT_EQ(json["lora_alpha"].GetDouble(), 8.0);
    EXPECT_EQ(json["target_modules"].Size(), 7u);
    EXPECT_EQ(json["base_model_name_or_path"].GetString(), fs::canonical(path("base")).string());
  }
  for (const std::string& row : metrics()) {
    EXPECT_TRUE(json_of(row).HasMember("mismatch_kl/all/mean"));
  }
}

// The log-probabilities of sampling have the trainer's bits.
TEST_F(LoraRun, OnPolicyRunsHaveAMismatchOfExactlyZero) {
  const RunResult result = train({"orchestrator.max_off_policy_steps=0", "eval.prompts=2"});
  ASSERT_EQ(result.code, 0) << result;
  for (const std::string& row : metrics()) {
    EXPECT_EQ(json_of(row)["mismatch_kl/all/mean"].GetDouble(), 0.0);
    EXPECT_EQ(json_of(row)["mismatch_kl/all/max"].GetDouble(), 0.0);
  }
}

TEST_F(LoraRun, GoesOnBitForBitFromEveryCheckpoint) {
  ASSERT_EQ(train().code, 0);
  const std::string wanted = weights("run", 6);
  const std::vector<std::string> rows = metrics();
  const auto evaluations = results_of(path("run/eval.jsonl"));
  // Of RL, and of the supervised training: with the first ones removed, it is the newest.
  for (const char* last : {"step_4", "step_2", "step_0"}) {
    fs::remove_all(path("run"));
    ASSERT_EQ(train({"checkpoint.keep_last=20"}).code, 0);
    for (const auto& entry : fs::directory_iterator(path("run/checkpoints"))) {
      const std::string name = entry.path().filename();
      if (name.starts_with("step_") && name > last) fs::remove_all(entry.path());
    }
    fs::remove(path("run/end.json"));
    const RunResult result = resume();
    ASSERT_EQ(result.code, 0) << result;
    EXPECT_TRUE(contains(result.err, "resumed from")) << result.err;
    EXPECT_TRUE(weights("run", 6) == wanted) << last;
    EXPECT_EQ(metrics(), rows);
    EXPECT_EQ(results_of(path("run/eval.jsonl")), evaluations);
  }
}

// Ranks write an adapter in parts; any number goes on with them, and what users get is one file.
TEST_F(LoraRun, GoesOnBitForBitWithAnyNumberOfRanks) {
  // On-policy: what a longer run has begun to sample when the shorter one ends is no difference.
  const std::vector<std::string> sets = {"model.lora.rank=64",
                                         "orchestrator.max_off_policy_steps=0"};
  ASSERT_EQ(train(sets).code, 0);
  const std::string wanted = weights("run", 6);
  const auto run = [&](std::vector<std::string> args, const char* steps, const char* ranks) {
    args.insert(args.end(), {"--ranks", ranks});
    std::vector<std::string> all = sets;
    if (args[0] == "--resume") all.clear();
    all.push_back(std::string("trainer.max_steps=") + steps);
    return leeway(arguments(args, all));
  };
  for (const auto& [first, second] :
       std::vector<std::pair<const char*, const char*>>{{"4", "2"}, {"2", "1"}, {"1", "4"}}) {
    fs::remove_all(path("run"));
    const RunResult begun = run({"run.toml"}, "4", first);
    ASSERT_EQ(begun.code, 0) << begun;
    const std::string saved = path("run/checkpoints/step_4/adapter_model");
    EXPECT_EQ(fs::exists(saved + ".safetensors"), std::string(first) == "1");
    for (int r = 1; std::string(first) != "1" && r <= std::stoi(first); ++r) {
      EXPECT_TRUE(
          fs::exists(saved + "-0000" + std::to_string(r) + "-of-0000" + first + ".safetensors"));
    }
    const RunResult used = leeway({"generate", "run/checkpoints/step_4", "--prompt",
                                   "a=", "--max-new-tokens", "2", "--tokenizer", "byte"});
    EXPECT_EQ(used.code, 0) << used;
    const RunResult more = run({"--resume", "run"}, "6", second);
    ASSERT_EQ(more.code, 0) << more;
    EXPECT_TRUE(weights("run", 6) == wanted) << first << " to " << second;
  }
}

TEST_F(LoraRun, DoesNotGoOnOverAnotherBase) {
  ASSERT_EQ(train({"trainer.max_steps=2"}).code, 0);
  fs::remove_all(path("base"));
  ASSERT_EQ(leeway({"init", "--config", "config.json", "--output", "base", "--seed", "5"}).code, 0);
  expect_mistake(resume({"trainer.max_steps=4"}), {"model.path", "content has changed"});
}

TEST_F(LoraRun, StartsFromAnAdapterAndFromARun) {
  ASSERT_EQ(train({"trainer.max_steps=2"}).code, 0);
  const RunResult from = leeway({"train", "--from", "run", "--keep-optimizer", "--set",
                                 "trainer.max_steps=2", "--set", "eval.prompts=2", "--json"});
  ASSERT_EQ(from.code, 0) << from;
  EXPECT_TRUE(weights("run-2", 0) == weights("run", 2));
  EXPECT_NE(weights("run-2", 2), weights("run", 2));
  EXPECT_TRUE(contains(read_file(path("run-2/config.toml")), "[model.lora]"));
  const RunResult more = leeway({"train", "--resume", "run-2", "--set", "trainer.max_steps=3"});
  EXPECT_EQ(more.code, 0) << more;

  write("next.toml", std::string(kConfig).replace(std::string(kConfig).find("rank = 4\nalpha = 8"),
                                                  18, "path = \"run/weights/step_2\""));
  const RunResult next = leeway({"train", "next.toml", "--set", "output_dir=next", "--unset", "sft",
                                 "--set", "trainer.max_steps=1", "--set", "eval.prompts=2"});
  ASSERT_EQ(next.code, 0) << next;
  EXPECT_TRUE(weights("next", 0) == weights("run", 2));  // the reference

  // All weights of a run can be the base of an adapter.
  const RunResult full =
      leeway({"train", "run.toml", "--unset", "model.lora", "--set", "output_dir=full", "--set",
              "trainer.max_steps=1", "--set", "eval.prompts=2"});
  ASSERT_EQ(full.code, 0) << full;
  const RunResult over = leeway({"train", "run.toml", "--from", "full", "--set", "output_dir=over",
                                 "--set", "trainer.max_steps=1", "--set", "eval.prompts=2"});
  ASSERT_EQ(over.code, 0) << over;
  EXPECT_TRUE(fs::exists(path("over/weights/step_1/adapter_config.json")));
  expect_mistake(leeway({"train", "run.toml", "--from", "full", "--keep-optimizer", "--set",
                         "output_dir=moments"}),
                 {"--keep-optimizer", "[model.lora]"});
}

TEST_F(LoraRun, IsUsedMergedAndEvaluated) {
  ASSERT_EQ(train({"trainer.max_steps=2"}).code, 0);
  const std::string adapter = "run/weights/step_2";
  const auto logprobs = [&](const std::vector<std::string>& of) {
    write("tokens.json", R"({"tokens": [[97, 61, 120, 10], [98, 61, 121, 10]]})");
    std::vector<std::string> args = {"logprobs", "--tokens", "tokens.json"};
    args.insert(args.end(), of.begin(), of.end());
    const RunResult result = leeway(args);
    EXPECT_EQ(result.code, 0) << result;
    return result.out;
  };
  const std::string wanted = logprobs({"--model", "base", "--adapter", adapter});
  EXPECT_EQ(logprobs({"--model", adapter}), wanted);  // finds its base
  EXPECT_NE(logprobs({"--model", "base"}), wanted);

  const RunResult merged = leeway({"merge", "base", adapter, "merged", "--json"});
  ASSERT_EQ(merged.code, 0) << merged;
  EXPECT_EQ(json_of(merged.out)["merged"].GetInt(), 14);
  EXPECT_TRUE(fs::exists(path("merged/model.safetensors")));
  // Rounding of sums in another order.
  const Document a = json_of(wanted), b = json_of(logprobs({"--model", "merged"}));
  for (rapidjson::SizeType s = 0; s < 2; ++s) {
    for (rapidjson::SizeType t = 1; t < 4; ++t) {
      EXPECT_NEAR(a["logprobs"][s][t].GetDouble(), b["logprobs"][s][t].GetDouble(), 1e-4);
    }
  }
  expect_mistake(leeway({"merge", "base", adapter, "merged"}), {"merged", "exists"});
  // The merged model has the base's shape and other weights.
  expect_mistake(leeway({"merge", "merged", adapter, "again"}),
                 {adapter, "other weights than merged", "checksum"});
  expect_mistake(leeway({"generate", "merged", "--adapter", adapter, "--tokenizer", "byte",
                         "--quiet", "--prompt", "a"}),
                 {adapter, "other weights than merged", "checksum"});
  expect_mistake(leeway({"convert", adapter, "adapter.gguf"}),
                 {adapter, "LoRA adapter", "leeway merge BASE"});
  expect_mistake(leeway({"merge", adapter, adapter, "twice"}), {adapter, "base"});

  const auto generated = [&](const std::vector<std::string>& of) {
    std::vector<std::string> args = {"generate", "--prompt",         "a=", "--tokenizer",
                                     "byte",     "--max-new-tokens", "8",  "--json"};
    args.insert(args.end(), of.begin(), of.end());
    const RunResult result = leeway(args);
    EXPECT_EQ(result.code, 0) << result;
    return result.out;
  };
  EXPECT_EQ(generated({"base", "--adapter", adapter}), generated({adapter}));

  const auto evaluated = [&](const std::vector<std::string>& of) {
    std::vector<std::string> args = {"eval", "run.toml", "--json", "--set", "eval.prompts=8"};
    args.insert(args.end(), of.begin(), of.end());
    const RunResult result = leeway(args);
    EXPECT_EQ(result.code, 0) << result;
    Document json = json_of(result.out);
    json.RemoveMember("time/eval");
    return text_of(json);
  };
  EXPECT_EQ(evaluated({"--adapter", adapter}), evaluated({"--weights", adapter}));
}

TEST_F(LoraRun, MistakesAreNamed) {
  const auto refused = [&](const std::vector<std::string>& sets,
                           const std::vector<std::string>& words) {
    expect_mistake(train(sets), words);
  };
  refused({"model.lora.dropout=0.1"}, {"model.lora.dropout", "must be 0"});
  refused({"model.lora.rank=0"}, {"model.lora.rank"});
  refused({"model.lora.targets=[\"q_proj\", \"lm_head\"]"}, {"model.lora.targets", "lm_head"});
  refused({"model.lora.targets=[\"q_proj\", \"q_proj\"]"}, {"model.lora.targets", "twice"});
  refused({"model.lora.targets=[]"}, {"model.lora.targets"});
  refused({"model.lora.layers=3"}, {"model.lora.layers"});
  refused({"model.device=cuda", "model.lora.rank=12"}, {"model.lora.rank (12)", "as 16"});
  refused({"model.device=cuda", "trainer.precision=float32"}, {"trainer.precision", "bf16"});
  refused({"model.lora.path=nowhere"}, {"model.lora.path = ", "nowhere", "no such folder"});
  expect_mistake(
      leeway({"train", "run.toml", "--unset", "model.lora", "--set", "trainer.reference=base"}),
      {"trainer.reference", "[model.lora]"});
  write("scratch.toml", "[model.lora]\n[[environment]]\nname = \"sort\"\n");
  expect_mistake(leeway({"train", "scratch.toml"}), {"[model.lora] needs model.path"});
  ASSERT_EQ(train({"trainer.max_steps=1", "eval.prompts=2"}).code, 0);
  refused({"model.path=run/weights/step_1", "output_dir=b"}, {"model.path", "is an adapter"});
  expect_mistake(leeway({"train", "run.toml", "--unset", "model.lora", "--set",
                         "model.path=run/weights/step_1", "--set", "output_dir=c"}),
                 {"model.path", "is an adapter", "leeway merge"});
  expect_mistake(leeway({"generate", "run/weights/step_1", "--adapter", "run/weights/step_1",
                         "--prompt", "a", "--tokenizer", "byte", "--quiet"}),
                 {"is an adapter itself"});
}

// As the engine in this process, through adapters that servers load.
TEST_F(LoraRun, ServersOfTheRunSampleTheSame) {
  const std::vector<std::string> sets = {"orchestrator.max_off_policy_steps=0", "eval.prompts=2",
                                         "trainer.max_steps=3"};
  ASSERT_EQ(train(sets).code, 0);
  const std::string wanted = weights("run", 3);
  fs::remove_all(path("run"));
  std::vector<std::string> args = arguments({"run.toml", "--json", "--spawn-servers", "1"}, sets);
  const RunResult served = leeway(args);
  ASSERT_EQ(served.code, 0) << served;
  EXPECT_TRUE(weights("run", 3) == wanted);
}

}  // namespace
}  // namespace leeway
