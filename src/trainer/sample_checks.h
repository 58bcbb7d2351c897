// Which samples the trainer takes.
#pragma once

#include <span>

#include "data/sample.h"
#include "model/model_config.h"

namespace leeway {

// Throws Error naming sample, list and position: no ids, lists of another length, an optional list
// that only some samples have, ids outside the vocabulary, more ids than the model has positions, a
// mask that is neither 0 nor 1, a trained first token, an advantage or log-probability of a trained
// token that is not finite, a temperature that is not positive or has no finite inverse.
void check_samples(const ModelConfig& config, std::span<const Sample> samples);

}  // namespace leeway
