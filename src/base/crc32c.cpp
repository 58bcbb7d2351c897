#include "base/crc32c.h"

#include <array>

namespace leeway {
namespace {

using Table = std::array<std::array<uint32_t, 256>, 8>;

// Slicing by eight: kTables[k][b] is the contribution of byte b when k more bytes follow it, so
// that eight independent lookups replace a chain of eight dependent ones.
constexpr Table kTables = [] {
  Table tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t value = byte;
    for (int bit = 0; bit < 8; ++bit) {
      value = (value >> 1) ^ ((value & 1) != 0 ? 0x82f63b78u : 0u);
    }
    tables[0][byte] = value;
  }
  for (size_t k = 1; k < tables.size(); ++k) {
    for (size_t byte = 0; byte < 256; ++byte) {
      const uint32_t before = tables[k - 1][byte];
      tables[k][byte] = tables[0][before & 0xff] ^ (before >> 8);
    }
  }
  return tables;
}();

uint32_t word_at(const unsigned char* at) {
  return uint32_t{at[0]} | uint32_t{at[1]} << 8 | uint32_t{at[2]} << 16 | uint32_t{at[3]} << 24;
}

}  // namespace

void Crc32c::add(std::string_view bytes) {
  const auto* at = reinterpret_cast<const unsigned char*>(bytes.data());
  const auto* const end = at + bytes.size();
  uint32_t crc = state_;
  for (; end - at >= 8; at += 8) {
    const uint32_t low = crc ^ word_at(at), high = word_at(at + 4);
    crc = kTables[7][low & 0xff] ^ kTables[6][(low >> 8) & 0xff] ^ kTables[5][(low >> 16) & 0xff] ^
          kTables[4][low >> 24] ^ kTables[3][high & 0xff] ^ kTables[2][(high >> 8) & 0xff] ^
          kTables[1][(high >> 16) & 0xff] ^ kTables[0][high >> 24];
  }
  for (; at != end; ++at) crc = kTables[0][(crc ^ *at) & 0xff] ^ (crc >> 8);
  state_ = crc;
}

}  // namespace leeway
