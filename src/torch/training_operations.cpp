#include "torch/training_operations.h"

#include <cmath>
#include <vector>

#include "leeway/error.h"
#include "torch/compat.h"
#include "torch/layer_rows.h"

#ifdef LEEWAY_CUDA
#include <ATen/cuda/CUDAContext.h>

#include "cuda/attention.h"
#include "cuda/layer_gradients.h"
#include "cuda/take_rows.h"
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

// Each key/value head once for every query head that reads it, [heads, length, D], wide.
Tensor expanded(const Tensor& x, int64_t heads) {
  const int64_t group = heads / x.size(1);
  return x.to(wide_type(x)).repeat_interleave(group, 1).transpose(0, 1);
}

// Scores of one sequence, [heads, length, length].
Tensor masked_scores(const Tensor& q, const Tensor& k) {
  const int64_t length = q.size(1);
  const Tensor future = at::ones({length, length}, q.options().dtype(at::kBool)).triu(1);
  const double scale = 1.0 / std::sqrt(static_cast<double>(q.size(2)));
  return (at::matmul(q, k.transpose(1, 2)) * scale).masked_fill(future, -INFINITY);
}

// Calls body(first row, rows) for each sequence.
template <class Body>
void for_sequences(const PackedSequences& sequences, Body&& body) {
  int64_t first = 0;
  for (const int64_t length : sequences.lengths) {
    body(first, length);
    first += length;
  }
}

Attended plain_attention(const PackedSequences& sequences, const Tensor& q, const Tensor& k,
                         const Tensor& v) {
  const int64_t heads = q.size(1);
  Attended result{at::empty(q.sizes(), q.options()),
                  at::empty({heads, q.size(0)}, q.options().dtype(wide_type(q)))};
  for_sequences(sequences, [&](int64_t first, int64_t rows) {
    const auto part = [&](const Tensor& x) { return expanded(x.narrow(0, first, rows), heads); };
    const Tensor scores = masked_scores(part(q), part(k));
    const Tensor lse = at::logsumexp(scores, -1);
    const Tensor shares = at::exp(scores - lse.unsqueeze(-1));
    result.out.narrow(0, first, rows).copy_(at::matmul(shares, part(v)).transpose(0, 1));
    result.lse.narrow(1, first, rows).copy_(lse);
  });
  return result;
}

HeadGradients plain_attention_backward(const PackedSequences& sequences, const Tensor& q,
                                       const Tensor& k, const Tensor& v, const Attended& attended,
                                       const Tensor& d_out) {
  const int64_t heads = q.size(1);
  const double scale = 1.0 / std::sqrt(static_cast<double>(q.size(2)));
  const HeadGradients d{at::empty(q.sizes(), q.options()), at::empty(k.sizes(), k.options()),
                        at::empty(v.sizes(), k.options())};
  for_sequences(sequences, [&](int64_t first, int64_t rows) {
    const auto part = [&](const Tensor& x) { return expanded(x.narrow(0, first, rows), heads); };
    // The sum over the query heads that read a key/value head.
    const auto give = [&](const Tensor& to, const Tensor& x) {
      const Tensor sum = x.view({to.size(1), heads / to.size(1), rows, -1}).sum(1);
      to.narrow(0, first, rows).copy_(sum.transpose(0, 1));
    };
    const Tensor queries = part(q), keys = part(k), d_part = part(d_out);
    const Tensor shares =
        at::exp(masked_scores(queries, keys) - attended.lse.narrow(1, first, rows).unsqueeze(-1));
    const Tensor share = (d_part * part(attended.out)).sum(-1, true);
    const Tensor d_scores = shares * (at::matmul(d_part, part(v).transpose(1, 2)) - share) * scale;
    give(d.q, at::matmul(d_scores, keys));
    give(d.k, at::matmul(d_scores.transpose(1, 2), queries));
    give(d.v, at::matmul(shares.transpose(1, 2), d_part));
  });
  return d;
}

bool at_once(const Tensor& q) {
  return has_packed_attention(q.device(), q.scalar_type(), q.size(2));
}

// Whether cuDNN pays: sequences are long enough for what it costs before the first of a shape, and
// groups have enough of them to fill the device. With a sequence or two each it is no faster than
// the kernel for packed sequences.
bool in_groups(const PackedSequences& sequences, const Tensor& q) {
  constexpr int64_t kLeastScores = int64_t{1} << 22;  // of a head
  constexpr size_t kLeastSequences = 4;               // of a group, on average
  const size_t groups = sequences.groups.size();
  return q.size(0) * sequences.longest >= kLeastScores && has_batched_attention(q.size(2)) &&
         (groups == 1 || groups * kLeastSequences <= sequences.lengths.size());
}

// x [N, ..] with each row at its padded place, zeros in between; and back.
Tensor at_places(const Tensor& x, const Tensor& rows) {
  if (!rows.defined()) return x;
#ifdef LEEWAY_CUDA
  if (x.is_cuda()) {
    std::vector<int64_t> sizes = x.sizes().vec();
    sizes[0] = rows.size(0);
    const Tensor to = at::empty(sizes, x.options());
    const auto bytes = static_cast<int64_t>(x.element_size());
    cuda::take_rows(data_of(x), x.stride(0) * bytes, rows.data_ptr<int32_t>(), rows.size(0),
                    to.stride(0) * bytes, data_of(to), to.stride(0) * bytes, stream_of(x));
    return to;
  }
#endif
  const Tensor padded = at::cat({x, at::zeros_like(x.narrow(0, 0, 1))});
  return padded.index_select(0, rows.masked_fill(rows < 0, x.size(0)));
}

// Padding behind a sequence is seen by no row of it. Its own rows see the sequence, with weights
// that their sum, as good as infinite, makes zero, and have no gradient.
HeadGradients grouped_attention_backward(const PackedSequences& sequences, const Tensor& q,
                                         const Tensor& k, const Tensor& v, const Attended& attended,
                                         const Tensor& d_out) {
  constexpr double kInfinite = 1e30;
  const Tensor& rows = sequences.padded_rows;
  const std::vector<Tensor> padded = {at_places(d_out, rows), at_places(q, rows),
                                      at_places(k, rows), at_places(v, rows),
                                      at_places(attended.out, rows)};
  Tensor sums = attended.lse.t();  // [N, heads]
  if (rows.defined()) {
    const Tensor with_padding =
        at::cat({sums, at::full({1, q.size(1)}, kInfinite, sums.options())});
    sums = with_padding.index_select(0, rows.masked_fill(rows < 0, q.size(0)));
  }
  std::vector<Tensor> d_q, d_k, d_v;
  for (const auto& [first, count, length] : sequences.groups) {
    const auto part = [&, at = first, n = count, l = length](const Tensor& x) {
      return x.narrow(0, at, n * l).unflatten(0, {n, l});
    };
    const auto [by_q, by_k, by_v] = batched_attention_backward(
        part(padded[0]), part(padded[1]), part(padded[2]), part(padded[3]), part(padded[4]),
        part(sums).transpose(1, 2).contiguous());
    d_q.push_back(by_q.flatten(0, 1)), d_k.push_back(by_k.flatten(0, 1));
    d_v.push_back(by_v.flatten(0, 1));
  }
  const auto packed = [&](const std::vector<Tensor>& parts) {
    const Tensor all = parts.size() == 1 ? parts[0] : at::cat(parts);
    return at_places(all.contiguous(), sequences.padded_places);
  };
  return {packed(d_q), packed(d_k), packed(d_v)};
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
  const cublasStatus_t status = cublasGemmEx_64(
      at::cuda::getCurrentCUDABlasHandle(), CUBLAS_OP_N, CUBLAS_OP_T, b.size(1), a.size(1),
      a.size(0), &alpha, data_of(b), type, b.size(1), data_of(a), type, a.size(1), &beta,
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
         type == at::kBFloat16 && config.hidden_size % 8 == 0 &&
         config.hidden_size <= cuda::kMostNormWidth && config.intermediate_size % 8 == 0;
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
                     const Tensor& add, const Tensor& d_weight) {
#ifdef LEEWAY_CUDA
  if (x.is_cuda()) {
    const Tensor workspace = row_sum_workspace(x, x.size(1));
    const Tensor d_x = add.defined() ? add : at::empty_like(x);
    cuda::RmsNormBackward norm;
    norm.rows = x.size(0), norm.width = x.size(1);
    norm.x = data_of(x), norm.weight = data_of(weight), norm.d_y = data_of(d_y);
    norm.add = data_of(add), norm.eps = static_cast<float>(eps);
    norm.d_x = data_of(d_x), norm.d_weight = floats_of(d_weight);
    norm.workspace = floats_of(workspace);
    cuda::rms_norm_backward(dtype_of(x), norm, stream_of(x));
    return d_x;
  }
#endif
  const NormGradient gradient = plain_norm_backward(x, weight, eps, d_y);
  d_weight.add_(gradient.d_weight);
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
    d_query_norm.add_(by_q.d_weight), d_key_norm.add_(by_k.d_weight);
    d_q = by_q.d_x.to(qkv.scalar_type()), d_k = by_k.d_x.to(qkv.scalar_type());
  }
  return at::cat({d_q, d_k, d_heads.v}, 1).flatten(1);
}

Attended attention(const PackedSequences& sequences, const Tensor& q, const Tensor& k,
                   const Tensor& v) {
#ifdef LEEWAY_CUDA
  if (q.is_cuda() && q.scalar_type() == at::kBFloat16) {
    const Attended attended{at::empty_like(q),
                            at::empty({q.size(1), q.size(0)}, q.options().dtype(at::kFloat))};
    cuda::Attention attention;
    attention.sizes = {q.size(1), k.size(1), q.size(2)};
    attention.places.rows = q.size(0);
    attention.places.positions = sequences.positions.data_ptr<int32_t>();
    attention.q = data_of(q), attention.q_stride = q.stride(0);
    attention.keys = data_of(k), attention.key_stride = k.stride(0);
    attention.values = data_of(v), attention.value_stride = v.stride(0);
    attention.out = data_of(attended.out);
    attention.lse = attended.lse.data_ptr<float>();
    attention.lse_row = 1, attention.lse_head = q.size(0);
    attention.counters = sequences.counters.data_ptr<int32_t>();
    cuda::attend_tiles(attention, static_cast<cuda::AttentionTile*>(data_of(sequences.tiles)),
                       sequences.tiles.size(0), stream_of(q));
    return attended;
  }
#endif
  return plain_attention(sequences, q, k, v);
}

HeadGradients attention_backward(const PackedSequences& sequences, const Tensor& q, const Tensor& k,
                                 const Tensor& v, const Attended& attended, const Tensor& d_out) {
  if (!at_once(q)) return plain_attention_backward(sequences, q, k, v, attended, d_out);
  if (in_groups(sequences, q)) {
    return grouped_attention_backward(sequences, q, k, v, attended, d_out);
  }
  const auto [d_q, d_k, d_v] = packed_attention_backward(d_out, q, k, v, attended.out, attended.lse,
                                                         sequences.offsets, sequences.longest);
  return {d_q, d_k, d_v};
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
