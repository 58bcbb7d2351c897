// Causal attention over a KV cache in blocks of 16 positions.
//
// A query's result is computed in one fixed order (scores along the head dimension, the sum of
// exponentials and the weighted values along the keys), independent of what else is computed in the
// call and of where the blocks lie in memory. Training, prefill and decode call this one function.
#pragma once

#include <cstdint>
#include <span>

#include "base/thread_pool.h"
#include "kernels/kv_block.h"
#include "kernels/rows.h"

namespace leeway {

// Keys and values of one layer. A block holds, for each key/value head, keys transposed
// [head_dim][16] and then values [16][head_dim].
struct KvBlocks {
  float* data = nullptr;
  int64_t block_stride = 0;  // floats from one block to the next
  static int64_t block_floats(const HeadLayout& layout) {
    return 2 * kBlockKeys * layout.kv_width();
  }
};

// Consecutive rows of one sequence within a pass: row `first_row + i` is at position
// `first_position + i` and sees keys 0 .. first_position + i. `blocks` are the sequence's block
// numbers, enough for all of its keys.
struct SequenceRows {
  int64_t first_row = 0;
  int64_t rows = 0;
  int64_t first_position = 0;
  const int32_t* blocks = nullptr;
};

// Writes the rows' keys (`k`, [rows, kv_width]) and values (columns of `v`, rows `ldv` apart) to
// their positions. The unused end of a sequence's last block is set to zero when its first key is
// written.
void store_kv(Team& team, const HeadLayout& layout, std::span<const SequenceRows> sequences,
              const float* k, const float* v, int64_t ldv, const KvBlocks& kv);

// Computes out [rows, query_width] from q [rows, query_width] (already scaled). `log_sums` [rows,
// query_heads], unless null, receives the log-sum-exp of the scores for the backward pass.
void attend(Team& team, const HeadLayout& layout, std::span<const SequenceRows> sequences,
            const float* q, const KvBlocks& kv, float* out, float* log_sums = nullptr);

// The gradient for whole sequences (first_position 0): writes dq [rows, query_width], dk [rows,
// kv_width] and dv (columns of rows `lddv` apart) from out and dout. k [rows, kv_width] and v
// (columns of rows `ldv` apart) are those that were stored. No result depends on the number of
// threads.
void attend_backward(Team& team, const HeadLayout& layout, std::span<const SequenceRows> sequences,
                     const float* q, const float* k, const float* v, int64_t ldv, const float* out,
                     const float* dout, const float* log_sums, float* dq, float* dk, float* dv,
                     int64_t lddv);

}  // namespace leeway
