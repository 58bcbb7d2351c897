// An HTTP server on one thread: connections, their limits, whole answers and streamed ones.
//
// The thread in `run` reads and writes all sockets and calls the handler; a connection that waits,
// or that reads slowly, costs memory and no thread. A client that does not send its request in time
// is closed, one that does not read its stream in time loses it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "server/http_message.h"

namespace leeway {

struct HttpOptions {
  std::string host = "127.0.0.1";  // a name or an address
  int port = 0;                    // 0: any free one
  HttpLimits limits;
  int64_t connections = 4096;             // beyond them new ones are closed at once
  double request_seconds = 30;            // from the first byte of a request to its last
  double idle_seconds = 120;              // without a request
  double write_seconds = 60;              // without a byte that the client takes
  size_t stream_bytes = size_t{1} << 20;  // of a stream that the client has not taken yet
};

struct HttpAnswer {
  int status = 200;
  std::string body;
  std::string content_type = "application/json";
  std::vector<std::pair<std::string, std::string>> headers;
};

class HttpConnection;

// One request and its answer. All functions are for the thread that runs the server. It may outlive
// the connection: what is sent then goes nowhere.
class HttpExchange {
 public:
  HttpExchange(HttpConnection& connection, HttpRequest request)
      : connection_(&connection), request_(std::move(request)) {}
  HttpExchange(const HttpExchange&) = delete;
  HttpExchange& operator=(const HttpExchange&) = delete;

  const HttpRequest& request() const { return request_; }
  // Exactly one of: `respond`; `begin_stream`, any number of `send`, `end_stream`.
  void respond(const HttpAnswer& answer);
  void begin_stream(std::string_view content_type);
  // False: the client is gone, or has left more than stream_bytes unread, which ends the
  // connection.
  bool send(std::string_view piece);
  void end_stream();
  bool streams() const { return streams_; }
  bool gone() const { return connection_ == nullptr; }
  // Called once if the connection ends before the answer does.
  void on_gone(std::function<void()> callback) { on_gone_ = std::move(callback); }

 private:
  friend class HttpConnection;
  HttpConnection* connection_;  // null: the connection is gone, or the answer is complete
  HttpRequest request_;
  std::function<void()> on_gone_;
  bool streams_ = false;
};

class HttpServer {
 public:
  using Handler = std::function<void(std::shared_ptr<HttpExchange>)>;
  // Writes the answer to a request that could not be read: status and reason as the API words it.
  using ErrorBody = std::function<std::string(int status, const std::string& message)>;

  // Binds and listens. Throws Error naming host and port and the reason. What the handler throws
  // answers 500.
  HttpServer(const HttpOptions& options, Handler handler, ErrorBody error_body);
  ~HttpServer();
  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;

  int port() const;
  std::string url() const;  // http://HOST:PORT

  // Serves until `stop`. One thread at a time.
  void run();
  // From any thread, any time: `function` runs on the server's thread, in order of the calls.
  void post(std::function<void()> function);
  // On the server's thread: no new connections, and those without a request are closed.
  void drain();
  // On the server's thread: `run` returns when what was written is sent, after `seconds` at the
  // latest.
  void stop(double seconds);
  // A descriptor whose eight bytes, written by a signal handler, call `on_signal` on this thread.
  int signal_fd() const;
  void on_signal(std::function<void()> callback);
  // On the server's thread, `function` every `seconds` until it returns false.
  void every(double seconds, std::function<bool()> function);

  int64_t connections() const;  // on the server's thread

 private:
  friend class HttpConnection;
  friend class HttpExchange;
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace leeway
