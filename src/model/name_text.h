// Names and texts of a file in a message.
#pragma once

#include <string>
#include <string_view>

#include "base/json.h"

namespace leeway {

// In quotes, control characters escaped (a NUL would end the message), long ones cut.
inline std::string name_text(std::string_view text) {
  constexpr size_t kMost = 200;
  JsonWriter writer;
  writer.value(text.substr(0, kMost));
  return text.size() <= kMost ? writer.text() : writer.text() + "..";
}

}  // namespace leeway
