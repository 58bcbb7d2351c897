// The control connections of a group: who is still there. A thread of its own sends and expects a
// word about once a second, so that a rank that computes for long is not taken for a lost one.
//
// Each rank has a connection to rank 0, which tells all others what it learns, and one to every
// other, so that a cut between two of them is noticed too. The first loss that rank 0 hears of is
// the one that everybody reports.
#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>
#include <optional>
#include <thread>

#include "ranks/rendezvous.h"

namespace leeway {

// How many collectives and messages a rank had made when it left. Calls that wait for a later one
// throw Lost.
struct Departure {
  uint64_t collectives = 0;
  std::vector<uint64_t> messages;  // sent by it, [to * channels + channel]
};

class GroupControl {
 public:
  // `changed` is called by a thread of this object after a loss, with its reason, and after each
  // departure.
  GroupControl(Party party, const RanksOptions& options,
               std::function<void(const std::string& lost)> changed);
  // Ends the connections. Those who did not hear of a departure take it for the end of the process.
  ~GroupControl();

  // A connection to a rank besides rank 0, where data goes.
  void add(int rank, FrameSocket socket);

  const std::vector<RankMember>& members() const { return members_; }
  const RankMember& member(int rank) const { return members_[static_cast<size_t>(rank)]; }
  // "rank 2 (host NAME, process 1234)"
  std::string name(int rank) const { return name_of(rank, member(rank)); }

  // What each rank brings, by rank. By rank 0, so for small things alone. Throws Lost.
  std::vector<std::string> gather(const std::string& own);

  // Why the group has ended; "" while it has not.
  std::string lost() const;
  // Waits for that, at most `seconds`.
  std::string wait_for_lost(double seconds) const;
  // Ends the group, unless it has ended: all ranks report `reason`. Returns when the others have
  // been told or cannot be.
  void lose(const std::string& reason);

  std::optional<Departure> departure(int rank) const;
  // Says that this rank leaves, and waits until all have left, at most `seconds`, or the group has
  // ended.
  void leave(const Departure& own, double seconds);

 private:
  using Clock = std::chrono::steady_clock;
  struct Link {
    FrameSocket socket;
    Clock::time_point heard;
  };

  void run();
  // Of the thread; they hold mutex_.
  void listen(int rank);
  void understand(int rank, const Frame& frame);
  void ended(int rank, const std::string& how);
  void check_silence(Clock::time_point now);
  void fail(const std::string& reason, int told_by);
  void note_departure(int rank, const std::string& payload);
  void send_to_all(const Frame& frame, int but);
  void finish_gather();
  bool flush_all();
  bool all_left() const;

  void wake() const;

  const int rank_, size_;
  const double link_timeout_;
  const Clock::duration beat_;
  const std::vector<RankMember> members_;
  const std::function<void(const std::string&)> changed_;

  mutable std::mutex mutex_;
  mutable std::condition_variable happened_;
  std::vector<Link> links_;
  std::string lost_;
  std::vector<std::optional<Departure>> departures_;
  std::vector<std::optional<std::string>> parts_;     // of a gathering, on rank 0
  std::optional<std::vector<std::string>> gathered_;  // for this rank to take
  bool unsent_ = false, stop_ = false, notify_ = false;
  Descriptor waker_;
  std::thread thread_;
};

}  // namespace leeway
