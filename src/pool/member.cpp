#include "pool/member.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "base/json.h"
#include "base/printable.h"
#include "leeway/error.h"

namespace leeway {
namespace {

constexpr double kFirstBackoff = 0.5, kLongestBackoff = 30.0;  // seconds out of the pool
constexpr double kAttemptDelay = 0.2;                          // seconds; doubles
constexpr int64_t kMostFailedChecks = 2, kMostBadAnswers = 3;  // in a row

}  // namespace

const char* name_of(MemberState state) {
  switch (state) {
    case MemberState::discovering: return "discovering";
    case MemberState::syncing: return "syncing";
    case MemberState::ready: return "ready";
    case MemberState::unhealthy: return "unhealthy";
    case MemberState::draining: return "draining";
  }
  return "";
}

Member::Member(ServerAddress address, const PoolContext& context, Http& http)
    : address_(std::move(address)),
      context_(context),
      http_(http),
      backoff_(kFirstBackoff),
      loads_(static_cast<size_t>(context.table.dp_rank_count), 0) {
  if (context.table.dialect != InferenceDialect::automatic) {
    dialect_ = make_dialect(context.table.dialect, context.model.weights);
  }
  enter(MemberState::discovering, "joins");
}

Member::~Member() { stop_call(); }

std::string Member::problem_of(const HttpResult& result) {
  if (!result.failure.empty()) return result.failure;
  std::string words;
  try {
    const rapidjson::Document json = parse_json("", result.body);
    const auto* error = json.IsObject() && json.HasMember("error") ? &json["error"] : nullptr;
    if (error != nullptr && error->IsObject() && error->HasMember("message")) {
      const auto& message = (*error)["message"];
      if (message.IsString()) words = message.GetString();
    }
  } catch (const Error&) {
    words = result.body;
  }
  words = printable(words.substr(0, 200));
  return fmt::format("status {}{}{}", result.status, words.empty() ? "" : ": ", words);
}

void Member::stop_call() {
  if (call_ != 0) http_.cancel(call_);
  call_ = 0;
  step_ = Step::none;
}

void Member::enter(MemberState state, const std::string& text) {
  state_ = state;
  events_.push_back({name(), state, text});
}

void Member::begin(Step step, const ServerCall& call, double timeout) {
  step_ = step;
  call_ = http_.start({.post = call.post,
                       .url = address_.admin + call.path,
                       .body = call.body,
                       .headers = context_.headers,
                       .connect_timeout = context_.table.connect_timeout,
                       .timeout = timeout,
                       .stall_timeout = context_.table.stall_timeout});
}

void Member::tick(double now, const PublishedWeights* target) {
  if (target != nullptr) target_ = *target;
  const double quick = context_.table.connect_timeout;
  const bool has_target = target_.version >= 0;
  if (state_ == MemberState::ready && version_ != target_.version) {
    stop_call();  // a check of its health
    attempts_ = 0;
    due_ = now;
    enter(MemberState::syncing, fmt::format("takes version {}", target_.version));
  }
  if (call_ != 0 || now < due_) return;
  switch (state_) {
    case MemberState::discovering:
      if (!found_) begin(Step::health, ServerCall{.path = "/health"}, quick);
      if (found_ && has_target) {
        attempts_ = 0;
        if (facts_.version == target_.version && facts_.checksum == target_.checksum &&
            !facts_.paused) {
          loading_ = target_;
          return begin_ready(now);
        }
        enter(MemberState::syncing, fmt::format("takes version {}", target_.version));
        begin_sync(now);
      }
      return;
    case MemberState::syncing: return begin_sync(now);
    case MemberState::ready:
      if (!stale_.empty()) {
        // A server may wait with its answer for requests that use the adapter.
        const auto call = dialect_->forget(stale_.back());
        stale_.pop_back();
        if (call) return begin(Step::forget, *call, context_.table.stall_timeout);
      }
      if (now >= next_check_) begin(Step::check, dialect_->health(), quick);
      return;
    case MemberState::unhealthy:
      state_ = MemberState::discovering;
      begin(Step::health, ServerCall{.path = "/health"}, quick);
      return;
    case MemberState::draining: return;
  }
}

bool Member::take(const HttpResult& result, double now) {
  if (result.call != call_ || call_ == 0) return false;
  call_ = 0;
  const Step step = std::exchange(step_, Step::none);
  const double quick = context_.table.connect_timeout;
  const auto failed = [&](const char* what) {
    leave(fmt::format("{}: {}", what, problem_of(result)), now);
  };
  switch (step) {
    case Step::none: break;
    case Step::health:
      if (!result.ok()) {
        failed("GET /health");
      } else if (dialect_ == nullptr) {
        begin(Step::probe, ServerCall{.path = "/model_info"}, quick);
      } else {
        begin(Step::describe, dialect_->describe(), quick);
      }
      break;
    case Step::probe:
      try {
        if (result.status == 0) throw Error(result.failure);
        if (result.status == 401 || result.status == 403) {
          throw Error(problem_of(result) + "; set inference.api_key_var");
        }
        dialect_ = make_dialect(dialect_of(result.status, result.body), context_.model.weights);
        begin(Step::describe, dialect_->describe(), quick);
      } catch (const Error& error) {
        leave(error.what(), now);
      }
      break;
    case Step::describe:
      if (!result.ok()) {
        failed("its model");
        break;
      }
      try {
        take_facts(dialect_->read_facts(result.body), now);
      } catch (const Error& error) {
        leave(fmt::format("its model: {}", error.what()), now);
      }
      break;
    case Step::pause:
      if (!result.ok()) {
        failed_attempt("pause: " + problem_of(result), now);
        break;
      }
      paused_ = true;
      next_update_ = 0;
      update_failure_.clear();
      updates_ = from_memory_
                     ? std::vector{*dialect_->update_shared(*loading_.shared, loading_.version)}
                     : dialect_->update(loading_.folder, loading_.version);
      begin(Step::update, updates_[0], context_.table.update_timeout);
      break;
    case Step::update: take_update(result); break;
    case Step::forget: break;
    case Step::resume: end_sync(result, now); break;
    case Step::check:
      next_check_ = now + context_.table.sync_interval;
      if (result.ok()) {
        failed_checks_ = 0;
        if (dialect_->kind() == InferenceDialect::leeway) {
          begin(Step::verify, dialect_->describe(), quick);
        }
      } else if (++failed_checks_ >= kMostFailedChecks) {
        failed("GET /health");
      } else {
        next_check_ = now + kAttemptDelay;
      }
      break;
    case Step::verify: verify(result, now); break;
  }
  return true;
}

// That it still has the weights it was given, and not those of another run that uses it too.
void Member::verify(const HttpResult& result, double now) {
  if (!result.ok()) return;  // the next question of its health will tell
  try {
    const ServerFacts facts = dialect_->read_facts(result.body);
    if (facts.version == target_.version && facts.checksum == target_.checksum) return;
    rediscover(fmt::format("has other weights than it was given, of version {}; does another run "
                           "use it?",
                           facts.version),
               now);
  } catch (const Error& error) {
    rediscover(error.what(), now);
  }
}

void Member::take_facts(ServerFacts facts, double now) {
  const PoolModel& model = context_.model;
  if (facts.vocab_size > 0 && facts.vocab_size != model.vocab_size) {
    return leave(fmt::format("its model has a vocabulary of {}, the policy of {}", facts.vocab_size,
                             model.vocab_size),
                 now);
  }
  if (facts.max_length > 0 && facts.max_length < model.max_length) {
    return leave(fmt::format("its sequences have at most {} tokens, the policy's {}",
                             facts.max_length, model.max_length),
                 now);
  }
  if (dialect_->kind() != InferenceDialect::leeway && context_.temperature != 1.0) {
    return leave(
        "its log-probabilities are before temperature, which is of use with "
        "rollout.temperature = 1 only",
        now);
  }
  facts_ = std::move(facts);
  refused_memory_ = false;
  found_ = true;
  due_ = now;
}

// Only by a server of this machine, which has said that it uses the same GPU.
bool Member::takes_from_memory(const PublishedWeights& weights) const {
  return weights.shared && dialect_ != nullptr && !refused_memory_ && !facts_.device.empty() &&
         facts_.device == weights.shared->device && is_loopback_url(address_.admin) &&
         dialect_->update_shared(*weights.shared, weights.version).has_value();
}

void Member::begin_sync(double now) {
  if (wants_folder()) return;  // the pool has it written before the next tick
  loading_ = target_;
  from_memory_ = takes_from_memory(loading_);
  sync_begin_ = now;
  begin(Step::pause, dialect_->pause(),
        context_.table.connect_timeout + context_.table.stall_timeout);
}

void Member::take_update(const HttpResult& result) {
  const bool unknown = result.status == 404 || result.status == 405 || result.status == 422;
  if (unknown && next_update_ + 1 < updates_.size()) {
    begin(Step::update, updates_[++next_update_], context_.table.update_timeout);
    return;
  }
  if (result.status != 200 && dialect_->has_already(result.status, result.body)) {
    // It has what it is given.
  } else if (!result.ok()) {
    update_failure_ = "update: " + problem_of(result);
  } else {
    try {
      dialect_->check_updated(result.body, loading_.version, loading_.checksum);
    } catch (const Error& error) {
      update_failure_ = fmt::format("update: {}", error.what());
    }
  }
  if (update_failure_.empty()) {
    const std::optional<PolicyVersion> before = std::exchange(loaded_, loading_.version);
    if (before && before != loaded_) stale_.push_back(*before);
  }
  // A server that gives no answer may only be gone: it is asked once more before a folder is
  // written.
  if (!update_failure_.empty() && from_memory_ && (result.status != 0 || attempts_ > 0)) {
    refused_memory_ = true;
  }
  begin(Step::resume, dialect_->resume(), context_.table.connect_timeout);
}

void Member::end_sync(const HttpResult& result, double now) {
  if (update_failure_.empty() && !result.ok()) update_failure_ = "resume: " + problem_of(result);
  if (result.ok()) paused_ = false;
  if (from_memory_ && refused_memory_) {  // the folder is another way, not another attempt
    version_ = -1;
    last_failure_ = update_failure_;
    return enter(
        MemberState::syncing,
        fmt::format("takes weights from files, not from the GPU's memory: {}", update_failure_));
  }
  if (!update_failure_.empty()) return failed_attempt(update_failure_, now);
  begin_ready(now);
  events_.back().loaded = true;
  events_.back().from_memory = from_memory_;
  events_.back().seconds = now - sync_begin_;
}

void Member::begin_ready(double now) {
  version_ = loading_.version;
  was_ready_ = true;
  failed_checks_ = 0;
  next_check_ = now + context_.table.sync_interval;
  enter(MemberState::ready, fmt::format("has version {}", version_));
}

void Member::failed_attempt(const std::string& reason, double now) {
  version_ = -1;
  if (++attempts_ >= context_.table.update_attempts) return leave(reason, now);
  last_failure_ = reason;
  due_ = now + std::ldexp(kAttemptDelay, static_cast<int>(std::min<int64_t>(attempts_, 10)) - 1);
}

void Member::leave(const std::string& reason, double now) {
  stop_call();
  found_ = false;
  was_ready_ = false;
  version_ = -1;
  loss_ = reason;
  last_failure_ = reason;
  due_ = now + backoff_;
  backoff_ = std::min(2.0 * backoff_, kLongestBackoff);
  if (context_.table.dialect == InferenceDialect::automatic) dialect_.reset();
  if (state_ == MemberState::draining) return;
  // One that stays away is told of once.
  if (std::exchange(told_, reason) == reason) {
    state_ = MemberState::unhealthy;
  } else {
    enter(MemberState::unhealthy, reason);
  }
}

void Member::rediscover(const std::string& reason, double now) {
  last_failure_ = reason;
  if (state_ != MemberState::ready) return;
  stop_call();
  found_ = false;
  version_ = -1;
  due_ = now;
  enter(MemberState::discovering, reason);
}

void Member::drain(double now, const std::string& reason) {
  if (state_ == MemberState::draining) return;
  stop_call();
  found_ = false;
  due_ = now;
  enter(MemberState::draining, reason);
}

void Member::undrain(double now) {
  if (state_ != MemberState::draining) return;
  due_ = now;
  version_ = -1;
  enter(MemberState::discovering, "is listed again");
}

HttpCall Member::request_call(const Request& request, size_t* rank) {
  *rank = static_cast<size_t>(std::min_element(loads_.begin(), loads_.end()) - loads_.begin());
  loads_[*rank] += request.samples;
  const ServerCall call = dialect_->generate(request, facts_.model, version_);
  HttpCall out{.post = call.post,
               .url = address_.url + call.path,
               .body = call.body,
               .headers = context_.headers,
               .connect_timeout = context_.table.connect_timeout,
               .timeout = context_.table.request_timeout,
               .stall_timeout = context_.table.stall_timeout};
  if (loads_.size() > 1) out.headers.push_back(fmt::format("X-data-parallel-rank: {}", *rank));
  return out;
}

int64_t Member::load() const { return std::accumulate(loads_.begin(), loads_.end(), int64_t{0}); }

int64_t Member::least() const { return *std::min_element(loads_.begin(), loads_.end()); }

void Member::answered_well() {
  bad_in_a_row_ = 0;
  backoff_ = kFirstBackoff;
  told_.clear();
}

void Member::answered_badly(const std::string& reason, double now) {
  last_failure_ = reason;
  if (++bad_in_a_row_ < kMostBadAnswers) return;
  bad_in_a_row_ = 0;
  leave(fmt::format("{} bad answers in a row, the last: {}", kMostBadAnswers, reason), now);
}

void Member::broke(const std::string& reason, double now) { rediscover(reason, now); }

void Member::forgot_weights(const std::string& reason, double now) { rediscover(reason, now); }

std::optional<int64_t> Member::begin_last_resume() {
  if (!paused_ || dialect_ == nullptr) return std::nullopt;
  stop_call();
  begin(Step::resume, dialect_->resume(), 1.0);
  return call_;
}

}  // namespace leeway
