#include "ranks/control.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>

#include "base/printable.h"
#include "base/start_thread.h"
#include "ranks/ranks.h"

namespace leeway {
namespace {

constexpr double kLongestBeat = 1.0;  // seconds between two words
constexpr double kTellTime = 2.0;     // seconds for others to be told of a loss
constexpr double kCloseTime = 1.0;    // seconds for others to close after one

std::chrono::steady_clock::duration seconds_of(double seconds) {
  return std::chrono::duration_cast<std::chrono::steady_clock::duration>(
      std::chrono::duration<double>(seconds));
}

}  // namespace

GroupControl::GroupControl(Party party, const RanksOptions& options,
                           std::function<void(const std::string& lost)> changed)
    : rank_(options.rank),
      size_(options.size),
      link_timeout_(options.link_timeout),
      beat_(seconds_of(std::min(kLongestBeat, options.link_timeout / 5))),
      members_(std::move(party.members)),
      changed_(std::move(changed)),
      departures_(static_cast<size_t>(options.size)),
      parts_(static_cast<size_t>(options.size)),
      waker_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  for (FrameSocket& socket : party.links) {
    links_.push_back({.socket = std::move(socket), .heard = Clock::now()});
  }
  thread_ = start_thread([this] { run(); });
}

GroupControl::~GroupControl() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake();
  thread_.join();
}

void GroupControl::add(int rank, FrameSocket socket) {
  const std::lock_guard lock(mutex_);
  links_[static_cast<size_t>(rank)] = {.socket = std::move(socket), .heard = Clock::now()};
  wake();
}

void GroupControl::wake() const {
  const uint64_t one = 1;
  (void)!::write(waker_.get(), &one, sizeof one);
}

std::vector<std::string> GroupControl::gather(const std::string& own) {
  std::unique_lock lock(mutex_);
  if (rank_ == 0) {
    parts_[0] = own;
    finish_gather();
  } else if (links_[0].socket.open()) {
    links_[0].socket.queue({.kind = FrameKind::part, .payload = own});
  }
  wake();
  happened_.wait(lock, [&] { return gathered_.has_value() || !lost_.empty(); });
  if (!gathered_) throw Lost(lost_);
  std::vector<std::string> all = std::move(*gathered_);
  gathered_.reset();
  return all;
}

std::string GroupControl::lost() const {
  const std::lock_guard lock(mutex_);
  return lost_;
}

std::string GroupControl::wait_for_lost(double seconds) const {
  std::unique_lock lock(mutex_);
  happened_.wait_for(lock, seconds_of(seconds), [&] { return !lost_.empty(); });
  return lost_;
}

void GroupControl::lose(const std::string& reason) {
  std::unique_lock lock(mutex_);
  if (lost_.empty()) fail(reason, rank_);
  unsent_ = true;
  wake();
  happened_.wait_for(lock, seconds_of(kTellTime), [&] { return !unsent_; });
}

std::optional<Departure> GroupControl::departure(int rank) const {
  const std::lock_guard lock(mutex_);
  return departures_[static_cast<size_t>(rank)];
}

void GroupControl::leave(const Departure& own, double seconds) {
  FrameWriter payload;
  payload.number(static_cast<uint64_t>(rank_)).number(own.collectives);
  for (const uint64_t count : own.messages) payload.number(count);
  std::unique_lock lock(mutex_);
  departures_[static_cast<size_t>(rank_)] = own;
  send_to_all({.kind = FrameKind::leave, .payload = payload.take()}, rank_);
  unsent_ = true;
  wake();
  happened_.wait_for(lock, seconds_of(seconds), [&] { return all_left() || !lost_.empty(); });
  happened_.wait_for(lock, seconds_of(kTellTime), [&] { return !unsent_; });
}

bool GroupControl::all_left() const {
  return std::all_of(departures_.begin(), departures_.end(),
                     [](const auto& each) { return each.has_value(); });
}

// ---------------------------------------------------------------------------------------------
// The thread

void GroupControl::run() {
  std::unique_lock lock(mutex_);
  Clock::time_point next_beat = Clock::now(), seen = Clock::now(), close_end = {};
  while (true) {
    const Clock::time_point now = Clock::now();
    // Whoever stood still itself has no right to call the others silent.
    if (now - seen > 2 * beat_) {
      for (Link& link : links_) link.heard = now;
    }
    seen = now;
    if (now >= next_beat && !stop_) {
      send_to_all({.kind = FrameKind::beat}, rank_);
      next_beat = now + beat_;
    }
    for (int r = 0; r < size_; ++r) listen(r);
    check_silence(now);
    const bool flushed = flush_all();
    if (flushed && unsent_) {
      unsent_ = false;
      happened_.notify_all();
    }
    if (notify_) {
      notify_ = false;
      happened_.notify_all();
      const std::string lost = lost_;
      lock.unlock();
      changed_(lost);
      lock.lock();
    }
    if (stop_) {
      // What was said last arrives only if the others' words were read until they close.
      if (close_end == Clock::time_point()) close_end = now + seconds_of(kCloseTime);
      for (Link& link : links_) {
        if (link.socket.open() && !link.socket.unsent()) link.socket.finish();
      }
      const bool open = std::any_of(links_.begin(), links_.end(),
                                    [](const Link& link) { return link.socket.open(); });
      if (!open || now >= close_end) return;
    }
    std::vector<pollfd> waiting = {{.fd = waker_.get(), .events = POLLIN, .revents = 0}};
    for (const Link& link : links_) {
      if (!link.socket.open()) continue;
      waiting.push_back(
          {.fd = link.socket.socket().get(),
           .events = static_cast<short>(link.socket.unsent() ? POLLIN | POLLOUT : POLLIN),
           .revents = 0});
    }
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        (stop_ ? close_end : next_beat) - now);
    const int wait = static_cast<int>(std::max<int64_t>(left.count() + 1, 0));
    lock.unlock();
    ::poll(waiting.data(), waiting.size(), wait);
    uint64_t woken = 0;
    (void)!::read(waker_.get(), &woken, sizeof woken);
    lock.lock();
  }
}

void GroupControl::listen(int rank) {
  Link& link = links_[static_cast<size_t>(rank)];
  if (!link.socket.open()) return;
  const bool open = link.socket.receive();
  while (const auto frame = link.socket.next()) {
    link.heard = Clock::now();
    understand(rank, *frame);
  }
  if (link.socket.garbage()) {
    ended(rank, "it sent what is not understood");
  } else if (!open) {
    ended(rank, "its process ended");
  }
}

void GroupControl::understand(int rank, const Frame& frame) {
  switch (frame.kind) {
    case FrameKind::beat: break;
    case FrameKind::lost: fail(printable(frame.payload), rank); break;
    case FrameKind::leave: note_departure(rank, frame.payload); break;
    case FrameKind::part:
      if (rank_ == 0) {
        parts_[static_cast<size_t>(rank)] = frame.payload;
        finish_gather();
      }
      break;
    case FrameKind::gathered: {
      FrameReader reader(frame.payload);
      std::vector<std::string> all;
      for (int r = 0; r < size_; ++r) all.push_back(reader.text());
      if (!reader.complete() || rank != 0) return ended(rank, "it sent what is not understood");
      gathered_ = std::move(all);
      happened_.notify_all();
      break;
    }
    default: ended(rank, "it sent what is not understood");
  }
}

void GroupControl::finish_gather() {
  if (std::any_of(parts_.begin(), parts_.end(), [](const auto& part) { return !part; })) return;
  FrameWriter all;
  gathered_.emplace();
  for (auto& part : parts_) {
    all.text(*part);
    gathered_->push_back(std::move(*part));
    part.reset();
  }
  send_to_all({.kind = FrameKind::gathered, .payload = all.take()}, rank_);
  happened_.notify_all();
}

// The connection to `rank` is of no more use.
void GroupControl::ended(int rank, const std::string& how) {
  links_[static_cast<size_t>(rank)].socket.close();
  if (stop_) return;
  const bool expected = departures_[static_cast<size_t>(rank)].has_value();
  // A rank that said goodbye is no loss. Rank 0 is, while others are still there: it is the one
  // that tells them about further losses.
  if (expected && (rank != 0 || all_left())) return;
  fail(fmt::format("{}: {}", name(rank), expected ? "left the group" : how), rank);
}

void GroupControl::check_silence(Clock::time_point now) {
  for (int r = 0; r < size_; ++r) {
    Link& link = links_[static_cast<size_t>(r)];
    if (link.socket.open() && now - link.heard > seconds_of(link_timeout_)) {
      ended(r, fmt::format("no word for {:g} s", link_timeout_));
    }
  }
}

void GroupControl::fail(const std::string& reason, int told_by) {
  if (!lost_.empty()) return;
  lost_ = reason;
  // Told before anything here ends because of it.
  send_to_all({.kind = FrameKind::lost, .payload = reason}, told_by);
  flush_all();
  notify_ = true;
  wake();
}

void GroupControl::note_departure(int rank, const std::string& payload) {
  FrameReader reader(payload);
  const uint64_t who = reader.number();
  Departure departure{.collectives = reader.number(), .messages = {}};
  while (departure.messages.size() < static_cast<size_t>(kChannels * size_)) {
    departure.messages.push_back(reader.number());
  }
  // Rank 0 tells of all, the others of themselves.
  const bool allowed = rank == 0 || who == static_cast<uint64_t>(rank);
  if (!reader.complete() || !allowed || who >= static_cast<uint64_t>(size_)) {
    return ended(rank, "it sent what is not understood");
  }
  departures_[who] = departure;
  if (rank_ == 0) send_to_all({.kind = FrameKind::leave, .payload = payload}, rank);
  notify_ = true;
}

void GroupControl::send_to_all(const Frame& frame, int but) {
  for (int r = 0; r < size_; ++r) {
    if (r != but && links_[static_cast<size_t>(r)].socket.open()) {
      links_[static_cast<size_t>(r)].socket.queue(frame);
    }
  }
}

// Whether nothing is left to be written. A connection that cannot be written to is closed where it
// is read, after what arrived before.
bool GroupControl::flush_all() {
  bool all = true;
  for (Link& link : links_) {
    if (link.socket.open() && link.socket.flush()) all &= !link.socket.unsent();
  }
  return all;
}

}  // namespace leeway
