// CRC-32C (Castagnoli): what TFRecord files and checkpoints use.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace leeway {

// crc32c("123456789") is 0xe3069283. `before` is the sum of the bytes that came before these:
// crc32c(b, crc32c(a)) is crc32c(a + b).
inline uint32_t crc32c(std::string_view bytes, uint32_t before = 0) {
  static constexpr std::array<uint32_t, 256> kTable = [] {
    std::array<uint32_t, 256> table{};
    for (uint32_t byte = 0; byte < 256; ++byte) {
      uint32_t value = byte;
      for (int bit = 0; bit < 8; ++bit) {
        value = (value >> 1) ^ ((value & 1) != 0 ? 0x82f63b78u : 0u);
      }
      table[byte] = value;
    }
    return table;
  }();
  uint32_t crc = ~before;
  for (const char c : bytes) {
    crc = kTable[(crc ^ static_cast<unsigned char>(c)) & 0xff] ^ (crc >> 8);
  }
  return ~crc;
}

}  // namespace leeway
