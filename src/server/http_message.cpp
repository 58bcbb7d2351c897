#include "server/http_message.h"

#include <fmt/format.h>

#include <algorithm>

namespace leeway {
namespace {

bool is_token(std::string_view text) {
  constexpr std::string_view kMarks = "!#$%&'*+-.^_`|~";
  return !text.empty() && std::all_of(text.begin(), text.end(), [&](char c) {
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
           kMarks.find(c) != std::string_view::npos;
  });
}

std::string_view trimmed(std::string_view text) {
  while (!text.empty() && (text.front() == ' ' || text.front() == '\t')) text.remove_prefix(1);
  while (!text.empty() && (text.back() == ' ' || text.back() == '\t')) text.remove_suffix(1);
  return text;
}

std::string lower(std::string_view text) {
  std::string out(text);
  for (char& c : out) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  }
  return out;
}

int hex_digit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

// Digits alone, without overflow.
std::optional<size_t> number(std::string_view text, int base) {
  if (text.empty() || text.size() > 15) return {};
  size_t value = 0;
  for (const char c : text) {
    const int digit = hex_digit(c);
    if (digit < 0 || digit >= base) return {};
    value = value * static_cast<size_t>(base) + static_cast<size_t>(digit);
  }
  return value;
}

std::string percent_decoded(std::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '%' && i + 2 < text.size() && hex_digit(text[i + 1]) >= 0 &&
        hex_digit(text[i + 2]) >= 0) {
      out += static_cast<char>(hex_digit(text[i + 1]) * 16 + hex_digit(text[i + 2]));
      i += 2;
    } else {
      out += text[i] == '+' ? ' ' : text[i];
    }
  }
  return out;
}

bool has_control(std::string_view text) {
  return std::any_of(text.begin(), text.end(), [](char c) {
    return (static_cast<unsigned char>(c) < 0x20 && c != '\t') || c == 0x7f;
  });
}

}  // namespace

const std::string* HttpRequest::header(std::string_view name) const {
  for (const auto& [key, value] : headers) {
    if (key == name) return &value;
  }
  return nullptr;
}

std::optional<std::string> HttpRequest::query_value(std::string_view key) const {
  std::string_view rest = query;
  while (!rest.empty()) {
    const std::string_view part = rest.substr(0, rest.find('&'));
    rest.remove_prefix(std::min(rest.size(), part.size() + 1));
    const size_t equals = part.find('=');
    if (percent_decoded(part.substr(0, equals)) != key) continue;
    return equals == std::string_view::npos ? "" : percent_decoded(part.substr(equals + 1));
  }
  return {};
}

size_t HttpParser::feed(std::string_view bytes) {
  size_t used = 0;
  while (used < bytes.size() && state_ != State::complete && state_ != State::failed) {
    if (state_ == State::body || state_ == State::chunk) {
      used += take_body(bytes.substr(used));
    } else if (take_line(bytes, used)) {
      on_line();
      line_.clear();
    }
  }
  return used;
}

HttpRequest HttpParser::take() {
  HttpRequest request = std::move(request_);
  *this = HttpParser(limits_);
  return request;
}

bool HttpParser::take_continue() { return std::exchange(wants_continue_, false); }

void HttpParser::fail(int status, std::string message) {
  state_ = State::failed;
  error_status_ = status;
  error_ = std::move(message);
}

// Collects up to the end of a line; true when it is there, without its end.
bool HttpParser::take_line(std::string_view bytes, size_t& used) {
  const std::string_view rest = bytes.substr(used);
  const size_t end = rest.find('\n');
  const size_t count = end == std::string_view::npos ? rest.size() : end + 1;
  used_ += count;
  if (used_ > limits_.header_bytes) {
    fail(431, fmt::format("the request line and the headers are longer than {} bytes",
                          limits_.header_bytes));
    return false;
  }
  line_ += rest.substr(0, count);
  used += count;
  if (end == std::string_view::npos) return false;
  line_.pop_back();
  if (!line_.empty() && line_.back() == '\r') line_.pop_back();
  return true;
}

void HttpParser::on_line() {
  if (has_control(line_)) return fail(400, "a control character in the request's head");
  switch (state_) {
    case State::request_line:
      if (!line_.empty()) on_request_line();  // empty lines before a request are allowed
      return;
    case State::headers: return line_.empty() ? on_headers_end() : on_header();
    case State::chunk_size: return on_chunk_size();
    case State::chunk_end:
      if (!line_.empty()) return fail(400, "a chunk of the body is longer than it says");
      state_ = State::chunk_size;
      return;
    case State::trailers:
      if (line_.empty()) state_ = State::complete;
      return;
    default: return;
  }
}

void HttpParser::on_request_line() {
  const std::string_view line = line_;
  const size_t first = line.find(' '), last = line.rfind(' ');
  if (first == std::string_view::npos || first == last) {
    return fail(400, "the first line is not METHOD PATH HTTP/1.1");
  }
  const std::string_view method = line.substr(0, first), version = line.substr(last + 1);
  std::string_view target = line.substr(first + 1, last - first - 1);
  if (!is_token(method) || method.size() > 20) return fail(400, "the method is not a word");
  if (version != "HTTP/1.1" && version != "HTTP/1.0") {
    return fail(400, "the version is neither HTTP/1.1 nor HTTP/1.0");
  }
  if (target.starts_with("http://") || target.starts_with("https://")) {
    const size_t path = target.find('/', target.find("//") + 2);
    target = path == std::string_view::npos ? "/" : target.substr(path);
  }
  if (!target.starts_with('/') || target.find(' ') != std::string_view::npos) {
    return fail(400, "the path does not begin with a slash, or has a space in it");
  }
  request_.method = method;
  request_.http10 = version == "HTTP/1.0";
  request_.keep_alive = !request_.http10;
  const size_t question = target.find('?');
  request_.path = target.substr(0, question);
  if (question != std::string_view::npos) request_.query = target.substr(question + 1);
  state_ = State::headers;
}

void HttpParser::on_header() {
  const std::string_view line = line_;
  const size_t colon = line.find(':');
  if (colon == std::string_view::npos || !is_token(line.substr(0, colon))) {
    return fail(400, "a header is not NAME: VALUE");
  }
  if (request_.headers.size() == limits_.headers) {
    return fail(431, fmt::format("more than {} headers", limits_.headers));
  }
  request_.headers.emplace_back(lower(line.substr(0, colon)), trimmed(line.substr(colon + 1)));
}

void HttpParser::on_headers_end() {
  const std::string* length = nullptr;
  const std::string* encoding = nullptr;
  for (const auto& [name, value] : request_.headers) {
    if (name == "content-length") {
      if (length != nullptr) return fail(400, "Content-Length is given twice");
      length = &value;
    } else if (name == "transfer-encoding") {
      if (encoding != nullptr) return fail(400, "Transfer-Encoding is given twice");
      encoding = &value;
    } else if (name == "connection") {
      const std::string words = lower(value);
      if (words.find("close") != std::string::npos) request_.keep_alive = false;
      if (words.find("keep-alive") != std::string::npos && request_.http10) {
        request_.keep_alive = true;
      }
    } else if (name == "expect") {
      if (lower(value) != "100-continue") return fail(400, "Expect: only 100-continue is known");
      wants_continue_ = true;
    }
  }
  if (encoding != nullptr) {
    if (length != nullptr) return fail(400, "Content-Length beside Transfer-Encoding");
    if (lower(*encoding) != "chunked") return fail(400, "Transfer-Encoding: only chunked is known");
    state_ = State::chunk_size;
    return;
  }
  const std::optional<size_t> bytes = length == nullptr ? 0 : number(*length, 10);
  if (!bytes) return fail(400, "Content-Length is not a number of bytes");
  if (*bytes > limits_.body_bytes) {
    return fail(413, fmt::format("the body has {} bytes; at most {} are taken", *bytes,
                                 limits_.body_bytes));
  }
  wanted_ = *bytes;
  if (wanted_ == 0) wants_continue_ = false;
  state_ = wanted_ == 0 ? State::complete : State::body;
}

void HttpParser::on_chunk_size() {
  const std::string_view line = line_;
  const std::optional<size_t> bytes = number(trimmed(line.substr(0, line.find(';'))), 16);
  if (!bytes) return fail(400, "the size of a chunk is not a hexadecimal number");
  if (*bytes > limits_.body_bytes - std::min(limits_.body_bytes, request_.body.size())) {
    return fail(413, fmt::format("the body has more than {} bytes", limits_.body_bytes));
  }
  wanted_ = *bytes;
  state_ = wanted_ == 0 ? State::trailers : State::chunk;
  // What a chunk costs beside its bytes is not kept: only lines without data add up.
  if (wanted_ > 0) used_ = 0;
}

size_t HttpParser::take_body(std::string_view bytes) {
  const size_t count = std::min(wanted_, bytes.size());
  request_.body += bytes.substr(0, count);
  wanted_ -= count;
  if (wanted_ == 0) state_ = state_ == State::body ? State::complete : State::chunk_end;
  return count;
}

}  // namespace leeway
