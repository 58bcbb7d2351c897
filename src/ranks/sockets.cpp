#include "ranks/sockets.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <memory>

#include "leeway/error.h"

namespace leeway {
namespace {

constexpr std::string_view kMagic = "LWR";
constexpr size_t kHeader = 8;   // magic, kind, length
constexpr int kWaiting = 1024;  // connections that wait to be accepted

struct FreeAddresses {
  void operator()(addrinfo* list) const { ::freeaddrinfo(list); }
};
using Addresses = std::unique_ptr<addrinfo, FreeAddresses>;

Addresses resolve(const std::string& address, int port, int flags, std::string& problem) {
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags | AI_NUMERICSERV;
  addrinfo* list = nullptr;
  const int rc = ::getaddrinfo(address.empty() ? nullptr : address.c_str(),
                               std::to_string(port).c_str(), &hints, &list);
  if (rc != 0) problem = rc == EAI_SYSTEM ? std::strerror(errno) : ::gai_strerror(rc);
  return Addresses(rc == 0 ? list : nullptr);
}

// An IPv4 address that a socket for both families has is written as IPv4.
std::string text_of(const sockaddr_storage& address) {
  std::array<char, INET6_ADDRSTRLEN> text = {};
  if (address.ss_family == AF_INET) {
    const auto& four = reinterpret_cast<const sockaddr_in&>(address);
    ::inet_ntop(AF_INET, &four.sin_addr, text.data(), text.size());
  } else if (address.ss_family == AF_INET6) {
    const auto& six = reinterpret_cast<const sockaddr_in6&>(address);
    if (IN6_IS_ADDR_V4MAPPED(&six.sin6_addr)) {
      ::inet_ntop(AF_INET, six.sin6_addr.s6_addr + 12, text.data(), text.size());
    } else {
      ::inet_ntop(AF_INET6, &six.sin6_addr, text.data(), text.size());
    }
  }
  return text.data();
}

void set_option(int socket, int level, int option, int value) {
  ::setsockopt(socket, level, option, &value, sizeof value);
}

Descriptor try_to_listen(const addrinfo& at, std::string& problem) {
  Descriptor socket(::socket(at.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (socket.open()) {
    set_option(socket.get(), SOL_SOCKET, SO_REUSEADDR, 1);
    if (at.ai_family == AF_INET6) set_option(socket.get(), IPPROTO_IPV6, IPV6_V6ONLY, 0);
    if (::bind(socket.get(), at.ai_addr, at.ai_addrlen) == 0 &&
        ::listen(socket.get(), kWaiting) == 0) {
      return socket;
    }
  }
  problem = std::strerror(errno);
  return Descriptor();
}

}  // namespace

void Descriptor::close() {
  if (number_ >= 0) ::close(number_);
  number_ = -1;
}

bool is_loopback(const std::string& address) {
  return address.starts_with("127.") || address == "::1" || address == "localhost";
}

Descriptor listen_at(const std::string& address, int port) {
  std::string problem;
  const Addresses list = resolve(is_loopback(address) ? address : "", port, AI_PASSIVE, problem);
  // IPv6 first, for it takes IPv4 too.
  for (const int family : {AF_INET6, AF_INET}) {
    for (const addrinfo* at = list.get(); at != nullptr; at = at->ai_next) {
      if (at->ai_family != family) continue;
      Descriptor socket = try_to_listen(*at, problem);
      if (socket.open()) return socket;
    }
  }
  throw Error(fmt::format(
      "cannot listen at {}, port {}: {}; another port for all ranks: LEEWAY_PORT=NUMBER", address,
      port, problem));
}

int port_of(const Descriptor& socket) {
  sockaddr_storage address = {};
  socklen_t length = sizeof address;
  ::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&address), &length);
  return ntohs(address.ss_family == AF_INET6
                   ? reinterpret_cast<const sockaddr_in6&>(address).sin6_port
                   : reinterpret_cast<const sockaddr_in&>(address).sin_port);
}

Descriptor accept_from(const Descriptor& listener) {
  return Descriptor(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
}

Descriptor connect_to(const std::string& address, int port, double seconds, std::string& problem) {
  const Addresses list = resolve(address, port, 0, problem);
  for (const addrinfo* at = list.get(); at != nullptr; at = at->ai_next) {
    Descriptor socket(::socket(at->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!socket.open()) {
      problem = std::strerror(errno);
      continue;
    }
    int error = 0;
    if (::connect(socket.get(), at->ai_addr, at->ai_addrlen) != 0) error = errno;
    if (error == EINPROGRESS) {
      pollfd ready = {.fd = socket.get(), .events = POLLOUT, .revents = 0};
      error = ETIMEDOUT;
      if (::poll(&ready, 1, static_cast<int>(seconds * 1000)) == 1) {
        socklen_t length = sizeof error;
        ::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &length);
      }
    }
    // A connection to a free port of one's own host can meet itself.
    if (error == 0 && port_of(socket) == port && own_address(socket) == peer_address(socket)) {
      error = ECONNREFUSED;
    }
    if (error == 0) return socket;
    problem = std::strerror(error);
  }
  return Descriptor();
}

std::string own_address(const Descriptor& socket) {
  sockaddr_storage address = {};
  socklen_t length = sizeof address;
  ::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&address), &length);
  return text_of(address);
}

std::string peer_address(const Descriptor& socket) {
  sockaddr_storage address = {};
  socklen_t length = sizeof address;
  ::getpeername(socket.get(), reinterpret_cast<sockaddr*>(&address), &length);
  return text_of(address);
}

FrameSocket::FrameSocket(Descriptor socket, size_t longest)
    : socket_(std::move(socket)), longest_(longest) {
  set_option(socket_.get(), IPPROTO_TCP, TCP_NODELAY, 1);
}

bool FrameSocket::receive() {
  std::array<char, 1 << 16> buffer;
  while (socket_.open()) {
    const ssize_t got = ::recv(socket_.get(), buffer.data(), buffer.size(), MSG_DONTWAIT);
    if (got > 0) {
      received_.append(buffer.data(), static_cast<size_t>(got));
      // What is too long is not kept: the header alone tells.
      if (received_.size() > longest_ + kHeader) break;
      continue;
    }
    if (got < 0 && errno == EINTR) continue;
    return got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK);
  }
  return socket_.open();
}

std::optional<Frame> FrameSocket::next() {
  const size_t known = std::min(received_.size(), kMagic.size());
  if (garbage_ || received_.substr(0, known) != kMagic.substr(0, known)) {
    garbage_ = true;
    return std::nullopt;
  }
  if (received_.size() < kHeader) return std::nullopt;
  uint32_t length = 0;
  std::memcpy(&length, received_.data() + 4, sizeof length);
  if (length > longest_) {
    garbage_ = true;
    return std::nullopt;
  }
  if (received_.size() < kHeader + length) return std::nullopt;
  Frame frame{.kind = static_cast<FrameKind>(received_[3]),
              .payload = received_.substr(kHeader, length)};
  received_.erase(0, kHeader + length);
  return frame;
}

void FrameSocket::queue(const Frame& frame) {
  const auto length = static_cast<uint32_t>(frame.payload.size());
  unsent_ += kMagic;
  unsent_ += static_cast<char>(frame.kind);
  unsent_.append(reinterpret_cast<const char*>(&length), sizeof length);
  unsent_ += frame.payload;
}

bool FrameSocket::flush() {
  size_t done = 0;
  bool whole = true;
  while (whole && done < unsent_.size()) {
    const ssize_t put = ::send(socket_.get(), unsent_.data() + done, unsent_.size() - done,
                               MSG_DONTWAIT | MSG_NOSIGNAL);
    if (put > 0) {
      done += static_cast<size_t>(put);
    } else if (errno != EINTR) {
      whole = errno != EAGAIN && errno != EWOULDBLOCK;
      if (whole) return false;
    }
  }
  unsent_.erase(0, done);
  return true;
}

void FrameSocket::finish() { ::shutdown(socket_.get(), SHUT_WR); }

FrameWriter& FrameWriter::number(uint64_t value) {
  out_.append(reinterpret_cast<const char*>(&value), sizeof value);
  return *this;
}

FrameWriter& FrameWriter::text(std::string_view value) {
  number(value.size());
  out_ += value;
  return *this;
}

uint64_t FrameReader::number() {
  uint64_t value = 0;
  if (failed_ || rest_.size() < sizeof value) {
    failed_ = true;
    return 0;
  }
  std::memcpy(&value, rest_.data(), sizeof value);
  rest_.remove_prefix(sizeof value);
  return value;
}

std::string FrameReader::text() {
  const uint64_t length = number();
  if (failed_ || rest_.size() < length) {
    failed_ = true;
    return "";
  }
  std::string value(rest_.substr(0, length));
  rest_.remove_prefix(length);
  return value;
}

}  // namespace leeway
