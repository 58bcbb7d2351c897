// Advantages, and which groups are trained, by the user's program: orchestrator.advantage_command.
// docs/environments.md describes its requests and answers, process_pool.h how it is run.
//
// There is one process, and it is asked one group at a time, in the order of the batch, so that a
// program may also remember what it has seen. What it says must not change training in silence: a
// group that is not answered is asked again, and in the end stops the run.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "config/run_config.h"
#include "orchestrator/interfaces.h"
#include "orchestrator/process_pool.h"
#include "orchestrator/scheduler.h"

namespace leeway {

// What the program says of a group.
struct GroupVerdict {
  std::vector<double> advantages;  // one per rollout; empty if it is dropped
  std::string drop;                // why it takes no part in the update; empty: it does
};

// Used by one thread. `clock` must outlive it.
class AdvantageProgram {
 public:
  // `table.advantage_command` must not be empty.
  AdvantageProgram(const OrchestratorTable& table, Clock& clock);
  ~AdvantageProgram();

  // Starts the program and waits for its greeting. Throws Error with the reason and the remedy.
  void check();

  // One verdict per group. Waits for the program: up to advantage_timeout for each answer. What
  // fails (death, silence, a bad answer, an error that the program reports) is asked again after
  // retry_backoff, which doubles each time, up to max_error_reschedule_attempts times in all, or
  // until `should_stop`, which also ends the wait for an answer; then throws Error with the group
  // and the last failure. `ids` are the
  // environments' ids.
  std::vector<GroupVerdict> ask(std::span<const Group> groups, const std::vector<std::string>& ids,
                                const std::function<bool()>& should_stop);

  // Lines of its stderr since the last call, and of requests that failed and were repeated.
  std::vector<std::string> take_log();

 private:
  GroupVerdict ask_once(const Group& group, const std::string& members,
                        const std::function<bool()>& should_stop, std::string& failure);

  OrchestratorTable table_;
  Clock& clock_;
  size_t rollouts_ = 0;   // of the group that is being asked
  GroupVerdict verdict_;  // the one read last
  std::vector<std::string> log_;
  ProcessPool pool_;  // last: its callback uses the members above
};

}  // namespace leeway
