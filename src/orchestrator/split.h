// Shared by generated prompts and those read from files: seeds for numbered things, and which
// prompts are held out.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string_view>

namespace leeway {

// A seed that depends on every one of `parts` and on their order; for base/rng.h.
uint64_t mixed_seed(std::initializer_list<uint64_t> parts);

// Depends on the bytes alone: the same on every machine.
uint64_t prompt_hash(std::string_view prompt);

// Holds out one prompt in 8, by its text alone: neither a seed nor another environment with the
// same prompts can bring a held-out prompt into training.
bool is_held_out(std::string_view prompt);

}  // namespace leeway
