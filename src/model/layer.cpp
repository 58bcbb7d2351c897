#include "model/layer.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace leeway {
namespace {

constexpr int64_t kCopyRows = 32;

// y[row] = bias, or y[row] += bias.
void begin_with_bias(Team& team, const float* bias, int64_t rows, int64_t width, int64_t ldy,
                     Start start, float* y) {
  team.for_each((rows + kCopyRows - 1) / kCopyRows, [&](int64_t block) {
    for (int64_t row = block * kCopyRows; row < std::min(rows, (block + 1) * kCopyRows); ++row) {
      float* to = y + row * ldy;
      for (int64_t j = 0; j < width; ++j) {
        to[j] = start == Start::zero ? bias[j] : to[j] + bias[j];
      }
    }
  });
}

// y += (scale x A^T) B^T, part by part.
void add_low_rank(Team& team, Numerics numerics, const Linear& linear, const float* x, int64_t rows,
                  float* y, float* low) {
  const LowRank& lora = linear.low_rank;
  const int64_t width = linear.outputs(), rank = lora.rank;
  int64_t column = 0;
  for (size_t i = 0; i < static_cast<size_t>(linear.part_count); ++i, low += rows * rank) {
    const int64_t outputs = linear.parts[i].outputs;
    float* to = y + std::exchange(column, column + outputs);
    if (!lora.has(i)) continue;
    const LoraPointers<const PackedMatrix>& packed = lora.packed[i];
    if (packed.a != nullptr) {
      product(team, x, rows, linear.inputs, *packed.a, low, rank);
      multiply_by(team, lora.scale, low, rows * rank);
      product(team, low, rows, rank, *packed.b, to, width, Start::old_value);
    } else {
      multiply(team, numerics, rows, rank, linear.inputs, rows_of(x, linear.inputs),
               columns_of(lora.parts[i].a, linear.inputs), low, rank);
      multiply_by(team, lora.scale, low, rows * rank);
      multiply(team, numerics, rows, outputs, rank, rows_of(low, rank),
               columns_of(lora.parts[i].b, rank), to, width, Start::old_value);
    }
  }
}

}  // namespace

int64_t Linear::outputs() const {
  int64_t sum = 0;
  for (int64_t i = 0; i < part_count; ++i) sum += parts[static_cast<size_t>(i)].outputs;
  return sum;
}

void apply(Team& team, Numerics numerics, const Linear& linear, const float* x, int64_t rows,
           float* y, Start start, float* low) {
  const int64_t width = linear.outputs();
  Start begin = start;
  int64_t column = 0;
  for (size_t i = 0; i < static_cast<size_t>(linear.part_count); ++i) {
    const int64_t outputs = linear.parts[i].outputs;
    if (linear.biases[i] != nullptr) {
      begin_with_bias(team, linear.biases[i], rows, outputs, width, start, y + column);
      begin = Start::old_value;
    }
    if (linear.packed == nullptr) {
      multiply(team, numerics, rows, outputs, linear.inputs, rows_of(x, linear.inputs),
               columns_of(linear.parts[i].data, linear.inputs), y + column, width, begin);
    }
    column += outputs;
  }
  if (linear.packed != nullptr) {
    product(team, x, rows, linear.inputs, *linear.packed, y, width, begin);
  }
  if (linear.low_rank.rank > 0) add_low_rank(team, numerics, linear, x, rows, y, low);
}

LayerWeights raw_layer(const ModelConfig& config, const NetworkPointers<const float>& network,
                       size_t index) {
  const LayerPointers<const float>& layer = network.layers[index];
  const auto lora = [&](const LoraPointers<const float>& a, const LoraPointers<const float>& b = {},
                        const LoraPointers<const float>& c = {}) -> LowRank {
    return {network.rank, network.lora_scale, {a, b, c}, {}};
  };
  const int64_t queries = config.num_attention_heads * config.head_dim;
  const int64_t keys = config.num_key_value_heads * config.head_dim;
  LayerWeights weights{};
  weights.input_norm = layer.input_norm, weights.post_norm = layer.post_norm;
  weights.q_norm = layer.q_norm, weights.k_norm = layer.k_norm;
  weights.qkv = {nullptr,
                 {{{layer.q, queries}, {layer.k, keys}, {layer.v, keys}}},
                 3,
                 config.hidden_size,
                 {layer.q_bias, layer.k_bias, layer.v_bias},
                 lora(layer.q_lora, layer.k_lora, layer.v_lora)};
  weights.o = {nullptr,           {{{layer.o, config.hidden_size}}}, 1, queries, {layer.o_bias},
               lora(layer.o_lora)};
  weights.gate_up = {
      nullptr, {{{layer.gate, config.intermediate_size}, {layer.up, config.intermediate_size}}},
      2,       config.hidden_size,
      {},      lora(layer.gate_lora, layer.up_lora)};
  weights.down = {nullptr, {{{layer.down, config.hidden_size}}},
                  1,       config.intermediate_size,
                  {},      lora(layer.down_lora)};
  return weights;
}

Pass make_pass(const ModelConfig& config) {
  Pass pass{};
  pass.layout = {config.num_attention_heads, config.num_key_value_heads, config.head_dim};
  pass.hidden = config.hidden_size, pass.intermediate = config.intermediate_size;
  pass.eps = static_cast<float>(config.rms_norm_eps);
  return pass;
}

void multiply_by(Team& team, float factor, float* values, int64_t count) {
  constexpr int64_t kBlock = 4096;
  team.for_each((count + kBlock - 1) / kBlock, [&](int64_t block) {
    for (int64_t i = block * kBlock; i < std::min(count, (block + 1) * kBlock); ++i) {
      values[i] *= factor;
    }
  });
}

void copy_rows(Team& team, const float* from, int64_t rows, int64_t width, float* to) {
  team.for_each((rows + kCopyRows - 1) / kCopyRows, [&](int64_t block) {
    const int64_t first = block * kCopyRows, count = std::min(kCopyRows, rows - first);
    std::memcpy(to + first * width, from + first * width,
                static_cast<size_t>(count * width) * sizeof(float));
  });
}

void layer_forward(Team& team, const Pass& pass, const LayerWeights& weights, const KvBlocks& kv,
                   const LayerBuffers& b, const float* x, float* out) {
  const int64_t rows = pass.rows;
  rms_norm(team, x, rows, pass.hidden, weights.input_norm, pass.eps, b.h, b.input_rms);
  apply(team, pass.numerics, weights.qkv, b.h, rows, b.qkv, Start::zero, b.low_qkv);
  transform_heads(team, pass.heads(weights), b.qkv, pass.positions, rows, b.q, b.k);
  const float* v = b.qkv + pass.layout.query_width() + pass.layout.kv_width();
  store_kv(team, pass.layout, pass.sequences, b.k, v, pass.layout.width(), kv);
  attend(team, pass.layout, pass.sequences, b.q, kv, b.attention, b.log_sums);
  if (b.middle != x) copy_rows(team, x, rows, pass.hidden, b.middle);
  apply(team, pass.numerics, weights.o, b.attention, rows, b.middle, Start::old_value, b.low_o);

  rms_norm(team, b.middle, rows, pass.hidden, weights.post_norm, pass.eps, b.h, b.post_rms);
  apply(team, pass.numerics, weights.gate_up, b.h, rows, b.gate_up, Start::zero, b.low_gate_up);
  swiglu(team, b.gate_up, rows, pass.intermediate, b.s);
  if (out != b.middle) copy_rows(team, b.middle, rows, pass.hidden, out);
  apply(team, pass.numerics, weights.down, b.s, rows, out, Start::old_value, b.low_down);
}

}  // namespace leeway
