// IcePop as trainers write it in libtorch: loss, backward and the same metrics.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

namespace leeway {

class TorchBaseline {
 public:
  TorchBaseline(const std::vector<int64_t>& offsets, const std::vector<float>& pi,
                const std::vector<float>& rollout, const std::vector<float>& advantages,
                const std::vector<uint8_t>& mask, int threads);
  ~TorchBaseline();

  // The whole batch as one flat tensor. `all_metrics`: everything that Leeway reports for IcePop;
  // otherwise what prime-rl logs (mismatch KLs and masked shares).
  double flat(bool all_metrics);
  // Sequence by sequence, as prime-rl's loss does, with the metrics that prime-rl logs.
  double by_sequence();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace leeway
