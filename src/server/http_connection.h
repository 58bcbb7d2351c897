// One connection of an HttpServer, on the server's thread.
#pragma once

#include <event2/bufferevent.h>
#include <event2/event.h>

#include <memory>
#include <string>
#include <string_view>

#include "server/http_message.h"
#include "server/http_server.h"

namespace leeway {

// What a connection needs of its server.
class HttpConnectionOwner {
 public:
  virtual ~HttpConnectionOwner() = default;
  virtual const HttpOptions& options() const = 0;
  virtual bool draining() const = 0;
  virtual void handle(std::shared_ptr<HttpExchange> exchange) = 0;
  virtual std::string error_body(int status, const std::string& message) const = 0;
  virtual event_base* base() = 0;
  // True: `flush` is called soon, once for all that is written until then.
  virtual bool flushes_later(HttpConnection& connection) = 0;
  // The connection is closed; it is deleted after the running callback.
  virtual void closed(HttpConnection& connection) = 0;
};

class HttpConnection {
 public:
  // Takes the socket.
  HttpConnection(HttpConnectionOwner& owner, evutil_socket_t socket);
  ~HttpConnection();
  HttpConnection(const HttpConnection&) = delete;
  HttpConnection& operator=(const HttpConnection&) = delete;

  // Of the exchange.
  void respond(const HttpExchange& exchange, const HttpAnswer& answer);
  void begin_stream(const HttpExchange& exchange, std::string_view content_type);
  bool send(const HttpExchange& exchange, std::string_view piece);
  void end_stream(const HttpExchange& exchange);

  // Sends what was written.
  void flush();
  // Closes if no request is being read or answered.
  void close_if_idle();
  void close();
  bool has_output() const;

 private:
  // reading: a request; answering: one is with the handler; ending: the last bytes go out, and what
  // still comes in is thrown away, so that the client can read the answer before it sees the end.
  enum class State { reading, answering, ending, closed };

  static void on_read(bufferevent*, void* self);
  static void on_write(bufferevent*, void* self);
  static void on_event(bufferevent*, short what, void* self);
  static void on_timer(evutil_socket_t, short, void* self);

  // Runs what a libevent callback asks for; nothing is thrown through the library.
  template <class Function>
  void guarded(Function&& function);
  void read();
  void parse();
  void start_exchange();
  void answer_error(int status, const std::string& message);
  void finish(bool keep_alive);
  void end();
  void set_timer(double seconds);
  void write(std::string_view bytes) { written_ += bytes; }
  void flush_soon();
  std::string head(int status, std::string_view content_type, bool keep_alive) const;

  HttpConnectionOwner& owner_;
  bufferevent* buffers_ = nullptr;
  event* timer_ = nullptr;
  HttpParser parser_;
  std::string written_;  // and neither sent nor with `buffers_`
  State state_ = State::reading;
  bool parsing_ = false, timed_request_ = false, keep_alive_ = false, shut_ = false;
  bool input_ended_ = false;  // while the last bytes go out
  std::shared_ptr<HttpExchange> exchange_;
};

}  // namespace leeway
