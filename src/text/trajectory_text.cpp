#include "text/trajectory_text.h"

#include <fmt/format.h>

#include <map>
#include <span>
#include <utility>

#include "base/json.h"

namespace leeway {
namespace {

// A token for display: its text, quoted, or its number.
std::string token_text(const Tokenizer* tokenizer, int32_t id) {
  if (id < 0) return "(end)";
  if (tokenizer == nullptr || id >= tokenizer->vocab_size()) return fmt::format("{}", id);
  JsonWriter quoted;
  quoted.value(tokenizer->decode(std::span(&id, 1)));
  return fmt::format("{} {}", id, quoted.text());
}

// Up to `count` tokens before `position`, for display.
std::string context_text(const Tokenizer* tokenizer, const std::vector<int32_t>& ids,
                         size_t position, size_t count) {
  const size_t first = position > count ? position - count : 0;
  const std::span<const int32_t> part(ids.data() + first, position - first);
  if (tokenizer != nullptr) return tokenizer->decode(part);
  return fmt::format("{}", fmt::join(part, " "));
}

}  // namespace

std::vector<SplitRollout> split_rollouts(const std::string& name, std::string_view text) {
  std::vector<SplitRollout> rollouts;
  for (NamedTrajectory& trajectory : parse_trajectories(name, text)) {
    SplitTrajectory split = split_trajectory(trajectory.steps);
    rollouts.push_back({std::move(trajectory), std::move(split)});
  }
  return rollouts;
}

std::string trajectory_json(const std::vector<SplitRollout>& rollouts, const Tokenizer* tokenizer) {
  JsonWriter json;
  auto list = [&](const char* key, const auto& values) {
    json.key(key).begin_array();
    for (const auto& v : values) json.value(static_cast<double>(v));
    json.end_array();
  };
  size_t samples = 0;
  std::map<std::string, size_t> reasons;
  json.begin_object().key("rollouts").begin_array();
  for (const SplitRollout& r : rollouts) {
    const auto& steps = r.trajectory.steps;
    samples += r.split.samples.size();
    json.begin_object().key("rollout").value(r.trajectory.rollout).key("steps").begin_array();
    std::vector<bool> opened(r.split.samples.size(), false);
    for (size_t t = 0; t < steps.size(); ++t) {
      const size_t sample = r.split.sample_of_step[t];
      json.begin_object().key("step").value(static_cast<double>(t));
      json.key("prompt_tokens").value(static_cast<double>(steps[t].prompt.size()));
      json.key("completion_tokens").value(static_cast<double>(steps[t].completion.size()));
      json.key("sample").value(static_cast<double>(sample));
      json.key("extends").value(static_cast<bool>(opened[sample])).end_object();
      opened[sample] = true;
    }
    json.end_array().key("samples").begin_array();
    for (const Sample& s : r.split.samples) {
      json.begin_object();
      list("ids", s.ids);
      list("mask", s.loss_mask);
      list("logprobs", s.rollout);
      list("versions", s.versions);
      list("step", s.step);
      if (tokenizer != nullptr) {
        json.key("text").begin_array();
        for (int32_t id : s.ids) {
          json.value(id >= 0 && id < tokenizer->vocab_size() ? tokenizer->decode(std::span(&id, 1))
                                                             : fmt::format("[{}]", id));
        }
        json.end_array();
      }
      json.end_object();
    }
    json.end_array().key("breaks").begin_array();
    for (const PrefixBreak& b : r.split.breaks) {
      ++reasons[name_of(b.reason)];
      json.begin_object().key("step").value(static_cast<double>(b.step));
      json.key("earlier_step").value(static_cast<double>(b.earlier_step));
      json.key("position").value(static_cast<double>(b.position));
      json.key("expected").value(static_cast<double>(b.expected));
      json.key("found").value(static_cast<double>(b.found));
      json.key("reason").value(name_of(b.reason));
      json.key("context").value(context_text(tokenizer, steps[b.step].prompt, b.position, 12));
      json.key("expected_text").value(token_text(tokenizer, b.expected));
      json.key("found_text").value(token_text(tokenizer, b.found)).end_object();
    }
    json.end_array().end_object();
  }
  json.end_array().key("samples_per_rollout");
  json.value(static_cast<double>(samples) / static_cast<double>(rollouts.size()));
  json.key("prefix_breaks").begin_object();
  for (const auto& [reason, count] : reasons) json.key(reason).value(static_cast<double>(count));
  json.end_object().end_object();
  return json.text() + "\n";
}

std::string trajectory_text(const std::vector<SplitRollout>& rollouts, const Tokenizer* tokenizer) {
  std::string out;
  size_t samples = 0;
  for (const SplitRollout& r : rollouts) {
    samples += r.split.samples.size();
    out += fmt::format("rollout {}: {} step{}, {} sample{}\n", r.trajectory.rollout,
                       r.trajectory.steps.size(), r.trajectory.steps.size() == 1 ? "" : "s",
                       r.split.samples.size(), r.split.samples.size() == 1 ? "" : "s");
    size_t next_break = 0;
    std::vector<bool> opened(r.split.samples.size(), false);
    for (size_t t = 0; t < r.trajectory.steps.size(); ++t) {
      const TrajectoryStep& step = r.trajectory.steps[t];
      const size_t sample = r.split.sample_of_step[t];
      const bool extends = opened[sample];
      opened[sample] = true;
      out += fmt::format("  step {:>3}  {:>6} prompt + {:>5} sampled   {} sample {}\n", t,
                         step.prompt.size(), step.completion.size(), extends ? "extends" : "opens",
                         sample);
      if (next_break < r.split.breaks.size() && r.split.breaks[next_break].step == t) {
        const PrefixBreak& b = r.split.breaks[next_break++];
        out += fmt::format("    {} at token {}, against step {}: expected {}, found {}\n",
                           name_of(b.reason), b.position, b.earlier_step,
                           token_text(tokenizer, b.expected), token_text(tokenizer, b.found));
        JsonWriter context;
        context.value(context_text(tokenizer, step.prompt, b.position, 12));
        out += fmt::format("    after ..{}\n", context.text());
      }
    }
    for (size_t s = 0; s < r.split.samples.size(); ++s) {
      size_t trained = 0;
      for (uint8_t m : r.split.samples[s].loss_mask) trained += m;
      out += fmt::format("  sample {}: {} tokens, {} trained\n", s, r.split.samples[s].ids.size(),
                         trained);
    }
  }
  out += fmt::format("{} rollout{}, {:.2f} samples per rollout\n", rollouts.size(),
                     rollouts.size() == 1 ? "" : "s",
                     static_cast<double>(samples) / static_cast<double>(rollouts.size()));
  return out;
}

}  // namespace leeway
