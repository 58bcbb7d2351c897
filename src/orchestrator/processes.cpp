#include "orchestrator/processes.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/random.h>
#include <sys/wait.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <thread>
#include <utility>

#include "leeway/error.h"

namespace leeway {
namespace {

using std::chrono::milliseconds;
using Kind = JsonValue::Kind;

constexpr const char* kGreeting = "{\"type\": \"hello\", \"protocol\": 1, \"protocols\": [1, 2]}";

constexpr auto kLastGrace = milliseconds(1000);    // grace period after closing its input
constexpr auto kStatusGrace = milliseconds(200);   // between end of output and exit
constexpr auto kFirstBackoff = milliseconds(100);  // after a process that answered nothing
constexpr auto kLongestBackoff = milliseconds(5000);
constexpr int kReadsAtOnce = 32;  // so that endless output of one program does not block the others
constexpr int kStartsInVain = 3;  // before a program is considered unable to start

}  // namespace

uint64_t unguessable_id() {
  uint64_t bits = 0;
  while (bits == 0) {
    if (::getrandom(&bits, sizeof bits, 0) != static_cast<ssize_t>(sizeof bits)) bits = 0;
    bits >>= 11;
  }
  return bits;
}

Processes::Processes(ProcessPoolSettings settings, std::vector<int> protocols)
    : settings_(std::move(settings)),
      protocols_(std::move(protocols)),
      timeout_(settings_.turn_timeout),
      log_(std::make_unique<std::deque<std::string>>()),
      slots_(static_cast<size_t>(settings_.processes)) {
  LEEWAY_CHECK(settings_.processes > 0, "a pool has processes");
}

Processes::~Processes() {
  std::vector<ChildProcess*> left;
  for (const Slot& slot : slots_) {
    if (!slot.child) continue;
    slot.child->close_input();
    left.push_back(slot.child.get());
  }
  const Time deadline = std::chrono::steady_clock::now() + kLastGrace;
  while (!left.empty() && std::chrono::steady_clock::now() < deadline) {
    std::erase_if(left, [](ChildProcess* child) {
      // Drain its output, so that a full pipe does not block it.
      for (int i = 0; i < kReadsAtOnce && child->receive(); ++i) {
        while (child->next_line()) {
        }
      }
      return child->exited() && child->end();
    });
    if (!left.empty()) std::this_thread::sleep_for(milliseconds(1));
  }
  for (ChildProcess* child : left) {
    if (!child->end()) dying_.push_back(child->keeper_pid());
  }
  for (const pid_t pid : dying_) {
    while (::waitpid(pid, nullptr, 0) < 0 && errno == EINTR) {
    }
  }
}

std::vector<std::string> Processes::take_log() {
  std::vector<std::string> lines(log_->begin(), log_->end());
  log_->clear();
  return lines;
}

void Processes::reap() {
  std::erase_if(dying_, [](pid_t pid) { return ::waitpid(pid, nullptr, WNOHANG) != 0; });
}

std::string Processes::greet() {
  Slot& slot = slots_.front();
  for (int starts = 0;;) {
    const Time now = std::chrono::steady_clock::now();
    if (slot.state == Slot::State::ready) return "";
    if (slot.state == Slot::State::empty) {
      const bool again = refusal_.empty() && !greeting_late_ && starts < kStartsInVain;
      if (starts > 0 && !again) return last_failure_.message;
      if (may_start(slot, now)) {
        ++starts;
        start(slot, now);
      }
    } else {
      serve(slot, "before it said hello", now, nullptr);
    }
    reap();
    std::this_thread::sleep_for(milliseconds(1));
  }
}

bool Processes::may_start(const Slot& slot, Time now) const {
  return slot.state == Slot::State::empty && now >= slot.not_before;
}

std::optional<Processes::Loss> Processes::start(Slot& slot, Time now) {
  slot.output_end.reset();
  slot.answered = false;
  slot.number = ++started_;
  try {
    if (!keeper_.open()) keeper_ = make_keeper_file();
    slot.child = std::make_unique<ChildProcess>(settings_.command, settings_.command_key,
                                                settings_.limits, keeper_, *log_);
  } catch (const Error& error) {
    return lose(slot, FailureKind::environment_error, error.what(), now);
  }
  slot.state = Slot::State::greeting;
  slot.since = slot.heard = now;
  slot.child->send(kGreeting);
  return std::nullopt;
}

std::optional<Processes::Loss> Processes::serve(Slot& slot, const char* when, Time now,
                                                const TakeLine& take) {
  ChildProcess& child = *slot.child;
  const uint64_t number = slot.number;
  const bool exited = child.exited();  // checked before reading, so that no output is missed
  child.flush();
  // Lines that came together with the hello are there before anything is received.
  for (int i = 0; i == 0 || (i <= kReadsAtOnce && child.receive()); ++i) {
    if (std::optional<Loss> loss = take_lines(slot, now, take)) return loss;
    if (!slot.child || slot.number != number) return std::nullopt;  // `take` has replaced it
    if (slot.state == Slot::State::ready && !take) return std::nullopt;
  }
  if (!child.output_open() && !slot.output_end) slot.output_end = now;
  const bool greeting = slot.state == Slot::State::greeting;
  if (greeting) when = "before it said hello";
  if (exited) {
    child.end();
    return lose(
        slot, FailureKind::environment_error,
        fmt::format("process {} {} {}{}", child.pid(), child.end_text(), when, child.last_words()),
        now);
  }
  if (slot.output_end && now - *slot.output_end > kStatusGrace) {
    return lose(
        slot, FailureKind::environment_error,
        fmt::format("process {} closed its output {}{}", child.pid(), when, child.last_words()),
        now);
  }
  if (greeting && now - slot.since > timeout_) {
    greeting_late_ = true;
    return lose(
        slot, FailureKind::timeout,
        fmt::format("{}: process {} gave no hello within {} s and was killed{}",
                    settings_.timeout_key, child.pid(), settings_.turn_timeout, child.last_words()),
        now);
  }
  return std::nullopt;
}

std::optional<Processes::Loss> Processes::take_lines(Slot& slot, Time now, const TakeLine& take) {
  const auto most = static_cast<size_t>(settings_.max_output_bytes);
  const auto too_long = [&](std::string_view line) -> std::optional<Loss> {
    if (line.size() <= most) return std::nullopt;
    return lose(slot, FailureKind::bad_answer,
                fmt::format("{}: process {} wrote a line of more than {} bytes: {}",
                            settings_.output_key, slot.child->pid(), most, in_quotes(line)),
                now);
  };
  const uint64_t number = slot.number;
  const auto leave = [&] { return slot.state == Slot::State::ready && !take; };
  for (std::optional<std::string> line; !leave() && (line = slot.child->next_line());) {
    if (std::optional<Loss> loss = too_long(*line)) return loss;
    if (line->find_first_not_of(" \t\r") == std::string::npos) continue;
    slot.heard = now;
    try {
      if (slot.state == Slot::State::greeting) {
        if (const std::optional<Loss> refused = take_greeting(slot, *line)) {
          return lose(slot, refused->kind, refused->message, now);
        }
      } else {
        take(*line);
      }
    } catch (const Error& error) {
      return lose(slot, FailureKind::bad_answer,
                  fmt::format("process {} wrote {}: {}{}", slot.child->pid(), in_quotes(*line),
                              error.what(), slot.child->last_words()),
                  now);
    }
    if (!slot.child || slot.number != number) return std::nullopt;
  }
  return too_long(slot.child->unfinished_line());
}

std::optional<Processes::Loss> Processes::take_greeting(Slot& slot, std::string_view line) {
  JsonValue hello = read_json("JSON", line);
  const JsonValue* type = hello.find("type");
  const JsonValue* protocol = hello.find("protocol");
  if (type == nullptr || type->text != "hello" || protocol == nullptr ||
      !protocol->is(Kind::number)) {
    throw Error(
        fmt::format("its first line must be {{\"type\": \"hello\", \"protocol\": N}}, with N = {}",
                    fmt::join(protocols_, " or ")));
  }
  const double version = std::strtod(protocol->text.c_str(), nullptr);
  const auto known = std::find(protocols_.begin(), protocols_.end(), version);
  if (known == protocols_.end()) {
    refusal_ = fmt::format(
        "the program of {} speaks protocol {}, and this version of Leeway protocol {}{}",
        settings_.command_key, in_quotes(protocol->text), fmt::join(protocols_, " or "),
        protocol_ != 0 ? ", which its first process has chosen" : "");
    return Loss{FailureKind::bad_answer, refusal_};
  }
  if (protocol_ == 0) {
    protocol_ = *known;
    protocols_ = {protocol_};
    hello_ = std::move(hello);
  }
  slot.state = Slot::State::ready;
  return std::nullopt;
}

Processes::Loss Processes::lose(Slot& slot, FailureKind kind, const std::string& message,
                                Time now) {
  Loss loss{kind, message};
  replace(slot, loss, now);
  return loss;
}

void Processes::replace(Slot& slot, const Loss& loss, Time now) {
  last_failure_ = loss;
  if (slot.child && !slot.child->end()) dying_.push_back(slot.child->keeper_pid());
  slot.child.reset();
  slot.state = Slot::State::empty;
  slot.not_before = now;
  if (slot.answered) return;
  const int doublings = std::min(slot.starts_in_vain++, 16);
  slot.not_before += std::min<milliseconds>(kFirstBackoff * (1 << doublings), kLongestBackoff);
}

}  // namespace leeway
