// The Python string methods that chat templates call, for UTF-8.
#pragma once

#include <string>
#include <string_view>

namespace leeway {

// str.strip() without an argument, and Jinja's `trim`: strips all Unicode white space.
std::string_view strip(std::string_view text);
// str.strip('\n'), str.lstrip('\n') and str.rstrip('\n').
std::string_view strip_newlines(std::string_view text);
std::string_view lstrip_newlines(std::string_view text);
std::string_view rstrip_newlines(std::string_view text);

// text.split(mark)[0], text.split(mark)[-1] and text.split(mark, 1)[1]; the whole text if `mark`
// does not occur.
std::string_view before_first(std::string_view text, std::string_view mark);
std::string_view after_last(std::string_view text, std::string_view mark);
std::string_view after_first(std::string_view text, std::string_view mark);

inline bool contains(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}

}  // namespace leeway
