#include "cuda/selection.h"

#include <algorithm>
#include <cub/device/device_radix_sort.cuh>
#include <cub/device/device_scan.cuh>

#include "cuda/device.h"
#include "cuda/loss.h"
#include "cuda/team.cuh"

namespace leeway::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kMost = 256;  // blocks whose sums are joined by one

int blocks_for(int64_t tokens) {
  return static_cast<int>(std::max<int64_t>(1, (tokens + kThreads - 1) / kThreads));
}

// Keys of tokens that do not take part are infinite and come last.
__global__ void m2_keys(LossPlan plan, LossBatch batch, double* keys, int32_t* order) {
  const int64_t i = int64_t{kThreads} * blockIdx.x + threadIdx.x;
  if (i >= batch.tokens) return;
  const double x = static_cast<double>(batch.streams[static_cast<int>(Stream::rollout)][i]) -
                   batch.streams[static_cast<int>(Stream::prox)][i];
  keys[i] = participates(plan, batch, i) ? x * x : INFINITY;
  order[i] = static_cast<int32_t>(i);
}

// How many of the sorted keys are finite.
__device__ int64_t finite_keys(const double* keys, int64_t tokens) {
  int64_t low = 0, high = tokens;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (keys[middle] < INFINITY) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// Means of the k smallest grow with k: the largest k below the threshold is found by halving. If
// there is none the smallest stays alone.
__global__ void m2_drop(LossPlan plan, int64_t tokens, const double* keys, const double* sums,
                        const int32_t* order, uint8_t* flags) {
  __shared__ int64_t bounds[2];
  if (threadIdx.x == 0) {
    const int64_t n = finite_keys(keys, tokens);
    int64_t kept = 0, end = n;
    while (kept < end) {
      const int64_t middle = kept + (end - kept + 1) / 2;
      if (sums[middle - 1] / static_cast<double>(middle) < plan.m2_threshold) {
        kept = middle;
      } else {
        end = middle - 1;
      }
    }
    bounds[0] = kept == 0 && n > 0 ? 1 : kept;
    bounds[1] = n;
  }
  __syncthreads();
  const int64_t k = int64_t{kThreads} * blockIdx.x + threadIdx.x;
  if (k >= bounds[0] && k < bounds[1]) flags[order[k]] = kPolicyDropped | kPenaltyDropped;
}

// [blocks, 3]: trained tokens, their advantages and log-probabilities.
__global__ void covariance_sums(LossBatch batch, const uint8_t* trained, double* sums) {
  __shared__ double shared[kThreads / 32];
  Team<kThreads> team(shared);
  double n = 0.0, advantage = 0.0, log_pi = 0.0;
  for (int64_t i = int64_t{kThreads} * blockIdx.x + threadIdx.x; i < batch.tokens;
       i += int64_t{kThreads} * gridDim.x) {
    if (!trained[i]) continue;
    n += 1.0;
    advantage += batch.advantages[i];
    log_pi += batch.streams[static_cast<int>(Stream::pi)][i];
  }
  n = team.sum(n);
  advantage = team.sum(advantage);
  log_pi = team.sum(log_pi);
  if (threadIdx.x != 0) return;
  sums[3 * blockIdx.x] = n;
  sums[3 * blockIdx.x + 1] = advantage;
  sums[3 * blockIdx.x + 2] = log_pi;
}

__global__ void covariance_keys(LossBatch batch, const uint8_t* trained, const double* sums,
                                int sum_blocks, double* keys, int32_t* order) {
  __shared__ double mean[2];
  if (threadIdx.x == 0) {
    double n = 0.0, advantage = 0.0, log_pi = 0.0;
    for (int b = 0; b < sum_blocks; ++b) {
      n += sums[3 * b];
      advantage += sums[3 * b + 1];
      log_pi += sums[3 * b + 2];
    }
    mean[0] = advantage / fmax(n, 1.0);
    mean[1] = log_pi / fmax(n, 1.0);
  }
  __syncthreads();
  const int64_t i = int64_t{kThreads} * blockIdx.x + threadIdx.x;
  if (i >= batch.tokens) return;
  keys[i] = trained[i] ? -(batch.advantages[i] - mean[0]) *
                             (batch.streams[static_cast<int>(Stream::pi)][i] - mean[1])
                       : INFINITY;
  order[i] = static_cast<int32_t>(i);
}

__global__ void covariance_select(LossPlan plan, int64_t tokens, const double* keys,
                                  const int32_t* order, uint8_t* flags) {
  __shared__ int64_t count;
  if (threadIdx.x == 0) {
    const int64_t n = finite_keys(keys, tokens);
    const int64_t wanted = static_cast<int64_t>(plan.covariance_ratio * static_cast<double>(n));
    count = min(n, max(int64_t{1}, wanted));
  }
  __syncthreads();
  const int64_t k = int64_t{kThreads} * blockIdx.x + threadIdx.x;
  if (k < count) flags[order[k]] |= kSelected;
}

void sort(const LossWorkspace& work, int64_t tokens, cudaStream_t stream) {
  size_t bytes = static_cast<size_t>(work.sorting_bytes);
  check_cuda(cub::DeviceRadixSort::SortPairs(work.sorting, bytes, work.keys, work.sorted_keys,
                                             work.order, work.sorted_order, tokens, 0, 64, stream),
             "sorting tokens");
}

}  // namespace

int64_t sorting_bytes(int64_t tokens) {
  const double* keys = nullptr;
  double* sorted_keys = nullptr;
  const int32_t* order = nullptr;
  int32_t* sorted_order = nullptr;
  size_t sort = 0, scan = 0;
  check_cuda(cub::DeviceRadixSort::SortPairs(nullptr, sort, keys, sorted_keys, order, sorted_order,
                                             tokens),
             "sorting tokens");
  check_cuda(cub::DeviceScan::InclusiveSum(nullptr, scan, keys, sorted_keys, tokens),
             "summing moments");
  return static_cast<int64_t>(std::max(sort, scan)) + 256;
}

void select_m2(const LossPlan& plan, const LossBatch& batch, const LossWorkspace& work,
               cudaStream_t stream) {
  const int blocks = blocks_for(batch.tokens);
  m2_keys<<<blocks, kThreads, 0, stream>>>(plan, batch, work.keys, work.order);
  check_launch("m2_keys");
  sort(work, batch.tokens, stream);
  size_t bytes = static_cast<size_t>(work.sorting_bytes);
  check_cuda(cub::DeviceScan::InclusiveSum(work.sorting, bytes, work.sorted_keys, work.moments,
                                           batch.tokens, stream),
             "summing moments");
  m2_drop<<<blocks, kThreads, 0, stream>>>(plan, batch.tokens, work.sorted_keys, work.moments,
                                           work.sorted_order, work.prepared.flags);
  check_launch("m2_drop");
}

void select_covariance(const LossPlan& plan, const LossBatch& batch, const LossWorkspace& work,
                       cudaStream_t stream) {
  const int blocks = blocks_for(batch.tokens), sum_blocks = std::min(blocks, kMost);
  const uint8_t* trained = work.prepared.trained;
  covariance_sums<<<sum_blocks, kThreads, 0, stream>>>(batch, trained, work.moments);
  check_launch("covariance_sums");
  covariance_keys<<<blocks, kThreads, 0, stream>>>(batch, trained, work.moments, sum_blocks,
                                                   work.keys, work.order);
  check_launch("covariance_keys");
  sort(work, batch.tokens, stream);
  covariance_select<<<blocks, kThreads, 0, stream>>>(plan, batch.tokens, work.sorted_keys,
                                                     work.sorted_order, work.prepared.flags);
  check_launch("covariance_select");
}

}  // namespace leeway::cuda
