#include <fmt/format.h>

#include "model/model_config.h"

namespace leeway {

int64_t ParameterInfo::size() const {
  int64_t product = 1;
  for (const int64_t n : shape) product *= n;
  return product;
}

std::vector<ParameterInfo> parameter_table(const ModelConfig& config) {
  using Role = ParameterInfo::Role;
  std::vector<ParameterInfo> table;
  const int64_t hidden = config.hidden_size;
  const int64_t queries = config.num_attention_heads * config.head_dim;
  const int64_t keys = config.num_key_value_heads * config.head_dim;

  table.push_back({"model.embed_tokens.weight", {config.vocab_size, hidden}, Role::embedding});
  for (int64_t layer = 0; layer < config.num_hidden_layers; ++layer) {
    auto add = [&](const char* name, std::vector<int64_t> shape, Role role) {
      table.push_back({fmt::format("model.layers.{}.{}", layer, name), std::move(shape), role});
    };
    add("input_layernorm.weight", {hidden}, Role::norm);
    add("self_attn.q_proj.weight", {queries, hidden}, Role::matrix);
    add("self_attn.k_proj.weight", {keys, hidden}, Role::matrix);
    add("self_attn.v_proj.weight", {keys, hidden}, Role::matrix);
    if (config.qkv_bias) {
      add("self_attn.q_proj.bias", {queries}, Role::bias);
      add("self_attn.k_proj.bias", {keys}, Role::bias);
      add("self_attn.v_proj.bias", {keys}, Role::bias);
    }
    if (config.qk_norm) {
      add("self_attn.q_norm.weight", {config.head_dim}, Role::norm);
      add("self_attn.k_norm.weight", {config.head_dim}, Role::norm);
    }
    add("self_attn.o_proj.weight", {hidden, queries}, Role::matrix);
    if (config.output_bias) add("self_attn.o_proj.bias", {hidden}, Role::bias);
    add("post_attention_layernorm.weight", {hidden}, Role::norm);
    add("mlp.gate_proj.weight", {config.intermediate_size, hidden}, Role::matrix);
    add("mlp.up_proj.weight", {config.intermediate_size, hidden}, Role::matrix);
    add("mlp.down_proj.weight", {hidden, config.intermediate_size}, Role::matrix);
  }
  table.push_back({"model.norm.weight", {hidden}, Role::norm});
  if (!config.tie_word_embeddings) {
    table.push_back({"lm_head.weight", {config.vocab_size, hidden}, Role::head});
  }
  return table;
}

}  // namespace leeway
