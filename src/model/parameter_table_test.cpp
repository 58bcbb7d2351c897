#include <gtest/gtest.h>

#include "model/model_config.h"
#include "model/test_files.h"

namespace leeway {
namespace {

using testing::kGoldens;
using testing::small_config;

TEST(ParameterTable, HasTheNamesAndShapesOfTheGoldenFiles) {
  for (const char* golden : {"/qwen3-tied", "/llama3-rope"}) {
    const SafetensorsFile file(kGoldens + golden + "/model.safetensors");
    const auto table = parameter_table(load_model_config(kGoldens + golden));
    EXPECT_EQ(table.size(), file.tensors().size());
    for (const ParameterInfo& info : table) {
      const StoredTensor* tensor = file.find(info.name);
      ASSERT_NE(tensor, nullptr) << info.name;
      EXPECT_EQ(tensor->shape, info.shape) << info.name;
      EXPECT_EQ(tensor->size(), info.size()) << info.name;
    }
  }
}

TEST(ParameterTable, IsInTheOrderOfTheNetwork) {
  const auto table = parameter_table(small_config(Family::qwen3, false, true));
  std::vector<std::string> names;
  for (const ParameterInfo& info : table) names.push_back(info.name);
  const std::vector<std::string> layer = {
      "input_layernorm.weight",  "self_attn.q_proj.weight", "self_attn.k_proj.weight",
      "self_attn.v_proj.weight", "self_attn.q_proj.bias",   "self_attn.k_proj.bias",
      "self_attn.v_proj.bias",   "self_attn.q_norm.weight", "self_attn.k_norm.weight",
      "self_attn.o_proj.weight", "self_attn.o_proj.bias",   "post_attention_layernorm.weight",
      "mlp.gate_proj.weight",    "mlp.up_proj.weight",      "mlp.down_proj.weight"};
  std::vector<std::string> expected = {"model.embed_tokens.weight"};
  for (const char* i : {"0", "1"}) {
    for (const std::string& name : layer) {
      expected.push_back(std::string("model.layers.") + i + "." + name);
    }
  }
  expected.insert(expected.end(), {"model.norm.weight", "lm_head.weight"});
  EXPECT_EQ(names, expected);
}

TEST(ParameterTable, FollowsTheFamily) {
  auto count = [](const ModelConfig& config, const std::string& ending) {
    int found = 0;
    for (const ParameterInfo& info : parameter_table(config)) found += info.name.ends_with(ending);
    return found;
  };
  EXPECT_EQ(count(small_config(Family::qwen2), ".bias"), 6);
  EXPECT_EQ(count(small_config(Family::qwen2), "o_proj.bias"), 0);
  EXPECT_EQ(count(small_config(Family::llama), ".bias"), 0);
  EXPECT_EQ(count(small_config(Family::llama, false, true), ".bias"), 8);
  EXPECT_EQ(count(small_config(Family::llama), "_norm.weight"), 0);
  EXPECT_EQ(count(small_config(Family::qwen3), "_norm.weight"), 4);
  EXPECT_EQ(count(small_config(Family::llama, true), "lm_head.weight"), 0);
  EXPECT_EQ(count(small_config(Family::llama), "lm_head.weight"), 1);
}

}  // namespace
}  // namespace leeway
