#include "text/tokenizer.h"

#include <fmt/format.h>

#include <deque>
#include <unordered_map>
#include <unordered_set>

#include "base/files.h"
#include "base/folders.h"
#include "base/json.h"
#include "leeway/error.h"
#include "text/bpe.h"
#include "text/byte_level.h"
#include "text/normalizer.h"
#include "text/pre_tokenizer.h"

namespace leeway {
namespace {

using Json = rapidjson::Value;

// Sequences may nest; a file that nests them deeper than this is not a tokenizer.
constexpr int kDeepest = 16;

class BpeTokenizer final : public Tokenizer {
 public:
  BpeTokenizer(std::string name, Bpe bpe, AddedTokens added, PreTokenizer pre_tokenizer)
      : name_(std::move(name)),
        bpe_(std::move(bpe)),
        added_(std::move(added)),
        pre_tokenizer_(std::move(pre_tokenizer)),
        size_(bpe_.size()) {
    for (const AddedToken& token : added_.tokens()) {
      by_id_[token.id] = &token;
      by_content_[token.content] = token.id;
      size_ = std::max(size_, token.id + 1);
    }
  }

  std::vector<int32_t> encode(std::string_view text, SpecialTokens special) const override {
    std::vector<int32_t> ids;
    ids.reserve(text.size() / 4 + 1);
    while (!text.empty()) {
      const size_t valid = valid_utf8_prefix(text);
      encode_valid(text.substr(0, valid), special, ids);
      text.remove_prefix(valid);
      // Invalid bytes belong to no word: each run of them is a piece of its own, and decoding
      // restores it.
      const size_t invalid = invalid_prefix(text);
      bpe_.encode(text.substr(0, invalid), ids);
      text.remove_prefix(invalid);
    }
    return ids;
  }

  std::string decode(std::span<const int32_t> ids) const override {
    std::string text;
    for (const int32_t id : ids) {
      if (const auto added = by_id_.find(id); added != by_id_.end()) {
        text += added->second->content;
      } else if (const std::string* bytes = bpe_.bytes_of(id)) {
        text += *bytes;
      } else {
        throw Error(
            fmt::format("{}: no token has the id {}; the vocabulary has {} ids", name_, id, size_));
      }
    }
    return text;
  }

  std::optional<int32_t> token_id(std::string_view token) const override {
    const auto added = by_content_.find(std::string(token));
    return added != by_content_.end() ? std::optional(added->second) : bpe_.find(token);
  }

  bool is_special(int32_t id) const override {
    const auto added = by_id_.find(id);
    return added != by_id_.end() && added->second->special;
  }

  int32_t vocab_size() const override { return size_; }

 private:
  static size_t invalid_prefix(std::string_view text) {
    size_t at = 0;
    while (at < text.size()) {
      const Utf8Unit unit = next_utf8(text.substr(at));
      if (unit.kind == Utf8Kind::valid) break;
      at += unit.length;
    }
    return at;
  }

  void encode_valid(std::string_view text, SpecialTokens special, std::vector<int32_t>& ids) const {
    const bool recognise = special == SpecialTokens::recognise;
    added_.split(text, recognise, [&](std::string_view part, int32_t id) {
      if (id >= 0) {
        ids.push_back(id);
        return;
      }
      std::deque<std::string> storage;
      for (const std::string_view piece : pre_tokenizer_.split(part, storage)) {
        bpe_.encode(piece, ids);
      }
    });
  }

  std::string name_;
  Bpe bpe_;
  AddedTokens added_;
  PreTokenizer pre_tokenizer_;
  std::unordered_map<int32_t, const AddedToken*> by_id_;
  std::unordered_map<std::string, int32_t> by_content_;
  int32_t size_;
};

// Reads the parts of a tokenizer.json; every error names the file and the key.
class Loader {
 public:
  Loader(const std::string& name, const Json& root) : name_(name), root_(root) {}

  std::unique_ptr<Tokenizer> load() {
    if (!root_.IsObject()) fail("the document", "must be an object");
    const Json* model = find(root_, "model");
    if (!model) fail("model", "is missing");
    read_normalizer("normalizer", find(root_, "normalizer"), 0);
    read_pre_tokenizer("pre_tokenizer", find(root_, "pre_tokenizer"), 0);
    if (!decodes_bytes("decoder", find(root_, "decoder"), 0)) fail("decoder", "has no ByteLevel");
    const BpeModel bpe_model = read_model(*model);
    read_added_tokens();
    Bpe bpe(name_, bpe_model, special_ids_);
    check_added_tokens(bpe);
    return std::make_unique<BpeTokenizer>(name_, std::move(bpe),
                                          AddedTokens(std::move(added_tokens_), nfc_),
                                          std::move(pre_tokenizer_));
  }

 private:
  [[noreturn]] void fail(std::string_view key, std::string_view problem) const {
    throw Error(fmt::format("{}: {}: {}", name_, key, problem));
  }

  static std::string_view text_of(const Json& value) {
    return {value.GetString(), value.GetStringLength()};
  }

  // A member that is present and not null.
  static const Json* find(const Json& object, const char* key) {
    const auto member = object.FindMember(key);
    return member == object.MemberEnd() || member->value.IsNull() ? nullptr : &member->value;
  }

  std::string_view string_in(const std::string& path, const Json& object, const char* key) const {
    const Json* value = find(object, key);
    if (!value) fail(path + "." + key, "is missing");
    if (!value->IsString()) fail(path + "." + key, "must be a string");
    return text_of(*value);
  }

  bool flag_in(const std::string& path, const Json& object, const char* key, bool otherwise) const {
    const Json* value = find(object, key);
    if (!value) return otherwise;
    if (!value->IsBool()) fail(path + "." + key, "must be true or false");
    return value->GetBool();
  }

  const Json& array_in(const std::string& path, const Json& object, const char* key) const {
    const Json* value = find(object, key);
    if (!value) fail(path + "." + key, "is missing");
    if (!value->IsArray()) fail(path + "." + key, "must be an array");
    return *value;
  }

  std::string_view type_of(const std::string& path, const Json& value, int depth) const {
    if (depth > kDeepest) fail(path, "is nested too deep");
    if (!value.IsObject()) fail(path, "must be an object or null");
    return string_in(path, value, "type");
  }

  [[noreturn]] void fail_type(const std::string& path, std::string_view type,
                              std::string_view known) const {
    fail(path + ".type", fmt::format("'{}' is not supported (known: {})", type, known));
  }

  void read_normalizer(const std::string& path, const Json* value, int depth) {
    if (!value) return;
    const std::string_view type = type_of(path, *value, depth);
    if (type == "NFC") {
      nfc_ = true;
    } else if (type == "Sequence") {
      size_t i = 0;
      for (const Json& part : array_in(path, *value, "normalizers").GetArray()) {
        read_normalizer(fmt::format("{}.normalizers[{}]", path, i++), &part, depth + 1);
      }
    } else {
      fail_type(path, type, "NFC, Sequence");
    }
  }

  void read_pre_tokenizer(const std::string& path, const Json* value, int depth) {
    if (!value) return;
    const std::string_view type = type_of(path, *value, depth);
    if (type == "Sequence") {
      size_t i = 0;
      for (const Json& part : array_in(path, *value, "pretokenizers").GetArray()) {
        read_pre_tokenizer(fmt::format("{}.pretokenizers[{}]", path, i++), &part, depth + 1);
      }
      return;
    }
    // What follows would see the byte-level spelling, not the text.
    if (byte_level_seen_) fail(path, fmt::format("'{}' after ByteLevel is not supported", type));
    const std::string where = name_ + ": " + path;
    if (type == "ByteLevel") {
      byte_level_seen_ = true;
      if (flag_in(path, *value, "add_prefix_space", true)) pre_tokenizer_.add_prefix_space();
      if (flag_in(path, *value, "use_regex", true)) {
        pre_tokenizer_.add_split(where, {.pattern = kGpt2Pattern});
      }
    } else if (type == "Digits") {
      const bool each = flag_in(path, *value, "individual_digits", false);
      pre_tokenizer_.add_split(where, {.pattern = each ? R"(\p{N})" : R"(\p{N}+)"});
    } else if (type == "Split") {
      pre_tokenizer_.add_split(where + ".pattern", split_rule(path, *value));
    } else {
      fail_type(path, type, "ByteLevel, Digits, Sequence, Split");
    }
  }

  SplitRule split_rule(const std::string& path, const Json& value) const {
    const Json* pattern = find(value, "pattern");
    if (!pattern || !pattern->IsObject()) fail(path + ".pattern", "must be an object");
    SplitRule rule;
    if (find(*pattern, "Regex")) {
      rule.pattern = string_in(path + ".pattern", *pattern, "Regex");
    } else {
      rule.pattern = escape_pattern(string_in(path + ".pattern", *pattern, "String"));
    }
    static const std::unordered_map<std::string_view, SplitBehavior> kBehaviors = {
        {"Isolated", SplitBehavior::isolated},
        {"Removed", SplitBehavior::removed},
        {"MergedWithPrevious", SplitBehavior::merged_with_previous},
        {"MergedWithNext", SplitBehavior::merged_with_next},
        {"Contiguous", SplitBehavior::contiguous}};
    const std::string_view behavior = string_in(path, value, "behavior");
    const auto known = kBehaviors.find(behavior);
    if (known == kBehaviors.end()) {
      fail(path + ".behavior", fmt::format("'{}' is not supported", behavior));
    }
    rule.behavior = known->second;
    rule.invert = flag_in(path, value, "invert", false);
    return rule;
  }

  bool decodes_bytes(const std::string& path, const Json* value, int depth) const {
    if (!value) return false;
    const std::string_view type = type_of(path, *value, depth);
    if (type == "ByteLevel") return true;
    if (type == "Fuse") return false;  // joins what is joined here anyway
    if (type != "Sequence") fail_type(path, type, "ByteLevel, Fuse, Sequence");
    bool found = false;
    size_t i = 0;
    for (const Json& part : array_in(path, *value, "decoders").GetArray()) {
      found |= decodes_bytes(fmt::format("{}.decoders[{}]", path, i++), &part, depth + 1);
    }
    return found;
  }

  BpeModel read_model(const Json& model) const {
    if (!model.IsObject()) fail("model", "must be an object");
    // Early files of the GPT-2 family leave the type out.
    if (find(model, "type")) {
      const std::string_view type = string_in("model", model, "type");
      if (type != "BPE") fail_type("model", type, "BPE");
    }
    if (flag_in("model", model, "byte_fallback", false)) {
      fail("model.byte_fallback", "true is not supported: only byte-level vocabularies are");
    }
    for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
      if (find(model, key) && !string_in("model", model, key).empty()) {
        fail(fmt::format("model.{}", key), "is not supported");
      }
    }
    if (const Json* dropout = find(model, "dropout")) {
      if (!dropout->IsNumber()) fail("model.dropout", "must be a number or null");
      if (dropout->GetDouble() != 0) fail("model.dropout", "is not supported");
    }
    BpeModel result;
    result.ignore_merges = flag_in("model", model, "ignore_merges", false);
    result.has_unknown = find(model, "unk_token") != nullptr;
    const Json* vocab = find(model, "vocab");
    if (!vocab) fail("model.vocab", "is missing");
    if (!vocab->IsObject()) fail("model.vocab", "must be an object of ids by token");
    result.vocab.reserve(vocab->MemberCount());
    for (const auto& entry : vocab->GetObject()) {
      const std::string_view token = text_of(entry.name);
      if (!entry.value.IsInt()) fail(fmt::format("model.vocab['{}']", token), "must be an id");
      result.vocab.emplace_back(token, entry.value.GetInt());
    }
    for (const Json& entry : array_in("model", model, "merges").GetArray()) {
      result.merges.push_back(read_merge(result.merges.size(), entry));
    }
    return result;
  }

  std::pair<std::string_view, std::string_view> read_merge(size_t index, const Json& entry) const {
    if (entry.IsString()) {
      const std::string_view both = text_of(entry);
      const size_t space = both.find(' ');
      if (space != std::string_view::npos && both.find(' ', space + 1) == std::string_view::npos) {
        return {both.substr(0, space), both.substr(space + 1)};
      }
    } else if (entry.IsArray() && entry.Size() == 2 && entry[0].IsString() && entry[1].IsString()) {
      return {text_of(entry[0]), text_of(entry[1])};
    }
    fail(fmt::format("model.merges[{}]", index), "must be \"LEFT RIGHT\" or [\"LEFT\", \"RIGHT\"]");
  }

  void read_added_tokens() {
    if (!find(root_, "added_tokens")) return;
    const Json& entries = array_in("", root_, "added_tokens");
    for (size_t i = 0; i < entries.Size(); ++i) {
      const Json& entry = entries[static_cast<rapidjson::SizeType>(i)];
      const std::string path = fmt::format("added_tokens[{}]", i);
      if (!entry.IsObject()) fail(path, "must be an object");
      AddedToken token;
      token.content = string_in(path, entry, "content");
      const Json* id = find(entry, "id");
      if (!id || !id->IsInt()) fail(path + ".id", "must be an id");
      token.id = id->GetInt();
      if (token.id < 0 || token.id >= kMostTokens) {
        fail(path + ".id", fmt::format("{} is outside 0 to {}", token.id, kMostTokens - 1));
      }
      token.special = flag_in(path, entry, "special", false);
      token.single_word = flag_in(path, entry, "single_word", false);
      token.lstrip = flag_in(path, entry, "lstrip", false);
      token.rstrip = flag_in(path, entry, "rstrip", false);
      token.normalized = flag_in(path, entry, "normalized", !token.special);
      if (token.content.empty()) continue;  // nothing to match
      const auto [known, is_new] = added_ids_.emplace(token.content, token.id);
      if (!is_new && known->second == token.id) continue;
      if (!is_new) fail(path + ".id", fmt::format("'{}' has another id already", token.content));
      if (token.special) special_ids_.insert(token.id);
      added_tokens_.push_back(std::move(token));
    }
  }

  // No id may stand for two tokens and no token may have two ids, including those of the
  // vocabulary.
  void check_added_tokens(const Bpe& bpe) const {
    std::unordered_set<int32_t> taken;
    for (const AddedToken& token : added_tokens_) {
      const std::string path = fmt::format("added_tokens['{}'].id", token.content);
      const std::optional<int32_t> entry = bpe.find(token.content);
      if (entry && *entry != token.id) {
        fail(path, fmt::format("{}, but model.vocab says {}", token.id, *entry));
      }
      const bool other_entry = bpe.bytes_of(token.id) != nullptr && !entry;
      if (!taken.insert(token.id).second || other_entry) {
        fail(path, fmt::format("{} is taken by another token", token.id));
      }
    }
  }

  const std::string& name_;
  const Json& root_;
  PreTokenizer pre_tokenizer_;
  std::vector<AddedToken> added_tokens_;
  std::unordered_map<std::string, int32_t> added_ids_;
  std::unordered_set<int32_t> special_ids_;
  bool nfc_ = false;
  bool byte_level_seen_ = false;
};

}  // namespace

std::unique_ptr<Tokenizer> load_tokenizer(const std::string& path) {
  const std::string file = is_folder(path) ? path + "/tokenizer.json" : path;
  return parse_tokenizer(file, read_file(file));
}

std::unique_ptr<Tokenizer> parse_tokenizer(const std::string& name, std::string_view json) {
  const rapidjson::Document document = parse_json(name, json);
  return Loader(name, document).load();
}

}  // namespace leeway
