#include "gguf/tokenizer_from_gguf.h"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>
#include <unordered_set>

#include "base/json.h"
#include "base/utf8.h"
#include "gguf/pre_tokenizer_names.h"
#include "gguf/token_kind.h"
#include "leeway/error.h"
#include "model/name_text.h"
#include "text/tokenizer.h"

namespace leeway {
namespace {

constexpr const char* kRemedy = "--no-tokenizer converts the weights alone";

struct Vocabulary {
  const std::vector<std::string>* tokens;
  std::vector<TokenKind> kinds;
  const std::vector<std::string>* merges;

  bool is_filler(size_t id) const {
    return kinds[id] == TokenKind::unused &&
           (*tokens)[id] == filler_token(static_cast<int64_t>(id));
  }
  bool is_added(size_t id) const {
    return kinds[id] == TokenKind::control || kinds[id] == TokenKind::unknown ||
           kinds[id] == TokenKind::user_defined;
  }
};

const std::vector<std::string>& required_texts(const GgufFile& file, const char* key) {
  const std::vector<std::string>* texts = file.texts(key);
  if (texts == nullptr) {
    throw Error(fmt::format("{}: the metadata has no {}; {}", file.path(), key, kRemedy));
  }
  return *texts;
}

const std::string& required_text(const GgufFile& file, const char* key) {
  const std::string* text = file.text(key);
  if (text == nullptr) {
    throw Error(fmt::format("{}: the metadata has no {}; {}", file.path(), key, kRemedy));
  }
  return *text;
}

std::vector<TokenKind> read_kinds(const GgufFile& file, size_t count) {
  std::vector<TokenKind> kinds(count, TokenKind::normal);
  const GgufNumbers* numbers = file.numbers(kTokenKinds);
  if (numbers == nullptr) return kinds;
  if (numbers->size() != count) {
    file.refuse_key(kTokenKinds,
                    fmt::format("has {} entries for {} tokens", numbers->size(), count));
  }
  for (size_t i = 0; i < count; ++i) {
    const double kind = numbers->at(i);
    if (!(kind >= 1 && kind <= 6)) {
      file.refuse_key(kTokenKinds, fmt::format("entry {} is {}: must be 1 to 6", i, kind));
    }
    kinds[i] = static_cast<TokenKind>(static_cast<int>(kind));
  }
  return kinds;
}

Vocabulary read_vocabulary(const GgufFile& file, const ModelConfig& config) {
  const std::vector<std::string>& tokens = required_texts(file, kTokens);
  if (static_cast<int64_t>(tokens.size()) > config.vocab_size) {
    file.refuse_key(kTokens, fmt::format("there are {} tokens, but token_embd.weight has {} rows",
                                         tokens.size(), config.vocab_size));
  }
  std::unordered_set<std::string_view> seen;
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (valid_utf8_prefix(tokens[i]) != tokens[i].size()) {
      file.refuse_key(kTokens, fmt::format("token {} is not UTF-8", i));
    }
    if (!seen.insert(tokens[i]).second) {
      file.refuse_key(kTokens, fmt::format("token {}, {}, occurs twice", i, name_text(tokens[i])));
    }
  }
  return {&tokens, read_kinds(file, tokens.size()), &required_texts(file, kMerges)};
}

// None if the key is absent. `tokens` is their number.
std::optional<int32_t> token_id_of(const GgufFile& file, const char* key, size_t tokens) {
  const std::optional<int64_t> id = file.integer(key);
  if (!id) return std::nullopt;
  if (*id < 0 || *id >= static_cast<int64_t>(tokens)) {
    // 2^32 - 1 is how converters write "none".
    if (*id == 0xFFFFFFFF || *id == -1) return std::nullopt;
    file.refuse_key(key, fmt::format("must be the id of one of the {} tokens", tokens));
  }
  return static_cast<int32_t>(*id);
}

void write_added_tokens(JsonWriter& json, const Vocabulary& vocabulary) {
  json.begin_array();
  for (size_t id = 0; id < vocabulary.tokens->size(); ++id) {
    const std::string& token = (*vocabulary.tokens)[id];
    if (!vocabulary.is_added(id) || token.empty()) continue;
    json.begin_object();
    json.key("id").value(static_cast<double>(id));
    json.key("content").value(token);
    for (const char* flag : {"single_word", "lstrip", "rstrip", "normalized"}) {
      json.key(flag).value(false);
    }
    json.key("special").value(vocabulary.kinds[id] != TokenKind::user_defined);
    json.end_object();
  }
  json.end_array();
}

void write_begin_template(JsonWriter& json, const std::string& token, int32_t id) {
  const auto piece = [&](const char* kind, const std::string& name, int type) {
    json.begin_object().key(kind).begin_object();
    json.key("id").value(name);
    json.key("type_id").value(static_cast<double>(type));
    json.end_object().end_object();
  };
  json.begin_object();
  json.key("type").value("TemplateProcessing");
  json.key("single").begin_array();
  piece("SpecialToken", token, 0);
  piece("Sequence", "A", 0);
  json.end_array();
  json.key("pair").begin_array();
  piece("SpecialToken", token, 0);
  piece("Sequence", "A", 0);
  piece("SpecialToken", token, 1);
  piece("Sequence", "B", 1);
  json.end_array();
  json.key("special_tokens").begin_object().key(token).begin_object();
  json.key("id").value(token);
  json.key("ids").begin_array().value(static_cast<double>(id)).end_array();
  json.key("tokens").begin_array().value(token).end_array();
  json.end_object().end_object().end_object();
}

void write_byte_decoder(JsonWriter& json) {
  json.begin_object();
  json.key("type").value("ByteLevel");
  json.key("add_prefix_space").value(false);
  json.key("trim_offsets").value(true);
  json.key("use_regex").value(true);
  json.end_object();
}

std::string tokenizer_json_of(const Vocabulary& vocabulary, const PreTokenizerName& rule,
                              std::optional<int32_t> begin) {
  JsonWriter json;
  json.begin_object();
  json.key("version").value("1.0");
  json.key("truncation").null();
  json.key("padding").null();
  json.key("added_tokens");
  write_added_tokens(json, vocabulary);
  json.key("normalizer");
  rule.nfc ? json.begin_object().key("type").value("NFC").end_object() : json.null();
  json.key("pre_tokenizer");
  write_pre_tokenizer(json, rule);
  json.key("post_processor");
  if (begin) {
    write_begin_template(json, (*vocabulary.tokens)[static_cast<size_t>(*begin)], *begin);
  } else {
    json.null();
  }
  json.key("decoder");
  write_byte_decoder(json);
  json.key("model").begin_object();
  json.key("type").value("BPE");
  for (const char* key :
       {"dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"}) {
    json.key(key).null();
  }
  json.key("fuse_unk").value(false);
  json.key("byte_fallback").value(false);
  json.key("ignore_merges").value(rule.ignore_merges);
  json.key("vocab").begin_object();
  for (size_t id = 0; id < vocabulary.tokens->size(); ++id) {
    if (vocabulary.is_filler(id)) continue;
    json.key((*vocabulary.tokens)[id]).value(static_cast<double>(id));
  }
  json.end_object();
  json.key("merges").begin_array();
  for (const std::string& merge : *vocabulary.merges) json.value(merge);
  json.end_array();
  json.end_object();
  json.end_object();
  return json.text() + "\n";
}

}  // namespace

FolderTokenizer tokenizer_of_gguf(const GgufFile& file, const ModelConfig& config) {
  if (required_text(file, kTokenizerModel) != "gpt2") {
    file.refuse_key(kTokenizerModel,
                    fmt::format("only \"gpt2\", byte-level BPE, is supported; {}", kRemedy));
  }
  const PreTokenizerName* rule = find_pre_tokenizer(required_text(file, kTokenizerPre));
  if (rule == nullptr) {
    file.refuse_key(kTokenizerPre,
                    fmt::format("this rule for words is not known; these are: {}; {}",
                                pre_tokenizer_names(), kRemedy));
  }
  const Vocabulary vocabulary = read_vocabulary(file, config);
  const size_t count = vocabulary.tokens->size();
  const auto id_of = [&](const char* key) { return token_id_of(file, key, count); };
  FolderTokenizer result;
  result.bos_token_id = id_of("tokenizer.ggml.bos_token_id");
  result.pad_token_id = id_of("tokenizer.ggml.padding_token_id");
  const std::optional<int32_t> eos = id_of("tokenizer.ggml.eos_token_id");
  for (const std::optional<int32_t>& end :
       {eos, id_of("tokenizer.ggml.eot_token_id"), id_of("tokenizer.ggml.eom_token_id")}) {
    const bool known = !end || std::find(result.eos_token_id.begin(), result.eos_token_id.end(),
                                         *end) != result.eos_token_id.end();
    if (!known) result.eos_token_id.push_back(*end);
  }
  const bool begins = result.bos_token_id.has_value() &&
                      file.flag("tokenizer.ggml.add_bos_token").value_or(rule->begins);

  result.tokenizer_json =
      tokenizer_json_of(vocabulary, *rule, begins ? result.bos_token_id : std::nullopt);
  parse_tokenizer(file.path() + ": its tokenizer.json", result.tokenizer_json);

  JsonWriter settings;
  settings.begin_object();
  settings.key("tokenizer_class").value("PreTrainedTokenizerFast");
  settings.key("model_max_length").value(static_cast<double>(config.max_position_embeddings));
  settings.key("clean_up_tokenization_spaces").value(false);
  settings.key("add_bos_token").value(begins);
  const auto put_token = [&](const char* key, std::optional<int32_t> id) {
    settings.key(key);
    id ? settings.value((*vocabulary.tokens)[static_cast<size_t>(*id)]) : settings.null();
  };
  put_token("bos_token", result.bos_token_id);
  put_token("eos_token", eos);
  put_token("pad_token", result.pad_token_id);
  put_token("unk_token", id_of("tokenizer.ggml.unknown_token_id"));
  if (const std::string* chat = file.text("tokenizer.chat_template")) {
    settings.key("chat_template").value(*chat);
  }
  settings.end_object();
  result.tokenizer_config_json = settings.text() + "\n";

  JsonWriter generation;
  const auto put_id = [&](const char* key, std::optional<int32_t> id) {
    if (id) generation.key(key).value(static_cast<double>(*id));
  };
  generation.begin_object();
  put_id("bos_token_id", result.bos_token_id);
  if (!result.eos_token_id.empty()) {
    generation.key("eos_token_id").begin_array();
    for (const int32_t id : result.eos_token_id) generation.value(static_cast<double>(id));
    generation.end_array();
  }
  put_id("pad_token_id", result.pad_token_id);
  generation.end_object();
  result.generation_config_json = generation.text() + "\n";
  return result;
}

}  // namespace leeway
