// The float32 implementation of the loss algebra for CPUs: SIMD, threaded, deterministic.
#pragma once

#include <memory>
#include <optional>
#include <span>

#include "leeway/loss.h"
#include "leeway/metrics.h"

namespace leeway {

// Evaluates any spec on float32 batches. Results depend on the batch and the SIMD level, not on the
// number of threads. Buffers grow to the largest batch so far and are reused: a call of the same
// size as an earlier one does not allocate (except for the extensions that sort the batch). One
// call at a time per object.
class Evaluator {
 public:
  // `threads` counts the caller; 0 means one per core.
  explicit Evaluator(int threads = 0);
  ~Evaluator();
  Evaluator(Evaluator&&) noexcept;
  Evaluator& operator=(Evaluator&&) noexcept;

  // Returns the loss and writes d loss / d log pi to `grad` ([N], zero where a token takes no
  // part). Without `denominator` the batch's own is used. `metrics`, if given, is added to, and
  // `kept` [N], which may come with it, is written: 1 where a token's policy term carries gradient.
  // Throws Error as evaluate_reference does; the content of `grad` is then undefined.
  double evaluate(const LossSpec& spec, const BatchView<float>& batch, std::span<float> grad,
                  std::optional<double> denominator = {}, MetricSums* metrics = nullptr,
                  std::span<uint8_t> kept = {});

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// The SIMD levels that this machine supports, best first ("AVX3", "AVX2", "SSE4", ..), and a scope
// that pins evaluation to one of them, for tests. Pins are process-wide: do not nest or run in
// parallel.
std::vector<std::string> simd_levels();
class PinSimdLevel {
 public:
  explicit PinSimdLevel(const std::string& level);
  ~PinSimdLevel();
  PinSimdLevel(const PinSimdLevel&) = delete;
  PinSimdLevel& operator=(const PinSimdLevel&) = delete;
};

}  // namespace leeway
