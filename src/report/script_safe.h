// JSON inside an HTML script element.
#pragma once

#include <string>
#include <string_view>

namespace leeway {

// Inside a script element HTML looks only for `</script` and `<!--`. JSON has `<` nowhere but in
// strings, where \u003c means the same, so without any `<` nothing can end the element.
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
