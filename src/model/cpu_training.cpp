#include <algorithm>
#include <cstring>

#include "leeway/error.h"
#include "model/cpu_decoder.h"
#include "model/layer.h"
#include "model/workspace.h"

// Training passes: the results of layer_forward are stored or recomputed, and differentiated in
// reverse. Gradients sum over tokens in order, so they depend on the batch alone.

namespace leeway {

struct Activations::Impl {
  // Stored for each layer; with recomputation, all but `x` are shared by all layers, or
  // `buffers.gate_up` alone.
  struct Layer {
    float* x = nullptr;
    LayerBuffers buffers{};
  };

  bool filled = false;
  bool recompute = false, recompute_gate_up = false;
  Numerics numerics = Numerics::exact;
  int64_t rows = 0;
  std::vector<Layer> layers;
  float* last = nullptr;      // [M, H] input of the final norm
  float* last_rms = nullptr;  // [M]
  AlignedVector<float> floats;

  // The pass they belong to.
  std::vector<int32_t> positions, blocks;
  std::vector<SequenceRows> sequences;
  AlignedVector<float> kv;
  std::vector<float> cosines, sines;
  int64_t rope_positions = 0;
  AlignedVector<float> gradient_floats;  // for the backward pass
};

Activations::Activations() : impl(std::make_unique<Impl>()) {}
Activations::~Activations() = default;
Activations::Activations(Activations&&) noexcept = default;
Activations& Activations::operator=(Activations&&) noexcept = default;
size_t Activations::bytes() const { return impl->floats.size() * sizeof(float); }

namespace {

// Sequences of a batch as rows of one pass, with a KV cache for one layer at a time.
Pass begin_pass(const ModelConfig& config, const PackedTokens& batch, Activations::Impl& state) {
  const auto rows = static_cast<int64_t>(batch.tokens.size());
  state.rows = rows;
  state.positions.resize(batch.tokens.size());
  state.sequences.clear();
  int64_t longest = 0, block_count = 0;
  for (size_t s = 0; s + 1 < batch.cu_seqlens.size(); ++s) {
    const int64_t first = batch.cu_seqlens[s], length = batch.cu_seqlens[s + 1] - first;
    for (int64_t i = 0; i < length; ++i) {
      state.positions[static_cast<size_t>(first + i)] = static_cast<int32_t>(i);
    }
    longest = std::max(longest, length);
    state.sequences.push_back({first, length, 0, nullptr});
    block_count += (length + kBlockKeys - 1) / kBlockKeys;
  }
  state.blocks.resize(static_cast<size_t>(block_count));
  for (size_t b = 0; b < state.blocks.size(); ++b) state.blocks[b] = static_cast<int32_t>(b);
  int64_t next = 0;
  for (SequenceRows& sequence : state.sequences) {
    sequence.blocks = state.blocks.data() + next;
    next += (sequence.rows + kBlockKeys - 1) / kBlockKeys;
  }
  if (state.rope_positions < longest) {
    const RopeTable rope(config, longest);
    state.cosines = rope.cosines, state.sines = rope.sines;
    state.rope_positions = longest;
  }
  Pass pass = make_pass(config);
  pass.rows = rows, pass.positions = state.positions.data(), pass.sequences = state.sequences;
  pass.cosines = state.cosines.data(), pass.sines = state.sines.data();
  pass.numerics = state.numerics;
  const auto kv_floats = static_cast<size_t>(block_count * KvBlocks::block_floats(pass.layout));
  if (state.kv.size() < kv_floats) state.kv.resize(kv_floats);
  return pass;
}

KvBlocks kv_of(const Pass& pass, Activations::Impl& state) {
  return {state.kv.data(), KvBlocks::block_floats(pass.layout)};
}

// Of `rank` 0 there is nothing to keep.
void want_low(Workspace& workspace, int64_t rows, int64_t rank, LayerBuffers& b) {
  workspace.want(b.low_qkv, 3 * rows * rank);
  workspace.want(b.low_o, rows * rank);
  workspace.want(b.low_gate_up, 2 * rows * rank);
  workspace.want(b.low_down, rows * rank);
}

void want_gate_up(Workspace& workspace, const Pass& pass, LayerBuffers& b) {
  workspace.want(b.gate_up, 2 * pass.intermediate * pass.rows);
}

void want_buffers(Workspace& workspace, const Pass& pass, int64_t rank, LayerBuffers& b) {
  const int64_t rows = pass.rows;
  want_low(workspace, rows, rank, b);
  workspace.want(b.qkv, pass.layout.width() * rows);
  workspace.want(b.q, pass.layout.query_width() * rows);
  workspace.want(b.k, pass.layout.kv_width() * rows);
  workspace.want(b.attention, pass.layout.query_width() * rows);
  workspace.want(b.log_sums, pass.layout.query_heads * rows);
  workspace.want(b.middle, pass.hidden * rows);
  workspace.want(b.input_rms, rows);
  workspace.want(b.post_rms, rows);
}

// Lays out arrays for a forward that stores activations (`keep`) or does not.
void lay_out(const Pass& pass, const NetworkPointers<const float>& network, bool keep,
             Activations::Impl& state) {
  state.layers.assign(network.layers.size(), {});
  Workspace workspace;
  LayerBuffers shared{};
  workspace.want(shared.h, pass.hidden * pass.rows);
  workspace.want(shared.s, pass.intermediate * pass.rows);
  const bool one_set = !keep || state.recompute;
  const bool one_gate_up = one_set || state.recompute_gate_up;
  if (one_set) want_buffers(workspace, pass, network.rank, shared);
  if (one_gate_up) want_gate_up(workspace, pass, shared);
  float* x = nullptr;
  if (!keep) workspace.want(x, pass.hidden * pass.rows);
  for (auto& layer : state.layers) {
    if (keep) workspace.want(layer.x, pass.hidden * pass.rows);
    if (!one_set) want_buffers(workspace, pass, network.rank, layer.buffers);
    if (!one_gate_up) want_gate_up(workspace, pass, layer.buffers);
  }
  if (keep) workspace.want(state.last, pass.hidden * pass.rows);
  workspace.want(state.last_rms, pass.rows);
  workspace.lay_out(state.floats);
  for (auto& layer : state.layers) {
    if (one_set) layer.buffers = shared;
    layer.buffers.h = shared.h, layer.buffers.s = shared.s;
    if (one_gate_up) layer.buffers.gate_up = shared.gate_up;
    if (!keep) layer.x = x;
  }
  if (!keep) state.last = x;
}

void embed(Team& team, const float* table, int64_t width, std::span<const int32_t> tokens,
           float* x) {
  constexpr int64_t kBlock = 64;
  const auto rows = static_cast<int64_t>(tokens.size());
  team.for_each((rows + kBlock - 1) / kBlock, [&](int64_t block) {
    for (int64_t row = block * kBlock; row < std::min(rows, (block + 1) * kBlock); ++row) {
      std::memcpy(x + row * width, table + tokens[static_cast<size_t>(row)] * width,
                  static_cast<size_t>(width) * sizeof(float));
    }
  });
}

// Rows of dx are added to their tokens' rows in order; the team's threads split the columns.
void embed_backward(Team& team, const float* dx, int64_t width, std::span<const int32_t> tokens,
                    float* dtable) {
  constexpr int64_t kBlock = 32;
  team.for_each((width + kBlock - 1) / kBlock, [&](int64_t block) {
    const int64_t first = block * kBlock, last = std::min(width, first + kBlock);
    for (size_t row = 0; row < tokens.size(); ++row) {
      const float* from = dx + static_cast<int64_t>(row) * width;
      float* to = dtable + tokens[row] * width;
      for (int64_t j = first; j < last; ++j) to[j] += from[j];
    }
  });
}

// Where the gradients of a linear layer's parts go; null: the part has none, or it is frozen.
struct LinearGradients {
  std::array<float*, 3> weights{}, biases{};
  std::array<LoraPointers<float>, 3> low_rank{};
};

// y = .. + low B^T with low = scale x A^T: from dy adds to the gradients of A and B and to dx.
// `dlow` [rows, rank] is a workspace.
void low_rank_backward(Team& team, Numerics numerics, const Linear& linear, size_t part,
                       const float* x, const float* low, const float* dy, int64_t rows,
                       const LoraPointers<float>& grads, float* dlow, float* dx) {
  const LowRank& lora = linear.low_rank;
  const int64_t width = linear.outputs(), outputs = linear.parts[part].outputs;
  const int64_t rank = lora.rank, inputs = linear.inputs;
  multiply(team, numerics, outputs, rank, rows, columns_of(dy, width), rows_of(low, rank), grads.b,
           rank, Start::old_value);
  multiply(team, numerics, rows, rank, outputs, rows_of(dy, width),
           rows_of(lora.parts[part].b, rank), dlow, rank);
  multiply_by(team, lora.scale, dlow, rows * rank);
  multiply(team, numerics, rank, inputs, rows, columns_of(dlow, rank), rows_of(x, inputs), grads.a,
           inputs, Start::old_value);
  multiply(team, numerics, rows, inputs, rank, rows_of(dlow, rank),
           rows_of(lora.parts[part].a, inputs), dx, inputs, Start::old_value);
}

// What a linear layer was applied to and gave: x [rows, inputs], low as `apply` left it.
struct LinearInput {
  const float *x, *low;
};

// From dy [rows, outputs] (rows `outputs()` apart): adds to the gradients, and computes dx
// [rows, inputs]. `dlow` is a workspace.
void linear_backward(Team& team, Numerics numerics, const Linear& linear, const LinearInput& input,
                     const float* dy, int64_t rows, const LinearGradients& grads, float* dlow,
                     float* dx) {
  const int64_t width = linear.outputs();
  int64_t column = 0;
  for (size_t i = 0; i < static_cast<size_t>(linear.part_count); ++i) {
    const int64_t outputs = linear.parts[i].outputs;
    if (grads.weights[i] != nullptr) {
      multiply(team, numerics, outputs, linear.inputs, rows, columns_of(dy + column, width),
               rows_of(input.x, linear.inputs), grads.weights[i], linear.inputs, Start::old_value);
    }
    if (grads.biases[i] != nullptr) {
      add_column_sums(team, dy + column, rows, outputs, width, grads.biases[i]);
    }
    multiply(team, numerics, rows, linear.inputs, outputs, rows_of(dy + column, width),
             rows_of(linear.parts[i].data, linear.inputs), dx, linear.inputs,
             i == 0 ? Start::zero : Start::old_value);
    if (linear.low_rank.rank > 0 && linear.low_rank.has(i)) {
      const float* low = input.low + static_cast<int64_t>(i) * rows * linear.low_rank.rank;
      low_rank_backward(team, numerics, linear, i, input.x, low, dy + column, rows,
                        grads.low_rank[i], dlow, dx);
    }
    column += outputs;
  }
}

// Arrays of the backward pass, shared by all layers.
struct GradientBuffers {
  float *dx, *dh, *ds, *dgate_up, *dattention, *dq, *dk, *dqkv, *dlow;
};

void lay_out(const Pass& pass, int64_t rank, Activations::Impl& state, GradientBuffers& g) {
  Workspace workspace;
  workspace.want(g.dlow, rank * pass.rows);
  workspace.want(g.dx, pass.hidden * pass.rows);
  workspace.want(g.dh, pass.hidden * pass.rows);
  workspace.want(g.ds, pass.intermediate * pass.rows);
  workspace.want(g.dgate_up, 2 * pass.intermediate * pass.rows);
  workspace.want(g.dattention, pass.layout.query_width() * pass.rows);
  workspace.want(g.dq, pass.layout.query_width() * pass.rows);
  workspace.want(g.dk, pass.layout.kv_width() * pass.rows);
  workspace.want(g.dqkv, pass.layout.width() * pass.rows);
  workspace.lay_out(state.gradient_floats);
}

// g.dx: d loss / d output on entry, d loss / d input on return.
void layer_backward(Team& team, const Pass& pass, const LayerWeights& weights,
                    const Activations::Impl::Layer& kept, const GradientBuffers& g,
                    const LayerPointers<float>& grads) {
  const int64_t rows = pass.rows;
  const LayerBuffers& b = kept.buffers;
  const int64_t v_column = pass.layout.query_width() + pass.layout.kv_width();

  // out = middle + down(s);  s = silu(gate) up;  [gate | up] = gate_up(norm(middle))
  swiglu(team, b.gate_up, rows, pass.intermediate, b.s);
  linear_backward(team, pass.numerics, weights.down, {b.s, b.low_down}, g.dx, rows,
                  {{grads.down}, {}, {grads.down_lora}}, g.dlow, g.ds);
  swiglu_backward(team, b.gate_up, g.ds, rows, pass.intermediate, g.dgate_up);
  rms_norm(team, b.middle, rows, pass.hidden, weights.post_norm, pass.eps, b.h);
  linear_backward(team, pass.numerics, weights.gate_up, {b.h, b.low_gate_up}, g.dgate_up, rows,
                  {{grads.gate, grads.up}, {}, {grads.gate_lora, grads.up_lora}}, g.dlow, g.dh);
  rms_norm_backward(team, b.middle, g.dh, rows, pass.hidden, weights.post_norm, b.post_rms, g.dx,
                    grads.post_norm);

  // middle = x + o(attention);  [q | k | v] = qkv(norm(x))
  linear_backward(team, pass.numerics, weights.o, {b.attention, b.low_o}, g.dx, rows,
                  {{grads.o}, {grads.o_bias}, {grads.o_lora}}, g.dlow, g.dattention);
  attend_backward(team, pass.layout, pass.sequences, b.q, b.k, b.qkv + v_column,
                  pass.layout.width(), b.attention, g.dattention, b.log_sums, g.dq, g.dk,
                  g.dqkv + v_column, pass.layout.width());
  transform_heads_backward(team, pass.heads(weights), b.qkv, pass.positions, rows, g.dq, g.dk,
                           g.dqkv, grads.q_norm, grads.k_norm);
  rms_norm(team, kept.x, rows, pass.hidden, weights.input_norm, pass.eps, b.h);
  linear_backward(team, pass.numerics, weights.qkv, {b.h, b.low_qkv}, g.dqkv, rows,
                  {{grads.q, grads.k, grads.v},
                   {grads.q_bias, grads.k_bias, grads.v_bias},
                   {grads.q_lora, grads.k_lora, grads.v_lora}},
                  g.dlow, g.dh);
  rms_norm_backward(team, kept.x, g.dh, rows, pass.hidden, weights.input_norm, b.input_rms, g.dx,
                    grads.input_norm);
}

}  // namespace

void training_forward(ThreadPool& pool, const Parameters& parameters, const PackedTokens& batch,
                      const TrainingOptions& options, std::span<float> hidden,
                      Activations* activations) {
  const ModelConfig& config = parameters.config();
  check_tokens(config, batch);
  LEEWAY_CHECK(hidden.size() == batch.tokens.size() * static_cast<size_t>(config.hidden_size),
               "hidden must be [N, H]");
  Activations own;
  const bool keep = activations != nullptr;
  Activations::Impl& state = *(keep ? *activations : own).impl;
  state.recompute = options.recompute_activations;
  state.recompute_gate_up = options.recompute_gate_up;
  state.numerics = options.numerics;
  if (options.numerics == Numerics::fast) require_blas();
  const Pass pass = begin_pass(config, batch, state);
  const auto network = network_of(parameters);
  lay_out(pass, network, keep, state);
  pool.run_team([&](Team& team) {
    embed(team, network.embedding, pass.hidden, batch.tokens,
          state.layers.empty() ? state.last : state.layers.front().x);
    for (size_t i = 0; i < network.layers.size(); ++i) {
      float* out = i + 1 < network.layers.size() ? state.layers[i + 1].x : state.last;
      layer_forward(team, pass, raw_layer(config, network, i), kv_of(pass, state),
                    state.layers[i].buffers, state.layers[i].x, out);
    }
    rms_norm(team, state.last, pass.rows, pass.hidden, network.final_norm, pass.eps, hidden.data(),
             state.last_rms);
  });
  state.filled = keep;
}

void training_backward(ThreadPool& pool, const Parameters& parameters, const PackedTokens& batch,
                       std::span<const float> dhidden, Activations& activations,
                       Parameters& gradients) {
  const ModelConfig& config = parameters.config();
  Activations::Impl& state = *activations.impl;
  LEEWAY_CHECK(state.filled, "a backward pass must follow its own forward pass, once");
  LEEWAY_CHECK(state.rows == static_cast<int64_t>(batch.tokens.size()),
               "the backward pass needs the batch of the forward pass");
  state.filled = false;
  Pass pass = make_pass(config);
  pass.rows = state.rows, pass.positions = state.positions.data();
  pass.sequences = state.sequences;
  pass.cosines = state.cosines.data(), pass.sines = state.sines.data();
  pass.numerics = state.numerics;
  const auto network = network_of(parameters);
  const auto grads = network_of(gradients);
  GradientBuffers g{};
  lay_out(pass, network.rank, state, g);
  pool.run_team([&](Team& team) {
    std::fill_n(g.dx, pass.rows * pass.hidden, 0.0f);
    rms_norm_backward(team, state.last, dhidden.data(), pass.rows, pass.hidden, network.final_norm,
                      state.last_rms, g.dx, grads.final_norm);
    for (size_t i = network.layers.size(); i-- > 0;) {
      const LayerWeights weights = raw_layer(config, network, i);
      if (state.recompute) {
        layer_forward(team, pass, weights, kv_of(pass, state), state.layers[i].buffers,
                      state.layers[i].x, g.dh);
      } else if (state.recompute_gate_up) {
        const LayerBuffers& b = state.layers[i].buffers;
        rms_norm(team, b.middle, pass.rows, pass.hidden, weights.post_norm, pass.eps, b.h);
        apply(team, pass.numerics, weights.gate_up, b.h, pass.rows, b.gate_up, Start::zero,
              b.low_gate_up);
      }
      layer_backward(team, pass, weights, state.layers[i], g, grads.layers[i]);
    }
    if (grads.embedding == nullptr) return;
    embed_backward(team, g.dx, pass.hidden, batch.tokens, grads.embedding);
  });
}

}  // namespace leeway
