#include "model/weight_files.h"

#include "base/files.h"
#include "model/adapter_io.h"

namespace leeway {

std::string weights_stem(const LoraSettings* lora) {
  return lora != nullptr ? kAdapterStem : "model";
}

std::string weight_name(const LoraSettings* lora, const std::string& parameter) {
  return lora != nullptr ? adapter_tensor_name(parameter) : parameter;
}

StoredModel open_weights(const std::string& folder, const ModelConfig& config,
                         const LoraSettings* lora) {
  if (lora != nullptr) return open_adapter(folder, config, *lora);
  StoredModel stored = open_stored_model(folder);
  check_checksums(folder);
  check_layout(stored, config);
  return stored;
}

void complete_weights(const std::string& folder, const ModelConfig& config,
                      const LoraSettings* lora, FileSums& written) {
  remove_other_files(folder, weights_stem(lora), written);
  if (lora != nullptr) return write_adapter_config(folder, *lora, written);
  written["config.json"] =
      write_file_atomically(folder + "/config.json", model_config_json(config));
}

}  // namespace leeway
