// What goes up to the device for a pass: tokens, positions, block tables and the numbers of its
// draws, as one array of integers that is copied at once.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>

#include "engine/scheduler.h"
#include "torch/sampling_operations.h"

namespace leeway {

// How many of each a pass has; what is more than the engine's plan only fills it.
struct PassShape {
  int64_t rows = 0, logit_rows = 0, draws = 0;
  int64_t blocks = 0;   // entries of block tables
  bool decode = false;  // one draw for each row, in order: all else follows from `rows`
};

// The number of rows that a pass of decode rows is filled up to: few numbers, and little waste.
int64_t filled_up(int64_t rows);

// With `fill_decode` a pass of decode rows alone is filled up and marked as one.
PassShape shape_of(const StepRows& pass, bool fill_decode);

class PassIntegers {
 public:
  explicit PassIntegers(at::Device device) : device_(device) {}

  // Makes room for a pass. Whether the array has moved.
  bool reserve(const PassShape& shape);
  // Queues the copy; the array on the host is free again when it is done. Takes one number from the
  // random numbers of each draw.
  void send(const StepRows& pass, const PassShape& shape);
  // The array's parts on the device. Where they begin follows from the shape without `blocks`.
  PassRows rows(const PassShape& shape) const;

 private:
  at::Device device_;
  at::Tensor integers_;
  at::Tensor host_;  // pinned where the device is CUDA; on the CPU the same tensor
};

}  // namespace leeway
