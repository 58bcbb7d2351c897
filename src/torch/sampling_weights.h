// A decoder's weights as sampling uses them: in the compute type on the device, in one piece, with
// matrices that share an input as one. In fp8 the layers' matrices are codes instead, and their
// numbers are not kept.
#pragma once

#include <ATen/ATen.h>

#include <memory>
#include <optional>
#include <vector>

#include "model/parameters.h"
#include "torch/coded_operations.h"
#include "torch/device_weights.h"
#include "torch/flat_layout.h"
#include "torch/sampling_operations.h"
#include "torch/shared_base.h"

namespace leeway {

// Undefined where the family has none. Matrices are [outputs, inputs]; products use the views that
// end in _t, or in fp8 what ends in _coded; the others are undefined.
struct SamplingLayer {
  at::Tensor input_norm, post_norm;
  at::Tensor qkv, qkv_bias, o, o_bias, gate_up, down;
  at::Tensor qkv_t, o_t, gate_up_t, down_t;
  CodedTensor qkv_coded, o_coded, gate_up_coded, down_coded;
  HeadWeights heads;
};

class SamplingWeights {
 public:
  struct Options {
    // False: memory for the weights is taken when they are loaded, and not for the base of an
    // adapter, which is shared.
    bool at_once = true;
    bool fp8 = false;  // of an adapter that is its base; the adapter is in the compute type
  };

  // Initializes zeros, and the RoPE table of all positions.
  SamplingWeights(const ModelConfig& config, at::Device device, at::ScalarType compute,
                  Options options);
  SamplingWeights(const ModelConfig& config, at::Device device, at::ScalarType compute)
      : SamplingWeights(config, device, compute, Options()) {}

  // Copies into the existing tensors, so that a captured graph uses the new weights, and returns
  // when everything is copied. True: tensors are others than before, and graphs are void.
  bool load(const Parameters& weights);
  // Without the host, and rounded to the same bits; returns when the copies are queued.
  bool load(const TorchDeviceWeights& weights);

  at::Tensor embedding, head, head_t, final_norm;  // tied: head is the embedding
  std::vector<SamplingLayer> layers;
  AdapterTensors adapter;  // no layers: there is none
  int64_t low_width = 0;   // of a row between the two matrices of its updates, at most

 private:
  void use(const NetworkTensors& network);
  bool use_own();
  bool use_base(const std::shared_ptr<const Parameters>& base, const FlatLayout& layout);
  CodedTensor place_of_codes(const ParameterInfo& info);
  // Calls place(parameter's index, where its numbers go), and makes codes of those that become
  // some.
  template <class Place>
  void for_own_parameters(const Place& place);

  ModelConfig config_;
  at::Device device_;
  at::ScalarType compute_;
  Options options_;
  TorchRopeTable rope_;
  FlatLayout layout_;  // of all weights
  FlatLayout kept_;    // of those that are not codes
  at::Tensor flat_;    // what all of the above are views of, unless they are of `base_`
  at::Tensor staged_;  // on the host; pinned where the device is CUDA
  std::shared_ptr<const SharedBase> base_;
  std::optional<FlatLayout> adapter_layout_;
  at::Tensor adapter_flat_;
};

}  // namespace leeway
