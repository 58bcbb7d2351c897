// CRC-32C (Castagnoli): what TFRecord files and checkpoints use.
#pragma once

#include <cstdint>
#include <string_view>

namespace leeway {

// Of bytes that come piece by piece. `before` is the sum of those that came before.
class Crc32c {
 public:
  explicit Crc32c(uint32_t before = 0) : state_(~before) {}
  void add(std::string_view bytes);
  uint32_t value() const { return ~state_; }

 private:
  uint32_t state_;
};

// crc32c("123456789") is 0xe3069283. `before` is the sum of the bytes that came before these:
// crc32c(b, crc32c(a)) is crc32c(a + b).
inline uint32_t crc32c(std::string_view bytes, uint32_t before = 0) {
  Crc32c sum(before);
  sum.add(bytes);
  return sum.value();
}

}  // namespace leeway
