// Attention of packed sequences and its gradient, of training_operations.h.

#include <cmath>
#include <optional>
#include <vector>

#include "torch/compat.h"
#include "torch/training_operations.h"

#ifdef LEEWAY_CUDA
#include "cuda/attention.h"
#include "cuda/take_rows.h"
#include "torch/cuda_tensors.h"
#endif
#ifdef LEEWAY_CUDNN
#include "cuda/attention_gradient.h"
#endif

namespace leeway {

using at::Tensor;

namespace {

// ---------------------------------------------------------------------------------------------
// The formula in plain ATen

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

// ---------------------------------------------------------------------------------------------
// Ways to the gradient

bool at_once(const Tensor& q) {
  return has_packed_attention(q.device(), q.scalar_type(), q.size(2));
}

// Whether sequences are long enough for what cuDNN costs before the first of a shape.
bool pays_to_prepare(const PackedSequences& sequences, const Tensor& q) {
  constexpr int64_t kLeastScores = int64_t{1} << 22;  // of a head
  return q.size(0) * sequences.longest >= kLeastScores;
}

// Whether cuDNN by way of PyTorch pays: groups have enough sequences to fill the device. With a
// sequence or two each it is no faster than the kernel for packed sequences.
bool in_groups(const PackedSequences& sequences, const Tensor& q) {
  constexpr size_t kLeastSequences = 4;  // of a group, on average
  const size_t groups = sequences.groups.size();
  return pays_to_prepare(sequences, q) && has_batched_attention(q.size(2)) &&
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

#ifdef LEEWAY_CUDNN

// Whether cuDNN itself pays: not for one length, which PyTorch hands to it better, and not where
// sequences are so short that what it does to each row takes longer than the faster kernel saves.
bool by_cudnn_itself(const PackedSequences& sequences, const Tensor& q) {
  constexpr int64_t kLeastLength = 512;  // of a row's sequence, on average
  if (sequences.groups.size() == 1 && !sequences.padded_rows.defined()) return false;
  int64_t squares = 0;
  for (const int64_t length : sequences.lengths) squares += length * length;
  return pays_to_prepare(sequences, q) && squares >= kLeastLength * q.size(0);
}

// Nothing where cuDNN has no plan for such sizes.
std::optional<HeadGradients> attention_backward_by(cuda::AttentionGradients& prepared,
                                                   const PackedSequences& sequences,
                                                   const Tensor& q, const Tensor& k,
                                                   const Tensor& v, const Attended& attended,
                                                   const Tensor& d_out) {
  cuda::AttentionGradient problem;
  problem.sizes = {q.size(1), k.size(1), q.size(2)};
  problem.rows = q.size(0), problem.longest = sequences.longest;
  problem.sequences = static_cast<int64_t>(sequences.lengths.size());
  problem.v_stride = v.stride(0);
  const std::optional<int64_t> bytes = prepared.workspace_bytes(problem);
  if (!bytes) return std::nullopt;
  const HeadGradients d{at::empty_like(q), at::empty_like(k), at::empty_like(k)};
  const Tensor workspace = at::empty({*bytes}, q.options().dtype(at::kByte));
  const Tensor lse = attended.lse.t().contiguous();
  problem.first_rows = sequences.longest_first.data_ptr<int32_t>();
  problem.lengths = problem.first_rows + problem.sequences;
  problem.q = data_of(q), problem.k = data_of(k), problem.v = data_of(v);
  problem.out = data_of(attended.out), problem.d_out = data_of(d_out);
  problem.lse = lse.data_ptr<float>();
  problem.d_q = data_of(d.q), problem.d_k = data_of(d.k), problem.d_v = data_of(d.v);
  prepared.run(problem, data_of(workspace), stream_of(q));
  return d;
}

#endif

}  // namespace

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

std::shared_ptr<cuda::AttentionGradients> make_attention_gradients(
    [[maybe_unused]] at::Device device) {
#ifdef LEEWAY_CUDNN
  if (device.is_cuda()) return std::make_shared<cuda::AttentionGradients>();
#endif
  return nullptr;
}

HeadGradients attention_backward([[maybe_unused]] cuda::AttentionGradients* prepared,
                                 const PackedSequences& sequences, const Tensor& q, const Tensor& k,
                                 const Tensor& v, const Attended& attended, const Tensor& d_out) {
  if (!at_once(q)) return plain_attention_backward(sequences, q, k, v, attended, d_out);
#ifdef LEEWAY_CUDNN
  if (prepared != nullptr && by_cudnn_itself(sequences, q)) {
    const auto by_cudnn = attention_backward_by(*prepared, sequences, q, k, v, attended, d_out);
    if (by_cudnn) return *by_cudnn;
  }
#endif
  if (in_groups(sequences, q)) {
    return grouped_attention_backward(sequences, q, k, v, attended, d_out);
  }
  const auto [d_q, d_k, d_v] = packed_attention_backward(d_out, q, k, v, attended.out, attended.lse,
                                                         sequences.offsets, sequences.longest);
  return {d_q, d_k, d_v};
}

}  // namespace leeway
