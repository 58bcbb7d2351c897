// In place of gloo_ranks.cpp where Gloo was not found.

#include "ranks/gloo_ranks.h"
#include "ranks/local_ranks.h"

namespace leeway {

std::unique_ptr<Ranks> join_ranks(const RanksOptions& options) {
  if (options.size == 1) return std::move(make_local_ranks(1)[0]);
  throw Error(
      "this program was built without Gloo, which ranks need: install libgloo-dev and build again");
}

}  // namespace leeway
