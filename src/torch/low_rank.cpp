#include "torch/low_rank.h"

#include <fmt/format.h>

#include <vector>

#include "leeway/error.h"
#include "model/gpu_sizes.h"
#include "torch/training_operations.h"

#ifdef LEEWAY_CUDA
#include "cuda/low_rank.h"
#include "torch/cuda_tensors.h"
#endif

namespace leeway {

using at::Tensor;

namespace {

// The columns of x a^T that belong to part i.
Tensor columns_of(const LowRankStack& stack, const Tensor& low, size_t i) {
  const int64_t rank = stack.parts[i].b.size(1);
  return low.narrow(1, static_cast<int64_t>(i) * rank, rank);
}

}  // namespace

void check_rank(int64_t rank, at::Device device) {
  if (!device.is_cuda()) return;
  if (const std::string why = why_gpu_takes_no_rank(rank); !why.empty()) throw Error(why);
}

void add_low_rank(cuda::Products* products, const LowRankStack& stack, double scale,
                  const Tensor& x, Tensor& low, Tensor& y) {
  if (!stack.a.defined()) return;
  project(products, x, stack.a.t(), Tensor(), low);
#ifdef LEEWAY_CUDA
  if (y.is_cuda() && y.scalar_type() == at::kBFloat16) {
    static_assert(kMostLowRankParts <= cuda::kMostLowRankParts);
    cuda::LowRankUpdate update;
    update.rows = x.size(0), update.rank = stack.parts[0].b.size(1);
    update.scale = static_cast<float>(scale);
    for (const LowRankStack::Part& part : stack.parts) {
      update.part[update.parts++] = {part.first, part.outputs, data_of(part.b)};
    }
    update.low = data_of(low);
    update.y = data_of(y), update.y_stride = y.stride(0);
    cuda::add_low_rank(update, stream_of(y));
    return;
  }
#endif
  for (size_t i = 0; i < stack.parts.size(); ++i) {
    const LowRankStack::Part& part = stack.parts[i];
    y.narrow(1, part.first, part.outputs)
        .add_(at::mm(columns_of(stack, low, i), part.b.t()), scale);
  }
}

void add_low_rank(cuda::Products* products, const LowRankStack& stack, double scale,
                  const Tensor& x, Tensor& y) {
  if (!stack.a.defined()) return;
  Tensor low = at::empty({x.size(0), stack.a.size(0)}, x.options());
  add_low_rank(products, stack, scale, x, low, y);
}

Tensor low_rank_backward(const LowRankStack& stack, double scale, const Tensor& d_y, Tensor& d_x) {
  if (!stack.a.defined()) return {};
  std::vector<Tensor> parts;
  for (const LowRankStack::Part& part : stack.parts) {
    parts.push_back(at::mm(d_y.narrow(1, part.first, part.outputs), part.b));
  }
  const Tensor d_low = (parts.size() == 1 ? parts[0] : at::cat(parts, 1)).mul_(scale);
  d_x.addmm_(d_low, stack.a);
  return d_low;
}

void low_rank_gradients(cuda::Products* products, const LowRankStack& stack, double scale,
                        const Tensor& x, const Tensor& d_y, const Tensor& d_low,
                        const LowRankStack& gradients, bool are_new) {
  if (!stack.a.defined()) return;
  weight_gradient(d_low, x, gradients.a, are_new);
  Tensor low = at::empty_like(d_low);
  project(products, x, stack.a.t(), Tensor(), low);
  low.mul_(scale);
  for (size_t i = 0; i < stack.parts.size(); ++i) {
    const LowRankStack::Part& part = stack.parts[i];
    weight_gradient(d_y.narrow(1, part.first, part.outputs), columns_of(stack, low, i),
                    gradients.parts[i].b, are_new);
  }
}

}  // namespace leeway
