// CRC-32C (Castagnoli), as used by TFRecord files and checkpoints.
#pragma once

#include <cstdint>
#include <string_view>

namespace leeway {

// Incremental CRC. `before` is the CRC of the bytes that precede the first update.
class Crc32c {
 public:
  explicit Crc32c(uint32_t before = 0) : state_(~before) {}
  void add(std::string_view bytes);
  uint32_t value() const { return ~state_; }

 private:
  uint32_t state_;
};

// crc32c("123456789") is 0xe3069283. `before` is the CRC of the preceding bytes: crc32c(b,
// crc32c(a)) == crc32c(a + b).
inline uint32_t crc32c(std::string_view bytes, uint32_t before = 0) {
  Crc32c sum(before);
  sum.add(bytes);
  return sum.value();
}

// The same without the processor's own instruction for it, which is used where there is one.
uint32_t crc32c_by_tables(std::string_view bytes);

}  // namespace leeway
