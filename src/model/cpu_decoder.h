// The decoder on the CPU, without torch: the same code samples and trains.
//
// Rows are tokens of any number of sequences, packed without padding. All work runs on the pool. A
// row's result depends on its sequence alone, bit for bit (see kernels/matmul.h), so decode,
// prefill in any chunks, and the training forward give the same numbers.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <span>
#include <vector>

#include "base/thread_pool.h"
#include "kernels/attention.h"
#include "kernels/blas.h"
#include "kernels/matmul.h"
#include "model/frozen_weights.h"
#include "model/parameters.h"

namespace leeway {

// RoPE cosines and sines of positions 0 .. count-1. [count, head_dim / 2]
struct RopeTable {
  RopeTable(const ModelConfig& config, int64_t count);
  std::vector<float> cosines, sines;
};

// The KV cache of all layers in blocks of 16 positions. The caller decides who owns which block.
// Memory is taken from the system when a block is first written.
class KvStore {
 public:
  KvStore(const ModelConfig& config, int64_t blocks);
  int64_t blocks() const { return blocks_; }
  static size_t block_bytes(const ModelConfig& config);  // one block in all layers
  KvBlocks layer(int64_t layer);
  void copy_block(int32_t from, int32_t to);

 private:
  int64_t layers_, block_floats_, blocks_;
  struct Free {
    void operator()(float* data) const { std::free(data); }
  };
  std::unique_ptr<float[], Free> data_;  // uninitialized: store_kv writes each block first
};

// Weights prepared for sampling in a given precision: packed matrices, float32 norms and biases.
// `load` may be called again with new weights of the same config, but not during `run`.
class SamplingDecoder {
 public:
  SamplingDecoder(const ModelConfig& config, Precision precision,
                  FrozenWeights frozen = FrozenWeights::packed);
  ~SamplingDecoder();

  // Copies and packs the weights. Of an adapter over the base of the last one, the adapter alone;
  // its matrices are float32 in every precision. The base is held until other weights come.
  void load(ThreadPool& pool, const Parameters& parameters);
  // Own memory, without what is used in place.
  size_t weight_bytes() const;

  // One pass over rows. `tokens` [rows] are the input tokens; `sequences` cover the rows, in order.
  // Keys and values are written to `kv`. `logits` [logit_rows.size(), vocab_size] receives the
  // logits of the listed rows. Token ids and positions must be in range: the caller checks those
  // that come from a user.
  void run(ThreadPool& pool, std::span<const int32_t> tokens,
           std::span<const SequenceRows> sequences, KvStore& kv,
           std::span<const int32_t> logit_rows, float* logits);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Packed sequences: sequence s consists of tokens cu_seqlens[s] .. cu_seqlens[s+1].
struct PackedTokens {
  std::span<const int32_t> tokens;      // [N]
  std::span<const int64_t> cu_seqlens;  // [S + 1], increasing from 0 to N
};

// Throws Error naming sequence, position and value for ids outside the vocabulary, sequences longer
// than the model allows, and invalid cu_seqlens.
void check_tokens(const ModelConfig& config, const PackedTokens& batch);

struct TrainingOptions {
  // `exact`: the forward pass gives the same bits as sampling. `fast`: matrix products use the
  // system's BLAS, whose bits depend on the batch.
  Numerics numerics = Numerics::exact;
  // Stores only each layer's input and recomputes the other activations in the backward pass.
  bool recompute_activations = false;
  // Without the above: recomputes the gate and up projections, more than a third of what is stored.
  bool recompute_gate_up = false;
};

// What a training forward stores for the backward pass.
class Activations {
 public:
  Activations();
  ~Activations();
  Activations(Activations&&) noexcept;
  Activations& operator=(Activations&&) noexcept;
  size_t bytes() const;

  struct Impl;
  std::unique_ptr<Impl> impl;
};

// hidden [N, hidden_size], after the final norm. If `activations` is null nothing is stored (for
// reference and prox forward passes).
void training_forward(ThreadPool& pool, const Parameters& parameters, const PackedTokens& batch,
                      const TrainingOptions& options, std::span<float> hidden,
                      Activations* activations);

// Adds to `gradients` from dhidden [N, hidden_size]: everything except the head's own contribution
// (which for tied weights is added separately). Consumes the activations, so a second call is
// refused. `parameters` and `batch` as in the forward.
void training_backward(ThreadPool& pool, const Parameters& parameters, const PackedTokens& batch,
                       std::span<const float> dhidden, Activations& activations,
                       Parameters& gradients);

}  // namespace leeway
