// vLLM: tokens by /inference/v1/generate; weights by prime-rl's /update_weights, or by vLLM's own
// /collective_rpc (VLLM_SERVER_DEV_MODE=1); adapters by /v1/load_lora_adapter
// (VLLM_ALLOW_RUNTIME_LORA_UPDATING=1) or prime-rl's /load_lora_adapter.

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "pool/dialect.h"
#include "pool/json_fields.h"
#include "pool/vllm_requests.h"

namespace leeway {
namespace {

class VllmDialect : public Dialect {
 public:
  using Dialect::Dialect;
  InferenceDialect kind() const override { return InferenceDialect::vllm; }

  ServerCall describe() const override { return {.path = "/v1/models"}; }
  ServerFacts read_facts(std::string_view body) const override {
    const rapidjson::Document json = parse_json("the answer to /v1/models", body);
    const rapidjson::Value& models = list_of(json, "data");
    if (models.Empty()) throw Error("lists no model");
    ServerFacts facts;
    facts.model = text_of_field(models[0], "id");
    if (models[0].HasMember("max_model_len") && models[0]["max_model_len"].IsInt64()) {
      facts.max_length = models[0]["max_model_len"].GetInt64();
    }
    return facts;
  }

  // Keys and values of a prefix that other weights computed must not be used again: the cache is
  // salted with the version.
  ServerCall generate(const Request& request, const std::string& model,
                      PolicyVersion version) const override {
    JsonWriter json;
    json.begin_object().key("model").value(is_adapter() ? adapter_name(version) : model);
    json.key("token_ids").raw(ids_text(request.prompt));
    json.key("sampling_params").raw(vllm_sampling_params(request, true));
    json.key("cache_salt").value(std::to_string(version)).end_object();
    return {.post = true, .path = "/inference/v1/generate", .body = json.text()};
  }
  std::vector<SampledSequence> read_samples(const Request&, std::string_view body,
                                            PolicyVersion version) const override {
    const rapidjson::Document json = parse_json("the answer", body);
    std::vector<SampledSequence> samples;
    for (const auto& choice : list_of(json, "choices").GetArray()) {
      SampledSequence sample = read_vllm_choice(choice, static_cast<int64_t>(samples.size()));
      sample.processed_logprobs = sample.raw_logprobs;
      sample.versions.assign(sample.ids.size(), version);
      samples.push_back(std::move(sample));
    }
    return samples;
  }

  ServerCall pause() const override {
    return {.post = true, .path = "/pause?mode=keep&clear_cache=false"};
  }
  ServerCall resume() const override { return {.post = true, .path = "/resume"}; }
  std::vector<ServerCall> update(const std::string& folder, PolicyVersion version) const override {
    if (is_adapter()) {
      return {load_adapter_call("/v1/load_lora_adapter", folder, version),
              load_adapter_call("/load_lora_adapter", folder, version)};
    }
    JsonWriter prime, rpc;
    prime.begin_object().key("weight_dir").value(folder).end_object();
    rpc.begin_object().key("method").value("reload_weights").key("kwargs").begin_object();
    rpc.key("weights_path").value(folder).end_object().end_object();
    return {{.post = true, .path = "/update_weights", .body = prime.text()},
            {.post = true, .path = "/collective_rpc", .body = rpc.text()}};
  }
  // Status 200 is all that it says.
  void check_updated(std::string_view, PolicyVersion, uint32_t) const override {}
  // A server that was away for a moment only.
  bool has_already(int status, std::string_view body) const override {
    return is_adapter() && status == 400 && body.find("already") != std::string_view::npos;
  }
  std::optional<ServerCall> forget(PolicyVersion version) const override {
    if (!is_adapter()) return {};
    return unload_adapter_call("/v1/unload_lora_adapter", version);
  }
};

}  // namespace

std::unique_ptr<Dialect> make_vllm_dialect(ServedWeights weights) {
  return std::make_unique<VllmDialect>(weights);
}

}  // namespace leeway
