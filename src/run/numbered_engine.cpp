#include "run/numbered_engine.h"

#include <fmt/format.h>

#include <utility>

#include "leeway/error.h"

namespace leeway {

void NumberedEngine::submit(int64_t number, Request request) {
  if (engines_numbers_.contains(number)) {
    throw Error(fmt::format("request {} is in flight already", number));
  }
  const int64_t samples = request.samples;
  const int64_t own = engine_.submit(std::move(request));
  engines_numbers_.emplace(number, own);
  open_.emplace(own, Open{number, samples});
}

void NumberedEngine::cancel(int64_t number) {
  const auto found = engines_numbers_.find(number);
  if (found == engines_numbers_.end()) return;
  engine_.cancel(found->second);
  open_.erase(found->second);
  engines_numbers_.erase(found);
}

void NumberedEngine::update_weights(std::shared_ptr<const PolicySnapshot> weights) {
  const PolicyVersion version = weights->version();
  engine_.update_weights(std::move(weights), version);
}

std::vector<SampledSequence> NumberedEngine::step() {
  std::vector<SampledSequence> results;
  for (SampledSequence& result : engine_.poll(0.0)) {
    const auto found = open_.find(result.request);
    if (found == open_.end()) continue;  // cancelled
    Open& open = found->second;
    result.request = open.number;
    results.push_back(std::move(result));
    if (--open.samples > 0) continue;
    engines_numbers_.erase(open.number);
    open_.erase(found);
  }
  return results;
}

}  // namespace leeway
