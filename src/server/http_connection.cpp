#include "server/http_connection.h"

#include <event2/buffer.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <exception>
#include <new>
#include <utility>

namespace leeway {
namespace {

// What may wait in the input buffer while a request is answered: a pipelined request's beginning.
constexpr size_t kInputBytes = 64 << 10;
// How long an ending connection may go on sending.
constexpr double kEndingSeconds = 2;

std::string_view reason_of(int status) {
  switch (status) {
    case 200: return "OK";
    case 400: return "Bad Request";
    case 401: return "Unauthorized";
    case 403: return "Forbidden";
    case 404: return "Not Found";
    case 405: return "Method Not Allowed";
    case 408: return "Request Timeout";
    case 413: return "Content Too Large";
    case 429: return "Too Many Requests";
    case 431: return "Request Header Fields Too Large";
    case 500: return "Internal Server Error";
    case 503: return "Service Unavailable";
    default: return "Status";
  }
}

timeval time_of(double seconds) {
  timeval time = {};
  time.tv_sec = static_cast<time_t>(seconds);
  time.tv_usec = static_cast<suseconds_t>((seconds - static_cast<double>(time.tv_sec)) * 1e6);
  return time;
}

}  // namespace

HttpConnection::HttpConnection(HttpConnectionOwner& owner, evutil_socket_t socket)
    : owner_(owner), parser_(owner.options().limits) {
  const int on = 1;
  ::setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  buffers_ = bufferevent_socket_new(owner.base(), socket, BEV_OPT_CLOSE_ON_FREE);
  if (buffers_ == nullptr) {
    evutil_closesocket(socket);
    throw std::bad_alloc();
  }
  timer_ = evtimer_new(owner.base(), on_timer, this);
  if (timer_ == nullptr) {
    bufferevent_free(buffers_);
    throw std::bad_alloc();
  }
  bufferevent_setcb(buffers_, on_read, on_write, on_event, this);
  bufferevent_setwatermark(buffers_, EV_READ, 0, kInputBytes);
  const timeval write = time_of(owner.options().write_seconds);
  bufferevent_set_timeouts(buffers_, nullptr, &write);
  bufferevent_enable(buffers_, EV_READ | EV_WRITE);
  set_timer(owner.options().idle_seconds);
}

HttpConnection::~HttpConnection() {
  event_free(timer_);
  bufferevent_free(buffers_);
}

template <class Function>
void HttpConnection::guarded(Function&& function) {
  try {
    function();
  } catch (const std::exception&) {
    close();  // out of memory: this connection ends, the others go on
  }
}

void HttpConnection::on_read(bufferevent*, void* self) {
  auto* connection = static_cast<HttpConnection*>(self);
  connection->guarded([&] { connection->read(); });
}

void HttpConnection::on_write(bufferevent*, void* self) {
  auto* connection = static_cast<HttpConnection*>(self);
  // Called when all is written: an ending connection then tells the client that nothing follows.
  if (connection->state_ != State::ending || connection->shut_) return;
  connection->shut_ = true;
  ::shutdown(bufferevent_getfd(connection->buffers_), SHUT_WR);
  if (connection->input_ended_) connection->close();
}

// The end of the input, an error, or a client that does not read. Who ends its side only, while the
// answer is on its way, still gets it.
void HttpConnection::on_event(bufferevent*, short what, void* self) {
  auto* connection = static_cast<HttpConnection*>(self);
  const bool ended = (what & BEV_EVENT_EOF) != 0;
  if (!ended || connection->state_ == State::answering || !connection->has_output()) {
    return connection->close();
  }
  connection->state_ = State::ending;
  connection->input_ended_ = true;
  bufferevent_disable(connection->buffers_, EV_READ);
}

void HttpConnection::on_timer(evutil_socket_t, short, void* self) {
  auto* connection = static_cast<HttpConnection*>(self);
  connection->guarded([&] {
    if (connection->state_ == State::reading && connection->parser_.begun()) {
      connection->answer_error(408, fmt::format("the request was not complete after {} seconds",
                                                connection->owner_.options().request_seconds));
    } else {
      connection->close();
    }
  });
}

void HttpConnection::read() {
  if (state_ == State::reading) return parse();
  if (state_ == State::ending) {
    evbuffer* input = bufferevent_get_input(buffers_);
    evbuffer_drain(input, evbuffer_get_length(input));
  }
}

// Reads requests until one is with the handler or the input ends. A handler that answers at once
// comes back here by `finish`, which leaves the next request to this loop.
void HttpConnection::parse() {
  if (parsing_) return;
  parsing_ = true;
  evbuffer* input = bufferevent_get_input(buffers_);
  while (state_ == State::reading && evbuffer_get_length(input) > 0) {
    const size_t contiguous = evbuffer_get_contiguous_space(input);
    const auto* bytes =
        reinterpret_cast<const char*>(evbuffer_pullup(input, static_cast<ev_ssize_t>(contiguous)));
    const size_t taken = parser_.feed({bytes, contiguous});
    evbuffer_drain(input, taken);
    if (parser_.error_status() != 0) {
      answer_error(parser_.error_status(), parser_.error());
    } else if (parser_.complete()) {
      start_exchange();
    } else {
      if (parser_.take_continue()) {
        write("HTTP/1.1 100 Continue\r\n\r\n");
        flush_soon();
      }
      if (parser_.begun() && !std::exchange(timed_request_, true)) {
        set_timer(owner_.options().request_seconds);
      }
    }
  }
  parsing_ = false;
}

void HttpConnection::start_exchange() {
  state_ = State::answering;
  timed_request_ = false;
  evtimer_del(timer_);
  exchange_ = std::make_shared<HttpExchange>(*this, parser_.take());
  const std::shared_ptr<HttpExchange> exchange = exchange_;
  try {
    owner_.handle(exchange);
  } catch (const std::exception& error) {
    if (exchange->gone()) return;
    if (exchange->streams()) return close();
    respond(*exchange, {.status = 500, .body = owner_.error_body(500, error.what())});
  }
}

std::string HttpConnection::head(int status, std::string_view content_type, bool keep_alive) const {
  std::string text = fmt::format("HTTP/1.1 {} {}\r\nContent-Type: {}\r\n", status,
                                 reason_of(status), content_type);
  text += keep_alive ? "Connection: keep-alive\r\n" : "Connection: close\r\n";
  return text;
}

void HttpConnection::flush_soon() {
  if (!owner_.flushes_later(*this)) flush();
}

// Directly where nothing waits, since a client that reads has room: that is one call of the system,
// where waiting for room first would be three. What does not fit goes to the buffer, and so does
// what fails, for the buffer to find out.
void HttpConnection::flush() {
  if (state_ == State::closed || written_.empty()) return;
  size_t sent = 0;
  if (evbuffer_get_length(bufferevent_get_output(buffers_)) == 0) {
    const ssize_t count = ::send(bufferevent_getfd(buffers_), written_.data(), written_.size(),
                                 MSG_NOSIGNAL | MSG_DONTWAIT);
    if (count > 0) sent = static_cast<size_t>(count);
  }
  const bool kept =
      sent == written_.size() || evbuffer_add(bufferevent_get_output(buffers_),
                                              written_.data() + sent, written_.size() - sent) == 0;
  written_.clear();
  if (written_.capacity() > kInputBytes) written_.shrink_to_fit();
  if (!kept) throw std::bad_alloc();
  if (!has_output()) on_write(buffers_, this);
}

void HttpConnection::answer_error(int status, const std::string& message) {
  state_ = State::answering;
  const std::string body = owner_.error_body(status, message);
  write(head(status, "application/json", false));
  write(fmt::format("Content-Length: {}\r\n\r\n{}", body.size(), body));
  end();
  flush_soon();
}

void HttpConnection::respond(const HttpExchange& exchange, const HttpAnswer& answer) {
  const bool keep_alive = exchange.request().keep_alive && !owner_.draining();
  std::string text = head(answer.status, answer.content_type, keep_alive);
  for (const auto& [name, value] : answer.headers) text += fmt::format("{}: {}\r\n", name, value);
  text += fmt::format("Content-Length: {}\r\n\r\n", answer.body.size());
  write(text);
  if (exchange.request().method != "HEAD") write(answer.body);
  finish(keep_alive);
  flush_soon();
}

void HttpConnection::begin_stream(const HttpExchange& exchange, std::string_view content_type) {
  const bool chunked = !exchange.request().http10;
  keep_alive_ = chunked && exchange.request().keep_alive && !owner_.draining();
  std::string text = head(200, content_type, keep_alive_) + "Cache-Control: no-cache\r\n";
  if (chunked) text += "Transfer-Encoding: chunked\r\n";
  write(text + "\r\n");
  flush_soon();
}

bool HttpConnection::send(const HttpExchange& exchange, std::string_view piece) {
  if (piece.empty() || shut_) return !shut_;
  const size_t unread = evbuffer_get_length(bufferevent_get_output(buffers_)) + written_.size();
  if (unread + piece.size() > owner_.options().stream_bytes) {
    // Ends the connection from its own callback, since the caller may be anywhere.
    shut_ = true;
    set_timer(0);
    return false;
  }
  if (exchange.request().http10) {
    write(piece);
  } else {
    write(fmt::format("{:x}\r\n", piece.size()));
    write(piece);
    write("\r\n");
  }
  flush_soon();
  return true;
}

void HttpConnection::end_stream(const HttpExchange& exchange) {
  if (shut_) return;
  if (!exchange.request().http10) write("0\r\n\r\n");
  finish(keep_alive_);
  flush_soon();
}

void HttpConnection::finish(bool keep_alive) {
  if (exchange_) exchange_->connection_ = nullptr;
  exchange_.reset();
  if (!keep_alive) return end();
  state_ = State::reading;
  set_timer(owner_.options().idle_seconds);
  if (evbuffer_get_length(bufferevent_get_input(buffers_)) > 0) parse();
}

void HttpConnection::end() {
  state_ = State::ending;
  set_timer(owner_.options().write_seconds + kEndingSeconds);
  read();
  if (!has_output()) on_write(buffers_, this);
}

void HttpConnection::set_timer(double seconds) {
  const timeval time = time_of(seconds);
  evtimer_add(timer_, &time);
}

void HttpConnection::close_if_idle() {
  if (state_ == State::reading && !parser_.begun() && !has_output()) close();
}

void HttpConnection::close() {
  if (state_ == State::closed) return;
  state_ = State::closed;
  bufferevent_disable(buffers_, EV_READ | EV_WRITE);
  evtimer_del(timer_);
  if (const std::shared_ptr<HttpExchange> exchange = std::move(exchange_)) {
    exchange->connection_ = nullptr;
    if (const auto callback = std::move(exchange->on_gone_)) {
      try {
        callback();
      } catch (const std::exception&) {
        // Nobody is left to be told.
      }
    }
  }
  owner_.closed(*this);
}

bool HttpConnection::has_output() const {
  return !written_.empty() || evbuffer_get_length(bufferevent_get_output(buffers_)) > 0;
}

}  // namespace leeway
