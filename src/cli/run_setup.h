// What a run is made of, from its configuration: model, tokenizer, renderer, environments.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "config/config.h"
#include "engine/engine.h"
#include "model/parameters.h"
#include "orchestrator/conversation.h"
#include "orchestrator/environment.h"
#include "orchestrator/rollouts.h"

namespace leeway {

struct RunSetup {
  // Throws Error: no environment, a file that cannot be read, an environment that needs a renderer
  // where none is configured, a tokenizer larger than the model's vocabulary.
  explicit RunSetup(Config configuration);

  Config config;
  std::unique_ptr<Tokenizer> tokenizer;
  Parameters weights;                  // of the policy before anything is trained
  std::unique_ptr<Renderer> renderer;  // may be null
  std::unique_ptr<Conversation> conversation;
  std::unique_ptr<EnvironmentMix> environments;
  std::vector<std::string> environment_ids;

  // `threads` where the table says 0.
  EngineOptions engine_options(int threads) const;
  RolloutSettings rollout_settings(float temperature) const;
};

}  // namespace leeway
