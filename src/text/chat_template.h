// Which renderer a model's folder asks for.
#pragma once

#include <string>

namespace leeway {

// The name of the renderer (renderer.h) for a Hugging Face folder, by `model_type` of its
// config.json. Throws Error for a family that has none.
std::string renderer_name_for(const std::string& model_folder);

}  // namespace leeway
