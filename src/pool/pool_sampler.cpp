#include "pool/pool_sampler.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "leeway/error.h"
#include "pool/answer_checks.h"

namespace leeway {
namespace {

constexpr double kSlice = 0.05;  // seconds of the longest wait for one thing
constexpr double kLongestGap =
    0.5;                          // seconds between two looks that count as time without a server
constexpr int64_t kMoreLoad = 8;  // samples that a server may have more and still keep its prompts
constexpr size_t kMostReasons = 4;
constexpr double kFirstDelay = 0.05, kLongestDelay = 5.0;  // seconds before a call is repeated
constexpr double kLongestPause = 60.0;  // seconds without a request that belong to an outage

}  // namespace

PoolSampler::PoolSampler(PoolContext context, std::unique_ptr<ServerSource> source,
                         std::unique_ptr<Http> http, std::unique_ptr<WeightStore> store,
                         Clock& clock)
    : context_(std::move(context)),
      source_(std::move(source)),
      http_(std::move(http)),
      store_(std::move(store)),
      clock_(clock),
      last_step_(clock.now()) {}

PoolSampler::~PoolSampler() {
  for (const auto& [call, flying] : flying_) http_->cancel(call);
  std::set<int64_t> resumes;
  for (const auto& [name, member] : members_) {
    if (const auto call = member->begin_last_resume()) resumes.insert(*call);
  }
  const double end = clock_.now() + 1.0;
  while (!resumes.empty() && clock_.now() < end) {
    for (const HttpResult& result : http_->poll(kSlice)) resumes.erase(result.call);
  }
  members_.clear();  // before http_, which they use
}

int64_t PoolSampler::submit(Request request) {
  const auto length = static_cast<int64_t>(request.prompt.size()) + request.max_new_tokens;
  if (request.prompt.empty() || length > context_.model.max_length) {
    throw Error(
        fmt::format("a request of {} prompt tokens and {} new ones does not fit the model's "
                    "{} positions",
                    request.prompt.size(), request.max_new_tokens, context_.model.max_length));
  }
  waiting_.push_back({next_, std::move(request)});
  return next_++;
}

void PoolSampler::cancel(int64_t request) {
  std::erase_if(waiting_, [&](const Waiting& each) { return each.number == request; });
  std::erase_if(done_, [&](const SampledSequence& each) { return each.request == request; });
  std::erase_if(flying_, [&](const auto& each) {
    const Flying& flying = each.second;
    if (flying.number != request) return false;
    http_->cancel(each.first);
    members_.at(flying.server)->end(flying.rank, flying.request.samples);
    return true;
  });
}

void PoolSampler::update_weights(std::shared_ptr<const PolicySnapshot> weights,
                                 PolicyVersion version) {
  const double begin = clock_.now();
  published_ = store_->publish(weights, version);
  counts_.write_seconds += clock_.now() - begin;
  step();
}

std::vector<SampledSequence> PoolSampler::poll(double seconds) {
  const double end = clock_.now() + seconds;
  while (true) {
    step();
    const bool in_flight = !waiting_.empty() || !flying_.empty();
    // Calls in flight end within request_timeout; one of them may yet be answered.
    if (hopeless() && !waiting_.empty() && flying_.empty() && done_.empty()) {
      throw Error(fmt::format(
          "no server is ready or answers as it should, for {:.0f} s (inference.outage_timeout = "
          "{:g}): {}{}{}",
          outage_, context_.table.outage_timeout, reasons(),
          last_problem_.empty() ? "" : "; the last failure: ", last_problem_));
    }
    const double left = end - clock_.now();
    wait(done_.empty() && in_flight ? std::clamp(left, 0.0, kSlice) : 0.0);
    if (!done_.empty() || !in_flight || clock_.now() >= end) return std::exchange(done_, {});
  }
}

void PoolSampler::wait(double seconds) {
  if (!calls_open()) {
    if (seconds > 0.0) clock_.sleep(seconds);
    return;
  }
  for (const HttpResult& result : http_->poll(seconds)) take(result, clock_.now());
}

bool PoolSampler::calls_open() const {
  return !flying_.empty() || std::any_of(members_.begin(), members_.end(),
                                         [](const auto& each) { return each.second->calls(); });
}

void PoolSampler::step() {
  const double now = clock_.now();
  const double gap = std::min(now - last_step_, kLongestGap);
  last_step_ = now;
  list_members(now);
  bool any = false, wants_folder = false;
  std::set<PolicyVersion> used = {published_.version};
  for (const auto& [name, member] : members_) {
    member->tick(now, published_.version >= 0 ? &published_ : nullptr);
    drop_lost(*member, now);
    for (MemberEvent& event : member->take_events()) {
      const bool ready = event.state == MemberState::ready;
      event.first = ready && ready_before_.insert(name).second;
      counts_.joined += event.first ? 1 : 0;
      const bool out =
          event.state == MemberState::unhealthy || event.state == MemberState::draining;
      if (out && ready_before_.erase(name) > 0) ++counts_.left;
      count(event);
      events_.push_back(std::move(event));
    }
    any = any || member->in_pool();
    used.insert(member->loading());
    wants_folder = wants_folder || member->wants_folder();
  }
  if (wants_folder) {
    const double begin = clock_.now();
    store_->write(published_);
    counts_.write_seconds += clock_.now() - begin;
  }
  if (store_) store_->keep_only(used);
  down_ = any ? 0.0 : down_ + gap;
  count_outage(any, gap);
  if (hopeless()) return;
  send_waiting(now);
  if (!any && !waiting_.empty()) fail_without_server();
}

void PoolSampler::count(const MemberEvent& event) {
  if (!event.loaded) return;
  ++counts_.updates;
  counts_.memory_updates += event.from_memory ? 1 : 0;
  counts_.update_seconds += event.seconds;
}

std::vector<std::string> PoolSampler::take_log() {
  std::vector<std::string> lines = source_->take_log();
  if (!store_) return lines;
  for (std::string& line : store_->take_log()) lines.push_back(std::move(line));
  return lines;
}

void PoolSampler::list_members(double now) {
  std::set<std::string> listed;
  for (const ServerAddress& address : source_->servers(now)) {
    listed.insert(address.url);
    auto& member = members_[address.url];
    if (!member) member = std::make_unique<Member>(address, context_, *http_);
    member->undrain(now);
  }
  std::erase_if(members_, [&](const auto& each) {
    Member& member = *each.second;
    if (listed.contains(each.first)) return false;
    member.drain(now, source_->why_gone(each.first));
    if (member.load() > 0) return false;
    for (MemberEvent& event : member.take_events()) events_.push_back(std::move(event));
    if (ready_before_.erase(each.first) > 0) ++counts_.left;
    return true;
  });
}

Member* PoolSampler::choose(const Request& request) {
  const std::string avoided = affinity_.failed_at(request.prompt);
  Member *best = nullptr, *other = nullptr;
  for (const auto& [name, member] : members_) {
    if (!member->serves(published_.version)) continue;
    Member*& place = name == avoided ? other : best;
    const auto key = [](const Member& each) { return std::pair(each.least(), each.load()); };
    if (place == nullptr || key(*member) < key(*place)) place = member.get();
  }
  if (best == nullptr) return other;
  const auto seen = members_.find(affinity_.seen_by(request.prompt));
  if (seen == members_.end() || seen->first == avoided) return best;
  Member& known = *seen->second;
  return known.serves(published_.version) && known.load() <= best->load() + kMoreLoad ? &known
                                                                                      : best;
}

void PoolSampler::send_waiting(double now) {
  std::erase_if(waiting_, [&](Waiting& waiting) {
    if (waiting.due > now) return false;
    Member* member = choose(waiting.request);
    if (member == nullptr) return false;
    size_t rank = 0;
    const int64_t call = http_->start(member->request_call(waiting.request, &rank));
    affinity_.sent(waiting.request.prompt, member->name());
    ++counts_.requests;
    counts_.retries += waiting.attempts > 0 ? 1 : 0;
    flying_.emplace(call, Flying{waiting.number, std::move(waiting.request), waiting.attempts,
                                 member->name(), rank, member->version(), now});
    return true;
  });
}

void PoolSampler::take(const HttpResult& result, double now) {
  const auto found = flying_.find(result.call);
  if (found != flying_.end()) {
    Flying flying = std::move(found->second);
    flying_.erase(found);
    return take_answer(std::move(flying), result, now);
  }
  for (const auto& [name, member] : members_) {
    if (!member->take(result, now)) continue;
    return drop_lost(*member, now);
  }
}

void PoolSampler::take_answer(Flying flying, const HttpResult& result, double now) {
  Member& member = *members_.at(flying.server);
  member.end(flying.rank, flying.request.samples);
  counts_.seconds += now - flying.sent;
  std::string problem;
  if (result.status == 0) {
    problem = result.failure;
    member.broke(problem, now);
  } else if (result.status != 200) {
    problem = Member::problem_of(result);
    member.answered_badly(problem, now);
  } else {
    try {
      const Dialect& dialect = member.dialect();
      std::vector<SampledSequence> samples =
          dialect.read_samples(flying.request, result.body, flying.version);
      check_samples(flying.request, samples,
                    {.vocab_size = context_.model.vocab_size,
                     .oldest = flying.version,
                     .newest = published_.version,
                     .stops_as_asked = dialect.stops_as_asked()});
      member.answered_well();
      const bool ended = std::any_of(
          samples.begin(), samples.end(),
          [](const SampledSequence& sample) { return sample.finish == Finish::cancelled; });
      if (ended) return try_again(std::move(flying), "the server ended it", now);
      affinity_.succeeded(flying.request.prompt);
      failing_ = false;
      for (SampledSequence& sample : samples) {
        sample.request = flying.number;
        done_.push_back(std::move(sample));
      }
      return;
    } catch (const Error& error) {
      problem = fmt::format("a bad answer: {}", error.what());
      ++counts_.bad_answers;
      member.answered_badly(problem, now);
      member.forgot_weights(problem, now);
    }
  }
  try_again(std::move(flying), problem, now);
  drop_lost(member, now);
}

void PoolSampler::try_again(Flying flying, const std::string& reason, double now) {
  ++counts_.failures;
  failing_ = true;
  last_problem_ = fmt::format("{}: {}", flying.server, reason);
  affinity_.failed(flying.request.prompt, flying.server);
  const int64_t attempts = flying.attempts + 1;
  if (attempts >= context_.table.request_attempts) {
    return fail(flying.number, flying.request, last_problem_);
  }
  const double delay = std::ldexp(kFirstDelay, static_cast<int>(attempts) - 1);
  waiting_.push_back(
      {flying.number, std::move(flying.request), attempts, now + std::min(delay, kLongestDelay)});
}

void PoolSampler::fail(int64_t number, const Request& request, const std::string& reason) {
  for (int64_t sample = 0; sample < request.samples; ++sample) {
    done_.push_back(
        {.request = number, .sample = sample, .finish = Finish::failed, .failure = reason});
  }
}

void PoolSampler::drop_lost(Member& member, double now) {
  const auto reason = member.take_loss();
  if (!reason) return;
  std::erase_if(flying_, [&](const auto& each) {
    const Flying& flying = each.second;
    if (flying.server != member.name()) return false;
    http_->cancel(each.first);
    member.end(flying.rank, flying.request.samples);
    try_again(flying, "left the pool: " + *reason, now);
    return true;
  });
}

void PoolSampler::count_outage(bool any_server, double gap) {
  const bool asked = !waiting_.empty() || !flying_.empty();
  if (asked && !any_server) failing_ = true;
  pause_ = asked ? 0.0 : pause_ + gap;
  if (!failing_) {
    outage_ = 0.0;
  } else if (pause_ <= kLongestPause) {
    outage_ += gap;
  }
}

bool PoolSampler::hopeless() const {
  return failing_ && (outage_ >= context_.table.outage_timeout || !source_->given_up().empty());
}

std::string PoolSampler::reasons() const {
  if (const std::string reason = source_->given_up(); !reason.empty()) return reason;
  if (members_.empty()) return "no server is known";
  std::string text;
  size_t told = 0;
  for (const auto& [name, member] : members_) {
    if (told == kMostReasons) {
      text += fmt::format("; and {} more", members_.size() - told);
      break;
    }
    ++told;
    const std::string& failure = member->last_failure();
    text += fmt::format("{}{}: {}", text.empty() ? "" : "; ", name,
                        failure.empty() ? name_of(member->state()) : failure);
  }
  return text;
}

void PoolSampler::fail_without_server() {
  const double most = context_.table.ready_timeout;
  if (down_ < most && source_->given_up().empty()) return;
  const std::string reason =
      fmt::format("no server is ready (inference.ready_timeout = {:g}): {}", most, reasons());
  for (const Waiting& waiting : std::exchange(waiting_, {})) {
    fail(waiting.number, waiting.request, reason);
  }
}

void PoolSampler::wait_for_server(const std::function<bool()>& should_stop) {
  while (!should_stop()) {
    step();
    for (const auto& [name, member] : members_) {
      const bool there =
          published_.version >= 0 ? member->serves(published_.version) : member->found();
      if (there) return;
    }
    if (down_ >= context_.table.ready_timeout || !source_->given_up().empty()) {
      throw Error(
          fmt::format("no server of the pool is ready after {:g} s "
                      "(inference.ready_timeout): {}",
                      down_, reasons()));
    }
    wait(kSlice);
  }
}

Metrics PoolSampler::take_metrics() {
  const Counts counts = std::exchange(counts_, {});
  const auto ready = std::count_if(members_.begin(), members_.end(),
                                   [](const auto& each) { return each.second->in_pool(); });
  const auto number = [](auto value) { return static_cast<double>(value); };
  const double answered = std::max(1.0, number(counts.requests));
  Metrics metrics = {
      {"pool/servers", number(members_.size())},
      {"pool/ready_servers", number(ready)},
      {"pool/joined", number(counts.joined)},
      {"pool/left", number(counts.left)},
      {"pool/requests", number(counts.requests)},
      {"pool/failed_requests", number(counts.failures)},
      {"pool/retried_requests", number(counts.retries)},
      {"pool/bad_answers", number(counts.bad_answers)},
      {"pool/waiting_requests", number(waiting_.size())},
      {"pool/request_seconds", counts.seconds / answered},
      {"pool/write_seconds", counts.write_seconds},
      {"pool/update_seconds", counts.update_seconds / std::max(1.0, number(counts.updates))},
      {"pool/memory_updates", number(counts.memory_updates)}};
  if (context_.table.pool == InferencePool::elastic) {
    metrics.emplace_back("elastic/num_servers", number(members_.size()));
    metrics.emplace_back("elastic/num_ready_servers", number(ready));
    metrics.emplace_back("elastic/desired_step", number(published_.version));
  }
  return metrics;
}

}  // namespace leeway
