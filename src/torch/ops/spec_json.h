// Loss specs as the text operators take: {"preset": "icepop", "icepop_ratio_low": 0.5}, and the
// process's catalog, to which a caller may add corrections whose results come with each batch.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "base/json.h"
#include "leeway/loss.h"
#include "leeway/presets.h"

namespace leeway {

// As strict as a configuration file: throws Error for text that is not one JSON object, a preset
// that is missing or unknown, and keys that are unknown, doubled or out of range.
LossSpec spec_from_json(std::string_view text);

// A setting's value; `where` is printed before the key in the Error for lists and objects.
Value value_from_json(const char* where, const std::string& key, const rapidjson::Value& json);

// What is known now: a catalog never changes once it is handed out.
std::shared_ptr<const Catalog> current_catalog();

// Replaces all corrections that are computed by the caller: a JSON list of {"name", "formula",
// "summary", "reads": ["rollout", ..], "keys": [{"name", "default", "meaning", "low"?, "high"?},
// ..]}. Throws Error, and leaves all as it was, for a name or key that is taken.
void set_caller_corrections(std::string_view json);

// Rises with every set_caller_corrections: specs made before are to be made again.
int64_t catalog_generation();

// Whether the caller computes it: weights and mask come with the batch.
bool is_callers(const std::string& name);
inline bool is_callers(const Correction& correction) { return is_callers(correction.name); }

// A correction that multiplies `weights` and clears where `mask` is 0, both [N] or empty, of a
// batch whose advantages begin at `first`: its sequences are told apart by where they lie.
template <class T>
Correction bound_correction(const Correction& correction, const T* first,
                            std::span<const T> weights, std::span<const uint8_t> mask) {
  const auto apply = [first, weights, mask](const SequenceView<T>& sequence,
                                            SequenceEffect<T> effect) {
    const size_t begin = static_cast<size_t>(sequence.advantages.data() - first);
    for (size_t t = 0; t < sequence.mask.size(); ++t) {
      if (!sequence.mask[t]) continue;
      if (!weights.empty()) effect.weights[t] = weights[begin + t];
      if (!mask.empty() && mask[begin + t] == 0) effect.mask[t] = 0;
    }
  };
  Correction bound = correction;
  if constexpr (std::is_same_v<T, double>) {
    bound.apply_double = apply;
  } else {
    bound.apply_float = apply;
  }
  return bound;
}

// The spec with the caller's weights and mask, products over its corrections, in place.
template <class T>
void bind_corrections(LossSpec& spec, const T* first, std::span<const T> weights,
                      std::span<const uint8_t> mask);

extern template void bind_corrections(LossSpec&, const float*, std::span<const float>,
                                      std::span<const uint8_t>);
extern template void bind_corrections(LossSpec&, const double*, std::span<const double>,
                                      std::span<const uint8_t>);

// The spec without the caller's corrections, under the same name, for a device that takes their
// result by itself.
LossSpec without_callers(const LossSpec& spec);

// Throws Error unless results are given where the spec has such a correction, and only there.
void check_given(const LossSpec& spec, bool given);

}  // namespace leeway
