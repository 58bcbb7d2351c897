// Environments with generated prompts: unlimited, split by the prompt's text.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "base/rng.h"
#include "orchestrator/environment.h"

namespace leeway {

// Defines a generated environment. Both functions must be thread-safe.
struct Generator {
  // Generates an example from `rng` alone; its first message is the prompt. The environment fills
  // in `index`.
  std::function<Example(Rng& rng)> make;
  std::function<std::unique_ptr<Episode>(const Example&)> start;
  bool needs_renderer = false;
  std::string keys;  // for messages: the keys that decide how many prompts there are, with values
};

// Draws examples until their prompt belongs to the requested split. Throws Error naming `keys` if
// there are so few prompts that one of the splits is empty.
std::unique_ptr<Environment> make_generated_environment(Generator generator, uint64_t seed);

// Ends after one turn with part "exact": 1 where `exact_reply` (verifiers.h) holds for the answer.
std::unique_ptr<Episode> make_exact_episode(std::string answer);

}  // namespace leeway
