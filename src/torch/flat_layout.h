// Where the parameters of a model lie in one piece of device memory. Weights, their copies in
// another type, gradients, moments and snapshots share this layout, so that each of them is copied
// and changed as a whole. Matrices that share an input are adjacent and stand for one matrix.
//
// Host memory and files keep the order of parameter_table.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "model/parameters.h"

namespace leeway {

// Numbers of a layout, from `begin` on.
struct FlatRange {
  int64_t begin = 0, count = 0;
};

struct FlatLayout {
  explicit FlatLayout(const ModelConfig& config);
  // Of what is trained of `parameters`: an adapter's own matrices, or all.
  explicit FlatLayout(const Parameters& parameters);
  // Of the parameters of a model that are kept where the layers' matrices are codes
  // (coded_operations.h): all others.
  static FlatLayout without_layer_matrices(const ModelConfig& config);

  // What one of `size` ranks updates, a power of two of them: parts are of the same length and
  // begin with a block of moments' codes.
  static constexpr int kMostRanks = 64;  // ranks_backend.h refuses more
  FlatRange part_of(int rank, int size) const;
  // Where the parts of so many ranks cut a range, from its beginning: [size + 1].
  std::vector<int64_t> bounds_of(const FlatRange& range, int size) const;

  ModelConfig config;
  std::optional<LoraSettings> lora;  // of an adapter
  std::vector<ParameterInfo> table;
  std::vector<int64_t> offsets;  // beside `table`
  // Numbers, padding included. Those before `decaying` are matrices, which decay; norms and biases
  // follow. What is no parameter's is zero and stays so.
  int64_t decaying = 0, size = 0;

 private:
  FlatLayout(const ModelConfig& config, std::vector<ParameterInfo> table);
  void place();
};
// Whether a parameter is one of the matrices of a layer, by its name and role.
bool is_layer_matrix(const ParameterInfo& info);

// The parameters as views of `flat`, a tensor [layout.size], beside layout.table.
std::vector<at::Tensor> parameter_views(const FlatLayout& layout, const at::Tensor& flat);

// Between the host's float32 and `flat` of any floating type; `host` has the layout's config.
void copy_to_flat(const FlatLayout& layout, const Parameters& host, const at::Tensor& flat);
void copy_to_host(const FlatLayout& layout, const at::Tensor& flat, Parameters& host);
// The same for a part of the layout, which begins at number `begin`.
void copy_to_flat_part(const FlatLayout& layout, const Parameters& host, int64_t begin,
                       const at::Tensor& part);
void copy_part_to_host(const FlatLayout& layout, int64_t begin, const at::Tensor& part,
                       Parameters& host);

// The parameters as the network uses them, views of `flat`; undefined where the family, or the
// layout, has none.
// Matrices are [outputs, inputs].
struct LayerTensors {
  at::Tensor input_norm, post_norm;
  at::Tensor qkv, qkv_bias;  // queries, keys, values, one below the other
  at::Tensor q_norm, k_norm;
  at::Tensor o, o_bias;
  at::Tensor gate_up;  // the gate above
  at::Tensor down;
};
struct NetworkTensors {
  at::Tensor embedding, head, final_norm;  // tied: head is the embedding
  std::vector<LayerTensors> layers;
};
NetworkTensors network_views(const FlatLayout& layout, const at::Tensor& flat);
// The same where the numbers lie in several tensors: numbers(offset, count) gives those of a matrix
// or vector.
NetworkTensors network_views(const FlatLayout& layout,
                             const std::function<at::Tensor(int64_t, int64_t)>& numbers);

// Where the matrices of each part of the network lie: ranges that do not overlap, all before
// `decaying`, but for a head that is the embedding.
struct NetworkRanges {
  FlatRange embedding, head;
  std::vector<FlatRange> layers;
};
NetworkRanges network_ranges(const FlatLayout& layout);

inline constexpr size_t kMostLowRankParts = 3;  // of a stack
// The low-rank updates of matrices that share an input x: y += scale x a^T b^T, part by part.
struct LowRankStack {
  struct Part {
    int64_t first = 0, outputs = 0;  // columns of y, where the matrices' results are side by side
    at::Tensor b;                    // [outputs, rank]
  };
  at::Tensor a;  // [parts * rank, inputs]; undefined: no matrix has an update
  std::vector<Part> parts;
};
struct LayerAdapter {
  LowRankStack qkv, o, gate_up, down;
};
// The same of an adapter's layout.
struct AdapterTensors {
  double scale = 0.0;
  std::vector<LayerAdapter> layers;  // none: there is no adapter
};
AdapterTensors adapter_views(const FlatLayout& layout, const at::Tensor& flat);

}  // namespace leeway
