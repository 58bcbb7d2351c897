#include "pool/vllm_requests.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "pool/json_fields.h"

namespace leeway {

std::string vllm_sampling_params(const Request& request, bool own_stops) {
  const SamplingSettings& sampling = request.sampling;
  // Shortest forms of float32, so that the server computes with the same numbers.
  return fmt::format(
      "{{\"temperature\":{},\"top_p\":{},\"top_k\":{},\"min_p\":{},\"seed\":{},\"n\":{},"
      "\"max_tokens\":{},\"stop_token_ids\":{},\"logprobs\":1{}}}",
      sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p, request.seed,
      request.samples, request.max_new_tokens, ids_text(request.stop_ids),
      own_stops ? ",\"ignore_eos\":true,\"skip_special_tokens\":false" : "");
}

SampledSequence read_vllm_choice(const rapidjson::Value& choice, int64_t index) {
  SampledSequence sample;
  sample.sample = index;
  const int64_t has = integer_of(field_of(choice, "index"), "index");
  if (has != index) throw Error(fmt::format("choice {} has the index {}", index, has));
  sample.ids = integers_of(choice, "token_ids");
  sample.finish = finish_of(text_of_field(choice, "finish_reason"));
  for (const auto& entry : list_of(field_of(choice, "logprobs"), "content").GetArray()) {
    sample.raw_logprobs.push_back(number_of(field_of(entry, "logprob"), "logprob"));
    if (!entry.HasMember("token_id")) continue;
    const size_t place = sample.raw_logprobs.size() - 1;
    const int64_t id = integer_of(entry["token_id"], "token_id");
    if (place >= sample.ids.size() || id != sample.ids[place]) {
      throw Error(
          fmt::format("choice {} has a log-probability of token {} at place {}, where its "
                      "token is another",
                      index, id, place));
    }
  }
  return sample;
}

}  // namespace leeway
