// Servers as the orchestrator's sampler.
//
// Each request is one call to one server: the least loaded of those that have the current weights,
// or the one that has seen a prefix of the prompt unless it is much more loaded. A request whose
// call fails, or whose answer is not what was asked for, is sent again as it is, its seed included,
// to another server where there is one: with servers of Leeway the samples are the same. After
// request_attempts calls its samples fail, with the server and the reason; the scheduler decides
// what then. New weights are written once, and every server loads them with its requests kept;
// requests wait until one has done so.
//
// Everything happens on the thread that polls, nothing waits without a bound: with no server for
// ready_timeout, requests fail at once with the servers' own reasons, and outage_timeout after the
// last good answer nothing more is sent; `poll` throws when the last call has failed too.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "leeway/metric_list.h"
#include "orchestrator/interfaces.h"
#include "pool/member.h"
#include "pool/prompt_affinity.h"

namespace leeway {

class PoolSampler : public Sampler {
 public:
  // `clock` must outlive it. `store` may be null where no weights are published.
  PoolSampler(PoolContext context, std::unique_ptr<ServerSource> source, std::unique_ptr<Http> http,
              std::unique_ptr<WeightStore> store, Clock& clock);
  // Ends what is in flight, and the pauses of servers that were taking weights.
  ~PoolSampler() override;

  int64_t submit(Request request) override;
  void cancel(int64_t request) override;
  // Throws Error with the servers' reasons when no server has been ready for outage_timeout, or
  // when all processes that were started as servers have ended and are not started again.
  std::vector<SampledSequence> poll(double seconds) override;
  // Throws Error if the weights cannot be written.
  void update_weights(std::shared_ptr<const PolicySnapshot> weights,
                      PolicyVersion version) override;

  // Waits until a server can take requests; without weights, until one is found with the right
  // model. Throws Error with the servers' reasons after ready_timeout; returns early if asked to.
  void wait_for_server(const std::function<bool()>& should_stop);

  // pool/.. and elastic/.. (docs/pools.md); counts are since the last call.
  Metrics take_metrics();
  // Lines of the servers' lives since the last call.
  std::vector<MemberEvent> take_events() { return std::exchange(events_, {}); }
  // What the source of servers and the store of weights tell.
  std::vector<std::string> take_log();

 private:
  struct Waiting {
    int64_t number;
    Request request;
    int64_t attempts = 0;  // calls that failed
    double due = 0.0;      // not before
  };
  struct Flying {
    int64_t number;
    Request request;
    int64_t attempts;  // calls before this one
    std::string server;
    size_t rank;
    PolicyVersion version;  // of the server's weights when it was sent
    double sent;
  };
  struct Counts {
    int64_t requests = 0, failures = 0, retries = 0, bad_answers = 0, joined = 0, left = 0;
    int64_t updates = 0, memory_updates = 0;
    double seconds = 0.0, write_seconds = 0.0, update_seconds = 0.0;
  };

  void step();  // everything that needs no waiting
  void count(const MemberEvent& event);
  void list_members(double now);
  void send_waiting(double now);
  Member* choose(const Request& request);
  void take(const HttpResult& result, double now);
  void take_answer(Flying flying, const HttpResult& result, double now);
  void try_again(Flying flying, const std::string& reason, double now);
  void fail(int64_t number, const Request& request, const std::string& reason);
  void drop_lost(Member& member, double now);
  void fail_without_server();
  void count_outage(bool any_server, double gap);
  bool hopeless() const;
  std::string reasons() const;
  bool calls_open() const;
  void wait(double seconds);

  PoolContext context_;
  std::unique_ptr<ServerSource> source_;
  std::unique_ptr<Http> http_;
  std::unique_ptr<WeightStore> store_;
  Clock& clock_;
  PublishedWeights published_;                              // version -1: none
  std::map<std::string, std::unique_ptr<Member>> members_;  // by name
  PromptAffinity affinity_;
  std::vector<Waiting> waiting_;
  std::map<int64_t, Flying> flying_;  // by call
  std::vector<SampledSequence> done_;
  std::vector<MemberEvent> events_;
  std::set<std::string> ready_before_;
  Counts counts_;
  int64_t next_ = 0;
  double last_step_ = 0.0;
  double down_ = 0.0;     // seconds without a server, as far as it was looked
  bool failing_ = false;  // something failed since the last good answer
  double outage_ = 0.0;   // seconds since then, without long pauses in which nothing was asked
  double pause_ = 0.0;    // seconds since something was asked
  std::string last_problem_;
};

}  // namespace leeway
