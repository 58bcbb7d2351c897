// For tests: a model that says what it is told to. After each token there is one that follows.
#pragma once

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "model/parameters.h"

namespace leeway::testing {

// Attention and the feed-forward parts add nothing, so that the hidden state is the last token's
// embedding, of which each has a direction of its own. Tokens that are not in `next` are followed
// by `otherwise`, which ends a text.
inline Parameters chain_weights(int64_t vocabulary, const std::map<int32_t, int32_t>& next,
                                int32_t otherwise) {
  ModelConfig config;
  config.family = Family::qwen2;
  config.qkv_bias = true;
  config.vocab_size = vocabulary;
  config.hidden_size = vocabulary;
  config.intermediate_size = 16;
  config.num_hidden_layers = 1;
  config.num_attention_heads = 1;
  config.num_key_value_heads = 1;
  config.head_dim = 16;
  config.max_position_embeddings = 1024;
  config.tie_word_embeddings = false;
  config.eos_token_id = {otherwise};
  Parameters weights(config);
  initialise(weights, 1);
  for (const ParameterInfo& info : weights.table()) {
    const bool silent = info.name.ends_with("o_proj.weight") ||
                        info.name.ends_with("down_proj.weight") ||
                        info.name == "model.embed_tokens.weight" || info.name == "lm_head.weight";
    if (!silent) continue;
    float* values = weights.find(info.name);
    std::fill(values, values + info.size(), 0.0f);
  }
  float* embedding = weights.find("model.embed_tokens.weight");
  float* head = weights.find("lm_head.weight");
  for (int64_t token = 0; token < vocabulary; ++token) {
    embedding[token * vocabulary + token] = 1.0f;
    const auto found = next.find(static_cast<int32_t>(token));
    const int64_t follows = found == next.end() ? otherwise : found->second;
    head[follows * vocabulary + token] = 2.0f;
  }
  return weights;
}

// A reply of qwen3: it thinks "A", and calls add with 1 and 2.
inline const std::string kToolCall = R"({"name": "add", "arguments": {"a": 1, "b": 2}})";

// The byte tokenizer's tokens beside the bytes, with the call as one of them.
inline std::vector<std::string> chain_tokens(std::vector<std::string> controls) {
  controls.push_back(kToolCall);
  return controls;
}

// The model that replies so to any prompt that ends with a line end. `controls`: chain_tokens().
inline Parameters tool_calling_weights(const std::vector<std::string>& controls) {
  const auto id = [&](const std::string& token) {
    const auto found = std::find(controls.begin(), controls.end(), token);
    return static_cast<int32_t>(256 + (found - controls.begin()));
  };
  const int32_t end = id("<|im_end|>");
  return chain_weights(320,
                       {{'\n', id("<think>")},
                        {id("<think>"), 'A'},
                        {'A', id("</think>")},
                        {id("</think>"), id("<tool_call>")},
                        {id("<tool_call>"), id(kToolCall)},
                        {id(kToolCall), id("</tool_call>")}},
                       end);
}

}  // namespace leeway::testing
