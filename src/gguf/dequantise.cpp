#include "gguf/dequantise.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "base/half.h"
#include "leeway/error.h"

namespace leeway {
namespace {

static_assert(std::endian::native == std::endian::little, "GGUF files are read as they lie");

using Bytes = const uint8_t*;

uint16_t bits16(Bytes at) {
  uint16_t bits = 0;
  std::memcpy(&bits, at, sizeof bits);
  return bits;
}
float half_at(Bytes at) { return from_f16(bits16(at)); }

// Four bits of each of 16 bytes: the low halves are the first 16 elements, the high the others.
uint32_t nibble(Bytes packed, size_t element) {
  return element < 16 ? packed[element] & 0xFu : packed[element - 16] >> 4;
}
// One bit of a word of 32.
uint32_t fifth_bit(Bytes word, size_t element) {
  return static_cast<uint32_t>(word[element / 8] >> (element % 8)) & 1u;
}

// Scale, 16 bytes of nibbles.
void read_q4_0(Bytes block, float* out) {
  const float scale = half_at(block);
  for (size_t i = 0; i < 32; ++i) {
    out[i] = scale * static_cast<float>(static_cast<int>(nibble(block + 2, i)) - 8);
  }
}
// Scale, minimum, nibbles.
void read_q4_1(Bytes block, float* out) {
  const float scale = half_at(block), least = half_at(block + 2);
  for (size_t i = 0; i < 32; ++i) {
    out[i] = scale * static_cast<float>(nibble(block + 4, i)) + least;
  }
}
// Scale, fifth bits, nibbles.
void read_q5_0(Bytes block, float* out) {
  const float scale = half_at(block);
  for (size_t i = 0; i < 32; ++i) {
    const uint32_t level = nibble(block + 6, i) | fifth_bit(block + 2, i) << 4;
    out[i] = scale * static_cast<float>(static_cast<int>(level) - 16);
  }
}
// Scale, minimum, fifth bits, nibbles.
void read_q5_1(Bytes block, float* out) {
  const float scale = half_at(block), least = half_at(block + 2);
  for (size_t i = 0; i < 32; ++i) {
    const uint32_t level = nibble(block + 8, i) | fifth_bit(block + 4, i) << 4;
    out[i] = scale * static_cast<float>(level) + least;
  }
}
// Scale, 32 signed bytes.
void read_q8_0(Bytes block, float* out) {
  const float scale = half_at(block);
  for (size_t i = 0; i < 32; ++i) {
    out[i] = scale * static_cast<float>(static_cast<int8_t>(block[2 + i]));
  }
}

// The K types have 256 elements a block. Q4_K and Q5_K divide them into 8 groups of 32, each with a
// scale and a minimum of six bits, packed into 12 bytes: those of the first four groups are the low
// six bits of bytes 0 to 3 and 4 to 7; of the others, bytes 8 to 11 have the low four bits (scale
// and minimum), and the two top bits of bytes 0 to 7 the rest.
struct GroupScale {
  uint32_t scale, least;
};
GroupScale group_scale(Bytes packed, size_t group) {
  if (group < 4) return {packed[group] & 0x3Fu, packed[group + 4] & 0x3Fu};
  const uint32_t low = packed[group + 4];
  return {(low & 0xFu) | static_cast<uint32_t>(packed[group - 4] >> 6) << 4,
          low >> 4 | static_cast<uint32_t>(packed[group] >> 6) << 4};
}

// Groups 2k and 2k+1 are the low and the high nibbles of 32 bytes; `fifth` (Q5_K) has 32 bytes
// whose bit `group` belongs to that group's elements.
void read_groups(Bytes block, Bytes fifth, Bytes nibbles, float* out) {
  const float scale = half_at(block), least = half_at(block + 2);
  for (size_t group = 0; group < 8; ++group) {
    const GroupScale own = group_scale(block + 4, group);
    const float group_step = scale * static_cast<float>(own.scale);
    const float group_least = least * static_cast<float>(own.least);
    for (size_t i = 0; i < 32; ++i) {
      const uint32_t packed = nibbles[group / 2 * 32 + i];
      uint32_t level = group % 2 == 0 ? packed & 0xFu : packed >> 4;
      if (fifth != nullptr) level |= (static_cast<uint32_t>(fifth[i] >> group) & 1u) << 4;
      out[group * 32 + i] = group_step * static_cast<float>(level) - group_least;
    }
  }
}
void read_q4_k(Bytes block, float* out) { read_groups(block, nullptr, block + 16, out); }
void read_q5_k(Bytes block, float* out) { read_groups(block, block + 16, block + 48, out); }

// 128 bytes of nibbles, 64 of upper pairs of bits, 16 signed scales (of 16 elements each), scale.
// The two halves of a block have 64 and 32 of these bytes.
void read_q6_k(Bytes block, float* out) {
  const Bytes scales = block + 192;
  const float scale = half_at(block + 208);
  for (size_t i = 0; i < 256; ++i) {
    const size_t half = i / 128, within = i % 128;
    const uint32_t packed = block[half * 64 + within % 64];
    const uint32_t low = within < 64 ? packed & 0xFu : packed >> 4;
    const uint32_t high = block[128 + half * 32 + within % 32] >> (within / 32 * 2) & 3u;
    const float group_step = scale * static_cast<float>(static_cast<int8_t>(scales[i / 16]));
    out[i] = group_step * static_cast<float>(static_cast<int>(low | high << 4) - 32);
  }
}

void write_q8_0(const float* values, uint8_t* block) {
  float most = 0.0f;
  for (size_t i = 0; i < 32; ++i) most = std::max(most, std::fabs(values[i]));
  const float scale = most / 127.0f;
  const float inverse = scale == 0.0f ? 0.0f : 1.0f / scale;
  const uint16_t bits = to_f16(scale);
  std::memcpy(block, &bits, sizeof bits);
  for (size_t i = 0; i < 32; ++i) {
    // A scale too small for an inverse leaves no levels to choose from.
    const float level = std::isfinite(inverse) ? std::round(values[i] * inverse) : 0.0f;
    block[2 + i] = static_cast<uint8_t>(static_cast<int8_t>(std::clamp(level, -127.0f, 127.0f)));
  }
}

template <class Read>
void read_blocks(const GgufTypeInfo& info, Bytes bytes, std::span<float> out, Read read) {
  for (size_t i = 0; i < out.size() / info.elements; ++i) {
    read(bytes + i * info.block_bytes, out.data() + i * info.elements);
  }
}

}  // namespace

void dequantise(GgufType type, std::span<const std::byte> blocks, std::span<float> out) {
  const GgufTypeInfo& info = info_of(type);
  LEEWAY_CHECK(out.size() % info.elements == 0 &&
                   out.size() / info.elements * info.block_bytes == blocks.size(),
               "blocks and values must have matching sizes");
  const Bytes bytes = reinterpret_cast<Bytes>(blocks.data());
  if (out.empty()) return;
  switch (type) {
    case GgufType::f32: std::memcpy(out.data(), bytes, blocks.size()); return;
    case GgufType::f16:
      return read_blocks(info, bytes, out, [](Bytes at, float* to) { *to = half_at(at); });
    case GgufType::bf16:
      return read_blocks(info, bytes, out,
                         [](Bytes at, float* to) { *to = from_bf16(bits16(at)); });
    case GgufType::q4_0: return read_blocks(info, bytes, out, read_q4_0);
    case GgufType::q4_1: return read_blocks(info, bytes, out, read_q4_1);
    case GgufType::q5_0: return read_blocks(info, bytes, out, read_q5_0);
    case GgufType::q5_1: return read_blocks(info, bytes, out, read_q5_1);
    case GgufType::q8_0: return read_blocks(info, bytes, out, read_q8_0);
    case GgufType::q4_k: return read_blocks(info, bytes, out, read_q4_k);
    case GgufType::q5_k: return read_blocks(info, bytes, out, read_q5_k);
    case GgufType::q6_k: return read_blocks(info, bytes, out, read_q6_k);
  }
}

void quantise(GgufType type, std::span<const float> values, std::span<std::byte> out) {
  const GgufTypeInfo& info = info_of(type);
  LEEWAY_CHECK(values.size() % info.elements == 0 &&
                   values.size() / info.elements * info.block_bytes == out.size(),
               "blocks and values must have matching sizes");
  const auto halves = [&](auto convert) {
    for (size_t i = 0; i < values.size(); ++i) {
      const uint16_t bits = convert(values[i]);
      std::memcpy(out.data() + i * sizeof bits, &bits, sizeof bits);
    }
  };
  switch (type) {
    case GgufType::f32:
      if (!values.empty()) std::memcpy(out.data(), values.data(), out.size());
      return;
    case GgufType::f16: return halves(to_f16);
    case GgufType::bf16: return halves(to_bf16);
    case GgufType::q8_0:
      for (size_t i = 0; i < values.size() / info.elements; ++i) {
        write_q8_0(values.data() + i * info.elements,
                   reinterpret_cast<uint8_t*>(out.data()) + i * info.block_bytes);
      }
      return;
    default: LEEWAY_CHECK(false, "this type is read only");
  }
}

}  // namespace leeway
