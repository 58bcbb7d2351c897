#include "model/layer.h"

#include <algorithm>
#include <cstring>

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

}  // namespace

int64_t Linear::outputs() const {
  int64_t sum = 0;
  for (int64_t i = 0; i < part_count; ++i) sum += parts[static_cast<size_t>(i)].outputs;
  return sum;
}

void apply(Team& team, Numerics numerics, const Linear& linear, const float* x, int64_t rows,
           float* y, Start start) {
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
}

LayerWeights raw_layer(const ModelConfig& config, const LayerPointers<const float>& layer) {
  const int64_t queries = config.num_attention_heads * config.head_dim;
  const int64_t keys = config.num_key_value_heads * config.head_dim;
  LayerWeights weights{};
  weights.input_norm = layer.input_norm, weights.post_norm = layer.post_norm;
  weights.q_norm = layer.q_norm, weights.k_norm = layer.k_norm;
  weights.qkv = {nullptr,
                 {{{layer.q, queries}, {layer.k, keys}, {layer.v, keys}}},
                 3,
                 config.hidden_size,
                 {layer.q_bias, layer.k_bias, layer.v_bias}};
  weights.o = {nullptr, {{{layer.o, config.hidden_size}}}, 1, queries, {layer.o_bias}};
  weights.gate_up = {
      nullptr,
      {{{layer.gate, config.intermediate_size}, {layer.up, config.intermediate_size}}},
      2,
      config.hidden_size,
      {}};
  weights.down = {nullptr, {{{layer.down, config.hidden_size}}}, 1, config.intermediate_size, {}};
  return weights;
}

Pass make_pass(const ModelConfig& config) {
  Pass pass{};
  pass.layout = {config.num_attention_heads, config.num_key_value_heads, config.head_dim};
  pass.hidden = config.hidden_size, pass.intermediate = config.intermediate_size;
  pass.eps = static_cast<float>(config.rms_norm_eps);
  return pass;
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
  apply(team, pass.numerics, weights.qkv, b.h, rows, b.qkv);
  transform_heads(team, pass.heads(weights), b.qkv, pass.positions, rows, b.q, b.k);
  const float* v = b.qkv + pass.layout.query_width() + pass.layout.kv_width();
  store_kv(team, pass.layout, pass.sequences, b.k, v, pass.layout.width(), kv);
  attend(team, pass.layout, pass.sequences, b.q, kv, b.attention, b.log_sums);
  if (b.middle != x) copy_rows(team, x, rows, pass.hidden, b.middle);
  apply(team, pass.numerics, weights.o, b.attention, rows, b.middle, Start::old_value);

  rms_norm(team, b.middle, rows, pass.hidden, weights.post_norm, pass.eps, b.h, b.post_rms);
  apply(team, pass.numerics, weights.gate_up, b.h, rows, b.gate_up);
  swiglu(team, b.gate_up, rows, pass.intermediate, b.s);
  if (out != b.middle) copy_rows(team, b.middle, rows, pass.hidden, out);
  apply(team, pass.numerics, weights.down, b.s, rows, out, Start::old_value);
}

}  // namespace leeway
