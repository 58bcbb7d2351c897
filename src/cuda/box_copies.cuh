// Copies of a matrix into shared memory by the engine that Hopper has for them, a box at a time,
// with the barriers that say when they are there, and the form in which products of a warpgroup
// find them. What includes this is compiled for sm_90a.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/device.h"

namespace leeway::cuda {

inline constexpr int kBoxBytes = 128;  // of a row of a box

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

__device__ __forceinline__ uint32_t address_of(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}
__device__ __forceinline__ void make_barrier(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void expect_bytes(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void wait_for(uint32_t barrier, int parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain%=:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again%=;\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
// A box of the matrix that begins at an input and a row.
__device__ __forceinline__ void copy_box(uint32_t to, const CUtensorMap& from, int input, int row,
                                         uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4}], [%2];" ::"r"(to),
      "l"(&from), "r"(barrier), "r"(input), "r"(row)
      : "memory");
}
// Rows of 128 bytes whose pieces of 16 bytes are permuted as the copies leave them.
__device__ __forceinline__ uint64_t matrix_at(uint32_t address) {
  constexpr uint64_t kPermuted = uint64_t{1} << 62, kEightRows = uint64_t{1024 / 16} << 32;
  return kPermuted | kEightRows | uint64_t{1} << 16 | (address & 0x3ffff) / 16;
}

#endif

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

inline EncodeTiled encode_tiled() {
  static const EncodeTiled function = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result{};
    check_cuda(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000,
                                                cudaEnableDefault, &result),
               "cuTensorMapEncodeTiled");
    if (found == nullptr) throw Error("CUDA: the driver has no cuTensorMapEncodeTiled");
    return reinterpret_cast<EncodeTiled>(found);
  }();
  return function;
}

// A matrix [rows, inputs] that is copied in boxes of `box_rows` rows and kBoxBytes of inputs.
inline CUtensorMap box_map(CUtensorMapDataType type, size_t number_bytes, const void* matrix,
                           int64_t rows, int64_t inputs, int box_rows) {
  CUtensorMap map;
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(inputs), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(inputs) * number_bytes};
  const cuuint32_t box[2] = {static_cast<cuuint32_t>(kBoxBytes / number_bytes),
                             static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t every[2] = {1, 1};
  const CUresult status =
      encode_tiled()(&map, type, 2, const_cast<void*>(matrix), sizes, strides, box, every,
                     CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                     CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) throw Error("CUDA: a map of a matrix is refused");
  return map;
}

}  // namespace leeway::cuda
