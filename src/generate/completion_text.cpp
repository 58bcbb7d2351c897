#include "generate/completion_text.h"

#include "base/json.h"

namespace leeway {
namespace {

void write_ids(JsonWriter& json, const std::vector<int32_t>& ids) {
  json.begin_array();
  for (const int32_t id : ids) json.value(static_cast<double>(id));
  json.end_array();
}

void write_floats(JsonWriter& json, const std::vector<float>& values) {
  json.begin_array();
  for (const float value : values) json.value(value);
  json.end_array();
}

void write_call(JsonWriter& json, const ParsedToolCall& parsed) {
  json.begin_object().key("type").value("function");
  if (!parsed.call.id.empty()) json.key("id").value(parsed.call.id);
  json.key("function").begin_object().key("name").value(parsed.call.name);
  json.key("arguments");
  // What the model wrote is JSON only if the call could be read.
  const bool readable = parsed.status == ToolCallStatus::ok && !parsed.call.arguments.empty();
  if (readable)
    json.raw(parsed.call.arguments);
  else
    json.value(parsed.call.arguments);
  json.end_object().key("status").value(name_of(parsed.status));
  json.key("raw").value(parsed.raw).end_object();
}

}  // namespace

std::string sequences_json(const std::vector<SampledSequence>& sequences) {
  JsonWriter json;
  const auto lists = [&](const char* key, auto member, auto write) {
    json.key(key).begin_array();
    for (const SampledSequence& sequence : sequences) write(json, sequence.*member);
    json.end_array();
  };
  json.begin_object();
  lists("tokens", &SampledSequence::ids, write_ids);
  lists("logprobs", &SampledSequence::raw_logprobs, write_floats);
  lists("processed_logprobs", &SampledSequence::processed_logprobs, write_floats);
  json.key("finish").begin_array();
  for (const SampledSequence& sequence : sequences) json.value(name_of(sequence.finish));
  json.end_array().end_object();
  return json.text() + "\n";
}

std::string generated_json(const Generated& generated, const Renderer* renderer,
                           const RenderOptions& options) {
  const SampledSequence& sequence = generated.sequence;
  ParsedResponse response;
  if (renderer != nullptr) {
    response = renderer->parse_response(sequence.ids, options);
  } else {
    response.content = generated.text;
  }
  JsonWriter json;
  json.begin_object().key("text").value(generated.text).key("content").value(response.content);
  json.key("reasoning");
  if (response.reasoning)
    json.value(*response.reasoning);
  else
    json.null();
  json.key("tool_calls").begin_array();
  for (const ParsedToolCall& call : response.tool_calls) write_call(json, call);
  json.end_array().key("tokens");
  write_ids(json, sequence.ids);
  json.key("logprobs");
  write_floats(json, sequence.raw_logprobs);
  json.key("processed_logprobs");
  write_floats(json, sequence.processed_logprobs);
  json.key("finish").value(name_of(sequence.finish));
  return json.end_object().text() + "\n";
}

}  // namespace leeway
