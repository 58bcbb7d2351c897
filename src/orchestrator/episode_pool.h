// Child processes that run episodes, many at a time in each: version 2 of the protocol in
// docs/environments.md, in which the program asks for samples.
//
// An episode stays with its process: one that ends or violates the protocol costs all of its
// episodes. One that goes wrong by itself fails alone, and its program is told to forget it.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "orchestrator/environment.h"
#include "orchestrator/episode_messages.h"
#include "orchestrator/processes.h"
#include "text/renderers/json_value.h"

namespace leeway {

// All methods are thread-safe; only the destructor waits for a process. There is no internal
// thread: I/O and time-outs are handled while someone calls a method.
//
// Ids that a program sees are random numbers of 53 bits. A line about an episode that the process
// does not have is counted as unasked, unless the episode was over recently: then it may have
// crossed our message.
class EpisodePool {
 public:
  // Processes that speak protocol 2 and have said hello at least once.
  EpisodePool(Processes processes, bool scores_groups);

  // Starts an episode and returns its number. Groups stay in one process where groups are scored.
  // `example` is JSON.
  uint64_t start(const EpisodePlace& place, uint64_t index, const std::string& example);
  // Calls to be sampled, the end, a failure, or `pending`. After the end only `score` may follow.
  // Failures:
  //   timeout            the program owed something for longer than turn_timeout, or no process
  //                      took the episode for so long
  //   environment_error  the process ended, could not be started, or reports an error
  //   bad_answer         a line that violates the protocol
  Turn poll(uint64_t episode);
  // The program gets the answer to a call.
  void sampled(uint64_t episode, const SampleAnswer& answer);
  // It is no longer wanted, whatever its state.
  void withdraw(uint64_t episode);

  // Asks for the scores of episodes that ended, by the process that ran all of them if there is
  // one. Returns the request's number; failures as above.
  uint64_t score(const std::vector<uint64_t>& episodes);
  std::optional<GroupScores> poll_score(uint64_t request);
  void withdraw_score(uint64_t request);

  std::vector<std::string> take_log();
  int64_t take_unasked_answers();

 private:
  using Time = Processes::Time;
  using Slot = Processes::Slot;
  static constexpr size_t kNowhere = static_cast<size_t>(-1);

  struct Episode {
    uint64_t id = 0;  // as the program sees it
    EpisodePlace place;
    uint64_t index = 0;
    std::string line;                   // until it is sent
    size_t slot = kNowhere;             // while it runs
    uint64_t process = 0;               // that runs it or ran it
    Time since;                         // queued, or the program owes something
    std::set<std::string> calls, open;  // ids, ever and not answered yet
    std::vector<SampleCall> asked;      // not taken yet
    bool over = false;
    Turn end;
    std::string info;
  };
  struct Score {
    uint64_t id = 0;
    std::string line;  // until it is sent
    size_t members = 0, slot = kNowhere;
    uint64_t process = 0;  // that should do it; 0: any
    Time since;
    std::optional<GroupScores> result;
  };
  // What a slot's process has to do.
  struct Work {
    std::map<uint64_t, uint64_t> episodes, scores;  // numbers by id
    std::deque<uint64_t> past;                      // ids that are over, of the last ones
  };

  void pump_if_due(Time now);
  void pump(Time now);
  void take_line(size_t slot, std::string_view line, Time now);
  void take_episode_line(size_t slot, const std::string& type, const JsonValue& line, Time now);
  void take_scores(size_t slot, const JsonValue& line);
  void lose(size_t slot, const Processes::Loss& loss);
  void expire(Time now);
  void hand_out(Time now);
  size_t place_for(uint64_t process, const EpisodePlace* place, Time now);
  void send(size_t slot, const std::string& line);
  void finish(Episode& episode, Turn end);
  void fail(Episode& episode, FailureKind kind, const std::string& message);
  void fail(Score& score, FailureKind kind, const std::string& message);
  void forget(Episode& episode);
  static void remember(Work& work, uint64_t id);
  void note_unasked(size_t slot, const std::string& what);
  bool ready(size_t slot);

  std::mutex mutex_;
  Processes processes_;
  bool scores_groups_;
  std::chrono::duration<double> timeout_;
  std::vector<Work> works_;                   // by slot
  std::map<uint64_t, Episode> episodes_;      // by number, until withdrawn
  std::map<uint64_t, Score> scores_;          // by number, until withdrawn
  std::deque<uint64_t> queue_, score_queue_;  // not sent yet; withdrawn ones are skipped
  uint64_t last_number_ = 0;
  Time last_pump_, watched_since_, last_word_;
  int64_t unasked_answers_ = 0;
};

}  // namespace leeway
