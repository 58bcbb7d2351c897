// /v1/chat/completions: a conversation, continued by one message.
#include <fmt/format.h>
#include <rapidjson/stringbuffer.h>
#include <rapidjson/writer.h>

#include "server/api_error.h"
#include "server/chat_writer.h"
#include "server/routes.h"
#include "server/text_requests.h"

namespace leeway {
namespace {

std::string json_of(const rapidjson::Value& value) {
  rapidjson::StringBuffer buffer;
  rapidjson::Writer<rapidjson::StringBuffer> writer(buffer);
  value.Accept(writer);
  return {buffer.GetString(), buffer.GetSize()};
}

// What OpenAI's clients may write that the renderers have in one form alone: content in parts of
// text becomes one text, and developers speak as the system.
void simplify_messages(rapidjson::Document& body) {
  const auto messages = body.FindMember("messages");
  if (messages == body.MemberEnd() || !messages->value.IsArray() || messages->value.Empty()) {
    throw ApiError(400, "messages: must be a list with at least one message", "messages");
  }
  auto& memory = body.GetAllocator();
  for (rapidjson::SizeType i = 0; i < messages->value.Size(); ++i) {
    rapidjson::Value& message = messages->value[i];
    if (!message.IsObject()) continue;  // refused by name later
    const auto role = message.FindMember("role");
    if (role != message.MemberEnd() && role->value.IsString() &&
        std::string_view(role->value.GetString()) == "developer") {
      role->value = "system";
    }
    const auto content = message.FindMember("content");
    if (content == message.MemberEnd() || !content->value.IsArray()) continue;
    std::string text;
    for (const rapidjson::Value& part : content->value.GetArray()) {
      const std::string name = fmt::format("messages[{}].content", i);
      if (!part.IsObject()) throw ApiError(400, name + ": a part must be an object", name);
      const JsonFields fields(part, name + ".");
      if (fields.text("type").value_or("") != "text") {
        throw ApiError(400, name + ": only parts of type text are taken", name);
      }
      text += fields.text("text").value_or("");
    }
    content->value.SetString(text.data(), static_cast<rapidjson::SizeType>(text.size()), memory);
  }
}

// The tools, unless the client forbids them.
const rapidjson::Value* tools_in(const JsonFields& fields) {
  const rapidjson::Value* tools = fields.find("tools");
  const rapidjson::Value* choice = fields.find("tool_choice");
  if (tools != nullptr && !tools->IsArray()) fields.refuse("tools", "must be a list");
  if (choice != nullptr) {
    const std::string_view word = choice->IsString() ? choice->GetString() : "";
    if (word == "none") return nullptr;
    if (word != "auto") {
      fields.refuse("tool_choice", "there are auto and none: the model cannot be forced to call");
    }
  }
  return tools == nullptr || tools->Empty() ? nullptr : tools;
}

RenderRequest read_request(const JsonFields& fields) {
  std::string text = R"({"messages": )" + json_of(*fields.find("messages"));
  if (const rapidjson::Value* tools = tools_in(fields)) text += R"(, "tools": )" + json_of(*tools);
  if (fields.object("chat_template_kwargs")) {
    text += R"(, "options": )" + json_of(*fields.find("chat_template_kwargs"));
  }
  RenderRequest request = read_render_request("body", text + "}");
  request.options.add_generation_prompt = fields.flag("add_generation_prompt").value_or(true);
  return request;
}

void refuse_what_is_missing(const JsonFields& fields) {
  if (fields.flag("continue_final_message").value_or(false)) {
    fields.refuse("continue_final_message", "is not supported");
  }
  if (const std::optional<JsonFields> format = fields.object("response_format")) {
    if (format->text("type").value_or("text") != "text") {
      fields.refuse("response_format", "only text is supported");
    }
  }
}

RouteWork chat_completions(const ServedModel& model, const HttpRequest& request) {
  const ModelText& chat = chat_of(model);
  rapidjson::Document body = parse_body(request.body);
  simplify_messages(body);
  const JsonFields fields(body, "");
  model.check_model(fields);
  refuse_what_is_missing(fields);
  const char* key = fields.has("max_completion_tokens") ? "max_completion_tokens" : "max_tokens";
  const SamplingFields sampling = read_sampling(fields, folder_sampling(chat.generation), key);

  const RenderRequest conversation = read_request(fields);
  ChatOptions options;
  options.prompt = render_conversation(chat, "messages", conversation).ids;
  options.head = new_head("chatcmpl-", model.options.name);
  options.style = read_token_style(fields, chat.tokenizer.get());
  options.style.logprobs = fields.flag("logprobs").value_or(false);
  options.style.top = read_top(fields, "top_logprobs", options.style.mode).value_or(0);
  if (options.style.top > 0 && !options.style.logprobs) {
    fields.refuse("top_logprobs", "needs logprobs: true");
  }
  options.renderer = chat.renderer.get();
  options.render = conversation.options;
  options.has_tools = !conversation.options.tools_json.empty();
  options.samples = static_cast<size_t>(sampling.samples);
  options.stop_texts = sampling.stop_texts;
  options.usage_in_stream = wants_usage(fields);
  options.prompt_top = read_top(fields, "prompt_logprobs", LogprobsMode::raw);

  const auto used = static_cast<int64_t>(options.prompt.size());
  const int64_t limit = sampling.max_tokens.value_or(std::max<int64_t>(1, model.positions - used));
  check_limit(model, options.prompt.size(), limit, key);
  Call call;
  call.request_id = fields.text("request_id").value_or(options.head.id);
  call.streams = fields.flag("stream").value_or(false);
  call.stop_texts = sampling.stop_texts;
  call.requests.push_back(
      make_request(sampling, options.prompt, limit, stop_ids_of(sampling, chat.end_ids)));
  call.requests.front().top_logprobs = options.style.top;
  check_requests(model, call.requests, limit);
  if (options.prompt_top && call.streams) {
    fields.refuse("prompt_logprobs", "does not go with stream");
  }
  ReadCall read;
  read.call = std::move(call);
  if (options.prompt_top) {
    read.scored = {options.prompt};
    read.scored_top = *options.prompt_top;
  }
  auto shared = std::make_shared<ChatOptions>(std::move(options));
  read.writer = [shared](ServerContext&, std::vector<PromptScore> scores) {
    if (!scores.empty()) shared->score = std::move(scores.front());
    return std::make_unique<ChatWriter>(std::move(*shared));
  };
  return work_of(std::move(read));
}

}  // namespace

void add_chat_routes(RouteTable& routes) {
  routes.add_reader("POST", "/v1/chat/completions", chat_completions);
}

}  // namespace leeway
