#include "model/lora.h"

#include <algorithm>

namespace leeway {

std::vector<std::string> ordered_targets(const std::vector<std::string>& targets) {
  std::vector<std::string> ordered;
  for (const std::string_view target : kLoraTargets) {
    if (std::find(targets.begin(), targets.end(), target) != targets.end()) {
      ordered.emplace_back(target);
    }
  }
  return ordered;
}

std::vector<ParameterInfo> lora_table(const ModelConfig& config, const LoraSettings& lora) {
  constexpr std::string_view kWeight = ".weight";
  std::vector<ParameterInfo> table;
  for (const ParameterInfo& info : parameter_table(config)) {
    if (info.role != ParameterInfo::Role::matrix) continue;
    const std::string module = info.name.substr(0, info.name.size() - kWeight.size());
    const std::string target = module.substr(module.rfind('.') + 1);
    if (std::find(lora.targets.begin(), lora.targets.end(), target) == lora.targets.end()) continue;
    table.push_back({lora_a_name(module), {lora.rank, info.shape[1]}, info.role});
    table.push_back({lora_b_name(module), {info.shape[0], lora.rank}, info.role});
  }
  return table;
}

}  // namespace leeway
