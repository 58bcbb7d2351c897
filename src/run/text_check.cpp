#include "run/text_check.h"

#include <fmt/format.h>

#include <algorithm>

#include "config/given.h"
#include "leeway/error.h"
#include "text/chat_template.h"

namespace leeway {
namespace {

constexpr uint64_t kMostPrompts = 4096;

// Why every rollout of a prompt would fail; empty: it can be sampled from.
std::string why_unusable(const RunSetup& setup, const Example& example) {
  const ModelConfig& model = setup.weights.config();
  std::vector<int32_t> ids;
  try {
    ids = setup.conversation->first_prompt(example);
  } catch (const Error& error) {
    return error.what();
  }
  const auto strange =
      std::ranges::find_if(ids, [&](int32_t id) { return id >= model.vocab_size; });
  if (strange != ids.end()) {
    throw Error(
        fmt::format("its prompt {} has the token {}, and the model has vocab_size = {}: the "
                    "tokenizer belongs to another model",
                    example.index, *strange, model.vocab_size));
  }
  const auto size = static_cast<int64_t>(ids.size());
  if (size < model.max_position_embeddings) return "";
  return fmt::format("it has {} tokens, the model {} positions for prompt and answer", size,
                     model.max_position_embeddings);
}

// A note where some of a split's prompts are unusable.
std::string prompts_note(const RunSetup& setup, const EnvironmentMix::Member& member, Split split) {
  const Environment& environment = *member.environment;
  const uint64_t all = environment.size(split).value_or(kMostPrompts);
  const uint64_t looked_at = std::min(all, kMostPrompts);
  uint64_t unusable = 0, first = 0;
  std::string why;
  for (uint64_t i = 0; i < looked_at; ++i) {
    const Example example = environment.example(split, i * (all / looked_at));
    if (example.messages.empty()) continue;
    const std::string reason = why_unusable(setup, example);
    if (reason.empty()) continue;
    if (unusable++ == 0) why = reason, first = example.index;
  }
  if (unusable == 0) return "";
  const std::string said =
      fmt::format("{} of {} {}prompts cannot be sampled from; of prompt {}: {}", unusable,
                  looked_at, split == Split::held_out ? "held-out " : "", first, why);
  if (unusable == looked_at) throw Error(said);
  return fmt::format("note: environment {}: {}. Each of their rollouts fails: leave them out",
                     member.id, said);
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

// A model whose folder says how to talk to it, in a run that does not.
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

std::vector<std::string> check_text(const RunSetup& setup) {
  std::vector<std::string> notes = {template_note(setup), stop_note(setup)};
  const size_t count = setup.environments ? setup.environments->members().size() : 0;
  for (size_t i = 0; i < count; ++i) {
    // A program may answer with contexts of its own making instead of the prompts.
    if (setup.config.run.environments[i].name == "process") continue;
    const EnvironmentMix::Member& member = setup.environments->members()[i];
    try {
      for (const Split split : {Split::train, Split::held_out}) {
        notes.push_back(prompts_note(setup, member, split));
      }
    } catch (const Error& error) {
      throw Error(fmt::format("environment {}: {}", member.id, error.what()));
    }
  }
  std::erase(notes, "");
  return notes;
}

std::string text_line(const RunSetup& setup) {
  std::vector<std::string> stops;
  for (const int32_t id : setup.conversation->stop_ids()) {
    const std::string text = toml_string(setup.tokenizer->decode({&id, 1}));
    stops.push_back(text.substr(1, text.size() - 2));
  }
  return fmt::format("{}, replies end at {}",
                     setup.renderer ? "renderer " + setup.config.renderer.name : "plain text",
                     fmt::join(stops, " or "));
}

}  // namespace leeway
