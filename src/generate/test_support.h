// A tiny model that reads and writes bytes, for tests.
#pragma once

#include <string>
#include <vector>

#include "generate/generation.h"
#include "model/parameters.h"

namespace leeway::testing {

// Random weights for the bytes and the control tokens of any renderer.
inline Parameters byte_weights(uint64_t seed, int64_t positions = 512) {
  ModelConfig config;
  config.family = Family::qwen2;
  config.qkv_bias = true;
  config.vocab_size = 300;
  config.hidden_size = 32;
  config.intermediate_size = 64;
  config.num_hidden_layers = 1;
  config.num_attention_heads = 2;
  config.num_key_value_heads = 1;
  config.head_dim = 16;
  config.max_position_embeddings = positions;
  config.tie_word_embeddings = true;
  Parameters weights(config);
  initialise(weights, seed);
  return weights;
}

// The bytes, and a renderer with its control tokens.
inline ModelText byte_text(const char* renderer) {
  ModelText text;
  text.folder = "model";
  text.tokenizer = make_byte_tokenizer(control_tokens_of(renderer));
  text.renderer = make_renderer(renderer, text.tokenizer.get());
  text.end_ids = text.renderer->stop_token_ids();
  text.vocab_size = 300;
  return text;
}

inline EngineOptions one_thread() {
  EngineOptions options;
  options.threads = 1;
  return options;
}

inline std::vector<int32_t> byte_ids(const std::string& text) {
  std::vector<int32_t> ids;
  for (const char c : text) ids.push_back(static_cast<unsigned char>(c));
  return ids;
}

}  // namespace leeway::testing
