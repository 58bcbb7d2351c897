// How much of a device's memory is left.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>

namespace leeway {

// Lets torch grow its pieces of CUDA memory instead of taking new ones beside them, of which parts
// stay unused: sizes change with every micro-batch. To be called before the first allocation; such
// memory has no handle that another process could open. Does nothing where PYTORCH_CUDA_ALLOC_CONF
// or PYTORCH_ALLOC_CONF says how to allocate.
void use_expandable_segments();

// Bytes that nobody uses; what torch keeps for itself counts as used. Throws what torch throws.
int64_t free_bytes(c10::Device device);

// Bytes that are left where everything that torch had allocated at once so far is allocated again:
// what can be held on to without taking it from the largest pass. On the CPU without a bound.
int64_t spare_bytes(c10::Device device);

// How a snapshot of weights leaves a trainer.
enum class SnapshotForm {
  full,     // in float32 on the device
  rounded,  // what passes read of it, on the device
  on_host,  // in float32
};
struct SnapshotRoom {
  int64_t spare = 0;      // bytes
  int64_t keep_free = 0;  // of them, where a snapshot is full (SnapshotUse)
  int64_t weights = 0;    // how many
  // Passes read bf16 numbers that the trainer has whole, which can be copied alone. Then a snapshot
  // is full only where two full copies fit, since the one before may be kept until this one is
  // handed on.
  bool may_round = false;
  bool last_is_there = false;  // the one before is among what is allocated already
};
// A run keeps no rounded ones; an evaluation keeps its own until it ends.
SnapshotForm snapshot_form(const SnapshotRoom& room);

}  // namespace leeway
