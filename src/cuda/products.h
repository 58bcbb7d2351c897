// Products with a model's matrices on a CUDA device, in bf16 or of e4m3 codes, by cuBLASLt. A row
// of a result has the same bits however many rows are computed with it and whatever its result's
// type is rounded from: elements are sums over the inputs in one order, in float32, rounded once.
// cuBLAS holds to that as long as it does not split the inputs among blocks, so algorithms that do
// are excluded; and as long as `inputs` and `outputs` are multiples of 8, beside which it has
// kernels of another order. Among the algorithms that are left, all of which give the same bits,
// the fastest of a few is taken for large products, by a trial before the first of a size.
//
// Products of codes have a kernel of their own where the device has what it needs
// (coded_products.h). Elsewhere one algorithm of cuBLASLt makes those of a matrix for all numbers
// of rows.
//
// An instance belongs to one thread at a time and to one stream, which its workspace is ordered by.
#pragma once

#include <cublasLt.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <map>
#include <tuple>
#include <vector>

#include "cuda/dtype.h"

namespace leeway::cuda {

// y [rows, outputs] = x [rows, inputs] weight^T + bias. x and weight are of `type`, bias of y's.
struct Projection {
  Dtype type = Dtype::bf16, y_type = Dtype::bf16;
  int64_t rows = 0, inputs = 0, outputs = 0;
  const void* x = nullptr;
  const void* weight = nullptr;  // [outputs, inputs]; [inputs, outputs] if weight_by_inputs
  bool weight_by_inputs = false;
  const void* bias = nullptr;  // [outputs]; may be null
  void* y = nullptr;
  int64_t y_stride = 0;  // numbers from row to row; 0: `outputs`
  // Not null: x and weight are e4m3 codes, each row of which has its scale (base/e4m3.h). `type` is
  // not read, the weight is by outputs, y is bf16; inputs and outputs are multiples of 16.
  const float* x_scales = nullptr;       // [rows]
  const float* weight_scales = nullptr;  // [outputs]
};

class Products {
 public:
  Products();
  ~Products();
  Products(const Products&) = delete;
  Products& operator=(const Products&) = delete;

  // Throws Error if cuBLASLt has no algorithm that does not split the inputs.
  void project(const Projection& projection, cudaStream_t stream);
  // The next product is on another stream; work on the one before has ended. Algorithms are chosen
  // again, for the multiprocessors that the new one has.
  void change_stream();
  // A product of codes by cuBLASLt, whatever kernels there are: for devices without, and for tests.
  void project_codes_by_library(const Projection& projection, cudaStream_t stream);

 private:
  struct Plan;
  void multiply(const Projection& projection, cudaStream_t stream);
  void multiply_one_row(const Projection& projection, cudaStream_t stream);
  bool library_scales(cudaStream_t stream);
  // Types, sizes, y's stride, whether there is a bias, the weight's layout, and the alignment of
  // the four arrays. Algorithms are tried once for rows up to a power of two.
  using Key =
      std::tuple<int, int, int64_t, int64_t, int64_t, int64_t, bool, bool, int, int, int, int>;
  Key key_of(const Projection& projection) const;
  const Plan& plan_of(const Projection& projection, cudaStream_t stream);
  void describe(const Projection& projection, Plan& plan) const;
  std::vector<cublasLtMatmulAlgo_t> algorithms_of(const Key& key, const Plan& plan);
  void choose_for_codes(const Key& key, const Projection& projection, Plan& plan);
  bool accepts(const Plan& plan, const cublasLtMatmulAlgo_t& algorithm);
  void run(const Plan& plan, const cublasLtMatmulAlgo_t& algorithm, const Projection& projection,
           cudaStream_t stream);
  bool choose_tried(const Key& key, const Projection& projection, Plan& plan);
  void reserve(void*& place, size_t& bytes, size_t wanted, cudaStream_t stream);
  void try_algorithms(const Key& key, const std::vector<cublasLtMatmulAlgo_t>& algorithms,
                      const Projection& projection, Plan& plan, cudaStream_t stream);

  cublasLtHandle_t handle_ = nullptr;
  int32_t multiprocessors_ = 0;  // of the stream, if it has not all
  void* workspace_ = nullptr;
  void* pair_ = nullptr;  // two rows of x and of y
  std::vector<void*> old_places_;
  size_t pair_bytes_ = 0;
  // Whether cuBLASLt multiplies products of codes by their scales: known after the first. Where it
  // does not, they are in float32 in `wide_` before a kernel does.
  enum class Scales { unknown, by_library, apart } scales_ = Scales::unknown;
  void* wide_ = nullptr;
  size_t wide_bytes_ = 0;
  std::map<Key, Plan> plans_;
  std::map<Key, cublasLtMatmulAlgo_t> tried_;  // the fastest; rows are a power of two
};

}  // namespace leeway::cuda
