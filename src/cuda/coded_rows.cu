#include "cuda/coded_rows.h"

#include <cuda_fp8.h>

#include "base/e4m3.h"
#include "cuda/coded_products.cuh"
#include "cuda/early_launch.cuh"
#include "cuda/row_math.cuh"

namespace leeway::cuda {
namespace {

using Bf16 = __nv_bfloat16;

// A block has a row, a thread eight numbers of it at a time. Those of a norm are the threads of
// rms_norm, whose order of a row's sum follows from their number.
constexpr int kRowThreads = 256, kNormThreads = 128;

template <int kThreads>
__device__ inline float block_max(float x, float* scratch) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) {
    x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, step));
  }
  if (threadIdx.x % kWarp == 0) scratch[threadIdx.x / kWarp] = x;
  __syncthreads();
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < kThreads / kWarp; ++i) largest = fmaxf(largest, scratch[i]);
  return largest;
}

// The row's numbers between two looks at them, in bf16. A thread reads what it has itself written.
__device__ inline Bf16* row_in_shared() {
  extern __shared__ __align__(16) unsigned char memory[];
  return reinterpret_cast<Bf16*>(memory);
}

// Rounds eight numbers, keeps them and returns the largest magnitude. NaN is not the largest.
__device__ inline float keep_eight(const float* values, Bf16* row, float largest) {
  store<8>(values, row);
#pragma unroll
  for (int k = 0; k < 8; ++k) largest = fmaxf(largest, fabsf(rounded<Bf16>(values[k])));
  return largest;
}

// What to_e4m3_row does with the numbers in shared memory.
template <int kThreads>
__device__ inline void write_codes(const Bf16* row, float largest, const CodedRows& to) {
  __shared__ float scratch[kThreads / kWarp];
  largest = block_max<kThreads>(largest, scratch);
  const float scale = fmaxf(__fdiv_rn(largest, kMostE4m3), kLeastE4m3Scale);
  const float inverse = __fdiv_rn(1.0f, scale);
  if (threadIdx.x == 0) to.scales[blockIdx.x] = scale;
  uint8_t* codes = to.codes + blockIdx.x * to.width;
  for (int64_t i = threadIdx.x * 8; i < to.width; i += kThreads * 8) {
    float values[8];
    load<8>(row + i, values);
    uint32_t words[2] = {0, 0};
#pragma unroll
    for (int k = 0; k < 8; k += 2) {
      const float2 two =
          make_float2(__fmul_rn(values[k], inverse), __fmul_rn(values[k + 1], inverse));
      const uint32_t pair = __nv_cvt_float2_to_fp8x2(two, __NV_SATFINITE, __NV_E4M3);
      words[k / 4] |= pair << k % 4 * 8;
    }
    *reinterpret_cast<uint2*>(codes + i) = make_uint2(words[0], words[1]);
  }
}

template <class T>
__global__ void __launch_bounds__(kRowThreads) code_rows_kernel(const T* x, CodedRows to) {
  wait_for_earlier_kernels();
  let_next_kernel_begin();
  Bf16* row = row_in_shared();
  float largest = 0.0f;
  for (int64_t i = threadIdx.x * 8; i < to.width; i += kRowThreads * 8) {
    float values[8];
    load<8>(x + blockIdx.x * to.width + i, values);
    largest = keep_eight(values, row + i, largest);
  }
  write_codes<kRowThreads>(row, largest, to);
}

__global__ void __launch_bounds__(kNormThreads) code_normed_kernel(RmsNorm norm, CodedRows to) {
  __shared__ float scratch[kNormThreads / kWarp];
  wait_for_earlier_kernels();
  let_next_kernel_begin();
  Bf16* row = row_in_shared();
  const int64_t begin = blockIdx.x * to.width;
  const Bf16* x = static_cast<const Bf16*>(norm.x) + begin;
  const Bf16* delta = static_cast<const Bf16*>(norm.delta);
  Bf16* sum = static_cast<Bf16*>(norm.sum);
  Bf16* y = static_cast<Bf16*>(norm.y);
  float squares = 0.0f;
  for (int64_t i = threadIdx.x * 8; i < to.width; i += kNormThreads * 8) {
    float values[8];
    load<8>(x + i, values);
    if (delta != nullptr) {
      float deltas[8];
      load<8>(delta + begin + i, deltas);
#pragma unroll
      for (int k = 0; k < 8; ++k) values[k] = rounded<Bf16>(values[k] + deltas[k]);
    }
    if (sum != nullptr) store<8>(values, sum + begin + i);
    store<8>(values, row + i);
    squares = add_squares<8>(values, squares);
  }
  squares = block_sum<kNormThreads>(squares, scratch);
  const float inverse = inverse_norm(squares, to.width, norm.eps);
  float largest = 0.0f;
  for (int64_t i = threadIdx.x * 8; i < to.width; i += kNormThreads * 8) {
    float values[8], weights[8];
    load<8>(row + i, values);
    load<8>(static_cast<const Bf16*>(norm.weight) + i, weights);
#pragma unroll
    for (int k = 0; k < 8; ++k) values[k] = normed<Bf16>(values[k], inverse, weights[k]);
    if (y != nullptr) store<8>(values, y + begin + i);
    largest = keep_eight(values, row + i, largest);
  }
  write_codes<kNormThreads>(row, largest, to);
}

__global__ void __launch_bounds__(kRowThreads)
    code_gated_kernel(const Bf16* gate_up, Bf16* s, CodedRows to) {
  wait_for_earlier_kernels();
  let_next_kernel_begin();
  Bf16* row = row_in_shared();
  const Bf16* gates = gate_up + blockIdx.x * 2 * to.width;
  float largest = 0.0f;
  for (int64_t i = threadIdx.x * 8; i < to.width; i += kRowThreads * 8) {
    float gate[8], up[8];
    load<8>(gates + i, gate);
    load<8>(gates + to.width + i, up);
#pragma unroll
    for (int k = 0; k < 8; ++k) gate[k] = gated<Bf16>(gate[k], up[k]);
    if (s != nullptr) store<8>(gate, s + blockIdx.x * to.width + i);
    largest = keep_eight(gate, row + i, largest);
  }
  write_codes<kRowThreads>(row, largest, to);
}

__global__ void __launch_bounds__(kRowThreads) scale_products_kernel(ScaledProducts scaled) {
  wait_for_earlier_kernels();
  let_next_kernel_begin();
  const int64_t row = blockIdx.x;
  const float row_scale = scaled.row_scales[row];
  for (int64_t i = threadIdx.x; i < scaled.outputs; i += kRowThreads) {
    const float product = scaled_product(scaled.products[row * scaled.outputs + i], row_scale,
                                         scaled.output_scales[i]);
    static_cast<Bf16*>(scaled.y)[row * scaled.y_stride + i] =
        narrow<Bf16>(with_bias(product, static_cast<const Bf16*>(scaled.bias), i));
  }
}

// A block for each row, with its numbers in shared memory.
template <class Kernel, class... Arguments>
void launch_rows(Kernel* kernel, int threads, const CodedRows& to, cudaStream_t stream,
                 const Arguments&... arguments) {
  if (to.rows == 0) return;
  constexpr size_t kAlwaysThere = size_t{40} << 10;  // beside what the kernels have of it
  const size_t bytes = static_cast<size_t>(to.width) * sizeof(Bf16);
  if (bytes > kAlwaysThere) {
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(bytes)),
               "a row in shared memory");
  }
  launch_early(kernel, static_cast<unsigned>(to.rows), threads, bytes, stream, arguments..., to);
  check_launch("rows as codes");
}

}  // namespace

void code_rows(Dtype dtype, const void* x, const CodedRows& to, cudaStream_t stream) {
  with_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    launch_rows(code_rows_kernel<T>, kRowThreads, to, stream, static_cast<const T*>(x));
  });
}

void code_normed_rows(const RmsNorm& norm, const CodedRows& to, cudaStream_t stream) {
  launch_rows(code_normed_kernel, kNormThreads, to, stream, norm);
}

void code_gated_rows(const void* gate_up, void* s, const CodedRows& to, cudaStream_t stream) {
  launch_rows(code_gated_kernel, kRowThreads, to, stream, static_cast<const Bf16*>(gate_up),
              static_cast<Bf16*>(s));
}

void scale_products(const ScaledProducts& scaled, cudaStream_t stream) {
  if (scaled.rows == 0) return;
  launch_early(scale_products_kernel, static_cast<unsigned>(scaled.rows), kRowThreads, 0, stream,
               scaled);
  check_launch("scale_products");
}

}  // namespace leeway::cuda
