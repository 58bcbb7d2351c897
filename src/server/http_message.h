// Requests of HTTP/1.1 and 1.0 read from bytes, without sockets.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace leeway {

struct HttpLimits {
  size_t header_bytes = 32 << 10;  // request line, headers and trailers together
  size_t headers = 100;
  size_t body_bytes = 32 << 20;
};

struct HttpRequest {
  std::string method;                                        // upper case
  std::string path;                                          // without the query; not decoded
  std::string query;                                         // what follows the question mark
  std::vector<std::pair<std::string, std::string>> headers;  // names in lower case
  std::string body;
  bool http10 = false;
  bool keep_alive = true;

  // Null if there is no such header; `name` in lower case. The first of several.
  const std::string* header(std::string_view name) const;
  // The decoded value of a key of the query; nothing if it is absent.
  std::optional<std::string> query_value(std::string_view key) const;
};

// Reads one request after the other. What is ambiguous is refused and never guessed: two lengths, a
// length beside chunks, folded headers, control characters.
class HttpParser {
 public:
  explicit HttpParser(const HttpLimits& limits) : limits_(limits) {}

  // Takes bytes from the front and returns how many; it stops after a request and at an error.
  size_t feed(std::string_view bytes);

  bool begun() const { return state_ != State::request_line || used_ > 0; }
  bool complete() const { return state_ == State::complete; }
  // The complete request; the parser is ready for the next.
  HttpRequest take();
  // True once per request: the client waits for "100 Continue" before it sends the body.
  bool take_continue();

  int error_status() const { return error_status_; }  // 0: none
  const std::string& error() const { return error_; }

 private:
  enum class State {
    request_line,
    headers,
    body,
    chunk_size,
    chunk,
    chunk_end,
    trailers,
    complete,
    failed
  };

  void fail(int status, std::string message);
  bool take_line(std::string_view bytes, size_t& used);
  void on_line();
  void on_request_line();
  void on_header();
  void on_headers_end();
  void on_chunk_size();
  size_t take_body(std::string_view bytes);

  HttpLimits limits_;
  State state_ = State::request_line;
  HttpRequest request_;
  std::string line_;
  size_t used_ = 0;    // header bytes so far
  size_t wanted_ = 0;  // bytes of the body or the chunk that are missing
  bool wants_continue_ = false;
  int error_status_ = 0;
  std::string error_;
};

}  // namespace leeway
