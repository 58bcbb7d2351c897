// The values of a GGUF file's metadata.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <variant>
#include <vector>

namespace leeway {

// An array of numbers or flags, as its bytes lie in the file.
struct GgufNumbers {
  uint32_t type = 0;  // number of the elements' type
  std::string bytes;

  size_t size() const;
  double at(size_t index) const;  // as a double, which holds every type but large 64-bit integers
};

// Each alternative is the file's type with the alternative's index as its number, but for the last:
// an array of texts has the number of an array too.
using GgufValue =
    std::variant<uint8_t, int8_t, uint16_t, int16_t, uint32_t, int32_t, float, bool, std::string,
                 GgufNumbers, uint64_t, int64_t, double, std::vector<std::string>>;

inline constexpr uint32_t kGgufText = 8, kGgufArray = 9, kGgufTypes = 13;
inline constexpr char kGgufMagic[] = {'G', 'G', 'U', 'F'};
// Where tensors begin is a multiple of this, unless the file says otherwise.
inline constexpr uint64_t kGgufAlignment = 32;

// Bytes of a number or flag of this type; 0 for text, arrays and numbers that are no type.
size_t size_of_gguf_number(uint32_t type);

// "a text", "an array": for messages.
const char* gguf_kind_text(const GgufValue& value);
// The value for messages: `"smollm"`, `17`, "an array".
std::string gguf_value_text(const GgufValue& value);

}  // namespace leeway
