#include "engine/scheduler.h"

#include <algorithm>
#include <utility>

#include "leeway/error.h"

namespace leeway {
namespace {

int64_t prompt_length(const ScheduledRequest& request) {
  return static_cast<int64_t>(request.request.prompt.size());
}

// Positions whose tokens are known but whose keys and values are not computed yet: the prompt's
// until it is done, then the sample's own.
int64_t pending(const ScheduledRequest& request, const ScheduledSample& sample) {
  const int64_t own =
      request.prompt_done ? static_cast<int64_t>(sample.result.ids.size()) : int64_t{0};
  return prompt_length(request) + own - sample.stored;
}

SampledSequence begun_sample(int64_t request, int64_t sample) {
  SampledSequence result;
  result.request = request;
  result.sample = sample;
  return result;
}

// Enough for most samples without growing.
constexpr int64_t kUsualTokens = 256;

}  // namespace

Scheduler::Scheduler(int64_t blocks, int64_t max_sequences, int64_t max_rows)
    : pool_(blocks), max_sequences_(max_sequences), max_rows_(max_rows) {}

void Scheduler::enqueue(int64_t id, Request request) {
  LEEWAY_CHECK(request.samples <= max_sequences_ &&
                   block_need(request).of(request.samples) <= pool_.blocks(),
               "a request that never fits would block the queue");
  queued_ += request.samples;
  queue_.push_back({id, std::move(request)});
}

void Scheduler::cancel(int64_t id, std::vector<SampledSequence>& ended) {
  for (const auto& request : requests_) {
    if (request->id == id) end_request(*request, ended);
  }
  sweep();
  const auto waiting =
      std::find_if(queue_.begin(), queue_.end(), [&](const Waiting& w) { return w.id == id; });
  if (waiting == queue_.end()) return;
  for (int64_t i = 0; i < waiting->request.samples; ++i) {
    ended.push_back(begun_sample(id, i));
    ended.back().finish = Finish::cancelled;
  }
  queued_ -= waiting->request.samples;
  queue_.erase(waiting);
}

const ScheduledSample* Scheduler::find_running(int64_t id, int64_t sample) const {
  for (const auto& request : requests_) {
    if (request->id != id || sample < 0 || sample >= request->request.samples) continue;
    const ScheduledSample& found = request->samples[static_cast<size_t>(sample)];
    return found.live ? &found : nullptr;
  }
  return nullptr;
}

bool Scheduler::cancel_sample(int64_t id, int64_t sample, std::vector<SampledSequence>& ended) {
  if (find_running(id, sample) == nullptr) return false;
  const auto request =
      std::find_if(requests_.begin(), requests_.end(), [&](const auto& r) { return r->id == id; });
  end_sample(**request, (*request)->samples[static_cast<size_t>(sample)], Finish::cancelled, ended);
  // Another sample computes the rest of the prompt, from its beginning.
  if (!(*request)->prompt_done) choose_leader(**request);
  sweep();
  return true;
}

// The first sample that lives.
void Scheduler::choose_leader(ScheduledRequest& request) {
  const auto first = std::find_if(request.samples.begin(), request.samples.end(),
                                  [](const ScheduledSample& sample) { return sample.live; });
  request.leader = static_cast<size_t>(first - request.samples.begin());
}

void Scheduler::restart() {
  for (const auto& request : requests_) {
    request->prompt_done = false;
    for (ScheduledSample& sample : request->samples) sample.stored = 0;
    choose_leader(*request);
  }
}

void Scheduler::admit() {
  while (!queue_.empty()) {
    Waiting& next = queue_.front();
    const int64_t samples = next.request.samples;
    const BlockNeed need = block_need(next.request);
    if (running_ + samples > max_sequences_ || need.of(samples) > pool_.free()) return;

    auto admitted = std::make_unique<ScheduledRequest>();
    admitted->id = next.id;
    admitted->samples.resize(static_cast<size_t>(samples));
    admitted->live = samples;
    for (int64_t i = 0; i < samples; ++i) {
      ScheduledSample& sample = admitted->samples[i];
      sample.rng = sample_stream(next.request.seed, i);
      sample.result = begun_sample(next.id, i);
      const int64_t room = std::min(next.request.max_new_tokens, kUsualTokens);
      sample.result.ids.reserve(room);
      sample.result.raw_logprobs.reserve(room);
      sample.result.processed_logprobs.reserve(room);
      sample.result.versions.reserve(room);
      sample.blocks.reserve(need.shared + need.own);
      for (int64_t b = 0; b < need.shared; ++b) {
        const int32_t block = i == 0 ? pool_.take() : admitted->samples[0].blocks[b];
        if (i > 0) pool_.share(block);
        sample.blocks.push_back(block);
      }
      for (int64_t b = 0; b < need.own; ++b) sample.blocks.push_back(pool_.take());
    }
    admitted->request = std::move(next.request);
    requests_.push_back(std::move(admitted));
    running_ += samples;
    queued_ -= samples;
    queue_.pop_front();
  }
}

void Scheduler::add_rows(ScheduledRequest& request, ScheduledSample& sample, int64_t rows) {
  const int64_t first_row = static_cast<int64_t>(pass_.tokens.size());
  pass_.sequences.push_back({first_row, rows, sample.stored, sample.blocks.data()});
  advances_.push_back({&request, &sample, rows});
  const int64_t prompt = prompt_length(request);
  for (int64_t position = sample.stored; position < sample.stored + rows; ++position) {
    pass_.tokens.push_back(position < prompt ? request.request.prompt[position]
                                             : sample.result.ids[position - prompt]);
  }
  // Logits are needed for the last known token; a recomputed prompt has been drawn from before.
  const bool starts = !request.prompt_done && sample.result.ids.empty();
  if (rows < pending(request, sample) || !(request.prompt_done || starts)) return;
  const int64_t logits = static_cast<int64_t>(pass_.logit_rows.size());
  pass_.logit_rows.push_back(static_cast<int32_t>(first_row + rows - 1));
  if (!starts) {
    pass_.draws.push_back({&request, &sample, logits});
    return;
  }
  for (ScheduledSample& each : request.samples) {
    if (each.live) pass_.draws.push_back({&request, &each, logits});
  }
}

const StepRows& Scheduler::plan() {
  pass_.tokens.clear();
  pass_.sequences.clear();
  pass_.logit_rows.clear();
  pass_.draws.clear();
  advances_.clear();
  int64_t left = max_rows_;
  for (const auto& request : requests_) {
    if (!request->prompt_done) continue;
    for (ScheduledSample& sample : request->samples) {
      if (left == 0) break;
      if (!sample.live || pending(*request, sample) != 1) continue;
      add_rows(*request, sample, 1);
      --left;
    }
  }
  pass_.decode_rows = max_rows_ - left;
  const auto add_chunk = [&](ScheduledRequest& request, ScheduledSample& sample) {
    const int64_t rows = std::min(left, pending(request, sample));
    if (rows > 0) add_rows(request, sample, rows);
    left -= rows;
  };
  for (const auto& request : requests_) {
    if (!request->prompt_done) {
      add_chunk(*request, request->samples[request->leader]);
      continue;
    }
    for (ScheduledSample& sample : request->samples) {
      if (sample.live && pending(*request, sample) > 1) add_chunk(*request, sample);
    }
  }
  pass_.prompt_rows = max_rows_ - left - pass_.decode_rows;
  return pass_;
}

void Scheduler::accept(const Draw& draw, const Drawn& drawn, PolicyVersion version,
                       std::vector<SampledSequence>& ended) {
  const SampledToken& token = drawn.token;
  const Request& request = draw.request->request;
  SampledSequence& result = draw.sample->result;
  result.ids.push_back(token.id);
  result.raw_logprobs.push_back(token.raw_logprob);
  result.processed_logprobs.push_back(token.processed_logprob);
  result.versions.push_back(version);
  if (request.top_logprobs > 0) {
    result.top.insert(result.top.end(), drawn.top.begin(), drawn.top.end());
  }
  if (std::find(request.stop_ids.begin(), request.stop_ids.end(), token.id) !=
      request.stop_ids.end()) {
    end_sample(*draw.request, *draw.sample, Finish::stop, ended);
  } else if (static_cast<int64_t>(result.ids.size()) == request.max_new_tokens) {
    end_sample(*draw.request, *draw.sample, Finish::length, ended);
  }
}

// The prompt is done: all samples continue from its end, each with its own last block.
void Scheduler::fork(ScheduledRequest& request) {
  const int64_t prompt = prompt_length(request);
  const ScheduledSample& leader = request.samples[request.leader];
  for (ScheduledSample& sample : request.samples) {
    if (!sample.live || &sample == &leader) continue;
    sample.stored = prompt;
    if (prompt % kBlockKeys == 0) continue;
    copies_.push_back({leader.blocks[prompt / kBlockKeys], sample.blocks[prompt / kBlockKeys]});
  }
}

std::span<const BlockCopy> Scheduler::commit(std::span<const Drawn> drawn, PolicyVersion version,
                                             std::vector<SampledSequence>& ended) {
  LEEWAY_CHECK(drawn.size() == pass_.draws.size(), "each draw must have a token");
  for (size_t i = 0; i < drawn.size(); ++i) {
    if (!drawn[i].failure.empty()) pass_.draws[i].request->failed = true;
  }
  for (size_t i = 0; i < drawn.size(); ++i) {
    if (!pass_.draws[i].request->failed) accept(pass_.draws[i], drawn[i], version, ended);
  }
  copies_.clear();
  for (const Advance& advance : advances_) {
    ScheduledRequest& request = *advance.request;
    if (request.failed) {
      end_request(request, ended);
      continue;
    }
    advance.sample->stored += advance.rows;
    if (!request.prompt_done && advance.sample->stored == prompt_length(request)) {
      request.prompt_done = true;
      fork(request);
    }
  }
  sweep();
  return copies_;
}

void Scheduler::end_sample(ScheduledRequest& request, ScheduledSample& sample, Finish finish,
                           std::vector<SampledSequence>& ended) {
  sample.result.finish = finish;
  ended.push_back(std::move(sample.result));
  sample.live = false;
  --request.live;
  --running_;
  to_sweep_ = true;
}

void Scheduler::end_request(ScheduledRequest& request, std::vector<SampledSequence>& ended) {
  for (ScheduledSample& sample : request.samples) {
    if (sample.live) end_sample(request, sample, Finish::cancelled, ended);
  }
}

// Releases what ended samples held.
void Scheduler::sweep() {
  if (!std::exchange(to_sweep_, false)) return;
  for (const auto& request : requests_) {
    for (ScheduledSample& sample : request->samples) {
      if (sample.live) continue;
      for (const int32_t block : sample.blocks) pool_.release(block);
      sample.blocks.clear();
    }
  }
  std::erase_if(requests_, [](const auto& request) { return request->live == 0; });
}

}  // namespace leeway
