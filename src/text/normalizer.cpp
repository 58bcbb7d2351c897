#include "text/normalizer.h"

#include <utf8proc.h>

#include <algorithm>
#include <array>

#include "leeway/error.h"
#include "text/byte_level.h"

namespace leeway {
namespace {

// Below U+0300 every character is in NFC and none combines with the one before it.
constexpr uint8_t kFirstLeadThatMayChange = 0xCC;

bool is_nfc_at_a_glance(std::string_view text) {
  return std::none_of(text.begin(), text.end(),
                      [](char c) { return static_cast<uint8_t>(c) >= kFirstLeadThatMayChange; });
}

bool is_white_space(uint32_t c) {
  return (c >= 0x09 && c <= 0x0D) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F ||
         c == 0x3000;
}

// Letters, marks, decimal digits, connectors and joiners, as Unicode defines \w.
bool is_word(uint32_t c) {
  if (c == 0x200C || c == 0x200D || (c >= 0x24B6 && c <= 0x24E9)) return true;
  switch (utf8proc_category(static_cast<utf8proc_int32_t>(c))) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_PC: return true;
    default: return false;
  }
}

// Where the last character of valid, nonempty UTF-8 starts.
size_t last_character(std::string_view text) {
  size_t at = text.size() - 1;
  while (at > 0 && (static_cast<uint8_t>(text[at]) & 0xC0) == 0x80) --at;
  return at;
}

bool ends_in_word(std::string_view text) {
  return !text.empty() && is_word(next_utf8(text.substr(last_character(text))).code_point);
}

bool starts_with_word(std::string_view text) {
  return !text.empty() && is_word(next_utf8(text).code_point);
}

size_t without_trailing_space(std::string_view text) {
  while (!text.empty()) {
    const size_t at = last_character(text);
    if (!is_white_space(next_utf8(text.substr(at)).code_point)) break;
    text = text.substr(0, at);
  }
  return text.size();
}

size_t leading_space(std::string_view text) {
  size_t at = 0;
  while (at < text.size()) {
    const Utf8Unit unit = next_utf8(text.substr(at));
    if (!is_white_space(unit.code_point)) break;
    at += unit.length;
  }
  return at;
}

int combining_class(utf8proc_int32_t c) { return utf8proc_get_property(c)->combining_class; }

// utf8proc sorts marks by insertion, which is quadratic in the length of a run, so they are sorted
// here before it composes.
void order_marks(std::vector<utf8proc_int32_t>& characters) {
  for (size_t begin = 0; begin < characters.size();) {
    size_t end = begin;
    while (end < characters.size() && combining_class(characters[end]) != 0) ++end;
    if (end - begin > 1) {
      std::stable_sort(characters.begin() + static_cast<ptrdiff_t>(begin),
                       characters.begin() + static_cast<ptrdiff_t>(end),
                       [](auto a, auto b) { return combining_class(a) < combining_class(b); });
    }
    begin = end + 1;
  }
}

}  // namespace

std::string to_nfc(std::string_view text) {
  if (is_nfc_at_a_glance(text)) return std::string(text);
  constexpr auto kOptions = static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE);
  std::vector<utf8proc_int32_t> characters;
  characters.reserve(text.size());
  for (size_t at = 0; at < text.size();) {
    const Utf8Unit unit = next_utf8(text.substr(at));
    LEEWAY_CHECK(unit.kind == Utf8Kind::valid, "normalization needs valid UTF-8");
    at += unit.length;
    std::array<utf8proc_int32_t, 32> parts;
    int boundary_class = 0;
    const utf8proc_ssize_t count = utf8proc_decompose_char(
        static_cast<utf8proc_int32_t>(unit.code_point), parts.data(),
        static_cast<utf8proc_ssize_t>(parts.size()), kOptions, &boundary_class);
    LEEWAY_CHECK(count >= 0 && count <= static_cast<utf8proc_ssize_t>(parts.size()),
                 "a character decomposes into a few");
    characters.insert(characters.end(), parts.begin(), parts.begin() + count);
  }
  order_marks(characters);
  const utf8proc_ssize_t count = utf8proc_normalize_utf32(
      characters.data(), static_cast<utf8proc_ssize_t>(characters.size()), kOptions);
  LEEWAY_CHECK(count >= 0, "decomposed characters must compose");
  std::string result;
  result.reserve(text.size());
  for (utf8proc_ssize_t i = 0; i < count; ++i) {
    append_utf8(result, static_cast<uint32_t>(characters[static_cast<size_t>(i)]));
  }
  return result;
}

void AddedTokens::Trie::add(std::string_view spelling, int32_t token) {
  uint32_t node = 0;
  starts_[static_cast<uint8_t>(spelling.front())] = true;
  for (const char c : spelling) {
    uint32_t child = child_of(node, c);
    if (child == 0) {
      child = static_cast<uint32_t>(nodes_.size());
      nodes_[node].children.emplace_back(c, child);
      nodes_.emplace_back();
    }
    node = child;
  }
  if (nodes_[node].token < 0) nodes_[node].token = token;
}

uint32_t AddedTokens::Trie::child_of(uint32_t node, char c) const {
  for (const auto& [label, child] : nodes_[node].children) {
    if (label == c) return child;
  }
  return 0;
}

std::pair<int32_t, size_t> AddedTokens::Trie::longest(std::string_view text) const {
  std::pair<int32_t, size_t> found{-1, 0};
  uint32_t node = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    node = child_of(node, text[i]);
    if (node == 0) break;
    if (nodes_[node].token >= 0) found = {nodes_[node].token, i + 1};
  }
  return found;
}

AddedTokens::AddedTokens(std::vector<AddedToken> tokens, bool nfc)
    : tokens_(std::move(tokens)), nfc_(nfc) {
  for (size_t i = 0; i < tokens_.size(); ++i) {
    const AddedToken& token = tokens_[i];
    if (!token.normalized) {
      raw_.add(token.content, static_cast<int32_t>(i));
    } else {
      const bool can_normalize = nfc_ && valid_utf8_prefix(token.content) == token.content.size();
      normalized_.add(can_normalize ? to_nfc(token.content) : token.content,
                      static_cast<int32_t>(i));
    }
  }
}

void AddedTokens::split(std::string_view text, bool recognise_special,
                        const Section& section) const {
  split_by(raw_, text, recognise_special, [&](std::string_view part, int32_t id) {
    if (id >= 0) return section(part, id);
    if (!nfc_ || is_nfc_at_a_glance(part)) {
      split_by(normalized_, part, recognise_special, section);
    } else {
      split_by(normalized_, to_nfc(part), recognise_special, section);
    }
  });
}

void AddedTokens::split_by(const Trie& trie, std::string_view text, bool recognise_special,
                           const Section& section) const {
  size_t given = 0;  // everything before this has been emitted
  for (size_t at = 0; at < text.size();) {
    const auto [index, length] =
        trie.may_start(text[at]) ? trie.longest(text.substr(at)) : std::pair(-1, size_t{0});
    if (index < 0) {
      ++at;
      continue;
    }
    const AddedToken& token = tokens_[static_cast<size_t>(index)];
    size_t start = at, stop = at + length;
    at = stop;  // a rejected match still hides those inside it
    if (token.special && !recognise_special) continue;
    if (token.single_word &&
        (ends_in_word(text.substr(0, start)) || starts_with_word(text.substr(stop)))) {
      continue;
    }
    // The white space before may already belong to the previous token.
    if (token.lstrip) start = std::max(without_trailing_space(text.substr(0, start)), given);
    if (token.rstrip) stop += leading_space(text.substr(stop));
    if (given < start) section(text.substr(given, start - given), -1);
    section(text.substr(start, stop - std::min(start, stop)), token.id);
    given = std::max(given, stop);
  }
  if (given < text.size()) section(text.substr(given), -1);
}

}  // namespace leeway
