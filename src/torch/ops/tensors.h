// Tensors in the form the core needs: checked, laid out as it reads them where that costs no more
// than a few bytes per token, and kept alive as long as spans of them are in use.
//
// A mistake is torch's ValueError and names the argument, what it must be and what it is; so is an
// Error of the core.
#pragma once

#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "core/cpu/policy_head.h"
#include "leeway/error.h"
#include "leeway/loss.h"
#include "torch/compat.h"

namespace leeway {

// How the head computes; see library.cpp.
struct HeadSettings {
  int64_t chunk_bytes = 0;
  bool invariant = false, float32_logits = false, float32_weight_gradient = false;
};

// Arguments of the head's operators besides hidden states [N, H] and weight [V, H].
struct HeadArguments {
  Tensor targets;              // int64 [N]
  OptionalTensor rows;         // int64 [R], rising
  OptionalTensor temperature;  // float32 [], [1] or [N]
  HeadSettings settings;
};

// Types and shapes of all, on any device.
void check_head_tensors(const Tensor& hidden, const Tensor& weight, const HeadArguments& arguments);

// Arguments of the operators with a loss besides the logprobs. Streams are float32 [N].
struct LossArguments {
  Tensor cu_seqlens;  // int32 or int64 [S + 1], from 0 to N
  Tensor mask;        // bool or uint8 [N]
  Tensor advantages, rollout_logprobs;
  OptionalTensor prox_logprobs, ref_logprobs, teacher_logprobs, weights;
  OptionalTensor versions;  // int32 or int64 [N]
  std::string spec_json;
  double denominator;               // negative: the batch's own
  OptionalTensor rollout_ids = {};  // int32 or int64 [S], equal numbers = samples of one rollout
  // Of the corrections that the caller computes: products of their weights, and of their masks.
  OptionalTensor correction_weights = {};
  OptionalTensor correction_mask = {};  // bool or uint8 [N]
  bool prox_is_pi = false;              // the head's own logprobs are the proximal ones

  bool has_correction() const {
    return correction_weights.has_value() || correction_mask.has_value();
  }
};

// The same for a loss over `tokens` tokens, as `of` (the name of an argument) has it.
void check_loss_tensors(const LossArguments& arguments, int64_t tokens, const char* of);

// On the CPU.
class HeadTensors {
 public:
  HeadTensors(const Tensor& hidden, const Tensor& weight, const HeadArguments& arguments);
  const HeadProblem& problem() const { return problem_; }

 private:
  Tensor hidden_, weight_, targets_, rows_, temperature_;
  HeadProblem problem_;
};

class BatchTensors {
 public:
  BatchTensors(const LossArguments& arguments, int64_t tokens, const char* of);
  // Without `pi`.
  const BatchView<float>& view() const { return view_; }
  std::optional<double> denominator() const { return denominator_; }
  // Of the caller's corrections; empty where not given.
  std::span<const float> correction_weights() const { return correction_weights_; }
  std::span<const uint8_t> correction_mask() const { return correction_mask_; }

 private:
  std::vector<Tensor> held_;
  std::vector<int64_t> offsets_;
  std::vector<int32_t> versions_, rollout_ids_;
  std::span<const float> correction_weights_;
  std::span<const uint8_t> correction_mask_;
  BatchView<float> view_;
  std::optional<double> denominator_;
};

// A float32 tensor [tokens], contiguous.
Tensor checked_stream(const Tensor& values, const char* name, int64_t tokens, const char* of);

std::span<const float> floats_of(const Tensor& values);
std::span<float> writable_floats_of(const Tensor& values);

// A row of metrics, as float64. A mean over a stream that the batch lacks is NaN: only the row
// records that.
Tensor metrics_tensor(const MetricSums& sums, const BatchView<float>& batch);

// The operators' threads, for as long as this lives. Operators have no object to hold a pool, so
// the process has one: created on first use with at::get_num_threads() threads, and recreated when
// that changes. One operator computes at a time; others wait here.
class PoolLease {
 public:
  PoolLease();
  ThreadPool& operator*() const;

 private:
  std::unique_lock<std::mutex> lock_;
};

// What `body` returns, its Error as torch's ValueError.
template <class Body>
auto with_value_errors(Body body) {
  try {
    return body();
  } catch (const Error& error) {
    C10_THROW_ERROR(ValueError, error.what());
  }
}

// Throws if a second derivative is requested: what backward returns is not differentiable.
void refuse_second_derivative(const char* op);

}  // namespace leeway
