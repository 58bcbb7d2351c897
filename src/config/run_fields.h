// The keys of each table of a run's configuration: bindings, allowed values and meanings. Which
// keys have no effect depends on values that are read already, so that a table's keys are listed
// anew for each question.
#pragma once

#include <vector>

#include "config/fields.h"
#include "config/run_config.h"

namespace leeway {

std::vector<Field> model_fields(ModelTable& t);
std::vector<Field> lora_fields(LoraTable& t);
std::vector<Field> sft_fields(SftTable& t);
std::vector<Field> trainer_fields(TrainerTable& t, Device device);
std::vector<Field> orchestrator_fields(OrchestratorTable& t);
std::vector<Field> renderer_fields(RendererConfig& t);
std::vector<Field> rollout_fields(RolloutTable& t, InferencePool pool);
std::vector<Field> inference_fields(InferenceTable& t);
std::vector<Field> eval_fields(EvalTable& t);

}  // namespace leeway
