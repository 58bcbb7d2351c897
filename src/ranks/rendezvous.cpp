#include "ranks/rendezvous.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <climits>
#include <set>
#include <thread>

#include "base/printable.h"
#include "leeway/error.h"
#include "ranks/ranks.h"

namespace leeway {
namespace {

using Clock = std::chrono::steady_clock;

constexpr uint64_t kProtocol = 1;
constexpr size_t kLongestHello = 4096;
constexpr size_t kLongestFrame = 64 << 20;  // the addresses of all data connections
constexpr size_t kMostStrangers = 64;       // connections that have not said who they are
constexpr double kStrangersTime = 10.0;     // seconds to say it
constexpr double kAttempt = 5.0;            // seconds for one connection
constexpr double kTellTime = 2.0;           // seconds to tell all others of a failure
constexpr double kLeadersLead = 10.0;       // rank 0 knows who is missing, so it speaks first
constexpr int kAskedEvery = 50;             // milliseconds, whether somebody has given up
constexpr auto kPause = std::chrono::milliseconds(50);  // between two attempts to connect

Clock::time_point after(double seconds) {
  return Clock::now() +
         std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

int milliseconds_until(Clock::time_point end) {
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - Clock::now());
  return static_cast<int>(std::clamp<int64_t>(left.count() + 1, 0, 1000));
}

std::string host_name() {
  std::array<char, HOST_NAME_MAX + 1> name = {};
  ::gethostname(name.data(), name.size() - 1);
  return name.data();
}

// The address of a network interface.
std::string address_of_interface(const std::string& interface) {
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) throw Error("the network interfaces cannot be listed");
  std::string four, six;
  std::set<std::string> names;
  for (const ifaddrs* each = list; each != nullptr; each = each->ifa_next) {
    names.insert(each->ifa_name);
    if (each->ifa_addr == nullptr || interface != each->ifa_name) continue;
    std::array<char, INET6_ADDRSTRLEN> text = {};
    if (each->ifa_addr->sa_family == AF_INET && four.empty()) {
      ::inet_ntop(AF_INET, &reinterpret_cast<const sockaddr_in*>(each->ifa_addr)->sin_addr,
                  text.data(), text.size());
      four = text.data();
    } else if (each->ifa_addr->sa_family == AF_INET6 && six.empty()) {
      ::inet_ntop(AF_INET6, &reinterpret_cast<const sockaddr_in6*>(each->ifa_addr)->sin6_addr,
                  text.data(), text.size());
      six = text.data();
    }
  }
  ::freeifaddrs(list);
  if (four.empty() && six.empty()) {
    throw Error(
        fmt::format("LEEWAY_INTERFACE={}: no network interface of that name has an address "
                    "on {}; there are {}",
                    interface, host_name(), fmt::join(names, ", ")));
  }
  return four.empty() ? six : four;
}

struct Hello {
  uint64_t protocol = kProtocol;
  std::string version, job;
  uint64_t size = 0, rank = 0;
  RankMember member;
};

std::string written(const Hello& hello) {
  return FrameWriter()
      .number(hello.protocol)
      .text(hello.version)
      .text(hello.job)
      .number(hello.size)
      .number(hello.rank)
      .text(hello.member.host)
      .number(static_cast<uint64_t>(hello.member.process))
      .text(hello.member.address)
      .take();
}

std::optional<Hello> read_hello(const Frame& frame) {
  if (frame.kind != FrameKind::hello) return std::nullopt;
  FrameReader reader(frame.payload);
  Hello hello;
  hello.protocol = reader.number();
  hello.version = printable(reader.text());
  hello.job = reader.text();
  hello.size = reader.number();
  hello.rank = reader.number();
  hello.member.host = printable(reader.text());
  hello.member.process = static_cast<int64_t>(reader.number());
  hello.member.address = printable(reader.text());
  if (!reader.complete()) return std::nullopt;
  return hello;
}

Hello own_hello(const RanksOptions& options) {
  return {.version = options.version,
          .job = options.job,
          .size = static_cast<uint64_t>(options.size),
          .rank = static_cast<uint64_t>(options.rank),
          .member = {
              .host = host_name(),
              .process = ::getpid(),
              .address = options.interface.empty() ? "" : address_of_interface(options.interface)}};
}

// Waits until a connection that can be read is among these, or `milliseconds` have passed.
void wait_for_any(std::vector<pollfd>& waiting, int milliseconds) {
  ::poll(waiting.data(), waiting.size(), milliseconds);
}

// ---------------------------------------------------------------------------------------------
// Rank 0

class Reception {
 public:
  explicit Reception(const RanksOptions& options)
      : options_(options),
        listener_(options.listener >= 0 ? Descriptor(options.listener)
                                        : listen_at(options.leader_address, options.leader_port)) {
    party_.members.resize(static_cast<size_t>(options.size));
    party_.links.resize(static_cast<size_t>(options.size));
    party_.members[0] = own_hello(options).member;
  }

  Party receive_all() {
    const auto end = after(options_.start_timeout);
    while (!missing().empty()) {
      if (Clock::now() >= end) {
        fail(FrameKind::refusal,
             fmt::format("{} of {} ranks came to {}, port {}, within {:g} s; missing: rank {}",
                         options_.size - static_cast<int>(missing().size()), options_.size,
                         options_.leader_address, port_of(listener_), options_.start_timeout,
                         fmt::join(missing(), ", ")));
        end_with_failure(0.0);
      }
      wait(std::min(milliseconds_until(end), options_.given_up ? kAskedEvery : INT_MAX));
      accept();
      listen_to_strangers();
      listen_to_members();
      if (options_.given_up) {
        const std::string why = options_.given_up();
        if (!why.empty()) fail(FrameKind::refusal, why);
      }
      if (failure_) end_with_failure(kTellTime);
    }
    choose_addresses();
    FrameWriter all;
    for (const RankMember& member : party_.members) {
      all.text(member.host).number(static_cast<uint64_t>(member.process)).text(member.address);
    }
    tell_all({.kind = FrameKind::members, .payload = all.take()});
    return std::move(party_);
  }

 private:
  struct Stranger {
    FrameSocket link;
    Clock::time_point end;
  };

  std::vector<int> missing() const {
    std::vector<int> ranks;
    for (int r = 1; r < options_.size; ++r) {
      if (!party_.links[static_cast<size_t>(r)].open()) ranks.push_back(r);
    }
    return ranks;
  }

  void wait(int milliseconds) {
    std::vector<pollfd> waiting;
    const auto add = [&](const Descriptor& socket) {
      waiting.push_back({.fd = socket.get(), .events = POLLIN, .revents = 0});
    };
    if (strangers_.size() < kMostStrangers) add(listener_);
    for (const Stranger& stranger : strangers_) add(stranger.link.socket());
    for (const FrameSocket& link : party_.links) {
      if (link.open()) add(link.socket());
    }
    wait_for_any(waiting, milliseconds);
  }

  void accept() {
    while (strangers_.size() < kMostStrangers) {
      Descriptor socket = accept_from(listener_);
      if (!socket.open()) return;
      strangers_.push_back(
          {.link = FrameSocket(std::move(socket), kLongestHello), .end = after(kStrangersTime)});
    }
  }

  // Who says nothing that is understood is let go without an answer.
  void listen_to_strangers() {
    for (Stranger& stranger : strangers_) {
      const bool open = stranger.link.receive();
      if (const auto frame = stranger.link.next()) {
        if (const auto hello = read_hello(*frame)) judge(*hello, stranger.link);
        stranger.link.close();
      }
      if (!open || stranger.link.garbage() || Clock::now() >= stranger.end) stranger.link.close();
    }
    std::erase_if(strangers_, [](const Stranger& stranger) { return !stranger.link.open(); });
  }

  void judge(const Hello& hello, FrameSocket& link) {
    const std::string name =
        name_of(static_cast<int>(std::min<uint64_t>(hello.rank, INT_MAX)), hello.member);
    if (hello.job != options_.job) {
      tell(link, FrameKind::refusal,
           fmt::format("rank 0 at {}, port {}, belongs to another job: choose another port, "
                       "LEEWAY_PORT=NUMBER",
                       options_.leader_address, port_of(listener_)));
    } else if (failure_) {
      tell(link, failure_->kind, failure_->payload);
      ++told_;
    } else if (hello.protocol != kProtocol || hello.version != options_.version) {
      refuse_all(
          link, fmt::format("{} is leeway {}, and {} is leeway {}: all ranks need the same program",
                            name, hello.version, own_name(), options_.version));
    } else if (hello.size != static_cast<uint64_t>(options_.size)) {
      refuse_all(link, fmt::format("{} was started as one of {} ranks, and {} as one of {}", name,
                                   hello.size, own_name(), options_.size));
    } else if (hello.rank == 0 || hello.rank >= hello.size) {
      refuse_all(link,
                 fmt::format("{} came to {}, which is rank 0 of {}: each rank from 0 to {} is "
                             "started once",
                             name, own_name(), options_.size, options_.size - 1));
    } else if (party_.links[hello.rank].open()) {
      refuse_all(link,
                 fmt::format("{} and {} have the same rank", name,
                             name_of(static_cast<int>(hello.rank), party_.members[hello.rank])));
    } else {
      party_.members[hello.rank] = hello.member;
      link.allow(kLongestFrame);
      party_.links[hello.rank] = std::move(link);
    }
  }

  std::string own_name() const { return name_of(0, party_.members[0]); }

  static void tell(FrameSocket& link, FrameKind kind, const std::string& text) {
    link.queue({.kind = kind, .payload = text});
    link.flush();
  }

  void refuse_all(FrameSocket& link, const std::string& why) {
    tell(link, FrameKind::refusal, why);
    ++told_;
    fail(FrameKind::refusal, why);
  }

  // Ranks send nothing until all have arrived, so a connection can only become readable because its
  // process has ended.
  void listen_to_members() {
    for (int r = 1; r < options_.size; ++r) {
      FrameSocket& link = party_.links[static_cast<size_t>(r)];
      if (!link.open() || link.receive()) continue;
      link.close();
      ++told_;  // it needs to be told nothing
      fail(FrameKind::lost, fmt::format("{}: its process ended",
                                        name_of(r, party_.members[static_cast<size_t>(r)])));
    }
  }

  // Rank 0 is where the others reached it. A rank that came through loopback is on this host, so
  // that it is to the others where rank 0 is.
  void choose_addresses() {
    std::string own = party_.members[0].address;
    for (int r = 1; r < options_.size; ++r) {
      const std::string reached = own_address(party_.links[static_cast<size_t>(r)].socket());
      if (own.empty() || (is_loopback(own) && options_.interface.empty())) own = reached;
    }
    party_.members[0].address = own;
    for (int r = 1; r < options_.size; ++r) {
      RankMember& member = party_.members[static_cast<size_t>(r)];
      if (!member.address.empty()) continue;
      member.address = peer_address(party_.links[static_cast<size_t>(r)].socket());
      if (is_loopback(member.address)) member.address = own;
    }
  }

  void tell_all(const Frame& frame) {
    for (FrameSocket& link : party_.links) {
      if (link.open()) link.queue(frame);
    }
    const auto end = after(kTellTime);
    bool unsent = true;
    while (unsent && Clock::now() < end) {
      unsent = false;
      for (FrameSocket& link : party_.links) {
        unsent |= link.open() && link.flush() && link.unsent();
      }
      if (unsent) std::this_thread::sleep_for(kPause);
    }
  }

  // The first failure is the one that all report.
  void fail(FrameKind kind, const std::string& why) {
    if (!failure_) failure_ = Frame{.kind = kind, .payload = why};
  }

  // Tells all that are there, and for some seconds those that come late.
  [[noreturn]] void end_with_failure(double seconds) {
    tell_all(*failure_);
    for (const FrameSocket& link : party_.links) told_ += link.open() ? 1 : 0;
    const auto end = after(seconds);
    while (told_ + 1 < options_.size && Clock::now() < end) {
      wait(milliseconds_until(end));
      accept();
      listen_to_strangers();
    }
    if (failure_->kind == FrameKind::lost) throw Lost(failure_->payload);
    throw Error(failure_->payload);
  }

  const RanksOptions& options_;
  std::optional<Frame> failure_;
  int told_ = 0;  // other ranks that know it, or need not
  Descriptor listener_;
  std::vector<Stranger> strangers_;
  Party party_;
};

// ---------------------------------------------------------------------------------------------
// The others

std::vector<RankMember> read_members(const Frame& frame, int size) {
  FrameReader reader(frame.payload);
  std::vector<RankMember> members(static_cast<size_t>(size));
  for (RankMember& member : members) {
    member.host = printable(reader.text());
    member.process = static_cast<int64_t>(reader.number());
    member.address = printable(reader.text());
  }
  if (!reader.complete()) throw Error("rank 0 sent a list of ranks that is not understood");
  return members;
}

// The answer to a hello; none if what is there does not answer as a rank 0 does.
std::optional<Frame> answer_of(FrameSocket& link, Clock::time_point end) {
  while (Clock::now() < end) {
    std::vector<pollfd> waiting = {
        {.fd = link.socket().get(),
         .events = static_cast<short>(link.unsent() ? POLLIN | POLLOUT : POLLIN),
         .revents = 0}};
    wait_for_any(waiting, milliseconds_until(end));
    const bool open = link.flush() && link.receive();
    if (auto frame = link.next()) return frame;
    if (!open || link.garbage()) return std::nullopt;
  }
  return std::nullopt;
}

Party go_to_leader(const RanksOptions& options) {
  const std::string hello = written(own_hello(options));
  const auto end = after(options.start_timeout + kLeadersLead);
  std::string problem = "nothing listens there";
  while (Clock::now() < end) {
    const double left = std::chrono::duration<double>(end - Clock::now()).count();
    FrameSocket link(
        connect_to(options.leader_address, options.leader_port, std::min(kAttempt, left), problem),
        kLongestFrame);
    if (link.open()) {
      link.queue({.kind = FrameKind::hello, .payload = hello});
      if (const auto frame = answer_of(link, end)) {
        if (frame->kind == FrameKind::refusal) throw Error(printable(frame->payload));
        if (frame->kind == FrameKind::lost) throw Lost(printable(frame->payload));
        if (frame->kind == FrameKind::members) {
          Party party;
          party.members = read_members(*frame, options.size);
          party.links.resize(static_cast<size_t>(options.size));
          party.links[0] = std::move(link);
          return party;
        }
      }
      problem = link.garbage() ? "another program listens there" : "the connection was closed";
    }
    std::this_thread::sleep_for(kPause);
  }
  throw Error(fmt::format(
      "rank {} of {} does not reach rank 0 at {}, port {}, within {:g} s: {}; rank 0 must run and "
      "this host must reach that address",
      options.rank, options.size, options.leader_address, options.leader_port,
      options.start_timeout + kLeadersLead, problem));
}

}  // namespace

std::string name_of(int rank, const RankMember& member) {
  return fmt::format("rank {} (host {}, process {})", rank, member.host, member.process);
}

Party meet(const RanksOptions& options) {
  LEEWAY_CHECK(options.size > 1 && options.rank >= 0 && options.rank < options.size,
               "a rank that meets others is one of them");
  return options.rank == 0 ? Reception(options).receive_all() : go_to_leader(options);
}

}  // namespace leeway
