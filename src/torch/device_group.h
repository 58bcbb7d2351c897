// Ranks whose backends move numbers between their devices, without the host. Every function is
// called on all ranks at once, in the same order, by one thread at a time; results are there for
// what follows on the current stream.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <span>

namespace leeway {

class DeviceGroup {
 public:
  virtual ~DeviceGroup() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;

  // `whole` has a part of the same length for each rank, one behind the other. Float32: this rank's
  // part becomes the sum over ranks, the others' are unspecified.
  virtual void reduce_scatter(const at::Tensor& whole) = 0;
  // Of any type: fills the parts of the other ranks in.
  virtual void all_gather(const at::Tensor& whole) = 0;
  // The same for parts of any length: `bounds` [size + 1] says where each begins and the last ends;
  // some may be empty.
  virtual void reduce_parts(const at::Tensor& whole, std::span<const int64_t> bounds) = 0;
  virtual void gather_parts(const at::Tensor& whole, std::span<const int64_t> bounds) = 0;
  // Of any type, from one rank to another, which alone call these.
  virtual void send(const at::Tensor& numbers, int to) = 0;
  virtual void receive(const at::Tensor& numbers, int from) = 0;
};

}  // namespace leeway
