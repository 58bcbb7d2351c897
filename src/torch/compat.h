// What differs between the libtorch versions the code compiles with: 1.13 (Debian 12) and 2.x. All
// of Leeway that asks for a version is here; of the benchmarks one asks by itself.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <torch/version.h>

#include <cmath>
#include <tuple>
#include <utility>
#include <vector>

namespace leeway {

using at::Tensor;

// c10::optional in torch 1.13, std::optional since: whatever torch itself hands out.
using OptionalTensor = decltype(std::declval<const c10::IValue&>().toOptional<at::Tensor>());

// What sums are kept in: float32, and float64 for float64.
inline at::ScalarType wide_type(const at::Tensor& x) {
  return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

// Whether `packed_attention` supports this device, type and head width.
inline bool has_packed_attention(const at::Device& device, at::ScalarType type, int64_t head_dim) {
#if TORCH_VERSION_MAJOR >= 2
  return device.is_cuda() && (type == at::kBFloat16 || type == at::kHalf) && head_dim % 8 == 0 &&
         head_dim <= 256;
#else
  (void)device, (void)type, (void)head_dim;
  return false;
#endif
}

// Causal attention of all sequences at once: q [N, heads, head_dim], k and v [N, kv_heads,
// head_dim]; `offsets` is int32 [S + 1] on their device.
inline at::Tensor packed_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                   const at::Tensor& offsets, int64_t longest) {
#if TORCH_VERSION_MAJOR >= 2
  return std::get<0>(at::_flash_attention_forward(q, k, v, offsets, offsets, longest, longest, 0.0,
                                                  /*is_causal=*/true,
                                                  /*return_debug_mask=*/false));
#else
  (void)k, (void)v, (void)offsets, (void)longest;
  return q;  // has_packed_attention is false
#endif
}

// Gradients by q, k and v.
using AttentionGradients = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

// Those of `packed_attention`, from that of `out` and the log of each row's sum of exp(scores),
// float32 [heads, N].
inline AttentionGradients packed_attention_backward(const at::Tensor& d_out, const at::Tensor& q,
                                                    const at::Tensor& k, const at::Tensor& v,
                                                    const at::Tensor& out, const at::Tensor& lse,
                                                    const at::Tensor& offsets, int64_t longest) {
#if TORCH_VERSION_MAJOR >= 2
  const at::Tensor nothing = at::empty({2}, q.options().dtype(at::kLong));  // no dropout
  return at::_flash_attention_backward(d_out, q, k, v, out, lse, offsets, offsets, longest, longest,
                                       0.0, /*is_causal=*/true, nothing, nothing);
#else
  (void)d_out, (void)out, (void)lse, (void)offsets, (void)longest;
  return {q, k, v};
#endif
}

// Whether `batched_attention_backward` is there for this head width.
inline bool has_batched_attention(int64_t head_dim) {
#if TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 9)
  return head_dim <= 128;
#else
  (void)head_dim;
  return false;
#endif
}

// The same for sequences of one length, two at least, by cuDNN, which is nearly twice as fast; a
// length and a number of sequences that it has not seen yet cost it about 65 ms. All are
// [sequences, length, heads, head_dim]; lse is contiguous [sequences, heads, length].
inline AttentionGradients batched_attention_backward(const at::Tensor& d_out, const at::Tensor& q,
                                                     const at::Tensor& k, const at::Tensor& v,
                                                     const at::Tensor& out, const at::Tensor& lse) {
#if TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 9)
  const at::Tensor none, nothing = at::empty({2}, q.options().dtype(at::kLong));
  const auto heads_first = [](const at::Tensor& x) { return x.transpose(1, 2); };
  const auto [d_q, d_k, d_v] = at::_scaled_dot_product_cudnn_attention_backward(
      heads_first(d_out), heads_first(q), heads_first(k), heads_first(v), heads_first(out),
      lse.unsqueeze(-1), nothing, nothing, none, none, none, q.size(1), q.size(1), 0.0,
      /*is_causal=*/true);
  return {heads_first(d_q), heads_first(d_k), heads_first(d_v)};
#else
  (void)d_out, (void)out, (void)lse;
  return {q, k, v};
#endif
}

// The gradients of x * inverse * weight, inverse [.., 1] = 1 / sqrt(mean of x^2 + eps) in float32,
// by x and by weight. `d_y`, x and weight are of one type.
inline std::pair<at::Tensor, at::Tensor> rms_norm_backward(const at::Tensor& d_y,
                                                           const at::Tensor& x,
                                                           const at::Tensor& weight,
                                                           const at::Tensor& inverse) {
#if TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 9)
  if (x.is_cuda()) {
    const auto [d_x, d_weight] =
        at::_fused_rms_norm_backward(d_y, x, {x.size(-1)}, inverse, weight, {true, true});
    return {d_x, d_weight};
  }
#endif
  const at::Tensor normed = x.to(at::kFloat) * inverse, wide = d_y.to(at::kFloat);
  const at::Tensor d_normed = wide * weight.to(at::kFloat);
  const at::Tensor d_x = inverse * (d_normed - normed * (d_normed * normed).mean(-1, true));
  const at::Tensor d_weight = (wide * normed).reshape({-1, x.size(-1)}).sum(0);
  return {d_x.to(x.scalar_type()), d_weight.to(weight.scalar_type())};
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
