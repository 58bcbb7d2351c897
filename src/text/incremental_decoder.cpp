#include "text/byte_level.h"
#include "text/tokenizer.h"

namespace leeway {
namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";  // U+FFFD

}  // namespace

std::string IncrementalDecoder::push(int32_t id) {
  pending_ += tokenizer_.decode(std::span(&id, 1));
  std::string ready;
  size_t at = 0;
  while (at < pending_.size()) {
    const std::string_view rest = std::string_view(pending_).substr(at);
    if (const size_t valid = valid_utf8_prefix(rest); valid > 0) {
      ready += rest.substr(0, valid);
      at += valid;
      continue;
    }
    const Utf8Unit unit = next_utf8(rest);
    if (unit.kind == Utf8Kind::incomplete) break;
    // Bytes that no later token can complete are replaced now, so that the stream equals the lossy
    // decoding of the whole.
    ready += kReplacement;
    at += unit.length;
  }
  pending_.erase(0, at);
  return ready;
}

std::string IncrementalDecoder::finish() {
  // push() leaves either nothing or the start of one character.
  const bool cut = !pending_.empty();
  pending_.clear();
  return std::string(cut ? kReplacement : "");
}

}  // namespace leeway
