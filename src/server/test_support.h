// A server in this process and a plain client for it.
#pragma once

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/json.h"
#include "generate/test_support.h"
#include "server/server.h"

namespace leeway::testing {

struct HttpReply {
  int status = 0;  // 0: the connection ended without an answer
  std::string head, body;
};

// One connection. Every wait ends after a minute, as a failure.
class TestClient {
 public:
  explicit TestClient(int port) : socket_(::socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(::connect(socket_, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  }
  ~TestClient() { ::close(socket_); }
  TestClient(const TestClient&) = delete;
  TestClient& operator=(const TestClient&) = delete;

  // False: the server has closed.
  bool send(std::string_view bytes) {
    while (!bytes.empty()) {
      const ssize_t sent = ::send(socket_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (sent <= 0) return false;
      bytes.remove_prefix(static_cast<size_t>(sent));
    }
    return true;
  }
  // False at the end of the connection.
  bool read_some() {
    pollfd ready = {socket_, POLLIN, 0};
    if (::poll(&ready, 1, 60'000) <= 0) {
      ADD_FAILURE() << "no answer in a minute, after: " << read_;
      return false;
    }
    char bytes[65536];
    const ssize_t count = ::recv(socket_, bytes, sizeof bytes, 0);
    if (count <= 0) return false;
    read_.append(bytes, static_cast<size_t>(count));
    return true;
  }
  bool read_until(std::string_view text) {
    while (read_.find(text) == std::string::npos) {
      if (!read_some()) return false;
    }
    return true;
  }
  // The next answer, with chunks put together.
  HttpReply reply() {
    HttpReply result;
    if (!read_until("\r\n\r\n")) return result;
    const size_t end = read_.find("\r\n\r\n") + 4;
    result.head = read_.substr(0, end);
    read_.erase(0, end);
    result.status = std::stoi(result.head.substr(9, 3));
    if (result.head.find("Transfer-Encoding: chunked") != std::string::npos) {
      while (read_until("\r\n")) {
        const size_t size = std::stoul(read_, nullptr, 16), line = read_.find("\r\n") + 2;
        while (read_.size() < line + size + 2) {
          if (!read_some()) return result;
        }
        result.body += read_.substr(line, size);
        read_.erase(0, line + size + 2);
        if (size == 0) return result;
      }
      return result;
    }
    const size_t length = result.head.find("Content-Length: ");
    const size_t size = std::stoul(result.head.substr(length + 16));
    while (read_.size() < size) {
      if (!read_some()) return result;
    }
    result.body = read_.substr(0, size);
    read_.erase(0, size);
    return result;
  }
  HttpReply call(const std::string& method, const std::string& path, const std::string& body = "",
                 const std::string& headers = "") {
    send(method + " " + path + " HTTP/1.1\r\nHost: x\r\n" + headers +
         "Content-Length: " + std::to_string(body.size()) + "\r\n\r\n" + body);
    return reply();
  }
  HttpReply get(const std::string& path) { return call("GET", path); }
  HttpReply post(const std::string& path, const std::string& body) {
    return call("POST", path, body);
  }
  std::string& unread() { return read_; }
  int socket() const { return socket_; }

 private:
  int socket_;
  std::string read_;
};

inline ServedText byte_served_text() {
  ServedText served;
  served.text = std::make_unique<ModelText>(byte_text("qwen3"));
  served.chat = std::make_unique<ModelText>(byte_text("qwen3"));
  return served;
}

inline ServerOptions small_options() {
  ServerOptions options;
  options.folder = "model";
  options.name = "small";
  options.engine = one_thread();
  return options;
}

// Answers while it lives.
class RunningServer {
 public:
  explicit RunningServer(ServerOptions options = small_options(),
                         ServedText text = byte_served_text(), Parameters weights = byte_weights(1))
      : server(std::move(options), std::make_shared<const PolicySnapshot>(std::move(weights), 0),
               std::move(text)),
        thread_([this] { server.run(); }) {}
  ~RunningServer() { end(); }
  void end() {
    if (!thread_.joinable()) return;
    server.drain();
    thread_.join();
  }
  TestClient client() const { return TestClient(server.port()); }

  Server server;

 private:
  std::thread thread_;
};

inline rapidjson::Document parsed_json(const std::string& text) {
  rapidjson::Document document;
  document.Parse<rapidjson::kParseFullPrecisionFlag>(text.c_str());
  EXPECT_FALSE(document.HasParseError()) << text;
  if (document.HasParseError()) document.SetObject();
  return document;
}

// The events of a stream, which must end with [DONE].
inline std::vector<rapidjson::Document> events_of(const HttpReply& reply) {
  std::vector<rapidjson::Document> events;
  std::string_view rest = reply.body;
  bool done = false;
  while (!rest.empty()) {
    const size_t end = rest.find("\n\n");
    const std::string_view event = rest.substr(0, end);
    rest.remove_prefix(end == std::string_view::npos ? rest.size() : end + 2);
    EXPECT_TRUE(event.starts_with("data: ")) << event;
    EXPECT_FALSE(done) << "nothing follows [DONE]";
    if (event == "data: [DONE]") {
      done = true;
    } else {
      events.push_back(parsed_json(std::string(event.substr(6))));
    }
  }
  EXPECT_TRUE(done) << reply.body;
  return events;
}

// Waits for a condition that another thread brings about.
template <class Condition>
bool soon(const Condition& condition) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return true;
}

// The value of a metric, of the first line that has this text among its labels.
inline double metric_where(TestClient& client, const std::string& name, const std::string& label) {
  const std::string text = client.get("/metrics").body;
  for (size_t at = 0; (at = text.find("\n" + name + "{", at)) != std::string::npos; ++at) {
    const size_t end = text.find("} ", at);
    if (text.substr(at, end - at).find(label) == std::string::npos) continue;
    return std::stod(text.substr(end + 2));
  }
  return -1;
}

// The value of a metric without labels but model_name.
inline double metric(TestClient& client, const std::string& name) {
  return metric_where(client, name, "");
}

}  // namespace leeway::testing
