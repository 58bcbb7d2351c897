#include "gguf/tensor_names.h"

#include <gtest/gtest.h>

#include <numeric>
#include <set>
#include <vector>

namespace leeway {
namespace {

TEST(TensorNames, EveryParameterHasItsOwn) {
  EXPECT_EQ(gguf_name_of("model.embed_tokens.weight"), "token_embd.weight");
  EXPECT_EQ(gguf_name_of("lm_head.weight"), "output.weight");
  EXPECT_EQ(gguf_name_of("model.norm.weight"), "output_norm.weight");
  EXPECT_EQ(gguf_name_of("model.layers.17.self_attn.k_proj.bias"), "blk.17.attn_k.bias");
  EXPECT_EQ(gguf_name_of("model.layers.0.post_attention_layernorm.weight"),
            "blk.0.ffn_norm.weight");
  for (const Family family : {Family::llama, Family::qwen2, Family::qwen3}) {
    ModelConfig config;
    config.family = family;
    config.vocab_size = config.hidden_size = config.intermediate_size = 8;
    config.num_hidden_layers = config.num_attention_heads = config.num_key_value_heads = 2;
    config.head_dim = 4;
    config.qk_norm = family == Family::qwen3;
    config.qkv_bias = config.output_bias = true;
    std::set<std::string> names;
    const std::vector<ParameterInfo> table = parameter_table(config);
    for (const ParameterInfo& info : table) names.insert(gguf_name_of(info.name));
    EXPECT_EQ(names.size(), table.size());
  }
}

TEST(TensorNames, OnlyLlamasQueriesAndKeysAreInterleaved) {
  EXPECT_TRUE(has_interleaved_rows(Family::llama, "model.layers.0.self_attn.q_proj.weight"));
  EXPECT_TRUE(has_interleaved_rows(Family::llama, "model.layers.0.self_attn.k_proj.bias"));
  EXPECT_FALSE(has_interleaved_rows(Family::llama, "model.layers.0.self_attn.v_proj.weight"));
  EXPECT_FALSE(has_interleaved_rows(Family::qwen2, "model.layers.0.self_attn.q_proj.weight"));
  EXPECT_FALSE(has_interleaved_rows(Family::qwen3, "model.layers.0.self_attn.q_proj.weight"));
}

TEST(TensorNames, HeadsAreReorderedThereAndBack) {
  // Two heads of six rows of two numbers; a number says its row.
  std::vector<float> rows(24);
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<float>(i / 2);
  std::vector<float> ordered(24), back(24);
  deinterleave_heads(rows, ordered, 6, 2);
  std::vector<float> order;
  for (size_t i = 0; i < ordered.size(); i += 2) order.push_back(ordered[i]);
  EXPECT_EQ(order, (std::vector<float>{0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11}));
  interleave_heads(ordered, back, 6, 2);
  EXPECT_EQ(back, rows);
}

}  // namespace
}  // namespace leeway
