// A block has 64 or 128 rows and kOutputs outputs. One warp queues copies of the next inputs, 64 at
// a time, into a ring of stages; a warpgroup for each 64 rows multiplies what is there.

#include "cuda/few_row_products.h"

#include <algorithm>

#include "cuda/row_math.cuh"
#include "cuda/stage_ring.cuh"

namespace leeway::cuda {
namespace {

using Bf16 = __nv_bfloat16;

constexpr int kDepth = 64;              // inputs of a stage
constexpr int kDepthBytes = kBoxBytes;  // of a row
constexpr int kGroupRows = 64, kGroupThreads = 128;

// ---------------------------------------------------------------------------------------------
// Products that have no other spelling

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// c [64, n] += a [64, 16] b [n, 16]^T, in rows and columns as mma.m16n8k16 has them: a warp has 16
// rows, a lane rows lane / 4 and 8 further, columns 8 i + 2 (lane % 4) and the next.
__device__ __forceinline__ void multiply_add(float (&c)[16], uint64_t a, uint64_t b) {
  asm volatile(
      "{\n.reg .pred keep;\nsetp.eq.u32 keep, 0, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, "
      "%12, %13, %14, %15}, "
      "%16, %17, keep, 1, 1, 0, 0;\n}"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]),
        "+f"(c[7]), "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]),
        "+f"(c[14]), "+f"(c[15])
      : "l"(a), "l"(b));
}
__device__ __forceinline__ void multiply_add(float (&c)[32], uint64_t a, uint64_t b) {
  asm volatile(
      "{\n.reg .pred keep;\nsetp.eq.u32 keep, 0, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, "
      "%12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "
      "%24, %25, %26, %27, %28, %29, %30, %31}, "
      "%32, %33, keep, 1, 1, 0, 0;\n}"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]),
        "+f"(c[7]), "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]),
        "+f"(c[14]), "+f"(c[15]), "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]),
        "+f"(c[21]), "+f"(c[22]), "+f"(c[23]), "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]),
        "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31])
      : "l"(a), "l"(b));
}
__device__ __forceinline__ void multiply_add(float (&c)[48], uint64_t a, uint64_t b) {
  asm volatile(
      "{\n.reg .pred keep;\nsetp.eq.u32 keep, 0, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, "
      "%12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "
      "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, "
      "%36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47}, "
      "%48, %49, keep, 1, 1, 0, 0;\n}"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]),
        "+f"(c[7]), "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]),
        "+f"(c[14]), "+f"(c[15]), "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]),
        "+f"(c[21]), "+f"(c[22]), "+f"(c[23]), "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]),
        "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31]), "+f"(c[32]), "+f"(c[33]), "+f"(c[34]),
        "+f"(c[35]), "+f"(c[36]), "+f"(c[37]), "+f"(c[38]), "+f"(c[39]), "+f"(c[40]), "+f"(c[41]),
        "+f"(c[42]), "+f"(c[43]), "+f"(c[44]), "+f"(c[45]), "+f"(c[46]), "+f"(c[47])
      : "l"(a), "l"(b));
}

#endif

// ---------------------------------------------------------------------------------------------

struct Product {
  int rows, inputs, outputs;  // outputs: of y
  const Bf16* bias;
  Bf16* y;
  int64_t y_stride;
};

// kGated: the first half of a block's outputs are gates, the second what they are for.
template <int kGroups, int kOutputs, int kStages, bool kGated>
__global__ void __launch_bounds__(kGroups* kGroupThreads + kWarp)
    product_kernel(const __grid_constant__ CUtensorMap x,
                   const __grid_constant__ CUtensorMap weight, Product product) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // empty elsewhere: has_few_row_kernel sees it
  constexpr int kRows = kGroups * kGroupRows, kOwn = kGated ? kOutputs / 2 : kOutputs;
  constexpr int kXBytes = kRows * kDepthBytes, kStageBytes = kXBytes + kOutputs * kDepthBytes;
  extern __shared__ char shared[];
  __shared__ StageRing<kStages> ring;
  const uint32_t stages = (address_of(shared) + 1023) / 1024 * 1024;
  const int first_output = static_cast<int>(blockIdx.x) * kOwn;
  const int first_row = static_cast<int>(blockIdx.y) * kRows;
  const int steps = (product.inputs + kDepth - 1) / kDepth;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;

  ring.make(kGroups);
  let_next_kernel_begin();

  if (warp == kGroups * kGroupThreads / kWarp) {
    const auto queue_weight = [&](int step, int stage) {
      const uint32_t to = stages + stage * kStageBytes + kXBytes;
      expect_bytes(ring.full(stage), kStageBytes);
      copy_box(to, weight, step * kDepth, first_output, ring.full(stage));
      if constexpr (kGated) {
        copy_box(to + kOwn * kDepthBytes, weight, step * kDepth, product.outputs + first_output,
                 ring.full(stage));
      }
    };
    const auto queue_x = [&](int step, int stage) {
      copy_box(stages + stage * kStageBytes, x, step * kDepth, first_row, ring.full(stage));
    };
    if (lane == 0) ring.fill(steps, queue_weight, queue_x);
  } else {
    const int group = warp * kWarp / kGroupThreads;
    float sums[kOutputs / 2];
#pragma unroll
    for (float& sum : sums) sum = 0.0f;
    for (int step = 0; step < steps; ++step) {
      const int stage = step % kStages;
      wait_for(ring.full(stage), step / kStages % 2);
      const uint32_t at = stages + stage * kStageBytes;
      const uint64_t a = matrix_at(at + group * kGroupRows * kDepthBytes);
      const uint64_t b = matrix_at(at + kXBytes);
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
      for (int k = 0; k < kDepth / 16; ++k) multiply_add(sums, a + 2 * k, b + 2 * k);
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
      if (step > 0 && threadIdx.x % kGroupThreads == 0) arrive(ring.empty((step - 1) % kStages));
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
    for (float& sum : sums) asm volatile("" : "+f"(sum)::"memory");

#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = first_row + warp * 16 + r * 8 + lane / 4;
      if (row >= product.rows) continue;
#pragma unroll
      for (int n = 0; n < kOwn / 8; ++n) {
        const int output = first_output + n * 8 + lane % 4 * 2;
        if (output >= product.outputs) continue;
        float low = sums[n * 4 + r * 2], high = sums[n * 4 + r * 2 + 1];
        if constexpr (kGated) {
          constexpr int kUp = kOwn / 2;
          low = gated<Bf16>(rounded<Bf16>(low), rounded<Bf16>(sums[kUp + n * 4 + r * 2]));
          high = gated<Bf16>(rounded<Bf16>(high), rounded<Bf16>(sums[kUp + n * 4 + r * 2 + 1]));
        } else if (product.bias != nullptr) {
          low += wide(product.bias[output]), high += wide(product.bias[output + 1]);
        }
        *reinterpret_cast<__nv_bfloat162*>(product.y + row * product.y_stride + output) =
            __floats2bfloat162_rn(low, high);
      }
    }
  }
#endif
}

// ---------------------------------------------------------------------------------------------
// Launches

// A matrix [rows, inputs] that is copied in boxes of `box_rows` rows.
CUtensorMap map_of(const void* matrix, int64_t rows, int64_t inputs, int box_rows) {
  return box_map(CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, sizeof(Bf16), matrix, rows, inputs, box_rows);
}

template <int kGroups, int kOutputs, int kStages, bool kGated>
void launch(const Projection& p, cudaStream_t stream) {
  constexpr int kRows = kGroups * kGroupRows, kOwn = kGated ? kOutputs / 2 : kOutputs;
  constexpr int kBytes = kStages * (kRows + kOutputs) * kDepthBytes + 1024;
  auto* kernel = product_kernel<kGroups, kOutputs, kStages, kGated>;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes),
             "products of few rows, shared memory");
  Product product{};
  product.rows = static_cast<int>(p.rows), product.inputs = static_cast<int>(p.inputs);
  product.outputs = static_cast<int>(kGated ? p.outputs / 2 : p.outputs);
  product.bias = static_cast<const Bf16*>(p.bias);
  product.y = static_cast<Bf16*>(p.y);
  product.y_stride = !kGated && p.y_stride > 0 ? p.y_stride : product.outputs;
  const dim3 grid(blocks_for(product.outputs, kOwn), blocks_for(p.rows, kRows));
  launch_early(kernel, grid, kGroups * kGroupThreads + kWarp, size_t{kBytes}, stream,
               map_of(p.x, p.rows, p.inputs, kRows), map_of(p.weight, p.outputs, p.inputs, kOwn),
               product);
  check_launch("products of few rows");
}

// Rows and outputs of a block whose inputs are read, times the number of times that all
// multiprocessors are filled with blocks: what a product takes per input.
int64_t cost_of(const Projection& p, int groups, int outputs) {
  const int64_t blocks = static_cast<int64_t>(blocks_for(p.outputs, outputs)) *
                         blocks_for(p.rows, groups * kGroupRows);
  const int64_t waves = (blocks + multiprocessors() - 1) / multiprocessors();
  return waves * (groups * kGroupRows + outputs);
}

struct Costs {
  int64_t small, medium, large;
  int64_t least() const { return std::min(small, std::min(medium, large)); }
};
Costs costs_of(const Projection& p) {
  return {cost_of(p, 1, 32), cost_of(p, 1, 64), cost_of(p, 2, 64)};
}
Costs gated_costs_of(const Projection& p) {
  return {cost_of(p, 1, 64), cost_of(p, 1, 96), cost_of(p, 2, 96)};
}

// Up to 128 rows cuBLASLt may have nothing good without splitting the inputs (70 us where this
// takes 9); beyond, it is the faster one of the two for all but small products. Gated ones take as
// long as cuBLASLt's with swiglu behind it, and the kernels before and after them begin early.
constexpr int64_t kAlwaysRows = 128, kMostCost = 150'000, kMostGatedCost = 230'000;

bool pays(const Projection& p, const Costs& costs, int64_t most_cost) {
  return p.rows <= kAlwaysRows || (p.rows <= kMostFewRows && costs.least() * p.inputs <= most_cost);
}

bool aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

bool takes(const Projection& p) {
  // The device has loaded code of sm_90a if the kernel has its barriers.
  static const bool loaded = [] {
    cudaFuncAttributes attributes{};
    const cudaError_t status = cudaFuncGetAttributes(&attributes, product_kernel<1, 32, 8, false>);
    if (status != cudaSuccess) cudaGetLastError();  // no code for this device at all
    return status == cudaSuccess && attributes.sharedSizeBytes > 0;
  }();
  return loaded && p.x_scales == nullptr && p.rows <= kMostFewRows && !p.weight_by_inputs &&
         p.type == Dtype::bf16 && p.y_type == Dtype::bf16 && p.inputs % 8 == 0 &&
         p.outputs % 8 == 0 && p.y_stride % 2 == 0 && aligned(p.x) && aligned(p.weight) &&
         aligned(p.y);
}

}  // namespace

bool has_few_row_kernel(const Projection& p) { return takes(p) && pays(p, costs_of(p), kMostCost); }
bool has_gated_few_row_kernel(const Projection& p) {
  return takes(p) && p.bias == nullptr && pays(p, gated_costs_of(p), kMostGatedCost);
}

void project_few_rows(const Projection& p, cudaStream_t stream) {
  if (p.rows == 0) return;
  const Costs costs = costs_of(p);
  if (costs.small == costs.least()) {
    launch<1, 32, 8, false>(p, stream);
  } else if (costs.medium == costs.least()) {
    launch<1, 64, 8, false>(p, stream);
  } else {
    launch<2, 64, 6, false>(p, stream);
  }
}

void project_few_rows_gated(const Projection& p, cudaStream_t stream) {
  if (p.rows == 0) return;
  const Costs costs = gated_costs_of(p);
  if (costs.small == costs.least()) {
    launch<1, 64, 8, true>(p, stream);
  } else if (costs.medium == costs.least()) {
    launch<1, 96, 6, true>(p, stream);
  } else {
    launch<2, 96, 5, true>(p, stream);
  }
}

}  // namespace leeway::cuda
