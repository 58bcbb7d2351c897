// SGLang: tokens by /generate, weights by /update_weights_from_disk, adapters by
// /load_lora_adapter.

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "pool/dialect.h"
#include "pool/json_fields.h"

namespace leeway {
namespace {

SampledSequence read_one(const rapidjson::Value& answer, int64_t index, PolicyVersion version) {
  SampledSequence sample;
  sample.sample = index;
  const rapidjson::Value& meta = field_of(answer, "meta_info");
  sample.finish = finish_of(text_of_field(field_of(meta, "finish_reason"), "type"));
  // Each entry is [log-probability, id, ..].
  for (const auto& entry : list_of(meta, "output_token_logprobs").GetArray()) {
    if (!entry.IsArray() || entry.Size() < 2) {
      throw Error("\"output_token_logprobs\" has an entry that is no pair");
    }
    sample.raw_logprobs.push_back(number_of(entry[0], "output_token_logprobs"));
    sample.ids.push_back(small_integer_of(entry[1], "output_token_logprobs"));
  }
  sample.processed_logprobs = sample.raw_logprobs;
  sample.versions.assign(sample.ids.size(), version);
  return sample;
}

class SglangDialect : public Dialect {
 public:
  using Dialect::Dialect;
  InferenceDialect kind() const override { return InferenceDialect::sglang; }

  ServerCall describe() const override { return {.path = "/model_info"}; }
  ServerFacts read_facts(std::string_view body) const override {
    const rapidjson::Document json = parse_json("the answer to /model_info", body);
    ServerFacts facts;
    facts.model = text_of_field(json, "model_path");
    return facts;
  }

  ServerCall generate(const Request& request, const std::string&,
                      PolicyVersion version) const override {
    const SamplingSettings& sampling = request.sampling;
    const std::string adapter =
        is_adapter() ? fmt::format(",\"lora_path\":\"{}\"", adapter_name(version)) : "";
    const int64_t top_k = sampling.top_k > 0 ? sampling.top_k : -1;
    return {.post = true,
            .path = "/generate",
            .body = fmt::format(
                "{{\"input_ids\":{},\"sampling_params\":{{\"temperature\":{},\"top_p\":{},"
                "\"top_k\":{},\"min_p\":{},\"sampling_seed\":{},\"n\":{},\"max_new_tokens\":{},"
                "\"stop_token_ids\":{},\"skip_special_tokens\":false,\"no_stop_trim\":true}},"
                "\"return_logprob\":true,\"stream\":false{}}}",
                ids_text(request.prompt), sampling.temperature, sampling.top_p, top_k,
                sampling.min_p, request.seed & 0x7fffffff, request.samples, request.max_new_tokens,
                ids_text(request.stop_ids), adapter)};
  }
  // A list of answers, or one alone for a request of one sample.
  std::vector<SampledSequence> read_samples(const Request&, std::string_view body,
                                            PolicyVersion version) const override {
    const rapidjson::Document json = parse_json("the answer", body);
    if (json.IsObject()) return {read_one(json, 0, version)};
    if (!json.IsArray()) throw Error("the answer is neither an object nor a list");
    std::vector<SampledSequence> samples;
    for (const auto& answer : json.GetArray()) {
      samples.push_back(read_one(answer, static_cast<int64_t>(samples.size()), version));
    }
    return samples;
  }
  // The model's own end of sequence ends one too.
  bool stops_as_asked() const override { return false; }

  // Running requests go back to its queue, and their keys and values are computed again with the
  // new weights: it flushes its cache with them, which it cannot while requests run.
  ServerCall pause() const override {
    return {.post = true, .path = "/pause_generation", .body = "{\"mode\":\"retract\"}"};
  }
  ServerCall resume() const override {
    return {.post = true, .path = "/continue_generation", .body = "{}"};
  }
  std::vector<ServerCall> update(const std::string& folder, PolicyVersion version) const override {
    if (is_adapter()) return {load_adapter_call("/load_lora_adapter", folder, version)};
    JsonWriter json;
    json.begin_object().key("model_path").value(folder);
    json.key("weight_version").value(std::to_string(version));
    json.key("abort_all_requests").value(false).key("flush_cache").value(true).end_object();
    return {{.post = true, .path = "/update_weights_from_disk", .body = json.text()}};
  }
  void check_updated(std::string_view body, PolicyVersion, uint32_t) const override {
    const rapidjson::Document json = parse_json("the answer to the update", body);
    const rapidjson::Value& success = field_of(json, "success");
    if (!success.IsBool() || !success.GetBool()) throw Error("the update was not a success");
  }
  bool has_already(int status, std::string_view body) const override {
    return is_adapter() && status == 400 && body.find("already") != std::string_view::npos;
  }
  std::optional<ServerCall> forget(PolicyVersion version) const override {
    if (!is_adapter()) return {};
    return unload_adapter_call("/unload_lora_adapter", version);
  }
};

}  // namespace

std::unique_ptr<Dialect> make_sglang_dialect(ServedWeights weights) {
  return std::make_unique<SglangDialect>(weights);
}

}  // namespace leeway
