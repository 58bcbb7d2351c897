// What is sent to the device for a pass: tokens, positions, block tables and the numbers of its
// draws, as one array of integers in a single copy.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>

#include "engine/scheduler.h"
#include "torch/sampling_operations.h"

namespace leeway {

// How many of each a pass has; what exceeds the engine's plan is padding.
struct PassShape {
  int64_t rows = 0, logit_rows = 0, draws = 0;
  int64_t decode_rows = 0, tiles = 0;  // of PassRows
  int64_t blocks = 0;                  // entries of block tables
  bool decode = false;  // one draw for each row, in order: all else follows from `rows`
};

// The number of rows that a pass of decode rows is padded to: few different numbers, and little
// waste.
int64_t filled_up(int64_t rows);

// With `fill_decode`, a pass of only decode rows is padded and marked as such.
PassShape shape_of(const StepRows& pass, bool fill_decode);

class PassIntegers {
 public:
  explicit PassIntegers(at::Device device) : device_(device) {}

  // Makes room for a pass. Returns whether the array has moved.
  bool reserve(const PassShape& shape);
  // Queues the copy; the host array may be reused when it is done. Takes one number from each
  // draw's random stream.
  void send(const StepRows& pass, const PassShape& shape);
  // The array's parts on the device. Where they begin follows from the shape without `blocks`.
  PassRows rows(const PassShape& shape) const;

 private:
  at::Device device_;
  at::Tensor integers_;
  at::Tensor host_;  // pinned where the device is CUDA; on the CPU the same tensor
};

}  // namespace leeway
