#include "cuda/kv_pages.h"

#include "cuda/device.h"

namespace leeway::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void copy_pages_kernel(uint4* pages, int64_t store_words, int64_t page_words,
                                  const int32_t* pairs) {
  uint4* store = pages + blockIdx.y * store_words;
  const uint4* from = store + pairs[2 * blockIdx.x] * page_words;
  uint4* to = store + pairs[2 * blockIdx.x + 1] * page_words;
  for (int64_t i = threadIdx.x; i < page_words; i += kThreads) to[i] = from[i];
}

}  // namespace

void copy_pages(void* pages, int64_t stores, int64_t store_bytes, int64_t page_bytes,
                const int32_t* pairs, int64_t count, cudaStream_t stream) {
  if (count == 0) return;
  constexpr auto kWord = static_cast<int64_t>(sizeof(uint4));
  const dim3 grid(static_cast<unsigned>(count), static_cast<unsigned>(stores));
  copy_pages_kernel<<<grid, kThreads, 0, stream>>>(static_cast<uint4*>(pages), store_bytes / kWord,
                                                   page_bytes / kWord, pairs);
  check_launch("copy_pages");
}

}  // namespace leeway::cuda
