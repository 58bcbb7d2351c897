// Embedding JSON in an HTML script element.
#pragma once

#include <string>
#include <string_view>

namespace leeway {

// Inside a script element HTML only looks for `</script` and `<!--`. JSON contains `<` only in
// strings, where \u003c means the same, so escaping every `<` keeps the data from ending the
// element.
inline void append_script_safe(std::string& page, std::string_view json) {
  for (const char c : json) {
    if (c == '<') {
      page += "\\u003c";
    } else {
      page += c;
    }
  }
}

}  // namespace leeway
