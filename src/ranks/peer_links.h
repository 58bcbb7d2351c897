// GroupControl connections between ranks besides rank 0, where their data goes: so that a network
// that is cut between two of them is noticed by them.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "ranks/rendezvous.h"

namespace leeway {

class PeerLinks {
 public:
  // Listens for the ranks above this one.
  explicit PeerLinks(const RanksOptions& options, const RankMember& own);
  int port() const { return port_; }

  // A connection to each rank but this one and rank 0, [size]: to those below it connects, at
  // `ports`, those above connect to it. Asks `lost` meanwhile, which may wait for so many seconds,
  // why it should give up; "": it should not. Throws Error naming a rank that is not reached, and
  // Lost.
  std::vector<FrameSocket> connect(const std::vector<RankMember>& members,
                                   const std::vector<int>& ports,
                                   const std::function<std::string(double seconds)>& lost);

 private:
  const RanksOptions& options_;
  Descriptor listener_;
  int port_;
};

}  // namespace leeway
