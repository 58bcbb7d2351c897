// Ranks that are processes, on one host or many: data moves by Gloo over TCP, sums have the order
// of tree_sum.h.
#pragma once

#include <memory>

#include "ranks/options.h"
#include "ranks/ranks.h"

namespace leeway {

// Meets the other ranks; returns when all are connected. One rank alone needs nothing. An object
// that is destroyed has left: those that wait for it, or would have to, throw Lost; it waits
// itself, at most link_timeout, until all have left. Throws Error and Lost, as meet() does, and
// Error if the program was built without Gloo.
std::unique_ptr<Ranks> join_ranks(const RanksOptions& options);

}  // namespace leeway
