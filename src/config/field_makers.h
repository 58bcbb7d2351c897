// How the keys of a run's configuration are written down: a function for each kind of key, and the
// limits that several keys share.
#pragma once

#include <string>
#include <vector>

#include "config/fields.h"

namespace leeway {

// Limits far above any practical use that keep products of sizes, such as the rollouts of a whole
// run, within 63 bits.
inline constexpr double kMostSteps = 1e8;
inline constexpr double kMostPrompts = 1e6;
inline constexpr double kMostRollouts = 1e4;  // per prompt
inline constexpr double kMostTokens = 0x1p30;
inline constexpr double kMostThreads = 1024;
inline constexpr double kMostSeed = 0x1p53 - 1;  // exact in any JSON reader
inline constexpr double kMostBytes = 0x1p50;

inline const Range kNotNegative{.low = 0};
inline const Range kPositive{.low = 0, .open_low = true};
// Limit on weights and penalties that keeps sums of products with rewards and counts finite.
inline constexpr double kMostWeight = 1e9;
inline const Range kWeight{.low = 0, .high = kMostWeight, .open_low = true};
inline const Range kWeightOrNone{.low = 0, .high = kMostWeight};
inline const Range kShare{.low = 0, .high = 1};
inline const Range kShareBelowOne{.low = 0, .high = 1, .open_high = true};

inline Field integer(const char* key, int64_t& value, double low, double high,
                     const char* meaning) {
  return {.key = key, .target = &value, .meaning = meaning, .range = {.low = low, .high = high}};
}
inline Field number(const char* key, double& value, const Range& range, const char* meaning) {
  return {.key = key, .target = &value, .meaning = meaning, .range = range};
}
inline Field flag(const char* key, bool& value, const char* meaning) {
  return {.key = key, .target = &value, .meaning = meaning};
}
inline Field text(const char* key, std::string& value, const char* meaning) {
  return {.key = key, .target = &value, .meaning = meaning};
}
inline Field texts(const char* key, std::vector<std::string>& value, const char* meaning) {
  return {.key = key, .target = &value, .meaning = meaning};
}
// Text that must not be empty.
inline Field word(const char* key, std::string& value, const char* meaning) {
  return {.key = key, .target = &value, .meaning = meaning, .may_be_empty = false};
}
template <NamedEnum E>
Field choice(const char* key, E& value, const char* meaning) {
  const EnumTarget target{
      .value = &value,
      .get = [](const void* at) { return static_cast<size_t>(*static_cast<const E*>(at)); },
      .set = [](void* at, size_t place) { *static_cast<E*>(at) = static_cast<E>(place); }};
  return {.key = key,
          .target = target,
          .meaning = meaning,
          .choices = {kNames<E>.begin(), kNames<E>.end()}};
}

// The same for a key that may also be `true`, for the value `if_true`, or `false`, for the first.
template <NamedEnum E>
Field choice_or_flag(const char* key, E& value, E if_true, const char* meaning) {
  Field field = choice(key, value, meaning);
  field.if_true = name_of(if_true);
  return field;
}

// A key that has no effect because of the value of key `by` if `condition` holds.
inline Field inert_if(bool condition, const std::string& by, const std::string& reason,
                      Field field) {
  field.inert_by = by;
  if (condition) field.inert = reason;
  return field;
}
// A file or folder that is read; `words` are special values that are not paths.
inline Field input(Field field, std::vector<std::string> words = {}) {
  field.input_path = true;
  field.no_paths = std::move(words);
  return field;
}

}  // namespace leeway
