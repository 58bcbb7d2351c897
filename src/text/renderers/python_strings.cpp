#include "text/renderers/python_strings.h"

#include <array>

namespace leeway {
namespace {

// The multi-byte characters that str.isspace() accepts, as UTF-8.
constexpr std::array<std::string_view, 19> kWideSpaces = {
    "\xc2\x85",     "\xc2\xa0",     "\xe1\x9a\x80", "\xe2\x80\x80", "\xe2\x80\x81",
    "\xe2\x80\x82", "\xe2\x80\x83", "\xe2\x80\x84", "\xe2\x80\x85", "\xe2\x80\x86",
    "\xe2\x80\x87", "\xe2\x80\x88", "\xe2\x80\x89", "\xe2\x80\x8a", "\xe2\x80\xa8",
    "\xe2\x80\xa9", "\xe2\x80\xaf", "\xe2\x81\x9f", "\xe3\x80\x80"};

bool is_space(char c) { return (c >= '\t' && c <= '\r') || (c >= '\x1c' && c <= ' '); }

size_t leading_space(std::string_view text) {
  if (text.empty()) return 0;
  if (is_space(text.front())) return 1;
  for (const std::string_view wide : kWideSpaces) {
    if (text.starts_with(wide)) return wide.size();
  }
  return 0;
}

size_t trailing_space(std::string_view text) {
  if (text.empty()) return 0;
  if (is_space(text.back())) return 1;
  for (const std::string_view wide : kWideSpaces) {
    if (text.ends_with(wide)) return wide.size();
  }
  return 0;
}

}  // namespace

std::string_view strip(std::string_view text) {
  while (const size_t size = leading_space(text)) text.remove_prefix(size);
  while (const size_t size = trailing_space(text)) text.remove_suffix(size);
  return text;
}

std::string_view lstrip_newlines(std::string_view text) {
  while (text.starts_with('\n')) text.remove_prefix(1);
  return text;
}

std::string_view rstrip_newlines(std::string_view text) {
  while (text.ends_with('\n')) text.remove_suffix(1);
  return text;
}

std::string_view strip_newlines(std::string_view text) {
  return lstrip_newlines(rstrip_newlines(text));
}

std::string_view before_first(std::string_view text, std::string_view mark) {
  return text.substr(0, text.find(mark));
}

std::string_view after_last(std::string_view text, std::string_view mark) {
  const size_t at = text.rfind(mark);
  return at == std::string_view::npos ? text : text.substr(at + mark.size());
}

std::string_view after_first(std::string_view text, std::string_view mark) {
  const size_t at = text.find(mark);
  return at == std::string_view::npos ? text : text.substr(at + mark.size());
}

}  // namespace leeway
