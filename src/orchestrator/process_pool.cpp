#include "orchestrator/process_pool.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "leeway/error.h"

namespace leeway {
namespace {

using Kind = JsonValue::Kind;
using State = Processes::Slot::State;

// Many rollouts poll in turn: one check of the processes serves them all.
constexpr auto kPumpSlice = std::chrono::microseconds(200);

}  // namespace

// An answer that was not asked for.
struct ProcessPool::Unasked : Error {
  using Error::Error;
};

ProcessPool::ProcessPool(ProcessPoolSettings settings, ReadAnswer read_answer)
    : ProcessPool(Processes(std::move(settings), {1}), std::move(read_answer)) {}

ProcessPool::ProcessPool(Processes processes, ReadAnswer read_answer)
    : processes_(std::move(processes)),
      timeout_(processes_.settings().turn_timeout),
      read_answer_(std::move(read_answer)),
      works_(processes_.count()) {}

ProcessPool::~ProcessPool() = default;

std::vector<std::string> ProcessPool::take_log() {
  const std::lock_guard lock(mutex_);
  return processes_.take_log();
}

int64_t ProcessPool::take_unasked_answers() {
  const std::lock_guard lock(mutex_);
  return std::exchange(unasked_answers_, 0);
}

std::string ProcessPool::greet() {
  const std::lock_guard lock(mutex_);
  return processes_.greet();
}

uint64_t ProcessPool::submit(const std::string& members) {
  LEEWAY_CHECK(members.find('\n') == std::string::npos, "a request is one line");
  const std::lock_guard lock(mutex_);
  const Time now = std::chrono::steady_clock::now();
  pump_if_due(now);
  const uint64_t number = ++last_request_;
  Request& request = requests_[number];
  if (!processes_.refusal().empty()) {
    fail(number, FailureKind::bad_answer, processes_.refusal());
    return number;
  }
  request.id = unguessable_id();
  request.line = fmt::format("{{\"type\": \"{}\", \"id\": {}, {}}}",
                             processes_.settings().request_type, request.id, members);
  request.submitted = now;
  queue_.push_back(number);
  hand_out(now);
  return number;
}

Turn ProcessPool::poll(uint64_t request) {
  const std::lock_guard lock(mutex_);
  pump_if_due(std::chrono::steady_clock::now());
  const auto found = requests_.find(request);
  LEEWAY_CHECK(found != requests_.end(), "a request is polled until it has a result");
  if (!found->second.done) return {.kind = Turn::Kind::pending};
  Turn result = std::move(found->second.result);
  requests_.erase(found);
  return result;
}

void ProcessPool::withdraw(uint64_t request) {
  const std::lock_guard lock(mutex_);
  requests_.erase(request);
}

void ProcessPool::pump_if_due(Time now) {
  if (now - last_pump_ >= kPumpSlice) pump(now);
}

void ProcessPool::pump(Time now) {
  // The pool works only while its caller polls. After a long gap between two polls, waiting
  // requests are given their time again: no process could take them meanwhile.
  const bool unwatched = now - last_pump_ > timeout_ / 4;
  if (unwatched) last_answer_ = now;
  for (size_t i = 0; i < processes_.count(); ++i) {
    if (processes_.slot(i).child) serve(i, now);
  }
  processes_.reap();
  hand_out(now);
  expire_queue(now);
  // After the work: the time that endless output takes is no gap.
  last_pump_ = std::chrono::steady_clock::now();
}

void ProcessPool::serve(size_t place, Time now) {
  Slot& slot = processes_.slot(place);
  Work& work = works_[place];
  const char* when = work.id != 0 ? "before it answered" : "while nothing was asked of it";
  std::optional<Processes::Loss> loss = processes_.serve(
      slot, when, now, [&](std::string_view line) { take_line(place, line, now); });
  const bool late = !loss && work.id != 0 && now - work.since > timeout_;
  if (late) {
    loss = {FailureKind::timeout,
            fmt::format("{}: process {} gave no answer within {} s and was killed{}",
                        processes_.settings().timeout_key, slot.child->pid(),
                        processes_.settings().turn_timeout, slot.child->last_words())};
    processes_.replace(slot, *loss, now);
  }
  if (loss) {
    lose(place, *loss);
  } else if (slot.state == State::ready && work.id == 0 && work.request != 0) {
    send(place, now);
  }
}

Turn ProcessPool::read_answer(const JsonValue& answer) const {
  try {
    return read_answer_(answer);
  } catch (const Error& error) {
    const JsonValue* type = answer.find("type");
    if (type == nullptr || type->text != processes_.settings().request_type) throw;
    throw Error(fmt::format("it repeats what it is sent instead of answering: {}", error.what()));
  }
}

void ProcessPool::take_line(size_t place, std::string_view line, Time now) {
  Slot& slot = processes_.slot(place);
  Work& work = works_[place];
  const bool busy = work.id != 0;
  try {
    const JsonValue answer = read_json("JSON", line);
    if (!answer.is(Kind::object)) {
      throw Error(fmt::format("an answer is an object, not {}", name_of(answer.kind)));
    }
    const JsonValue* id = answer.find("id");
    const bool numbered = id != nullptr && id->is(Kind::number);
    const double given = numbered ? std::strtod(id->text.c_str(), nullptr) : 0.0;
    if (!busy || given != static_cast<double>(work.id)) {
      const bool again = given != 0.0 && given == static_cast<double>(work.last_id);
      if (again) throw Unasked("a second answer to a turn");
      if (!busy) throw Unasked("an answer before its turn: nothing was asked");
      if (numbered) throw Unasked(fmt::format("its id must be the turn's, {}", work.id));
      throw Error(fmt::format("the answer's id must be the turn's, {}", work.id));
    }
    finish(work.request, read_answer(answer));
  } catch (const Error& error) {
    if (dynamic_cast<const Unasked*>(&error) != nullptr || !busy) {
      ++unasked_answers_;
      slot.child->note(fmt::format("unasked answer: {}: {}; the process is replaced",
                                   in_quotes(line), error.what()));
    }
    throw;
  }
  work.request = 0;
  work.last_id = std::exchange(work.id, 0);
  processes_.note_answer(slot);
  last_answer_ = now;
}

// The process has been given up.
void ProcessPool::lose(size_t place, const Processes::Loss& loss) {
  fail(works_[place].request, loss.kind, loss.message);
  works_[place] = {};
  if (processes_.refusal().empty()) return;
  for (uint64_t number; (number = next_in_queue()) != 0; queue_.pop_front()) {
    fail(number, FailureKind::bad_answer, processes_.refusal());
  }
}

void ProcessPool::send(size_t place, Time now) {
  Work& work = works_[place];
  const auto found = requests_.find(work.request);
  if (found == requests_.end()) {  // withdrawn meanwhile
    work.request = 0;
    return;
  }
  processes_.slot(place).child->send(found->second.line);
  work.id = found->second.id;
  work.since = now;
  found->second.line.clear();
}

// The next request that is still wanted, or 0. It stays in the queue.
uint64_t ProcessPool::next_in_queue() {
  while (!queue_.empty() && !requests_.contains(queue_.front())) queue_.pop_front();
  return queue_.empty() ? 0 : queue_.front();
}

void ProcessPool::hand_out(Time now) {
  const auto take = [&](size_t place) {
    works_[place].request = next_in_queue();
    if (works_[place].request != 0) queue_.pop_front();
    return works_[place].request != 0;
  };
  for (size_t i = 0; i < processes_.count(); ++i) {
    const Slot& slot = processes_.slot(i);
    const bool idle = slot.state == State::ready && works_[i].request == 0 && !slot.output_end;
    if (idle && take(i)) send(i, now);
  }
  for (size_t i = 0; i < processes_.count(); ++i) {
    if (!processes_.may_start(processes_.slot(i), now) || !take(i)) continue;
    if (const auto loss = processes_.start(processes_.slot(i), now)) lose(i, *loss);
  }
}

void ProcessPool::expire_queue(Time now) {
  for (uint64_t number; (number = next_in_queue()) != 0;) {
    if (now - std::max(requests_.at(number).submitted, last_answer_) <= timeout_) return;
    queue_.pop_front();
    const Processes::Loss& last = processes_.last_failure();
    const bool failed = !last.message.empty();
    fail(number, failed ? last.kind : FailureKind::timeout,
         fmt::format("{}: no process took the {} for {} s{}", processes_.settings().timeout_key,
                     processes_.settings().request_type, processes_.settings().turn_timeout,
                     failed ? "; the last one that failed: " + last.message : ""));
  }
}

// Does nothing for a withdrawn request.
void ProcessPool::finish(uint64_t request, Turn result) {
  const auto found = requests_.find(request);
  if (found == requests_.end()) return;
  found->second.done = true;
  found->second.result = std::move(result);
}

void ProcessPool::fail(uint64_t request, FailureKind kind, const std::string& message) {
  finish(request, {.kind = Turn::Kind::failed, .failure = message, .failure_kind = kind});
}

}  // namespace leeway
