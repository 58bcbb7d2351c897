#include "config/toml_text.h"

#include <fmt/format.h>

#include "base/utf8.h"
#include "leeway/error.h"

namespace leeway {
namespace {

// Scans the text as TOML's lexer does, skipping strings and comments, and counts the dots of a key
// and open brackets. Invalid TOML is left to the parser.
class DepthCheck {
 public:
  DepthCheck(const std::string& name, std::string_view text) : name_(name), text_(text) {}

  void run() {
    while (at_ < text_.size()) {
      const char c = text_[at_];
      if (c == '"' || c == '\'') {
        skip_string(c);
        continue;
      }
      if (c == '#') {
        at_ = std::min(text_.find('\n', at_), text_.size());
        continue;
      }
      ++at_;
      if (c == '.') {
        if (++dots_ >= kMostTomlDepth) refuse("dots in a key");
      } else if (c == '[' || c == '{') {
        dots_ = 0;
        if (++open_ > kMostTomlDepth) refuse("nested brackets");
      } else if (c == ']' || c == '}') {
        dots_ = 0;
        if (open_ > 0) --open_;
      } else if (c == '\n') {
        dots_ = 0;
        ++line_;
      } else if (c == '=' || c == ',') {
        dots_ = 0;
      }
    }
  }

 private:
  [[noreturn]] void refuse(const char* what) const {
    throw Error(fmt::format("{} line {}: TOML nested too deep: {} {} or more", name_, line_,
                            kMostTomlDepth, what));
  }

  void skip_string(char quote) {
    const std::string triple(3, quote);
    const bool lines = text_.substr(at_, 3) == triple;
    at_ += lines ? 3 : 1;
    while (at_ < text_.size()) {
      const char c = text_[at_];
      if (c == '\n') {
        if (!lines) return;  // not closed: the parser reports it
        ++line_;
      }
      if (c == '\\' && quote == '"') {
        // An escaped line end still ends a line.
        if (at_ + 1 < text_.size() && text_[at_ + 1] == '\n') ++line_;
        at_ += 2;
      } else if (c == quote && (!lines || text_.substr(at_, 3) == triple)) {
        at_ += lines ? 3 : 1;
        return;
      } else {
        ++at_;
      }
    }
  }

  const std::string& name_;
  std::string_view text_;
  size_t at_ = 0, line_ = 1, dots_ = 0, open_ = 0;
};

}  // namespace

toml::table parse_toml(const std::string& name, std::string_view text) {
  if (text.size() > kMostTomlBytes) {
    throw Error(fmt::format("{}: {} bytes exceed the limit of {} for a configuration", name,
                            text.size(), kMostTomlBytes));
  }
  DepthCheck(name, text).run();
  try {
    return toml::parse(text, name);
  } catch (const toml::parse_error& error) {
    throw Error(fmt::format("{} line {}: not valid TOML: {}", name, error.source().begin.line,
                            error.description()));
  }
}

bool is_toml_text(const std::string& text) {
  return text.find('\0') == std::string::npos && valid_utf8_prefix(text) == text.size();
}

}  // namespace leeway
