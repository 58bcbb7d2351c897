// The decoder on the CPU, torch-free: the one piece of code that samples and trains.
//
// Rows are tokens of any sequences side by side; there is no padding. All work is done by the pool;
// a row's result depends on its sequence alone, bit for bit (see kernels/matmul.h), so that decode,
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
#include "model/parameters.h"

namespace leeway {

// Rotary angles of positions 0 .. count-1. [count, head_dim / 2]
struct RopeTable {
  RopeTable(const ModelConfig& config, int64_t count);
  std::vector<float> cosines, sines;
};

// Keys and values of all layers in blocks of 16 positions; who owns which block is the caller's
// business. Memory is taken from the system when a block is first written.
class KvStore {
 public:
  KvStore(const ModelConfig& config, int64_t blocks);
  int64_t blocks() const { return blocks_; }
  static size_t block_bytes(const ModelConfig& config);  // of one block in all layers
  KvBlocks layer(int64_t layer);
  void copy_block(int32_t from, int32_t to);

 private:
  int64_t layers_, block_floats_, blocks_;
  struct Free {
    void operator()(float* data) const { std::free(data); }
  };
  std::unique_ptr<float[], Free> data_;  // not initialised: store_kv begins each block
};

// Weights ready for sampling in a precision: packed matrices, float32 norms and biases.
// `load` may be called again with new weights of the same config; not while `run` runs.
class SamplingDecoder {
 public:
  SamplingDecoder(const ModelConfig& config, Precision precision);
  ~SamplingDecoder();

  // Copies and packs the weights.
  void load(ThreadPool& pool, const Parameters& parameters);
  size_t weight_bytes() const;

  // One pass over rows. `tokens` [rows] are the rows' input tokens; `sequences` cover the rows, in
  // order. Keys and values are written to `kv`. `logits` [logit_rows.size(), vocab_size] receives
  // the logits of the rows listed. Token ids and positions must be in range (checked by whoever
  // took them from a user).
  void run(ThreadPool& pool, std::span<const int32_t> tokens,
           std::span<const SequenceRows> sequences, KvStore& kv,
           std::span<const int32_t> logit_rows, float* logits);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Sequences side by side: sequence s holds tokens cu_seqlens[s] .. cu_seqlens[s+1].
struct PackedTokens {
  std::span<const int32_t> tokens;      // [N]
  std::span<const int64_t> cu_seqlens;  // [S + 1], from 0 to N, rising
};

// Throws Error naming sequence, position and value for ids outside the vocabulary and sequences
// longer than the model, and for cu_seqlens that are none.
void check_tokens(const ModelConfig& config, const PackedTokens& batch);

struct TrainingOptions {
  // `exact`: the forward pass has the bits of the sampling passes. `fast`: products by the
  // machine's BLAS, whose bits depend on the batch.
  Numerics numerics = Numerics::exact;
  // Activations are kept for each layer's input only and computed again in the backward pass.
  bool recompute_activations = false;
};

// What a training forward leaves for the backward pass.
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

// hidden [N, hidden_size], after the final norm. With `activations` null nothing is kept (a
// reference or proximal forward).
void training_forward(ThreadPool& pool, const Parameters& parameters, const PackedTokens& batch,
                      const TrainingOptions& options, std::span<float> hidden,
                      Activations* activations);

// Adds to `gradients` from dhidden [N, hidden_size]. Everything but the head's own share (which for
// tied weights comes on top). Uses up the activations: a second call is refused. `parameters` and
// `batch` as in the forward.
void training_backward(ThreadPool& pool, const Parameters& parameters, const PackedTokens& batch,
                       std::span<const float> dhidden, Activations& activations,
                       Parameters& gradients);

}  // namespace leeway
