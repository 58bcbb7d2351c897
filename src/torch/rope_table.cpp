#include "torch/rope_table.h"

#include <vector>

#include "model/cpu_decoder.h"

namespace leeway {

TorchRopeTable::TorchRopeTable(const ModelConfig& config, at::Device device) {
  const RopeTable host(config, config.max_position_embeddings);
  const auto on_device = [&](const std::vector<float>& values) {
    const std::vector<int64_t> shape{config.max_position_embeddings, config.head_dim / 2};
    return at::from_blob(const_cast<float*>(values.data()), shape, at::kFloat)
        .to(at::device(device).dtype(at::kFloat), false, /*copy=*/true);
  };
  cosines = on_device(host.cosines);
  sines = on_device(host.sines);
}

}  // namespace leeway
