// A small seeded generator whose sequence is the same on every platform.
#pragma once

#include <cmath>
#include <cstdint>

namespace leeway {

// SplitMix64. Copyable; its whole state is one number.
class Rng {
 public:
  explicit Rng(uint64_t seed) : state_(seed) {}

  uint64_t next() {
    uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  // Uniform in [0, 1).
  double uniform() { return static_cast<double>(next() >> 11) * 0x1p-53; }
  // Uniform in 0 .. count-1; count must be positive.
  uint64_t below(uint64_t count) {
    return static_cast<uint64_t>(uniform() * static_cast<double>(count));
  }
  double normal() {
    const double radius = std::sqrt(-2.0 * std::log(1.0 - uniform()));
    return radius * std::cos(6.283185307179586 * uniform());
  }

 private:
  uint64_t state_;
};

}  // namespace leeway
