// A program for tests: one rank of a group, found by the variables of launchers.
//
//   ranks_member calls SEEDS LENGTH   every call of Ranks with that many seeds; prints what it got
//   ranks_member forever LENGTH       calls until the group ends
//   ranks_member large FLOATS         one sum, one gathering and one message of that size
//   ranks_member compute SECONDS      rank 1 is busy for so long, the others wait for it
//   ranks_member abort                rank 1 ends the group
//   ranks_member leave                rank 1 ends, as a program that fails does, the others wait
//
//   ranks_member local RANKS WORD ..  starts the others itself, which do WORD .. as it does
//
// LINK_TIMEOUT, START_TIMEOUT and VERSION set what no launcher does. It prints "joined" when all
// ranks are connected. Exit code 3 and "lost: REASON" when the group ended, 2 and "error: REASON"
// for other mistakes.
#include <fmt/format.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>

#include "ranks/discovery.h"
#include "ranks/gloo_ranks.h"
#include "ranks/local_workers.h"
#include "ranks/ranks_test_support.h"

namespace {

using namespace leeway;

void say(const std::string& line) {
  std::fputs((line + "\n").c_str(), stdout);
  std::fflush(stdout);
}

double seconds(const char* name, double otherwise) {
  const char* value = std::getenv(name);
  return value == nullptr ? otherwise : std::atof(value);
}

void large(Ranks& ranks, size_t floats) {
  const int size = ranks.size(), rank = ranks.rank();
  const auto value = [](int r, size_t i) {
    return static_cast<float>((i % 1000) + 1) * static_cast<float>(r + 1);
  };
  std::vector<float> whole(floats);
  for (size_t i = 0; i < floats; ++i) whole[i] = value(rank, i);
  std::vector<size_t> bounds;
  for (int r = 0; r <= size; ++r)
    bounds.push_back(floats * static_cast<size_t>(r) / static_cast<size_t>(size));
  const size_t begin = bounds[static_cast<size_t>(rank)],
               end = bounds[static_cast<size_t>(rank) + 1];
  ranks.reduce_scatter(whole, bounds, std::span(whole).subspan(begin, end - begin));
  ranks.all_gather(whole, bounds);
  size_t wrong = 0;
  for (size_t i = 0; i < floats; ++i) {
    float sum = 0.0f;
    for (int r = 0; r < size; ++r) sum += value(r, i);
    wrong += whole[i] != sum;
  }
  say(fmt::format("wrong sums: {}", wrong));
  if (rank == 0) {
    ranks.send(1, Channel::training,
               std::string(reinterpret_cast<const char*>(whole.data()), floats * sizeof(float)));
  } else if (rank == 1) {
    const std::string message = ranks.receive(0, Channel::training);
    const bool same = message.size() == floats * sizeof(float) &&
                      std::memcmp(message.data(), whole.data(), message.size()) == 0;
    say(same ? "the message is whole" : "the message is not what was sent");
  }
  ranks.broadcast(std::as_writable_bytes(std::span(whole)), size - 1);
  say(fmt::format(
      "broadcast: {}",
      whole[floats - 1] == value(0, floats - 1) * static_cast<float>(size * (size + 1) / 2)));
}

int member(std::optional<RanksOptions> options, int count, char** words) {
  const std::string what = count > 1 ? words[1] : "";
  if (!options) throw Error("no launcher");
  options->link_timeout = seconds("LINK_TIMEOUT", options->link_timeout);
  options->start_timeout = seconds("START_TIMEOUT", options->start_timeout);
  const char* version = std::getenv("VERSION");
  options->version = version == nullptr ? "test" : version;
  const auto ranks = join_ranks(*options);
  say("joined");
  if (what == "calls" && count > 3) {
    const size_t length = std::stoul(words[3]);
    for (uint64_t seed = 0; seed < std::stoul(words[2]); ++seed) {
      say(every_call(*ranks, seed, length));
    }
    ranks->barrier();
  } else if (what == "forever" && count > 2) {
    const size_t length = std::stoul(words[2]);
    for (uint64_t seed = 0;; ++seed) {
      const std::string got = every_call(*ranks, seed, length);
      if (got != expected_of_every_call(ranks->rank(), ranks->size(), seed, length)) {
        say("wrong: " + got);
        return 1;
      }
      if (seed == 1) say("running");
    }
  } else if (what == "large" && count > 2) {
    large(*ranks, std::stoul(words[2]));
    ranks->barrier();
  } else if (what == "compute" && count > 2) {
    ranks->barrier();
    if (ranks->rank() == 1) std::this_thread::sleep_for(std::chrono::seconds(std::stol(words[2])));
    ranks->barrier();
  } else if (what == "abort") {
    ranks->barrier();
    if (ranks->rank() == 1) ranks->abort("rank 1: the disk is full");
    ranks->barrier();
  } else if (what == "leave") {
    if (ranks->rank() != 1) ranks->barrier();
  }
  return 0;
}

int run(int count, char** words) {
  if (count > 3 && words[1] == std::string("local")) {
    LocalWorkers workers({.size = std::stoi(words[2]),
                          .arguments = std::vector<std::string>(words + 3, words + count),
                          .log_folder = std::getenv("LOG_FOLDER")});
    const int code = member(workers.leader(), count - 2, words + 2);
    const std::string failure = workers.wait(60.0);
    if (!failure.empty()) throw Error(failure);
    return code;
  }
  return member(ranks_from_environment([](const char* name) { return std::getenv(name); }), count,
                words);
}

}  // namespace

int main(int count, char** words) {
  try {
    return run(count, words);
  } catch (const Lost& lost) {
    say(std::string("lost: ") + lost.what());
    return 3;
  } catch (const std::exception& error) {
    say(std::string("error: ") + error.what());
    return 2;
  }
}
