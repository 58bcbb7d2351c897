#include "orchestrator/schedule_state_json.h"

#include <gtest/gtest.h>

#include <bit>
#include <cstring>

#include "base/json.h"
#include "orchestrator/fake_system.h"

namespace leeway {
namespace {

using namespace leeway::testing;

constexpr uint64_t kSmallSize = 9;  // prompts of the environment `small`

EnvironmentMix two_environments() {
  std::vector<EnvironmentMix::Member> members;
  members.push_back(fake_member("letters", 1.0));
  auto small = std::make_unique<FakeEnvironment>("small", respond_by_letter);
  small->train_size = kSmallSize;
  members.push_back({"small", 2.0, std::move(small)});
  return EnvironmentMix(std::move(members), 3);
}
const std::vector<std::string> kIds = {"letters", "small"};

int64_t random_count(Rng& rng) {
  return static_cast<int64_t>(rng.next() >> (11 + rng.below(53)));  // up to 2^53
}
// Any bits that are a finite number.
double random_double(Rng& rng) {
  for (;;) {
    const double value = std::bit_cast<double>(rng.next());
    if (std::isfinite(value)) return value;
  }
}
float random_float(Rng& rng) {
  for (;;) {
    const float value = std::bit_cast<float>(static_cast<uint32_t>(rng.next()));
    if (std::isfinite(value)) return value;
  }
}
// Any bytes: what a policy writes need not be UTF-8.
std::string random_text(Rng& rng) {
  std::string text(rng.below(12), ' ');
  for (char& c : text) c = static_cast<char>(rng.below(256));
  return text;
}
std::vector<int32_t> random_ids(Rng& rng, size_t count) {
  std::vector<int32_t> ids(count);
  for (int32_t& id : ids) id = static_cast<int32_t>(rng.next());
  return ids;
}

Rollout random_rollout(Rng& rng) {
  Rollout rollout;
  rollout.reward = random_double(rng);
  rollout.truncated = rng.below(2) == 0;
  rollout.text = random_text(rng);
  for (uint64_t i = rng.below(3); i > 0; --i) {
    rollout.rewards.push_back({random_text(rng), random_double(rng), random_double(rng)});
  }
  for (uint64_t i = 1 + rng.below(3); i > 0; --i) {
    TrajectoryStep& step = rollout.steps.emplace_back();
    step.prompt = random_ids(rng, rng.below(5));
    step.completion = random_ids(rng, 1 + rng.below(5));
    step.versions = random_ids(rng, step.completion.size());
    for (size_t t = 0; t < step.completion.size(); ++t) step.logprobs.push_back(random_float(rng));
    if (rng.below(2) == 0) step.loss_mask.assign(step.completion.size(), rng.below(2) == 0);
  }
  for (uint64_t i = rng.below(3); i > 0; --i) {
    rollout.metrics.emplace_back(random_text(rng), random_double(rng));
  }
  if (rng.below(2) == 0) return rollout;
  for (const TrajectoryStep& step : rollout.steps) {
    StepCredit& credit = rollout.credit.emplace_back();
    if (rng.below(2) == 0) credit.reward = random_float(rng);
    if (rng.below(2) == 0) continue;
    for (size_t t = 0; t < step.completion.size(); ++t) {
      credit.advantages.push_back(random_float(rng));
    }
  }
  return rollout;
}

ScheduleCounts random_counts(Rng& rng) {
  ScheduleCounts counts(kIds.size());
  for (auto* values : {&counts.errored, &counts.empty, &counts.completed, &counts.dropped_groups}) {
    for (int64_t& value : *values) value = random_count(rng);
  }
  for (int64_t* count : {&counts.cancelled_stale, &counts.cancelled_dropped, &counts.partial_groups,
                         &counts.quarantined_draws}) {
    *count = random_count(rng);
  }
  for (uint64_t i = rng.below(7); i > 0; --i) {
    counts.failures[static_cast<FailureKind>(rng.below(6))] = random_count(rng);
  }
  for (uint64_t i = rng.below(3); i > 0; --i) {
    counts.given_up.push_back({random_count(rng), rng.below(2), rng.below(kSmallSize),
                               random_count(rng), rng.below(2) == 0, random_text(rng)});
  }
  return counts;
}

ScheduleState random_state(uint64_t seed, const EnvironmentMix& mix) {
  Rng rng(seed);
  ScheduleState state;
  state.version = static_cast<PolicyVersion>(rng.below(uint64_t{1} << 31));
  for (int64_t* count : {&state.batches_taken, &state.next_rollout}) {
    *count = random_count(rng);
  }
  ScheduleTotals& t = state.totals;
  for (int64_t* count :
       {&t.admitted, &t.completed, &t.failed, &t.cancelled, &t.batched, &t.filtered, &t.stale,
        &t.dropped, &t.groups_opened, &t.groups_dropped, &t.groups_stale, &t.groups_batched,
        &t.groups_partial, &t.quarantined_prompts, &t.sampled_tokens, &t.failures_in_a_row}) {
    *count = random_count(rng);
  }
  for (uint64_t i = rng.below(4); i > 0; --i) {
    Group& group = state.finished.emplace_back();
    group.number = random_count(rng);
    group.environment = rng.below(2);
    const uint64_t index = group.environment == 1 ? rng.below(kSmallSize) : rng.below(1000000);
    group.example = mix.members()[group.environment].environment->example(Split::train, index);
    for (uint64_t k = 1 + rng.below(3); k > 0; --k) group.rollouts.push_back(random_rollout(rng));
  }
  for (uint64_t i = rng.below(4); i > 0; --i) {
    state.open.emplace_back(state.next_group, random_count(rng));
    state.next_group += 1 + static_cast<int64_t>(rng.below(1000));
  }
  for (uint64_t i = rng.below(4); i > 0; --i) {
    const size_t environment = rng.below(2);
    const uint64_t index = environment == 1 ? rng.below(kSmallSize) : rng.below(1000000);
    state.prompt_failures[{environment, index}] = random_count(rng);
  }
  state.counts = random_counts(rng);
  return state;
}

template <class T>
bool same_bits(const T& a, const T& b) {
  return std::memcmp(&a, &b, sizeof(T)) == 0;
}
template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

void expect_same(const Rollout& a, const Rollout& b) {
  EXPECT_TRUE(same_bits(a.reward, b.reward)) << a.reward << " " << b.reward;
  EXPECT_EQ(a.truncated, b.truncated);
  EXPECT_EQ(a.text, b.text);
  ASSERT_EQ(a.rewards.size(), b.rewards.size());
  for (size_t i = 0; i < a.rewards.size(); ++i) {
    EXPECT_EQ(a.rewards[i].name, b.rewards[i].name);
    EXPECT_TRUE(same_bits(a.rewards[i].weight, b.rewards[i].weight));
    EXPECT_TRUE(same_bits(a.rewards[i].value, b.rewards[i].value));
  }
  ASSERT_EQ(a.steps.size(), b.steps.size());
  for (size_t i = 0; i < a.steps.size(); ++i) {
    EXPECT_EQ(a.steps[i].prompt, b.steps[i].prompt);
    EXPECT_EQ(a.steps[i].completion, b.steps[i].completion);
    EXPECT_TRUE(same_bits(a.steps[i].logprobs, b.steps[i].logprobs));
    EXPECT_EQ(a.steps[i].versions, b.steps[i].versions);
    EXPECT_EQ(a.steps[i].loss_mask, b.steps[i].loss_mask);
  }
  EXPECT_EQ(a.metrics, b.metrics);
  ASSERT_EQ(a.credit.size(), b.credit.size());
  for (size_t i = 0; i < a.credit.size(); ++i) {
    EXPECT_EQ(a.credit[i].reward, b.credit[i].reward);
    EXPECT_EQ(a.credit[i].advantages, b.credit[i].advantages);
  }
  ASSERT_EQ(a.credit.size(), b.credit.size());
  for (size_t i = 0; i < a.credit.size(); ++i) {
    EXPECT_EQ(a.credit[i].reward, b.credit[i].reward);
    EXPECT_TRUE(same_bits(a.credit[i].advantages, b.credit[i].advantages));
  }
}

void expect_same(const ScheduleCounts& a, const ScheduleCounts& b) {
  EXPECT_EQ(a.errored, b.errored);
  EXPECT_EQ(a.empty, b.empty);
  EXPECT_EQ(a.completed, b.completed);
  EXPECT_EQ(a.dropped_groups, b.dropped_groups);
  EXPECT_EQ(a.failures, b.failures);
  EXPECT_EQ(a.cancelled_stale, b.cancelled_stale);
  EXPECT_EQ(a.cancelled_dropped, b.cancelled_dropped);
  EXPECT_EQ(a.partial_groups, b.partial_groups);
  EXPECT_EQ(a.quarantined_draws, b.quarantined_draws);
  ASSERT_EQ(a.given_up.size(), b.given_up.size());
  for (size_t i = 0; i < a.given_up.size(); ++i) {
    EXPECT_EQ(a.given_up[i].number, b.given_up[i].number);
    EXPECT_EQ(a.given_up[i].environment, b.given_up[i].environment);
    EXPECT_EQ(a.given_up[i].example, b.given_up[i].example);
    EXPECT_EQ(a.given_up[i].survivors, b.given_up[i].survivors);
    EXPECT_EQ(a.given_up[i].trained, b.given_up[i].trained);
    EXPECT_EQ(a.given_up[i].message, b.given_up[i].message);
  }
}

TEST(ScheduleStateJson, ComesBackBitForBit) {
  const EnvironmentMix mix = two_environments();
  for (uint64_t seed = 0; seed < 400; ++seed) {
    SCOPED_TRACE(fmt::format("seed {}", seed));
    const ScheduleState state = random_state(seed, mix);
    const std::string json = schedule_state_json(state, kIds);
    const ScheduleState back = parse_schedule_state("schedule.json", json, mix);
    EXPECT_EQ(back.version, state.version);
    EXPECT_EQ(back.batches_taken, state.batches_taken);
    EXPECT_EQ(back.next_group, state.next_group);
    EXPECT_EQ(back.next_rollout, state.next_rollout);
    EXPECT_TRUE(same_bits(back.totals, state.totals));
    EXPECT_EQ(back.open, state.open);
    EXPECT_EQ(back.prompt_failures, state.prompt_failures);
    expect_same(back.counts, state.counts);
    ASSERT_EQ(back.finished.size(), state.finished.size());
    for (size_t g = 0; g < state.finished.size(); ++g) {
      EXPECT_EQ(back.finished[g].number, state.finished[g].number);
      EXPECT_EQ(back.finished[g].environment, state.finished[g].environment);
      EXPECT_EQ(back.finished[g].example.index, state.finished[g].example.index);
      EXPECT_EQ(back.finished[g].example.messages.at(0).content,
                state.finished[g].example.messages.at(0).content);
      ASSERT_EQ(back.finished[g].rollouts.size(), state.finished[g].rollouts.size());
      for (size_t r = 0; r < state.finished[g].rollouts.size(); ++r) {
        expect_same(back.finished[g].rollouts[r], state.finished[g].rollouts[r]);
      }
    }
    EXPECT_EQ(schedule_state_json(back, kIds), json);
    if (HasFailure()) return;
  }
}

TEST(ScheduleStateJson, LosesTheSignOfZeroAlone) {
  const EnvironmentMix mix = two_environments();
  ScheduleState state;
  Group& group = state.finished.emplace_back();
  group.example = mix.members()[0].environment->example(Split::train, 0);
  Rollout& rollout = group.rollouts.emplace_back();
  rollout.reward = -0.0;
  rollout.steps = {{.prompt = {1}, .completion = {2}, .logprobs = {-0.0f}, .versions = {0}}};
  const ScheduleState back =
      parse_schedule_state("schedule.json", schedule_state_json(state, kIds), mix);
  EXPECT_EQ(back.finished.at(0).rollouts.at(0).reward, 0.0);
  EXPECT_EQ(back.finished.at(0).rollouts.at(0).steps.at(0).logprobs.at(0), 0.0f);
}

// A state with something in every list, in words whose numbers are easy to find.
std::string full_json() {
  return R"({"format": 1, "version": 2, "batches_taken": 2, "next_group": 9, "next_rollout": 40,
 "admitted": 30, "completed": 20, "failed": 5, "cancelled": 5, "batched": 12, "filtered": 0,
 "stale": 3, "dropped": 3, "groups_opened": 7, "groups_dropped": 1, "groups_stale": 1,
 "groups_batched": 4, "groups_partial": 0, "quarantined_prompts": 1, "sampled_tokens": 99,
 "failures_in_a_row": 2,
 "open": [{"number": 7, "failed_rounds": 1}, {"number": 8, "failed_rounds": 0}],
 "prompt_failures": [{"environment": "small", "example": 8, "groups": 3}],
 "counts": {"cancelled_stale": 1, "cancelled_dropped": 2, "partial_groups": 0,
  "quarantined_draws": 4, "failures": [{"kind": "timeout", "rollouts": 3}],
  "environments": [{"environment": "small", "errored": 3, "empty": 1, "dropped_groups": 1}],
  "given_up": [{"number": 5, "environment": "small", "example": 7, "survivors": 2,
                "trained": false, "message": "timeout: 20 s"}]},
 "finished": [{"number": 6, "environment": "small", "example": 5, "rollouts": [
  {"reward": 1, "truncated": false, "text": "abc", "rewards": [
    {"name": "exact", "weight": 1, "value": 1}],
   "steps": [{"prompt": [1, 2], "completion": [3, 4], "logprobs": [-0.5, -0.25],
              "versions": [1, 2]}]}]}]})";
}

std::string error_of(const std::string& json) {
  const EnvironmentMix mix = two_environments();
  try {
    parse_schedule_state("run/schedule.json", json, mix);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

std::string replaced(const std::string& from, const std::string& to) {
  std::string json = full_json();
  const size_t at = json.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return json.replace(at, from.size(), to);
}

// Every key of the text, as it stands there.
std::vector<std::string> keys_of(const std::string& json) {
  std::vector<std::string> keys;
  for (size_t at = json.find("\": "); at != std::string::npos; at = json.find("\": ", at + 1)) {
    keys.push_back(json.substr(json.rfind('"', at - 1), at + 1 - json.rfind('"', at - 1)));
  }
  return keys;
}

TEST(ScheduleStateJson, NamesAKeyThatIsMissing) {
  ASSERT_EQ(error_of(full_json()), "");
  const std::vector<std::string> keys = keys_of(full_json());
  ASSERT_GT(keys.size(), 50u);
  for (const std::string& key : keys) {
    if (key == "\"counts\"") continue;
    const std::string error = error_of(replaced(key + ":", "\"other\":"));
    EXPECT_NE(error.find(key + " is missing"), std::string::npos) << key << ": " << error;
    EXPECT_EQ(error.find("run/schedule.json: "), 0u) << error;
  }
}

TEST(ScheduleStateJson, ReadsStatesWithoutCountsAsZeros) {
  const EnvironmentMix mix = two_environments();
  const ScheduleState state =
      parse_schedule_state("schedule.json", replaced("\"counts\":", "\"other\":"), mix);
  EXPECT_EQ(state.totals.admitted, 30);
  expect_same(state.counts, ScheduleCounts(kIds.size()));
  const ScheduleState with = parse_schedule_state("schedule.json", full_json(), mix);
  EXPECT_EQ(with.counts.errored, (std::vector<int64_t>{0, 3}));
}

// The key's value in place of which `value` stands.
TEST(ScheduleStateJson, NamesAKeyWhoseValueCannotBe) {
  const std::string json = full_json();
  for (const std::string& key : keys_of(json)) {
    const size_t begin = json.find(key + ": ") + key.size() + 2;
    size_t end = begin;
    if (json[begin] == '[' || json[begin] == '{') {
      int depth = 0;
      do {
        depth += json[end] == '[' || json[end] == '{' ? 1 : 0;
        depth -= json[end] == ']' || json[end] == '}' ? 1 : 0;
        ++end;
      } while (depth > 0);
    } else {
      end = json.find_first_of(",}", begin);
    }
    for (const char* value : {"null", "{}", "\"x\"", "-1.5", "[true]"}) {
      // Texts may be any text, numbers of rewards any number.
      const bool text = json[begin] == '"',
                 any_number = key == "\"reward\"" || key == "\"weight\"" || key == "\"value\"";
      const bool any_text = text && key != "\"environment\"" && key != "\"kind\"";
      const bool good = (any_text && value[0] == '"') || (any_number && value[0] == '-');
      const std::string error = error_of(json.substr(0, begin) + value + json.substr(end));
      EXPECT_EQ(error.empty(), good) << key << ": " << value << ": " << error;
      const bool empty_counts = key == "\"counts\"" && value[0] == '{';
      const std::string word = key == "\"format\"" ? "format"
                               : empty_counts      ? "\"cancelled_stale\" is missing"
                                                   : key;
      if (!good && value != std::string("[true]") && value != std::string("\"x\"")) {
        EXPECT_NE(error.find(word), std::string::npos) << key << ": " << value << ": " << error;
      }
    }
  }
}

TEST(ScheduleStateJson, RefusesWhatDoesNotFitTheRun) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {replaced("\"format\": 1", "\"format\": 2"), "is not a schedule in format 1"},
      {"[]", "is not a schedule in format 1"},
      {"", "line 1"},
      {replaced("\"environment\": \"small\", \"example\": 8", "\"environment\": \"x\""),
       "the configuration has no environment \"x\""},
      {replaced("\"environment\": \"small\", \"example\": 5", "\"environment\": \"y\""),
       "the configuration has no environment \"y\""},
      {replaced("\"example\": 8", "\"example\": 9"), "\"example\" = 9 is not among the 9"},
      {replaced("\"example\": 5", "\"example\": 10"), "\"example\" = 10 is not among the 9"},
      {replaced("\"environment\": \"small\", \"errored\"", "\"environment\": \"z\", \"errored\""),
       "the configuration has no environment \"z\""},
      {replaced("\"example\": 7", "\"example\": 11"), "\"example\" = 11 is not among the 9"},
      {replaced("\"timeout\"", "\"bad luck\""), "\"kind\" = \"bad luck\" is not a kind of failure"},
      {replaced("[-0.5, -0.25]", "[-0.5]"), "different lengths"},
      {replaced("\"versions\": [1, 2]", "\"versions\": [1, 2, 2]"), "different lengths"},
      {replaced("\"completion\": [3, 4]", "\"completion\": [3]"), "different lengths"},
      {replaced("\"completion\": [3, 4]", "\"completion\": [3, 4.5]"),
       "\"completion\" contains 4.5"},
      {replaced("\"prompt\": [1, 2]", "\"prompt\": [1, 3e9]"), "\"prompt\" contains"},
      {replaced("[-0.5, -0.25]", "[-0.5, -1e300]"), "\"logprobs\" contains"},
      {replaced("[-0.5, -0.25]", "[-0.5, NaN]"), "\"logprobs\" contains"},
      {replaced("\"number\": 8, \"failed", "\"number\": 9, \"failed"), "group 9"},
      {replaced("\"number\": 8, \"failed", "\"number\": 7, \"failed"), "group 7"},
      {replaced("\"next_rollout\": 40", "\"next_rollout\": 1e300"), "\"next_rollout\" = 1e+300"},
      {replaced("\"truncated\": false", "\"truncated\": 0"), "\"truncated\""},
      {replaced("\"versions\": [1, 2]", "\"versions\": [1, 2], \"loss_mask\": [1]"),
       "different lengths"},
      {replaced("\"versions\": [1, 2]", "\"versions\": [1, 2], \"loss_mask\": [1, 999]"),
       "\"loss_mask\" contains 999"},
      {replaced("\"truncated\": false", "\"truncated\": false, \"credit\": []"),
       "\"credit\" does not fit"},
      {replaced("\"truncated\": false",
                "\"truncated\": false, \"credit\": [{\"advantages\": [1, 2, 3]}]"),
       "\"credit\" does not fit"},
      {replaced("\"truncated\": false", "\"truncated\": false, \"credit\": [3]"),
       "\"advantages\" is missing"},
      {replaced("\"truncated\": false",
                "\"truncated\": false, \"metrics\": [{\"name\": 1, \"value\": 1}]"),
       "\"name\" is not a string"}};
  for (const auto& [json, words] : cases) {
    const std::string error = error_of(json);
    EXPECT_NE(error.find(words), std::string::npos) << words << ": " << error;
    EXPECT_EQ(error.find("run/schedule.json"), 0u) << error;
  }
}

TEST(ScheduleStateJson, ReadsOrRefusesAnyText) {
  const EnvironmentMix mix = two_environments();
  Rng rng(5);
  int64_t read = 0, refused = 0;
  for (uint64_t round = 0; round < 6000; ++round) {
    std::string json =
        round % 2 == 0 ? full_json() : schedule_state_json(random_state(round % 64, mix), kIds);
    if (rng.below(4) == 0) json.resize(rng.below(json.size()));
    for (uint64_t change = rng.below(4); change > 0 && !json.empty(); --change) {
      const size_t at = rng.below(json.size());
      const char* words[] = {"-", "0", "9e99", "[", "]", "{", "}", "\"", "null", ",", "1.5", "NaN"};
      switch (rng.below(3)) {
        case 0: json[at] = static_cast<char>(rng.below(256)); break;
        case 1: json.insert(at, words[rng.below(12)]); break;
        default: json.erase(at, 1 + rng.below(20));
      }
    }
    try {
      parse_schedule_state("schedule.json", json, mix);
      ++read;
    } catch (const Error&) {
      ++refused;
    }
  }
  EXPECT_GT(std::min(read, refused), 500);
}

}  // namespace
}  // namespace leeway
