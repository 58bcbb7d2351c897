// AdamW's moments in a byte each: blocks of 256 adjacent numbers, each with the largest of its
// values as float32, and a code for every number.
//
//   first moment   m = scale * sign(c) * (c / 127)^2    c in -127 .. 127
//   second moment  v = scale * (c / 255)^4              c in 0 .. 255
//
// Codes are nearest in the root, so that their steps are finest near zero: a first moment that is a
// hundredth of its block's largest is still known to within 8 %, and a second moment of 1e-9 of the
// largest is not lost. A second moment above zero never becomes zero, which would turn the next
// step of its parameter into one without a denominator; the least code stands for it, and the step
// is too small instead.
//
// Decoding gives numbers that are encoded to the same codes and scale again, bit for bit: moments
// can be saved in float32.
#pragma once

#include <cmath>
#include <cstdint>

#ifdef __CUDACC__
#define LEEWAY_ON_BOTH __host__ __device__
#else
#define LEEWAY_ON_BOTH
#endif

namespace leeway::cuda {

inline constexpr int kMomentBlock = 256;
// Scales are not smaller, unless they are zero: the least codes would be subnormal numbers.
inline constexpr float kLeastFirstScale = 1e-30f, kLeastSecondScale = 1e-27f;

inline int64_t moment_blocks(int64_t count) { return (count + kMomentBlock - 1) / kMomentBlock; }

// From the largest |m| and the largest v of a block. First moments below the least scale are zero.
LEEWAY_ON_BOTH inline float first_moment_scale(float largest) {
  return largest < kLeastFirstScale ? 0.0f : largest;
}
LEEWAY_ON_BOTH inline float second_moment_scale(float largest) {
  return largest > 0.0f && largest < kLeastSecondScale ? kLeastSecondScale : largest;
}

// A code hides the last digits of a root. On a GPU a step computes for longer than it reads and
// writes, so that exact roots would make it slower.
LEEWAY_ON_BOTH inline float root_for_code(float x) {
#ifdef __CUDA_ARCH__
  float root;
  asm("sqrt.approx.f32 %0, %1;" : "=f"(root) : "f"(x));
  return root;
#else
  return sqrtf(x);
#endif
}
LEEWAY_ON_BOTH inline float one_over(float scale) { return scale > 0.0f ? 1.0f / scale : 0.0f; }

// The greatest code times these is exactly one.
inline constexpr float kFirstStep = 1.0f / 127.0f, kSecondStep = 1.0f / 255.0f;

LEEWAY_ON_BOTH inline float first_moment_of(int8_t code, float scale) {
  const float root = static_cast<float>(code) * kFirstStep;
  return scale * (root * fabsf(root));
}
LEEWAY_ON_BOTH inline int8_t first_moment_code(float m, float scale) {
  return static_cast<int8_t>(
      copysignf(rintf(127.0f * root_for_code(fabsf(m) * one_over(scale))), m));
}

LEEWAY_ON_BOTH inline float second_moment_of(uint8_t code, float scale) {
  const float root = static_cast<float>(code) * kSecondStep, square = root * root;
  return scale * (square * square);
}
LEEWAY_ON_BOTH inline uint8_t second_moment_code(float v, float scale) {
  if (!(v > 0.0f)) return 0;
  const float root = root_for_code(root_for_code(v * one_over(scale)));
  return static_cast<uint8_t>(fmaxf(1.0f, rintf(255.0f * root)));
}

}  // namespace leeway::cuda
