#include "orchestrator/batch.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "text/trajectory.h"

namespace leeway {
namespace {

// Mean, maximum and minimum of the values added.
struct Statistic {
  double sum = 0.0, most = 0.0, least = 0.0;
  int64_t count = 0;

  void add(double value) {
    most = count == 0 ? value : std::max(most, value);
    least = count == 0 ? value : std::min(least, value);
    sum += value;
    ++count;
  }
  double mean() const { return count > 0 ? sum / static_cast<double>(count) : std::nan(""); }
};

struct Tally {
  Statistic reward, lag;
  std::map<std::string, Statistic> parts, metrics;
};

// Everything counted while a batch is prepared.
class Summary {
 public:
  explicit Summary(const std::vector<std::string>& ids) : ids_(ids), by_environment_(ids.size()) {}

  void add(size_t environment, const Rollout& rollout, PolicyVersion version) {
    Tally& own = by_environment_[environment];
    all_.reward.add(rollout.reward);
    own.reward.add(rollout.reward);
    for (const RewardPart& part : rollout.rewards) own.parts[part.name].add(part.value);
    for (const auto& [name, value] : rollout.metrics) own.metrics[name].add(value);
    for (const TrajectoryStep& step : rollout.steps) {
      for (PolicyVersion sampled_by : step.versions) {
        all_.lag.add(static_cast<double>(version - sampled_by));
        own.lag.add(static_cast<double>(version - sampled_by));
      }
    }
    turns_.add(static_cast<double>(rollout.steps.size()));
    decode_.add(static_cast<double>(rollout.sampled_tokens()));
    truncated_.add(rollout.truncated ? 1.0 : 0.0);
  }
  void add(const SplitTrajectory& split) {
    samples_.add(static_cast<double>(split.samples.size()));
    for (const Sample& sample : split.samples) {
      length_.add(static_cast<double>(sample.ids.size()));
    }
    for (const PrefixBreak& broken : split.breaks) ++breaks_[name_of(broken.reason)];
  }

  void write(Metrics& out) const {
    write_tally("all", all_, out);
    for (size_t e = 0; e < ids_.size(); ++e) {
      if (by_environment_[e].reward.count > 0) write_tally(ids_[e], by_environment_[e], out);
    }
    out.emplace_back("samples_per_rollout", samples_.mean());
    int64_t breaks = 0;
    for (const auto& [reason, count] : breaks_) {
      breaks += count;
      out.emplace_back("prefix_breaks/" + reason, static_cast<double>(count));
    }
    out.emplace_back("prefix_breaks/all", static_cast<double>(breaks));
    write_mean_max("turns/all", turns_, out);
    write_mean_max("seq_len/all", length_, out);
    write_mean_max("decode_len/all", decode_, out);
    out.emplace_back("is_truncated/all", truncated_.mean());
  }

 private:
  static void write_mean_max(const std::string& name, const Statistic& value, Metrics& out) {
    out.emplace_back(name + "/mean", value.mean());
    out.emplace_back(name + "/max", value.most);
  }
  static void write_tally(const std::string& id, const Tally& tally, Metrics& out) {
    write_mean_max("reward/" + id, tally.reward, out);
    out.emplace_back("reward/" + id + "/min", tally.reward.least);
    for (const auto& [part, value] : tally.parts) {
      out.emplace_back("reward/" + id + "/" + part, value.mean());
    }
    for (const auto& [name, value] : tally.metrics) {
      out.emplace_back("env_metrics/" + id + "/" + name + "/mean", value.mean());
    }
    write_mean_max("off_policy_level/" + id, tally.lag, out);
  }

  const std::vector<std::string>& ids_;
  Tally all_;
  std::vector<Tally> by_environment_;
  Statistic samples_, turns_, length_, decode_, truncated_;
  std::map<std::string, int64_t> breaks_;
};

}  // namespace

PreparedBatch prepare_batch(int64_t step, std::vector<Group> groups,
                            const std::vector<std::string>& ids, const BatchOptions& options) {
  PreparedBatch batch;
  batch.learner.step = step;
  std::vector<GroupRewards> rewards(groups.size());
  for (size_t g = 0; g < groups.size(); ++g) {
    for (const Rollout& rollout : groups[g].rollouts) {
      rewards[g].rewards.push_back(rollout.reward);
      rewards[g].lengths.push_back(rollout.sampled_tokens());
    }
  }
  AdvantageResult advantages = compute_advantages(rewards, options.advantage);

  Summary summary(ids);
  int64_t filtered = 0, trained = 0;
  int32_t number = 0;
  for (size_t g = 0; g < groups.size(); ++g) {
    const std::vector<double>& own = advantages.advantages[g];
    const bool zero = std::all_of(own.begin(), own.end(), [](double a) { return a == 0.0; });
    const bool leave_out = zero && options.filter_zero_advantages;
    filtered += leave_out ? 1 : 0;
    for (size_t r = 0; r < groups[g].rollouts.size(); ++r, ++number) {
      const Rollout& rollout = groups[g].rollouts[r];
      batch.first_sample.push_back(batch.learner.samples.size());
      batch.sampled_tokens += rollout.sampled_tokens();
      summary.add(groups[g].environment, rollout, static_cast<PolicyVersion>(step - 1));
      SplitTrajectory split = split_trajectory(rollout.steps);
      summary.add(split);
      if (leave_out) {
        ++batch.filtered_rollouts;
        continue;
      }
      ++trained;
      for (Sample& sample : split.samples) {
        sample.advantages = {static_cast<float>(own[r])};
        sample.rollout_id = number;
        sample.temperature = options.temperature;
        batch.learner.samples.push_back(std::move(sample));
      }
    }
  }
  batch.first_sample.push_back(batch.learner.samples.size());
  summary.write(batch.metrics);
  const auto count = [&](const char* name, int64_t value) {
    batch.metrics.emplace_back(name, static_cast<double>(value));
  };
  count("singleton_groups", advantages.singleton_groups);
  count("zero_advantage_groups", advantages.zero_variance_groups);
  count("filtered_groups", filtered);
  count("batch/rollouts", trained);
  count("batch/samples", static_cast<int64_t>(batch.learner.samples.size()));
  batch.groups = std::move(groups);
  batch.advantages = std::move(advantages.advantages);
  return batch;
}

}  // namespace leeway
