#include "pool/dialect.h"

#include "base/json.h"
#include "leeway/error.h"

namespace leeway {

std::string adapter_name(PolicyVersion version) { return "leeway-" + std::to_string(version); }

ServerCall load_adapter_call(const std::string& path, const std::string& folder,
                             PolicyVersion version, bool says_version) {
  JsonWriter json;
  json.begin_object().key("lora_name").value(adapter_name(version));
  json.key("lora_path").value(folder);
  if (says_version) json.key("weight_version").value(static_cast<double>(version));
  return {.post = true, .path = path, .body = json.end_object().text()};
}

ServerCall unload_adapter_call(const std::string& path, PolicyVersion version) {
  JsonWriter json;
  json.begin_object().key("lora_name").value(adapter_name(version)).end_object();
  return {.post = true, .path = path, .body = json.text()};
}

std::unique_ptr<Dialect> make_dialect(InferenceDialect kind, ServedWeights weights) {
  switch (kind) {
    case InferenceDialect::leeway: return make_leeway_dialect(weights);
    case InferenceDialect::vllm: return make_vllm_dialect(weights);
    case InferenceDialect::sglang: return make_sglang_dialect(weights);
    case InferenceDialect::automatic: break;
  }
  LEEWAY_CHECK(false, "a dialect that was found");
}

InferenceDialect dialect_of(int status, std::string_view body) {
  if (status == 404 || status == 405) return InferenceDialect::vllm;
  if (status != 200) {
    throw Error("GET /model_info was answered with status " + std::to_string(status) +
                ", which says nothing of the dialect; set inference.dialect");
  }
  const rapidjson::Document json = parse_json("the answer to /model_info", body);
  if (!json.IsObject()) throw Error("the answer to /model_info is no object");
  if (json.HasMember("leeway")) return InferenceDialect::leeway;
  return InferenceDialect::sglang;
}

}  // namespace leeway
