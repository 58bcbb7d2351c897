// Products with a model's matrices on a CUDA device, by cuBLASLt. A row of a result has the same
// bits however many rows are computed with it and whatever its result's type is rounded from:
// elements are sums over the inputs in one order, in float32, rounded once. cuBLAS holds to that as
// long as it does not split the inputs among blocks, so algorithms that do are excluded; and as
// long as `inputs` and `outputs` are multiples of 8, beside which it has kernels of another order.
//
// An instance belongs to one thread at a time and to one stream, which its workspace is ordered by.
#pragma once

#include <cublasLt.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <map>
#include <tuple>

#include "cuda/dtype.h"

namespace leeway::cuda {

// y [rows, outputs] = x [rows, inputs] weight^T + bias. x and weight are of `type`, bias of y's.
struct Projection {
  Dtype type = Dtype::bf16, y_type = Dtype::bf16;
  int64_t rows = 0, inputs = 0, outputs = 0;
  const void* x = nullptr;
  const void* weight = nullptr;  // [outputs, inputs]
  const void* bias = nullptr;    // [outputs]; may be null
  void* y = nullptr;
  int64_t y_stride = 0;  // numbers from row to row; 0: `outputs`
};

class Products {
 public:
  Products();
  ~Products();
  Products(const Products&) = delete;
  Products& operator=(const Products&) = delete;

  // Throws Error if cuBLASLt has no algorithm that does not split the inputs.
  void project(const Projection& projection, cudaStream_t stream);

 private:
  struct Plan;
  void multiply(const Projection& projection, cudaStream_t stream);
  // Types, sizes, y's stride, whether there is a bias, and the alignment of the four arrays.
  using Key = std::tuple<int, int, int64_t, int64_t, int64_t, int64_t, bool, int, int, int, int>;
  const Plan& plan_of(const Projection& projection);

  cublasLtHandle_t handle_ = nullptr;
  void* workspace_ = nullptr;
  void* pair_ = nullptr;  // two rows of x and of y
  size_t pair_bytes_ = 0;
  std::map<Key, Plan> plans_;
};

}  // namespace leeway::cuda
