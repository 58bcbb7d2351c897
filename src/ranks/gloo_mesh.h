// Data connections between all ranks, by Gloo, and waits on them that a lost rank ends.
//
// Gloo by itself does not end all waits: one for a transfer that has begun when the other process
// dies goes on until its time-out, and a time-out closes all connections. So waits here have no
// time-out, and GroupControl says when they end.
#pragma once

#include <gloo/context.h>
#include <gloo/transport/unbound_buffer.h>
#include <signal.h>

#include <deque>
#include <functional>
#include <limits>
#include <list>
#include <memory>
#include <mutex>
#include <optional>

#include "ranks/control.h"
#include "ranks/ranks.h"

namespace leeway {

// While it exists a broken connection raises no SIGPIPE in this thread, and threads that it starts
// never get one: Gloo writes without MSG_NOSIGNAL.
class WithoutPipeSignal {
 public:
  WithoutPipeSignal();
  ~WithoutPipeSignal();
  WithoutPipeSignal(const WithoutPipeSignal&) = delete;
  WithoutPipeSignal& operator=(const WithoutPipeSignal&) = delete;

 private:
  sigset_t before_;
  bool pending_ = false;
};

inline constexpr uint64_t kNoNumber = std::numeric_limits<uint64_t>::max();

// What a wait is for, to be compared with what a rank had done when it left.
struct Purpose {
  int peer = -1;  // a message from this rank; -1: a collective
  Channel channel = Channel::training;
  uint64_t number = 0;  // of the message or the collective, from 1; kNoNumber: one that is sent
};

class Transfer;

class GlooMesh {
 public:
  // Meets all others and connects to each. `on_lost` is called by another thread, with the reason,
  // when the group has ended. Throws Error and Lost.
  GlooMesh(const RanksOptions& options, std::function<void(const std::string&)> on_lost);
  ~GlooMesh();

  GroupControl& control() { return *control_; }
  // Ends all waits of this rank, without telling others.
  void close();

 private:
  friend class Transfer;
  class Connections;

  // Why a wait with that purpose never ends, or "".
  std::string in_vain(const Purpose& purpose) const;
  void end_waits(bool lost);
  // Throws Lost with what in_vain says, which all others report too: a rank that left while it was
  // waited for is lost.
  [[noreturn]] void give_up(const Purpose& purpose);
  // A data connection broke. Its cause is known to the control connections, now or soon.
  [[noreturn]] void broke(const Purpose& purpose, const std::string& how);

  const int rank_, size_;
  const std::function<void(const std::string&)> on_lost_;
  std::mutex mutex_;
  std::list<Transfer*> waiting_;
  // Buffers that are done with. Gloo's thread may hold one for a moment more, and to destroy it
  // then is to spin until that thread runs again.
  std::deque<std::unique_ptr<gloo::transport::UnboundBuffer>> done_;
  bool closed_ = false, connecting_ = false;
  std::shared_ptr<Connections> connections_;
  std::unique_ptr<GroupControl> control_;
};

// Memory that is sent from or received into, piece by piece; one thread uses it. What was posted is
// waited for, unless an exception ends it all.
class Transfer {
 public:
  Transfer(GlooMesh& mesh, Purpose purpose, void* memory, size_t bytes);
  ~Transfer();
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;

  // Pieces between two ranks with the same `slot` are received in the order in which they were
  // sent; a piece has the same length on both sides, or more where it is received.
  void send(int to, uint64_t slot, size_t begin, size_t bytes);
  void receive(int from, uint64_t slot, size_t begin, size_t bytes);
  // Until one more piece was received, or all that were posted are sent.
  void wait_received();
  void wait_sent();

 private:
  friend class GlooMesh;
  GlooMesh& mesh_;
  const Purpose purpose_;
  std::unique_ptr<gloo::transport::UnboundBuffer> buffer_;
  size_t sending_ = 0, receiving_ = 0;  // pieces
  std::list<Transfer*>::iterator entry_;
};

}  // namespace leeway
