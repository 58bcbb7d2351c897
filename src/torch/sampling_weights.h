// A decoder's weights as sampling uses them: in the compute type on the device, in one piece, with
// matrices that share an input as one.
#pragma once

#include <ATen/ATen.h>

#include <vector>

#include "model/parameters.h"
#include "torch/device_weights.h"
#include "torch/flat_layout.h"
#include "torch/sampling_operations.h"

namespace leeway {

// Undefined where the family has none. Matrices are [outputs, inputs]; products use the views that
// end in _t.
struct SamplingLayer {
  at::Tensor input_norm, post_norm;
  at::Tensor qkv, qkv_bias, o, o_bias, gate_up, down;
  at::Tensor qkv_t, o_t, gate_up_t, down_t;
  HeadWeights heads;
};

class SamplingWeights {
 public:
  // Initializes zeros, and the RoPE table of all positions.
  SamplingWeights(const ModelConfig& config, at::Device device, at::ScalarType compute);

  // Copies into the existing tensors, so that a captured graph uses the new weights. Returns when
  // everything is copied.
  void load(const Parameters& weights);
  // Without the host, and rounded to the same bits; returns when the copies are queued.
  void load(const TorchDeviceWeights& weights);

  at::Tensor embedding, head, head_t, final_norm;  // tied: head is the embedding
  std::vector<SamplingLayer> layers;

 private:
  FlatLayout layout_;
  at::Tensor flat_;    // what all of the above are views of
  at::Tensor staged_;  // on the host; pinned where the device is CUDA
};

}  // namespace leeway
