#include "cuda/attention_gradient.h"

#include <cudnn_frontend.h>
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <unordered_map>
#include <utility>

#include "cuda/device.h"
#include "cuda/ragged_offsets.h"
#include "leeway/error.h"

namespace leeway::cuda {
namespace {

namespace fe = cudnn_frontend;
using Array = std::shared_ptr<fe::graph::Tensor_attributes>;
using Sizes = std::vector<int64_t>;

enum Place : int64_t {
  kQ = 1,
  kK,
  kV,
  kOut,
  kDOut,
  kLse,
  kLengths,
  kDQ,
  kDK,
  kDV,
  kQueryStarts,
  kKeyStarts,
  kValueStarts,
  kLseStarts,
};

void check(cudnnStatus_t status, const char* what) {
  if (status == CUDNN_STATUS_SUCCESS) return;
  throw Error(fmt::format("cuDNN: {}: {}", what, cudnnGetErrorString(status)));
}

int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

int64_t power_above(int64_t value) {
  return static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(value)));
}

}  // namespace

struct AttentionGradients::Handle {
  Handle() { check(cudnnCreate(&cudnn), "start"); }
  ~Handle() { cudnnDestroy(cudnn); }
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;
  cudnnHandle_t cudnn = nullptr;
};

struct AttentionGradients::Plan {
  AttentionPlanShape shape;
  fe::graph::Graph graph;
  int64_t graph_bytes = 0;
};

// The longest and the number of sequences decide how many blocks have nothing to do; the rows
// decide memory alone.
AttentionPlanShape plan_shape(int64_t sequences, int64_t longest, int64_t rows) {
  constexpr int64_t kLeastSequences = 8, kLeastLength = 512, kLeastRows = 2048;
  const int64_t step = std::max(kLeastRows, power_above(rows) / 8);
  return {std::max(kLeastSequences, power_above(sequences)),
          std::max(kLeastLength, power_above(longest)), round_up(rows, step)};
}

AttentionGradients::AttentionGradients() = default;
AttentionGradients::~AttentionGradients() = default;

const AttentionGradients::Plan* AttentionGradients::plan_of(const AttentionGradient& p) {
  const AttentionPlanShape shape = plan_shape(p.sequences, p.longest, p.rows);
  const auto& [heads, kv_heads, head_dim] = p.sizes;
  const auto [at, is_new] = plans_.try_emplace(Key{shape, heads, kv_heads, head_dim, p.v_stride});
  if (!is_new) return at->second.get();
  if (handle_ == nullptr) handle_ = std::make_unique<Handle>();

  auto plan = std::make_unique<Plan>();
  plan->shape = shape;
  fe::graph::Graph& graph = plan->graph;
  graph.set_io_data_type(fe::DataType_t::BFLOAT16)
      .set_intermediate_data_type(fe::DataType_t::FLOAT)
      .set_compute_data_type(fe::DataType_t::FLOAT);
  const auto array = [&](Place place, const Sizes& sizes, const Sizes& strides,
                         fe::DataType_t type) {
    return graph.tensor(fe::graph::Tensor_attributes()
                            .set_uid(place)
                            .set_dim(sizes)
                            .set_stride(strides)
                            .set_data_type(type));
  };
  const auto starts = [&](Place place) {
    return array(place, {shape.sequences + 1, 1, 1, 1}, {1, 1, 1, 1}, fe::DataType_t::INT64);
  };
  const Array query_starts = starts(kQueryStarts), key_starts = starts(kKeyStarts);
  const Array value_starts = starts(kValueStarts), lse_starts = starts(kLseStarts);
  const Array lengths =
      array(kLengths, {shape.sequences, 1, 1, 1}, {1, 1, 1, 1}, fe::DataType_t::INT32);
  // Of rows that are `stride` apart, sequence by sequence.
  const auto set_rows = [&, d = head_dim](const Array& of, int64_t count, int64_t stride,
                                          const Array& begin) {
    of->set_dim({shape.sequences, count, shape.longest, d})
        .set_stride({shape.longest * stride, d, stride, 1})
        .set_ragged_offset(begin);
  };
  const auto rows = [&](Place place, int64_t count, int64_t stride, const Array& begin) {
    const Array of = array(place, {1, 1, 1, 1}, {1, 1, 1, 1}, fe::DataType_t::BFLOAT16);
    set_rows(of, count, stride, begin);
    return of;
  };
  const int64_t width = heads * head_dim, kv_width = kv_heads * head_dim;
  const Array q = rows(kQ, heads, width, query_starts);
  const Array k = rows(kK, kv_heads, kv_width, key_starts);
  const Array v = rows(kV, kv_heads, p.v_stride, value_starts);
  const Array out = rows(kOut, heads, width, query_starts);
  const Array d_out = rows(kDOut, heads, width, query_starts);
  const Array lse = array(kLse, {shape.sequences, heads, shape.longest, 1},
                          {shape.longest * heads, 1, heads, 1}, fe::DataType_t::FLOAT);
  lse->set_ragged_offset(lse_starts);
  const auto gradients = graph.sdpa_backward(
      q, k, v, out, d_out, lse,
      fe::graph::SDPA_backward_attributes()
          .set_name("attention")
          .set_attn_scale(static_cast<float>(1.0 / std::sqrt(static_cast<double>(head_dim))))
          .set_causal_mask(true)
          .set_padding_mask(true)
          .set_seq_len_q(lengths)
          .set_seq_len_kv(lengths)
          .set_max_total_seq_len_q(shape.rows)
          .set_max_total_seq_len_kv(shape.rows));
  const auto give = [&](const Array& to, Place place, int64_t count, const Array& begin) {
    to->set_output(true).set_uid(place).set_data_type(fe::DataType_t::BFLOAT16);
    set_rows(to, count, count * head_dim, begin);
  };
  give(gradients[0], kDQ, heads, query_starts);
  give(gradients[1], kDK, kv_heads, key_starts);
  give(gradients[2], kDV, kv_heads, key_starts);
  if (graph.build(handle_->cudnn, {fe::HeurMode_t::A}).is_bad() ||
      graph.get_workspace_size(plan->graph_bytes).is_bad()) {
    return nullptr;
  }
  at->second = std::move(plan);
  return at->second.get();
}

namespace {

struct Workspace {
  RaggedOffsets offsets;
  char* graph;
};

Workspace lay_out(const AttentionGradient& p, const AttentionPlanShape& shape, int64_t graph_bytes,
                  Arena& arena) {
  const auto& [heads, kv_heads, head_dim] = p.sizes;
  Workspace work{{{heads * head_dim, kv_heads * head_dim, p.v_stride, heads}}, nullptr};
  work.offsets.starts = arena.take<int64_t>(RaggedOffsets::kKinds * (shape.sequences + 1));
  work.offsets.lengths = arena.take<int32_t>(shape.sequences);
  work.graph = arena.take<char>(graph_bytes);
  return work;
}

}  // namespace

std::optional<int64_t> AttentionGradients::workspace_bytes(const AttentionGradient& problem) {
  const Plan* plan = plan_of(problem);
  if (plan == nullptr) return std::nullopt;
  Arena arena(nullptr);
  lay_out(problem, plan->shape, plan->graph_bytes, arena);
  return arena.used();
}

void AttentionGradients::run(const AttentionGradient& p, void* workspace, cudaStream_t stream) {
  const Plan* plan = plan_of(p);
  LEEWAY_CHECK(plan != nullptr, "a shape that has a workspace");
  Arena arena(workspace);
  const Workspace work = lay_out(p, plan->shape, plan->graph_bytes, arena);
  make_ragged_offsets({p.first_rows, p.lengths, p.sequences, p.rows}, plan->shape.sequences,
                      work.offsets, stream);
  const auto starts = [&](int kind) {
    return work.offsets.starts + kind * (plan->shape.sequences + 1);
  };
  std::unordered_map<int64_t, void*> places;
  for (const auto& [place, data] : {std::pair<Place, const void*>{kQ, p.q},
                                    {kK, p.k},
                                    {kV, p.v},
                                    {kOut, p.out},
                                    {kDOut, p.d_out},
                                    {kLse, p.lse},
                                    {kLengths, work.offsets.lengths},
                                    {kDQ, p.d_q},
                                    {kDK, p.d_k},
                                    {kDV, p.d_v},
                                    {kQueryStarts, starts(0)},
                                    {kKeyStarts, starts(1)},
                                    {kValueStarts, starts(2)},
                                    {kLseStarts, starts(3)}}) {
    places[place] = const_cast<void*>(data);
  }
  check(cudnnSetStream(handle_->cudnn, stream), "a stream");
  auto status = plan->graph.execute(handle_->cudnn, places, work.graph);
  if (status.is_bad()) {
    throw Error("cuDNN: the gradient of attention: " + status.get_message());
  }
}

}  // namespace leeway::cuda
