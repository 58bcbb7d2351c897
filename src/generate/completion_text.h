// Completions as JSON.
#pragma once

#include <string>
#include <vector>

#include "generate/generation.h"

namespace leeway {

// Token ids alone: {"tokens": [[..]..], "logprobs", "processed_logprobs", "finish"}, a list each
// per sequence.
std::string sequences_json(const std::vector<SampledSequence>& sequences);

// One completion on one line: text, content, reasoning, tool_calls, tokens, logprobs,
// processed_logprobs, finish. Without a renderer (null) content is the text, and there is neither
// reasoning nor a call. Each call can stand in an assistant message, and has a status.
std::string generated_json(const Generated& generated, const Renderer* renderer,
                           const RenderOptions& options);

}  // namespace leeway
