// Messages to a sampling worker, whole and damaged, without a sampler on the other side.
#include "run/sampling_messages.h"

#include <gtest/gtest.h>

#include "engine/test_support.h"
#include "run/sampling_group.h"

namespace leeway {
namespace {

using namespace leeway::testing;

std::string orders_of(int requests, uint64_t seed) {
  ByteWriter orders;
  int64_t number = 0;
  for (const Request& request : assorted(requests, seed)) {
    orders.put(SamplingOrder::request);
    put_request(orders, number++, request);
  }
  orders.put(SamplingOrder::cancel);
  orders.put(int64_t{0});
  return orders.take();
}

std::string begin_with(const Parameters& weights) {
  ByteWriter order;
  order.put(SamplingOrder::begin);
  put_weights(order, 3, &weights);
  return order.take();
}

// Rank 0 by hand.
class Hand {
 public:
  explicit Hand(Ranks& ranks) : ranks_(ranks) {}
  void send(const std::string& message) { ranks_.send(1, Channel::sampling, message); }

  struct Report {
    SamplingReport kind;
    std::vector<SampledSequence> results;
    std::string failure;
  };
  Report next() {
    const std::string message = ranks_.receive(1, Channel::sampling);
    ByteReader reader(message);
    Report report{.kind = reader.get_enum(SamplingReport::ended), .results = {}, .failure = {}};
    if (report.kind == SamplingReport::results) report.results = get_results(reader);
    if (report.kind == SamplingReport::failed) report.failure = reader.get_string();
    reader.end();
    return report;
  }
  // The failures that are told before the engine has ended.
  std::vector<std::string> end() {
    send(message_of(SamplingOrder::end));
    std::vector<std::string> failures;
    while (true) {
      const Report report = next();
      if (report.kind == SamplingReport::ended) return failures;
      if (report.kind == SamplingReport::failed) failures.push_back(report.failure);
    }
  }

 private:
  Ranks& ranks_;
};

TEST(SamplingMessages, GiveBackWhatWasPut) {
  Request request = assorted(1, 3).front();
  request.sampling = {.temperature = 0.5f, .top_k = 4, .top_p = 0.75f, .min_p = 0.125f};
  request.stop_ids = {5, 6};
  request.top_logprobs = 2;
  SampledSequence result{.request = 7, .sample = 1, .finish = Finish::failed, .failure = "why"};
  result.ids = {1, 2};
  result.raw_logprobs = {-1.0f, -2.0f};
  result.processed_logprobs = {-0.5f, -1.5f};
  result.versions = {3, 4};
  result.top = {{9, -0.25f}, {8, -0.5f}};
  const Parameters weights = tiny_weights(Family::llama, 1);
  ByteWriter writer;
  put_request(writer, 42, request);
  put_results(writer, {result, {}});
  put_weights(writer, 5, nullptr);
  put_weights(writer, 6, &weights);
  const std::string message = writer.take();
  ByteReader reader(message);
  const NumberedRequest sent = get_request(reader);
  EXPECT_EQ(sent.number, 42);
  EXPECT_EQ(sent.request.prompt, request.prompt);
  EXPECT_EQ(sent.request.samples, request.samples);
  EXPECT_EQ(sent.request.max_new_tokens, request.max_new_tokens);
  EXPECT_EQ(sent.request.sampling.temperature, 0.5f);
  EXPECT_EQ(sent.request.sampling.top_k, 4);
  EXPECT_EQ(sent.request.sampling.top_p, 0.75f);
  EXPECT_EQ(sent.request.sampling.min_p, 0.125f);
  EXPECT_EQ(sent.request.stop_ids, request.stop_ids);
  EXPECT_EQ(sent.request.seed, request.seed);
  EXPECT_EQ(sent.request.top_logprobs, 2);
  const std::vector<SampledSequence> results = get_results(reader);
  ASSERT_EQ(results.size(), 2u);
  expect_same(results[0], result);
  EXPECT_EQ(results[0].request, 7);
  EXPECT_EQ(results[0].sample, 1);
  EXPECT_EQ(results[0].versions, result.versions);
  EXPECT_EQ(results[0].failure, "why");
  ASSERT_EQ(results[0].top.size(), 2u);
  EXPECT_EQ(results[0].top[1].id, 8);
  EXPECT_TRUE(results[1].ids.empty());
  const Parameters like(weights.config());
  const SentWeights version = get_weights(reader, like);
  EXPECT_EQ(version.version, 5);
  EXPECT_EQ(version.numbers, nullptr);
  const SentWeights numbers = get_weights(reader, like);
  EXPECT_EQ(numbers.version, 6);
  EXPECT_TRUE(same_bits(*numbers.numbers, weights));
  reader.end();
}

TEST(SamplingMessages, ResultsWhoseListsDifferInLengthAreRefused) {
  SampledSequence result;
  result.ids = {1, 2};
  result.raw_logprobs = result.processed_logprobs = {-1.0f, -2.0f};
  result.versions = {1, 1};
  const auto read = [](const SampledSequence& sent) {
    ByteWriter writer;
    put_results(writer, {sent});
    const std::string message = writer.take();
    ByteReader reader(message);
    get_results(reader);
  };
  read(result);
  SampledSequence bad = result;
  bad.raw_logprobs.pop_back();
  EXPECT_THROW(read(bad), Error);
  bad = result;
  bad.versions.push_back(1);
  EXPECT_THROW(read(bad), Error);
  bad = result;
  bad.top = {{1, 0.0f}, {2, 0.0f}, {3, 0.0f}};
  EXPECT_THROW(read(bad), Error);
}

TEST(SamplingMessages, AWorkerTellsWhatItCannotReadAndGoesOnAfterTheEnd) {
  const Parameters weights = tiny_weights(Family::qwen3, 1);
  SamplingGroup group(2, weights, {options_of(64), {}});
  Hand hand(group.at(0));
  ByteWriter other;
  other.put(SamplingOrder::begin);
  const Parameters larger = small_parameters(small_config(Family::qwen3, true), 1);
  put_weights(other, 0, &larger);
  ByteWriter twice;
  twice.put(SamplingOrder::request);
  put_request(twice, 1, make_request(4, 60, 1, 1));
  const std::string request = twice.take();
  struct Case {
    std::vector<std::string> messages;
    std::string failure;
  };
  const std::string begin = begin_with(weights);
  const std::vector<Case> cases = {
      {{""}, "too short"},
      {{"\x77"}, "the value 119"},
      {{begin.substr(0, begin.size() - 1)}, "too short"},
      {{begin + "\x77"}, "the value 119"},
      {{other.take()}, "elements"},
      {{begin, begin}, "while an engine samples"},
      {{request}, "has not begun"},
      {{begin, request + request}, "in flight already"},
      {{begin, request + message_of(SamplingOrder::end)}, "among others"},
      {{begin, request + message_of(SamplingOrder::leave)}, "among others"},
  };
  for (const Case& each : cases) {
    SCOPED_TRACE(each.failure);
    for (const std::string& message : each.messages) hand.send(message);
    hand.send(request);  // without effect, and no second failure
    const std::vector<std::string> failures = hand.end();
    ASSERT_EQ(failures.size(), 1u);
    EXPECT_NE(failures[0].find(each.failure), std::string::npos) << failures[0];
  }
  hand.send(begin);
  hand.send(request);
  const Hand::Report report = hand.next();
  ASSERT_EQ(report.results.size(), 1u) << report.failure;
  EXPECT_EQ(report.results[0].request, 1);
  EXPECT_EQ(report.results[0].versions.front(), 3);
  EXPECT_TRUE(hand.end().empty());
}

TEST(SamplingMessages, AWorkerSurvivesDamagedOrders) {
  const Parameters weights = tiny_weights(Family::qwen3, 1);
  EngineOptions options = options_of(64);
  options.kv_bytes = bytes_of(weights, 64);
  SamplingGroup group(2, weights, {options, {}});
  Hand hand(group.at(0));
  const std::string begin = begin_with(weights);
  Rng rng(17);
  int failed = 0;
  for (int round = 0; round < 400; ++round) {
    std::string orders = orders_of(3, static_cast<uint64_t>(round));
    const uint64_t damage = rng.below(4);
    const size_t place = rng.below(orders.size());
    if (damage == 0) orders.resize(place);
    if (damage == 1) orders[place] = static_cast<char>(rng.next());
    if (damage == 2) orders.insert(place, 1, static_cast<char>(rng.next()));
    if (damage == 3) orders.erase(place, 1 + rng.below(8));
    hand.send(begin);
    hand.send(orders);
    const std::vector<std::string> failures = hand.end();
    EXPECT_LE(failures.size(), 1u);
    failed += static_cast<int>(failures.size());
  }
  EXPECT_GT(failed, 100);
}

}  // namespace
}  // namespace leeway
