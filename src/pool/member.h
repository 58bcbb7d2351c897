// One server of a pool: found, brought to the current weights, watched, and left out while it does
// not work.
//
//   discovering   health, dialect and model are asked for
//   syncing       pause, load the published weights, resume; requests in flight are kept
//   ready         takes requests; its health is asked for each sync_interval
//   unhealthy     out of the pool; discovered again after a wait that doubles
//   draining      no longer listed: finishes its requests, takes no more
//
// Calls to a server are made one after the other, and each has a time-out.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "config/run_config.h"
#include "pool/dialect.h"
#include "pool/http.h"
#include "pool/server_source.h"
#include "pool/weight_store.h"

namespace leeway {

enum class MemberState { discovering, syncing, ready, unhealthy, draining };
const char* name_of(MemberState state);

// What the servers' model must be.
struct PoolModel {
  int64_t vocab_size = 0;
  int64_t max_length = 0;  // prompt and completion
  ServedWeights weights = ServedWeights::whole;
};

// How a pool speaks to its servers; all members share one.
struct PoolContext {
  InferenceTable table;
  PoolModel model;
  std::vector<std::string> headers;  // of every call; the key is among them
  double temperature = 1.0;          // of rollouts
};

// A line of a server's life.
struct MemberEvent {
  std::string server;
  MemberState state = MemberState::discovering;
  std::string text;
  bool first = false;        // ready: it was not in the pool before
  bool loaded = false;       // ready: it took weights, in `seconds` from its pause to its resume
  bool from_memory = false;  // of a GPU
  double seconds = 0.0;
};

// `context` and `http` must outlive it.
class Member {
 public:
  Member(ServerAddress address, const PoolContext& context, Http& http);
  ~Member();
  Member(const Member&) = delete;
  Member& operator=(const Member&) = delete;

  // Begins what is due. `target`: the weights that it shall have; null: none yet, and it stays
  // `discovering` once it is found.
  void tick(double now, const PublishedWeights* target);
  // The result of a call that this member has made; false: it is not one.
  bool take(const HttpResult& result, double now);
  // It is no longer listed, or listed again.
  void drain(double now, const std::string& reason);
  void undrain(double now);

  const std::string& name() const { return address_.url; }
  MemberState state() const { return state_; }
  bool found() const { return dialect_ != nullptr && found_; }
  bool serves(PolicyVersion version) const {
    return state_ == MemberState::ready && version_ == version;
  }
  // Ready, or only away to take new weights.
  bool in_pool() const {
    return state_ == MemberState::ready || (state_ == MemberState::syncing && was_ready_);
  }
  // It is to take weights that have no folder yet, and cannot take them from memory.
  bool wants_folder() const {
    return state_ == MemberState::syncing && step_ == Step::none && target_.folder.empty() &&
           !takes_from_memory(target_);
  }
  PolicyVersion loading() const { return step_ == Step::none ? -1 : loading_.version; }
  bool calls() const { return call_ != 0; }
  const std::string& last_failure() const { return last_failure_; }

  // A request's call, to the least loaded data-parallel rank; `end` with its rank when it is over.
  HttpCall request_call(const Request& request, size_t* rank);
  void end(size_t rank, int64_t samples) { loads_[rank] -= samples; }
  int64_t load() const;   // samples in flight
  int64_t least() const;  // of its ranks
  const Dialect& dialect() const { return *dialect_; }
  PolicyVersion version() const { return version_; }  // of its weights; -1: unknown

  // How requests went. After bad answers in a row it leaves; a broken connection, or weights that
  // are not those it was given, make it be discovered anew.
  void answered_well();
  void answered_badly(const std::string& reason, double now);
  void broke(const std::string& reason, double now);
  void forgot_weights(const std::string& reason, double now);

  // Why a call failed: no answer, or the status with the server's own words.
  static std::string problem_of(const HttpResult& result);

  // Why the requests that it has are lost, once: it has left the pool.
  std::optional<std::string> take_loss() { return std::exchange(loss_, std::nullopt); }
  std::vector<MemberEvent> take_events() { return std::exchange(events_, {}); }
  // Begins the call that ends a pause, where this member has paused its server.
  std::optional<int64_t> begin_last_resume();

 private:
  enum class Step { none, health, probe, describe, pause, update, forget, resume, check, verify };
  void begin(Step step, const ServerCall& call, double timeout);
  void enter(MemberState state, const std::string& text);
  void leave(const std::string& reason, double now);
  void rediscover(const std::string& reason, double now);
  void stop_call();
  void take_facts(ServerFacts facts, double now);
  bool takes_from_memory(const PublishedWeights& weights) const;
  void begin_sync(double now);
  void take_update(const HttpResult& result);
  void end_sync(const HttpResult& result, double now);
  void begin_ready(double now);
  void verify(const HttpResult& result, double now);
  void failed_attempt(const std::string& reason, double now);

  ServerAddress address_;
  const PoolContext& context_;
  Http& http_;
  std::unique_ptr<Dialect> dialect_;
  ServerFacts facts_;
  MemberState state_ = MemberState::discovering;
  Step step_ = Step::none;
  int64_t call_ = 0;  // 0: none
  double due_ = 0.0;  // nothing before
  double backoff_ = 0.0;
  double next_check_ = 0.0;
  int64_t failed_checks_ = 0, bad_in_a_row_ = 0;
  bool found_ = false, was_ready_ = false, paused_ = false;
  PolicyVersion version_ = -1;
  PublishedWeights target_;   // version -1: none
  PublishedWeights loading_;  // of the sync going on
  std::vector<ServerCall> updates_;
  size_t next_update_ = 0;
  std::string update_failure_;
  std::optional<PolicyVersion> loaded_;  // what its server was given last
  std::vector<PolicyVersion> stale_;     // what it was given before, and need not keep
  bool from_memory_ = false;             // of the sync going on
  bool refused_memory_ = false;          // since it was found
  double sync_begin_ = 0.0;
  int64_t attempts_ = 0;
  std::vector<int64_t> loads_;  // samples by rank
  std::optional<std::string> loss_;
  std::string last_failure_;
  std::string told_;  // why it is unhealthy, as the last event said
  std::vector<MemberEvent> events_;
};

}  // namespace leeway
