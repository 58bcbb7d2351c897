// Environments whose prompts are made up: without end, split by the prompt's text.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "base/rng.h"
#include "orchestrator/environment.h"

namespace leeway {

// What makes one such environment. Both functions are called from several threads at once.
struct Generator {
  // An example by the numbers of `rng` alone; its first message is the prompt. `index` is filled in
  // by the environment.
  std::function<Example(Rng& rng)> make;
  std::function<std::unique_ptr<Episode>(const Example&)> start;
  bool needs_renderer = false;
  std::string keys;  // for messages: the keys that decide how many prompts there are, with values
};

// Examples of a split are drawn until their prompt belongs to it. Throws Error naming `keys` where
// there are so few prompts that one of the splits is empty.
std::unique_ptr<Environment> make_generated_environment(Generator generator, uint64_t seed);

// Ends after one turn with part "exact": 1 where `exact_reply` (verifiers.h) holds for the answer.
std::unique_ptr<Episode> make_exact_episode(std::string answer);

}  // namespace leeway
