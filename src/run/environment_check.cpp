#include "run/environment_check.h"

#include <fmt/format.h>

#include "leeway/error.h"

namespace leeway {

void check_environments(const EnvironmentMix& environments) {
  for (size_t i = 0; i < environments.members().size(); ++i) {
    const EnvironmentMix::Member& member = environments.members()[i];
    // A mix without training prompts cannot be constructed.
    if (member.environment->size(Split::held_out) == uint64_t{0}) {
      throw Error(fmt::format(
          "environment {} has no held-out prompt to evaluate on: all of environment.{}.data is one "
          "prompt; give it a second one, or name a file as environment.{}.eval_data",
          member.id, i, i));
    }
    try {
      member.environment->check();
    } catch (const Error& error) {
      throw Error(fmt::format("environment {}: {}", member.id, error.what()));
    }
  }
}

}  // namespace leeway
