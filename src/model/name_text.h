// Names and texts from a file, for messages.
#pragma once

#include <string>
#include <string_view>

#include "base/json.h"

namespace leeway {

// Quoted, with control characters escaped (a NUL would end the message) and long texts truncated.
inline std::string name_text(std::string_view text) {
  constexpr size_t kMost = 200;
  JsonWriter writer;
  writer.value(text.substr(0, kMost));
  return text.size() <= kMost ? writer.text() : writer.text() + "..";
}

}  // namespace leeway
