#include "text/chat_template.h"

#include <fmt/format.h>

#include "base/files.h"
#include "base/json.h"
#include "leeway/error.h"

namespace leeway {

std::string renderer_name_for(const std::string& model_folder) {
  const std::string file = model_folder + "/config.json";
  const rapidjson::Document json = parse_json(file, read_file(file));
  const bool has_type =
      json.IsObject() && json.HasMember("model_type") && json["model_type"].IsString();
  const std::string type = has_type ? json["model_type"].GetString() : "";
  if (type == "qwen2") return "qwen2.5";
  if (type == "qwen3") return "qwen3";
  if (type == "llama") return "llama3";
  throw Error(
      fmt::format("{}: model_type \"{}\" has no renderer; name one with --renderer", file, type));
}

}  // namespace leeway
