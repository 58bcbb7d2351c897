// The steps of a sampling pass on tensors of one device, without autograd: kernels of src/cuda
// where the build has them, plain ATen elsewhere. Both give the same numbers up to the
// order of sums; norms, rotary turns, softmax and logits are computed in float32.
//
// Results go to tensors that the caller owns, so that a CUDA graph can be captured from them: on
// CUDA nothing here allocates or waits. R rows, H hidden, V vocabulary, D head dimensions.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <memory>

#include "kernels/kv_block.h"
#include "torch/rope_table.h"

namespace leeway {

namespace cuda {
class Products;
}
// For `project` on a device: null where it needs none.
std::shared_ptr<cuda::Products> make_products(at::Device device);

struct HeadCounts {
  int64_t query_heads = 0, kv_heads = 0, head_dim = 0;
};

// The integers of a pass, on its device: int32 except the last two.
struct PassRows {
  at::Tensor tokens;                // [R]
  at::Tensor positions;             // [R]; negative: a padding row
  at::Tensor starts;                // [R], each row's first entry of `blocks`
  at::Tensor blocks;                // the sequences' block numbers
  at::Tensor logit_rows;            // [L], the rows that logits are wanted of
  at::Tensor draws;                 // [N], each draw's row of the logits
  at::Tensor inverse_temperatures;  // [N], float32; 0: the most likely token
  at::Tensor uniforms;              // [N], float64
  // The first rows are decode rows, each its sequence's last; the others are in `tiles` [T, 2],
  // {first row, rows}: consecutive rows of one sequence, at most kAttentionTileRows.
  int64_t decode_rows = 0;
  at::Tensor tiles;
};

// x [R, H] = rows of `table` [V, H].
void embed(const at::Tensor& table, const PassRows& rows, at::Tensor& x);

// y [R, outputs] = x weight^T + bias; `transposed` is [inputs, outputs], bias may be undefined.
// On CUDA in bf16 by `products`, so that a row's bits do not depend on the rows beside it;
// elsewhere it may be null.
void project(cuda::Products* products, const at::Tensor& x, const at::Tensor& transposed,
             const at::Tensor& bias, at::Tensor& y);
// The same in float32, whatever the type of x and the weights.
void project_wide(cuda::Products* products, const at::Tensor& x, const at::Tensor& transposed,
                  at::Tensor& y);

// x += delta, unless it is undefined; y = rms_norm(x) * weight. [R, H]
void add_norm(at::Tensor& x, const at::Tensor& delta, const at::Tensor& weight, double eps,
              at::Tensor& y);
// y [L, H] = rms_norm of the rows of x + delta that logits are wanted of, times weight.
void add_norm_of_logit_rows(const at::Tensor& x, const at::Tensor& delta, const PassRows& rows,
                            const at::Tensor& weight, double eps, at::Tensor& y);

// What a layer does to heads. Norms are undefined where the model has none.
struct HeadWeights {
  HeadCounts counts;
  at::Tensor query_norm, key_norm;  // [D]
  double eps = 0.0;
  TorchRopeTable rope;
};
// From qkv [R, (query_heads + 2 kv_heads) D]: queries, normed and turned, to q [R, query_heads D];
// keys, normed and turned, and values to their places in the layer's [blocks, kBlockKeys,
// kv_heads, D].
void store_heads(const HeadWeights& heads, const PassRows& rows, const at::Tensor& qkv,
                 at::Tensor& q, at::Tensor& keys, at::Tensor& values);

// out [R, query_heads D]: each row sees positions 0 .. its own of its sequence, which has at most
// `most_positions`. `workspace` is float32 [attention_workspace_size], used only on CUDA.
void attend(const HeadCounts& counts, const PassRows& rows, int64_t most_positions,
            const at::Tensor& q, const at::Tensor& keys, const at::Tensor& values,
            const at::Tensor& workspace, at::Tensor& out);
int64_t attention_workspace_size(const HeadCounts& counts, int64_t most_positions,
                                 at::ScalarType type);
// Both, one after the other, with the same bits: one kernel where all rows are decode rows and
// cuda/attention.h has it for their sizes. q is a place for what is between them, and may be left
// as it is.
void store_and_attend(const HeadWeights& heads, const PassRows& rows, int64_t most_positions,
                      const at::Tensor& qkv, at::Tensor& q, at::Tensor& keys, at::Tensor& values,
                      const at::Tensor& workspace, at::Tensor& out);

// s [R, I] = silu(gate) * up from gate_up [R, 2 I].
void swiglu_rows(const at::Tensor& gate_up, at::Tensor& s);
// project and swiglu_rows, with the same bits; gate_up [R, 2 I] is a place for what is between them
// and is used if one kernel cannot do both.
void project_gated(cuda::Products* products, const at::Tensor& x, const at::Tensor& transposed,
                   at::Tensor& gate_up, at::Tensor& s);

// What logits are the product of: hidden states [L, H] and the head's weight [V, H].
struct DrawnHead {
  at::Tensor hidden, weight;
};
// sampled int32 [N, 4], there or in pinned memory of the host: id, the bits of raw and processed
// log-probability, and not 0 where the row is no distribution (see cuda/sample_rows.h). logits [L,
// V] float32; rows may be longer. Tokens are drawn from these; with a head in bf16 the
// log-probabilities are those that a trainer computes, from logits rounded to bf16 with the token's
// own in float32: on CUDA the same bits. Without one (undefined tensors) they are those of
// `logits`. `workspace` is uint8 [draw_workspace_size(V, N)].
void draw_rows(const at::Tensor& logits, const DrawnHead& head, const PassRows& rows,
               const at::Tensor& workspace, at::Tensor& sampled);
int64_t draw_workspace_size(int64_t vocabulary, int64_t draws);  // 1 on the CPU

// For each pair {from, to} of `pairs`, int32 [pairs, 2] on the host: copies the block in all
// stores of kv [stores, blocks, ..].
void copy_kv_blocks(at::Tensor& kv, const at::Tensor& pairs);

}  // namespace leeway
