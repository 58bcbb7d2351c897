// A program for tests: it stands between a pool and a server, and spoils what passes, by a seed.
//
//   fault_proxy PORT UPSTREAM_PORT SEED SHARE ADMIN_SHARE
//
// It listens on a port of loopback (0: a free one) and says so on stdout. SHARE of the requests for
// samples, and ADMIN_SHARE of all others, meet a fault; the others reach the server on
// UPSTREAM_PORT and come back as they are. A thread per connection: it is no server for anything
// else.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <random>
#include <string>
#include <thread>

namespace {

enum class Fault {
  none,
  status_500,
  truncated_json,  // well-formed HTTP
  cut_body,        // the connection ends before the last byte that was announced
  wrong_ids,       // outside every vocabulary
  nan_logprob,
  wrong_version,  // another one than the server has
  reset,          // before the request reaches the server
  reset_after,    // when the server has answered
  slow_bytes,     // a byte now and then, for ever
  no_answer,      // the connection stays open
  headers_only,   // and so it does after the headers
};
constexpr int kFaults = 12;

struct Options {
  int upstream = 0;
  double share = 0.0, admin_share = 0.0;
};

class Proxy {
 public:
  Proxy(Options options, uint64_t seed) : options_(options), random_(seed) {}

  void serve(int client) {
    std::string buffer;
    while (one_request(client, buffer)) {
    }
    ::close(client);
  }

 private:
  Fault draw(bool generates) {
    const std::lock_guard lock(mutex_);
    const double share = generates ? options_.share : options_.admin_share;
    if (std::uniform_real_distribution<double>(0.0, 1.0)(random_) >= share) return Fault::none;
    return static_cast<Fault>(1 + random_() % (kFaults - 1));
  }

  static size_t content_length(const std::string& head) {
    for (const char* name : {"Content-Length:", "content-length:"}) {
      const size_t at = head.find(name);
      if (at != std::string::npos) return std::strtoul(head.c_str() + at + 15, nullptr, 10);
    }
    return 0;
  }

  static bool read_some(int socket, std::string& into) {
    char bytes[1 << 14];
    const ssize_t got = ::recv(socket, bytes, sizeof bytes, 0);
    if (got <= 0) return false;
    into.append(bytes, static_cast<size_t>(got));
    return true;
  }

  static bool write_all(int socket, const std::string& text) {
    for (size_t sent = 0; sent < text.size();) {
      const ssize_t now = ::send(socket, text.data() + sent, text.size() - sent, MSG_NOSIGNAL);
      if (now <= 0) return false;
      sent += static_cast<size_t>(now);
    }
    return true;
  }

  static void wait_for_end(int socket) {
    std::string ignored;
    while (read_some(socket, ignored)) ignored.clear();
  }

  static bool reset_now(int socket) {
    const linger at_once{1, 0};
    ::setsockopt(socket, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
    return false;
  }

  // The server's whole answer; empty if it has none or the client leaves.
  std::string ask_server(int client, const std::string& head, const std::string& body) const {
    const int server = ::socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(options_.upstream));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    std::string answer;
    const std::string request =
        head.substr(0, head.size() - 2) + "Connection: close\r\n\r\n" + body;
    if (::connect(server, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0 &&
        write_all(server, request)) {
      while (true) {
        pollfd both[2] = {{server, POLLIN, 0}, {client, POLLRDHUP, 0}};
        if (::poll(both, 2, -1) < 0) break;
        if (both[1].revents != 0) {
          answer.clear();
          break;
        }
        if (!read_some(server, answer)) break;
      }
    }
    ::close(server);
    return answer;
  }

  static std::string with_length(const std::string& status, const std::string& body) {
    return status +
           "\r\nContent-Type: application/json\r\nContent-Length: " + std::to_string(body.size()) +
           "\r\n\r\n" + body;
  }

  static void replace(std::string& text, const std::string& what, const std::string& with) {
    const size_t at = text.find(what);
    if (at != std::string::npos) text.replace(at, what.size(), with);
  }

  // False: the connection is over.
  bool one_request(int client, std::string& buffer) {
    size_t end;
    while ((end = buffer.find("\r\n\r\n")) == std::string::npos) {
      if (!read_some(client, buffer)) return false;
    }
    const std::string head = buffer.substr(0, end + 4);
    const size_t length = content_length(head);
    while (buffer.size() < head.size() + length) {
      if (!read_some(client, buffer)) return false;
    }
    const std::string body = buffer.substr(head.size(), length);
    buffer.erase(0, head.size() + length);
    const Fault fault = draw(head.find("generate") < head.find("\r\n"));
    if (fault == Fault::reset) return reset_now(client);
    if (fault == Fault::no_answer) {
      wait_for_end(client);
      return false;
    }
    const std::string answer = ask_server(client, head, body);
    const size_t split = answer.find("\r\n\r\n");
    if (split == std::string::npos) return reset_now(client);
    const std::string status = answer.substr(0, answer.find("\r\n"));
    std::string json = answer.substr(split + 4);
    std::string out;
    switch (fault) {
      case Fault::status_500:
        return write_all(client, with_length("HTTP/1.1 500 Internal Server Error",
                                             R"({"error":{"message":"a fault of the proxy"}})"));
      case Fault::truncated_json: json.resize(json.size() / 2); break;
      case Fault::wrong_ids: replace(json, "\"token_ids\": [", "\"token_ids\": [99999999,"); break;
      case Fault::nan_logprob:
        for (size_t at = 0; (at = json.find("\"logprob\": ", at)) != std::string::npos; ++at) {
          json.replace(at + 11, json.find('}', at) - at - 11, "NaN");
        }
        break;
      case Fault::wrong_version:
        replace(json, "\"versions\": [", "\"versions\": [1000000");
        replace(json, "\"version\": ", "\"version\": 7");
        break;
      case Fault::reset_after: return reset_now(client);
      case Fault::cut_body:
        out = with_length(status, json);
        write_all(client, out.substr(0, out.size() - std::min<size_t>(8, json.size())));
        return false;
      case Fault::headers_only:
        out = with_length(status, json);
        write_all(client, out.substr(0, out.size() - json.size()));
        wait_for_end(client);
        return false;
      case Fault::slow_bytes:
        out = with_length(status, json);
        for (char byte : out) {
          if (!write_all(client, std::string(1, byte))) return false;
          std::this_thread::sleep_for(std::chrono::milliseconds(20));
        }
        return true;
      default: break;
    }
    return write_all(client, with_length(status, json));
  }

  Options options_;
  std::mutex mutex_;
  std::mt19937_64 random_;
};

}  // namespace

int main(int count, char** words) {
  if (count != 6) {
    std::fprintf(stderr, "fault_proxy PORT UPSTREAM_PORT SEED SHARE ADMIN_SHARE\n");
    return 2;
  }
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  const int listener = ::socket(AF_INET, SOCK_STREAM, 0);
  const int on = 1;
  ::setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(std::atoi(words[1])));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  if (::bind(listener, reinterpret_cast<sockaddr*>(&address), size) != 0 ||
      ::listen(listener, 256) != 0) {
    std::perror("fault_proxy");
    return 1;
  }
  ::getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size);
  std::printf("listening on http://127.0.0.1:%d\n", ntohs(address.sin_port));
  std::fflush(stdout);
  Proxy proxy({std::atoi(words[2]), std::atof(words[4]), std::atof(words[5])},
              std::strtoull(words[3], nullptr, 10));
  while (true) {
    const int client = ::accept(listener, nullptr, nullptr);
    if (client >= 0) std::thread([&proxy, client] { proxy.serve(client); }).detach();
  }
}
