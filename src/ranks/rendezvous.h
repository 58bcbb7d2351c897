// How ranks find each other: rank 0 listens, the others connect to it and say who they are, and all
// learn of all. The connections stay open for control.h.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ranks/options.h"
#include "ranks/sockets.h"

namespace leeway {

// What all ranks know of one.
struct RankMember {
  std::string host;
  int64_t process = 0;
  std::string address;  // where its data connections are
};

// "rank 2 (host NAME, process 1234)"
std::string name_of(int rank, const RankMember& member);

struct Party {
  std::vector<RankMember> members;  // by rank
  std::vector<FrameSocket> links;   // by rank; on rank 0 to all others, elsewhere to rank 0 alone
};

// Waits for all ranks, at most options.start_timeout. Throws Error: a port that is taken, ranks
// that did not come (named), a rank of another size or version, a rank 0 of another job; Lost: a
// rank that ended meanwhile. All ranks that have arrived throw the same.
Party meet(const RanksOptions& options);

}  // namespace leeway
