#include "orchestrator/episode_pool.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "leeway/error.h"

namespace leeway {
namespace {

using State = Processes::Slot::State;

// Many rollouts poll in turn: one check of the processes serves them all.
constexpr auto kPumpSlice = std::chrono::microseconds(200);
constexpr size_t kPastIds = 4096;  // of a process that are remembered after their end

}  // namespace

EpisodePool::EpisodePool(Processes processes, bool scores_groups)
    : processes_(std::move(processes)),
      scores_groups_(scores_groups),
      timeout_(processes_.settings().turn_timeout),
      works_(processes_.count()) {}

std::vector<std::string> EpisodePool::take_log() {
  const std::lock_guard lock(mutex_);
  return processes_.take_log();
}

int64_t EpisodePool::take_unasked_answers() {
  const std::lock_guard lock(mutex_);
  return std::exchange(unasked_answers_, 0);
}

uint64_t EpisodePool::start(const EpisodePlace& place, uint64_t index, const std::string& example) {
  const std::lock_guard lock(mutex_);
  const Time now = std::chrono::steady_clock::now();
  const uint64_t number = ++last_number_;
  Episode& episode = episodes_[number];
  episode.id = unguessable_id();
  episode.place = place;
  episode.index = index;
  episode.line = episode_line(episode.id, place, index, example);
  episode.since = now;
  queue_.push_back(number);
  pump_if_due(now);
  return number;
}

Turn EpisodePool::poll(uint64_t number) {
  const std::lock_guard lock(mutex_);
  pump_if_due(std::chrono::steady_clock::now());
  Episode& episode = episodes_.at(number);
  if (!episode.asked.empty() && !episode.over) {
    Turn turn{.kind = Turn::Kind::calls};
    turn.calls = std::exchange(episode.asked, {});
    return turn;
  }
  if (!episode.over) return {.kind = Turn::Kind::pending};
  return episode.end;
}

void EpisodePool::sampled(uint64_t number, const SampleAnswer& answer) {
  const std::lock_guard lock(mutex_);
  Episode& episode = episodes_.at(number);
  if (episode.over) return;
  episode.open.erase(answer.id);
  episode.since = std::chrono::steady_clock::now();
  send(episode.slot, sampled_line(episode.id, answer));
}

void EpisodePool::withdraw(uint64_t number) {
  const std::lock_guard lock(mutex_);
  const auto found = episodes_.find(number);
  if (found == episodes_.end()) return;
  if (found->second.slot != kNowhere) {
    send(found->second.slot, cancel_line(found->second.id));
    forget(found->second);
  }
  episodes_.erase(found);
}

uint64_t EpisodePool::score(const std::vector<uint64_t>& episodes) {
  const std::lock_guard lock(mutex_);
  const Time now = std::chrono::steady_clock::now();
  LEEWAY_CHECK(!episodes.empty(), "a group that is scored has members");
  const uint64_t number = ++last_number_;
  Score& score = scores_[number];
  score.id = unguessable_id();
  score.members = episodes.size();
  score.since = now;
  std::vector<ScoredEpisode> list;
  score.process = episodes_.at(episodes.front()).process;
  for (uint64_t each : episodes) {
    const Episode& episode = episodes_.at(each);
    list.push_back({episode.id, episode.index, episode.info});
    if (episode.process != score.process) score.process = 0;
  }
  score.line = score_line(score.id, episodes_.at(episodes.front()).place.group, list);
  score_queue_.push_back(number);
  pump_if_due(now);
  return number;
}

std::optional<GroupScores> EpisodePool::poll_score(uint64_t request) {
  const std::lock_guard lock(mutex_);
  pump_if_due(std::chrono::steady_clock::now());
  return scores_.at(request).result;
}

void EpisodePool::withdraw_score(uint64_t request) {
  const std::lock_guard lock(mutex_);
  const auto found = scores_.find(request);
  if (found == scores_.end()) return;
  if (found->second.slot != kNowhere) {
    works_[found->second.slot].scores.erase(found->second.id);
    remember(works_[found->second.slot], found->second.id);
  }
  scores_.erase(found);
}

void EpisodePool::pump_if_due(Time now) {
  if (now - last_pump_ >= kPumpSlice) pump(now);
}

void EpisodePool::pump(Time now) {
  // The pool reads only while its caller polls. After a long gap between two polls, time-outs count
  // from now: lines that came during the gap are in the pipe and not late.
  if (now - last_pump_ > timeout_ / 4) watched_since_ = now;
  for (size_t i = 0; i < processes_.count(); ++i) {
    if (!processes_.slot(i).child) continue;
    const bool idle = works_[i].episodes.empty() && works_[i].scores.empty();
    const char* when = idle ? "while it had no episode" : "with episodes open";
    const auto take = [&](std::string_view line) { take_line(i, line, now); };
    if (const auto loss = processes_.serve(processes_.slot(i), when, now, take)) lose(i, *loss);
  }
  processes_.reap();
  hand_out(now);
  expire(now);
  // After the work: the time that endless output takes is no gap.
  last_pump_ = std::chrono::steady_clock::now();
}

// The process has been given up.
void EpisodePool::lose(size_t slot, const Processes::Loss& loss) {
  Work work = std::exchange(works_[slot], {});
  for (const auto& [id, number] : work.episodes) {
    Episode& episode = episodes_.at(number);
    episode.slot = kNowhere;
    fail(episode, loss.kind, loss.message);
  }
  for (const auto& [id, number] : work.scores) {
    Score& score = scores_.at(number);
    score.slot = kNowhere;
    fail(score, loss.kind, loss.message);
  }
}

void EpisodePool::expire(Time now) {
  const double limit = processes_.settings().turn_timeout;
  const auto late = [&](Time since) { return now - std::max(since, watched_since_) > timeout_; };
  for (size_t i = 0; i < processes_.count(); ++i) {
    Slot& slot = processes_.slot(i);
    if (slot.state != State::ready) continue;
    std::vector<uint64_t> episodes, scores;
    for (const auto& [id, number] : works_[i].episodes) {
      const Episode& episode = episodes_.at(number);
      if (episode.line.empty() && episode.open.empty() && late(episode.since)) {
        episodes.push_back(number);
      }
    }
    for (const auto& [id, number] : works_[i].scores) {
      const Score& score = scores_.at(number);
      if (score.line.empty() && late(score.since)) scores.push_back(number);
    }
    if (episodes.empty() && scores.empty()) continue;
    const std::string words = slot.child->last_words();
    if (late(slot.heard)) {
      const std::string message =
          fmt::format("environment.turn_timeout: process {} said nothing for {} s and was killed{}",
                      slot.child->pid(), limit, words);
      processes_.replace(slot, {FailureKind::timeout, message}, now);
      lose(i, {FailureKind::timeout, message});
      continue;
    }
    for (uint64_t number : episodes) {
      Episode& episode = episodes_.at(number);
      send(i, cancel_line(episode.id));
      fail(episode, FailureKind::timeout,
           fmt::format("environment.turn_timeout: process {} neither asked for a sample nor ended "
                       "the episode within {} s{}",
                       slot.child->pid(), limit, words));
    }
    for (uint64_t number : scores) {
      Score& score = scores_.at(number);
      works_[i].scores.erase(score.id);
      remember(works_[i], score.id);
      fail(score, FailureKind::timeout,
           fmt::format("environment.turn_timeout: process {} gave no scores within {} s{}",
                       slot.child->pid(), limit, words));
    }
  }
  const Processes::Loss& last = processes_.last_failure();
  const bool failed = !last.message.empty();
  const FailureKind cause = failed ? last.kind : FailureKind::timeout;
  const std::string nobody =
      fmt::format("environment.turn_timeout: no process took it for {} s{}", limit,
                  failed ? "; the last one that failed: " + last.message : "");
  const auto expire_queue = [&](std::deque<uint64_t>& queue, auto& all) {
    std::erase_if(queue, [&](uint64_t number) {
      const auto found = all.find(number);
      if (found == all.end()) return true;
      const bool refused = !processes_.refusal().empty();
      if (!refused && !late(std::max(found->second.since, last_word_))) return false;
      fail(found->second, refused ? FailureKind::bad_answer : cause,
           refused ? processes_.refusal() : nobody);
      return true;
    });
  };
  expire_queue(queue_, episodes_);
  expire_queue(score_queue_, scores_);
}

bool EpisodePool::ready(size_t slot) {
  return processes_.slot(slot).state == State::ready && !processes_.slot(slot).output_end;
}

// The slot of a process that can take something, or kNowhere: `process` if it lives, else the one
// that runs the group where groups are scored, else the one with the least to do. Starts a process
// where that would be a new one.
size_t EpisodePool::place_for(uint64_t process, const EpisodePlace* place, Time now) {
  size_t best = kNowhere;
  const auto load = [&](size_t i) { return works_[i].episodes.size() + works_[i].scores.size(); };
  for (size_t i = 0; i < processes_.count(); ++i) {
    if (ready(i) && process != 0 && processes_.slot(i).number == process) return i;
    if (place != nullptr && scores_groups_) {
      for (const auto& [id, number] : works_[i].episodes) {
        const EpisodePlace& other = episodes_.at(number).place;
        if (other.group == place->group && other.split == place->split) {
          return ready(i) ? i : kNowhere;
        }
      }
    }
    if (ready(i) && (best == kNowhere || load(i) < load(best))) best = i;
  }
  if (best != kNowhere && load(best) == 0) return best;
  bool coming = false;  // episodes wait for processes that have just begun, to be shared out evenly
  for (size_t i = 0; i < processes_.count(); ++i) {
    Slot& slot = processes_.slot(i);
    if (processes_.may_start(slot, now)) processes_.start(slot, now);
    coming |= slot.state == State::greeting && now - slot.since < timeout_ / 4;
  }
  return place != nullptr && coming ? kNowhere : best;
}

void EpisodePool::hand_out(Time now) {
  if (!processes_.refusal().empty()) return;
  while (!score_queue_.empty()) {
    const auto found = scores_.find(score_queue_.front());
    if (found != scores_.end()) {
      Score& score = found->second;
      const size_t slot = place_for(score.process, nullptr, now);
      if (slot == kNowhere) break;
      send(slot, std::exchange(score.line, {}));
      score.slot = slot;
      score.since = now;
      works_[slot].scores[score.id] = found->first;
    }
    score_queue_.pop_front();
  }
  while (!queue_.empty()) {
    const auto found = episodes_.find(queue_.front());
    if (found != episodes_.end()) {
      Episode& episode = found->second;
      const size_t slot = place_for(0, &episode.place, now);
      if (slot == kNowhere) break;
      send(slot, std::exchange(episode.line, {}));
      episode.slot = slot;
      episode.process = processes_.slot(slot).number;
      episode.since = now;
      works_[slot].episodes[episode.id] = found->first;
    }
    queue_.pop_front();
  }
}

void EpisodePool::send(size_t slot, const std::string& line) {
  if (processes_.slot(slot).child) processes_.slot(slot).child->send(line);
}

void EpisodePool::remember(Work& work, uint64_t id) {
  work.past.push_back(id);
  if (work.past.size() > kPastIds) work.past.pop_front();
}

// The process has it no more.
void EpisodePool::forget(Episode& episode) {
  Work& work = works_[episode.slot];
  work.episodes.erase(episode.id);
  remember(work, episode.id);
  episode.slot = kNowhere;
}

void EpisodePool::finish(Episode& episode, Turn end) {
  if (episode.slot != kNowhere) forget(episode);
  episode.over = true;
  episode.asked.clear();
  episode.open.clear();
  episode.end = std::move(end);
}

void EpisodePool::fail(Episode& episode, FailureKind kind, const std::string& message) {
  finish(episode, {.kind = Turn::Kind::failed, .failure = message, .failure_kind = kind});
}

void EpisodePool::fail(Score& score, FailureKind kind, const std::string& message) {
  score.slot = kNowhere;
  score.result = GroupScores{.members = {}, .failure = message, .failure_kind = kind};
}

}  // namespace leeway
