#include "text/pre_tokenizer.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <fmt/format.h>
#include <pcre2.h>

#include <algorithm>
#include <new>
#include <optional>

#include "leeway/error.h"
#include "text/bounded_match.h"

namespace leeway {

const char* const kGpt2Pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

namespace {

template <auto kFree>
struct Free {
  template <typename T>
  void operator()(T* pointer) const {
    kFree(pointer);
  }
};
using Code = std::unique_ptr<pcre2_code, Free<pcre2_code_free>>;
using CompileContext = std::unique_ptr<pcre2_compile_context, Free<pcre2_compile_context_free>>;

// Limits on backtracking for all matches of one text. The patterns of real models need no heap, and
// steps proportional to the length of a run of white space.
constexpr unsigned kMostHeapKib = 256 * 1024;
constexpr size_t kMostSteps = 10'000'000;
constexpr size_t kMostStepsPerByte = 64;

std::string pcre2_message(int code) {
  PCRE2_UCHAR text[256];
  return pcre2_get_error_message(code, text, sizeof(text)) < 0
             ? fmt::format("error {}", code)
             : std::string(reinterpret_cast<const char*>(text));
}

struct Compiled {
  Code code;
  std::string problem;
};

Compiled compile(std::string_view pattern) {
  // As in Ruby's syntax, ^ and $ match at every line, and only a line feed ends a line.
  constexpr uint32_t kOptions = PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C;
  const CompileContext context(pcre2_compile_context_create(nullptr));
  if (!context) throw std::bad_alloc();
  pcre2_set_newline(context.get(), PCRE2_NEWLINE_LF);
  int error = 0;
  PCRE2_SIZE offset = 0;
  Code code(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(), kOptions,
                          &error, &offset, context.get()));
  if (!code) return {nullptr, fmt::format("{} at offset {}", pcre2_message(error), offset)};
  return {std::move(code), ""};
}

// A name in both dialects that PCRE2 takes as script extensions and Oniguruma as the script.
bool is_script(std::string_view name) {
  return name.size() > 2 && compile(fmt::format("\\p{{sc:{}}}", name)).code != nullptr;
}

class Translator {
 public:
  Translator(const std::string& where, std::string_view pattern)
      : where_(where), pattern_(pattern) {}

  std::string run() {
    while (at_ < pattern_.size()) step();
    return std::move(result_);
  }

 private:
  [[noreturn]] void refuse(std::string_view construct) const {
    throw Error(fmt::format("{}: '{}' in a pattern is not supported", where_, construct));
  }

  bool starts(std::string_view text) const { return pattern_.substr(at_).starts_with(text); }

  void copy(size_t count) {
    result_ += pattern_.substr(at_, count);
    at_ += count;
  }

  void step() {
    if (pattern_[at_] == '\\') return escape();
    if (in_class_) {
      if (starts("&&")) refuse("&&");
      if (starts("[:")) return copy(2);
      if (starts("[")) refuse("[ inside [ ]");
      // The end of [:name:] does not end the class.
      if (starts(":]")) return copy(2);
      if (starts("]")) in_class_ = false;
      return copy(1);
    }
    if (starts("[")) {
      in_class_ = true;
      copy(starts("[^") ? 2 : 1);
      // As the first character of a class, PCRE2 takes it literally.
      if (starts("]")) refuse("[]");
      return;
    }
    if (starts("}+")) refuse("}+");
    if (starts("(*")) refuse("(*");
    if (starts("(?")) {
      const size_t end = pattern_.find_first_not_of("imsxn-", at_ + 2);
      const std::string_view options = pattern_.substr(at_ + 2, end - at_ - 2);
      // These letters have other meanings in Ruby's syntax.
      if (options.find_first_of("msn") != std::string_view::npos)
        refuse("(?" + std::string(options));
    }
    copy(1);
  }

  void escape() {
    constexpr std::string_view kWord = R"(\p{Alphabetic}\p{M}\p{Nd}\p{Pc})";
    // Outside a class, Oniguruma also includes the fractions and superscripts of Latin-1.
    constexpr std::string_view kLatinNumbers = R"(\xB2\xB3\xB9\xBC-\xBE)";
    const char kind = at_ + 1 < pattern_.size() ? pattern_[at_ + 1] : '\0';
    switch (kind) {
      // PCRE2 counts U+180E as a space; Unicode no longer does.
      case 's': result_ += R"(\p{White_Space})"; break;
      case 'S': result_ += R"(\P{White_Space})"; break;
      case 'w':
        result_ += in_class_ ? std::string(kWord) : fmt::format("[{}{}]", kWord, kLatinNumbers);
        break;
      case 'W':
        if (in_class_) refuse("[\\W]");
        result_ += fmt::format("[^{}{}]", kWord, kLatinNumbers);
        break;
      case 'p':
      case 'P': return property();
      case 'b':
        if (!in_class_) refuse("\\b");
        return copy(2);
      case 'B':
      case 'h':
      case 'H':
      case 'Q':
      case 'E':
      case 'R':
      case 'X':
      case 'N':
      case 'K':
      case 'v':
      case 'V': refuse(pattern_.substr(at_, 2));
      default: return copy(std::min<size_t>(2, pattern_.size() - at_));
    }
    at_ += 2;
  }

  void property() {
    const size_t end = pattern_.find('}', at_);
    if (!pattern_.substr(at_ + 2).starts_with('{') || end == std::string_view::npos) return copy(2);
    std::string_view name = pattern_.substr(at_ + 3, end - at_ - 3);
    result_ += pattern_.substr(at_, 3);
    if (name.starts_with('^')) {
      result_ += '^';
      name.remove_prefix(1);
    }
    if (is_script(name)) result_ += "sc:";
    result_ += name;
    result_ += '}';
    at_ = end + 1;
  }

  const std::string& where_;
  std::string_view pattern_;
  size_t at_ = 0;
  bool in_class_ = false;
  std::string result_;
};

struct Span {
  size_t begin, end;
  bool match;
};

// Turns the matches and the text between them into pieces.
std::vector<Span> arrange(std::vector<Span> spans, SplitBehavior behavior) {
  std::vector<Span> result;
  bool previous = false;
  const auto join_backwards = [&](const Span& span) {
    if (span.match && !previous && !result.empty()) {
      result.back().end = span.end;
    } else {
      result.push_back(span);
    }
    previous = span.match;
  };
  const auto join_forwards = [&](const Span& span) {
    if (span.match && !previous && !result.empty()) {
      result.back().begin = span.begin;
    } else {
      result.push_back(span);
    }
    previous = span.match;
  };
  switch (behavior) {
    case SplitBehavior::isolated: return spans;
    case SplitBehavior::removed:
      std::copy_if(spans.begin(), spans.end(), std::back_inserter(result),
                   [](const Span& span) { return !span.match; });
      break;
    case SplitBehavior::merged_with_previous:
      std::for_each(spans.begin(), spans.end(), join_backwards);
      break;
    case SplitBehavior::merged_with_next:
      std::for_each(spans.rbegin(), spans.rend(), join_forwards);
      std::reverse(result.begin(), result.end());
      break;
    case SplitBehavior::contiguous:
      for (const Span& span : spans) {
        if (!result.empty() && span.match == previous) {
          result.back().end = span.end;
        } else {
          result.push_back(span);
        }
        previous = span.match;
      }
      break;
  }
  return result;
}

}  // namespace

struct PreTokenizer::Step {
  Code code;  // none: prepend a space
  std::string where;
  SplitBehavior behavior = SplitBehavior::isolated;
  bool invert = false;

  // The next match at or after `from`. `text` is part of a text of `size` bytes, which errors
  // mention.
  std::optional<std::pair<size_t, size_t>> next_match(std::string_view text, size_t from,
                                                      size_t size, BoundedMatch& matcher) const;
  std::vector<Span> spans_of(std::string_view text, size_t size, BoundedMatch& matcher) const;
};

std::optional<std::pair<size_t, size_t>> PreTokenizer::Step::next_match(
    std::string_view text, size_t from, size_t size, BoundedMatch& matcher) const {
  const int result = matcher.find(code.get(), text, from, PCRE2_NO_UTF_CHECK);
  if (result == PCRE2_ERROR_NOMATCH) return std::nullopt;
  if (result < 0) {
    throw Error(fmt::format("{}: the pattern cannot be matched with a text of {} bytes: {}", where,
                            size, pcre2_message(result)));
  }
  return std::pair(matcher.begin(), matcher.end());
}

std::vector<Span> PreTokenizer::Step::spans_of(std::string_view text, size_t size,
                                               BoundedMatch& matcher) const {
  std::vector<Span> spans;
  size_t done = 0, from = 0;
  while (from <= text.size()) {
    const auto match = next_match(text, from, size, matcher);
    if (!match) break;
    const auto [begin, end] = *match;
    if (done < begin) spans.push_back({done, begin, invert});
    // An empty match also ends a piece; the search continues one character later.
    if (begin < end || done < begin) spans.push_back({begin, end, !invert});
    done = end;
    from = end;
    if (begin == end) {
      do ++from;
      while (from < text.size() && (static_cast<uint8_t>(text[from]) & 0xC0) == 0x80);
    }
  }
  if (done < text.size()) spans.push_back({done, text.size(), invert});
  return spans;
}

PreTokenizer::PreTokenizer() = default;
PreTokenizer::~PreTokenizer() = default;
PreTokenizer::PreTokenizer(PreTokenizer&&) noexcept = default;

std::string escape_pattern(std::string_view text) {
  constexpr std::string_view kSyntax = R"(\.+*?()|[]{}^$#&-~ )";
  std::string pattern;
  for (const char c : text) {
    if (kSyntax.find(c) != std::string_view::npos) pattern += '\\';
    pattern += c;
  }
  return pattern;
}

std::string to_pcre2(const std::string& where, std::string_view pattern) {
  return Translator(where, pattern).run();
}

void PreTokenizer::add_split(const std::string& where, const SplitRule& rule) {
  Compiled compiled = compile(to_pcre2(where, rule.pattern));
  if (!compiled.code) throw Error(fmt::format("{}: {}", where, compiled.problem));
  // Without a JIT the pattern is interpreted: slower, with the same matches.
  pcre2_jit_compile(compiled.code.get(), PCRE2_JIT_COMPLETE);
  auto step = std::make_unique<Step>();
  step->code = std::move(compiled.code);
  step->where = where;
  step->behavior = rule.behavior;
  step->invert = rule.invert;
  steps_.push_back(std::move(step));
}

void PreTokenizer::add_prefix_space() { steps_.push_back(std::make_unique<Step>()); }

std::vector<std::string_view> PreTokenizer::split(std::string_view text,
                                                  std::deque<std::string>& storage) const {
  std::vector<std::string_view> pieces;
  if (!text.empty()) pieces.push_back(text);
  BoundedMatch matcher(kMostSteps + kMostStepsPerByte * text.size(), kMostHeapKib);
  for (const auto& step : steps_) {
    std::vector<std::string_view> next;
    for (const std::string_view piece : pieces) {
      if (!step->code) {
        next.push_back(piece.starts_with(' ') ? piece
                                              : storage.emplace_back(" " + std::string(piece)));
        continue;
      }
      for (const Span& span :
           arrange(step->spans_of(piece, text.size(), matcher), step->behavior)) {
        if (span.begin < span.end) next.push_back(piece.substr(span.begin, span.end - span.begin));
      }
    }
    pieces = std::move(next);
  }
  return pieces;
}

}  // namespace leeway
