#include "kernels/matmul.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "leeway/error.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/matmul.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#ifndef LEEWAY_KERNELS_MATMUL_SHARED_
#define LEEWAY_KERNELS_MATMUL_SHARED_
namespace leeway {

constexpr int64_t kPanel = 32;        // outputs of a panel
constexpr int64_t kBlockRows = 48;    // rows of a work item, a multiple of every register tile
constexpr int64_t kGroupPanels = 16;  // panels of a work item

// C[rows, columns] = from + X W for one panel [k][32] of W.
struct PanelTask {
  const float* x;
  int64_t row_stride, k_stride;  // of x
  const void* panel;
  const void* next;  // the panel after it, or null
  int64_t k;
  const float* from;  // initial values of the sums, `from_stride` per row; null: zero
  int64_t from_stride;
  const float* scales;  // int8: [32]; the sum then starts at zero and `from` is added to it
  float* c;
  int64_t ldc;
  int64_t rows, columns;  // columns: at most 32
};

}  // namespace leeway
#endif

HWY_BEFORE_NAMESPACE();
namespace leeway {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
using D = hn::CappedTag<float, kPanel / 2>;
using V = hn::Vec<D>;

// Rows of a register tile two vectors wide: its accumulators take all registers but three.
#if HWY_TARGET <= HWY_AVX3
constexpr int kTileRows = 12;
#else
constexpr int kTileRows = 6;
#endif

HWY_INLINE V load_weights(const float* from) { return hn::LoadU(D(), from); }
HWY_INLINE V load_weights(const hwy::bfloat16_t* from) {
  return hn::PromoteTo(D(), hn::LoadU(hn::Rebind<hwy::bfloat16_t, D>(), from));
}
HWY_INLINE V load_weights(const int8_t* from) {
  const hn::Rebind<int32_t, D> di;
  return hn::ConvertTo(D(), hn::PromoteTo(di, hn::LoadU(hn::Rebind<int8_t, D>(), from)));
}

// R rows and all columns of the panel, two vectors at a time. Every sum is one chain over k. With
// Fetch, the next panel is prefetched along the way.
template <int R, class W, bool Fetch>
HWY_INLINE void tile(const PanelTask& t, const float* x, const float* from, float* c, int64_t ldc) {
  const D d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const bool scaled = t.scales != nullptr;
  for (int64_t j = 0; j < kPanel; j += 2 * lanes) {
    V sum0[R], sum1[R];
    for (int i = 0; i < R; ++i) {
      if (from == nullptr || scaled) {
        sum0[i] = sum1[i] = hn::Zero(d);
      } else {
        sum0[i] = hn::LoadU(d, from + i * t.from_stride + j);
        sum1[i] = hn::LoadU(d, from + i * t.from_stride + j + lanes);
      }
    }
    const W* w = static_cast<const W*>(t.panel) + j;
    [[maybe_unused]] const auto* next = static_cast<const std::byte*>(t.next);
    const float* row = x;
    for (int64_t k = 0; k < t.k; ++k, w += kPanel, row += t.k_stride) {
      if constexpr (Fetch) {
        for (size_t line = 0; line < kPanel * sizeof(W); line += 64) {
          __builtin_prefetch(next + static_cast<size_t>(k * kPanel) * sizeof(W) + line, 0, 2);
        }
      }
      const V w0 = load_weights(w), w1 = load_weights(w + lanes);
      for (int i = 0; i < R; ++i) {
        const V value = hn::Set(d, row[i * t.row_stride]);
        sum0[i] = hn::MulAdd(value, w0, sum0[i]);
        sum1[i] = hn::MulAdd(value, w1, sum1[i]);
      }
    }
    for (int i = 0; i < R; ++i) {
      if (scaled) {
        const V scale0 = hn::LoadU(d, t.scales + j), scale1 = hn::LoadU(d, t.scales + j + lanes);
        const float* start = from == nullptr ? nullptr : from + i * t.from_stride + j;
        sum0[i] =
            start ? hn::MulAdd(sum0[i], scale0, hn::LoadU(d, start)) : hn::Mul(sum0[i], scale0);
        sum1[i] = start ? hn::MulAdd(sum1[i], scale1, hn::LoadU(d, start + lanes))
                        : hn::Mul(sum1[i], scale1);
      }
      hn::StoreU(sum0[i], d, c + i * ldc + j);
      hn::StoreU(sum1[i], d, c + i * ldc + j + lanes);
    }
  }
}

// R rows with any number of columns: missing columns are computed in a buffer.
template <int R, class W, bool Fetch = false>
HWY_INLINE void rows_of_panel(const PanelTask& t, int64_t row) {
  const float* x = t.x + row * t.row_stride;
  const float* from = t.from == nullptr ? nullptr : t.from + row * t.from_stride;
  float* c = t.c + row * t.ldc;
  if (t.columns == kPanel) {
    tile<R, W, Fetch>(t, x, from, c, t.ldc);
    return;
  }
  HWY_ALIGN float begin[R * kPanel] = {};
  HWY_ALIGN float end[R * kPanel];
  const size_t bytes = static_cast<size_t>(t.columns) * sizeof(float);
  PanelTask padded = t;
  padded.from_stride = kPanel;
  for (int i = 0; from != nullptr && i < R; ++i) {
    std::memcpy(begin + i * kPanel, from + i * t.from_stride, bytes);
  }
  tile<R, W, Fetch>(padded, x, from == nullptr ? nullptr : begin, end, kPanel);
  for (int i = 0; i < R; ++i) std::memcpy(c + i * t.ldc, end + i * kPanel, bytes);
}

template <int R, class W>
HWY_INLINE void last_rows(const PanelTask& t, int64_t row) {
  if (t.rows - row == R) {
    rows_of_panel<R, W>(t, row);
  } else if constexpr (R > 1) {
    last_rows<R - 1, W>(t, row);
  }
}

// The first rows wait for the panel to arrive from memory; the second ones find it in the cache and
// have time to prefetch the next.
template <class W>
HWY_INLINE void multiply_panel_of(const PanelTask& t) {
  int64_t row = 0;
  for (; row + kTileRows <= t.rows; row += kTileRows) {
    if (row == kTileRows && t.next != nullptr) {
      rows_of_panel<kTileRows, W, true>(t, row);
    } else {
      rows_of_panel<kTileRows, W>(t, row);
    }
  }
  last_rows<kTileRows - 1, W>(t, row);
}

void multiply_panel(const PanelTask& t, Precision precision) {
  switch (precision) {
    case Precision::float32: return multiply_panel_of<float>(t);
    case Precision::bf16: return multiply_panel_of<hwy::bfloat16_t>(t);
    case Precision::int8: return multiply_panel_of<int8_t>(t);
    case Precision::fp8: break;  // refused by PackedMatrix
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace leeway
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace leeway {

HWY_EXPORT(multiply_panel);

namespace {

int64_t panels_of(int64_t outputs) { return (outputs + kPanel - 1) / kPanel; }

float bf16_to_float(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

// Rounds to nearest, ties to even; NaN stays NaN.
uint16_t float_to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if (std::isnan(value)) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

template <class T, class Read>
void copy_panel(const T* from, int64_t row_stride, int64_t column_stride, int64_t depth,
                int64_t columns, float* to, Read read) {
  if (columns < kPanel) std::fill_n(to, depth * kPanel, 0.0f);
  if (row_stride == 1) {  // the outputs of a panel are contiguous
    for (int64_t j = 0; j < columns; ++j) {
      const T* source = from + j * column_stride;
      for (int64_t k = 0; k < depth; ++k) to[k * kPanel + j] = read(source[k]);
    }
    return;
  }
  for (int64_t k = 0; k < depth; ++k) {
    const T* source = from + k * row_stride;
    for (int64_t j = 0; j < columns; ++j) to[k * kPanel + j] = read(source[j * column_stride]);
  }
}

// Packs b[k0 .. k0+depth, n0 .. n0+columns] as a panel [depth][32], zero beyond the columns.
void pack_panel(const Operand& b, int64_t k0, int64_t depth, int64_t n0, int64_t columns,
                float* to) {
  const int64_t offset = k0 * b.row_stride + n0 * b.column_stride;
  if (b.bf16) {
    copy_panel(static_cast<const uint16_t*>(b.data) + offset, b.row_stride, b.column_stride, depth,
               columns, to, bf16_to_float);
  } else {
    copy_panel(static_cast<const float*>(b.data) + offset, b.row_stride, b.column_stride, depth,
               columns, to, [](float value) { return value; });
  }
}

}  // namespace

void gemm(Team& team, int64_t m, int64_t n, int64_t k, const Operand& a, const Operand& b, float* c,
          int64_t ldc, Start start) {
  LEEWAY_CHECK(!a.bf16, "the left operand of gemm is float32");
  if (m == 0 || n == 0) return;
  const auto multiply = HWY_DYNAMIC_DISPATCH(multiply_panel);
  const auto* a_data = static_cast<const float*>(a.data);
  auto* packed = reinterpret_cast<float*>(team.scratch(
      static_cast<size_t>(std::min(kGemmDepth, k) * std::min(panels_of(n) * kPanel, kGemmColumns)) *
      sizeof(float)));
  const int64_t row_blocks = (m + kBlockRows - 1) / kBlockRows;
  for (int64_t n0 = 0; n0 < n; n0 += kGemmColumns) {
    const int64_t width = std::min(kGemmColumns, n - n0);
    const int64_t panels = panels_of(width);
    const int64_t groups = (panels + kGroupPanels - 1) / kGroupPanels;
    for (int64_t k0 = 0; k0 < std::max<int64_t>(k, 1); k0 += kGemmDepth) {
      const int64_t depth = std::min(kGemmDepth, k - k0);
      team.for_each(panels, [&](int64_t p) {
        pack_panel(b, k0, depth, n0 + p * kPanel, std::min(kPanel, width - p * kPanel),
                   packed + p * kPanel * depth);
      });
      team.for_each(row_blocks * groups, [&](int64_t item) {
        const int64_t row = item / groups * kBlockRows, rows = std::min(kBlockRows, m - row);
        const int64_t group = item % groups * kGroupPanels;
        const float* x = a_data + row * a.row_stride + k0 * a.column_stride;
        int64_t row_stride = a.row_stride, k_stride = a.column_stride;
        // Strided rows are gathered once for all panels of the item.
        alignas(64) float gathered[kBlockRows * kGemmDepth];
        if (k_stride != 1) {
          for (int64_t step = 0; step < depth; ++step) {
            for (int64_t i = 0; i < rows; ++i) {
              gathered[step * kBlockRows + i] = x[i * row_stride + step * k_stride];
            }
          }
          x = gathered, row_stride = 1, k_stride = kBlockRows;
        }
        for (int64_t p = group; p < std::min(panels, group + kGroupPanels); ++p) {
          float* out = c + row * ldc + n0 + p * kPanel;
          const bool zero = k0 == 0 && start == Start::zero;
          const float* panel = packed + p * kPanel * depth;
          multiply({x, row_stride, k_stride, panel, nullptr, depth, zero ? nullptr : out, ldc,
                    nullptr, out, ldc, rows, std::min(kPanel, width - p * kPanel)},
                   Precision::float32);
        }
      });
    }
  }
}

PackedMatrix::PackedMatrix(Precision precision, int64_t outputs, int64_t inputs)
    : precision_(precision), outputs_(outputs), inputs_(inputs) {
  LEEWAY_CHECK(precision != Precision::fp8, "fp8 is for GPUs");
  panels_.resize(static_cast<size_t>(panels_of(outputs)) * panel_bytes());
  if (precision == Precision::int8)
    scales_.resize(static_cast<size_t>(panels_of(outputs)) * kPanel);
}

size_t PackedMatrix::panel_bytes() const {
  const size_t one = precision_ == Precision::float32 ? 4 : precision_ == Precision::bf16 ? 2 : 1;
  return static_cast<size_t>(inputs_ * kPanel) * one;
}

size_t PackedMatrix::bytes() const { return panels_.size() + scales_.size() * sizeof(float); }

const std::byte* PackedMatrix::panel(int64_t index) const {
  return panels_.data() + static_cast<size_t>(index) * panel_bytes();
}

void PackedMatrix::pack(Team& team, std::span<const Part> parts) {
  int64_t stacked = 0;
  for (const Part& part : parts) stacked += part.outputs;
  LEEWAY_CHECK(stacked == outputs_, "the parts must add up to the matrix");
  team.for_each(panels_of(outputs_), [&](int64_t p) {
    std::byte* panel = panels_.data() + static_cast<size_t>(p) * panel_bytes();
    for (int64_t j = 0; j < kPanel; ++j) {
      int64_t output = p * kPanel + j;
      const float* row = nullptr;
      if (output < outputs_) {
        size_t part = 0;
        while (output >= parts[part].outputs) output -= parts[part++].outputs;
        row = parts[part].data + output * inputs_;
      }
      auto place = [&](auto* to, auto convert) {
        for (int64_t k = 0; k < inputs_; ++k) to[k * kPanel + j] = row ? convert(row[k]) : 0;
      };
      switch (precision_) {
        case Precision::float32:
          place(reinterpret_cast<float*>(panel), [](float value) { return value; });
          break;
        case Precision::bf16: place(reinterpret_cast<uint16_t*>(panel), float_to_bf16); break;
        case Precision::int8: {
          float largest = 0.0f;
          for (int64_t k = 0; row != nullptr && k < inputs_; ++k) {
            largest = std::max(largest, std::abs(row[k]));
          }
          scales_[static_cast<size_t>(p * kPanel + j)] = largest / 127.0f;
          const float inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
          place(reinterpret_cast<int8_t*>(panel),
                [&](float value) { return static_cast<int8_t>(std::lrintf(value * inverse)); });
          break;
        }
        case Precision::fp8: break;
      }
    }
  });
}

void PackedMatrix::row(int64_t output, float* to) const {
  const std::byte* data = panel(output / kPanel);
  const int64_t at = output % kPanel;
  const auto read = [&](const auto* from, auto convert) {
    for (int64_t k = 0; k < inputs_; ++k) to[k] = convert(from[k * kPanel + at]);
  };
  switch (precision_) {
    case Precision::float32:
      return read(reinterpret_cast<const float*>(data), [](float value) { return value; });
    case Precision::bf16: return read(reinterpret_cast<const uint16_t*>(data), bf16_to_float);
    case Precision::int8: {
      const float scale = scales_[static_cast<size_t>(output)];
      return read(reinterpret_cast<const int8_t*>(data),
                  [&](int8_t value) { return static_cast<float>(value) * scale; });
    }
    case Precision::fp8: break;
  }
}

void product(Team& team, const float* x, int64_t rows, int64_t ldx, const PackedMatrix& w, float* y,
             int64_t ldy, Start start, const float* bias) {
  LEEWAY_CHECK(bias == nullptr || start == Start::zero,
               "a bias excludes accumulating into the output");
  if (rows == 0) return;
  const auto multiply = HWY_DYNAMIC_DISPATCH(multiply_panel);
  const int64_t panels = panels_of(w.outputs());
  // With few rows, work items are panels, several per thread so that a slow thread does not hold up
  // the rest.
  const int64_t group = std::clamp<int64_t>(panels / (4 * team.size()), 1, kGroupPanels);
  const int64_t groups = (panels + group - 1) / group;
  const int64_t block = 4 * kBlockRows;
  const int64_t row_blocks = (rows + block - 1) / block;
  team.for_each(groups * row_blocks, [&](int64_t item) {
    const int64_t row = item / groups * block, count = std::min(block, rows - row);
    const int64_t first = item % groups * group;
    for (int64_t p = first; p < std::min(panels, first + group); ++p) {
      float* out = y + row * ldy + p * kPanel;
      const float* from = bias != nullptr             ? bias + p * kPanel
                          : start == Start::old_value ? out
                                                      : nullptr;
      const float* scales = w.precision() == Precision::int8 ? w.scales() + p * kPanel : nullptr;
      multiply({x + row * ldx, ldx, 1, w.panel(p), p + 1 < panels ? w.panel(p + 1) : nullptr,
                w.inputs(), from, bias != nullptr ? 0 : ldy, scales, out, ldy, count,
                std::min(kPanel, w.outputs() - p * kPanel)},
               w.precision());
    }
  });
}

}  // namespace leeway
#endif
