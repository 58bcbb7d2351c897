#include "engine/checks.h"

#include <gtest/gtest.h>

#include <limits>

#include "engine/test_support.h"

namespace leeway {
namespace {

using namespace testing;

TEST(Checks, RefusesOptionsOutOfRange) {
  const auto message = [](auto change) {
    EngineOptions options;
    change(options);
    return refusal([&] {
      check_options(options);
      block_count(options, 4096, most_blocks(tiny(Family::llama), options));
    });
  };
  const std::vector<std::pair<std::string, std::string>> refused{
      {message([](EngineOptions& o) { o.threads = -1; }), "threads is -1"},
      {message([](EngineOptions& o) { o.max_rows_per_step = 0; }), "max_rows_per_step is 0"},
      {message([](EngineOptions& o) { o.max_sequences = 0; }), "max_sequences is 0"},
      {message([](EngineOptions& o) { o.kv_bytes = 100; }), "kv_bytes is 100"}};
  for (const auto& [got, words] : refused) {
    EXPECT_NE(got.find(words), std::string::npos) << got << "; expected: " << words;
  }
}

TEST(Checks, CountsBlocksByMemoryAndByWhatTheModelCanUse) {
  EngineOptions options;
  options.max_sequences = 3;
  const int64_t most = most_blocks(tiny(Family::llama), options);
  EXPECT_EQ(most, 3 * kPositions / kBlockKeys);
  options.kv_bytes = 5 * 4096 + 4095;
  EXPECT_EQ(block_count(options, 4096, most), 5);
  options.kv_bytes = 1000 * 4096;
  EXPECT_EQ(block_count(options, 4096, most), most);
  options.max_sequences = std::numeric_limits<int64_t>::max();
  EXPECT_EQ(block_count(options, 4096, most_blocks(tiny(Family::llama), options)), 1000);
}

TEST(Checks, RefusesWeightsOfAnotherModelByTheKeyThatDiffers) {
  const auto message = [](auto change) {
    ModelConfig config = tiny(Family::llama);
    change(config);
    return refusal([&] { check_same_network(tiny(Family::llama), config); });
  };
  const std::vector<std::pair<std::string, std::string>> refused{
      {message([](ModelConfig& c) { c.vocab_size = 60; }), "vocab_size is 60, the engine's is 50"},
      {message([](ModelConfig& c) { c.num_hidden_layers = 3; }), "num_hidden_layers is 3"},
      {message([](ModelConfig& c) { c.family = Family::qwen3; }), "model_type is qwen3"},
      {message([](ModelConfig& c) { c.rope_theta = 7.0; }), "rope_theta is 7"},
      {message([](ModelConfig& c) { c.llama3_rope.reset(); }),
       "rope_scaling is none, the engine's is llama3 (factor 8"},
      {message([](ModelConfig& c) { c.hidden_size = 64; }), "hidden_size is 64"},
      {message([](ModelConfig& c) { c.intermediate_size = 64; }), "intermediate_size is 64"},
      {message([](ModelConfig& c) { c.num_attention_heads = 2; }), "num_attention_heads is 2"},
      {message([](ModelConfig& c) { c.num_key_value_heads = 4; }), "num_key_value_heads is 4"},
      {message([](ModelConfig& c) { c.head_dim = 16; }), "head_dim is 16"},
      {message([](ModelConfig& c) { c.rms_norm_eps = 0.5; }), "rms_norm_eps is 0.5"},
      {message([](ModelConfig& c) { c.qk_norm = true; }), "query and key norm is true"},
      {message([](ModelConfig& c) { c.output_bias = true; }), "attention's output is true"},
      {message([](ModelConfig& c) { c.max_position_embeddings = 8; }),
       "max_position_embeddings is 8"},
      {message([](ModelConfig& c) { c.tie_word_embeddings = true; }),
       "tie_word_embeddings is true"},
      {message([](ModelConfig& c) { c.qkv_bias = true; }), "bias of queries"}};
  for (const auto& [got, words] : refused) {
    EXPECT_NE(got.find(words), std::string::npos) << got << "; expected: " << words;
  }
  EXPECT_EQ(message([](ModelConfig& c) { c.eos_token_id = {3}; }), "accepted");
  EXPECT_EQ(message([](ModelConfig& c) { c.source = "{}"; }), "accepted");
}

}  // namespace
}  // namespace leeway
