#include "run/text_check.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/printable.h"
#include "config/given.h"
#include "leeway/error.h"
#include "text/chat_template.h"

namespace leeway {
namespace {

// The most that is looked at in a split.
constexpr uint64_t kMostPrompts = 4096, kMostBytes = uint64_t{8} << 20;

// Why every rollout of a prompt would fail; empty: it can be sampled from.
std::string why_unusable(const RunSetup& setup, const Example& example) {
  const ModelConfig& model = setup.weights.config();
  const std::vector<int32_t> ids = setup.conversation->first_prompt(example);
  const auto strange =
      std::ranges::find_if(ids, [&](int32_t id) { return id >= model.vocab_size; });
  if (strange != ids.end()) {
    return fmt::format("it has the token {}, and the model's vocab_size is {}", *strange,
                       model.vocab_size);
  }
  const auto size = static_cast<int64_t>(ids.size());
  if (size < model.max_position_embeddings) return "";
  return fmt::format("it has {} tokens, and the model {} positions for prompt and answer", size,
                     model.max_position_embeddings);
}

// What was found among the prompts of a split. Of a large split every n-th one is looked at.
struct PromptCheck {
  bool all = false;  // every prompt of the split was looked at
  uint64_t looked_at = 0, unusable = 0;
  std::string first;  // the first unusable one: how its text begins, and why it is unusable

  std::string text(const char* kind) const {
    return fmt::format("{} of {} {}prompts cannot be sampled from; {}", unusable, looked_at, kind,
                       first);
  }
};

PromptCheck checked_prompts(const RunSetup& setup, const Environment& environment, Split split) {
  const uint64_t all = environment.size(split).value_or(kMostPrompts);
  const uint64_t most = std::min(all, kMostPrompts);
  PromptCheck found;
  uint64_t bytes = 0, i = 0;
  for (; i < most && bytes < kMostBytes; ++i) {
    std::string begin, why;
    try {
      const Example example = environment.example(split, i * all / most);
      if (example.messages.empty()) continue;
      for (const Message& message : example.messages) bytes += message.content.size();
      begin = example.messages.front().content;
      why = why_unusable(setup, example);
    } catch (const Error& error) {
      why = error.what();
    }
    ++found.looked_at;
    if (why.empty() || found.unusable++ > 0) continue;
    found.first = fmt::format("of {}: {}", toml_string(fitting(printable(begin), 40)), why);
  }
  found.all = i == all && environment.size(split).has_value();
  return found;
}

std::string stop_note(const RunSetup& setup) {
  const std::string& stop = setup.config.run.rollout.stop;
  if (stop.empty()) return "";
  const std::vector<int32_t> ids = setup.tokenizer->encode(stop, SpecialTokens::recognise);
  if (ids.size() < 2) return "";
  return fmt::format(
      "note: rollout.stop = {} is {} tokens here, and a reply ends at the last of them, {}, "
      "wherever it is sampled",
      toml_string(stop), ids.size(), toml_string(setup.tokenizer->decode({&ids.back(), 1})));
}

// The model's folder has a chat template, and the run has no renderer.
std::string template_note(const RunSetup& setup) {
  const std::string& folder = setup.config.run.model.path;
  if (folder.empty() || setup.renderer != nullptr) return "";
  try {
    if (read_policy_card(folder) || !has_chat_template(folder)) return "";
  } catch (const Error&) {
    return "";  // nothing that this run needs
  }
  return fmt::format(
      "note: {} has a chat template, and prompts are continued as plain text, since "
      "orchestrator.renderer.name is not set; \"auto\" takes the renderer of the template",
      folder);
}

}  // namespace

std::vector<std::string> check_text(const RunSetup& setup, bool goes_on) {
  std::vector<std::string> notes = {template_note(setup), stop_note(setup)};
  const size_t count = setup.environments ? setup.environments->members().size() : 0;
  for (size_t i = 0; i < count; ++i) {
    // A program may answer with contexts of its own making instead of the prompts.
    if (setup.config.run.environments[i].name == "process") continue;
    const EnvironmentMix::Member& member = setup.environments->members()[i];
    const PromptCheck train = checked_prompts(setup, *member.environment, Split::train),
                      held_out = checked_prompts(setup, *member.environment, Split::held_out);
    if (!goes_on && train.all && train.unusable > 0 && train.unusable == train.looked_at) {
      throw Error(fmt::format("environment {}: {}", member.id, train.text("")));
    }
    for (const auto& [found, kind] : {std::pair{&train, ""}, std::pair{&held_out, "held-out "}}) {
      if (found->unusable == 0) continue;
      notes.push_back(
          fmt::format("note: environment {}: {}. Each of their rollouts fails: leave them out",
                      member.id, found->text(kind)));
    }
  }
  std::erase(notes, "");
  return notes;
}

std::vector<std::string> stop_texts(const RunSetup& setup) {
  std::vector<std::string> texts;
  for (const int32_t id : setup.conversation->stop_ids()) {
    try {
      texts.push_back(setup.tokenizer->decode({&id, 1}));
    } catch (const Error&) {
      texts.push_back(fmt::format("token {}", id));  // a row that pads the vocabulary
    }
  }
  return texts;
}

std::string text_line(const RunSetup& setup) {
  std::vector<std::string> stops;
  for (const std::string& stop : stop_texts(setup)) {
    const std::string text = toml_string(stop);
    stops.push_back(text.substr(1, text.size() - 2));
  }
  return fmt::format("{}, replies end at {}",
                     setup.renderer ? "renderer " + setup.config.renderer.name : "plain text",
                     fmt::join(stops, " or "));
}

}  // namespace leeway
