// Causal attention in bf16 on a CUDA device, by tensor cores: each row sees positions 0 .. its own
// of its sequence. Training's packed rows, prompts over a paged KV cache and decode rows over it
// are computed by one text, so that a row's result has the same bits in all three, whatever is
// computed beside it:
//
// - A warp holds 16 rows and takes keys in tiles of 64, which begin at multiples of 64 positions,
//   in order. Scores are products of tensor cores over the head's dimensions, 16 at a time in
//   order; a tile's weights are exp2 of scores less the largest so far, rounded to bf16 for the
//   product with the values, 16 keys at a time in order. Products of a warp and of a warpgroup
//   (attention_warpgroups.h) have the same bits then.
// - 512 keys are a chunk, which begins with nothing; chunks are joined in order. Decode rows with
//   long contexts are split at chunks, never within.
// - A tile that a row sees nothing of changes none of its bits.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/kv_pages.h"
#include "cuda/norm_rope_swiglu.h"

namespace leeway::cuda {

// Arrays are bf16 and 16-byte aligned, and strides are multiples of 8.
struct Attention {
  HeadSizes sizes;
  // Where rows sit. Without pages (`starts` null) keys and values are packed as the rows are:
  // position p of row r's sequence is row r - positions[r] + p of them.
  RowPlaces places;
  const void* q = nullptr;                        // [rows, query_heads, head_dim], not scaled
  int64_t q_stride = 0;                           // numbers from row to row
  const void *keys = nullptr, *values = nullptr;  // [.., kv_heads, head_dim]
  int64_t key_stride = 0, value_stride = 0;       // numbers from position to position
  void* out = nullptr;  // [rows, query_heads, head_dim], contiguous; zeros for padding rows
  // log of the sum of exp(score), natural; of row r and head h at r * lse_row + h * lse_head. May
  // be null.
  float* lse = nullptr;
  int64_t lse_row = 0, lse_head = 0;
  // Two zeros, or null. attend_tiles counts in them, so that blocks of threads take what is left as
  // they become free, and leaves zeros; calls that may run at once need their own. Without them the
  // blocks divide the work beforehand.
  int32_t* counters = nullptr;
};

// Consecutive rows of one sequence, at most kAttentionTileRows.
struct AttentionTile {
  int32_t first_row, rows;
};

// The rows of `count` tiles; best in order of falling last positions.
void attend_tiles(const Attention& attention, const AttentionTile* tiles, int64_t count,
                  cudaStream_t stream);

// Rows 0 .. rows - 1, each its own sequence's last, over pages. Keys and values before the rows'
// own are read while kernels before this one in the stream may still run, which were launched early
// one behind the other (cuda/early_launch.cuh): none of these may write them. The grid depends on
// `rows` alone, so that a captured graph stays valid. `workspace` has decode_workspace floats for
// the same `most_positions`, the longest that a sequence can be. With `heads` the kernel does to
// these rows what store_heads does, on its way: keys and values go to their pages, with the same
// bits; queries stay in it, and `attention.q` and `heads->q` are not used. Without (null)
// store_heads has been there.
void attend_decode_rows(const Attention& attention, const HeadStep* heads, int64_t rows,
                        int64_t most_positions, float* workspace, cudaStream_t stream);
int64_t decode_workspace(const HeadSizes& sizes, int64_t most_positions);
// Whether attend_decode_rows takes `heads` of these sizes.
bool makes_heads(const HeadSizes& sizes);

}  // namespace leeway::cuda
