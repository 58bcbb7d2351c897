// TCP sockets for the control connections of ranks: addresses as text, frames with a kind and a
// length. Nothing here waits, except where a limit is given.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace leeway {

// Owns a descriptor.
class Descriptor {
 public:
  explicit Descriptor(int number = -1) : number_(number) {}
  ~Descriptor() { close(); }
  Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }
  void close();
  int release() { return std::exchange(number_, -1); }
  int get() const { return number_; }
  bool open() const { return number_ >= 0; }

 private:
  int number_;
};

// A socket that listens at `address`: there alone if that is loopback, else at all addresses of
// this host, which may know itself under another one than the others. Port 0: any that is free.
// Throws Error.
Descriptor listen_at(const std::string& address, int port);
// The port that a socket listens at.
int port_of(const Descriptor& socket);
// The next connection, or none.
Descriptor accept_from(const Descriptor& listener);
// One attempt to connect, at most `seconds` long; if it fails, `problem` says why.
Descriptor connect_to(const std::string& address, int port, double seconds, std::string& problem);

// The addresses of a connection's ends, without ports: "10.0.0.1".
std::string own_address(const Descriptor& socket);
std::string peer_address(const Descriptor& socket);
bool is_loopback(const std::string& address);

// One kind of frame per purpose; see rendezvous.cpp and control.cpp.
enum class FrameKind : char {
  hello = 'h',
  refusal = 'r',
  members = 'm',
  part = 'p',
  gathered = 'g',
  beat = 'b',
  lost = 'l',
  leave = 'e',
};

struct Frame {
  FrameKind kind = FrameKind::beat;
  std::string payload;
};

// A connection that carries frames both ways, each with a magic word, its kind and its length.
class FrameSocket {
 public:
  FrameSocket() = default;
  // `longest`: a frame with more bytes ends the connection.
  FrameSocket(Descriptor socket, size_t longest);

  const Descriptor& socket() const { return socket_; }
  void allow(size_t longest) { longest_ = longest; }
  bool open() const { return socket_.open(); }
  void close() { socket_.close(); }

  // Reads what has arrived. False: the other end has closed, or what came is no frame (`garbage`).
  // Frames that came before that are still to be taken.
  bool receive();
  bool garbage() const { return garbage_; }
  std::optional<Frame> next();

  void queue(const Frame& frame);
  // Writes what can be written now. False: the connection is broken.
  bool flush();
  bool unsent() const { return !unsent_.empty(); }
  // No more will be written; the other end sees that after what was.
  void finish();

 private:
  Descriptor socket_;
  size_t longest_ = 0;
  bool garbage_ = false;
  std::string received_, unsent_;
};

// Numbers and texts in a frame's payload, in one order that writer and reader share.
class FrameWriter {
 public:
  FrameWriter& number(uint64_t value);
  FrameWriter& text(std::string_view value);
  std::string take() { return std::move(out_); }

 private:
  std::string out_;
};

class FrameReader {
 public:
  explicit FrameReader(std::string_view payload) : rest_(payload) {}
  uint64_t number();
  std::string text();
  // Whether all was there and nothing is left.
  bool complete() const { return !failed_ && rest_.empty(); }

 private:
  std::string_view rest_;
  bool failed_ = false;
};

}  // namespace leeway
