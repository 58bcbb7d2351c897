#include "torch/shard_exchange.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <utility>

#include "base/bytes.h"

#ifdef LEEWAY_CUDA
#include <c10/cuda/CUDAStream.h>
#endif

namespace leeway {

using at::Tensor;

namespace {

constexpr int64_t kPiece = int64_t{1} << 26;  // numbers collected at a time

void wait_for([[maybe_unused]] const Tensor& numbers) {
#ifdef LEEWAY_CUDA
  if (numbers.is_cuda()) c10::cuda::getCurrentCUDAStream(numbers.device().index()).synchronize();
#endif
}

}  // namespace

// Waits for the device before and after: what lies between is the time for the others.
void ShardExchange::timed(const Tensor& numbers, const std::function<void()>& work) {
  wait_for(numbers);
  const auto begin = std::chrono::steady_clock::now();
  work();
  wait_for(numbers);
  seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

double ShardExchange::take_seconds() { return std::exchange(seconds_, 0.0); }

void ShardExchange::sum(const Tensor& gradients) {
  timed(gradients, [&] { group_->reduce_scatter(gradients); });
}

double ShardExchange::norm(double own) {
  ByteWriter message;
  message.put(own);
  double squares = 0.0;
  for (const std::string& part : ranks_.all_gather(message.take())) {
    const double each = ByteReader(part).get<double>();
    squares += each * each;
  }
  return std::sqrt(squares);
}

void ShardExchange::hand_out(const Tensor& weights) {
  timed(weights, [&] { group_->all_gather(weights); });
}

void ShardExchange::collect(const FlatLayout& layout, const Tensor& high, const Tensor& low,
                            const std::function<void(int64_t, const Tensor&)>& each) {
  const bool has_all = high.numel() == layout.size && low.defined();
  timed(high, [&] {
    for (int r = 0; r < size(); ++r) {
      const FlatRange range = layout.part_of(r, size());
      // A rank's own numbers, or what it is sent of others'.
      const auto piece_of = [&](const Tensor& own, int64_t at, int64_t count) {
        if (rank() == r) return own.narrow(0, at, count);
        Tensor piece = at::empty({count}, own.options());
        group_->receive(piece, r);
        return piece;
      };
      for (int64_t at = 0; at < range.count; at += kPiece) {
        const int64_t count = std::min(kPiece, range.count - at);
        if (rank() == 0) {
          const Tensor upper =
              has_all ? high.narrow(0, range.begin + at, count) : piece_of(high, at, count);
          each(range.begin + at, low.defined() ? joined({upper, piece_of(low, at, count)}) : upper);
        } else if (rank() == r) {
          if (!has_all) group_->send(high.narrow(0, at, count), 0);
          if (low.defined()) group_->send(low.narrow(0, at, count), 0);
        }
      }
    }
  });
}

void ShardExchange::spread(const FlatLayout& layout, const Parameters& host, at::Device device,
                           const std::function<void(int64_t, const Tensor&)>& each) {
  const at::TensorOptions numbers = at::TensorOptions(device).dtype(at::kFloat);
  for (int r = 0; r < size(); ++r) {
    const FlatRange range = layout.part_of(r, size());
    for (int64_t at = 0; at < range.count && (rank() == 0 || rank() == r); at += kPiece) {
      const Tensor piece = at::zeros({std::min(kPiece, range.count - at)}, numbers);
      if (rank() == 0) copy_to_flat_part(layout, host, range.begin + at, piece);
      if (rank() == r && r != 0) group_->receive(piece, 0);
      if (rank() == 0 && r != 0) group_->send(piece, r);
      if (rank() == r) each(at, piece);
    }
  }
}

}  // namespace leeway
