// Finds where structs, classes, unions and enums are defined at namespace scope: enough of C++'s
// grammar for this tree, not a parser.
#pragma once

#include <algorithm>
#include <cctype>
#include <string>
#include <string_view>
#include <vector>

namespace leeway {

struct TypeDefinition {
  std::string name;  // with its namespaces: "leeway::Config"
  size_t line = 0;   // from 1 on
};

namespace type_definitions_detail {

struct Token {
  std::string text;  // a word, or one character of punctuation
  size_t line;
};

inline bool is_word(char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_'; }

// Where the literal or comment that starts at `at` ends; `at` itself if none starts there.
inline size_t skip_text(std::string_view text, size_t at) {
  const std::string_view rest = text.substr(at);
  const auto after = [&](std::string_view end, size_t from) {
    const size_t found = text.find(end, from);
    return found == std::string_view::npos ? text.size() : found + end.size();
  };
  if (rest.starts_with("//")) return after("\n", at) - 1;  // the newline stays
  if (rest.starts_with("/*")) return after("*/", at + 2);
  if (rest.starts_with("R\"")) {
    const size_t open = text.find('(', at);
    if (open == std::string_view::npos) return text.size();
    return after(")" + std::string(text.substr(at + 2, open - at - 2)) + "\"", open);
  }
  const char quote = rest.front();
  // The digit separators of 1'000'000 are not quotes.
  const bool separator = quote == '\'' && at > 0 && is_word(text[at - 1]);
  if ((quote != '"' && quote != '\'') || separator) return at;
  size_t end = at + 1;
  while (end < text.size() && text[end] != quote) end += text[end] == '\\' ? 2 : 1;
  return std::min(end + 1, text.size());
}

// The tokens of a text, without comments, literals and preprocessor lines.
inline std::vector<Token> tokens_of(std::string_view text) {
  std::vector<Token> tokens;
  size_t line = 1;
  bool line_begins = true;
  for (size_t at = 0; at < text.size();) {
    const auto count_lines = [&](size_t end) {
      for (; at < end; ++at) line += text[at] == '\n' ? 1 : 0;
    };
    if (text[at] == '#' && line_begins) {
      size_t end = at;
      while (end < text.size() && text[end] != '\n') end += text[end] == '\\' ? 2 : 1;
      count_lines(std::min(end, text.size()));
    } else if (const size_t end = skip_text(text, at); end > at) {
      count_lines(end);
    } else if (std::isspace(static_cast<unsigned char>(text[at]))) {
      line_begins = line_begins || text[at] == '\n';
      count_lines(at + 1);
      continue;
    } else {
      size_t end_of_word = at;
      while (end_of_word < text.size() && is_word(text[end_of_word])) ++end_of_word;
      end_of_word = std::max(end_of_word, at + 1);
      tokens.push_back({std::string(text.substr(at, end_of_word - at)), line});
      at = end_of_word;
    }
    line_begins = false;
  }
  return tokens;
}

class Finder {
 public:
  explicit Finder(std::string_view text) : tokens_(tokens_of(text)) {}

  std::vector<TypeDefinition> run() {
    while (at_ < tokens_.size()) {
      const std::string& word = tokens_[at_].text;
      if (word == "{") {
        scopes_.push_back({Scope::Kind::other, ""});
        ++at_;
      } else if (word == "}") {
        if (!scopes_.empty()) scopes_.pop_back();
        ++at_;
      } else if (!in_namespace()) {
        ++at_;
      } else if (word == "namespace") {
        open_namespace();
      } else if (word == "extern" && at_ + 1 < tokens_.size() && tokens_[at_ + 1].text == "{") {
        scopes_.push_back({Scope::Kind::transparent, ""});  // extern "C" {
        at_ += 2;
      } else if (word == "template") {
        ++at_;
        skip_balanced("<", ">");
      } else if (word == "struct" || word == "class" || word == "union" || word == "enum") {
        look_at_type();
      } else {
        ++at_;
      }
    }
    return std::move(found_);
  }

 private:
  struct Scope {
    enum class Kind { named, unnamed, transparent, other };
    Kind kind;
    std::string name;
  };

  bool in_namespace() const { return scopes_.empty() || scopes_.back().kind != Scope::Kind::other; }
  bool is(std::string_view text) const { return at_ < tokens_.size() && tokens_[at_].text == text; }

  void skip_balanced(std::string_view open, std::string_view close) {
    if (!is(open)) return;
    int depth = 0;
    do {
      depth += is(open) ? 1 : is(close) ? -1 : 0;
      ++at_;
    } while (at_ < tokens_.size() && depth > 0);
  }

  // namespace a::b {, namespace {, inline namespace a {; an alias opens nothing.
  void open_namespace() {
    std::string name;
    for (++at_; at_ < tokens_.size() && !is("{") && !is(";"); ++at_) name += tokens_[at_].text;
    if (is("{")) {
      scopes_.push_back({name.empty() ? Scope::Kind::unnamed : Scope::Kind::named, name});
    }
    ++at_;
  }

  // Starts at `struct`. Declarations and uses of a type define nothing.
  void look_at_type() {
    const size_t line = tokens_[at_].line;
    ++at_;
    if (is("class") || is("struct")) ++at_;  // enum class
    while (is("[") || is("alignas")) {
      if (is("alignas")) ++at_;
      skip_balanced("[", "]");
      skip_balanced("(", ")");
    }
    std::string name;  // with the arguments of a specialisation
    bool bases = false;
    for (; at_ < tokens_.size(); ++at_) {
      const std::string& word = tokens_[at_].text;
      if (word == "{") break;
      if (word == ";" || word == "=" || word == "(" || word == ")" || word == ",") {
        if (!bases || word == ";") return;
      }
      const bool scope = word == ":" && at_ + 1 < tokens_.size() && tokens_[at_ + 1].text == ":";
      if (scope && !bases) {
        name += "::";
        ++at_;
      } else if (word == ":") {
        bases = true;
      } else if (!bases && word != "final") {
        name += word;
      }
    }
    if (!is("{") || name.empty()) return;
    std::string full;
    for (const Scope& each : scopes_) {
      if (each.kind == Scope::Kind::unnamed) return;
      if (each.kind == Scope::Kind::named) full += each.name + "::";
    }
    found_.push_back({full + name, line});
  }

  std::vector<Token> tokens_;
  size_t at_ = 0;
  std::vector<Scope> scopes_;
  std::vector<TypeDefinition> found_;
};

}  // namespace type_definitions_detail

// The type definitions of a source text, except those in anonymous namespaces, other types and
// functions.
inline std::vector<TypeDefinition> type_definitions(std::string_view text) {
  return type_definitions_detail::Finder(text).run();
}

}  // namespace leeway
