// What a server answers is checked before anything is made of it.
#pragma once

#include <cstdint>
#include <vector>

#include "data/sampling.h"

namespace leeway {

struct AnswerBounds {
  int64_t vocab_size = 0;
  PolicyVersion oldest = 0, newest = 0;  // versions that the server can have had meanwhile
  bool stops_as_asked = true;            // a stop is one of the request's stop ids
};

// Throws Error naming the choice, the place and the value of the first thing that is wrong: another
// number of samples, lists of different lengths, no token or too many, an id outside the
// vocabulary, a log-probability that is not finite or above 0, a version that cannot be, a stop id
// before the end, an end that is none. Samples that the server has given up (cancelled) are not
// looked at.
void check_samples(const Request& request, const std::vector<SampledSequence>& samples,
                   const AnswerBounds& bounds);

}  // namespace leeway
