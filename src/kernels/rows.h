// Row-wise operations of a decoder: RMSNorm, RoPE, SwiGLU, the softmax of a row of logits, and
// their gradients.
//
// A row's bits depend on that row alone. Functions with a Team share the rows among its threads;
// the others are plain functions of one row, safe from any thread.
#pragma once

#include <cstdint>

#include "base/thread_pool.h"

namespace leeway {

// ---------------------------------------------------------------------------------------------
// RMSNorm: y = x * r * w with r = 1 / sqrt(mean(x^2) + eps). [rows, width]

// `inverse_rms` [rows] receives r, unless null.
void rms_norm(Team& team, const float* x, int64_t rows, int64_t width, const float* weight,
              float eps, float* y, float* inverse_rms = nullptr);

// dx += d loss / dx and dweight += d loss / dweight (rows in order; unless null), from dy.
void rms_norm_backward(Team& team, const float* x, const float* dy, int64_t rows, int64_t width,
                       const float* weight, const float* inverse_rms, float* dx, float* dweight);

// ---------------------------------------------------------------------------------------------
// Heads: optional RMSNorm of each query and key head, then RoPE

inline constexpr int64_t kMostHeadDim = 1024;

struct HeadLayout {
  int64_t query_heads, kv_heads, head_dim;  // head_dim: even, at most kMostHeadDim
  int64_t query_width() const { return query_heads * head_dim; }
  int64_t kv_width() const { return kv_heads * head_dim; }
  int64_t width() const { return query_width() + 2 * kv_width(); }  // [q | k | v]
};

struct HeadTransform {
  HeadLayout layout;
  const float* query_norm = nullptr;  // [head_dim], or null: no norm; both or neither
  const float* key_norm = nullptr;
  float eps = 0.0f;
  const float* cosines = nullptr;  // [positions, head_dim / 2]
  const float* sines = nullptr;
};

// Computes q [rows, query_width] (normed, rotated, times 1/sqrt(head_dim)) and k [rows, kv_width]
// (normed, rotated) from qkv [rows, layout.width()]. Values stay in qkv.
void transform_heads(Team& team, const HeadTransform& transform, const float* qkv,
                     const int32_t* positions, int64_t rows, float* q, float* k);

// Writes the query and key columns of dqkv from dq and dk (without adding to them); adds to the
// norms' gradients, unless these are null. Value columns are not touched.
void transform_heads_backward(Team& team, const HeadTransform& transform, const float* qkv,
                              const int32_t* positions, int64_t rows, const float* dq,
                              const float* dk, float* dqkv, float* dquery_norm, float* dkey_norm);

// ---------------------------------------------------------------------------------------------
// SwiGLU: s = silu(gate) * up, from gate_up [rows, 2 width] = [gate | up]

void swiglu(Team& team, const float* gate_up, int64_t rows, int64_t width, float* s);
// dgate_up may alias gate_up.
void swiglu_backward(Team& team, const float* gate_up, const float* ds, int64_t rows, int64_t width,
                     float* dgate_up);

// ---------------------------------------------------------------------------------------------
// Sums

// out[j] += sum over rows, in order, of x[row, j]. Rows of x are `ldx` apart.
void add_column_sums(Team& team, const float* x, int64_t rows, int64_t width, int64_t ldx,
                     float* out);

// ---------------------------------------------------------------------------------------------
// Logits: one row z [V] at inverse temperature `it`: p = softmax(z * it)

struct RowStats {
  float log_normaliser;  // log sum exp(z * it)
  float logprob;         // log p[target]
  float entropy;         // -sum p log p
};

// Nothing is checked: NaN or infinite logits make the results NaN or infinite, except minus
// infinity, which has probability 0. `want_entropy` false leaves entropy 0 and saves a pass.
RowStats row_softmax(const float* z, int64_t vocabulary, float it, int64_t target,
                     bool want_entropy);

// z <- d loss / d z of this row, in place, where loss has gradient `g` with respect to log
// p[target] and `g_entropy` with respect to the entropy: it * (g (onehot - p) - g_entropy p (log p
// + entropy)).
void row_softmax_backward(float* z, int64_t vocabulary, float it, int64_t target,
                          const RowStats& stats, float g, float g_entropy);

// The largest element of z and where it first occurs.
struct RowMax {
  float value;
  int64_t index;
};
RowMax row_max(const float* z, int64_t vocabulary);

// e[i] = exp(z[i] * it - shift), for samplers.
void row_exp(const float* z, int64_t vocabulary, float it, float shift, float* e);

}  // namespace leeway
