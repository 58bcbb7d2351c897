#include "torch/training_operations.h"

#include <string>
#include <vector>

#include "leeway/error.h"
#include "model/gpu_sizes.h"
#include "torch/compat.h"
#include "torch/layer_rows.h"

#ifdef LEEWAY_CUDA
#include <ATen/cuda/CUDAContext.h>

#include "cuda/device_part.h"
#include "cuda/layer_gradients.h"
#include "torch/cuda_tensors.h"
#endif

namespace leeway {

using at::Tensor;

namespace {

// ---------------------------------------------------------------------------------------------
// Formulas in plain ATen

struct NormGradient {
  Tensor d_x, d_weight;  // in the wide type
};
// The gradients of x * inverse * weight, inverse = 1 / sqrt(mean of x^2 + eps), over the last
// dimension.
NormGradient plain_norm_backward(const Tensor& x, const Tensor& weight, double eps,
                                 const Tensor& d_y) {
  const at::ScalarType type = wide_type(x);
  const Tensor wide = x.to(type), d = d_y.to(type);
  const Tensor inverse = at::rsqrt(wide.square().mean(-1, true) + eps);
  const Tensor unit = wide * inverse, d_unit = d * weight.to(type);
  return {inverse * (d_unit - unit * (d_unit * unit).mean(-1, true)),
          (d * unit).reshape({-1, x.size(-1)}).sum(0)};
}

#ifdef LEEWAY_CUDA

float* floats_of(const Tensor& x) { return x.defined() ? x.data_ptr<float>() : nullptr; }

Tensor row_sum_workspace(const Tensor& like, int64_t width) {
  return at::empty({cuda::row_sum_workspace(width)}, like.options().dtype(at::kFloat));
}

cuda::PackedHeads packed_heads(const HeadWeights& heads, const Tensor& positions,
                               const Tensor& qkv) {
  cuda::PackedHeads step;
  step.sizes = {heads.counts.query_heads, heads.counts.kv_heads, heads.counts.head_dim};
  step.rows = qkv.size(0);
  step.positions = positions.data_ptr<int32_t>();
  step.qkv = data_of(qkv);
  step.query_norm = data_of(heads.query_norm), step.key_norm = data_of(heads.key_norm);
  step.eps = static_cast<float>(heads.eps);
  step.angles = {heads.rope.cosines.data_ptr<float>(), heads.rope.sines.data_ptr<float>()};
  return step;
}

// C (+)= A^T B in float32, row-major: the columns of what cuBLAS calls m are B's.
void add_product(const Tensor& a, const Tensor& b, const Tensor& c, bool is_new) {
  const float alpha = 1.0f, beta = is_new ? 0.0f : 1.0f;
  const cudaDataType_t type = a.scalar_type() == at::kBFloat16 ? CUDA_R_16BF : CUDA_R_32F;
  const cublasHandle_t handle = at::cuda::getCurrentCUDABlasHandle();
  cublasSetSmCountTarget(handle, cuda::multiprocessors_of(stream_of(a)));
  const cublasStatus_t status =
      cublasGemmEx_64(handle, CUBLAS_OP_N, CUBLAS_OP_T, b.size(1), a.size(1), a.size(0), &alpha,
                      data_of(b), type, b.stride(0), data_of(a), type, a.stride(0), &beta,
                      data_of(c), CUDA_R_32F, b.size(1), CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
  if (status != CUBLAS_STATUS_SUCCESS) {
    throw Error(std::string("cuBLAS: the gradient of a weight: ") + cublasGetStatusString(status));
  }
}

#endif

}  // namespace

bool has_training_kernels(const ModelConfig& config, at::Device device, at::ScalarType type) {
#ifdef LEEWAY_CUDA
  return device.is_cuda() && has_packed_attention(device, type, config.head_dim) &&
         type == at::kBFloat16 && why_gpu_has_no_training_kernels(config).empty();
#else
  static_cast<void>(config), static_cast<void>(device), static_cast<void>(type);
  return false;
#endif
}

Tensor sum_and_norm(const Tensor& x, const Tensor& delta, const Tensor& weight, double eps,
                    Tensor& h) {
#ifdef LEEWAY_CUDA
  if (x.is_cuda()) {
    const Tensor sum = delta.defined() ? at::empty_like(x) : x;
    cuda::RmsNorm norm;
    norm.rows = x.size(0), norm.width = x.size(1);
    norm.x = data_of(x), norm.delta = data_of(delta);
    if (delta.defined()) norm.sum = data_of(sum);
    norm.weight = data_of(weight), norm.eps = static_cast<float>(eps);
    norm.y = data_of(h);
    cuda::rms_norm(dtype_of(x), norm, stream_of(x));
    return sum;
  }
#endif
  const Tensor sum = delta.defined() ? x + delta : x;
  h.copy_(plain_rms_norm(sum, weight, eps));
  return sum;
}

Tensor norm_backward(const Tensor& x, const Tensor& weight, double eps, const Tensor& d_y,
                     const Tensor& add, const Tensor& d_weight, const Tensor& h) {
#ifdef LEEWAY_CUDA
  if (x.is_cuda()) {
    const Tensor workspace = row_sum_workspace(x, x.size(1));
    const Tensor d_x = add.defined() ? add : at::empty_like(x);
    cuda::RmsNormBackward norm;
    norm.rows = x.size(0), norm.width = x.size(1);
    norm.x = data_of(x), norm.weight = data_of(weight), norm.d_y = data_of(d_y);
    norm.add = data_of(add), norm.eps = static_cast<float>(eps);
    norm.y = data_of(h);
    norm.d_x = data_of(d_x), norm.d_weight = floats_of(d_weight);
    norm.workspace = floats_of(workspace);
    cuda::rms_norm_backward(dtype_of(x), norm, stream_of(x));
    return d_x;
  }
#endif
  const NormGradient gradient = plain_norm_backward(x, weight, eps, d_y);
  if (d_weight.defined()) d_weight.add_(gradient.d_weight);
  if (h.defined()) h.copy_(plain_rms_norm(x, weight, eps));
  const Tensor d_x = gradient.d_x.to(x.scalar_type());
  return add.defined() ? add + d_x : d_x;
}

QueriesAndKeys pack_heads(const HeadWeights& heads, const Tensor& positions, const Tensor& qkv) {
  const auto& [query_heads, kv_heads, head_dim] = heads.counts;
#ifdef LEEWAY_CUDA
  if (qkv.is_cuda()) {
    const QueriesAndKeys out{at::empty({qkv.size(0), query_heads, head_dim}, qkv.options()),
                             at::empty({qkv.size(0), kv_heads, head_dim}, qkv.options())};
    cuda::PackedHeads step = packed_heads(heads, positions, qkv);
    step.q = data_of(out.q), step.k = data_of(out.k);
    cuda::pack_heads(dtype_of(qkv), step, stream_of(qkv));
    return out;
  }
#endif
  const Tensor all = qkv.view({qkv.size(0), query_heads + 2 * kv_heads, head_dim});
  Tensor q = all.narrow(1, 0, query_heads), k = all.narrow(1, query_heads, kv_heads);
  if (heads.query_norm.defined()) {
    q = plain_rms_norm(q, heads.query_norm, heads.eps);
    k = plain_rms_norm(k, heads.key_norm, heads.eps);
  }
  const auto& [cosines, sines] = heads.rope;
  return {plain_rope(q, positions, cosines, sines), plain_rope(k, positions, cosines, sines)};
}

Tensor values_of(const HeadWeights& heads, const Tensor& qkv) {
  const auto& [query_heads, kv_heads, head_dim] = heads.counts;
  return qkv.view({qkv.size(0), query_heads + 2 * kv_heads, head_dim})
      .narrow(1, query_heads + kv_heads, kv_heads);
}

Tensor heads_backward(const HeadWeights& heads, const Tensor& positions, const Tensor& qkv,
                      const HeadGradients& d_heads, const Tensor& d_query_norm,
                      const Tensor& d_key_norm) {
#ifdef LEEWAY_CUDA
  if (qkv.is_cuda()) {
    const Tensor d_qkv = at::empty_like(qkv);
    const Tensor workspace = row_sum_workspace(qkv, 2 * heads.counts.head_dim);
    const Tensor d_q = d_heads.q.contiguous(), d_k = d_heads.k.contiguous();
    const Tensor d_v = d_heads.v.contiguous();
    cuda::HeadsBackward step;
    step.forward = packed_heads(heads, positions, qkv);
    step.d_q = data_of(d_q), step.d_k = data_of(d_k), step.d_v = data_of(d_v);
    step.d_qkv = data_of(d_qkv);
    step.d_query_norm = floats_of(d_query_norm), step.d_key_norm = floats_of(d_key_norm);
    step.workspace = floats_of(workspace);
    cuda::heads_backward(dtype_of(qkv), step, stream_of(qkv));
    return d_qkv;
  }
#endif
  const auto& [query_heads, kv_heads, head_dim] = heads.counts;
  const Tensor all = qkv.view({qkv.size(0), query_heads + 2 * kv_heads, head_dim});
  const auto& [cosines, sines] = heads.rope;
  Tensor d_q = plain_rope(d_heads.q, positions, cosines, sines, /*back=*/true);
  Tensor d_k = plain_rope(d_heads.k, positions, cosines, sines, /*back=*/true);
  if (heads.query_norm.defined()) {
    const NormGradient by_q =
        plain_norm_backward(all.narrow(1, 0, query_heads), heads.query_norm, heads.eps, d_q);
    const NormGradient by_k =
        plain_norm_backward(all.narrow(1, query_heads, kv_heads), heads.key_norm, heads.eps, d_k);
    if (d_query_norm.defined()) {
      d_query_norm.add_(by_q.d_weight), d_key_norm.add_(by_k.d_weight);
    }
    d_q = by_q.d_x.to(qkv.scalar_type()), d_k = by_k.d_x.to(qkv.scalar_type());
  }
  return at::cat({d_q, d_k, d_heads.v}, 1).flatten(1);
}

SwigluGradient swiglu_backward(const Tensor& gate_up, const Tensor& d_s) {
#ifdef LEEWAY_CUDA
  if (gate_up.is_cuda()) {
    const SwigluGradient out{gate_up, d_s};
    cuda::swiglu_rows_backward(dtype_of(gate_up), data_of(gate_up), data_of(d_s), d_s.size(0),
                               d_s.size(1), data_of(out.d_gate_up), data_of(out.s),
                               stream_of(gate_up));
    return out;
  }
#endif
  const std::vector<Tensor> halves = gate_up.chunk(2, -1);
  const Tensor &gate = halves[0], &up = halves[1];
  const Tensor share = at::sigmoid(gate);
  return {at::cat({d_s * up * share * (1.0 + gate * (1.0 - share)), d_s * gate * share}, -1),
          at::silu(gate) * up};
}

void embed_backward(const Tensor& ids, const Tensor& d_x, const Tensor& d_table) {
#ifdef LEEWAY_CUDA
  if (d_x.is_cuda()) {
    const auto [sorted, order] = at::sort(ids, /*stable=*/true, /*dim=*/0, /*descending=*/false);
    cuda::embed_backward(dtype_of(d_x), sorted.data_ptr<int32_t>(), order.data_ptr<int64_t>(),
                         data_of(d_x), d_x.size(0), d_x.size(1), floats_of(d_table),
                         stream_of(d_x));
    return;
  }
#endif
  d_table.index_add_(0, ids, d_x.to(d_table.scalar_type()));
}

void weight_gradient(const Tensor& d_y, const Tensor& x, const Tensor& d_weight, bool is_new) {
#ifdef LEEWAY_CUDA
  if (d_y.is_cuda()) return add_product(d_y, x, d_weight, is_new);
#endif
  const at::ScalarType type = d_weight.scalar_type();
  const Tensor product = at::mm(d_y.to(type).t(), x.to(type));
  if (is_new) {
    d_weight.copy_(product);
  } else {
    d_weight.add_(product);
  }
}

void bias_gradient(const Tensor& d_y, const Tensor& d_bias) {
  if (d_bias.defined()) d_bias.add_(d_y.sum(0, false, d_bias.scalar_type()));
}

}  // namespace leeway
