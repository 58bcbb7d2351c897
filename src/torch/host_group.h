// For tests: the devices of ranks are the CPU, and what moves between them moves by Ranks.
#pragma once

#include <cstring>
#include <string>
#include <vector>

#include "leeway/error.h"
#include "ranks/ranks.h"
#include "torch/device_group.h"

namespace leeway::testing {

class HostGroup : public DeviceGroup {
 public:
  explicit HostGroup(Ranks& ranks) : ranks_(ranks) {}
  int rank() const override { return ranks_.rank(); }
  int size() const override { return ranks_.size(); }

  void reduce_scatter(const at::Tensor& whole) override {
    const std::span<float> numbers(whole.data_ptr<float>(), static_cast<size_t>(whole.numel()));
    const std::vector<size_t> bounds = bounds_of(numbers.size());
    const auto r = static_cast<size_t>(rank());
    ranks_.reduce_scatter(numbers, bounds, numbers.subspan(bounds[r], bounds[r + 1] - bounds[r]));
  }
  void all_gather(const at::Tensor& whole) override {
    const std::span<float> numbers(static_cast<float*>(whole.data_ptr()),
                                   whole.nbytes() / sizeof(float));
    ranks_.all_gather(numbers, bounds_of(numbers.size()));
  }
  void reduce_parts(const at::Tensor& whole, std::span<const int64_t> bounds) override {
    const std::span<float> numbers(whole.data_ptr<float>(), static_cast<size_t>(whole.numel()));
    const std::vector<size_t> parts(bounds.begin(), bounds.end());
    const auto r = static_cast<size_t>(rank());
    ranks_.reduce_scatter(numbers, parts, numbers.subspan(parts[r], parts[r + 1] - parts[r]));
  }
  // Of float32, or of a smaller type whose parts are whole numbers of float32.
  void gather_parts(const at::Tensor& whole, std::span<const int64_t> bounds) override {
    const size_t size = whole.element_size();
    std::vector<size_t> parts;
    for (const int64_t bound : bounds) {
      const size_t bytes = static_cast<size_t>(bound) * size;
      LEEWAY_CHECK(bytes % sizeof(float) == 0, "parts of whole words");
      parts.push_back(bytes / sizeof(float));
    }
    ranks_.all_gather({static_cast<float*>(whole.data_ptr()), whole.nbytes() / sizeof(float)},
                      parts);
  }
  void send(const at::Tensor& numbers, int to) override {
    ranks_.send(to, Channel::devices,
                std::string(static_cast<const char*>(numbers.data_ptr()), numbers.nbytes()));
  }
  void receive(const at::Tensor& numbers, int from) override {
    const std::string bytes = ranks_.receive(from, Channel::devices);
    LEEWAY_CHECK(bytes.size() == numbers.nbytes(), "as many as are sent");
    std::memcpy(numbers.data_ptr(), bytes.data(), bytes.size());
  }

 private:
  std::vector<size_t> bounds_of(size_t count) const {
    std::vector<size_t> bounds;
    for (int r = 0; r <= size(); ++r) bounds.push_back(count / static_cast<size_t>(size()) * r);
    return bounds;
  }
  Ranks& ranks_;
};

}  // namespace leeway::testing
