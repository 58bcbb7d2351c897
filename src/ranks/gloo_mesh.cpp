#include "ranks/gloo_mesh.h"

#include <fmt/format.h>
#include <gloo/transport/context.h>
#include <gloo/transport/device.h>
#include <gloo/transport/tcp/device.h>
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <stdexcept>

#include "ranks/peer_links.h"

namespace leeway {
namespace {

constexpr std::chrono::milliseconds kForever = std::chrono::hours(24 * 365);
constexpr double kConnectTime = 20.0;  // seconds, at least, for a data connection to be made
constexpr auto kCauseTime =
    std::chrono::seconds(5);  // until the cause of a broken connection is known

constexpr size_t kMostDone = 64;

// While it exists, threads that this one starts do not preempt others when they wake. Gloo's thread
// tries the lock of a connection and, where it is taken, tries again without a pause: had it
// preempted the one that has the lock, both would wait for the end of its time slice.
class AsBatchThread {
 public:
  AsBatchThread() {
    before_ = sched_getscheduler(0);
    const sched_param none{};
    if (before_ == SCHED_OTHER) sched_setscheduler(0, SCHED_BATCH, &none);
  }
  ~AsBatchThread() {
    const sched_param none{};
    if (before_ == SCHED_OTHER) sched_setscheduler(0, SCHED_OTHER, &none);
  }
  AsBatchThread(const AsBatchThread&) = delete;
  AsBatchThread& operator=(const AsBatchThread&) = delete;

 private:
  int before_;
};

}  // namespace

WithoutPipeSignal::WithoutPipeSignal() {
  sigset_t pipe, pending;
  sigemptyset(&pipe);
  sigaddset(&pipe, SIGPIPE);
  sigpending(&pending);
  pending_ = sigismember(&pending, SIGPIPE) == 1;
  pthread_sigmask(SIG_BLOCK, &pipe, &before_);
}

WithoutPipeSignal::~WithoutPipeSignal() {
  if (!pending_) {
    sigset_t pipe;
    sigemptyset(&pipe);
    sigaddset(&pipe, SIGPIPE);
    const timespec none = {};
    sigtimedwait(&pipe, nullptr, &none);
  }
  pthread_sigmask(SIG_SETMASK, &before_, nullptr);
}

// Gloo's context with the connections that we make.
class GlooMesh::Connections : public gloo::Context {
 public:
  Connections(const RanksOptions& options, const std::string& address)
      : gloo::Context(options.rank, options.size) {
    gloo::transport::tcp::attr attributes(address.c_str());
    const AsBatchThread batch;
    device_ = gloo::transport::tcp::CreateDevice(attributes);
    transportContext_ = device_->createContext(rank, size);
    // Pairs wait five times as long for their connection.
    const double seconds = std::max(options.link_timeout, kConnectTime) / 5;
    transportContext_->setTimeout(std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000)));
  }

  // Where each other rank connects to, [size], empty at this one.
  std::vector<std::string> listen() {
    std::vector<std::string> addresses(static_cast<size_t>(size));
    for (int r = 0; r < size; ++r) {
      if (r == rank) continue;
      const std::vector<char> bytes = transportContext_->createPair(r)->address().bytes();
      addresses[static_cast<size_t>(r)].assign(bytes.begin(), bytes.end());
    }
    return addresses;
  }

  void connect(int peer, const std::string& address) {
    getPair(peer)->connect(std::vector<char>(address.begin(), address.end()));
  }
};

GlooMesh::GlooMesh(const RanksOptions& options, std::function<void(const std::string&)> on_lost)
    : rank_(options.rank), size_(options.size), on_lost_(std::move(on_lost)) {
  const WithoutPipeSignal quiet;
  control_ =
      std::make_unique<GroupControl>(meet(options), options, [this](const std::string& lost) {
        if (!lost.empty()) on_lost_(lost);
        end_waits(!lost.empty());
      });
  const std::string address = control_->member(rank_).address;
  try {
    auto connections = std::make_shared<Connections>(options, address);
    std::optional<PeerLinks> peers;
    if (rank_ > 0) peers.emplace(options, control_->member(rank_));
    FrameWriter own;
    own.number(peers ? static_cast<uint64_t>(peers->port()) : 0);
    for (const std::string& each : connections->listen()) own.text(each);
    const std::vector<std::string> all = control_->gather(own.take());
    {
      // From here on a loss ends the connecting.
      const std::lock_guard lock(mutex_);
      connections_ = connections;
      connecting_ = true;
    }
    std::vector<int> ports;
    for (const std::string& each : all) {
      ports.push_back(static_cast<int>(FrameReader(each).number()));
    }
    if (peers) {
      auto links = peers->connect(control_->members(), ports,
                                  [&](double seconds) { return control_->wait_for_lost(seconds); });
      for (int r = 1; r < size_; ++r) {
        if (r != rank_) control_->add(r, std::move(links[static_cast<size_t>(r)]));
      }
    }
    for (int r = 0; r < size_; ++r) {
      if (r == rank_) continue;
      FrameReader reader(all[static_cast<size_t>(r)]);
      reader.number();
      std::string theirs;
      for (int k = 0; k <= rank_; ++k) theirs = reader.text();
      if (const std::string lost = control_->lost(); !lost.empty()) throw Lost(lost);
      try {
        connections->connect(r, theirs);
      } catch (const std::exception& problem) {
        const std::string lost = control_->wait_for_lost(1.0);
        if (!lost.empty()) throw Lost(lost);
        throw Error(fmt::format(
            "{} and {} do not reach each other for data, between {} and {}: {}; LEEWAY_INTERFACE "
            "names the network interface to use",
            control_->name(rank_), control_->name(r), address, control_->member(r).address,
            problem.what()));
      }
    }
    control_->gather("");  // all are connected
    const std::lock_guard lock(mutex_);
    connecting_ = false;
  } catch (const Lost&) {
    throw;
  } catch (const Error& problem) {
    control_->lose(problem.what());
    throw;
  } catch (const std::exception& problem) {
    const std::string reason = fmt::format(
        "{} has no data connections at {}: {}; LEEWAY_INTERFACE names the network "
        "interface to use",
        control_->name(rank_), address, problem.what());
    control_->lose(reason);
    throw Error(reason);
  }
}

GlooMesh::~GlooMesh() {
  const WithoutPipeSignal quiet;
  close();
  control_.reset();
  done_.clear();
  connections_.reset();
}

void GlooMesh::close() {
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
  }
  end_waits(false);
}

std::string GlooMesh::in_vain(const Purpose& purpose) const {
  if (closed_) return "this rank left the group";
  // While the connections are made there is no control yet, and no wait.
  const std::string lost = control_->lost();
  if (!lost.empty()) return lost;
  for (int r = 0; r < size_; ++r) {
    if (r == rank_ || (purpose.peer >= 0 && purpose.peer != r)) continue;
    const auto departure = control_->departure(r);
    if (!departure) continue;
    const size_t at = static_cast<size_t>(rank_ * kChannels) + static_cast<size_t>(purpose.channel);
    const uint64_t done = purpose.peer < 0 ? departure->collectives : departure->messages[at];
    if (done < purpose.number) return fmt::format("{}: left the group", control_->name(r));
  }
  return "";
}

void GlooMesh::end_waits(bool lost) {
  const std::lock_guard lock(mutex_);
  if (connecting_ && lost) connections_->closeConnections();
  for (Transfer* transfer : waiting_) {
    if (in_vain(transfer->purpose_).empty()) continue;
    transfer->buffer_->abortWaitRecv();
    transfer->buffer_->abortWaitSend();
  }
}

void GlooMesh::broke(const Purpose& purpose, const std::string& how) {
  const auto end = std::chrono::steady_clock::now() + kCauseTime;
  do {
    {
      const std::lock_guard lock(mutex_);
      const std::string vain = in_vain(purpose);
      if (!vain.empty()) throw Lost(vain);
    }
    control_->wait_for_lost(0.05);
  } while (std::chrono::steady_clock::now() < end);
  control_->lose(fmt::format("{}: a connection for data broke: {}", control_->name(rank_), how));
  throw Lost(control_->lost());
}

Transfer::Transfer(GlooMesh& mesh, Purpose purpose, void* memory, size_t bytes)
    : mesh_(mesh),
      purpose_(purpose),
      buffer_(mesh.connections_->createUnboundBuffer(memory, bytes)) {
  const std::lock_guard lock(mesh_.mutex_);
  const std::string vain = mesh_.in_vain(purpose_);
  if (!vain.empty()) throw Lost(vain);
  entry_ = mesh_.waiting_.insert(mesh_.waiting_.end(), this);
}

Transfer::~Transfer() {
  std::unique_ptr<gloo::transport::UnboundBuffer> oldest;
  const std::lock_guard lock(mesh_.mutex_);
  mesh_.waiting_.erase(entry_);
  // Of one that is not done with Gloo may still use the memory.
  if (sending_ > 0 || receiving_ > 0) return;
  mesh_.done_.push_back(std::move(buffer_));
  if (mesh_.done_.size() > kMostDone) {
    oldest = std::move(mesh_.done_.front());
    mesh_.done_.pop_front();
  }
}

void Transfer::send(int to, uint64_t slot, size_t begin, size_t bytes) {
  try {
    buffer_->send(to, slot, begin, bytes);
    ++sending_;
  } catch (const std::exception& problem) {
    mesh_.broke(purpose_, problem.what());
  }
}

void Transfer::receive(int from, uint64_t slot, size_t begin, size_t bytes) {
  try {
    buffer_->recv(from, slot, begin, bytes);
    ++receiving_;
  } catch (const std::exception& problem) {
    mesh_.broke(purpose_, problem.what());
  }
}

void Transfer::wait_received() {
  try {
    if (buffer_->waitRecv(kForever)) {
      --receiving_;
      return;
    }
  } catch (const std::exception& problem) {
    mesh_.broke(purpose_, problem.what());
  }
  stopped();
}

void Transfer::wait_sent() {
  for (; sending_ > 0; --sending_) {
    try {
      if (buffer_->waitSend(kForever)) continue;
    } catch (const std::exception& problem) {
      mesh_.broke(purpose_, problem.what());
    }
    stopped();
  }
}

void Transfer::stopped() {
  const std::lock_guard lock(mesh_.mutex_);
  throw Lost(mesh_.in_vain(purpose_));
}

}  // namespace leeway
