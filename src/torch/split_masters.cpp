#include "torch/split_masters.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>

#ifdef LEEWAY_CUDA
#include "cuda/join_floats.h"
#include "torch/cuda_tensors.h"
#endif

namespace leeway {

using at::Tensor;

namespace {

constexpr int64_t kPart = int64_t{1} << 26;  // numbers that are float32 at a time

template <class Each>
void for_parts(int64_t size, Each&& each) {
  for (int64_t begin = 0; begin < size; begin += kPart) {
    each(begin, std::min(kPart, size - begin));
  }
}

// The bits of bf16 numbers as those of float32 ones.
Tensor shifted(const Tensor& high) {
  return high.view(at::kShort).to(at::kInt).bitwise_left_shift_(16);
}

}  // namespace

Tensor joined(const SplitMasters& masters) {
  const at::NoGradGuard guard;
  const Tensor full = at::empty(masters.high.sizes(), masters.high.options().dtype(at::kFloat));
#ifdef LEEWAY_CUDA
  if (full.is_cuda()) {
    cuda::join_floats(data_of(masters.high), masters.low.data_ptr<int16_t>(), full.numel(),
                      full.data_ptr<float>(), stream_of(full));
    return full;
  }
#endif
  for_parts(full.numel(), [&](int64_t begin, int64_t count) {
    const SplitMasters part = masters.part(begin, count);
    full.narrow(0, begin, count).copy_(shifted(part.high).add_(part.low).view(at::kFloat));
  });
  return full;
}

void split(const Tensor& full, const SplitMasters& masters) {
  const at::NoGradGuard guard;
  for_parts(full.numel(), [&](int64_t begin, int64_t count) {
    const SplitMasters part = masters.part(begin, count);
    const Tensor numbers = full.narrow(0, begin, count);
    part.high.copy_(numbers);
    part.low.copy_((numbers.view(at::kInt) - shifted(part.high)).clamp_max_(0x7fff));
  });
}

void copy_to_flat(const FlatLayout& layout, const Parameters& host, const SplitMasters& masters,
                  int64_t first) {
  for_parts(masters.high.numel(), [&](int64_t begin, int64_t count) {
    const Tensor full = at::zeros({count}, masters.high.options().dtype(at::kFloat));
    copy_to_flat_part(layout, host, first + begin, full);
    split(full, masters.part(begin, count));
  });
}

void copy_to_host(const FlatLayout& layout, const SplitMasters& masters, Parameters& host) {
  for_parts(layout.size, [&](int64_t begin, int64_t count) {
    copy_part_to_host(layout, begin, joined(masters.part(begin, count)), host);
  });
}

}  // namespace leeway
