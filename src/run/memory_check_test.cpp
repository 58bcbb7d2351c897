#include "run/memory_check.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "leeway/presets.h"
#include "model/adapter_io.h"
#include "model/test_files.h"
#include "run/devices.h"
#include "run/test_support.h"

namespace leeway {
namespace {

Config small_run() {
  Config config;
  config.run.rollout.stop = "\n";
  config.loss_spec = Catalog().make_spec("icepop", {});
  return config;
}

ModelConfig model_of(const Config& config) { return RunSetup(config, false).weights.config(); }

TEST(MemoryCheck, CountsWhatTheJobHasOnTheDevice) {
  Config config = small_run();
  const ModelConfig model = model_of(config);
  DeviceMemoryUse use = memory_use_of(config, model, {});
  EXPECT_EQ(use.max_tokens, config.run.trainer.max_tokens);
  EXPECT_EQ(use.sampler.engines, 2);  // rollouts and evaluations
  EXPECT_EQ(use.sampler.kv_bytes, config.run.rollout.kv_bytes);
  EXPECT_TRUE(use.other_policies.empty());
  EXPECT_TRUE(use.half);

  EXPECT_EQ(memory_use_of(config, model, {.spawn_servers = 3}).sampler.engines, 3);
  config.run.inference.pool = InferencePool::static_;
  EXPECT_EQ(memory_use_of(config, model, {}).sampler.engines, 0);

  config.run.trainer.recompute_activations = Recompute::selective;
  config.run.trainer.optimizer_state = OptimizerState::int8;
  config.run.trainer.precision = TrainingPrecision::float32;
  config.run.orchestrator.prompts_per_batch = 2, config.run.orchestrator.group_size = 3;
  config.loss_spec = Catalog().make_spec("grpo", {{"ref_kl", 0.1}});
  use = memory_use_of(config, model, {});
  EXPECT_EQ(use.recompute, Recompute::selective);
  EXPECT_EQ(use.optimizer_state, OptimizerState::int8);
  EXPECT_FALSE(use.half);
  EXPECT_EQ(use.max_tokens, 6 * model.max_position_embeddings);  // the whole batch
  EXPECT_EQ(use.other_policies.size(), 1u);
  config.run.trainer.sharding = Sharding::weights;
  EXPECT_EQ(memory_use_of(config, model, {.ranks = 4}).sharding, Sharding::weights);
  EXPECT_EQ(memory_use_of(config, model, {.ranks = 4}).ranks, 4);
  use = memory_use_of(config, model, {.job = Job::sft});
  EXPECT_TRUE(use.other_policies.empty());
  EXPECT_EQ(use.sampler.engines, 0);
  config.run.sft.stop_at_reward = 0.5;
  EXPECT_EQ(memory_use_of(config, model, {.job = Job::sft}).sampler.engines, 1);
  config.run.trainer.reference = "/no/such/folder";
  EXPECT_THROW(memory_use_of(config, model, {}), Error);
}

TEST(MemoryCheck, AReferenceBelowAnAdapterIsTheModelThatIsThere) {
  Config config = small_run();
  const ModelConfig model = model_of(config);
  config.loss_spec = Catalog().make_spec("grpo", {{"ref_kl", 0.1}});
  config.run.model.lora.enabled = true;
  config.run.model.lora.targets = {"v_proj", "q_proj"};
  for (const char* reference : {"initial", "base"}) {
    config.run.trainer.reference = reference;
    const DeviceMemoryUse use = memory_use_of(config, model, {});
    ASSERT_TRUE(use.lora.has_value());
    EXPECT_EQ(use.lora->rank, config.run.model.lora.rank);
    EXPECT_EQ(use.lora->targets, (std::vector<std::string>{"q_proj", "v_proj"}));
    EXPECT_TRUE(use.other_policies.empty());
    EXPECT_TRUE(use.sampler.in_process);
  }
  EXPECT_FALSE(memory_use_of(config, model, {.spawn_servers = 1}).sampler.in_process);
  config.run.model.lora.path = "/no/such/adapter";
  EXPECT_THROW(memory_use_of(config, model, {}), Error);
}

TEST(MemoryCheck, RefusesSizesThatAGpuDoesNotTakeWhenTheRunIsConfigured) {
  Config config = small_run();
  const auto refusal = [&](const ModelConfig& model, const MemoryOfJob& job) -> std::string {
    try {
      check_sizes_for_gpu(config, model, job);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  ModelConfig model = model_of(config);
  EXPECT_EQ(refusal(model, {}), "");
  model.head_dim = 20;
  EXPECT_NE(refusal(model, {}).find("model.device = \"cuda\": head_dim is 20"), std::string::npos);
  EXPECT_NE(refusal(model, {}).find("inference.pool = \"static\""), std::string::npos);
  // --spawn-servers and a pool of servers exclude each other.
  EXPECT_NE(refusal(model, {.spawn_servers = 2}).find("leave --spawn-servers out"),
            std::string::npos);
  EXPECT_EQ(refusal(model, {}).find("spawn"), std::string::npos);
  EXPECT_EQ(refusal(model, {.job = Job::sft}), "") << "nothing samples";
  config.run.inference.pool = InferencePool::static_;
  EXPECT_EQ(refusal(model, {}), "") << "servers sample, elsewhere";
  config.run.sft.enabled = true, config.run.sft.stop_at_reward = 0.25;
  EXPECT_EQ(refusal(model, {.sft_is_over = true}), "");
  for (const Job kind : {Job::train, Job::sft}) {
    const std::string why = refusal(model, {.job = kind});
    EXPECT_NE(why.find("head_dim is 20"), std::string::npos) << "it measures its reward itself";
    EXPECT_NE(why.find("leave sft.stop_at_reward out"), std::string::npos) << why;
    EXPECT_EQ(why.find("inference.pool"), std::string::npos) << why;
    EXPECT_EQ(why.find("[sft]: ") != std::string::npos, kind == Job::train) << why;
  }
  // Where rollouts are sampled on the GPU too, one message has both remedies.
  config.run.inference.pool = InferencePool::in_process;
  EXPECT_NE(refusal(model, {}).find("on CPUs, without sft.stop_at_reward"), std::string::npos);
  EXPECT_EQ(refusal(model, {.sft_is_over = true}).find("sft."), std::string::npos);
  config.run.inference.pool = InferencePool::static_;
  config.run.sft.stop_at_reward = 0.0;
  model.vocab_size = 600'000;
  EXPECT_EQ(refusal(model, {}), "");
  config.run.trainer.precision = TrainingPrecision::float32;
  EXPECT_NE(refusal(model, {}).find("vocab_size is 600000"), std::string::npos);
  // Before the GPU is asked for its memory.
  config.run.model.device = Device::cuda;
  try {
    fits_memory({})(config, model);
    ADD_FAILURE() << "not refused";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("vocab_size is 600000"), std::string::npos);
  }
}

TEST(MemoryCheck, RefusesWidthsThatAdaptersAndWeightsInPartsDoNotTake) {
  Config config = small_run();
  ModelConfig model = model_of(config);
  model.hidden_size = 100;
  const auto refusal = [&](int64_t ranks) -> std::string {
    try {
      check_sizes_for_gpu(config, model, {.ranks = ranks});
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(refusal(1), "") << "PyTorch's operations take it";
  config.run.trainer.sharding = Sharding::weights;
  EXPECT_EQ(refusal(1), "") << "nothing is in parts";
  EXPECT_NE(refusal(2).find("hidden_size is 100"), std::string::npos);
  EXPECT_NE(refusal(2).find("trainer.sharding = \"optimizer\""), std::string::npos);
  config.run.trainer.sharding = Sharding::optimizer;
  config.run.model.lora.enabled = true;
  EXPECT_NE(refusal(1).find("leave [model.lora] out"), std::string::npos);
}

TEST(MemoryCheck, RefusesATeacherThatCannotBeInParts) {
  const TestFolder folder;
  Config config = small_run();
  const ModelConfig model = model_of(config);
  Config other = config;
  other.run.model.hidden_size = 100;
  save_parameters(RunSetup(other, false).weights, folder / "teacher");
  config.loss_spec = Catalog().make_spec("icepop", {{"teacher_tau", 0.5}});
  ASSERT_TRUE(config.loss_spec.reads(Stream::teacher));
  config.run.trainer.teacher = folder / "teacher";
  EXPECT_NO_THROW(check_sizes_for_gpu(config, model, {.ranks = 2}));
  config.run.trainer.sharding = Sharding::weights;
  EXPECT_NO_THROW(check_sizes_for_gpu(config, model, {.ranks = 1}));
  testing::expect_refused([&] { check_sizes_for_gpu(config, model, {.ranks = 2}); },
                          {"trainer.teacher: hidden_size is 100", "trainer.sharding"});
}

TEST(MemoryCheck, RefusesAnAdapterWhoseRankTheGpuDoesNotTake) {
  const TestFolder folder;
  Config config = small_run();
  const RunSetup base(config, false);
  const auto shared = std::make_shared<const Parameters>(base.weights);
  for (const int64_t rank : {4, 8}) {
    const std::string path = folder / fmt::format("adapter_{}", rank);
    save_adapter(Parameters(shared, {.rank = rank, .alpha = 16.0, .targets = {"q_proj"}}), path);
    config.run.model.lora.enabled = true, config.run.model.lora.path = path;
    const auto check = [&] { check_sizes_for_gpu(config, base.weights.config(), {}); };
    if (rank == 8) {
      EXPECT_NO_THROW(check());
    } else {
      testing::expect_refused(check, {"model.lora.path", path, "multiple of 8, as 8"});
    }
  }
}

TEST(MemoryCheck, AnEngineThatEvaluatesIsHalfOfThoseOfARun) {
  const Config config = small_run();
  const ModelConfig model = model_of(config);
  EXPECT_EQ(2 * evaluation_engine_memory(config, model),
            device_memory(memory_use_of(config, model, {})).sampler);
}

// The engine that measures the reward of supervised training is gone before there is a reference.
TEST(MemoryCheck, CountsTheSupervisedPhaseByItself) {
  Config config = small_run();
  const ModelConfig model = model_of(config);
  config.run.inference.pool = InferencePool::static_;
  config.run.sft.enabled = true, config.run.sft.stop_at_reward = 0.25;
  config.loss_spec = Catalog().make_spec("grpo", {{"ref_kl", 0.1}});
  const DeviceMemoryUse rl = memory_use_of(config, model, {});
  const DeviceMemoryUse sft = memory_use_of(config, model, {.job = Job::sft});
  EXPECT_EQ(rl.sampler.engines, 0);
  EXPECT_EQ(rl.other_policies.size(), 1u);
  EXPECT_EQ(sft.sampler.engines, 1);
  EXPECT_TRUE(sft.other_policies.empty());
  EXPECT_EQ(device_memory_of(config, model, {}),
            std::max(device_memory(rl).total(), device_memory(sft).total()));
  EXPECT_GT(device_memory(sft).total(), device_memory(rl).total())
      << "of which the KV cache is most";
  EXPECT_EQ(device_memory_of(config, model, {.sft_is_over = true}), device_memory(rl).total());
  config.run.sft.enabled = false;
  EXPECT_EQ(device_memory_of(config, model, {}), device_memory(rl).total());
}

TEST(MemoryCheck, SeesTheModelBeforeItsWeightsAndNotTheCpu) {
  Config config = small_run();
  config.run.model.hidden_size = 192;
  int64_t seen = 0;
  const RunSetup setup(config, false, [&](const Config& given, const ModelConfig& model) {
    EXPECT_EQ(given.run.model.device, Device::cpu);
    seen = model.hidden_size;
    fits_memory({})(given, model);
  });
  EXPECT_EQ(seen, 192);
  EXPECT_EQ(setup.weights.config().hidden_size, 192);
  EXPECT_THROW(RunSetup(config, false, [](const auto&, const auto&) { throw Error("no room"); }),
               Error);
}

TEST(MemoryCheck, AModelThatNoGpuHoldsIsRefusedBeforeItIsMade) {
  Config config = small_run();
  config.run.model.device = Device::cuda;
  try {
    check_device(config);
  } catch (const Error&) {
    GTEST_SKIP() << "no GPU";
  }
  ModelConfig model = model_of(small_run());
  model.hidden_size = 1 << 16, model.intermediate_size = 1 << 18, model.num_hidden_layers = 200;
  try {
    fits_memory({})(config, model);
    ADD_FAILURE() << "a model of ten trillion parameters fits";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("No settings make it fit"), std::string::npos)
        << error.what();
  }
}

TEST(MemoryCheck, OfTheCpuSaysWhatTrainingNeedsAtLeast) {
  Config config = small_run();
  const ModelConfig model = model_of(config);
  uint64_t weights = 0;
  for (const ParameterInfo& info : parameter_table(model)) {
    weights += static_cast<uint64_t>(info.size());
  }
  EXPECT_EQ(why_it_does_not_fit_cpu(config, model, 16 * weights), "");
  const std::string problem = why_it_does_not_fit_cpu(config, model, 16 * weights - 1);
  for (const std::string& words : {std::to_string(weights) + " weights", std::string("GiB"),
                                   std::string("gradient"), std::string("[model.lora]")}) {
    EXPECT_NE(problem.find(words), std::string::npos) << problem;
  }
  config.run.model.lora.enabled = true;
  EXPECT_EQ(why_it_does_not_fit_cpu(config, model, 4 * weights), "");
  EXPECT_NE(why_it_does_not_fit_cpu(config, model, 4 * weights - 1), "");
}

}  // namespace
}  // namespace leeway
