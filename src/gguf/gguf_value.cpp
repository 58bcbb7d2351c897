#include "gguf/gguf_value.h"

#include <fmt/format.h>

#include <cstring>
#include <type_traits>

#include "leeway/error.h"
#include "model/name_text.h"

namespace leeway {
namespace {

template <class T>
double number_at(const std::string& bytes, size_t index) {
  T value{};
  std::memcpy(&value, bytes.data() + index * sizeof value, sizeof value);
  return static_cast<double>(value);
}

}  // namespace

size_t size_of_gguf_number(uint32_t type) {
  constexpr size_t kSizes[kGgufTypes] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
  return type < kGgufTypes ? kSizes[type] : 0;
}

size_t GgufNumbers::size() const { return bytes.size() / size_of_gguf_number(type); }

double GgufNumbers::at(size_t index) const {
  LEEWAY_CHECK(index < size(), "the index must be in the array");
  switch (type) {
    case 0: return number_at<uint8_t>(bytes, index);
    case 1: return number_at<int8_t>(bytes, index);
    case 2: return number_at<uint16_t>(bytes, index);
    case 3: return number_at<int16_t>(bytes, index);
    case 4: return number_at<uint32_t>(bytes, index);
    case 5: return number_at<int32_t>(bytes, index);
    case 6: return number_at<float>(bytes, index);
    case 7: return number_at<uint8_t>(bytes, index);
    case 10: return number_at<uint64_t>(bytes, index);
    case 11: return number_at<int64_t>(bytes, index);
    default: return number_at<double>(bytes, index);
  }
}

const char* gguf_kind_text(const GgufValue& value) {
  if (value.index() == kGgufText) return "a text";
  if (value.index() == kGgufArray) return "an array";
  if (value.index() == kGgufTypes) return "an array of texts";
  return std::holds_alternative<bool>(value) ? "a flag" : "a number";
}

std::string gguf_value_text(const GgufValue& value) {
  return std::visit(
      [&](const auto& held) -> std::string {
        using T = std::decay_t<decltype(held)>;
        if constexpr (std::is_same_v<T, std::string>) {
          return name_text(held);
        } else if constexpr (std::is_arithmetic_v<T>) {
          return fmt::format("{}", held);
        } else {
          return gguf_kind_text(value);
        }
      },
      value);
}

}  // namespace leeway
