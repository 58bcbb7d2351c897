// Weights of a decoder in one float32 buffer, under their Hugging Face names: all of them, or those
// of a low-rank adapter over others that are shared and do not change. Gradients and optimizer
// states have the same layout and use the same class.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/aligned.h"
#include "base/checked_files.h"
#include "model/lora.h"
#include "model/model_config.h"

namespace leeway {

// A value type: copying copies the buffer. The base of an adapter is shared by its copies.
class Parameters {
 public:
  // Initializes to zeros. Throws Error with the size if there is not enough memory.
  explicit Parameters(ModelConfig config);
  // An adapter over `base`, which has none itself. Table and buffer are the adapter's alone.
  Parameters(std::shared_ptr<const Parameters> base, LoraSettings lora);
  // The matrices of an adapter without a base: for gradients and moments, and for files alone.
  Parameters(ModelConfig config, std::optional<LoraSettings> lora);
  // The table alone, without numbers, which nothing may read or write: for who has them elsewhere.
  static Parameters shape_of(ModelConfig config);
  // Zeros in the layout of another, without its base.
  static Parameters zeros_like(const Parameters& other);

  const ModelConfig& config() const { return config_; }
  const LoraSettings* lora() const { return lora_ ? &*lora_ : nullptr; }  // null: all weights
  // Where the base of an adapter lies, for the files of the adapter.
  void set_base_path(const std::string& path) { lora_->base_path = path; }
  // What an adapter is added to; null for all weights, and for gradients.
  const std::shared_ptr<const Parameters>& base() const { return base_; }
  // checksum(*this), kept from the first call on: for weights that do not change any more, as those
  // of a base. From any thread.
  uint32_t frozen_checksum() const;
  const std::vector<ParameterInfo>& table() const { return table_; }
  int64_t count() const;  // total number of weights, without padding

  // The whole buffer, with zero padding between parameters that aligns each to a cache line.
  std::span<float> flat() { return values_; }
  std::span<const float> flat() const { return values_; }

  // By index into `table`, or by name (null if there is none). What cannot be changed is looked for
  // in the base too.
  std::span<float> of(size_t index);
  std::span<const float> of(size_t index) const;
  const float* find(std::string_view name) const;
  float* find(std::string_view name);

 private:
  // Without numbers.
  struct Shape {};
  Parameters(ModelConfig config, std::optional<LoraSettings> lora, Shape);
  // A copy may be changed, so that it starts without.
  struct KeptSum {
    KeptSum() = default;
    KeptSum(const KeptSum&) {}
    KeptSum& operator=(const KeptSum&) {
      value = kUnknown;
      return *this;
    }
    static constexpr uint64_t kUnknown = uint64_t{1} << 32;
    std::atomic<uint64_t> value = kUnknown;
  };

  ModelConfig config_;
  std::optional<LoraSettings> lora_;
  std::shared_ptr<const Parameters> base_;
  std::vector<ParameterInfo> table_;
  std::vector<int64_t> offsets_;
  std::map<std::string, size_t, std::less<>> places_;  // index into table_
  AlignedVector<float> values_;
  mutable KeptSum sum_;
};

// "NAME holds nan at [3, 7]" for the first parameter that is not finite; empty if all are finite.
std::string not_finite_text(const Parameters& parameters);
// The same of one parameter's values.
std::string not_finite_text(const std::string& name, const std::vector<int64_t>& shape,
                            std::span<const float> values);

// CRC-32C over the CRC-32Cs of all parameters' values, in the table's order.
uint32_t checksum(const Parameters& parameters);
uint32_t checksum(std::span<const uint32_t> crcs);  // of the parameters, in that order

// The weights by their role in the network; null where the family has none. Matrices are
// [outputs, inputs] row-major.
template <class T>
struct LoraPointers {
  T *a = nullptr, *b = nullptr;  // [rank, inputs], [outputs, rank]
};
template <class T>
struct LayerPointers {
  T *input_norm, *q, *k, *v, *q_bias, *k_bias, *v_bias, *q_norm, *k_norm, *o, *o_bias, *post_norm,
      *gate, *up, *down;
  LoraPointers<T> q_lora{}, k_lora{}, v_lora{}, o_lora{}, gate_lora{}, up_lora{}, down_lora{};
};
template <class T>
struct NetworkPointers {
  T *embedding, *final_norm, *head;  // tied: head == embedding
  int64_t rank = 0;                  // of the adapter; 0: there is none
  float lora_scale = 0.0f;
  std::vector<LayerPointers<T>> layers;
};
// Into the buffer, and into the base's; of gradients of an adapter, null for what is not trained.
NetworkPointers<const float> network_of(const Parameters& parameters);
NetworkPointers<float> network_of(Parameters& parameters);
// The same for weights that are kept in another form. find(name) gives a parameter by its name in
// `parameter_table`, null for a name that is not there.
template <class T, class Find>
NetworkPointers<T> network_by(const ModelConfig& config, const Find& find);

// Random weights: matrices are normal with standard deviation 1/sqrt(inputs); those that write to
// the residual stream (o, down) are divided by sqrt(2 layers), the head is halved; embedding 0.1
// (tied: 1/sqrt(hidden)), norms one, biases zero. The same seed gives the same weights on every
// platform; a parameter's values depend on the seed, its name and its shape. Of an adapter, A is
// uniform within 1/sqrt(inputs) and B zero, as PEFT has it.
void initialise(Parameters& parameters, uint64_t seed);

// Loads a Hugging Face folder: config.json and model.safetensors, or shards listed in
// model.safetensors.index.json. A folder of an adapter (adapter_io.h) gives it over the base that
// its adapter_config.json names. Throws Error naming file and tensor for missing, extra, misshapen
// or duplicate tensors, a dtype that is not floating-point, values that are not finite, and files
// that do not match the folder's checksums.json. A tied model may store `lm_head.weight` if it
// equals the embedding; `rotary_emb.inv_freq` in old files is ignored.
Parameters load_parameters(const std::string& folder);

// Writes the folder (created if missing) as transformers does, an adapter as PEFT does: config.json
// and float32 model.safetensors, or shards of at most `shard_bytes` with an index. Each file is
// written atomically, config.json last. Weight files of an earlier save that are no longer
// referenced are removed, as is its checksums.json. A tensor larger than `shard_bytes` gets its own
// shard. Throws Error, e.g. for a full disk. Returns the files that were written.
FileSums save_parameters(const Parameters& parameters, const std::string& folder,
                         int64_t shard_bytes = int64_t{5} << 30);

template <class T, class Find>
NetworkPointers<T> network_by(const ModelConfig& config, const Find& find) {
  NetworkPointers<T> network;
  network.embedding = find("model.embed_tokens.weight");
  network.final_norm = find("model.norm.weight");
  network.head = find("lm_head.weight");
  if (network.head == nullptr) network.head = network.embedding;
  for (int64_t i = 0; i < config.num_hidden_layers; ++i) {
    const std::string prefix = "model.layers." + std::to_string(i) + ".";
    const auto at = [&](const char* name) { return find(prefix + name); };
    const auto lora = [&](const char* module) -> LoraPointers<T> {
      return {find(lora_a_name(prefix + module)), find(lora_b_name(prefix + module))};
    };
    network.layers.push_back({.input_norm = at("input_layernorm.weight"),
                              .q = at("self_attn.q_proj.weight"),
                              .k = at("self_attn.k_proj.weight"),
                              .v = at("self_attn.v_proj.weight"),
                              .q_bias = at("self_attn.q_proj.bias"),
                              .k_bias = at("self_attn.k_proj.bias"),
                              .v_bias = at("self_attn.v_proj.bias"),
                              .q_norm = at("self_attn.q_norm.weight"),
                              .k_norm = at("self_attn.k_norm.weight"),
                              .o = at("self_attn.o_proj.weight"),
                              .o_bias = at("self_attn.o_proj.bias"),
                              .post_norm = at("post_attention_layernorm.weight"),
                              .gate = at("mlp.gate_proj.weight"),
                              .up = at("mlp.up_proj.weight"),
                              .down = at("mlp.down_proj.weight"),
                              .q_lora = lora("self_attn.q_proj"),
                              .k_lora = lora("self_attn.k_proj"),
                              .v_lora = lora("self_attn.v_proj"),
                              .o_lora = lora("self_attn.o_proj"),
                              .gate_lora = lora("mlp.gate_proj"),
                              .up_lora = lora("mlp.up_proj"),
                              .down_lora = lora("mlp.down_proj")});
  }
  return network;
}

}  // namespace leeway
