#include "pool/dialect.h"

#include "base/json.h"
#include "leeway/error.h"

namespace leeway {

std::unique_ptr<Dialect> make_dialect(InferenceDialect kind) {
  switch (kind) {
    case InferenceDialect::leeway: return make_leeway_dialect();
    case InferenceDialect::vllm: return make_vllm_dialect();
    case InferenceDialect::sglang: return make_sglang_dialect();
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
