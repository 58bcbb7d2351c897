#include "kernels/rows.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/rows.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "kernels/vectors-inl.h"

#ifndef LEEWAY_KERNELS_ROWS_SHARED_
#define LEEWAY_KERNELS_ROWS_SHARED_
namespace leeway {

constexpr int64_t kColumnBlock = 64;
constexpr int64_t kHeadRowBlock =
    64;  // rows whose norm gradients are summed before the partial sums are added up

// Rows [first, last) of a call; blocks and their order do not depend on the thread count.
struct RowRange {
  int64_t first, last;
};

struct NormTask {
  const float *x, *dy, *weight, *inverse_rms;
  int64_t width;
  float eps;
  float *y, *rms_out, *dx, *dweight;
};

struct HeadsTask {
  const HeadTransform* transform;
  const float* qkv;
  const int32_t* positions;
  float *q, *k;           // forward
  const float *dq, *dk;   // backward
  float *dqkv, *partial;  // backward: [2, head_dim] of this block of rows, or null
};

}  // namespace leeway
#endif

HWY_BEFORE_NAMESPACE();
namespace leeway {
namespace HWY_NAMESPACE {

// 1 / sqrt(mean(x^2) + eps), summed in lanes from the start of the row.
HWY_INLINE float inverse_rms_of(const float* x, int64_t width, float eps) {
  const D d;
  V sum = hn::Zero(d);
  for_lanes(width, [&](int64_t i, int64_t count) HWY_ATTR {
    const V v = load(x + i, count);
    sum = hn::MulAdd(v, v, sum);
  });
  const float mean = sum_of(sum) / static_cast<float>(width);
  return 1.0f / std::sqrt(mean + eps);
}

void norm_rows(const NormTask& t, RowRange rows) {
  const D d;
  for (int64_t row = rows.first; row < rows.last; ++row) {
    const float* x = t.x + row * t.width;
    float* y = t.y + row * t.width;
    const float inverse = inverse_rms_of(x, t.width, t.eps);
    if (t.rms_out != nullptr) t.rms_out[row] = inverse;
    const V r = hn::Set(d, inverse);
    for_lanes(t.width, [&](int64_t i, int64_t count) HWY_ATTR {
      store(hn::Mul(hn::Mul(load(x + i, count), r), load(t.weight + i, count)), y + i, count);
    });
  }
}

// With n = x r:  dx = r (w dy - n mean(w dy n)).  With `add`, adds to dx.
HWY_INLINE void norm_row_backward(const float* x, const float* dy, const float* weight,
                                  int64_t width, float inverse, float* dx, bool add) {
  const D d;
  const V r = hn::Set(d, inverse);
  V sum = hn::Zero(d);
  for_lanes(width, [&](int64_t i, int64_t count) HWY_ATTR {
    const V n = hn::Mul(load(x + i, count), r);
    sum = hn::MulAdd(hn::Mul(load(weight + i, count), load(dy + i, count)), n, sum);
  });
  const V mean = hn::Set(d, sum_of(sum) / static_cast<float>(width));
  for_lanes(width, [&](int64_t i, int64_t count) HWY_ATTR {
    const V n = hn::Mul(load(x + i, count), r);
    const V inner = hn::NegMulAdd(n, mean, hn::Mul(load(weight + i, count), load(dy + i, count)));
    const V old = add ? load(dx + i, count) : hn::Zero(d);
    store(hn::MulAdd(r, inner, old), dx + i, count);
  });
}

void norm_rows_backward(const NormTask& t, RowRange rows) {
  for (int64_t row = rows.first; row < rows.last; ++row) {
    const int64_t at = row * t.width;
    norm_row_backward(t.x + at, t.dy + at, t.weight, t.width, t.inverse_rms[row], t.dx + at, true);
  }
}

// dweight[column] += sum over rows of dy n, for a block of columns.
void norm_weight_backward(const NormTask& t, RowRange rows, int64_t column) {
  const D d;
  for_lanes(std::min(kColumnBlock, t.width - column), [&](int64_t i, int64_t count) HWY_ATTR {
    float* out = t.dweight + column + i;
    V sum = load(out, count);
    for (int64_t row = rows.first; row < rows.last; ++row) {
      const int64_t at = row * t.width + column + i;
      const V n = hn::Mul(load(t.x + at, count), hn::Set(d, t.inverse_rms[row]));
      sum = hn::MulAdd(load(t.dy + at, count), n, sum);
    }
    store(sum, out, count);
  });
}

// Rotates (x[i], x[i + half]) by the position's angle; with `back`, in the opposite direction.
HWY_INLINE void rotate(const float* x, const float* cosines, const float* sines, int64_t half,
                       float scale, bool back, float* y) {
  const D d;
  const V factor = hn::Set(d, scale);
  for_lanes(half, [&](int64_t i, int64_t count) HWY_ATTR {
    const V c = load(cosines + i, count);
    const V s = back ? hn::Neg(load(sines + i, count)) : load(sines + i, count);
    const V a = load(x + i, count), b = load(x + half + i, count);
    store(hn::Mul(factor, hn::NegMulAdd(b, s, hn::Mul(a, c))), y + i, count);
    store(hn::Mul(factor, hn::MulAdd(a, s, hn::Mul(b, c))), y + half + i, count);
  });
}

void transform_rows(const HeadsTask& t, RowRange rows) {
  const D d;
  const HeadTransform& h = *t.transform;
  const int64_t dim = h.layout.head_dim, half = dim / 2;
  const float scale = 1.0f / std::sqrt(static_cast<float>(dim));
  HWY_ALIGN float normed[kMostHeadDim];
  for (int64_t row = rows.first; row < rows.last; ++row) {
    const float* cosines = h.cosines + t.positions[row] * half;
    const float* sines = h.sines + t.positions[row] * half;
    for (int64_t head = 0; head < h.layout.query_heads + h.layout.kv_heads; ++head) {
      const bool query = head < h.layout.query_heads;
      const float* x = t.qkv + row * h.layout.width() + head * dim;
      float* y = query ? t.q + row * h.layout.query_width() + head * dim
                       : t.k + row * h.layout.kv_width() + (head - h.layout.query_heads) * dim;
      const float* weight = query ? h.query_norm : h.key_norm;
      if (weight != nullptr) {
        const V r = hn::Set(d, inverse_rms_of(x, dim, h.eps));
        for_lanes(dim, [&](int64_t i, int64_t count) HWY_ATTR {
          store(hn::Mul(hn::Mul(load(x + i, count), r), load(weight + i, count)), normed + i,
                count);
        });
        x = normed;
      }
      rotate(x, cosines, sines, half, query ? scale : 1.0f, false, y);
    }
  }
}

void transform_rows_backward(const HeadsTask& t, RowRange rows) {
  const D d;
  const HeadTransform& h = *t.transform;
  const int64_t dim = h.layout.head_dim, half = dim / 2;
  const float scale = 1.0f / std::sqrt(static_cast<float>(dim));
  HWY_ALIGN float turned[kMostHeadDim];
  if (t.partial != nullptr) std::fill_n(t.partial, 2 * dim, 0.0f);
  for (int64_t row = rows.first; row < rows.last; ++row) {
    const float* cosines = h.cosines + t.positions[row] * half;
    const float* sines = h.sines + t.positions[row] * half;
    for (int64_t head = 0; head < h.layout.query_heads + h.layout.kv_heads; ++head) {
      const bool query = head < h.layout.query_heads;
      const float* x = t.qkv + row * h.layout.width() + head * dim;
      float* dx = t.dqkv + row * h.layout.width() + head * dim;
      const float* dy =
          query ? t.dq + row * h.layout.query_width() + head * dim
                : t.dk + row * h.layout.kv_width() + (head - h.layout.query_heads) * dim;
      const float* weight = query ? h.query_norm : h.key_norm;
      rotate(dy, cosines, sines, half, query ? scale : 1.0f, true, weight ? turned : dx);
      if (weight == nullptr) continue;
      const float inverse = inverse_rms_of(x, dim, h.eps);
      norm_row_backward(x, turned, weight, dim, inverse, dx, false);
      float* sum = t.partial + (query ? 0 : dim);
      const V r = hn::Set(d, inverse);
      for_lanes(dim, [&](int64_t i, int64_t count) HWY_ATTR {
        const V n = hn::Mul(load(x + i, count), r);
        store(hn::MulAdd(load(turned + i, count), n, load(sum + i, count)), sum + i, count);
      });
    }
  }
}

HWY_INLINE V sigmoid(V x) {
  const D d;
  const V one = hn::Set(d, 1.0f);
  return hn::Div(one, hn::Add(one, exp_of(hn::Neg(x))));
}

void swiglu_rows(const float* gate_up, int64_t width, float* s, RowRange rows) {
  for (int64_t row = rows.first; row < rows.last; ++row) {
    const float* gate = gate_up + row * 2 * width;
    float* out = s + row * width;
    for_lanes(width, [&](int64_t i, int64_t count) HWY_ATTR {
      const V g = load(gate + i, count), u = load(gate + width + i, count);
      store(hn::Mul(hn::Mul(g, sigmoid(g)), u), out + i, count);
    });
  }
}

void swiglu_rows_backward(const float* gate_up, const float* ds, int64_t width, float* dgate_up,
                          RowRange rows) {
  const D d;
  const V one = hn::Set(d, 1.0f);
  for (int64_t row = rows.first; row < rows.last; ++row) {
    const float* gate = gate_up + row * 2 * width;
    float* dgate = dgate_up + row * 2 * width;
    for_lanes(width, [&](int64_t i, int64_t count) HWY_ATTR {
      const V g = load(gate + i, count), u = load(gate + width + i, count);
      const V ds_i = load(ds + row * width + i, count);
      const V sig = sigmoid(g);
      const V silu = hn::Mul(g, sig);
      // d silu = sig + silu (1 - sig)
      const V slope = hn::MulAdd(silu, hn::Sub(one, sig), sig);
      store(hn::Mul(hn::Mul(ds_i, u), slope), dgate + i, count);
      store(hn::Mul(ds_i, silu), dgate + width + i, count);
    });
  }
}

void column_sums(const float* x, int64_t rows, int64_t width, int64_t ldx, float* out,
                 int64_t column) {
  for_lanes(std::min(kColumnBlock, width - column), [&](int64_t i, int64_t count) HWY_ATTR {
    V sum = load(out + column + i, count);
    for (int64_t row = 0; row < rows; ++row) {
      sum = hn::Add(sum, load(x + row * ldx + column + i, count));
    }
    store(sum, out + column + i, count);
  });
}

HWY_INLINE float largest_of(const float* z, int64_t n) {
  const D d;
  V largest = hn::Set(d, -kFloatInfinity);
  for (int64_t i = 0; i < n; i += lanes()) {
    const int64_t count = n - i;
    const V v = count >= lanes() ? hn::LoadU(d, z + i)
                                 : hn::IfThenElse(hn::FirstN(d, static_cast<size_t>(count)),
                                                  load(z + i, count), largest);
    largest = hn::Max(v, largest);
  }
  return max_of(largest);
}

// Sums of short runs, added up in double: a vocabulary is too long for one float sum.
constexpr int64_t kRun = 1024;

RowStats softmax_row(const float* z, int64_t vocabulary, float it, int64_t target,
                     bool want_entropy) {
  const D d;
  const V factor = hn::Set(d, it);
  const float shift_by = largest_of(z, vocabulary) * it;
  const V shift = hn::Set(d, shift_by);
  double total = 0.0, weighted = 0.0;
  for (int64_t begin = 0; begin < vocabulary; begin += kRun) {
    const int64_t n = std::min(kRun, vocabulary - begin);
    V sum = hn::Zero(d), product = hn::Zero(d);
    for (int64_t i = 0; i < n; i += lanes()) {
      const int64_t count = n - i;
      const V x = hn::Sub(hn::Mul(load(z + begin + i, count), factor), shift);
      V e = exp_of(x);
      if (count < lanes()) e = hn::IfThenElseZero(hn::FirstN(d, static_cast<size_t>(count)), e);
      sum = hn::Add(sum, e);
      // 0 log 0 = 0: a logit of minus infinity contributes nothing to the entropy.
      if (want_entropy) {
        product = hn::Add(product, hn::IfThenZeroElse(hn::Eq(e, hn::Zero(d)), hn::Mul(e, x)));
      }
    }
    total += static_cast<double>(sum_of(sum));
    if (want_entropy) weighted += static_cast<double>(sum_of(product));
  }
  const float log_total = static_cast<float>(std::log(total));
  RowStats stats;
  stats.log_normaliser = shift_by + log_total;
  stats.logprob = (z[target] * it - shift_by) - log_total;
  stats.entropy = want_entropy ? static_cast<float>(std::log(total) - weighted / total) : 0.0f;
  return stats;
}

void softmax_row_backward(float* z, int64_t vocabulary, float it, int64_t target,
                          const RowStats& stats, float g, float g_entropy) {
  const D d;
  const V factor = hn::Set(d, it), shift = hn::Set(d, stats.log_normaliser);
  const V minus_g = hn::Set(d, -g * it);
  const V minus_ge = hn::Set(d, -g_entropy * it), entropy = hn::Set(d, stats.entropy);
  for_lanes(vocabulary, [&](int64_t i, int64_t count) HWY_ATTR {
    const V logp = hn::Sub(hn::Mul(load(z + i, count), factor), shift);
    const V p = exp_of(logp);
    V slope = minus_g;
    if (g_entropy != 0.0f) slope = hn::MulAdd(minus_ge, hn::Add(logp, entropy), slope);
    store(hn::IfThenZeroElse(hn::Eq(p, hn::Zero(d)), hn::Mul(p, slope)), z + i, count);
  });
  z[target] += g * it;
}

float max_row(const float* z, int64_t vocabulary) { return largest_of(z, vocabulary); }

void exp_row(const float* z, int64_t vocabulary, float it, float shift, float* e) {
  const D d;
  const V factor = hn::Set(d, it), minus = hn::Set(d, shift);
  for_lanes(vocabulary, [&](int64_t i, int64_t count) HWY_ATTR {
    store(exp_of(hn::Sub(hn::Mul(load(z + i, count), factor), minus)), e + i, count);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace leeway
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace leeway {

HWY_EXPORT(norm_rows);
HWY_EXPORT(norm_rows_backward);
HWY_EXPORT(norm_weight_backward);
HWY_EXPORT(transform_rows);
HWY_EXPORT(transform_rows_backward);
HWY_EXPORT(swiglu_rows);
HWY_EXPORT(swiglu_rows_backward);
HWY_EXPORT(column_sums);
HWY_EXPORT(softmax_row);
HWY_EXPORT(softmax_row_backward);
HWY_EXPORT(max_row);
HWY_EXPORT(exp_row);

namespace {

// Loops over rows in blocks.
template <class Body>
void for_rows(Team& team, int64_t rows, int64_t block, Body body) {
  team.for_each((rows + block - 1) / block, [&](int64_t i) {
    body(RowRange{i * block, std::min(rows, (i + 1) * block)});
  });
}
constexpr int64_t kRowBlock = 8;

template <class Body>
void for_columns(Team& team, int64_t width, Body body) {
  team.for_each((width + kColumnBlock - 1) / kColumnBlock,
                [&](int64_t i) { body(i * kColumnBlock); });
}

}  // namespace

void rms_norm(Team& team, const float* x, int64_t rows, int64_t width, const float* weight,
              float eps, float* y, float* inverse_rms) {
  NormTask task{};
  task.x = x, task.weight = weight, task.width = width, task.eps = eps;
  task.y = y, task.rms_out = inverse_rms;
  for_rows(team, rows, kRowBlock, [&](RowRange range) {
    HWY_DYNAMIC_DISPATCH(norm_rows)(task, range);
  });
}

void rms_norm_backward(Team& team, const float* x, const float* dy, int64_t rows, int64_t width,
                       const float* weight, const float* inverse_rms, float* dx, float* dweight) {
  NormTask task{};
  task.x = x, task.dy = dy, task.weight = weight, task.width = width;
  task.inverse_rms = inverse_rms, task.dx = dx, task.dweight = dweight;
  for_rows(team, rows, kRowBlock, [&](RowRange range) {
    HWY_DYNAMIC_DISPATCH(norm_rows_backward)(task, range);
  });
  if (dweight == nullptr) return;
  for_columns(team, width, [&](int64_t column) {
    HWY_DYNAMIC_DISPATCH(norm_weight_backward)(task, RowRange{0, rows}, column);
  });
}

void transform_heads(Team& team, const HeadTransform& transform, const float* qkv,
                     const int32_t* positions, int64_t rows, float* q, float* k) {
  HeadsTask task{};
  task.transform = &transform, task.qkv = qkv, task.positions = positions;
  task.q = q, task.k = k;
  for_rows(team, rows, kRowBlock, [&](RowRange range) {
    HWY_DYNAMIC_DISPATCH(transform_rows)(task, range);
  });
}

void transform_heads_backward(Team& team, const HeadTransform& transform, const float* qkv,
                              const int32_t* positions, int64_t rows, const float* dq,
                              const float* dk, float* dqkv, float* dquery_norm, float* dkey_norm) {
  const int64_t dim = transform.layout.head_dim;
  const bool normed = transform.query_norm != nullptr;
  const int64_t blocks = (rows + kHeadRowBlock - 1) / kHeadRowBlock;
  auto* partials = reinterpret_cast<float*>(
      team.scratch(normed ? static_cast<size_t>(blocks * 2 * dim) * sizeof(float) : 0));
  for_rows(team, rows, kHeadRowBlock, [&](RowRange range) {
    HeadsTask task{};
    task.transform = &transform, task.qkv = qkv, task.positions = positions;
    task.dq = dq, task.dk = dk, task.dqkv = dqkv;
    if (normed) task.partial = partials + range.first / kHeadRowBlock * 2 * dim;
    HWY_DYNAMIC_DISPATCH(transform_rows_backward)(task, range);
  });
  if (!normed || dquery_norm == nullptr) return;
  team.for_each(2, [&](int64_t which) {
    float* out = which == 0 ? dquery_norm : dkey_norm;
    for (int64_t block = 0; block < blocks; ++block) {
      const float* partial = partials + (2 * block + which) * dim;
      for (int64_t i = 0; i < dim; ++i) out[i] += partial[i];
    }
  });
}

void swiglu(Team& team, const float* gate_up, int64_t rows, int64_t width, float* s) {
  for_rows(team, rows, kRowBlock, [&](RowRange range) {
    HWY_DYNAMIC_DISPATCH(swiglu_rows)(gate_up, width, s, range);
  });
}

void swiglu_backward(Team& team, const float* gate_up, const float* ds, int64_t rows, int64_t width,
                     float* dgate_up) {
  for_rows(team, rows, kRowBlock, [&](RowRange range) {
    HWY_DYNAMIC_DISPATCH(swiglu_rows_backward)(gate_up, ds, width, dgate_up, range);
  });
}

void add_column_sums(Team& team, const float* x, int64_t rows, int64_t width, int64_t ldx,
                     float* out) {
  for_columns(team, width, [&](int64_t column) {
    HWY_DYNAMIC_DISPATCH(column_sums)(x, rows, width, ldx, out, column);
  });
}

RowStats row_softmax(const float* z, int64_t vocabulary, float it, int64_t target,
                     bool want_entropy) {
  return HWY_DYNAMIC_DISPATCH(softmax_row)(z, vocabulary, it, target, want_entropy);
}

void row_softmax_backward(float* z, int64_t vocabulary, float it, int64_t target,
                          const RowStats& stats, float g, float g_entropy) {
  HWY_DYNAMIC_DISPATCH(softmax_row_backward)(z, vocabulary, it, target, stats, g, g_entropy);
}

RowMax row_max(const float* z, int64_t vocabulary) {
  const float value = HWY_DYNAMIC_DISPATCH(max_row)(z, vocabulary);
  return {value, std::find(z, z + vocabulary, value) - z};
}

void row_exp(const float* z, int64_t vocabulary, float it, float shift, float* e) {
  HWY_DYNAMIC_DISPATCH(exp_row)(z, vocabulary, it, shift, e);
}

}  // namespace leeway
#endif
