// What differs between the libtorch versions the code compiles with: 1.13 (Debian 12) and 2.x.
#pragma once

#include <ATen/ATen.h>
#include <torch/version.h>

#include <cmath>

namespace leeway {

// What sums are kept in: float32, and float64 for float64.
inline at::ScalarType wide_type(const at::Tensor& x) {
  return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

// Causal attention of one sequence: queries, keys and values [heads, length, head_dim]; scores are
// scaled by 1/sqrt(head_dim) and their softmax is taken in wide_type.
inline at::Tensor causal_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
#if TORCH_VERSION_MAJOR >= 2
  return at::scaled_dot_product_attention(q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), {}, 0.0,
                                          /*is_causal=*/true)
      .squeeze(0);
#else
  const int64_t length = q.size(1);
  const double scale = 1.0 / std::sqrt(static_cast<double>(q.size(2)));
  const at::Tensor future = at::ones({length, length}, q.options().dtype(at::kBool)).triu(1);
  const at::Tensor scores = at::matmul(q * scale, k.transpose(1, 2));
  const at::Tensor shares =
      at::softmax(scores.masked_fill(future, -INFINITY), -1, wide_type(q)).to(q.scalar_type());
  return at::matmul(shares, v);
#endif
}

}  // namespace leeway
