#include "server/calls.h"

#include <fmt/format.h>

#include <utility>

#include "leeway/error.h"
#include "server/api_error.h"
#include "server/token_tail.h"

namespace leeway {

std::string event_text(std::string_view json) { return fmt::format("data: {}\n\n", json); }

void Calls::start(Call call) {
  if (call.exchange->gone()) return;  // while its prompts were scored
  if (static_cast<int64_t>(open_.size()) >= most_) {
    throw ApiError(429, fmt::format("{} requests are being answered, which is the most: try again "
                                    "later",
                                    most_));
  }
  for (size_t i = 0; i < call.requests.size(); ++i) {
    try {
      engine_.engine().check(call.requests[i]);
    } catch (const Error& error) {
      throw ApiError(400, call.requests.size() == 1
                              ? error.what()
                              : fmt::format("prompt {}: {}", i, error.what()));
    }
  }
  if (call.streams) {
    call.exchange->begin_stream("text/event-stream");
    call.exchange->send(call.writer->opening());
  }
  const int64_t number = next_call_++;
  const int64_t first_job = next_job_;
  const size_t samples = static_cast<size_t>(call.requests.front().samples);
  std::vector<EngineJob> jobs;
  for (Request& request : call.requests) {
    prompt_tokens_ += request.prompt.size();
    call_of_.emplace(next_job_, number);
    jobs.push_back({next_job_++, std::move(request), call.streams, call.stop_texts});
  }
  Open open;
  open.first_job = first_job;
  open.choices.resize(jobs.size() * samples);
  call.exchange->on_gone([this, number] {
    const auto found = open_.find(number);
    if (found != open_.end()) cancel(found->second);
  });
  open.call = std::move(call);
  open_.emplace(number, std::move(open));
  for (EngineJob& job : jobs) engine_.submit(std::move(job));
}

// Where the engine is faster than the clients are served, a sample has several updates: they become
// one piece of its stream.
void Calls::take(std::vector<EngineUpdate> updates) {
  std::map<std::pair<int64_t, int64_t>, size_t> places;  // job, sample: of those before
  std::vector<EngineUpdate> merged;
  merged.reserve(updates.size());
  for (EngineUpdate& update : updates) {
    const auto [place, fresh] =
        places.try_emplace({update.job, update.sequence.sample}, merged.size());
    if (fresh) {
      merged.push_back(std::move(update));
    } else if (update.ended) {
      merged[place->second] = std::move(update);  // it has all tokens
    } else {
      append_tokens(merged[place->second].sequence, update.sequence);
    }
  }
  for (EngineUpdate& update : merged) take(update);
}

void Calls::take(EngineUpdate& update) {
  const auto job = call_of_.find(update.job);
  if (job == call_of_.end()) return;
  const int64_t number = job->second;
  Open& open = open_.at(number);
  const size_t samples = open.choices.size() / open.call.requests.size();
  const size_t choice = static_cast<size_t>(update.job - open.first_job) * samples +
                        static_cast<size_t>(update.sequence.sample);
  if (!update.ended) return send(open, open.call.writer->piece(choice, update.sequence));
  sampled_tokens_ += update.sequence.ids.size();
  ++finished_[static_cast<size_t>(update.sequence.finish)];
  open.choices[choice] = std::move(update.sequence);
  if (open.call.streams && open.choices[choice].finish != Finish::failed) {
    send(open, open.call.writer->ending(choice, open.choices[choice]));
  }
  if (++open.ended == open.choices.size()) finish(number, open);
}

void Calls::send(Open& open, const std::string& bytes) {
  if (open.broken || bytes.empty()) return;
  if (open.call.exchange->send(bytes)) return;
  open.broken = true;
  cancel(open);
}

void Calls::finish(int64_t number, Open& open) {
  const Call& call = open.call;
  std::string failure;
  for (const SampledSequence& choice : open.choices) {
    if (choice.finish == Finish::failed && failure.empty()) failure = choice.failure;
  }
  if (call.streams) {
    send(open, failure.empty() ? call.writer->closing(open.choices)
                               : event_text(error_json(500, failure)));
    call.exchange->end_stream();
  } else if (!failure.empty()) {
    call.exchange->respond({.status = 500, .body = error_json(500, failure)});
  } else if (!call.exchange->gone()) {
    call.exchange->respond({.body = call.writer->whole(open.choices)});
  }
  for (size_t i = 0; i < call.requests.size(); ++i) {
    call_of_.erase(open.first_job + static_cast<int64_t>(i));
  }
  open_.erase(number);
}

void Calls::cancel(const Open& open) {
  for (size_t i = 0; i < open.call.requests.size(); ++i) {
    engine_.cancel(open.first_job + static_cast<int64_t>(i));
  }
}

size_t Calls::abort(const std::string& request_id) {
  size_t count = 0;
  for (const auto& [number, open] : open_) {
    if (open.call.request_id != request_id) continue;
    cancel(open);
    ++count;
  }
  return count;
}

}  // namespace leeway
