#include "server/http_server.h"

#include <event2/event.h>
#include <event2/listener.h>
#include <event2/util.h>
#include <fmt/format.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstring>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "leeway/error.h"
#include "server/http_connection.h"

namespace leeway {
namespace {

using SteadyClock = std::chrono::steady_clock;

// All addresses of the name, in the system's order.
struct Addresses {
  addrinfo* first = nullptr;
  ~Addresses() {
    if (first != nullptr) ::freeaddrinfo(first);
  }
};

int port_of(evutil_socket_t socket) {
  sockaddr_storage address = {};
  socklen_t size = sizeof address;
  if (::getsockname(socket, reinterpret_cast<sockaddr*>(&address), &size) != 0) return 0;
  return ntohs(address.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6&>(address).sin6_port
                                             : reinterpret_cast<sockaddr_in&>(address).sin_port);
}

void take_eight_bytes(int fd) {
  uint64_t count = 0;
  (void)!::read(fd, &count, sizeof count);
}

}  // namespace

struct HttpServer::Impl final : HttpConnectionOwner {
  struct Periodic {
    Impl* server;
    event* timer;
    std::function<bool()> function;
  };

  HttpOptions settings;
  Handler handler;
  ErrorBody body_of_error;
  event_base* events = nullptr;
  evconnlistener* listener = nullptr;
  event *wake = nullptr, *signalled = nullptr;
  int wake_fd = -1, signal_fd = -1, port = 0;
  std::function<void()> signal_callback;
  bool is_draining = false, stopping = false;
  SteadyClock::time_point stop_by;
  std::unordered_map<HttpConnection*, std::unique_ptr<HttpConnection>> open;
  std::vector<std::unique_ptr<HttpConnection>> gone;
  bool posting = false;                  // posted functions run
  std::vector<HttpConnection*> written;  // by them; a connection may be there twice
  std::vector<std::unique_ptr<Periodic>> periodic;

  std::mutex mutex;  // of the one that follows
  std::vector<std::function<void()>> posted;

  Impl(const HttpOptions& options, Handler handle_request, ErrorBody error_text)
      : settings(options),
        handler(std::move(handle_request)),
        body_of_error(std::move(error_text)) {}
  ~Impl() override;

  const HttpOptions& options() const override { return settings; }
  bool draining() const override { return is_draining; }
  void handle(std::shared_ptr<HttpExchange> exchange) override { handler(std::move(exchange)); }
  std::string error_body(int status, const std::string& message) const override {
    return body_of_error(status, message);
  }
  event_base* base() override { return events; }
  bool flushes_later(HttpConnection& connection) override {
    if (posting) written.push_back(&connection);
    return posting;
  }
  void closed(HttpConnection& connection) override;

  void start();
  void listen();
  void accept(evutil_socket_t socket);
  void run_posted();
  void awake();
};

HttpServer::Impl::~Impl() {
  open.clear();
  gone.clear();
  for (const auto& entry : periodic) event_free(entry->timer);
  if (listener != nullptr) evconnlistener_free(listener);
  if (wake != nullptr) event_free(wake);
  if (signalled != nullptr) event_free(signalled);
  if (events != nullptr) event_base_free(events);
  if (wake_fd >= 0) ::close(wake_fd);
  if (signal_fd >= 0) ::close(signal_fd);
}

void HttpServer::Impl::start() {
  events = event_base_new();
  wake_fd = ::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  signal_fd = ::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  if (events == nullptr || wake_fd < 0 || signal_fd < 0) {
    throw Error(fmt::format("serve: the system gives no event loop: {}", std::strerror(errno)));
  }
  const auto on_wake = [](evutil_socket_t fd, short, void* self) {
    take_eight_bytes(fd);
    static_cast<Impl*>(self)->run_posted();
  };
  const auto on_signal = [](evutil_socket_t fd, short, void* self) {
    take_eight_bytes(fd);
    auto* server = static_cast<Impl*>(self);
    if (server->signal_callback) server->signal_callback();
  };
  wake = event_new(events, wake_fd, EV_READ | EV_PERSIST, on_wake, this);
  signalled = event_new(events, signal_fd, EV_READ | EV_PERSIST, on_signal, this);
  event_add(wake, nullptr);
  event_add(signalled, nullptr);
  listen();
}

void HttpServer::Impl::listen() {
  addrinfo wanted = {};
  wanted.ai_flags = AI_PASSIVE;
  wanted.ai_socktype = SOCK_STREAM;
  Addresses found;
  const std::string service = std::to_string(settings.port);
  const int problem = ::getaddrinfo(settings.host.c_str(), service.c_str(), &wanted, &found.first);
  if (problem != 0) {
    throw Error(fmt::format("--host {}: {}", settings.host, ::gai_strerror(problem)));
  }
  const auto on_accept = [](evconnlistener*, evutil_socket_t socket, sockaddr*, int, void* self) {
    static_cast<Impl*>(self)->accept(socket);
  };
  int error = 0;
  for (const addrinfo* at = found.first; at != nullptr && listener == nullptr; at = at->ai_next) {
    listener = evconnlistener_new_bind(
        events, on_accept, this, LEV_OPT_CLOSE_ON_FREE | LEV_OPT_CLOSE_ON_EXEC | LEV_OPT_REUSEABLE,
        1024, at->ai_addr, static_cast<int>(at->ai_addrlen));
    if (listener == nullptr) error = errno;
  }
  if (listener == nullptr) {
    throw Error(fmt::format("--host {} --port {}: cannot listen there: {}", settings.host,
                            settings.port, std::strerror(error)));
  }
  port = port_of(evconnlistener_get_fd(listener));
  // Where no descriptor is left, accepting fails at once and again: a pause lets others end first.
  evconnlistener_set_error_cb(listener, [](evconnlistener*, void* self) {
    auto* server = static_cast<Impl*>(self);
    evconnlistener_disable(server->listener);
    const timeval pause = {0, 100'000};
    event_base_once(
        server->events, -1, EV_TIMEOUT,
        [](evutil_socket_t, short, void* again) {
          auto* owner = static_cast<Impl*>(again);
          if (owner->listener != nullptr) evconnlistener_enable(owner->listener);
        },
        server, &pause);
  });
}

void HttpServer::Impl::accept(evutil_socket_t socket) {
  if (static_cast<int64_t>(open.size()) >= settings.connections) {
    evutil_closesocket(socket);
    return;
  }
  try {
    auto connection = std::make_unique<HttpConnection>(*this, socket);
    HttpConnection* key = connection.get();
    open.emplace(key, std::move(connection));
  } catch (const std::exception&) {
    // Out of memory: this one is closed, the others go on.
  }
}

// Deleted from the loop, since the connection may be anywhere in its own functions now.
void HttpServer::Impl::closed(HttpConnection& connection) {
  const auto found = open.find(&connection);
  if (found == open.end()) return;
  gone.push_back(std::move(found->second));
  open.erase(found);
  awake();
}

void HttpServer::Impl::awake() {
  const uint64_t one = 1;
  (void)!::write(wake_fd, &one, sizeof one);
}

void HttpServer::Impl::run_posted() {
  gone.clear();
  std::vector<std::function<void()>> functions;
  {
    const std::lock_guard lock(mutex);
    std::swap(functions, posted);
  }
  // What is posted answers requests and reports its own errors; memory may still run out.
  const auto guarded = [](const auto& run) {
    try {
      run();
    } catch (const std::exception&) {
    }
  };
  posting = true;
  for (const auto& function : functions) guarded(function);
  posting = false;
  // Closed ones live until the next call of this function.
  for (HttpConnection* connection : std::exchange(written, {})) {
    guarded([&] { connection->flush(); });
  }
}

HttpServer::HttpServer(const HttpOptions& options, Handler handler, ErrorBody error_body)
    : impl_(std::make_unique<Impl>(options, std::move(handler), std::move(error_body))) {
  impl_->start();
}

HttpServer::~HttpServer() = default;

int HttpServer::port() const { return impl_->port; }

std::string HttpServer::url() const {
  const std::string& host = impl_->settings.host;
  const bool brackets = host.find(':') != std::string::npos;
  return fmt::format("http://{}{}{}:{}", brackets ? "[" : "", host, brackets ? "]" : "", port());
}

void HttpServer::run() {
  // A client that is gone must not end the program: writing to it is an error like any other.
  sigset_t pipe;
  sigemptyset(&pipe);
  sigaddset(&pipe, SIGPIPE);
  pthread_sigmask(SIG_BLOCK, &pipe, nullptr);
  event_base_loop(impl_->events, EVLOOP_NO_EXIT_ON_EMPTY);
}

void HttpServer::post(std::function<void()> function) {
  bool first = false;
  {
    const std::lock_guard lock(impl_->mutex);
    first = impl_->posted.empty();
    impl_->posted.push_back(std::move(function));
  }
  if (first) impl_->awake();
}

void HttpServer::drain() {
  if (impl_->is_draining) return;
  impl_->is_draining = true;
  evconnlistener_free(impl_->listener);
  impl_->listener = nullptr;
  std::vector<HttpConnection*> all;
  for (const auto& [connection, owned] : impl_->open) all.push_back(connection);
  for (HttpConnection* connection : all) connection->close_if_idle();
}

void HttpServer::stop(double seconds) {
  if (impl_->stopping) return;
  impl_->stopping = true;
  impl_->stop_by = SteadyClock::now() + std::chrono::duration_cast<SteadyClock::duration>(
                                            std::chrono::duration<double>(seconds));
  every(0.01, [this] {
    bool busy = false;
    for (const auto& [connection, owned] : impl_->open) busy = busy || connection->has_output();
    if (busy && SteadyClock::now() < impl_->stop_by) return true;
    event_base_loopbreak(impl_->events);
    return false;
  });
}

int HttpServer::signal_fd() const { return impl_->signal_fd; }

void HttpServer::on_signal(std::function<void()> callback) {
  impl_->signal_callback = std::move(callback);
}

void HttpServer::every(double seconds, std::function<bool()> function) {
  auto entry = std::make_unique<Impl::Periodic>();
  entry->server = impl_.get();
  entry->function = std::move(function);
  const auto fire = [](evutil_socket_t, short, void* self) {
    auto* own = static_cast<Impl::Periodic*>(self);
    if (!own->function()) event_del(own->timer);
  };
  entry->timer = event_new(impl_->events, -1, EV_PERSIST, fire, entry.get());
  const timeval time = {static_cast<time_t>(seconds),
                        static_cast<suseconds_t>(
                            (seconds - static_cast<double>(static_cast<time_t>(seconds))) * 1e6)};
  event_add(entry->timer, &time);
  impl_->periodic.push_back(std::move(entry));
}

int64_t HttpServer::connections() const { return static_cast<int64_t>(impl_->open.size()); }

void HttpExchange::respond(const HttpAnswer& answer) {
  if (connection_ != nullptr) connection_->respond(*this, answer);
}

void HttpExchange::begin_stream(std::string_view content_type) {
  streams_ = true;
  if (connection_ != nullptr) connection_->begin_stream(*this, content_type);
}

bool HttpExchange::send(std::string_view piece) {
  return connection_ != nullptr && connection_->send(*this, piece);
}

void HttpExchange::end_stream() {
  if (connection_ != nullptr) connection_->end_stream(*this);
}

}  // namespace leeway
