#include "ranks/local_ranks.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <tuple>

#include "ranks/tree_sum.h"

namespace leeway {
namespace {

// What a rank brings to a collective, for the others to read.
struct Offer {
  const char* what = "";  // the collective: the same on all ranks
  std::span<const std::byte> bytes;
  std::span<const float> floats;
  std::span<const size_t> bounds;
};

struct Group {
  explicit Group(int members)
      : size(members), offers(static_cast<size_t>(members)), left(static_cast<size_t>(members)) {}

  const int size;
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<Offer> offers;
  int arrived = 0;  // ranks that brought their offer to the collective that begins
  int reading = 0;  // ranks that still read the offers of the one that runs
  std::vector<char> left;
  std::string lost;  // why the group has ended; empty while it has not
  std::map<std::tuple<int, int, Channel>, std::deque<std::string>> messages;  // from, to

  void fail(const std::string& reason) {
    if (lost.empty()) lost = reason;
    changed.notify_all();
  }
};

class LocalRanks : public Ranks {
 public:
  LocalRanks(std::shared_ptr<Group> group, int rank) : group_(std::move(group)), rank_(rank) {}

  ~LocalRanks() override {
    const std::lock_guard lock(group_->mutex);
    group_->left[static_cast<size_t>(rank_)] = 1;
    group_->changed.notify_all();
  }

  int rank() const override { return rank_; }
  int size() const override { return group_->size; }

  void broadcast(std::span<std::byte> data, int from) override {
    check_rank(from);
    exchange({.what = "broadcast", .bytes = data}, [&](const std::vector<Offer>& offers) {
      const auto source = offers[static_cast<size_t>(from)].bytes;
      LEEWAY_CHECK(source.size() == data.size(), "ranks broadcast different lengths");
      if (from != rank_ && !data.empty()) std::memcpy(data.data(), source.data(), data.size());
    });
  }

  std::vector<std::string> all_gather(const std::string& own) override {
    std::vector<std::string> all;
    const auto bytes = std::as_bytes(std::span(own));
    exchange({.what = "all_gather", .bytes = bytes}, [&](const std::vector<Offer>& offers) {
      for (const Offer& offer : offers) {
        all.emplace_back(reinterpret_cast<const char*>(offer.bytes.data()), offer.bytes.size());
      }
    });
    return all;
  }

  void all_gather(std::span<float> whole, std::span<const size_t> bounds) override {
    check_bounds(bounds, whole.size());
    exchange({.what = "all_gather of floats", .floats = whole, .bounds = bounds},
             [&](const std::vector<Offer>& offers) {
               for (int r = 0; r < size(); ++r) {
                 const size_t begin = bounds[static_cast<size_t>(r)];
                 const size_t count = bounds[static_cast<size_t>(r) + 1] - begin;
                 const auto source = offers[static_cast<size_t>(r)].floats;
                 if (r != rank_) std::copy_n(source.data() + begin, count, whole.data() + begin);
               }
             });
  }

  bool reduce_scatter(std::span<const float> whole, std::span<const size_t> bounds,
                      std::span<float> part) override {
    if (whole.empty()) {
      check_bounds(bounds, bounds.empty() ? 0 : bounds.back());
    } else {
      check_bounds(bounds, whole.size());
    }
    const size_t begin = bounds[static_cast<size_t>(rank_)];
    LEEWAY_CHECK(part.size() == bounds[static_cast<size_t>(rank_) + 1] - begin,
                 "the part of a reduce_scatter is not what its bounds say");
    // `part` may lie in `whole`, which the others still read.
    std::vector<float> sum(part.size());
    bool any = false;
    exchange({.what = "reduce_scatter", .floats = whole, .bounds = bounds},
             [&](const std::vector<Offer>& offers) {
               std::vector<const float*> terms;
               for (const Offer& offer : offers) {
                 terms.push_back(offer.floats.empty() ? nullptr : offer.floats.data() + begin);
               }
               any = tree_sum(terms, sum);
             });
    if (any) std::copy(sum.begin(), sum.end(), part.begin());
    return any;
  }

  void barrier() override {
    exchange({.what = "barrier"}, [](const std::vector<Offer>&) {});
  }

  void send(int to, Channel channel, const std::string& message) override {
    check_rank(to);
    const std::lock_guard lock(group_->mutex);
    if (!group_->lost.empty()) throw Lost(group_->lost);
    if (group_->left[static_cast<size_t>(to)]) throw Lost(left_text(to));
    group_->messages[{rank_, to, channel}].push_back(message);
    group_->changed.notify_all();
  }

  std::string receive(int from, Channel channel) override {
    check_rank(from);
    std::unique_lock lock(group_->mutex);
    auto& queue = group_->messages[{from, rank_, channel}];
    group_->changed.wait(lock, [&] {
      return !queue.empty() || !group_->lost.empty() || group_->left[static_cast<size_t>(from)];
    });
    if (!group_->lost.empty()) throw Lost(group_->lost);
    if (queue.empty()) throw Lost(left_text(from));
    std::string message = std::move(queue.front());
    queue.pop_front();
    return message;
  }

  void abort(const std::string& reason) override {
    const std::lock_guard lock(group_->mutex);
    group_->fail(reason);
  }

 private:
  static std::string left_text(int rank) { return fmt::format("rank {}: left the group", rank); }

  void check_rank(int rank) const {
    LEEWAY_CHECK(rank >= 0 && rank < size(), "there is no such rank");
  }

  void check_bounds(std::span<const size_t> bounds, size_t length) const {
    LEEWAY_CHECK(bounds.size() == static_cast<size_t>(size()) + 1 && bounds.front() == 0 &&
                     bounds.back() == length && std::is_sorted(bounds.begin(), bounds.end()),
                 "bounds do not cut the whole into a part per rank");
  }

  // Waits until all ranks have brought an offer, lets `read` see them, and returns when all have
  // read. Once all have arrived nothing ends it early: the offers are memory of others.
  void exchange(const Offer& own, const std::function<void(const std::vector<Offer>&)>& read) {
    Group& group = *group_;
    std::unique_lock lock(group.mutex);
    group.offers[static_cast<size_t>(rank_)] = own;
    const auto gone = [&] { return std::find(group.left.begin(), group.left.end(), 1); };
    if (++group.arrived == group.size && group.lost.empty()) {
      group.arrived = 0;
      group.reading = group.size;
      for (const Offer& offer : group.offers) {
        LEEWAY_CHECK(std::strcmp(offer.what, own.what) == 0 &&
                         std::equal(offer.bounds.begin(), offer.bounds.end(), own.bounds.begin(),
                                    own.bounds.end()),
                     "ranks call different collectives");
      }
      group.changed.notify_all();
    } else {
      const auto begun = [&] { return group.reading > 0; };
      group.changed.wait(
          lock, [&] { return begun() || !group.lost.empty() || gone() != group.left.end(); });
      if (!begun()) {
        if (group.lost.empty()) {
          group.fail(left_text(static_cast<int>(gone() - group.left.begin())));
        }
        throw Lost(group.lost);
      }
    }
    lock.unlock();
    read(group.offers);
    lock.lock();
    if (--group.reading == 0) group.changed.notify_all();
    group.changed.wait(lock, [&] { return group.reading == 0; });
  }

  std::shared_ptr<Group> group_;
  const int rank_;
};

}  // namespace

std::vector<std::unique_ptr<Ranks>> make_local_ranks(int size) {
  LEEWAY_CHECK(size > 0, "a group has one rank at least");
  const auto group = std::make_shared<Group>(size);
  std::vector<std::unique_ptr<Ranks>> ranks;
  for (int rank = 0; rank < size; ++rank) {
    ranks.push_back(std::make_unique<LocalRanks>(group, rank));
  }
  return ranks;
}

}  // namespace leeway
