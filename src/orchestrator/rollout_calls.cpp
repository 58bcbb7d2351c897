#include "orchestrator/rollout_calls.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "leeway/error.h"
#include "orchestrator/process_messages.h"
#include "orchestrator/split.h"
#include "text/messages_json.h"
#include "text/renderers/json_value.h"

namespace leeway {
namespace {

constexpr int64_t kMostRefusals = 8;  // of an episode that goes on asking

// Arguments as JSON, in one spelling: a string of JSON is the JSON in it.
std::string arguments_of(const ToolCall& call) {
  if (call.arguments.empty()) return "{}";
  try {
    JsonValue value = read_json("arguments", call.arguments);
    if (value.is(JsonValue::Kind::string)) value = read_json("arguments", value.text);
    return to_json(value);
  } catch (const Error&) {
    return call.arguments;
  }
}

bool same_calls(const std::vector<ToolCall>& a, const std::vector<ToolCall>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const auto& x, const auto& y) {
    return x.name == y.name && arguments_of(x) == arguments_of(y);
  });
}

// Whether `message` repeats `earlier`. Thinking may be left out.
bool repeats(const Message& message, const Message& earlier) {
  return message.role == earlier.role && message.content == earlier.content &&
         (!message.reasoning || message.reasoning == earlier.reasoning) &&
         message.tool_call_id == earlier.tool_call_id && message.tool_name == earlier.tool_name &&
         same_calls(message.tool_calls, earlier.tool_calls);
}

}  // namespace

// The answered call whose context and reply are the longest beginning of the messages, or the one
// that is named; `added` is what follows them.
const RolloutCalls::Call* RolloutCalls::continued_by(const SampleCall& call,
                                                     std::vector<Message>& added) const {
  if (call.continues) {
    const auto found = by_id_.find(*call.continues);
    if (found == by_id_.end() || !calls_[found->second].answered) {
      throw Error(
          fmt::format("continue: there is no call {} with a reply", to_json(*call.continues)));
    }
    added = call.messages;
    return &calls_[found->second];
  }
  const Call* best = nullptr;
  for (const Call& earlier : calls_) {
    const size_t length = earlier.context.size();
    if (!earlier.answered || length + 1 >= call.messages.size()) continue;
    if (best != nullptr && length < best->context.size()) continue;
    const auto reply = call.messages.begin() + static_cast<std::ptrdiff_t>(length);
    const bool same = repeats(*reply, earlier.told) &&
                      std::equal(call.messages.begin(), reply, earlier.seen.begin(), repeats) &&
                      std::none_of(reply + 1, call.messages.end(), [](const Message& message) {
                        return message.role == Role::assistant;
                      });
    if (!same) continue;
    best = &earlier;
    added.assign(reply + 1, call.messages.end());
  }
  return best;
}

SampleAnswer RolloutCalls::refuse(const SampleCall& call, SampleAnswer::Refusal refusal,
                                  const std::string& message) {
  last_refusal_ = message;
  if (++refusals_ > kMostRefusals) {
    throw Error(fmt::format("{} calls were refused, and it goes on asking; the last: {}", refusals_,
                            message));
  }
  SampleAnswer answer;
  answer.id = call.id;
  answer.refusal = refusal;
  answer.message = message;
  return answer;
}

RolloutCalls::Opened RolloutCalls::open(const SampleCall& call) {
  Opened opened;
  if (static_cast<int64_t>(calls_.size()) >= settings_.max_turns) {
    opened.refused = refuse(call, SampleAnswer::Refusal::max_turns,
                            fmt::format("orchestrator.max_turns = {}: no further call is sampled",
                                        settings_.max_turns));
    return opened;
  }
  Call next;
  std::vector<Message> added;
  const Call* earlier = continued_by(call, added);
  next.options.add_generation_prompt = true;
  next.options.enable_thinking = call.enable_thinking;
  next.options.tools_json = call.tools_json.value_or(earlier ? earlier->options.tools_json : "");
  const TrajectoryStep* step = earlier != nullptr ? &earlier->step : nullptr;
  if (earlier != nullptr) {
    next.context = earlier->context;
    next.context.push_back(earlier->said);
    next.context.insert(next.context.end(), added.begin(), added.end());
    next.seen = earlier->seen;
    next.seen.push_back(earlier->told);
    next.seen.insert(next.seen.end(), added.begin(), added.end());
  } else {
    next.context = next.seen = call.messages;
  }
  // Tools are at the beginning of the context: other ones make another context.
  const bool extends = earlier != nullptr && next.options.tools_json == earlier->options.tools_json;
  next.step.prompt = extends ? conversation_.next_prompt(step->prompt, step->completion,
                                                         next.context, added, next.options)
                             : conversation_.prompt_of(next.context, next.options);
  const auto length = static_cast<int64_t>(next.step.prompt.size());
  if (length >= settings_.max_length) {
    opened.refused = refuse(call, SampleAnswer::Refusal::context_length,
                            fmt::format("the messages have {} tokens, the model {} positions",
                                        length, settings_.max_length));
    return opened;
  }
  next.trained =
      call.train && (!call.temperature || *call.temperature == settings_.sampling.temperature);
  opened.call = calls_.size();
  Request& request = opened.request;
  request.prompt = next.step.prompt;
  request.samples = 1;
  request.max_new_tokens = std::min({settings_.max_length - length, settings_.max_new_tokens,
                                     call.max_new_tokens.value_or(settings_.max_new_tokens)});
  request.sampling = settings_.sampling;
  if (call.temperature) request.sampling.temperature = *call.temperature;
  request.stop_ids = conversation_.stop_ids();
  request.seed = mixed_seed({seed_, opened.call});
  by_id_[call.id] = opened.call;
  calls_.push_back(std::move(next));
  ++open_;
  return opened;
}

SampleAnswer RolloutCalls::close(size_t number, SampledSequence&& result) {
  Call& call = calls_.at(number);
  TrajectoryStep& step = call.step;
  step.completion = std::move(result.ids);
  step.logprobs = std::move(result.processed_logprobs);
  step.versions = std::move(result.versions);
  if (!call.trained) step.loss_mask.assign(step.completion.size(), 0);
  SampleAnswer answer;
  for (const auto& [id, of] : by_id_) {
    if (of == number) answer.id = id;
  }
  answer.reply = conversation_.read(step.completion, result.finish == Finish::length, call.options);
  answer.tokens = static_cast<int64_t>(step.completion.size());
  answer.prompt_tokens = static_cast<int64_t>(step.prompt.size());
  call.said = message_of(answer.reply);
  // What the episode gets back from us is what it can repeat: valid UTF-8.
  call.told = read_messages("reply", one_line(write_messages({call.said}))).front();
  call.text = answer.reply.text;
  call.truncated = answer.reply.truncated;
  call.answered = true;
  --open_;
  ++answered_;
  return answer;
}

void RolloutCalls::finish(const Turn& end, Rollout& rollout) && {
  std::vector<size_t> step_of(calls_.size(), calls_.size());
  bool cut = false;
  for (size_t i = 0; i < calls_.size(); ++i) {
    Call& call = calls_[i];
    if (!call.answered) continue;
    step_of[i] = rollout.steps.size();
    rollout.steps.push_back(std::move(call.step));
    rollout.text = std::move(call.text);
    cut = call.truncated;
  }
  rollout.truncated = end.truncated.value_or(cut || refusals_ > 0);
  rollout.metrics = end.metrics;
  if (!end.credit.empty()) rollout.credit.resize(rollout.steps.size());
  for (const CallCredit& given : end.credit) {
    const auto found = by_id_.find(given.call);
    if (found == by_id_.end() || step_of[found->second] == calls_.size()) {
      throw Error(fmt::format("turn_rewards or advantages name {}, which is no call with a reply",
                              to_json(given.call)));
    }
    const size_t step = step_of[found->second];
    const size_t tokens = rollout.steps[step].completion.size();
    StepCredit& credit = rollout.credit[step];
    credit.reward = given.reward;
    credit.advantages = given.advantages;
    if (credit.advantages.size() == 1) credit.advantages.assign(tokens, given.advantages.front());
    if (!credit.advantages.empty() && credit.advantages.size() != tokens) {
      throw Error(fmt::format("advantages.{} has {} entries for the {} tokens of its reply",
                              given.call, credit.advantages.size(), tokens));
    }
  }
}

}  // namespace leeway
