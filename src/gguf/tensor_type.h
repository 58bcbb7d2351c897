// The element types of GGUF tensors that are read and written. Types with blocks store a row as
// blocks of elements that share a scale.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace leeway {

// The numbers are those of the file.
enum class GgufType : uint32_t {
  f32 = 0,
  f16 = 1,
  q4_0 = 2,
  q4_1 = 3,
  q5_0 = 6,
  q5_1 = 7,
  q8_0 = 8,
  q4_k = 12,
  q5_k = 13,
  q6_k = 14,
  bf16 = 30,
};

struct GgufTypeInfo {
  GgufType type;
  const char* name;    // "Q4_K"
  size_t elements;     // of a block; 1: there are no blocks
  size_t block_bytes;  // that such a block takes
};
const GgufTypeInfo& info_of(GgufType type);
inline const char* name_of(GgufType type) { return info_of(type).name; }

// Null for a number that stands for another type, or for none.
const GgufTypeInfo* find_gguf_type(uint32_t number);
// "Q2_K" for a type that exists and is not read, "number 99" for what is none.
std::string gguf_type_text(uint32_t number);
// "F32, F16, Q4_0, ..": all that are read.
std::string gguf_type_names();

}  // namespace leeway
