#include "run/sampling_messages.h"

#include <fmt/format.h>

#include <utility>

#include "leeway/error.h"

namespace leeway {
namespace {

// Bytes of a result without tokens: bounds their number by the message's length.
constexpr size_t kLeastResult = 2 * sizeof(int64_t) + 1 + 6 * sizeof(uint64_t);

void check_lengths(const SampledSequence& result) {
  const size_t tokens = result.ids.size();
  const bool whole = result.raw_logprobs.size() == tokens &&
                     result.processed_logprobs.size() == tokens &&
                     result.versions.size() == tokens &&
                     (tokens == 0 ? result.top.empty() : result.top.size() % tokens == 0);
  if (whole) return;
  throw Error(fmt::format(
      "sample {} of request {} has {} tokens, {} and {} log-probabilities, {} versions and {} "
      "likely tokens",
      result.sample, result.request, tokens, result.raw_logprobs.size(),
      result.processed_logprobs.size(), result.versions.size(), result.top.size()));
}

}  // namespace

std::string message_of(SamplingOrder order) {
  ByteWriter message;
  message.put(order);
  return message.take();
}

std::string message_of(SamplingReport report) {
  ByteWriter message;
  message.put(report);
  return message.take();
}

void put_request(ByteWriter& to, int64_t number, const Request& request) {
  to.put(number);
  to.put(request.prompt);
  to.put(request.samples);
  to.put(request.max_new_tokens);
  to.put(request.sampling.temperature);
  to.put(request.sampling.top_k);
  to.put(request.sampling.top_p);
  to.put(request.sampling.min_p);
  to.put(request.stop_ids);
  to.put(request.seed);
  to.put(request.top_logprobs);
}

NumberedRequest get_request(ByteReader& from) {
  NumberedRequest result;
  result.number = from.get<int64_t>();
  Request& request = result.request;
  request.prompt = from.get_list<int32_t>();
  request.samples = from.get<int64_t>();
  request.max_new_tokens = from.get<int64_t>();
  request.sampling.temperature = from.get<float>();
  request.sampling.top_k = from.get<int64_t>();
  request.sampling.top_p = from.get<float>();
  request.sampling.min_p = from.get<float>();
  request.stop_ids = from.get_list<int32_t>();
  request.seed = from.get<uint64_t>();
  request.top_logprobs = from.get<int64_t>();
  return result;
}

void put_weights(ByteWriter& to, PolicyVersion version, const Parameters* numbers) {
  to.put(version);
  to.put(numbers != nullptr);
  if (numbers != nullptr) to.put(numbers->flat());
}

SentWeights get_weights(ByteReader& from, const Parameters& like) {
  SentWeights result;
  result.version = from.get<PolicyVersion>();
  if (!from.get_bool()) return result;
  auto numbers = like.flat().empty() ? std::make_shared<Parameters>(like.config())
                                     : std::make_shared<Parameters>(like);
  from.get_list(numbers->flat());
  result.numbers = std::move(numbers);
  return result;
}

void put_results(ByteWriter& to, const std::vector<SampledSequence>& results) {
  to.put(uint64_t{results.size()});
  for (const SampledSequence& result : results) {
    to.put(result.request);
    to.put(result.sample);
    to.put(result.finish);
    to.put(result.ids);
    to.put(result.raw_logprobs);
    to.put(result.processed_logprobs);
    to.put(result.versions);
    to.put(result.top);
    to.put(result.failure);
  }
}

std::vector<SampledSequence> get_results(ByteReader& from) {
  std::vector<SampledSequence> results(from.get_count(kLeastResult));
  for (SampledSequence& result : results) {
    result.request = from.get<int64_t>();
    result.sample = from.get<int64_t>();
    result.finish = from.get_enum(Finish::failed);
    result.ids = from.get_list<int32_t>();
    result.raw_logprobs = from.get_list<float>();
    result.processed_logprobs = from.get_list<float>();
    result.versions = from.get_list<PolicyVersion>();
    result.top = from.get_list<TokenLogprob>();
    result.failure = from.get_string();
    check_lengths(result);
  }
  return results;
}

}  // namespace leeway
