// Prompts and answers from JSONL files. All lines are read and checked when the environment is
// made: a bad one is known before the first rollout.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <utility>

#include "base/files.h"
#include "leeway/error.h"
#include "leeway/presets.h"
#include "orchestrator/environment_factories.h"
#include "orchestrator/split.h"
#include "orchestrator/verifiers.h"
#include "text/messages_json.h"
#include "text/renderers/json_value.h"

namespace leeway {
namespace {

using Kind = JsonValue::Kind;

enum class VerifierKind { exact, numeric, regex, choice };

VerifierKind verifier_of(const std::string& name) {
  if (name == "exact") return VerifierKind::exact;
  if (name == "numeric") return VerifierKind::numeric;
  if (name == "regex") return VerifierKind::regex;
  if (name == "choice") return VerifierKind::choice;
  const std::string near = nearest_name(name, {"exact", "numeric", "regex", "choice"});
  throw Error(
      fmt::format("verifier = \"{}\" is not known{}; there are: exact, numeric, regex, "
                  "choice",
                  name, near.empty() ? "" : fmt::format("; did you mean {}?", near)));
}

struct Entry {
  std::vector<Message> messages;
  std::string answer;
  std::string demonstration;  // empty: none
};

// An entry, where it stands, and its prompt as one text, by which prompts are told apart.
struct Line {
  Entry entry;
  std::string place, prompt;
};

const JsonValue& member(const JsonValue& object, const std::string& key, const char* named_by) {
  if (const JsonValue* value = object.find(key)) return *value;
  std::vector<std::string> keys;
  for (const auto& [name, value] : object.members) keys.push_back(name);
  throw Error(fmt::format("the key \"{}\" is missing ({} names it); this line has: {}", key,
                          named_by, fmt::join(keys, ", ")));
}

std::vector<Message> prompt_of(const JsonValue& object, const std::string& key) {
  const JsonValue& value = member(object, key, "prompt_key");
  if (value.is(Kind::string)) {
    if (value.text.empty()) throw Error(fmt::format("{} is empty", key));
    return {{.role = Role::user, .content = value.text}};
  }
  if (!value.is(Kind::array)) {
    throw Error(
        fmt::format("{} must be a string or a list of messages, not {}", key, name_of(value.kind)));
  }
  std::vector<Message> messages = read_messages(key, to_json(value));
  if (messages.empty()) throw Error(fmt::format("{} is empty", key));
  if (messages.back().role == Role::assistant) {
    throw Error(fmt::format("{} ends in an assistant message: it is the policy's turn", key));
  }
  return messages;
}

std::string answer_of(const JsonValue& object, const std::string& key, VerifierKind verifier) {
  const JsonValue& value = member(object, key, "answer_key");
  if (!value.is(Kind::string) && !value.is(Kind::number)) {
    throw Error(fmt::format("{} must be a string or a number, not {}", key, name_of(value.kind)));
  }
  if (trimmed(value.text).empty()) throw Error(fmt::format("{} is empty", key));
  const auto refuse = [&](const char* what) {
    throw Error(fmt::format("{} \"{}\" holds no {}", key, value.text, what));
  };
  if (verifier == VerifierKind::numeric && !final_number(value.text)) {
    refuse("number, which verifier = \"numeric\" needs");
  }
  if (verifier == VerifierKind::choice && !final_choice(value.text)) {
    refuse("letter from A to J, which verifier = \"choice\" needs");
  }
  return value.text;
}

std::string demonstration_of(const JsonValue& object) {
  std::string found;
  for (const char* key : {"demonstration", "completion"}) {
    const JsonValue* value = object.find(key);
    if (!value || value->is(Kind::null)) continue;
    if (!value->is(Kind::string)) {
      throw Error(fmt::format("{} must be a string, not {}", key, name_of(value->kind)));
    }
    if (!found.empty()) throw Error("demonstration and completion mean the same: give one");
    if (value->text.empty()) throw Error(fmt::format("{} is empty: leave it out", key));
    found = value->text;
  }
  return found;
}

// Of one line; errors do not say which.
Entry read_entry(std::string_view json, const EnvironmentTable& table, VerifierKind verifier) {
  const JsonValue object = read_json("JSON", json);
  if (!object.is(Kind::object)) {
    throw Error(fmt::format("a line must be an object, not {}", name_of(object.kind)));
  }
  return {prompt_of(object, table.prompt_key), answer_of(object, table.answer_key, verifier),
          demonstration_of(object)};
}

// What follows "FILE line N" of an error: read_json counts from the line's start, so that its
// "JSON line 1, column C" is column C of that line.
std::string without_first_line(const std::string& message) {
  constexpr std::string_view kFirstLine = "JSON line 1";
  return message.starts_with(kFirstLine) ? message.substr(kFirstLine.size()) : ": " + message;
}

using Patterns = std::map<std::string, AnswerPattern>;

// All lines of a file; patterns of the answers go to `patterns`.
std::vector<Line> read_lines(const std::string& path, const EnvironmentTable& table,
                             VerifierKind verifier, Patterns& patterns) {
  const std::string text = read_file(path);
  std::vector<Line> lines;
  size_t number = 0;
  for (size_t start = 0; start < text.size();) {
    const size_t end = std::min(text.find('\n', start), text.size());
    const std::string_view line = std::string_view(text).substr(start, end - start);
    start = end + 1;
    ++number;
    if (trimmed(line).empty()) continue;
    std::string place = fmt::format("{} line {}", path, number);
    try {
      Entry entry = read_entry(line, table, verifier);
      if (verifier == VerifierKind::regex && !patterns.contains(entry.answer)) {
        patterns.emplace(entry.answer, AnswerPattern(entry.answer));
      }
      std::string prompt = write_messages(entry.messages);
      lines.push_back({std::move(entry), std::move(place), std::move(prompt)});
    } catch (const Error& error) {
      throw Error(place + without_first_line(error.what()));
    }
  }
  if (lines.empty()) throw Error(fmt::format("{}: there are no examples in it", path));
  return lines;
}

void refuse_shared_prompts(const std::vector<Line>& train, const std::vector<Line>& held_out) {
  std::map<std::string_view, const Line*> trained;
  for (const Line& line : train) trained.emplace(line.prompt, &line);
  for (const Line& line : held_out) {
    const auto shared = trained.find(line.prompt);
    if (shared == trained.end()) continue;
    throw Error(fmt::format(
        "{} and {} have the same prompt: take it out of data or of eval_data, since a held-out "
        "prompt is never trained on",
        shared->second->place, line.place));
  }
}

// By the hash of each prompt, but with a prompt on each side where there are two.
std::map<std::string_view, Split> split_prompts(const std::vector<Line>& lines) {
  std::map<std::string_view, Split> splits;
  size_t held_out = 0;
  std::string_view lowest = lines.front().prompt, highest = lowest;
  for (const Line& line : lines) {
    const Split split = is_held_out(line.prompt) ? Split::held_out : Split::train;
    if (splits.emplace(line.prompt, split).second) held_out += split == Split::held_out;
    if (prompt_hash(line.prompt) < prompt_hash(lowest)) lowest = line.prompt;
    if (prompt_hash(line.prompt) > prompt_hash(highest)) highest = line.prompt;
  }
  if (held_out == splits.size()) splits[highest] = Split::train;
  if (held_out == 0 && splits.size() > 1) splits[lowest] = Split::held_out;
  return splits;
}

class JsonlEpisode : public Episode {
 public:
  JsonlEpisode(const EnvironmentTable& table, VerifierKind verifier, std::string answer,
               std::optional<AnswerPattern> pattern)
      : part_(table.verifier),
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
      : table_(table), verifier_(verifier_of(table.verifier)) {
    if (table.data.empty()) throw Error("data is missing: it names the JSONL file to train on");
    std::vector<Line> lines = read_lines(table.data, table, verifier_, patterns_);
    if (table.eval_data.empty()) {
      const auto splits = split_prompts(lines);
      for (Line& line : lines) keep(line, splits.at(line.prompt));
      return;
    }
    std::vector<Line> held_out = read_lines(table.eval_data, table, verifier_, patterns_);
    refuse_shared_prompts(lines, held_out);
    for (Line& line : lines) keep(line, Split::train);
    for (Line& line : held_out) keep(line, Split::held_out);
  }

  std::optional<uint64_t> size(Split split) const override { return entries(split).size(); }

  Example example(Split split, uint64_t index) const override {
    LEEWAY_CHECK(index < entries(split).size(), "an example beyond the size of its split");
    const Entry& entry = entries(split)[index];
    Example example{.index = index, .messages = entry.messages, .answer = entry.answer};
    if (!entry.demonstration.empty()) {
      example.demonstration = {{.role = Role::assistant, .content = entry.demonstration}};
    }
    return example;
  }

  std::unique_ptr<Episode> start(const Example& example) const override {
    std::optional<AnswerPattern> pattern;
    if (verifier_ == VerifierKind::regex) {
      const auto known = patterns_.find(example.answer);
      LEEWAY_CHECK(known != patterns_.end(), "the example of another environment");
      pattern = known->second;
    }
    return std::make_unique<JsonlEpisode>(table_, verifier_, example.answer, std::move(pattern));
  }

  bool needs_renderer() const override { return needs_renderer_; }

 private:
  const std::vector<Entry>& entries(Split split) const {
    return split == Split::train ? train_ : held_out_;
  }

  void keep(Line& line, Split split) {
    const std::vector<Message>& messages = line.entry.messages;
    if (messages.size() > 1 || messages.front().role != Role::user) needs_renderer_ = true;
    (split == Split::train ? train_ : held_out_).push_back(std::move(line.entry));
  }

  EnvironmentTable table_;
  VerifierKind verifier_;
  Patterns patterns_;
  std::vector<Entry> train_, held_out_;
  bool needs_renderer_ = false;
};

}  // namespace

std::unique_ptr<Environment> make_jsonl_environment(const EnvironmentTable& table) {
  return std::make_unique<JsonlEnvironment>(table);
}

}  // namespace leeway
