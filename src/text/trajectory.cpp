#include "text/trajectory.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <optional>
#include <unordered_map>

#include "leeway/error.h"

namespace leeway {
namespace {

// A polynomial hash modulo 2^61 - 1, updated token by token: one pass over a prompt gives the hash
// of each of its prefixes.
class PrefixHash {
 public:
  void push(int32_t id) {
    __extension__ using Wide = unsigned __int128;
    const Wide next = static_cast<Wide>(value_) * kBase + static_cast<uint32_t>(id) + 1u;
    value_ = static_cast<uint64_t>(next % kPrime);
  }
  uint64_t value() const { return value_; }

 private:
  static constexpr uint64_t kPrime = (uint64_t{1} << 61) - 1;
  static constexpr uint64_t kBase = 1140071481932319845u;
  uint64_t value_ = 7;
};

// A sample that can still be extended: the next prompt must start with its ids.
struct Live {
  size_t sample;
};

void check(const TrajectoryStep& step, size_t index) {
  auto same = [&](size_t size, const char* what, bool optional) {
    if (size == step.completion.size() || (optional && size == 0)) return;
    throw Error(fmt::format("step {}: {} {} for {} completion tokens", index, size, what,
                            step.completion.size()));
  };
  same(step.logprobs.size(), "log-probabilities", false);
  same(step.versions.size(), "versions", true);
  same(step.loss_mask.size(), "mask entries", true);
}

void append_context(Sample& sample, const std::vector<int32_t>& ids, size_t from) {
  const size_t count = ids.size() - from;
  sample.ids.insert(sample.ids.end(), ids.begin() + static_cast<std::ptrdiff_t>(from), ids.end());
  sample.loss_mask.resize(sample.loss_mask.size() + count, 0);
  sample.rollout.resize(sample.rollout.size() + count, 0.0f);
  sample.versions.resize(sample.versions.size() + count, -1);
  sample.step.resize(sample.step.size() + count, -1);
}

void append_completion(Sample& sample, const TrajectoryStep& step, size_t index) {
  const size_t n = step.completion.size();
  sample.ids.insert(sample.ids.end(), step.completion.begin(), step.completion.end());
  sample.rollout.insert(sample.rollout.end(), step.logprobs.begin(), step.logprobs.end());
  for (size_t t = 0; t < n; ++t) {
    sample.loss_mask.push_back(step.loss_mask.empty() ? 1 : step.loss_mask[t] != 0);
    sample.versions.push_back(step.versions.empty() ? -1 : step.versions[t]);
    sample.step.push_back(static_cast<int32_t>(index));
  }
}

size_t common_length(const std::vector<int32_t>& a, const std::vector<int32_t>& b) {
  return static_cast<size_t>(std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first -
                             a.begin());
}

// Finds where a prompt diverges from the sample with which it shares the longest prefix. Only
// recent samples are compared, so that a rollout with many breaks stays linear.
PrefixBreak explain_break(const std::vector<int32_t>& prompt, size_t step,
                          const std::vector<Sample>& samples,
                          const std::vector<size_t>& last_step) {
  constexpr size_t kMostCompared = 64;
  PrefixBreak out;
  out.step = step;
  size_t best = samples.size();
  for (size_t s = samples.size(); s-- > 0 && samples.size() - s <= kMostCompared;) {
    const size_t common = common_length(samples[s].ids, prompt);
    if (best == samples.size() || common > out.position) best = s, out.position = common;
  }
  const Sample& earlier = samples[best];
  out.earlier_step = last_step[best];
  if (out.position < prompt.size()) out.found = prompt[out.position];
  if (out.position < earlier.ids.size()) out.expected = earlier.ids[out.position];
  const auto sampled_before = [&] {
    return std::any_of(earlier.step.begin(),
                       earlier.step.begin() + static_cast<std::ptrdiff_t>(out.position),
                       [](int32_t s) { return s >= 0; });
  };
  if (out.position == earlier.ids.size()) {
    out.reason = BreakReason::forked;
  } else if (out.position == prompt.size()) {
    out.reason = BreakReason::context_shortened;
  } else if (earlier.step[out.position] >= 0) {
    out.reason = BreakReason::sampled_tokens_changed;
  } else {
    out.reason = sampled_before() ? BreakReason::forked : BreakReason::context_changed;
  }
  return out;
}

}  // namespace

const char* name_of(BreakReason reason) {
  switch (reason) {
    case BreakReason::sampled_tokens_changed: return "sampled_tokens_changed";
    case BreakReason::context_changed: return "context_changed";
    case BreakReason::context_shortened: return "context_shortened";
    case BreakReason::forked: return "forked";
  }
  return "?";
}

SplitTrajectory split_trajectory(const std::vector<TrajectoryStep>& steps) {
  SplitTrajectory out;
  // Live samples by length and hash of their ids. Lengths are sorted, so that one pass over a
  // prompt meets them in order.
  std::map<size_t, std::unordered_map<uint64_t, Live>> live;
  std::vector<size_t> last_step;  // of each sample
  for (size_t t = 0; t < steps.size(); ++t) {
    const TrajectoryStep& step = steps[t];
    check(step, t);
    PrefixHash hash;
    size_t matched_length = 0;
    std::optional<Live> matched;
    uint64_t matched_hash = 0;
    auto next = live.begin();
    for (size_t i = 0; i < step.prompt.size(); ++i) {
      hash.push(step.prompt[i]);
      if (next == live.end() || next->first != i + 1) continue;
      const auto found = next->second.find(hash.value());
      if (found != next->second.end()) {
        // Longer matches come later in the pass and replace shorter ones.
        matched = found->second;
        matched_length = i + 1;
        matched_hash = hash.value();
      }
      ++next;
    }
    if (matched && !std::equal(out.samples[matched->sample].ids.begin(),
                               out.samples[matched->sample].ids.end(), step.prompt.begin())) {
      matched.reset();  // hash collision
    }
    if (matched) {
      auto& same_length = live[matched_length];
      same_length.erase(matched_hash);
      if (same_length.empty()) live.erase(matched_length);
      append_context(out.samples[matched->sample], step.prompt, matched_length);
    } else {
      if (t > 0) {
        out.breaks.push_back(explain_break(step.prompt, t, out.samples, last_step));
      }
      matched = Live{out.samples.size()};
      out.samples.emplace_back();
      last_step.push_back(t);
      append_context(out.samples.back(), step.prompt, 0);
    }
    append_completion(out.samples[matched->sample], step, t);
    out.sample_of_step.push_back(matched->sample);
    last_step[matched->sample] = t;
    for (int32_t id : step.completion) hash.push(id);
    const size_t length = step.prompt.size() + step.completion.size();
    if (length > 0) live[length].insert_or_assign(hash.value(), Live{matched->sample});
  }
  return out;
}

}  // namespace leeway
