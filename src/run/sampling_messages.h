// What rank 0 and the sampling workers of the other ranks say to each other on Channel::sampling.
//
// An order is a byte that says what it is, and its arguments. A message to a worker has one order
// or several, one to rank 0 has one report. Numbers of requests are rank 0's.
//
//   begin    weights     makes an engine
//   request  request
//   cancel   number      its samples give no result
//   weights  weights     for the tokens from now on
//   end                  alone in its message: drops the engine with all that it samples; answered
//                        by `ended`
//   leave                alone in its message: the worker ends
//
//   results  sequences   that have ended
//   failed   text        the engine is gone; nothing but `ended` follows
//   ended                the last report until the next `begin`
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "data/sampling.h"
#include "model/parameters.h"

namespace leeway {

enum class SamplingOrder { begin, request, cancel, weights, end, leave };
enum class SamplingReport { results, failed, ended };

// A message of one order or report without arguments.
std::string message_of(SamplingOrder order);
std::string message_of(SamplingReport report);

void put_request(ByteWriter& to, int64_t number, const Request& request);
struct NumberedRequest {
  int64_t number = 0;
  Request request;
};
NumberedRequest get_request(ByteReader& from);

// `numbers` null: the version alone, whose weights the other rank has. Of an adapter its own
// numbers travel, the base is there.
void put_weights(ByteWriter& to, PolicyVersion version, const Parameters* numbers);
struct SentWeights {
  PolicyVersion version = 0;
  std::shared_ptr<const Parameters> numbers;  // null: the version alone
};
// `like`: weights of the same shape, with the base if they are an adapter.
SentWeights get_weights(ByteReader& from, const Parameters& like);

void put_results(ByteWriter& to, const std::vector<SampledSequence>& results);
// Throws Error if the lists of a result have different lengths.
std::vector<SampledSequence> get_results(ByteReader& from);

}  // namespace leeway
