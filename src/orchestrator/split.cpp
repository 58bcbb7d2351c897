#include "orchestrator/split.h"

#include "base/rng.h"

namespace leeway {

uint64_t mixed_seed(std::initializer_list<uint64_t> parts) {
  uint64_t seed = 0;
  for (const uint64_t part : parts) seed = Rng(seed ^ part).next();
  return seed;
}

uint64_t prompt_hash(std::string_view prompt) {
  // FNV-1a with a final mix: its high bits alone differ little for short texts.
  uint64_t hash = 0xcbf29ce484222325u;
  for (const char c : prompt) hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001b3u;
  return Rng(hash).next();
}

bool is_held_out(std::string_view prompt) { return prompt_hash(prompt) % 8 == 0; }

}  // namespace leeway
