// Prompts and answers from JSONL files. All lines are read and checked when the environment is
// created, so that a bad line is reported before the first rollout.
#include <fmt/format.h>

#include <map>
#include <utility>

#include "leeway/error.h"
#include "orchestrator/environment_factories.h"
#include "orchestrator/jsonl_prompts.h"
#include "orchestrator/verifiers.h"

namespace leeway {
namespace {

using Kind = JsonValue::Kind;

std::string answer_of(const JsonValue& object, const std::string& key, VerifierKind verifier) {
  const JsonValue& value = jsonl_member(object, key, "answer_key");
  if (!value.is(Kind::string) && !value.is(Kind::number)) {
    throw Error(fmt::format("{} must be a string or a number, not {}", key, name_of(value.kind)));
  }
  if (trimmed(value.text).empty()) throw Error(fmt::format("{} is empty", key));
  const auto refuse = [&](const char* what) {
    throw Error(fmt::format("{} \"{}\" contains no {}", key, value.text, what));
  };
  if (verifier == VerifierKind::numeric && !final_number(value.text)) {
    refuse("number, which verifier = \"numeric\" needs");
  }
  if (verifier == VerifierKind::choice && !final_choice(value.text)) {
    refuse("letter from A to J, which verifier = \"choice\" needs");
  }
  return value.text;
}

using Patterns = std::map<std::string, AnswerPattern>;

class JsonlEpisode : public Episode {
 public:
  JsonlEpisode(const EnvironmentTable& table, VerifierKind verifier, std::string answer,
               std::optional<AnswerPattern> pattern)
      : part_(name_of(table.verifier)),
        format_weight_(table.format_weight),
        verifier_(verifier),
        answer_(std::move(answer)),
        pattern_(std::move(pattern)) {}

  Turn respond(const Reply& reply) override {
    const Verdict verdict = verdict_on(judged_text(reply));
    Turn turn;
    turn.rewards = {{part_, 1.0, verdict.right ? 1.0 : 0.0}};
    if (format_weight_ > 0.0) {
      const bool well_formed = verdict.found && !reply.truncated;
      turn.rewards.push_back({"format", format_weight_, well_formed ? 1.0 : 0.0});
    }
    return turn;
  }

 private:
  Verdict verdict_on(std::string_view text) const {
    switch (verifier_) {
      case VerifierKind::exact: return verify_exact(text, answer_);
      case VerifierKind::numeric: return verify_numeric(text, answer_);
      case VerifierKind::regex: return pattern_->verify(text);
      case VerifierKind::choice: return verify_choice(text, answer_);
    }
    return {};
  }

  std::string part_;
  double format_weight_;
  VerifierKind verifier_;
  std::string answer_;
  std::optional<AnswerPattern> pattern_;  // regex
};

class JsonlEnvironment : public Environment {
 public:
  explicit JsonlEnvironment(const EnvironmentTable& table)
      : table_(table), verifier_(table.verifier) {
    prompts_ =
        read_jsonl_prompts(table.data, table.eval_data,
                           {.prompt_key = table.prompt_key,
                            .demonstration_keys = {"demonstration", "completion"},
                            .keep = [&](const JsonValue& object) {
                              std::string answer = answer_of(object, table.answer_key, verifier_);
                              if (verifier_ == VerifierKind::regex && !patterns_.contains(answer)) {
                                patterns_.emplace(answer, AnswerPattern(answer));
                              }
                              return answer;
                            }});
  }

  std::optional<uint64_t> size(Split split) const override { return prompts_.of(split).size(); }

  Example example(Split split, uint64_t index) const override {
    Example example = prompts_.example(split, index);
    example.answer = prompts_.of(split)[index].kept;
    return example;
  }

  std::unique_ptr<Episode> start(const Example& example, const EpisodePlace&) const override {
    std::optional<AnswerPattern> pattern;
    if (verifier_ == VerifierKind::regex) {
      const auto known = patterns_.find(example.answer);
      LEEWAY_CHECK(known != patterns_.end(), "the example of another environment");
      pattern = known->second;
    }
    return std::make_unique<JsonlEpisode>(table_, verifier_, example.answer, std::move(pattern));
  }

  bool needs_renderer() const override { return prompts_.needs_renderer; }

 private:
  EnvironmentTable table_;
  VerifierKind verifier_;
  Patterns patterns_;
  JsonlPrompts prompts_;
};

}  // namespace

std::unique_ptr<Environment> make_jsonl_environment(const EnvironmentTable& table) {
  return std::make_unique<JsonlEnvironment>(table);
}

}  // namespace leeway
