#include "model/shared_weights.h"

#include <arpa/inet.h>
#include <fmt/format.h>

#include <algorithm>

#include "base/json.h"
#include "leeway/error.h"

namespace leeway {
namespace {

// 0 to 15, or -1.
int digit_of(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  return -1;
}

bool is_hexadecimal(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return digit_of(c) >= 0; });
}

}  // namespace

std::string shared_weights_json(const SharedWeights& shared) {
  std::string handle;
  for (const char c : shared.handle) handle += fmt::format("{:02x}", static_cast<unsigned char>(c));
  JsonWriter json;
  json.begin_object().key("device").value(shared.device).key("handle").value(handle);
  json.key("offset").raw(std::to_string(shared.offset));
  json.key("count").raw(std::to_string(shared.count));
  json.key("layout").value(fmt::format("{:08x}", shared.layout));
  json.key("checksum").value(fmt::format("{:08x}", shared.checksum)).end_object();
  return json.text();
}

std::string handle_bytes(std::string_view hexadecimal) {
  if (hexadecimal.size() != 2 * kWeightHandleBytes || !is_hexadecimal(hexadecimal)) {
    throw Error(
        fmt::format("a handle has {} hexadecimal digits in small letters", 2 * kWeightHandleBytes));
  }
  std::string bytes;
  for (size_t i = 0; i < hexadecimal.size(); i += 2) {
    bytes += static_cast<char>(16 * digit_of(hexadecimal[i]) + digit_of(hexadecimal[i + 1]));
  }
  return bytes;
}

uint32_t hexadecimal_sum(std::string_view text) {
  if (text.size() != 8 || !is_hexadecimal(text)) {
    throw Error("a checksum has 8 hexadecimal digits in small letters");
  }
  uint32_t sum = 0;
  for (const char c : text) sum = 16 * sum + static_cast<uint32_t>(digit_of(c));
  return sum;
}

bool is_loopback(std::string_view host) {
  if (host == "localhost" || host == "::1") return true;
  in_addr address = {};  // a name such as 127.example.org is none
  const std::string text(host);
  return ::inet_pton(AF_INET, text.c_str(), &address) == 1 && ntohl(address.s_addr) >> 24 == 127;
}

bool is_loopback_url(std::string_view url) {
  const size_t scheme = url.find("://");
  if (scheme == std::string_view::npos) return false;
  url.remove_prefix(scheme + 3);
  url = url.substr(0, url.find_first_of("/?#"));
  if (url.find('@') != std::string_view::npos) return false;
  if (url.starts_with("[")) return is_loopback(url.substr(1, url.find(']') - 1));
  return is_loopback(url.substr(0, url.find(':')));
}

}  // namespace leeway
