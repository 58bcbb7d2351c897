#include "server/sampling_fields.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <random>
#include <string_view>
#include <utility>

#include "engine/sampler.h"
#include "leeway/error.h"
#include "server/api_error.h"

namespace leeway {
namespace {

constexpr int64_t kMost = int64_t{1} << 31;

// Parameters that change what is drawn and that the engine does not have: only their neutral value
// is taken.
void refuse_unsupported(const JsonFields& fields) {
  struct Neutral {
    const char* key;
    double value;
  };
  for (const auto& [key, value] : {Neutral{"repetition_penalty", 1}, Neutral{"presence_penalty", 0},
                                   Neutral{"frequency_penalty", 0}, Neutral{"length_penalty", 1},
                                   Neutral{"min_tokens", 0}, Neutral{"min_new_tokens", 0}}) {
    const std::optional<double> given = fields.number(key);
    if (given && *given != value) {
      fields.refuse(key, fmt::format("is not supported: leave it out or give {}", value));
    }
  }
  const int64_t samples = fields.integer("n", 1, kMost).value_or(1);
  if (fields.number("best_of").value_or(static_cast<double>(samples)) !=
      static_cast<double>(samples)) {
    fields.refuse("best_of", fmt::format("is not supported: leave it out or give n, {}", samples));
  }
  if (fields.flag("use_beam_search").value_or(false)) {
    fields.refuse("use_beam_search", "is not supported");
  }
  for (const char* key : {"logit_bias", "allowed_token_ids", "bad_words", "guided_json",
                          "guided_regex", "guided_choice", "guided_grammar", "structured_outputs",
                          "json_schema", "regex", "ebnf", "stop_regex"}) {
    const rapidjson::Value* value = fields.find(key);
    if (value == nullptr) continue;
    const bool empty =
        (value->IsObject() && value->ObjectEmpty()) || (value->IsArray() && value->Empty());
    if (!empty) fields.refuse(key, "is not supported");
  }
}

// Keys of requests that matter, in OpenAI's, vLLM's and SGLang's words. Other keys are none of ours
// and are ignored, as those servers do; one that is a letter away from these is a mistake that
// would silently change what is sampled. Short names are near to too much.
constexpr std::string_view kKeys[] = {"temperature",
                                      "max_tokens",
                                      "max_completion_tokens",
                                      "max_new_tokens",
                                      "min_tokens",
                                      "min_new_tokens",
                                      "stop_token_ids",
                                      "ignore_eos",
                                      "sampling_seed",
                                      "logprobs",
                                      "top_logprobs",
                                      "prompt_logprobs",
                                      "stream",
                                      "stream_options",
                                      "messages",
                                      "prompt",
                                      "suffix",
                                      "tool_choice",
                                      "response_format",
                                      "chat_template_kwargs",
                                      "add_generation_prompt",
                                      "continue_final_message",
                                      "repetition_penalty",
                                      "presence_penalty",
                                      "frequency_penalty",
                                      "length_penalty",
                                      "best_of",
                                      "use_beam_search",
                                      "logit_bias",
                                      "allowed_token_ids",
                                      "bad_words",
                                      "request_id"};
constexpr size_t kLeastLength = 6;

// Whether one letter added, left out, changed or swapped with the next makes `a` of `b`.
bool is_one_letter_away(std::string_view a, std::string_view b) {
  if (a.size() < b.size()) std::swap(a, b);
  if (a.size() > b.size() + 1) return false;
  const size_t same =
      static_cast<size_t>(std::mismatch(b.begin(), b.end(), a.begin()).first - b.begin());
  const std::string_view rest = a.substr(same), other = b.substr(same);
  if (a.size() > b.size()) return rest.substr(1) == other;
  if (rest.empty()) return false;
  if (rest.substr(1) == other.substr(1)) return true;
  return rest.size() > 1 && rest[0] == other[1] && rest[1] == other[0] &&
         rest.substr(2) == other.substr(2);
}

void refuse_misspelt(const JsonFields& fields) {
  for (const std::string& key : fields.keys()) {
    const bool known = std::find(std::begin(kKeys), std::end(kKeys), key) != std::end(kKeys);
    if (known || key.size() < kLeastLength) continue;
    for (const std::string_view name : kKeys) {
      if (!is_one_letter_away(key, name)) continue;
      fields.refuse(key.c_str(), fmt::format("is no key of a request; did you mean {}?", name));
    }
  }
}

}  // namespace

SamplingFields read_sampling(const JsonFields& fields, const SamplingSettings& defaults,
                             const char* limit_key, int64_t least) {
  refuse_misspelt(fields);
  SamplingFields result;
  result.settings = defaults;
  const auto set = [&](float& value, const char* key) {
    if (const std::optional<double> given = fields.number(key)) value = static_cast<float>(*given);
  };
  set(result.settings.temperature, "temperature");
  set(result.settings.top_p, "top_p");
  set(result.settings.min_p, "min_p");
  if (const auto top_k = fields.integer("top_k", -1, kMost)) {
    result.settings.top_k = std::max<int64_t>(0, *top_k);
  }
  if (fields.find("top_k") && *fields.integer("top_k", -1, kMost) >= (int64_t{1} << 30)) {
    result.settings.top_k = 0;  // SGLang's way of saying: all of them
  }
  try {
    check_sampling(result.settings);
  } catch (const Error& error) {
    throw ApiError(400, error.what());
  }
  result.samples = fields.integer("n", 1, kMost).value_or(1);
  result.max_tokens = fields.integer(limit_key, least, kMost);
  result.seed = fields.natural(fields.has("sampling_seed") ? "sampling_seed" : "seed");
  result.stop_ids = fields.ids("stop_token_ids").value_or(std::vector<int32_t>());
  result.stop_texts = fields.texts("stop").value_or(std::vector<std::string>());
  for (const std::string& stop : result.stop_texts) {
    if (stop.empty()) fields.refuse("stop", "a stop text must not be empty");
    if (stop.size() > 1024) fields.refuse("stop", "a stop text has at most 1024 bytes");
  }
  if (result.stop_texts.size() > 64) fields.refuse("stop", "at most 64 stop texts are taken");
  result.ignore_eos = fields.flag("ignore_eos");
  refuse_unsupported(fields);
  return result;
}

uint64_t random_seed() {
  std::random_device device;
  return (static_cast<uint64_t>(device()) << 32) | device();
}

std::string float_text(float value) {
  return std::isfinite(value) ? fmt::format("{:.9g}", value) : "null";
}

std::string floats_text(const std::vector<float>& values) {
  fmt::memory_buffer out;
  out.push_back('[');
  for (size_t i = 0; i < values.size(); ++i) {
    if (i > 0) out.push_back(',');
    if (std::isfinite(values[i])) {
      fmt::format_to(std::back_inserter(out), "{:.9g}", values[i]);
    } else {
      fmt::format_to(std::back_inserter(out), "null");
    }
  }
  out.push_back(']');
  return fmt::to_string(out);
}

std::string integers_text(const std::vector<int32_t>& values) {
  return fmt::format("[{}]", fmt::join(values, ","));
}

const char* finish_text(Finish finish) {
  switch (finish) {
    case Finish::stop: return "stop";
    case Finish::length: return "length";
    default: return "abort";
  }
}

}  // namespace leeway
