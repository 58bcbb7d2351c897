// The gradient of causal attention over packed sequences of any lengths, in bf16, by cuDNN. Only
// where the build has cuDNN (LEEWAY_CUDNN).
//
// cuDNN prepares a plan for each shape, which takes it tens of milliseconds. Plans are made for
// rounded shapes, and sequences that a batch has fewer of are empty ones, so that few come up in a
// run. Sums over keys and queries are added in an order that differs from call to call.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <tuple>

#include "cuda/kv_pages.h"

namespace leeway::cuda {

// Arrays are bf16 and 16-byte aligned; contiguous, but for the values.
struct AttentionGradient {
  HeadSizes sizes;
  int64_t rows = 0, sequences = 0, longest = 0;
  // [sequences], on the device: the first row and the rows of each; best the longest first.
  const int32_t *first_rows = nullptr, *lengths = nullptr;
  const void *q = nullptr, *k = nullptr;  // [rows, heads, head_dim]
  const void* v = nullptr;
  int64_t v_stride = 0;                                 // numbers from row to row, a multiple of 8
  const void *out = nullptr, *d_out = nullptr;          // as q
  const float* lse = nullptr;                           // [rows, query_heads], natural
  void *d_q = nullptr, *d_k = nullptr, *d_v = nullptr;  // as q and k
};

// What a plan is made for: at least what was asked for.
struct AttentionPlanShape {
  int64_t sequences, longest, rows;
  auto operator<=>(const AttentionPlanShape&) const = default;
};
AttentionPlanShape plan_shape(int64_t sequences, int64_t longest, int64_t rows);

// An instance belongs to one thread at a time and to one device.
class AttentionGradients {
 public:
  AttentionGradients();
  ~AttentionGradients();
  AttentionGradients(const AttentionGradients&) = delete;
  AttentionGradients& operator=(const AttentionGradients&) = delete;

  // The bytes that `run` needs, or nothing where cuDNN has no plan for such sizes. Pointers are not
  // looked at.
  std::optional<int64_t> workspace_bytes(const AttentionGradient& problem);
  // With a workspace of that many bytes, 256-byte aligned.
  void run(const AttentionGradient& problem, void* workspace, cudaStream_t stream);

 private:
  struct Plan;
  using Key = std::tuple<AttentionPlanShape, int64_t, int64_t, int64_t, int64_t>;
  const Plan* plan_of(const AttentionGradient& problem);

  struct Handle;
  std::unique_ptr<Handle> handle_;              // made for the first plan
  std::map<Key, std::unique_ptr<Plan>> plans_;  // null: cuDNN has none
};

}  // namespace leeway::cuda
