#include "gguf/pre_tokenizer_names.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <optional>

#include "text/pre_tokenizer.h"

namespace leeway {
namespace {

using Json = rapidjson::Value;

constexpr const char* kEachDigit = R"(\p{N})";

// Words, numbers and signs as Llama 3 and Qwen have them; they differ in the length of numbers.
std::string words_with_numbers(std::string_view number) {
  return fmt::format(
      R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)",
      number);
}

// Of several names for one rule the first is written.
const std::vector<PreTokenizerName>& rules() {
  static const std::vector<PreTokenizerName> kRules = [] {
    const std::string llama3 = words_with_numbers(R"(\p{N}{1,3})");
    const std::string qwen2 = words_with_numbers(kEachDigit);
    return std::vector<PreTokenizerName>{
        {.name = "gpt-2", .patterns = {kGpt2Pattern}},
        {.name = "smollm", .patterns = {kEachDigit, kGpt2Pattern}},
        {.name = "starcoder", .patterns = {kEachDigit, kGpt2Pattern}},
        {.name = "llama-bpe", .patterns = {llama3}, .ignore_merges = true, .begins = true},
        {.name = "llama3", .patterns = {llama3}, .ignore_merges = true, .begins = true},
        {.name = "qwen2", .patterns = {qwen2}, .nfc = true},
    };
  }();
  return kRules;
}

const Json* member(const Json& object, const char* key) {
  if (!object.IsObject()) return nullptr;
  const auto found = object.FindMember(key);
  return found == object.MemberEnd() || found->value.IsNull() ? nullptr : &found->value;
}
bool flag_of(const Json& object, const char* key, bool otherwise) {
  const Json* value = member(object, key);
  return value == nullptr ? otherwise : value->IsTrue();
}
std::string_view text_in(const Json& object, const char* key) {
  const Json* value = member(object, key);
  if (value == nullptr || !value->IsString()) return "";
  return {value->GetString(), value->GetStringLength()};
}

// Appends the patterns of a step; false if a step does something else than split at a pattern.
bool collect_patterns(const Json& step, std::vector<std::string>& patterns, int depth) {
  constexpr int kDeepest = 16;
  const std::string_view type = text_in(step, "type");
  if (type == "Sequence") {
    const Json* steps = member(step, "pretokenizers");
    if (steps == nullptr || !steps->IsArray() || depth > kDeepest) return false;
    for (const Json& each : steps->GetArray()) {
      if (!collect_patterns(each, patterns, depth + 1)) return false;
    }
    return true;
  }
  if (type == "ByteLevel") {
    if (flag_of(step, "add_prefix_space", true)) return false;
    if (flag_of(step, "use_regex", true)) patterns.emplace_back(kGpt2Pattern);
    return true;
  }
  if (type == "Digits") {
    patterns.emplace_back(kEachDigit);
    return flag_of(step, "individual_digits", false);
  }
  if (type != "Split") return false;
  const Json* pattern = member(step, "pattern");
  if (pattern == nullptr || member(*pattern, "Regex") == nullptr) return false;
  patterns.emplace_back(text_in(*pattern, "Regex"));
  const std::string_view behavior = text_in(step, "behavior");
  const bool invert = flag_of(step, "invert", false);
  return (behavior == "Isolated" && !invert) || (behavior == "Removed" && invert);
}

void write_byte_level(JsonWriter& json, bool use_regex) {
  json.begin_object();
  json.key("type").value("ByteLevel");
  json.key("add_prefix_space").value(false);
  json.key("trim_offsets").value(true);
  json.key("use_regex").value(use_regex);
  json.end_object();
}

void write_split(JsonWriter& json, const std::string& pattern) {
  json.begin_object();
  if (pattern == kEachDigit) {
    json.key("type").value("Digits");
    json.key("individual_digits").value(true);
  } else {
    json.key("type").value("Split");
    json.key("pattern").begin_object();
    json.key("Regex").value(pattern);
    json.end_object();
    json.key("behavior").value("Isolated");
    json.key("invert").value(false);
  }
  json.end_object();
}

}  // namespace

const PreTokenizerName* find_pre_tokenizer(std::string_view name) {
  for (const PreTokenizerName& rule : rules()) {
    if (name == rule.name) return &rule;
  }
  return nullptr;
}

std::string pre_tokenizer_names() {
  std::vector<std::string> names;
  for (const PreTokenizerName& rule : rules()) names.emplace_back(rule.name);
  return fmt::format("{}", fmt::join(names, ", "));
}

void write_pre_tokenizer(JsonWriter& json, const PreTokenizerName& rule) {
  // GPT-2's pattern, where it is the last, is the byte-level step's own.
  const bool own = rule.patterns.back() == kGpt2Pattern;
  const size_t splits = rule.patterns.size() - (own ? 1 : 0);
  if (splits == 0) return write_byte_level(json, own);
  json.begin_object();
  json.key("type").value("Sequence");
  json.key("pretokenizers").begin_array();
  for (size_t i = 0; i < splits; ++i) write_split(json, rule.patterns[i]);
  write_byte_level(json, own);
  json.end_array();
  json.end_object();
}

const PreTokenizerName* pre_tokenizer_of(const rapidjson::Value& tokenizer) {
  const Json* steps = member(tokenizer, "pre_tokenizer");
  const Json* model = member(tokenizer, "model");
  std::vector<std::string> patterns;
  if (steps == nullptr || model == nullptr || !collect_patterns(*steps, patterns, 0))
    return nullptr;
  const bool ignore_merges = flag_of(*model, "ignore_merges", false);
  for (const PreTokenizerName& rule : rules()) {
    if (rule.patterns == patterns && rule.ignore_merges == ignore_merges) return &rule;
  }
  return nullptr;
}

}  // namespace leeway
