// The parts of vLLM's token requests that Leeway's server has as well.
#pragma once

#include <cstdint>
#include <string>

#include "base/json.h"
#include "data/sampling.h"

namespace leeway {

// "sampling_params". `own_stops`: the server has stop ids of its own, which it shall ignore.
std::string vllm_sampling_params(const Request& request, bool own_stops);

// Ids, raw log-probabilities and the finish of a choice, whose index must be `index`. Throws Error.
SampledSequence read_vllm_choice(const rapidjson::Value& choice, int64_t index);

}  // namespace leeway
