// The steps of a training pass on tensors of one device, beside those that it shares with sampling
// (sampling_operations.h), and their gradients: kernels of src/cuda where the build has them, plain
// ATen elsewhere. No autograd.
//
// N rows, H hidden, D head dimensions. Gradients of weights are float32 (float64 beside float64)
// and added to, in an order that the shapes decide.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <memory>
#include <utility>

#include "torch/packed_sequences.h"
#include "torch/sampling_operations.h"

namespace leeway {

namespace cuda {
class AttentionGradients;
}

// Whether there are kernels for a model's sizes, in this type.
bool has_training_kernels(const ModelConfig& config, at::Device device, at::ScalarType type);

// Returns x + delta, or x where delta is undefined, and h = rms_norm of it, times weight. [N, H]
at::Tensor sum_and_norm(const at::Tensor& x, const at::Tensor& delta, const at::Tensor& weight,
                        double eps, at::Tensor& h);
// From the gradient d_y of the norm: returns `add`, which may be undefined, plus that of x, and
// adds to d_weight unless it is undefined. The memory of `add` may be the result's. Where it is
// defined h receives the norm again; it may be d_y.
at::Tensor norm_backward(const at::Tensor& x, const at::Tensor& weight, double eps,
                         const at::Tensor& d_y, const at::Tensor& add, const at::Tensor& d_weight,
                         const at::Tensor& h = {});

// Queries and keys of qkv, normed and turned: [N, heads, D].
struct QueriesAndKeys {
  at::Tensor q, k;
};
QueriesAndKeys pack_heads(const HeadWeights& heads, const at::Tensor& positions,
                          const at::Tensor& qkv);
// The values of qkv: a view [N, kv_heads, D].
at::Tensor values_of(const HeadWeights& heads, const at::Tensor& qkv);

struct HeadGradients {
  at::Tensor q, k, v;  // [N, heads, D]
};
// Returns the gradient of qkv; adds to those of the norms, which are undefined where there are
// none or they are not wanted.
at::Tensor heads_backward(const HeadWeights& heads, const at::Tensor& positions,
                          const at::Tensor& qkv, const HeadGradients& d_heads,
                          const at::Tensor& d_query_norm, const at::Tensor& d_key_norm);

// Causal attention of packed sequences. q [N, heads, D], k and v [N, kv_heads, D].
struct Attended {
  at::Tensor out;  // [N, heads, D]
  at::Tensor lse;  // [heads, N], the log of each row's sum of exp(scores), natural; float32
};
Attended attention(const PackedSequences& sequences, const at::Tensor& q, const at::Tensor& k,
                   const at::Tensor& v);
// What its gradient is prepared with, kept from pass to pass; null where cuDNN is not.
std::shared_ptr<cuda::AttentionGradients> make_attention_gradients(at::Device device);
HeadGradients attention_backward(cuda::AttentionGradients* prepared,
                                 const PackedSequences& sequences, const at::Tensor& q,
                                 const at::Tensor& k, const at::Tensor& v, const Attended& attended,
                                 const at::Tensor& d_out);

// From the gradient of s = silu(gate) * up: that of gate_up, and s again. The memory of the results
// may be that of gate_up and d_s.
struct SwigluGradient {
  at::Tensor d_gate_up, s;
};
SwigluGradient swiglu_backward(const at::Tensor& gate_up, const at::Tensor& d_s);

// d_table[id] += the rows of d_x whose id it is; ids int32 [N].
void embed_backward(const at::Tensor& ids, const at::Tensor& d_x, const at::Tensor& d_table);

// d_weight [outputs, inputs] += d_y^T x, or = with `is_new`.
void weight_gradient(const at::Tensor& d_y, const at::Tensor& x, const at::Tensor& d_weight,
                     bool is_new);
// d_bias [outputs] += the sum of rows, unless it is undefined.
void bias_gradient(const at::Tensor& d_y, const at::Tensor& d_bias);

}  // namespace leeway
