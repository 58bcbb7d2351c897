// A fake model behind a port of loopback, for tests.
#pragma once

#include <event2/buffer.h>
#include <event2/event.h>
#include <event2/http.h>
#include <event2/thread.h>
#include <fmt/format.h>
#include <sys/socket.h>

#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "leeway/error.h"
#include "pool/fake_model.h"

namespace leeway::testing {

// On a thread of its own.
class HttpFakeServer {
 public:
  explicit HttpFakeServer(int port = 0) {
    evthread_use_pthreads();
    base_ = event_base_new();
    http_ = evhttp_new(base_);
    evhttp_set_allowed_methods(http_, EVHTTP_REQ_GET | EVHTTP_REQ_POST);
    evhttp_set_gencb(
        http_,
        [](evhttp_request* request, void* self) {
          static_cast<HttpFakeServer*>(self)->handle(request);
        },
        this);
    evhttp_bound_socket* socket =
        evhttp_bind_socket_with_handle(http_, "127.0.0.1", static_cast<uint16_t>(port));
    LEEWAY_CHECK(socket != nullptr, "a port of loopback");
    sockaddr_storage address{};
    socklen_t size = sizeof address;
    getsockname(evhttp_bound_socket_get_fd(socket), reinterpret_cast<sockaddr*>(&address), &size);
    port_ = ntohs(reinterpret_cast<const sockaddr_in*>(&address)->sin_port);
    thread_ = std::thread([this] { event_base_loop(base_, EVLOOP_NO_EXIT_ON_EMPTY); });
  }
  ~HttpFakeServer() {
    // An event of the loop itself: a break that comes before the thread has begun would be lost.
    event_base_loopexit(base_, nullptr);
    thread_.join();
    evhttp_free(http_);
    event_base_free(base_);
  }
  HttpFakeServer(const HttpFakeServer&) = delete;
  HttpFakeServer& operator=(const HttpFakeServer&) = delete;

  int port() const { return port_; }
  std::string url() const { return fmt::format("http://127.0.0.1:{}", port_); }
  // Works with the model while the server does not.
  template <class Work>
  auto with(const Work& work) {
    const std::lock_guard lock(mutex_);
    return work(model_);
  }
  std::vector<std::string> headers;  // "Authorization" of the last call; under the lock

 private:
  void handle(evhttp_request* request) {
    std::string body;
    evbuffer* input = evhttp_request_get_input_buffer(request);
    body.resize(evbuffer_get_length(input));
    evbuffer_remove(input, body.data(), body.size());
    FakeAnswer answer;
    {
      const std::lock_guard lock(mutex_);
      const char* key =
          evhttp_find_header(evhttp_request_get_input_headers(request), "Authorization");
      headers = {key == nullptr ? "" : key};
      answer = model_.answer(evhttp_request_get_uri(request), body);
    }
    if (answer.silent) return;
    if (answer.reset) {
      evhttp_connection_free(evhttp_request_get_connection(request));
      return;
    }
    evkeyvalq* out = evhttp_request_get_output_headers(request);
    if (answer.truncated) {
      evhttp_add_header(out, "Content-Length", std::to_string(answer.body.size() + 100).c_str());
      evhttp_add_header(out, "Connection", "close");
    }
    evbuffer* buffer = evbuffer_new();
    evbuffer_add(buffer, answer.body.data(), answer.body.size());
    evhttp_send_reply(request, answer.status, "status", buffer);
    evbuffer_free(buffer);
  }

  event_base* base_ = nullptr;
  evhttp* http_ = nullptr;
  int port_ = 0;
  std::mutex mutex_;
  FakeModel model_;
  std::thread thread_;
};

}  // namespace leeway::testing
