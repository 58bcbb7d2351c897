// Who this process is in a group of ranks, and where the others are.
#pragma once

#include <functional>
#include <string>

namespace leeway {

struct RanksOptions {
  int rank = 0;
  int size = 1;
  int local_rank = 0;  // among the ranks of this host
  int local_size = 1;
  // Where rank 0 waits for the others: a name or an address, and a port.
  std::string leader_address = "127.0.0.1";
  int leader_port = 0;
  // Rank 0: a socket that listens there already, taken over; -1: it makes one.
  int listener = -1;
  // The same on all ranks of a group and different for each group, so that two cannot mix.
  std::string job;
  // The program's version; ranks of different versions do not work together.
  std::string version;
  // The network interface for data, e.g. "eth1"; "": the one that leads to rank 0.
  std::string interface;
  double link_timeout = 20.0;    // seconds without a word after which a rank is lost
  double start_timeout = 120.0;  // seconds for all ranks to arrive
  // Rank 0: why one of the others will never arrive, or ""; asked while it waits for them.
  std::function<std::string()> given_up = {};
  // Started by LocalWorkers, so that this process starts no others.
  bool local_worker = false;
};

}  // namespace leeway
