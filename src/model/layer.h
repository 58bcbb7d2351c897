// One decoder layer over rows of any sequences, shared by sampling and training.
//
// Shapes: M rows, H hidden, Q = query heads * head_dim, K = key/value heads * head_dim, I
// intermediate.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "base/thread_pool.h"
#include "kernels/attention.h"
#include "kernels/blas.h"
#include "kernels/matmul.h"
#include "kernels/rows.h"
#include "model/model_config.h"
#include "model/parameters.h"

namespace leeway {

// Low-rank matrices of a linear layer's parts: A [rank, inputs] and B [outputs, rank], row-major or
// packed in float32. Both give the same bits.
struct LowRank {
  int64_t rank = 0;  // 0: there are none
  float scale = 0.0f;
  std::array<LoraPointers<const float>, 3> parts{};  // one per part; null: none
  std::array<LoraPointers<const PackedMatrix>, 3> packed{};

  bool has(size_t part) const { return parts[part].a != nullptr || packed[part].a != nullptr; }
};

// Weights [outputs, inputs] of a linear layer: packed, or up to three row-major matrices stacked
// along their outputs. Both give the same bits. The bias is added first, part by part.
struct Linear {
  const PackedMatrix* packed = nullptr;
  std::array<PackedMatrix::Part, 3> parts{};
  int64_t part_count = 0;
  int64_t inputs = 0;
  std::array<const float*, 3> biases{};  // one per part; null: none
  LowRank low_rank{};

  int64_t outputs() const;
};

// y [rows, outputs] = (start) + bias + x W^T + (scale x A^T) B^T, in this order. `numerics` applies
// to unpacked weights: packed ones are always exact. `low` [part_count, rows, rank] receives
// scale x A^T of the parts that have one; not looked at without low-rank matrices.
void apply(Team& team, Numerics numerics, const Linear& linear, const float* x, int64_t rows,
           float* y, Start start, float* low);

struct LayerWeights {
  const float *input_norm, *post_norm;  // [H]
  const float *q_norm, *k_norm;         // [head_dim] or null
  Linear qkv, o, gate_up, down;
};
// The weights of layer `index` in place in a Parameters.
LayerWeights raw_layer(const ModelConfig& config, const NetworkPointers<const float>& network,
                       size_t index);

// Shared by all layers of a pass.
struct Pass {
  HeadLayout layout;
  int64_t hidden, intermediate;
  float eps;
  Numerics numerics;
  const float *cosines, *sines;  // [positions, head_dim / 2]
  int64_t rows;
  const int32_t* positions;  // [M]
  std::span<const SequenceRows> sequences;

  HeadTransform heads(const LayerWeights& weights) const {
    return {layout, weights.q_norm, weights.k_norm, eps, cosines, sines};
  }
};
Pass make_pass(const ModelConfig& config);

// A layer's intermediate results.
struct LayerBuffers {
  float* h;          // [M, H] normed input, then normed middle
  float* qkv;        // [M, Q + 2K]
  float *q, *k;      // [M, Q], [M, K]
  float* attention;  // [M, Q]
  float* log_sums;   // [M, query heads] or null
  float* middle;     // [M, H] after attention; may be the layer's x
  float* gate_up;    // [M, 2I]
  float* s;          // [M, I]
  float* input_rms;  // [M] or null
  float* post_rms;   // [M] or null
  // With an adapter: inputs times A, as `apply` leaves them.
  float *low_qkv, *low_o, *low_gate_up, *low_down;
};

// middle = x + o(attention(norm(x)));   out = middle + down(silu(gate) * up)(norm(middle))
// x, middle and out may be the same array. Keys and values of the rows are first stored in `kv`.
void layer_forward(Team& team, const Pass& pass, const LayerWeights& weights, const KvBlocks& kv,
                   const LayerBuffers& buffers, const float* x, float* out);

// values *= factor, on all threads of the team.
void multiply_by(Team& team, float factor, float* values, int64_t count);

// Copies rows of width H on all threads of the team.
void copy_rows(Team& team, const float* from, int64_t rows, int64_t width, float* to);

}  // namespace leeway
