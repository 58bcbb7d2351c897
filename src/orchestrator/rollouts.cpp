#include "orchestrator/rollouts.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/rng.h"
#include "leeway/error.h"
#include "orchestrator/credit.h"
#include "orchestrator/rollout_calls.h"
#include "orchestrator/split.h"

namespace leeway {
namespace {

constexpr double kEnvironmentSlice = 0.001;  // seconds of sampling while environments are pending
constexpr double kDeadlineSlice = 0.1;       // seconds between checks of deadlines

double total(const std::vector<RewardPart>& rewards) {
  double sum = 0.0;
  for (const RewardPart& part : rewards) sum += part.weight * part.value;
  return sum;
}

// What is wrong with a reward; empty: nothing.
std::string problem_of(double reward) {
  // Training uses float32. The comparison also rejects NaN.
  if (std::abs(reward) <= std::numeric_limits<float>::max()) return "";
  return fmt::format(
      "the reward is {}: it must be a number that a float32 can hold, at most 3.4e38 either way",
      reward);
}

}  // namespace

int64_t Rollout::sampled_tokens() const {
  int64_t count = 0;
  for (const TrajectoryStep& step : steps) count += static_cast<int64_t>(step.completion.size());
  return count;
}

PolicyVersion Rollout::oldest_version() const {
  PolicyVersion oldest = std::numeric_limits<PolicyVersion>::max();
  for (const TrajectoryStep& step : steps) {
    for (PolicyVersion version : step.versions) oldest = std::min(oldest, version);
  }
  return oldest;
}

const char* name_of(FailureKind kind) {
  switch (kind) {
    case FailureKind::environment_error: return "environment_error";
    case FailureKind::empty: return "empty";
    case FailureKind::exception: return "exception";
    case FailureKind::timeout: return "timeout";
    case FailureKind::bad_answer: return "bad_answer";
    case FailureKind::sampler_error: return "sampler_error";
  }
  return "";
}

struct RolloutDriver::Running {
  int64_t rollout = 0;
  uint64_t seed = 0;  // for turns after the first
  Example example;
  const Environment* environment = nullptr;
  std::unique_ptr<Episode> episode;
  std::unique_ptr<RolloutCalls> calls;  // of an episode that asks
  std::vector<Message> history;
  std::vector<int32_t> prompt;  // of the turn in progress
  Reply reply;                  // the last one
  double deadline = 0.0;
  Rollout result;
};

RolloutDriver::RolloutDriver(const Conversation& conversation, Sampler& sampler, Clock& clock,
                             const RolloutSettings& settings)
    : conversation_(conversation), sampler_(sampler), clock_(clock), settings_(settings) {}

RolloutDriver::~RolloutDriver() = default;

void RolloutDriver::start(const Environment& environment, const Example& example,
                          const std::vector<int64_t>& rollouts, uint64_t seed, EpisodePlace first) {
  Rng seeds(seed);
  for (int64_t rollout : rollouts) {
    LEEWAY_CHECK(!rollouts_.contains(rollout), "a rollout's number is used once at a time");
    auto running = std::make_unique<Running>();
    running->rollout = rollout;
    running->seed = seeds.next();
    running->environment = &environment;
    running->example = example;
    running->history = example.messages;
    running->deadline = clock_.now() + settings_.timeout;
    rollouts_.emplace(rollout, std::move(running));
  }
  std::vector<int64_t> responding;  // whose episodes do not ask
  try {
    for (int64_t rollout : rollouts) {
      Running& running = *rollouts_.at(rollout);
      first.seed = mixed_seed({running.seed, 1}) >> 11;
      running.episode = environment.start(example, first);
      ++first.member;
      if (!running.episode->asks()) {
        responding.push_back(rollout);
        continue;
      }
      running.calls = std::make_unique<RolloutCalls>(conversation_, settings_, running.seed);
      pending_.insert(rollout);
    }
    if (!responding.empty()) submit(responding, conversation_.first_prompt(example), seed);
  } catch (const std::exception& error) {
    for (int64_t rollout : rollouts) fail(rollout, FailureKind::exception, error.what());
  }
}

void RolloutDriver::submit(const std::vector<int64_t>& rollouts, const std::vector<int32_t>& prompt,
                           uint64_t seed) {
  const int64_t room = settings_.max_length - static_cast<int64_t>(prompt.size());
  if (room <= 0) {
    throw Error(fmt::format("the prompt has {} tokens, the model {} positions", prompt.size(),
                            settings_.max_length));
  }
  Request request;
  request.prompt = prompt;
  request.samples = static_cast<int64_t>(rollouts.size());
  request.max_new_tokens = std::min(room, settings_.max_new_tokens);
  request.sampling = settings_.sampling;
  request.stop_ids = conversation_.stop_ids();
  request.seed = seed;
  const int64_t number = sampler_.submit(std::move(request));
  waits_[number] = {rollouts, static_cast<int64_t>(rollouts.size())};
  for (int64_t rollout : rollouts) rollouts_.at(rollout)->prompt = prompt;
}

void RolloutDriver::forget_requests(int64_t rollout) {
  const auto drop = [&](std::vector<int64_t>& members) {
    std::replace(members.begin(), members.end(), rollout, int64_t{-1});
    return std::none_of(members.begin(), members.end(), [](int64_t member) { return member >= 0; });
  };
  for (auto wait = waits_.begin(); wait != waits_.end();) {
    const bool unwanted = drop(wait->second.rollouts);
    if (unwanted) sampler_.cancel(wait->first);
    wait = unwanted ? waits_.erase(wait) : std::next(wait);
  }
  std::erase_if(scorings_, [&](Scoring& scoring) { return drop(scoring.rollouts); });
  std::erase(unscored_, rollout);
}

bool RolloutDriver::cancel(int64_t rollout, const std::string& reason) {
  if (!rollouts_.contains(rollout)) return false;
  forget_requests(rollout);
  RolloutOutcome outcome;
  outcome.outcome = Outcome::cancelled;
  outcome.message = reason;
  end(rollout, std::move(outcome));
  return true;
}

std::vector<RolloutOutcome> RolloutDriver::poll(double seconds) {
  // A pending environment is polled often: nothing else tells when it is ready.
  // Outcomes at hand leave the sampler a moment too: rollouts that fail as they start, again and
  // again, must not keep it from working for others.
  const bool asked = !pending_.empty() || !scorings_.empty();
  const bool hurry = asked || !outcomes_.empty();
  const double slice = hurry ? std::min(seconds, kEnvironmentSlice) : seconds;
  const bool sampling = !waits_.empty();
  for (SampledSequence& result : sampler_.poll(slice)) {
    const auto wait = waits_.find(result.request);
    if (wait == waits_.end()) continue;
    int64_t& member = wait->second.rollouts.at(static_cast<size_t>(result.sample));
    const int64_t rollout = member;
    const size_t call = wait->second.call;
    member = -1;
    if (--wait->second.open == 0) waits_.erase(wait);
    if (rollout >= 0) take(*rollouts_.at(rollout), call, std::move(result));
  }
  const size_t before = outcomes_.size();
  poll_environments();
  poll_scorings();
  if (outcomes_.size() == before && !sampling && asked) {
    const double begin = clock_.now();
    clock_.sleep(slice);
    waited_for_environments_ += clock_.now() - begin;
  }
  if (settings_.timeout > 0.0) end_late_rollouts();
  return std::exchange(outcomes_, {});
}

void RolloutDriver::poll_environments() {
  for (int64_t rollout : std::vector<int64_t>(pending_.begin(), pending_.end())) {
    Running& running = *rollouts_.at(rollout);
    pending_.erase(rollout);
    try {
      advance(running, running.episode->poll());
    } catch (const std::exception& error) {
      fail(rollout, FailureKind::exception, error.what());
    }
  }
}

void RolloutDriver::end_late_rollouts() {
  const double now = clock_.now();
  if (now < next_look_) return;
  next_look_ = now + std::min(kDeadlineSlice, settings_.timeout / 4);
  std::vector<int64_t> late;
  for (const auto& [rollout, running] : rollouts_) {
    if (now > running->deadline) late.push_back(rollout);
  }
  for (int64_t rollout : late) {
    const Running& running = *rollouts_.at(rollout);
    const bool samples = running.calls && running.calls->open_calls() > 0;
    const bool scoring = running.calls && !pending_.contains(rollout);
    const bool environment = (pending_.contains(rollout) && !samples) || scoring;
    const size_t turns = running.calls ? static_cast<size_t>(running.calls->answered())
                                       : running.result.steps.size();
    const size_t turn = turns + (environment ? 0 : 1);
    forget_requests(rollout);
    fail(rollout, FailureKind::timeout,
         fmt::format("orchestrator.rollout_timeout: no end after {} s, in turn {}, waiting for the "
                     "{}",
                     settings_.timeout, turn, environment ? "environment" : "sampler"));
  }
}

void RolloutDriver::take(Running& running, size_t call, SampledSequence&& result) {
  if (result.finish == Finish::failed) {
    return fail(running.rollout, FailureKind::sampler_error, result.failure);
  }
  if (result.ids.empty()) {
    return fail(running.rollout, FailureKind::empty, "the reply has no token");
  }
  if (running.calls) {
    try {
      return running.episode->sampled(running.calls->close(call, std::move(result)));
    } catch (const std::exception& error) {
      return fail(running.rollout, FailureKind::exception, error.what());
    }
  }
  TrajectoryStep& step = running.result.steps.emplace_back();
  step.prompt = running.prompt;
  step.completion = std::move(result.ids);
  step.logprobs = std::move(result.processed_logprobs);
  step.versions = std::move(result.versions);
  try {
    running.reply =
        conversation_.read(step.completion, result.finish == Finish::length, running.example);
    running.result.text = running.reply.text;
    advance(running, running.episode->respond(running.reply));
  } catch (const std::exception& error) {
    fail(running.rollout, FailureKind::exception, error.what());
  }
}

void RolloutDriver::advance(Running& running, const Turn& turn) {
  switch (turn.kind) {
    case Turn::Kind::pending: pending_.insert(running.rollout); return;
    case Turn::Kind::failed: return fail(running.rollout, turn.failure_kind, turn.failure);
    case Turn::Kind::calls: return open_calls(running, turn.calls);
    case Turn::Kind::unscored: return end_episode(running, turn);
    case Turn::Kind::reward:
      if (running.calls) return end_episode(running, turn);
      running.result.truncated = running.reply.truncated;
      return complete(running, turn.rewards);
    case Turn::Kind::messages: break;
  }
  const TrajectoryStep& step = running.result.steps.back();
  running.history.push_back(message_of(running.reply));
  running.history.insert(running.history.end(), turn.messages.begin(), turn.messages.end());
  const auto turns = static_cast<int64_t>(running.result.steps.size());
  const std::vector<int32_t> prompt = conversation_.next_prompt(
      step.prompt, step.completion, running.history, turn.messages, running.example);
  // A rollout that should continue but has no room left has not completed its task: no reward.
  const bool room = static_cast<int64_t>(prompt.size()) < settings_.max_length;
  if (turns >= settings_.max_turns || !room) {
    running.result.truncated = true;
    return complete(running, {});
  }
  submit({running.rollout}, prompt, running.seed + static_cast<uint64_t>(turns));
}

void RolloutDriver::open_calls(Running& running, const std::vector<SampleCall>& calls) {
  const int64_t rollout = running.rollout;
  for (const SampleCall& call : calls) {
    RolloutCalls::Opened opened;
    try {
      opened = running.calls->open(call);
    } catch (const Error& error) {
      return fail(rollout, FailureKind::bad_answer,
                  fmt::format("the call \"{}\": {}", call.id, error.what()));
    }
    if (opened.refused) {
      running.episode->sampled(*opened.refused);
    } else {
      const int64_t request = sampler_.submit(std::move(opened.request));
      waits_[request] = {{rollout}, 1, opened.call};
    }
  }
  pending_.insert(rollout);  // more calls may come while these are open
}

void RolloutDriver::end_episode(Running& running, const Turn& turn) {
  forget_requests(running.rollout);
  if (running.calls->answered() == 0) {
    const std::string& refusal = running.calls->last_refusal();
    return fail(running.rollout, FailureKind::empty,
                "the episode ended before anything was sampled for it" +
                    (refusal.empty() ? "" : "; its call was refused: " + refusal));
  }
  try {
    std::move(*running.calls).finish(turn, running.result);
  } catch (const Error& error) {
    return fail(running.rollout, FailureKind::bad_answer, error.what());
  }
  if (turn.kind == Turn::Kind::reward) return complete(running, turn.rewards);
  running.deadline = std::numeric_limits<double>::infinity();
  unscored_.push_back(running.rollout);
}

void RolloutDriver::score(const std::vector<int64_t>& rollouts) {
  LEEWAY_CHECK(!rollouts.empty(), "a group that is scored has members");
  std::vector<Episode*> episodes;
  for (int64_t rollout : rollouts) {
    Running& running = *rollouts_.at(rollout);
    running.deadline = clock_.now() + settings_.timeout;
    episodes.push_back(running.episode.get());
  }
  try {
    const Environment& environment = *rollouts_.at(rollouts.front())->environment;
    scorings_.push_back({rollouts, environment.score_group(episodes)});
  } catch (const std::exception& error) {
    for (int64_t rollout : rollouts) fail(rollout, FailureKind::exception, error.what());
  }
}

void RolloutDriver::poll_scorings() {
  std::vector<std::pair<std::vector<int64_t>, GroupScores>> done;
  std::erase_if(scorings_, [&](Scoring& scoring) {
    try {
      std::optional<GroupScores> scores = scoring.scoring->poll();
      if (!scores) return false;
      done.emplace_back(scoring.rollouts, std::move(*scores));
    } catch (const std::exception& error) {
      done.emplace_back(scoring.rollouts, GroupScores{{}, error.what(), FailureKind::exception});
    }
    return true;
  });
  for (auto& [rollouts, scores] : done) {
    // One that cannot be used makes all of them useless: they are relative to each other.
    for (const GroupScores::Member& member : scores.members) {
      if (scores.failure.empty()) scores.failure = problem_of(total(member.rewards));
      if (!scores.failure.empty()) scores.failure_kind = FailureKind::bad_answer;
    }
    for (size_t i = 0; i < rollouts.size(); ++i) {
      if (rollouts[i] < 0) continue;
      if (!scores.failure.empty()) {
        fail(rollouts[i], scores.failure_kind, scores.failure);
        continue;
      }
      Running& running = *rollouts_.at(rollouts[i]);
      const GroupScores::Member& member = scores.members.at(i);
      running.result.metrics.insert(running.result.metrics.end(), member.metrics.begin(),
                                    member.metrics.end());
      complete(running, member.rewards);
    }
  }
}

void RolloutDriver::complete(Running& running, const std::vector<RewardPart>& rewards) {
  RolloutOutcome outcome;
  running.result.rewards = rewards;
  running.result.reward = total(rewards);
  for (const StepCredit& credit : running.result.credit) {
    running.result.reward += credit.reward.value_or(0.0);
  }
  std::string problem = credit_problem(running.result);
  if (problem.empty()) problem = problem_of(running.result.reward);
  if (!problem.empty()) return fail(running.rollout, FailureKind::bad_answer, problem);
  outcome.result = std::move(running.result);
  end(running.rollout, std::move(outcome));
}

void RolloutDriver::fail(int64_t rollout, FailureKind kind, const std::string& message) {
  RolloutOutcome outcome;
  outcome.outcome = Outcome::failed;
  outcome.kind = kind;
  outcome.message = message;
  end(rollout, std::move(outcome));
}

void RolloutDriver::end(int64_t rollout, RolloutOutcome&& outcome) {
  if (rollouts_.at(rollout)->calls) forget_requests(rollout);
  outcome.rollout = rollout;
  outcomes_.push_back(std::move(outcome));
  pending_.erase(rollout);
  rollouts_.erase(rollout);
}

}  // namespace leeway
