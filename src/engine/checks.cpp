#include "engine/checks.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <string>
#include <string_view>

#include "kernels/attention.h"
#include "leeway/error.h"

namespace leeway {
namespace {

std::string in_words(const std::optional<Llama3Rope>& rope) {
  if (!rope) return "none";
  return fmt::format(
      "llama3 (factor {}, low_freq_factor {}, high_freq_factor {}, "
      "original_max_position_embeddings {})",
      rope->factor, rope->low_freq_factor, rope->high_freq_factor,
      rope->original_max_position_embeddings);
}

}  // namespace

void check_options(const EngineOptions& options) {
  if (options.threads < 0) {
    throw Error(
        fmt::format("threads is {}: it must be positive, or 0 for one per core", options.threads));
  }
  if (options.max_rows_per_step < 1) {
    throw Error(
        fmt::format("max_rows_per_step is {}: it must be at least 1", options.max_rows_per_step));
  }
  if (options.max_sequences < 1) {
    throw Error(fmt::format("max_sequences is {}: it must be at least 1", options.max_sequences));
  }
}

void check_sizes_for_fp8(const ModelConfig& config) {
  const int64_t heads = config.num_attention_heads, kv_heads = config.num_key_value_heads;
  const auto check = [](const char* name, int64_t size) {
    if (size % 16 == 0) return;
    throw Error(
        fmt::format("precision fp8: {} is {}, and products in fp8 take multiples of 16; use bf16 "
                    "(rollout.precision, --precision)",
                    name, size));
  };
  check("hidden_size", config.hidden_size);
  check("intermediate_size", config.intermediate_size);
  check("num_attention_heads * head_dim", heads * config.head_dim);
  check("(num_attention_heads + 2 num_key_value_heads) * head_dim",
        (heads + 2 * kv_heads) * config.head_dim);
}

int64_t most_blocks(const ModelConfig& config, const EngineOptions& options) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  const int64_t longest = (config.max_position_embeddings + kBlockKeys - 1) / kBlockKeys;
  return options.max_sequences > kMost / longest ? kMost : options.max_sequences * longest;
}

int64_t block_count(const EngineOptions& options, int64_t block_bytes, int64_t most) {
  if (options.kv_bytes < block_bytes) {
    throw Error(fmt::format("kv_bytes is {}: one block of {} positions of this model takes {}",
                            options.kv_bytes, kBlockKeys, block_bytes));
  }
  return std::min(options.kv_bytes / block_bytes, most);
}

RequestLimits limits_of(const ModelConfig& config, const EngineOptions& options,
                        const SamplingBackend& backend) {
  RequestLimits limits;
  limits.vocabulary = config.vocab_size;
  limits.positions = config.max_position_embeddings;
  limits.sequences = options.max_sequences;
  limits.blocks = backend.blocks();
  limits.block_bytes = backend.block_bytes();
  return limits;
}

void check_same_network(const ModelConfig& own, const ModelConfig& other) {
  const auto same = [](const char* key, const auto& is, const auto& must) {
    if (is == must) return;
    throw Error(fmt::format(
        "the new weights' {} is {}, the engine's is {}: weights of a different model need "
        "an engine of their own",
        key, is, must));
  };
  same("model_type", std::string_view(name_of(other.family)), name_of(own.family));
  same("vocab_size", other.vocab_size, own.vocab_size);
  same("hidden_size", other.hidden_size, own.hidden_size);
  same("intermediate_size", other.intermediate_size, own.intermediate_size);
  same("num_hidden_layers", other.num_hidden_layers, own.num_hidden_layers);
  same("num_attention_heads", other.num_attention_heads, own.num_attention_heads);
  same("num_key_value_heads", other.num_key_value_heads, own.num_key_value_heads);
  same("head_dim", other.head_dim, own.head_dim);
  same("max_position_embeddings", other.max_position_embeddings, own.max_position_embeddings);
  same("rms_norm_eps", other.rms_norm_eps, own.rms_norm_eps);
  same("rope_theta", other.rope_theta, own.rope_theta);
  same("rope_scaling", in_words(other.llama3_rope), in_words(own.llama3_rope));
  same("tie_word_embeddings", other.tie_word_embeddings, own.tie_word_embeddings);
  same("query and key norm", other.qk_norm, own.qk_norm);
  same("bias of queries, keys and values", other.qkv_bias, own.qkv_bias);
  same("bias of the attention's output", other.output_bias, own.output_bias);
}

}  // namespace leeway
