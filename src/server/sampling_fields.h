// The sampling parameters of a request, which all dialects name alike but for a few.
#pragma once

#include <string>
#include <vector>

#include "data/sampling.h"
#include "server/json_fields.h"

namespace leeway {

struct SamplingFields {
  SamplingSettings settings;
  int64_t samples = 1;
  std::optional<int64_t> max_tokens;
  std::vector<int32_t> stop_ids;
  std::vector<std::string> stop_texts;
  std::optional<uint64_t> seed;
  std::optional<bool> ignore_eos;
};

// What `defaults` has stays where the request says nothing. `limit_key` is the dialect's name of
// the limit of new tokens, and `least` the smallest it may be. Throws ApiError 400 for values out
// of range, and for parameters that the engine does not have unless they are switched off.
SamplingFields read_sampling(const JsonFields& fields, const SamplingSettings& defaults,
                             const char* limit_key, int64_t least = 1);

// For a request that names none.
uint64_t random_seed();

// "%.9g": every float32 is read back as itself. What is not finite is null.
std::string float_text(float value);
std::string floats_text(const std::vector<float>& values);  // [..]
std::string integers_text(const std::vector<int32_t>& values);

// stop, length or abort.
const char* finish_text(Finish finish);

}  // namespace leeway
