// Every call of Ranks with made-up numbers, for tests of all implementations: each rank collects
// what it got, which has the same bits whatever the ranks are made of.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <future>
#include <span>
#include <string>
#include <vector>

#include "base/crc32c.h"
#include "base/rng.h"
#include "ranks/ranks.h"

namespace leeway {

// Numbers of a rank, of sizes so different that the order of a sum shows.
inline std::vector<float> rank_values(uint64_t seed, int rank, size_t count) {
  Rng rng(seed * 1000 + static_cast<uint64_t>(rank));
  std::vector<float> values(count);
  for (float& value : values) {
    value = static_cast<float>((rng.uniform() - 0.5) * (rng.below(2) == 0 ? 1e-3 : 1e3));
  }
  return values;
}

// Cuts 0 .. length into a part per rank; some are empty.
inline std::vector<size_t> made_up_bounds(uint64_t seed, int size, size_t length) {
  Rng rng(seed);
  std::vector<size_t> bounds = {0, length};
  for (int r = 1; r < size; ++r) bounds.push_back(rng.below(length + 1));
  std::sort(bounds.begin(), bounds.end());
  return bounds;
}

// Whether `rank` has something to add in round `seed`: about 7 of 10 do, and no rank in every
// eighth round.
inline bool adds_something(uint64_t seed, int rank) {
  return seed % 8 != 7 && Rng(seed * 64 + static_cast<uint64_t>(rank)).uniform() < 0.7;
}

inline std::string checksum(std::span<const std::byte> bytes) {
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  return fmt::format("{:08x}", crc32c(text));
}

// Runs every collective and messages of both channels between all pairs; returns what `ranks` got,
// a line per call.
inline std::string every_call(Ranks& ranks, uint64_t seed, size_t length) {
  const int rank = ranks.rank(), size = ranks.size();
  std::string out;
  const auto note = [&](const char* what, std::span<const std::byte> bytes) {
    out += fmt::format("{} {} {} {}\n", seed, what, bytes.size(), checksum(bytes));
  };
  const std::vector<size_t> bounds = made_up_bounds(seed, size, length);

  std::vector<float> data = rank_values(seed, rank, length);
  ranks.broadcast(std::as_writable_bytes(std::span(data)), static_cast<int>(seed) % size);
  note("broadcast", std::as_bytes(std::span(data)));

  const std::string own(Rng(seed + static_cast<uint64_t>(rank)).below(3) * 1000,
                        static_cast<char>('a' + rank));
  for (const std::string& each : ranks.all_gather(own))
    note("gathered", std::as_bytes(std::span(each)));

  data = rank_values(seed, rank, length);
  ranks.all_gather(data, bounds);
  note("whole", std::as_bytes(std::span(data)));

  const std::vector<float> whole =
      adds_something(seed, rank) ? rank_values(seed, rank, length) : std::vector<float>();
  std::vector<float> part(bounds[static_cast<size_t>(rank) + 1] - bounds[static_cast<size_t>(rank)],
                          -7.0f);
  const bool any = ranks.reduce_scatter(whole, bounds, part);
  note(any ? "sum" : "no sum", std::as_bytes(std::span(part)));
  ranks.barrier();

  // Both channels at once, sampling in the other order of peers.
  std::string training, sampling;
  const auto talk = [&](Channel channel, std::string& got) {
    const int peers = size;
    for (int k = 0; k < peers; ++k) {
      const int peer = channel == Channel::training ? k : peers - 1 - k;
      for (size_t n = 0; n < 3; ++n) {
        ranks.send(peer, channel,
                   fmt::format("{} to {} on {}: {}", rank, peer, static_cast<int>(channel),
                               std::string(n == 2 ? length : n, 'x')));
      }
    }
    for (int peer = 0; peer < peers; ++peer) {
      for (int n = 0; n < 3; ++n) got += ranks.receive(peer, channel) + "\n";
    }
  };
  auto other = std::async(std::launch::async, [&] { talk(Channel::sampling, sampling); });
  talk(Channel::training, training);
  other.get();
  note("training", std::as_bytes(std::span(training)));
  note("sampling", std::as_bytes(std::span(sampling)));
  return out;
}

// What every_call gives on `rank` of `size`, from the numbers alone.
inline std::string expected_of_every_call(int rank, int size, uint64_t seed, size_t length) {
  std::string out;
  const auto note = [&](const char* what, std::span<const std::byte> bytes) {
    out += fmt::format("{} {} {} {}\n", seed, what, bytes.size(), checksum(bytes));
  };
  const std::vector<size_t> bounds = made_up_bounds(seed, size, length);
  std::vector<float> data = rank_values(seed, static_cast<int>(seed) % size, length);
  note("broadcast", std::as_bytes(std::span(data)));
  for (int r = 0; r < size; ++r) {
    const std::string own(Rng(seed + static_cast<uint64_t>(r)).below(3) * 1000,
                          static_cast<char>('a' + r));
    note("gathered", std::as_bytes(std::span(own)));
  }
  for (int r = 0; r < size; ++r) {
    const std::vector<float> theirs = rank_values(seed, r, length);
    for (size_t i = bounds[static_cast<size_t>(r)]; i < bounds[static_cast<size_t>(r) + 1]; ++i) {
      data[i] = theirs[i];
    }
  }
  note("whole", std::as_bytes(std::span(data)));
  // Level by level: neighbours join, what has none moves up.
  std::vector<std::vector<float>> level;
  for (int r = 0; r < size; ++r) {
    level.push_back(adds_something(seed, r) ? rank_values(seed, r, length) : std::vector<float>());
  }
  while (level.size() > 1) {
    std::vector<std::vector<float>> next;
    for (size_t r = 0; r < level.size(); r += 2) {
      if (r + 1 == level.size() || level[r + 1].empty()) {
        next.push_back(level[r]);
      } else if (level[r].empty()) {
        next.push_back(level[r + 1]);
      } else {
        next.push_back(level[r]);
        for (size_t i = 0; i < length; ++i) next.back()[i] = level[r][i] + level[r + 1][i];
      }
    }
    level = next;
  }
  const size_t begin = bounds[static_cast<size_t>(rank)],
               end = bounds[static_cast<size_t>(rank) + 1];
  std::vector<float> part(end - begin, -7.0f);
  if (!level[0].empty())
    std::copy_n(level[0].begin() + static_cast<std::ptrdiff_t>(begin), end - begin, part.begin());
  note(level[0].empty() ? "no sum" : "sum", std::as_bytes(std::span(part)));
  for (const int channel : {0, 1}) {
    std::string got;
    for (int peer = 0; peer < size; ++peer) {
      for (size_t n = 0; n < 3; ++n) {
        got += fmt::format("{} to {} on {}: {}\n", peer, rank, channel,
                           std::string(n == 2 ? length : n, 'x'));
      }
    }
    note(channel == 0 ? "training" : "sampling", std::as_bytes(std::span(got)));
  }
  return out;
}

}  // namespace leeway
