#include "gguf/tensor_type.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <utility>
#include <vector>

#include "leeway/error.h"

namespace leeway {
namespace {

constexpr GgufTypeInfo kTypes[] = {
    {GgufType::f32, "F32", 1, 4},       {GgufType::f16, "F16", 1, 2},
    {GgufType::bf16, "BF16", 1, 2},     {GgufType::q8_0, "Q8_0", 32, 34},
    {GgufType::q4_0, "Q4_0", 32, 18},   {GgufType::q4_1, "Q4_1", 32, 20},
    {GgufType::q5_0, "Q5_0", 32, 22},   {GgufType::q5_1, "Q5_1", 32, 24},
    {GgufType::q4_k, "Q4_K", 256, 144}, {GgufType::q5_k, "Q5_K", 256, 176},
    {GgufType::q6_k, "Q6_K", 256, 210},
};

// Types that exist and are not read, for messages.
constexpr std::pair<uint32_t, const char*> kOtherTypes[] = {
    {9, "Q8_1"},     {10, "Q2_K"},  {11, "Q3_K"},   {15, "Q8_K"},  {16, "IQ2_XXS"}, {17, "IQ2_XS"},
    {18, "IQ3_XXS"}, {19, "IQ1_S"}, {20, "IQ4_NL"}, {21, "IQ3_S"}, {22, "IQ2_S"},   {23, "IQ4_XS"},
    {24, "I8"},      {25, "I16"},   {26, "I32"},    {27, "I64"},   {28, "F64"},     {29, "IQ1_M"},
    {34, "TQ1_0"},   {35, "TQ2_0"}, {39, "MXFP4"},
};

}  // namespace

const GgufTypeInfo* find_gguf_type(uint32_t number) {
  for (const GgufTypeInfo& info : kTypes) {
    if (static_cast<uint32_t>(info.type) == number) return &info;
  }
  return nullptr;
}

const GgufTypeInfo& info_of(GgufType type) {
  const GgufTypeInfo* info = find_gguf_type(static_cast<uint32_t>(type));
  LEEWAY_CHECK(info != nullptr, "every type is in the table");
  return *info;
}

std::string gguf_type_text(uint32_t number) {
  if (const GgufTypeInfo* info = find_gguf_type(number)) return info->name;
  for (const auto& [other, name] : kOtherTypes) {
    if (other == number) return name;
  }
  return fmt::format("number {}", number);
}

std::string gguf_type_names() {
  std::vector<const char*> names;
  for (const GgufTypeInfo& info : kTypes) names.push_back(info.name);
  return fmt::format("{}", fmt::join(names, ", "));
}

}  // namespace leeway
