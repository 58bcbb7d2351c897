// All weights of a decoder in one float32 buffer, under their Hugging Face names. Gradients and
// optimizer states have the same layout and use the same class.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/aligned.h"
#include "base/checked_files.h"
#include "model/model_config.h"

namespace leeway {

// A value type: copying copies the buffer.
class Parameters {
 public:
  // Initializes to zeros. Throws Error with the size if there is not enough memory.
  explicit Parameters(ModelConfig config);

  const ModelConfig& config() const { return config_; }
  const std::vector<ParameterInfo>& table() const { return table_; }
  int64_t count() const;  // total number of weights, without padding

  // The whole buffer, with zero padding between parameters that aligns each to a cache line.
  std::span<float> flat() { return values_; }
  std::span<const float> flat() const { return values_; }

  // By index into `table`, or by name (empty span if there is none).
  std::span<float> of(size_t index);
  std::span<const float> of(size_t index) const;
  const float* find(std::string_view name) const;
  float* find(std::string_view name);

 private:
  ModelConfig config_;
  std::vector<ParameterInfo> table_;
  std::vector<int64_t> offsets_;
  std::map<std::string, size_t, std::less<>> places_;  // index into table_
  AlignedVector<float> values_;
};

// "NAME holds nan at [3, 7]" for the first parameter that is not finite; empty if all are finite.
std::string not_finite_text(const Parameters& parameters);

// The weights by their role in the network: pointers into a Parameters, null where the family has
// none. Matrices are [outputs, inputs] row-major.
template <class T>
struct LayerPointers {
  T *input_norm, *q, *k, *v, *q_bias, *k_bias, *v_bias, *q_norm, *k_norm, *o, *o_bias, *post_norm,
      *gate, *up, *down;
};
template <class T>
struct NetworkPointers {
  T *embedding, *final_norm, *head;  // tied: head == embedding
  std::vector<LayerPointers<T>> layers;
};
NetworkPointers<const float> network_of(const Parameters& parameters);
NetworkPointers<float> network_of(Parameters& parameters);

// Random weights: matrices are normal with standard deviation 1/sqrt(inputs); those that write to
// the residual stream (o, down) are divided by sqrt(2 layers), the head is halved; embedding 0.1
// (tied: 1/sqrt(hidden)), norms one, biases zero. The same seed gives the same weights on every
// platform; a parameter's values depend on the seed, its name and its shape.
void initialise(Parameters& parameters, uint64_t seed);

// Loads a Hugging Face folder: config.json and model.safetensors, or shards listed in
// model.safetensors.index.json. Throws Error naming file and tensor for missing, extra, misshapen
// or duplicate tensors, a dtype that is not floating-point, values that are not finite, and files
// that do not match the folder's checksums.json. A tied model may store `lm_head.weight` if it
// equals the embedding; `rotary_emb.inv_freq` in old files is ignored.
Parameters load_parameters(const std::string& folder);

// Writes the folder (created if missing) as transformers does: config.json and float32
// model.safetensors, or shards of at most `shard_bytes` with an index. Each file is written
// atomically, config.json last. Weight files of an earlier save that are no longer referenced are
// removed, as is its checksums.json. A tensor larger than `shard_bytes` gets its own shard. Throws
// Error, e.g. for a full disk. Returns the files that were written.
FileSums save_parameters(const Parameters& parameters, const std::string& folder,
                         int64_t shard_bytes = int64_t{5} << 30);

}  // namespace leeway
