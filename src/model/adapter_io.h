// Adapters as PEFT keeps them: adapter_config.json and adapter_model.safetensors. That file may be
// in parts with an index, as a model's is; PEFT itself reads one file alone. Beside them lies
// leeway_base.json, {"base": "FOLDER", "checksum": "<8 hexadecimal digits>"}, which PEFT does not
// read: the sum of the weights that the adapter was trained over.
//
// Only what computes scale = lora_alpha / r over whole linear modules is read; every setting that
// asks for more (use_dora, rank_pattern, modules_to_save, ..) is refused by its name.
#pragma once

#include <memory>
#include <string>

#include "base/checked_files.h"
#include "model/parameters.h"
#include "model/stored_model.h"

namespace leeway {

// Whether the folder holds an adapter and not a whole model.
bool is_adapter_folder(const std::string& folder);
// Whether a folder of weights was written to its end: each kind has a file that is written last.
bool is_complete_folder(const std::string& folder);

// Reads adapter_config.json, and leeway_base.json where it is there. Throws Error naming the file,
// the key and its value.
LoraSettings load_lora_settings(const std::string& folder);

// The folder itself, or of an adapter the base that adapter_config.json names. Throws Error if that
// is no folder here.
std::string model_folder_of(const std::string& folder);

// The adapter over `base`, whatever folder its files name. Throws Error as load_parameters does,
// for matrices that do not fit the base, naming the first of them, and for a base whose weights are
// not those that the adapter was trained over, where its folder says which. `base_name` is the base
// in messages.
Parameters load_adapter(const std::string& folder, std::shared_ptr<const Parameters> base,
                        const std::string& base_name = "the base given");
// Over the base of model_folder_of.
Parameters load_adapter(const std::string& folder);

// The matrices alone, without the base that they are for.
Parameters load_adapter_matrices(const std::string& folder, const ModelConfig& config);

// Throws Error unless an adapter with these settings belongs to weights with this checksum.
void check_base_sum(const std::string& folder, const LoraSettings& lora, uint32_t sum,
                    const std::string& base_name);

// A warning for an adapter that does not say which weights it was trained over, and names
// another folder on this disk than `base`; empty: none.
std::string other_base_warning(const std::string& adapter, const std::string& base);

// The model of a folder with the adapter of another over it; an empty name: without one. Throws
// Error as both loads do, and for an adapter over an adapter.
Parameters load_policy(const std::string& folder, const std::string& adapter);

// Weights of the kind that `like` is: an adapter over its base, or all of a model.
Parameters load_like(const Parameters& like, const std::string& folder);

inline constexpr const char* kAdapterStem = "adapter_model";  // of files of weights
// What PEFT calls a parameter of an adapter.
std::string adapter_tensor_name(const std::string& parameter);
// The tensors of a folder of an adapter with these settings. Throws Error for files that are not
// there or not as checksums.json says, and for tensors that do not fit.
StoredModel open_adapter(const std::string& folder, const ModelConfig& config,
                         const LoraSettings& lora);
// leeway_base.json, then adapter_config.json; adds their sums to `written`.
void write_adapter_config(const std::string& folder, const LoraSettings& lora, FileSums& written);

// Writes the files, in float32, adapter_config.json last, and returns their sums.
FileSums save_adapter(const Parameters& adapter, const std::string& folder);

}  // namespace leeway
