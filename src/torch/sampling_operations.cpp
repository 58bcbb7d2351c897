#include "torch/sampling_operations.h"

#include <cmath>
#include <limits>
#include <vector>

#include "leeway/error.h"
#include "torch/compat.h"
#include "torch/layer_rows.h"

#ifdef LEEWAY_CUDA
#include <c10/cuda/CUDAGuard.h>

#include "cuda/attention.h"
#include "cuda/few_row_products.h"
#include "cuda/norm_rope_swiglu.h"
#include "cuda/paged_attention.h"
#include "cuda/products.h"
#include "cuda/sample_rows.h"
#include "torch/cuda_tensors.h"
#endif

namespace leeway {

using at::Tensor;

namespace {

#ifdef LEEWAY_CUDA

cuda::HeadSizes sizes_of(const HeadCounts& counts) {
  return {counts.query_heads, counts.kv_heads, counts.head_dim};
}

cuda::RowPlaces places_of(const PassRows& rows) {
  return {rows.positions.size(0), rows.positions.data_ptr<int32_t>(),
          rows.starts.data_ptr<int32_t>(), rows.blocks.data_ptr<int32_t>()};
}

// The caller adds what is normed.
cuda::RmsNorm norm_of(const Tensor& weight, double eps, const Tensor& y) {
  cuda::RmsNorm norm;
  norm.rows = y.size(0), norm.width = y.size(1);
  norm.weight = data_of(weight), norm.eps = static_cast<float>(eps);
  norm.y = data_of(y);
  return norm;
}

cuda::Projection projection_of(const Tensor& x, const Tensor& transposed, const Tensor& bias,
                               const Tensor& y) {
  cuda::Projection projection;
  projection.y_type = dtype_of(y);
  projection.rows = x.size(0), projection.inputs = x.size(1);
  projection.outputs = transposed.size(1);
  projection.x = data_of(x), projection.weight = data_of(transposed);
  projection.weight_by_inputs = transposed.stride(1) == 1;
  projection.bias = data_of(bias);
  projection.y = data_of(y), projection.y_stride = y.stride(0);
  return projection;
}

cuda::HeadStep head_step(const HeadWeights& heads, const PassRows& rows, const Tensor& qkv,
                         const Tensor& q, const Tensor& keys, const Tensor& values) {
  cuda::HeadStep step;
  step.sizes = sizes_of(heads.counts);
  step.places = places_of(rows);
  step.qkv = data_of(qkv);
  step.query_norm = data_of(heads.query_norm), step.key_norm = data_of(heads.key_norm);
  step.eps = static_cast<float>(heads.eps);
  step.angles = {heads.rope.cosines.data_ptr<float>(), heads.rope.sines.data_ptr<float>()};
  step.q = data_of(q);
  step.keys = data_of(keys), step.values = data_of(values);
  return step;
}

// In bf16.
cuda::Attention attention_of(const HeadCounts& counts, const PassRows& rows, const Tensor& q,
                             const Tensor& keys, const Tensor& values, const Tensor& out) {
  cuda::Attention attention;
  attention.sizes = sizes_of(counts);
  attention.places = places_of(rows);
  attention.q = data_of(q), attention.q_stride = q.size(1);
  attention.keys = data_of(keys), attention.values = data_of(values);
  attention.key_stride = attention.value_stride = counts.kv_heads * counts.head_dim;
  attention.out = data_of(out);
  return attention;
}

// y = x weight^T + bias, if tensors are what Products takes.
bool project_by(cuda::Products* products, const Tensor& x, const Tensor& transposed,
                const Tensor& bias, const Tensor& y) {
  if (!x.is_cuda() || x.scalar_type() != at::kBFloat16) return false;
  LEEWAY_CHECK(products != nullptr, "products of a CUDA device");
  products->project(projection_of(x, transposed, bias, y), stream_of(x));
  return true;
}

#endif

}  // namespace

std::shared_ptr<cuda::Products> make_products([[maybe_unused]] at::Device device) {
#ifdef LEEWAY_CUDA
  if (device.is_cuda()) {
    const c10::cuda::CUDAGuard guard(device);
    return std::make_shared<cuda::Products>();
  }
#endif
  return nullptr;
}

void embed(const Tensor& table, const PassRows& rows, Tensor& x) {
#ifdef LEEWAY_CUDA
  if (x.is_cuda()) {
    cuda::embed_rows(dtype_of(x), data_of(table), rows.tokens.data_ptr<int32_t>(), x.size(0),
                     x.size(1), data_of(x), stream_of(x));
    return;
  }
#endif
  x.copy_(table.index_select(0, rows.tokens));
}

void project([[maybe_unused]] cuda::Products* products, const Tensor& x, const Tensor& transposed,
             const Tensor& bias, Tensor& y) {
#ifdef LEEWAY_CUDA
  if (project_by(products, x, transposed, bias, y)) return;
#endif
  if (bias.defined()) {
    at::addmm_out(y, bias, x, transposed);
  } else {
    at::mm_out(y, x, transposed);
  }
}

void project_wide([[maybe_unused]] cuda::Products* products, const Tensor& x,
                  const Tensor& transposed, Tensor& y) {
#ifdef LEEWAY_CUDA
  if (project_by(products, x, transposed, Tensor(), y)) return;
#endif
  at::mm_out(y, x.to(at::kFloat), transposed.to(at::kFloat));
}

void add_norm(Tensor& x, const Tensor& delta, const Tensor& weight, double eps, Tensor& y) {
#ifdef LEEWAY_CUDA
  if (x.is_cuda()) {
    cuda::RmsNorm norm = norm_of(weight, eps, y);
    norm.x = data_of(x), norm.delta = data_of(delta);
    if (delta.defined()) norm.sum = data_of(x);
    cuda::rms_norm(dtype_of(x), norm, stream_of(x));
    return;
  }
#endif
  if (delta.defined()) x.add_(delta);
  y.copy_(plain_rms_norm(x, weight, eps));
}

void add_norm_of_logit_rows(const Tensor& x, const Tensor& delta, const PassRows& rows,
                            const Tensor& weight, double eps, Tensor& y) {
#ifdef LEEWAY_CUDA
  if (x.is_cuda()) {
    cuda::RmsNorm norm = norm_of(weight, eps, y);
    norm.x = data_of(x), norm.delta = data_of(delta);
    norm.chosen = rows.logit_rows.data_ptr<int32_t>();
    cuda::rms_norm(dtype_of(x), norm, stream_of(x));
    return;
  }
#endif
  const Tensor sum = x.index_select(0, rows.logit_rows) + delta.index_select(0, rows.logit_rows);
  y.copy_(plain_rms_norm(sum, weight, eps));
}

void store_heads(const HeadWeights& heads, const PassRows& rows, const Tensor& qkv, Tensor& q,
                 Tensor& keys, Tensor& values) {
  const auto& [query_heads, kv_heads, head_dim] = heads.counts;
#ifdef LEEWAY_CUDA
  if (qkv.is_cuda()) {
    cuda::store_heads(dtype_of(qkv), head_step(heads, rows, qkv, q, keys, values), stream_of(qkv));
    return;
  }
#endif
  const Tensor all = qkv.view({qkv.size(0), query_heads + 2 * kv_heads, head_dim});
  Tensor queries = all.narrow(1, 0, query_heads);
  Tensor new_keys = all.narrow(1, query_heads, kv_heads);
  const Tensor new_values = all.narrow(1, query_heads + kv_heads, kv_heads);
  if (heads.query_norm.defined()) {
    queries = plain_rms_norm(queries, heads.query_norm, heads.eps);
    new_keys = plain_rms_norm(new_keys, heads.key_norm, heads.eps);
  }
  // Padding rows are not written anywhere; any angle works for them.
  const Tensor positions = rows.positions.clamp_min(0);
  const auto& [cosines, sines] = heads.rope;
  q.copy_(plain_rope(queries, positions, cosines, sines).flatten(1));
  new_keys = plain_rope(new_keys, positions, cosines, sines);
  const Tensor pages = at::div(positions, kBlockKeys, "floor") + rows.starts;
  const Tensor places =
      rows.blocks.index_select(0, pages) * kBlockKeys + at::remainder(positions, kBlockKeys);
  const Tensor there = at::nonzero(rows.positions >= 0).squeeze(1);
  const Tensor targets = places.index_select(0, there).to(at::kLong);
  keys.flatten(0, 1).index_copy_(0, targets, new_keys.index_select(0, there));
  values.flatten(0, 1).index_copy_(0, targets, new_values.index_select(0, there));
}

int64_t attention_workspace_size([[maybe_unused]] const HeadCounts& counts,
                                 [[maybe_unused]] int64_t most_positions,
                                 [[maybe_unused]] at::ScalarType type) {
#ifdef LEEWAY_CUDA
  return type == at::kBFloat16 ? cuda::decode_workspace(sizes_of(counts), most_positions)
                               : cuda::attention_workspace(sizes_of(counts));
#else
  return 1;
#endif
}

void attend(const HeadCounts& counts, const PassRows& rows, [[maybe_unused]] int64_t most_positions,
            const Tensor& q, const Tensor& keys, const Tensor& values,
            [[maybe_unused]] const Tensor& workspace, Tensor& out) {
#ifdef LEEWAY_CUDA
  if (q.is_cuda() && q.scalar_type() == at::kBFloat16) {
    const cuda::Attention attention = attention_of(counts, rows, q, keys, values, out);
    cuda::attend_decode_rows(attention, nullptr, rows.decode_rows, most_positions,
                             workspace.data_ptr<float>(), stream_of(q));
    if (rows.tiles.defined()) {
      cuda::attend_tiles(attention, static_cast<cuda::AttentionTile*>(data_of(rows.tiles)),
                         rows.tiles.size(0), stream_of(q));
    }
    return;
  }
  if (q.is_cuda()) {
    cuda::PagedAttention attention;
    attention.sizes = sizes_of(counts);
    attention.places = places_of(rows);
    attention.q = data_of(q), attention.keys = data_of(keys), attention.values = data_of(values);
    attention.out = data_of(out);
    attention.workspace = workspace.data_ptr<float>();
    cuda::paged_attention(attention, stream_of(q));
    return;
  }
#endif
  // Row by row: this is the reference for the kernel and need not be fast.
  const int64_t group = counts.query_heads / counts.kv_heads;
  const double scale = 1.0 / std::sqrt(static_cast<double>(counts.head_dim));
  const auto* positions = rows.positions.data_ptr<int32_t>();
  const auto* starts = rows.starts.data_ptr<int32_t>();
  for (int64_t row = 0; row < q.size(0); ++row) {
    Tensor result = out[row];
    if (positions[row] < 0) {
      result.zero_();
      continue;
    }
    const int64_t count = positions[row] + 1;
    const Tensor blocks = rows.blocks.narrow(0, starts[row], (count + kBlockKeys - 1) / kBlockKeys);
    const auto seen = [&](const Tensor& pages) {  // [kv_heads, count, D]
      return pages.index_select(0, blocks)
          .flatten(0, 1)
          .narrow(0, 0, count)
          .transpose(0, 1)
          .to(at::kFloat);
    };
    const Tensor queries =
        q[row].view({counts.kv_heads, group, counts.head_dim}).to(at::kFloat) * scale;
    const Tensor shares = at::softmax(at::matmul(queries, seen(keys).transpose(1, 2)), -1);
    result.copy_(at::matmul(shares, seen(values)).flatten());
  }
}

void store_and_attend(const HeadWeights& heads, const PassRows& rows, int64_t most_positions,
                      const Tensor& qkv, Tensor& q, Tensor& keys, Tensor& values,
                      const Tensor& workspace, Tensor& out) {
#ifdef LEEWAY_CUDA
  if (qkv.is_cuda() && qkv.scalar_type() == at::kBFloat16 && rows.decode_rows == qkv.size(0) &&
      cuda::makes_heads(sizes_of(heads.counts))) {
    const cuda::HeadStep step = head_step(heads, rows, qkv, q, keys, values);
    cuda::attend_decode_rows(attention_of(heads.counts, rows, q, keys, values, out), &step,
                             rows.decode_rows, most_positions, workspace.data_ptr<float>(),
                             stream_of(qkv));
    return;
  }
#endif
  store_heads(heads, rows, qkv, q, keys, values);
  attend(heads.counts, rows, most_positions, q, keys, values, workspace, out);
}

void swiglu_rows(const Tensor& gate_up, Tensor& s) {
#ifdef LEEWAY_CUDA
  if (s.is_cuda()) {
    const int64_t width = s.size(1);
    const Tensor up = gate_up.narrow(1, width, width);
    cuda::swiglu(dtype_of(s), data_of(gate_up), data_of(up), 2 * width, s.size(0), width,
                 data_of(s), stream_of(s));
    return;
  }
#endif
  const std::vector<Tensor> halves = gate_up.chunk(2, -1);
  // Some versions of ATen compute silu of bf16 in bf16.
  const Tensor gate = at::silu(halves[0].to(wide_type(s))).to(s.scalar_type());
  s.copy_(gate * halves[1]);
}

void project_gated(cuda::Products* products, const Tensor& x, const Tensor& transposed,
                   Tensor& gate_up, Tensor& s) {
#ifdef LEEWAY_CUDA
  if (x.is_cuda() && x.scalar_type() == at::kBFloat16) {
    const cuda::Projection projection = projection_of(x, transposed, Tensor(), s);
    if (cuda::has_gated_few_row_kernel(projection)) {
      return cuda::project_few_rows_gated(projection, stream_of(x));
    }
  }
#endif
  project(products, x, transposed, Tensor(), gate_up);
  swiglu_rows(gate_up, s);
}

int64_t draw_workspace_size(int64_t vocabulary, int64_t draws) {
#ifdef LEEWAY_CUDA
  return cuda::sample_workspace_bytes(vocabulary, draws);
#else
  static_cast<void>(vocabulary), static_cast<void>(draws);
  return 1;
#endif
}

void draw_rows(const Tensor& logits, const DrawnHead& head, const PassRows& rows,
               const Tensor& workspace, Tensor& sampled) {
#ifdef LEEWAY_CUDA
  if (logits.is_cuda()) {
    cuda::SampleRows batch;
    batch.logits = logits.data_ptr<float>();
    batch.vocabulary = logits.size(1), batch.stride = logits.stride(0);
    batch.draws = sampled.size(0);
    batch.rows = rows.draws.data_ptr<int32_t>();
    batch.inverse_temperatures = rows.inverse_temperatures.data_ptr<float>();
    batch.uniforms = rows.uniforms.data_ptr<double>();
    if (head.hidden.defined()) {
      LEEWAY_CHECK(head.hidden.scalar_type() == at::kBFloat16, "a head in bf16");
      batch.hidden = data_of(head.hidden), batch.weight = data_of(head.weight);
      batch.hidden_size = head.hidden.size(1);
    }
    batch.workspace = data_of(workspace);
    batch.sampled = static_cast<cuda::SampledRow*>(data_of(sampled));
    cuda::sample_rows(batch, stream_of(logits));
    return;
  }
#endif
  static_cast<void>(workspace);
  if (sampled.size(0) == 0) return;
  constexpr double kMost = std::numeric_limits<float>::max();
  const int64_t vocabulary = logits.size(1);
  const Tensor z = logits.index_select(0, rows.draws);
  const Tensor inverse = rows.inverse_temperatures.unsqueeze(1);
  const Tensor largest = z.amax(1, true);
  const Tensor shift = largest * inverse;
  const Tensor sound = z.le(kMost)
                           .all(1)
                           .logical_and(largest.isfinite().squeeze(1))
                           .logical_and(shift.isfinite().squeeze(1));
  const Tensor certain = rows.inverse_temperatures == 0.0;

  const Tensor weights = at::exp(z * inverse - shift);
  const Tensor weighs = weights > 0.0;
  const Tensor running = weights.to(at::kDouble).cumsum(1);
  const Tensor target = (rows.uniforms * running.select(1, vocabulary - 1)).unsqueeze(1);
  const Tensor beyond = (running > target).logical_and(weighs);
  // If rounding keeps a sum below its target, the last token with a positive weight is used.
  const Tensor last = vocabulary - 1 - weighs.flip(1).to(at::kInt).argmax(1);
  const Tensor drawn = at::where(beyond.any(1), beyond.to(at::kInt).argmax(1), last);
  const Tensor ids = at::where(certain, z.argmax(1), drawn);

  Tensor recorded = z;
  if (head.hidden.defined()) {
    const Tensor hidden = head.hidden.index_select(0, rows.draws).to(at::kFloat);
    const Tensor own = (hidden * head.weight.index_select(0, ids).to(at::kFloat)).sum(1, true);
    recorded = z.to(head.hidden.scalar_type()).to(at::kFloat).scatter(1, ids.unsqueeze(1), own);
  }
  const auto logprob = [&](const Tensor& scaled) {
    const Tensor all = at::log_softmax(scaled.to(at::kDouble), 1);
    return all.gather(1, ids.unsqueeze(1)).squeeze(1).to(at::kFloat);
  };
  const Tensor raw = logprob(recorded);
  const Tensor processed = logprob(recorded * inverse).masked_fill(certain, 0.0).contiguous();
  const Tensor columns = at::stack({ids.to(at::kInt), raw.view(at::kInt), processed.view(at::kInt),
                                    sound.logical_not().to(at::kInt)},
                                   1);
  sampled.copy_(columns);
}

void copy_kv_blocks(Tensor& kv, const Tensor& pairs) {
#ifdef LEEWAY_CUDA
  if (kv.is_cuda()) {
    const Tensor on_device = pairs.to(kv.device());
    const auto bytes = static_cast<int64_t>(kv.element_size());
    cuda::copy_pages(data_of(kv), kv.size(0), kv.stride(0) * bytes, kv.stride(1) * bytes,
                     on_device.data_ptr<int32_t>(), pairs.size(0), stream_of(kv));
    return;
  }
#endif
  const auto* pair = pairs.data_ptr<int32_t>();
  for (int64_t i = 0; i < pairs.size(0); ++i) {
    kv.select(1, pair[2 * i + 1]).copy_(kv.select(1, pair[2 * i]));
  }
}

}  // namespace leeway
