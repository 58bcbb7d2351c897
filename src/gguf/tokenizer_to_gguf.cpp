#include "gguf/tokenizer_to_gguf.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <optional>

#include "base/files.h"
#include "base/json.h"
#include "gguf/pre_tokenizer_names.h"
#include "gguf/token_kind.h"
#include "leeway/error.h"
#include "text/tokenizer.h"

namespace leeway {
namespace {

using Json = rapidjson::Value;

std::string text_from(const Json& value) { return {value.GetString(), value.GetStringLength()}; }

// A JSON file of the folder whose absence is fine.
class OptionalFile {
 public:
  explicit OptionalFile(const std::string& path) : path_(path) {
    if (is_present(path)) json_ = parse_json(path, read_file(path));
  }
  const std::string& path() const { return path_; }
  // Null if the file or the key is absent, or null.
  const Json* find(const char* key) const {
    if (!json_.IsObject()) return nullptr;
    const auto found = json_.FindMember(key);
    return found == json_.MemberEnd() || found->value.IsNull() ? nullptr : &found->value;
  }

 private:
  std::string path_;
  rapidjson::Document json_;
};

// A token as tokenizer_config.json has it: text, or an object with its content.
std::string spelled_token(const Json* value) {
  if (value != nullptr && value->IsObject() && value->HasMember("content")) {
    value = &(*value)["content"];
  }
  return value != nullptr && value->IsString() ? text_from(*value) : "";
}

// One id, or the first of a list.
std::optional<int32_t> first_id(const Json* value) {
  if (value != nullptr && value->IsArray() && !value->Empty()) value = &(*value)[0];
  return value != nullptr && value->IsInt() ? std::optional(value->GetInt()) : std::nullopt;
}

std::string chat_template_in(const std::string& folder, const OptionalFile& settings) {
  const std::string alone = folder + "/chat_template.jinja";
  if (is_present(alone)) return read_file(alone);
  const Json* value = settings.find("chat_template");
  if (value == nullptr) return "";
  if (value->IsString()) return text_from(*value);
  if (value->IsArray()) {
    for (const Json& each : value->GetArray()) {
      if (!each.IsObject() || !each.HasMember("name") || !each.HasMember("template")) continue;
      const Json &name = each["name"], &text = each["template"];
      if (name.IsString() && text.IsString() && text_from(name) == "default")
        return text_from(text);
    }
  }
  throw Error(
      fmt::format("{}: chat_template: must be text or a list with a \"default\"", settings.path()));
}

struct TokenList {
  std::vector<std::string> texts;
  std::vector<TokenKind> kinds;
};

// The tokenizer has been loaded before, so that its parts have the right types.
TokenList tokens_of(const Json& root, int64_t vocab_size) {
  TokenList list;
  for (int64_t id = 0; id < vocab_size; ++id) {
    list.texts.push_back(filler_token(id));
    list.kinds.push_back(TokenKind::unused);
  }
  const auto put = [&](int id, const Json& text, TokenKind kind) {
    list.texts[static_cast<size_t>(id)] = text_from(text);
    list.kinds[static_cast<size_t>(id)] = kind;
  };
  for (const auto& entry : root["model"]["vocab"].GetObject()) {
    put(entry.value.GetInt(), entry.name, TokenKind::normal);
  }
  if (!root.HasMember("added_tokens") || !root["added_tokens"].IsArray()) return list;
  for (const Json& added : root["added_tokens"].GetArray()) {
    if (added["content"].GetStringLength() == 0) continue;
    const bool special = added.HasMember("special") && added["special"].IsTrue();
    put(added["id"].GetInt(), added["content"],
        special ? TokenKind::control : TokenKind::user_defined);
  }
  return list;
}

std::vector<std::string> merges_of(const Json& root) {
  std::vector<std::string> merges;
  for (const Json& merge : root["model"]["merges"].GetArray()) {
    merges.push_back(merge.IsString() ? text_from(merge)
                                      : text_from(merge[0]) + " " + text_from(merge[1]));
  }
  return merges;
}

GgufNumbers kinds_array(const std::vector<TokenKind>& kinds) {
  constexpr uint32_t kInt32 = 5;
  GgufNumbers numbers{.type = kInt32, .bytes = std::string(kinds.size() * sizeof(int32_t), '\0')};
  std::memcpy(numbers.bytes.data(), kinds.data(), numbers.bytes.size());
  return numbers;
}

// Whether the folder says that a text begins with the begin token.
bool begins_text(const OptionalFile& settings, const Json& root, const std::string& begin) {
  if (const Json* flag = settings.find("add_bos_token"); flag != nullptr && flag->IsBool()) {
    return flag->GetBool();
  }
  // The template that puts it there is the only part of a post-processor that spells a token.
  if (begin.empty() || !root.HasMember("post_processor")) return false;
  const auto holds = [&](const auto& self, const Json& value) -> bool {
    if (value.IsArray()) {
      return std::any_of(value.Begin(), value.End(), [&](const Json& v) { return self(self, v); });
    }
    if (!value.IsObject()) return false;
    if (const auto single = value.FindMember("single");
        single != value.MemberEnd() && single->value.IsArray() && !single->value.Empty()) {
      const Json& first = single->value[0];
      return first.IsObject() && first.HasMember("SpecialToken") &&
             first["SpecialToken"].IsObject() && first["SpecialToken"].HasMember("id") &&
             first["SpecialToken"]["id"].IsString() &&
             text_from(first["SpecialToken"]["id"]) == begin;
    }
    const auto parts = value.FindMember("processors");
    return parts != value.MemberEnd() && self(self, parts->value);
  };
  return holds(holds, root["post_processor"]);
}

}  // namespace

std::vector<std::pair<std::string, GgufValue>> gguf_tokenizer_of(const std::string& folder,
                                                                 const ModelConfig& config) {
  const std::string path = folder + "/tokenizer.json";
  if (!is_present(path)) {
    throw Error(
        fmt::format("{}: there is no such file, without which llama.cpp serves no model; "
                    "--no-tokenizer writes the weights alone",
                    path));
  }
  const std::string json = read_file(path);
  const std::unique_ptr<Tokenizer> tokenizer = parse_tokenizer(path, json);
  if (tokenizer->vocab_size() > config.vocab_size) {
    throw Error(
        fmt::format("{}: has ids up to {}, but the weights have vocab_size = {}: the "
                    "tokenizer belongs to another model",
                    path, tokenizer->vocab_size() - 1, config.vocab_size));
  }
  const rapidjson::Document root = parse_json(path, json);
  const PreTokenizerName* rule = pre_tokenizer_of(root);
  if (rule == nullptr) {
    throw Error(
        fmt::format("{}: pre_tokenizer: this rule for words has no name that is known here "
                    "for GGUF files; these have: {}; --no-tokenizer writes the weights "
                    "alone",
                    path, pre_tokenizer_names()));
  }
  const OptionalFile settings(folder + "/tokenizer_config.json");
  const OptionalFile generation(folder + "/generation_config.json");
  const OptionalFile model(folder + "/config.json");
  TokenList tokens = tokens_of(root, config.vocab_size);

  std::vector<std::pair<std::string, GgufValue>> metadata;
  metadata.emplace_back(kTokenizerModel, std::string("gpt2"));
  metadata.emplace_back(kTokenizerPre, std::string(rule->name));
  metadata.emplace_back(kTokens, std::move(tokens.texts));
  metadata.emplace_back(kTokenKinds, kinds_array(tokens.kinds));
  metadata.emplace_back(kMerges, merges_of(root));

  // By its spelling in tokenizer_config.json, else by its id in the other two files.
  const auto special = [&](const char* token_key, const char* id_key) -> std::optional<int32_t> {
    const std::string spelling = spelled_token(settings.find(token_key));
    std::optional<int32_t> id = spelling.empty() ? std::nullopt : tokenizer->token_id(spelling);
    if (!id) id = first_id(generation.find(id_key));
    if (!id) id = first_id(model.find(id_key));
    if (id && (*id < 0 || *id >= config.vocab_size)) {
      throw Error(fmt::format("{}: {} = {}: the ids are 0 to {}", folder, id_key, *id,
                              config.vocab_size - 1));
    }
    return id;
  };
  const auto put_id = [&](const char* key, std::optional<int32_t> id) {
    if (id) metadata.emplace_back(key, static_cast<uint32_t>(*id));
  };
  const std::optional<int32_t> begin = special("bos_token", "bos_token_id");
  const std::optional<int32_t> end = special("eos_token", "eos_token_id");
  put_id("tokenizer.ggml.bos_token_id", begin);
  put_id("tokenizer.ggml.eos_token_id", end);
  // A second token at which the model ends its turn.
  for (const int32_t id : config.eos_token_id) {
    if (id == end || id < 0 || id >= config.vocab_size) continue;
    put_id("tokenizer.ggml.eot_token_id", id);
    break;
  }
  put_id("tokenizer.ggml.padding_token_id", special("pad_token", "pad_token_id"));
  put_id("tokenizer.ggml.unknown_token_id", special("unk_token", "unk_token_id"));
  const std::string begin_text = begin ? tokenizer->decode(std::span(&*begin, 1)) : std::string();
  metadata.emplace_back("tokenizer.ggml.add_bos_token", begins_text(settings, root, begin_text));
  metadata.emplace_back("tokenizer.ggml.add_space_prefix", false);
  if (std::string chat = chat_template_in(folder, settings); !chat.empty()) {
    metadata.emplace_back("tokenizer.chat_template", std::move(chat));
  }
  return metadata;
}

}  // namespace leeway
