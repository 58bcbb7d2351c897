#include "torch/sampling_pass.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <vector>

#include "leeway/error.h"

#ifdef LEEWAY_CUDA
#include <c10/cuda/CUDAException.h>

#include "torch/cuda_tensors.h"
#endif

namespace leeway {

using at::Tensor;

namespace {

// Layout of the parts. The draws' float64 numbers come first, where they are aligned; block tables
// come last.
struct PassLayout {
  int64_t uniforms, inverse_temperatures, draws, logit_rows, tokens, positions, starts, tiles,
      blocks, size;
  explicit PassLayout(const PassShape& shape)
      : uniforms(0),
        inverse_temperatures(2 * shape.draws),
        draws(inverse_temperatures + shape.draws),
        logit_rows(draws + shape.draws),
        tokens(logit_rows + shape.logit_rows),
        positions(tokens + shape.rows),
        starts(positions + shape.rows),
        tiles(starts + shape.rows),
        blocks(tiles + 2 * shape.tiles),
        size(blocks + shape.blocks) {}
};

int64_t blocks_of(const SequenceRows& sequence) {
  return (sequence.first_position + sequence.rows + kBlockKeys - 1) / kBlockKeys;
}

}  // namespace

int64_t filled_up(int64_t rows) {
  if (rows <= 2) return rows;
  if (rows <= 4) return 4;
  const int64_t step = rows <= 64 ? 8 : rows <= 256 ? 16 : 32;
  return (rows + step - 1) / step * step;
}

PassShape shape_of(const StepRows& pass, bool fill_decode) {
  PassShape shape;
  shape.rows = static_cast<int64_t>(pass.tokens.size());
  shape.logit_rows = static_cast<int64_t>(pass.logit_rows.size());
  shape.draws = static_cast<int64_t>(pass.draws.size());
  shape.decode_rows = pass.decode_rows;
  for (const SequenceRows& sequence : pass.sequences) {
    shape.blocks += blocks_of(sequence);
    if (sequence.first_row < pass.decode_rows) continue;
    shape.tiles += (sequence.rows + kAttentionTileRows - 1) / kAttentionTileRows;
  }
  if (fill_decode && pass.prompt_rows == 0) {
    LEEWAY_CHECK(shape.logit_rows == shape.rows && shape.draws == shape.rows,
                 "each decode row has its draw");
    shape.rows = shape.logit_rows = shape.draws = shape.decode_rows = filled_up(shape.rows);
    shape.decode = true;
  }
  return shape;
}

bool PassIntegers::reserve(const PassShape& shape) {
  const int64_t size = PassLayout(shape).size;
  if (integers_.defined() && size <= integers_.size(0)) return false;
  const at::TensorOptions type(at::kInt);
  integers_ = at::empty({2 * size}, type.device(device_));
  host_ = device_.is_cuda() ? at::empty({2 * size}, type.pinned_memory(true)) : integers_;
  return true;
}

void PassIntegers::send(const StepRows& pass, const PassShape& shape) {
  const PassLayout layout(shape);
  auto* integers = host_.data_ptr<int32_t>();
  std::fill(integers, integers + layout.blocks, 0);
  std::copy(pass.tokens.begin(), pass.tokens.end(), integers + layout.tokens);
  std::fill(integers + layout.positions, integers + layout.starts, -1);
  int64_t start = 0;
  std::vector<std::array<int32_t, 3>> tiles;  // last position, first row, rows
  for (const SequenceRows& sequence : pass.sequences) {
    for (int64_t i = 0; sequence.first_row >= pass.decode_rows && i < sequence.rows;
         i += kAttentionTileRows) {
      const int64_t rows = std::min(kAttentionTileRows, sequence.rows - i);
      tiles.push_back({static_cast<int32_t>(sequence.first_position + i + rows - 1),
                       static_cast<int32_t>(sequence.first_row + i), static_cast<int32_t>(rows)});
    }
    for (int64_t i = 0; i < sequence.rows; ++i) {
      const int64_t row = sequence.first_row + i;
      integers[layout.positions + row] = static_cast<int32_t>(sequence.first_position + i);
      integers[layout.starts + row] = static_cast<int32_t>(start);
    }
    const int64_t count = blocks_of(sequence);
    std::copy(sequence.blocks, sequence.blocks + count, integers + layout.blocks + start);
    start += count;
  }
  // The longest begin first, so that none is left over at the end.
  std::ranges::sort(tiles, std::ranges::greater());
  int32_t* to = integers + layout.tiles;
  for (const auto& [last, first_row, rows] : tiles) *to++ = first_row, *to++ = rows;
  std::copy(pass.logit_rows.begin(), pass.logit_rows.end(), integers + layout.logit_rows);
  for (size_t i = 0; i < pass.draws.size(); ++i) {
    const Draw& draw = pass.draws[i];
    const auto at = static_cast<int64_t>(i);
    const float temperature = draw.request->request.sampling.temperature;
    const float inverse = temperature == 0.0f ? 0.0f : 1.0f / temperature;
    const double uniform = draw.sample->rng.uniform();
    std::memcpy(integers + layout.uniforms + 2 * at, &uniform, sizeof uniform);
    std::memcpy(integers + layout.inverse_temperatures + at, &inverse, sizeof inverse);
    integers[layout.draws + at] = static_cast<int32_t>(draw.logits);
  }
#ifdef LEEWAY_CUDA
  // A decode step waits for this. ATen's copy of pinned memory also notes when it is read, which
  // the caller knows.
  if (device_.is_cuda()) {
    C10_CUDA_CHECK(cudaMemcpyAsync(integers_.data_ptr(), integers,
                                   static_cast<size_t>(layout.size) * sizeof(int32_t),
                                   cudaMemcpyHostToDevice, stream_of(integers_)));
  }
#endif
}

PassRows PassIntegers::rows(const PassShape& shape) const {
  const PassLayout layout(shape);
  const auto part = [&](int64_t begin, int64_t size) { return integers_.narrow(0, begin, size); };
  PassRows rows;
  rows.tokens = part(layout.tokens, shape.rows);
  rows.positions = part(layout.positions, shape.rows);
  rows.starts = part(layout.starts, shape.rows);
  rows.blocks = part(layout.blocks, shape.blocks);
  rows.logit_rows = part(layout.logit_rows, shape.logit_rows);
  rows.draws = part(layout.draws, shape.draws);
  rows.inverse_temperatures = part(layout.inverse_temperatures, shape.draws).view(at::kFloat);
  rows.decode_rows = shape.decode_rows;
  if (shape.tiles > 0) rows.tiles = part(layout.tiles, 2 * shape.tiles).view({shape.tiles, 2});
  rows.uniforms = part(layout.uniforms, 2 * shape.draws).view(at::kDouble);
  return rows;
}

}  // namespace leeway
