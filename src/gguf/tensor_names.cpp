#include "gguf/tensor_names.h"

#include <algorithm>
#include <utility>

#include "leeway/error.h"

namespace leeway {
namespace {

constexpr std::pair<std::string_view, std::string_view> kModules[] = {
    {"model.embed_tokens", "token_embd"},
    {"model.norm", "output_norm"},
    {"lm_head", "output"},
};
constexpr std::pair<std::string_view, std::string_view> kLayerModules[] = {
    {"input_layernorm", "attn_norm"},    {"self_attn.q_proj", "attn_q"},
    {"self_attn.k_proj", "attn_k"},      {"self_attn.v_proj", "attn_v"},
    {"self_attn.o_proj", "attn_output"}, {"self_attn.q_norm", "attn_q_norm"},
    {"self_attn.k_norm", "attn_k_norm"}, {"post_attention_layernorm", "ffn_norm"},
    {"mlp.gate_proj", "ffn_gate"},       {"mlp.up_proj", "ffn_up"},
    {"mlp.down_proj", "ffn_down"},
};

// move(gguf_row, hugging_face_row) for every row of `size` numbers.
template <class Move>
void for_each_head_row(size_t size, int64_t head_dim, int64_t row_length, Move move) {
  const int64_t rows = static_cast<int64_t>(size) / row_length;
  LEEWAY_CHECK(rows % head_dim == 0 && head_dim % 2 == 0, "there must be whole heads of pairs");
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t head = row / head_dim, within = row % head_dim;
    move(row, head * head_dim + within % 2 * (head_dim / 2) + within / 2);
  }
}

}  // namespace

std::string gguf_name_of(std::string_view parameter) {
  const size_t dot = parameter.rfind('.');
  LEEWAY_CHECK(dot != std::string_view::npos, "a parameter's name must have a dot");
  const std::string kind(parameter.substr(dot));  // ".weight", ".bias"
  std::string_view module = parameter.substr(0, dot);
  for (const auto& [name, gguf] : kModules) {
    if (module == name) return std::string(gguf) + kind;
  }
  constexpr std::string_view kLayers = "model.layers.";
  LEEWAY_CHECK(module.starts_with(kLayers), "unknown parameter " + std::string(parameter));
  module.remove_prefix(kLayers.size());
  const std::string_view layer = module.substr(0, module.find('.'));
  module.remove_prefix(layer.size() + 1);
  for (const auto& [name, gguf] : kLayerModules) {
    if (module == name) return "blk." + std::string(layer) + "." + std::string(gguf) + kind;
  }
  LEEWAY_CHECK(false, "unknown parameter " + std::string(parameter));
}

bool has_interleaved_rows(Family family, std::string_view parameter) {
  if (family != Family::llama) return false;
  return parameter.find(".q_proj.") != std::string_view::npos ||
         parameter.find(".k_proj.") != std::string_view::npos;
}

void deinterleave_heads(std::span<const float> gguf, std::span<float> hugging_face,
                        int64_t head_dim, int64_t row_length) {
  LEEWAY_CHECK(gguf.size() == hugging_face.size(), "both must have the same size");
  for_each_head_row(gguf.size(), head_dim, row_length, [&](int64_t from, int64_t to) {
    std::copy_n(gguf.data() + from * row_length, row_length, hugging_face.data() + to * row_length);
  });
}

void interleave_heads(std::span<const float> hugging_face, std::span<float> gguf, int64_t head_dim,
                      int64_t row_length) {
  LEEWAY_CHECK(gguf.size() == hugging_face.size(), "both must have the same size");
  for_each_head_row(gguf.size(), head_dim, row_length, [&](int64_t to, int64_t from) {
    std::copy_n(hugging_face.data() + from * row_length, row_length, gguf.data() + to * row_length);
  });
}

}  // namespace leeway
