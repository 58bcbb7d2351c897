#include "ranks/gloo_ranks.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <limits>

#include "base/start_thread.h"
#include "ranks/gloo_mesh.h"
#include "ranks/local_ranks.h"
#include "ranks/tree_sum.h"

namespace leeway {
namespace {

// Slots of our own, besides those that Gloo's collectives have.
constexpr uint64_t kCollectiveSlot = 0x20ull << 56, kMessageSlot = 0x21ull << 56;
constexpr size_t kLargest = 256 << 20;       // bytes of a piece that nothing waits for in parts
constexpr size_t kBroadcastPiece = 1 << 20;  // bytes that are passed on at once
constexpr size_t kBroadcastAhead = 8;        // pieces that are awaited at once
constexpr size_t kScratch = 64 << 20;        // bytes for what is being summed
constexpr size_t kLeastSummed = 256 << 10, kMostSummed = 4 << 20;  // bytes summed at once
constexpr size_t kFirstPiece = 64 << 10;                           // of a message, with its length

// What ranks tell each other before a collective: that it is the same one.
struct Opening {
  uint64_t number = 0;
  uint64_t what = 0;
  uint64_t length = 0;
  uint64_t own = 0;  // differs between ranks
  bool same(const Opening& other) const {
    return number == other.number && what == other.what && length == other.length;
  }
};

uint64_t code_of(const char (&name)[9]) {
  uint64_t code = 0;
  std::memcpy(&code, name, sizeof code);
  return code;
}

// The messages to one rank on one channel: a thread hands them to Gloo one by one, which waits
// until the other rank wants each.
class Outbox {
 public:
  Outbox(GlooMesh& mesh, int to, Channel channel)
      : mesh_(mesh), to_(to), channel_(channel), thread_(start_thread([this] { run(); })) {}
  ~Outbox() {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    changed_.notify_one();
    thread_.join();
  }

  void add(std::string framed) {
    const std::lock_guard lock(mutex_);
    queue_.push_back(std::move(framed));
    changed_.notify_one();
  }

 private:
  void run() {
    const WithoutPipeSignal quiet;
    try {
      while (true) {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return stop_ || !queue_.empty(); });
        if (queue_.empty()) return;
        std::string framed = std::move(queue_.front());
        queue_.pop_front();
        lock.unlock();
        transmit(framed);
      }
    } catch (const Lost&) {
      // Whoever sends or waits next learns the same.
    }
  }

  void transmit(std::string& framed) {
    const uint64_t slot = kMessageSlot | static_cast<uint64_t>(channel_);
    // Whatever the number: a rank that left receives nothing more.
    Transfer transfer(
        mesh_, {.peer = to_, .channel = channel_, .number = std::numeric_limits<uint64_t>::max()},
        framed.data(), framed.size());
    const size_t first = std::min(framed.size(), kFirstPiece);
    transfer.send(to_, slot, 0, first);
    for (size_t at = first; at < framed.size(); at += kLargest) {
      transfer.send(to_, slot, at, std::min(kLargest, framed.size() - at));
    }
    transfer.wait_sent();
  }

  GlooMesh& mesh_;
  const int to_;
  const Channel channel_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::string> queue_;
  bool stop_ = false;
  std::thread thread_;
};

class GlooRanks : public Ranks {
 public:
  explicit GlooRanks(const RanksOptions& options)
      : rank_(options.rank),
        size_(options.size),
        link_timeout_(options.link_timeout),
        own_messages_(make_local_ranks(1)),
        mesh_(options, [this](const std::string& reason) { own_messages_[0]->abort(reason); }),
        outboxes_(static_cast<size_t>(options.size * kChannels)),
        sent_(static_cast<size_t>(options.size * kChannels)),
        received_(static_cast<size_t>(options.size * kChannels)) {}

  ~GlooRanks() override {
    mesh_.control().leave({.collectives = collectives_, .messages = sent_}, link_timeout_);
    mesh_.close();
    outboxes_.clear();
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }

  void broadcast(std::span<std::byte> data, int from) override {
    const WithoutPipeSignal quiet;
    check_rank(from);
    open("broadcst", data.size() * static_cast<size_t>(size_) + static_cast<size_t>(from), 0);
    // A tree in which `place` counts from the root: a parent is what is left without the lowest
    // bit.
    const auto rank_at = [&](int place) { return (place + from) % size_; };
    const int place = (rank_ - from + size_) % size_;
    std::vector<int> children;
    int bit = 1;
    while (bit < size_ && (place & bit) == 0) bit <<= 1;
    for (int lower = bit >> 1; lower > 0; lower >>= 1) {
      if (place + lower < size_) children.push_back(rank_at(place + lower));
    }
    const int parent = rank_at(place & (place - 1));
    Transfer transfer(mesh_, collective(), data.data(), data.size());
    const auto length = [&](size_t begin) {
      return std::min(kBroadcastPiece, data.size() - begin);
    };
    size_t awaited = 0;
    for (size_t begin = 0; begin < data.size(); begin += kBroadcastPiece) {
      if (place != 0) {
        for (; awaited < data.size() && awaited < begin + kBroadcastAhead * kBroadcastPiece;
             awaited += kBroadcastPiece) {
          transfer.receive(parent, kCollectiveSlot, awaited, length(awaited));
        }
        transfer.wait_received();
      }
      for (const int child : children) transfer.send(child, kCollectiveSlot, begin, length(begin));
    }
    transfer.wait_sent();
  }

  std::vector<std::string> all_gather(const std::string& own) override {
    const WithoutPipeSignal quiet;
    const std::vector<Opening> openings = open("gatherst", 0, own.size());
    std::vector<std::string> all(static_cast<size_t>(size_));
    all[static_cast<size_t>(rank_)] = own;
    {
      std::deque<Transfer> transfers;
      for (int r = 0; r < size_; ++r) {
        std::string& theirs = all[static_cast<size_t>(r)];
        theirs.resize(openings[static_cast<size_t>(r)].own);
        transfers.emplace_back(mesh_, collective(), theirs.data(), theirs.size());
      }
      exchange(
          [&](int r) {
            return Piece{&transfers[static_cast<size_t>(rank_)], 0, own.size(), r};
          },
          [&](int r) {
            return Piece{&transfers[static_cast<size_t>(r)], 0,
                         openings[static_cast<size_t>(r)].own, r};
          });
    }
    return all;
  }

  void all_gather(std::span<float> whole, std::span<const size_t> bounds) override {
    const WithoutPipeSignal quiet;
    check_bounds(bounds, whole.size());
    open("gatherfl", whole.size(), 0);
    Transfer transfer(mesh_, collective(), whole.data(), whole.size_bytes());
    const auto part = [&](int r, int peer) {
      const size_t begin = bounds[static_cast<size_t>(r)], end = bounds[static_cast<size_t>(r) + 1];
      return Piece{&transfer, begin * sizeof(float), (end - begin) * sizeof(float), peer};
    };
    exchange([&](int r) { return part(rank_, r); }, [&](int r) { return part(r, r); });
  }

  bool reduce_scatter(std::span<const float> whole, std::span<const size_t> bounds,
                      std::span<float> part) override {
    const WithoutPipeSignal quiet;
    check_bounds(bounds, whole.empty() && !bounds.empty() ? bounds.back() : whole.size());
    LEEWAY_CHECK(part.size() == length_of(bounds, rank_),
                 "the part of a reduce_scatter is not what its bounds say");
    std::vector<char> adds;
    for (const Opening& opening : open("reducesc", bounds.back(), whole.empty() ? 0 : 1)) {
      adds.push_back(opening.own != 0);
    }
    if (std::find(adds.begin(), adds.end(), 1) == adds.end()) return false;
    const size_t most = static_cast<size_t>(size_ - 1) * 2;
    const size_t piece = std::clamp(kScratch / most, kLeastSummed, kMostSummed) / sizeof(float);
    // Gloo has one kind of buffer, for both ways.
    Transfer out(mesh_, collective(), const_cast<float*>(whole.data()), whole.size_bytes());
    if (!whole.empty()) send_pieces(out, bounds, piece);
    sum_pieces(whole, bounds, part, adds, piece);
    out.wait_sent();
    return true;
  }

  void barrier() override {
    const WithoutPipeSignal quiet;
    open("barrier_", 0, 0);
  }

  void send(int to, Channel channel, const std::string& message) override {
    check_rank(to);
    const std::string lost = mesh_.control().lost();
    if (!lost.empty()) throw Lost(lost);
    if (to == rank_) return own_messages_[0]->send(0, channel, message);
    if (mesh_.control().departure(to)) {
      throw Lost(fmt::format("{}: left the group", mesh_.control().name(to)));
    }
    const size_t at = place_of(to, channel);
    const uint64_t length = message.size();
    std::string framed(reinterpret_cast<const char*>(&length), sizeof length);
    framed += message;
    if (outboxes_[at] == nullptr) outboxes_[at] = std::make_unique<Outbox>(mesh_, to, channel);
    ++sent_[at];
    outboxes_[at]->add(std::move(framed));
  }

  std::string receive(int from, Channel channel) override {
    const WithoutPipeSignal quiet;
    check_rank(from);
    if (from == rank_) return own_messages_[0]->receive(0, channel);
    const uint64_t slot = kMessageSlot | static_cast<uint64_t>(channel);
    const Purpose purpose{
        .peer = from, .channel = channel, .number = received_[place_of(from, channel)] + 1};
    std::string first(kFirstPiece, '\0');
    {
      Transfer transfer(mesh_, purpose, first.data(), first.size());
      transfer.receive(from, slot, 0, first.size());
      transfer.wait_received();
    }
    uint64_t length = 0;
    std::memcpy(&length, first.data(), sizeof length);
    const size_t there = std::min<size_t>(length, kFirstPiece - sizeof length);
    std::string message = first.substr(sizeof length, there);
    if (length > there) {
      message.resize(length);
      Transfer transfer(mesh_, purpose, message.data(), message.size());
      for (size_t at = there; at < length; at += kLargest) {
        transfer.receive(from, slot, at, std::min<size_t>(kLargest, length - at));
      }
      for (size_t at = there; at < length; at += kLargest) transfer.wait_received();
    }
    ++received_[place_of(from, channel)];
    return message;
  }

  void abort(const std::string& reason) override { mesh_.control().lose(reason); }

 private:
  // Some bytes of a transfer, from or for a rank.
  struct Piece {
    Transfer* transfer;
    size_t begin, bytes;
    int peer;
  };

  static size_t place_of(int peer, Channel channel) {
    return static_cast<size_t>(peer * kChannels) + static_cast<size_t>(channel);
  }
  static size_t length_of(std::span<const size_t> bounds, int r) {
    return bounds[static_cast<size_t>(r) + 1] - bounds[static_cast<size_t>(r)];
  }

  void check_rank(int rank) const {
    LEEWAY_CHECK(rank >= 0 && rank < size_, "there is no such rank");
  }

  void check_bounds(std::span<const size_t> bounds, size_t length) const {
    LEEWAY_CHECK(bounds.size() == static_cast<size_t>(size_) + 1 && bounds.front() == 0 &&
                     bounds.back() == length && std::is_sorted(bounds.begin(), bounds.end()),
                 "bounds do not cut the whole into a part per rank");
  }

  Purpose collective() const { return {.number = collectives_}; }

  // Begins a collective: returns when all ranks have begun it, with what each says of itself.
  std::vector<Opening> open(const char (&what)[9], uint64_t length, uint64_t own) {
    ++collectives_;
    std::vector<Opening> all(static_cast<size_t>(size_));
    const Opening mine{.number = collectives_, .what = code_of(what), .length = length, .own = own};
    all[static_cast<size_t>(rank_)] = mine;
    {
      Transfer transfer(mesh_, collective(), all.data(), all.size() * sizeof(Opening));
      const auto at = [&](int r, int peer) {
        return Piece{&transfer, static_cast<size_t>(r) * sizeof(Opening), sizeof(Opening), peer};
      };
      exchange([&](int r) { return at(rank_, r); }, [&](int r) { return at(r, r); });
    }
    for (const Opening& opening : all) {
      LEEWAY_CHECK(opening.same(mine), "ranks call different collectives");
    }
    return all;
  }

  // Sends a piece to each other rank and receives one from each.
  void exchange(const std::function<Piece(int)>& to, const std::function<Piece(int)>& from) {
    const auto in_parts = [](const Piece& piece, const auto& each) {
      for (size_t at = 0; at < piece.bytes; at += kLargest) {
        each(piece, piece.begin + at, std::min(kLargest, piece.bytes - at));
      }
    };
    // Each begins with its neighbour, so that not all send to the same.
    for (int k = 1; k < size_; ++k) {
      in_parts(from((rank_ + size_ - k) % size_),
               [](const Piece& piece, size_t begin, size_t bytes) {
                 piece.transfer->receive(piece.peer, kCollectiveSlot, begin, bytes);
               });
      in_parts(to((rank_ + k) % size_), [](const Piece& piece, size_t begin, size_t bytes) {
        piece.transfer->send(piece.peer, kCollectiveSlot, begin, bytes);
      });
    }
    for (int k = 1; k < size_; ++k) {
      in_parts(from((rank_ + size_ - k) % size_),
               [](const Piece& piece, size_t, size_t) { piece.transfer->wait_received(); });
    }
    for (int k = 1; k < size_; ++k) to((rank_ + k) % size_).transfer->wait_sent();
  }

  void send_pieces(Transfer& out, std::span<const size_t> bounds, size_t piece) {
    size_t longest = 0;
    for (int r = 0; r < size_; ++r) longest = std::max(longest, length_of(bounds, r));
    for (size_t at = 0; at < longest; at += piece) {
      for (int k = 1; k < size_; ++k) {
        const int to = (rank_ + k) % size_;
        const size_t length = length_of(bounds, to);
        if (at >= length) continue;
        out.send(to, kCollectiveSlot, (bounds[static_cast<size_t>(to)] + at) * sizeof(float),
                 std::min(piece, length - at) * sizeof(float));
      }
    }
  }

  // Receives this rank's part from all that add something, a piece while the one before is summed.
  void sum_pieces(std::span<const float> whole, std::span<const size_t> bounds,
                  std::span<float> part, const std::vector<char>& adds, size_t piece) {
    piece = std::min(piece, std::max<size_t>(part.size(), 1));
    struct Half {
      std::vector<float> memory;
      std::optional<Transfer> transfer;
    };
    std::array<Half, 2> halves;
    std::vector<int> peers;
    for (int r = 0; r < size_; ++r) {
      if (r != rank_ && adds[static_cast<size_t>(r)]) peers.push_back(r);
    }
    for (Half& half : halves) {
      half.memory.resize(peers.size() * piece);
      half.transfer.emplace(mesh_, collective(), half.memory.data(),
                            half.memory.size() * sizeof(float));
    }
    const auto post = [&](size_t number) {
      const size_t at = number * piece;
      if (at >= part.size()) return;
      for (size_t k = 0; k < peers.size(); ++k) {
        halves[number % 2].transfer->receive(peers[k], kCollectiveSlot, k * piece * sizeof(float),
                                             std::min(piece, part.size() - at) * sizeof(float));
      }
    };
    post(0);
    post(1);
    for (size_t number = 0; number * piece < part.size(); ++number) {
      Half& half = halves[number % 2];
      const size_t at = number * piece;
      for (size_t k = 0; k < peers.size(); ++k) half.transfer->wait_received();
      std::vector<const float*> terms(static_cast<size_t>(size_), nullptr);
      for (size_t k = 0; k < peers.size(); ++k) {
        terms[static_cast<size_t>(peers[k])] = half.memory.data() + k * piece;
      }
      if (!whole.empty()) {
        terms[static_cast<size_t>(rank_)] = whole.data() + bounds[static_cast<size_t>(rank_)] + at;
      }
      tree_sum(terms, part.subspan(at, std::min(piece, part.size() - at)));
      post(number + 2);
    }
  }

  const int rank_, size_;
  const double link_timeout_;
  const std::vector<std::unique_ptr<Ranks>> own_messages_;  // those of a rank to itself
  GlooMesh mesh_;
  std::vector<std::unique_ptr<Outbox>> outboxes_;  // by place_of, made when first used
  std::vector<uint64_t> sent_, received_;
  uint64_t collectives_ = 0;
};

}  // namespace

std::unique_ptr<Ranks> join_ranks(const RanksOptions& options) {
  if (options.size == 1) return std::move(make_local_ranks(1)[0]);
  return std::make_unique<GlooRanks>(options);
}

}  // namespace leeway
