// What programs of protocol 2 say, and which episode or score it concerns.
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "leeway/error.h"
#include "orchestrator/episode_pool.h"
#include "orchestrator/process_messages.h"

namespace leeway {
namespace {

using Kind = JsonValue::Kind;

constexpr size_t kMostOpenCalls = 256;  // of an episode

// As a line of stderr is kept.
std::string log_line(std::string text) {
  constexpr size_t kMostBytes = 500;
  if (text.size() > kMostBytes) text.resize(kMostBytes);
  std::replace_if(
      text.begin(), text.end(), [](unsigned char c) { return c < 0x20 || c == 0x7f; }, ' ');
  return text;
}

}  // namespace

// Throws Error for what makes the process itself untrustworthy.
void EpisodePool::take_line(size_t slot, std::string_view text, Time now) {
  const JsonValue line = read_json("JSON", text);
  const JsonValue* type = line.find("type");
  if (type == nullptr || !type->is(Kind::string)) {
    throw Error("a message is an object with a type");
  }
  last_word_ = now;
  if (type->text == "log") {
    const JsonValue* words = line.find("text");
    if (words == nullptr || !words->is(Kind::string)) throw Error("log has a text");
    return processes_.slot(slot).child->note(log_line(words->text));
  }
  if (type->text == "scores") return take_scores(slot, line);
  if (!line.find("episode")) throw Error("a message names its episode");
  take_episode_line(slot, type->text, line, now);
}

void EpisodePool::take_episode_line(size_t slot, const std::string& type, const JsonValue& line,
                                    Time now) {
  Work& work = works_[slot];
  const std::optional<uint64_t> id = read_number(line, "episode");
  const auto found = id ? work.episodes.find(*id) : work.episodes.end();
  if (found == work.episodes.end()) {
    const bool past = id && std::find(work.past.begin(), work.past.end(), *id) != work.past.end();
    if (!past) {
      note_unasked(slot, fmt::format("\"{}\" of the episode {}, which is not one of its own", type,
                                     to_json(*line.find("episode"))));
    }
    return;
  }
  Episode& episode = episodes_.at(found->second);
  const std::string raw = to_json(line);
  try {
    if (type == "sample") {
      SampleCall call = read_sample(line);
      if (!episode.calls.insert(call.id).second) {
        throw Error(fmt::format("a second call with the id {}", to_json(call.id)));
      }
      if (episode.open.size() >= kMostOpenCalls) {
        throw Error(fmt::format("more than {} calls are open", kMostOpenCalls));
      }
      episode.open.insert(call.id);
      episode.asked.push_back(std::move(call));
    } else if (type == "done") {
      EpisodeEnd end = read_done(line, scores_groups_);
      episode.info = std::move(end.info);
      finish(episode, std::move(end.turn));
    } else if (type == "error") {
      const JsonValue* words = line.find("error");
      if (words == nullptr || !words->is(Kind::string)) throw Error("error must be a string");
      fail(episode, FailureKind::environment_error, reported_error(words->text));
    } else {
      throw Error(fmt::format("there is no message of the type {}", to_json(type)));
    }
  } catch (const Error& error) {
    const pid_t pid = processes_.slot(slot).child->pid();
    send(slot, cancel_line(episode.id));
    fail(episode, FailureKind::bad_answer,
         fmt::format("process {} wrote {}: {}", pid, in_quotes(raw), error.what()));
    return;
  }
  episode.since = now;
  processes_.note_answer(processes_.slot(slot));
}

void EpisodePool::take_scores(size_t slot, const JsonValue& line) {
  Work& work = works_[slot];
  const std::optional<uint64_t> id = read_number(line, "id");
  const auto found = id ? work.scores.find(*id) : work.scores.end();
  if (found == work.scores.end()) {
    const bool past = id && std::find(work.past.begin(), work.past.end(), *id) != work.past.end();
    if (!past) note_unasked(slot, "scores that nobody asked for");
    return;
  }
  Score& score = scores_.at(found->second);
  work.scores.erase(found);
  remember(work, score.id);
  score.slot = kNowhere;
  try {
    score.result = read_scores(line, score.members);
    processes_.note_answer(processes_.slot(slot));
  } catch (const Error& error) {
    fail(score, FailureKind::bad_answer,
         fmt::format("process {} wrote {}: {}", processes_.slot(slot).child->pid(),
                     in_quotes(to_json(line)), error.what()));
  }
}

void EpisodePool::note_unasked(size_t slot, const std::string& what) {
  ++unasked_answers_;
  processes_.slot(slot).child->note("unasked: " + what);
}

}  // namespace leeway
