// The parts of a run, made from its configuration: model, tokenizer, renderer, environments.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "config/config.h"
#include "engine/engine.h"
#include "model/parameters.h"
#include "orchestrator/conversation.h"
#include "orchestrator/environment.h"
#include "orchestrator/rollouts.h"
#include "run/policy_card.h"
#include "trainer/backend.h"

namespace leeway {

// Looks at a configuration and the shape of its model before the weights are there, which can take
// minutes. Throws Error.
using ModelCheck = std::function<void(const Config& config, const ModelConfig& model)>;

class RunRanks;

// Sampling on the calling thread and learning in the background share a process's cores; where they
// alternate, each gets all of them. The learner has more work per token, so it may use every core;
// the sampler's own thread then takes the one it needs.
struct ThreadPlan {
  int sampler, trainer;
};
ThreadPlan plan_threads(const RunConfig& run, int cores);

// Of the engine that samples for training. `threads` where the table says 0.
EngineOptions engine_options(const RunConfig& run, int threads);

struct RunSetup {
  // `needs_environments`: whether the job cannot do without one. Throws Error: none where one is
  // needed, a file that cannot be read, an environment that needs a renderer where none is
  // configured, a device that is not there, a stop token outside the model's vocabulary, an [sft]
  // table without demonstrations or with one that is longer than the model; and what `check`
  // throws.
  explicit RunSetup(Config configuration, bool needs_environments = true,
                    const ModelCheck& check = {});

  // Where the file names no chat format, that of the model's folder is filled in (policy_card.h).
  Config config;
  PolicyCard card;             // of the policy's folders
  std::string tokenizer_file;  // empty: bytes
  std::unique_ptr<Tokenizer> tokenizer;
  Parameters weights;  // of the policy before training
  // The renderer's flags change what training sees of a conversation. Evaluation uses the format
  // as the model's family has it, with which the policy is used later: renderer and conversation
  // without the flags. Renderers may be null.
  std::unique_ptr<Renderer> renderer, evaluation_renderer;
  std::unique_ptr<Conversation> conversation, evaluation_conversation;
  std::unique_ptr<EnvironmentMix> environments;  // null if none are configured
  std::vector<std::string> environment_ids;
  RunRanks* ranks = nullptr;           // that share the run; null: this process alone
  MakeTrainingBackend own_backend;     // of a test; empty: that of the configured device
  int64_t spawn_servers = 0;           // processes that sample for training; 0: as [inference] says
  std::vector<Sample> demonstrations;  // from sft.data; empty: the environments provide them

  bool samples_in_process() const {
    return config.run.inference.pool == InferencePool::in_process && spawn_servers == 0;
  }
  // Whether the trainer's GPU samples rollouts while it trains.
  bool samples_beside_training() const {
    return config.run.model.device == Device::cuda && samples_in_process() && ranks == nullptr &&
           config.run.orchestrator.max_off_policy_steps > 0;
  }
  // Whether the engine of evaluations stays between them, though training could use its memory.
  bool keeps_evaluation_engine() const;
  EngineOptions engine_options(int threads) const {
    return leeway::engine_options(config.run, threads);
  }
  // Cores that this process may use.
  int cores() const;
  MakeTrainingBackend training_backend() const;
  RolloutSettings rollout_settings(float temperature) const;

 private:
  void read_demonstrations();
};

}  // namespace leeway
