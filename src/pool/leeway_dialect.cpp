// Leeway's own server: the same draws and the same bits as the engine in process.

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <charconv>

#include "pool/dialect.h"
#include "pool/json_fields.h"
#include "pool/vllm_requests.h"

namespace leeway {
namespace {

uint32_t checksum_of(const rapidjson::Value& facts) {
  const std::string text = text_of_field(facts, "checksum");
  uint32_t value = 0;
  const char* end = text.data() + text.size();
  const auto [stop, problem] = std::from_chars(text.data(), end, value, 16);
  if (text.empty() || problem != std::errc() || stop != end) {
    throw Error("\"checksum\" is no hexadecimal number of 32 bits");
  }
  return value;
}

class LeewayDialect : public Dialect {
 public:
  using Dialect::Dialect;
  InferenceDialect kind() const override { return InferenceDialect::leeway; }

  ServerCall describe() const override { return {.path = "/model_info"}; }
  ServerFacts read_facts(std::string_view body) const override {
    const rapidjson::Document json = parse_json("the answer to /model_info", body);
    const rapidjson::Value& ours = field_of(json, "leeway");
    ServerFacts facts;
    facts.version = small_integer_of(field_of(ours, "version"), "version");
    facts.vocab_size = integer_of(field_of(ours, "vocab_size"), "vocab_size");
    facts.max_length = integer_of(field_of(ours, "max_model_len"), "max_model_len");
    facts.checksum = checksum_of(ours);
    facts.paused = ours.HasMember("paused") && ours["paused"].IsTrue();
    if (ours.HasMember("device")) facts.device = text_of_field(ours, "device");
    return facts;
  }

  ServerCall generate(const Request& request, const std::string&, PolicyVersion) const override {
    return {.post = true,
            .path = "/inference/v1/generate",
            .body = fmt::format("{{\"token_ids\":{},\"sampling_params\":{}}}",
                                ids_text(request.prompt), vllm_sampling_params(request, false))};
  }
  std::vector<SampledSequence> read_samples(const Request&, std::string_view body,
                                            PolicyVersion) const override {
    const rapidjson::Document json = parse_json("the answer", body);
    std::vector<SampledSequence> samples;
    for (const auto& choice : list_of(json, "choices").GetArray()) {
      SampledSequence sample = read_vllm_choice(choice, static_cast<int64_t>(samples.size()));
      const rapidjson::Value& ours = field_of(choice, "leeway");
      sample.versions = integers_of(ours, "versions");
      sample.processed_logprobs = numbers_of(ours, "processed_logprobs");
      samples.push_back(std::move(sample));
    }
    return samples;
  }

  ServerCall pause() const override { return {.post = true, .path = "/pause?mode=keep"}; }
  ServerCall resume() const override { return {.post = true, .path = "/resume"}; }
  // An adapter takes the place of the one before.
  std::vector<ServerCall> update(const std::string& folder, PolicyVersion version) const override {
    if (is_adapter()) return {load_adapter_call("/v1/load_lora_adapter", folder, version, true)};
    JsonWriter json;
    json.begin_object().key("weight_dir").value(folder);
    json.key("weight_version").value(static_cast<double>(version)).end_object();
    return {{.post = true, .path = "/update_weights", .body = json.text()}};
  }
  std::optional<ServerCall> update_shared(const SharedWeights& shared,
                                          PolicyVersion version) const override {
    return ServerCall{.post = true,
                      .path = "/update_weights",
                      .body = fmt::format("{{\"cuda_ipc\":{},\"weight_version\":{}}}",
                                          shared_weights_json(shared), version)};
  }
  void check_updated(std::string_view body, PolicyVersion version,
                     uint32_t checksum) const override {
    const rapidjson::Document json = parse_json("the answer to /update_weights", body);
    const rapidjson::Value& ours = field_of(json, "leeway");
    const PolicyVersion has = small_integer_of(field_of(ours, "version"), "version");
    if (has != version) {
      throw Error(fmt::format("has weights of version {}, not {}", has, version));
    }
    const uint32_t sum = checksum_of(ours);
    if (sum != checksum) {
      throw Error(
          fmt::format("says that it has version {}, but the checksum of its weights is "
                      "{:08x} and not {:08x}",
                      version, sum, checksum));
    }
  }
};

}  // namespace

std::unique_ptr<Dialect> make_leeway_dialect(ServedWeights weights) {
  return std::make_unique<LeewayDialect>(weights);
}

}  // namespace leeway
