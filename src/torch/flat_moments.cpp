#include "torch/flat_moments.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "cuda/moment_codes.h"
#include "leeway/error.h"

#ifdef LEEWAY_CUDA
#include "cuda/adamw.h"
#include "torch/cuda_tensors.h"
#endif

namespace leeway {

using at::Tensor;

namespace {

constexpr int64_t kPart = int64_t{1} << 26;  // numbers that are float32 at a time, whole blocks

Tensor copy_of(const Tensor& tensor) { return tensor.defined() ? tensor.clone() : tensor; }

// The codes and scales of a part, which begins a block.
FlatMoments coded_part(const FlatMoments& moments, int64_t begin, int64_t count) {
  LEEWAY_CHECK(begin % cuda::kMomentBlock == 0 && begin + count <= moments.coded(),
               "a part of the codes");
  const int64_t block = begin / cuda::kMomentBlock, blocks = cuda::moment_blocks(count);
  FlatMoments part;
  part.first_codes = moments.first_codes.narrow(0, begin, count);
  part.second_codes = moments.second_codes.narrow(0, begin, count);
  part.first_scales = moments.first_scales.narrow(0, block, blocks);
  part.second_scales = moments.second_scales.narrow(0, block, blocks);
  return part;
}

#ifdef LEEWAY_CUDA
cuda::CodedMoments pointers_of(const FlatMoments& part) {
  return {part.first_codes.data_ptr<int8_t>(), part.second_codes.data_ptr<uint8_t>(),
          part.first_scales.data_ptr<float>(), part.second_scales.data_ptr<float>()};
}
#endif

// Calls each(begin, count) for parts of the coded numbers.
template <class Each>
void for_parts(const FlatMoments& moments, Each&& each) {
  for (int64_t begin = 0; begin < moments.coded(); begin += kPart) {
    each(begin, std::min(kPart, moments.coded() - begin));
  }
}

}  // namespace

FlatMoments FlatMoments::clone() const {
  return {copy_of(first),        copy_of(second),       copy_of(first_codes),
          copy_of(second_codes), copy_of(first_scales), copy_of(second_scales)};
}

int64_t FlatMoments::bytes() const {
  int64_t sum = 0;
  for (const Tensor* tensor :
       {&first, &second, &first_codes, &second_codes, &first_scales, &second_scales}) {
    if (tensor->defined()) sum += static_cast<int64_t>(tensor->nbytes());
  }
  return sum;
}

FlatMoments make_moments(const FlatLayout& layout, at::Device device, OptimizerState state,
                         std::optional<FlatRange> part) {
  const FlatRange range = part.value_or(FlatRange{0, layout.size});
  const at::TensorOptions numbers = at::TensorOptions(device).dtype(at::kFloat);
  const int64_t decaying = std::clamp<int64_t>(layout.decaying - range.begin, 0, range.count);
  const int64_t coded = state == OptimizerState::int8 ? decaying : 0;
  FlatMoments moments;
  moments.first = at::zeros({range.count - coded}, numbers);
  moments.second = at::zeros({range.count - coded}, numbers);
  if (coded == 0) return moments;
  moments.first_codes = at::zeros({coded}, numbers.dtype(at::kChar));
  moments.second_codes = at::zeros({coded}, numbers.dtype(at::kByte));
  moments.first_scales = at::zeros({cuda::moment_blocks(coded)}, numbers);
  moments.second_scales = at::zeros({cuda::moment_blocks(coded)}, numbers);
  return moments;
}

std::pair<Tensor, Tensor> decoded(const FlatMoments& moments, int64_t begin, int64_t count) {
  const FlatMoments part = coded_part(moments, begin, count);
  const Tensor first = at::empty({count}, part.first_scales.options());
  const Tensor second = at::empty_like(first);
#ifdef LEEWAY_CUDA
  if (first.is_cuda()) {
    cuda::decode_moments(pointers_of(part), count, first.data_ptr<float>(),
                         second.data_ptr<float>(), stream_of(first));
    return {first, second};
  }
#endif
  for (int64_t i = 0; i < count; ++i) {
    const int64_t block = i / cuda::kMomentBlock;
    first.data_ptr<float>()[i] = cuda::first_moment_of(part.first_codes.data_ptr<int8_t>()[i],
                                                       part.first_scales.data_ptr<float>()[block]);
    second.data_ptr<float>()[i] = cuda::second_moment_of(
        part.second_codes.data_ptr<uint8_t>()[i], part.second_scales.data_ptr<float>()[block]);
  }
  return {first, second};
}

void encode(const Tensor& first, const Tensor& second, int64_t begin, const FlatMoments& moments) {
  const int64_t count = first.numel();
  const FlatMoments part = coded_part(moments, begin, count);
#ifdef LEEWAY_CUDA
  if (first.is_cuda()) {
    cuda::encode_moments(first.data_ptr<float>(), second.data_ptr<float>(), count,
                         pointers_of(part), stream_of(first));
    return;
  }
#endif
  const float *m = first.data_ptr<float>(), *v = second.data_ptr<float>();
  for (int64_t block = 0; block < cuda::moment_blocks(count); ++block) {
    const int64_t from = block * cuda::kMomentBlock;
    const int64_t to = std::min(count, from + cuda::kMomentBlock);
    float largest_first = 0.0f, largest_second = 0.0f;
    for (int64_t i = from; i < to; ++i) {
      largest_first = std::max(largest_first, std::abs(m[i]));
      largest_second = std::max(largest_second, v[i]);
    }
    const float first_scale = cuda::first_moment_scale(largest_first);
    const float second_scale = cuda::second_moment_scale(largest_second);
    part.first_scales.data_ptr<float>()[block] = first_scale;
    part.second_scales.data_ptr<float>()[block] = second_scale;
    for (int64_t i = from; i < to; ++i) {
      part.first_codes.data_ptr<int8_t>()[i] = cuda::first_moment_code(m[i], first_scale);
      part.second_codes.data_ptr<uint8_t>()[i] = cuda::second_moment_code(v[i], second_scale);
    }
  }
}

void copy_to_flat(const FlatLayout& layout, const AdamW& host, const FlatMoments& moments,
                  int64_t first_number) {
  const at::NoGradGuard guard;
  for_parts(moments, [&](int64_t begin, int64_t count) {
    const Tensor first = at::zeros({count}, moments.first.options());
    const Tensor second = at::zeros_like(first);
    copy_to_flat_part(layout, host.first_moment(), first_number + begin, first);
    copy_to_flat_part(layout, host.second_moment(), first_number + begin, second);
    encode(first, second, begin, moments);
  });
  copy_to_flat_part(layout, host.first_moment(), first_number + moments.coded(), moments.first);
  copy_to_flat_part(layout, host.second_moment(), first_number + moments.coded(), moments.second);
}

void copy_to_host(const FlatLayout& layout, const FlatMoments& moments, AdamW& host,
                  int64_t first_number) {
  const at::NoGradGuard guard;
  for_parts(moments, [&](int64_t begin, int64_t count) {
    const auto [first, second] = decoded(moments, begin, count);
    copy_part_to_host(layout, first_number + begin, first, host.first_moment());
    copy_part_to_host(layout, first_number + begin, second, host.second_moment());
  });
  copy_part_to_host(layout, first_number + moments.coded(), moments.first, host.first_moment());
  copy_part_to_host(layout, first_number + moments.coded(), moments.second, host.second_moment());
}

}  // namespace leeway
