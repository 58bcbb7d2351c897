#include "server/engine_thread.h"

#include <fmt/format.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <map>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "base/start_thread.h"
#include "generate/text_stream.h"
#include "leeway/error.h"
#include "server/token_tail.h"

namespace leeway {
namespace {

// What is known of one sample while it runs.
struct WatchedSample {
  size_t reported = 0;  // tokens
  size_t watched = 0;   // tokens that `text` has read
  std::optional<TextStream> text;
  bool stopped = false;  // by a stop text
  bool ended = false;
};

struct RunningJob {
  EngineJob job;
  bool cancelled = false;  // on demand
  std::vector<WatchedSample> samples;
};

}  // namespace

struct EngineThread::Impl {
  Engine engine;
  const Tokenizer* tokenizer;
  Report report;

  std::mutex mutex;  // of the three that follow
  std::condition_variable changed;
  std::vector<std::function<void()>> commands;
  bool stopping = false;

  // Of the engine's thread.
  std::deque<EngineJob> waiting;       // for a resume
  std::map<int64_t, RunningJob> jobs;  // by the engine's number
  std::map<int64_t, int64_t> numbers;  // by the caller's id
  bool paused = false;                 // new jobs wait
  bool held = false;                   // and no step runs
  std::vector<Done> after_last;        // of `wait`
  // What is told after the status that it leads to.
  std::vector<std::function<void()>> answers;
  EngineStatus status;
  std::vector<EngineUpdate> updates;

  std::thread thread;

  Impl(const PolicySnapshot& weights, const EngineOptions& options, const Tokenizer* text,
       Report on_report)
      : engine(weights, options), tokenizer(text), report(std::move(on_report)) {
    status.version = weights.version();
    status.blocks = status.free_blocks = engine.blocks();
  }

  void run();
  template <class Function>
  void guarded(const Function& function);
  void start(EngineJob job);
  void end_waiting(const EngineJob& job, Finish finish, const std::string& failure);
  void cancel(int64_t id);
  void cancel_all();
  void step();
  void watch();
  void end(SampledSequence sequence, const std::string& failure);
  void take_finished(const std::string& failure);
  void die(const std::string& failure);
  void publish();
  void tell(const Done& done, const std::string& failure) {
    answers.push_back([done, failure] { done(failure); });
  }
};

void EngineThread::Impl::run() {
  while (true) {
    std::vector<std::function<void()>> taken;
    {
      std::unique_lock lock(mutex);
      const auto has_work = [this] { return !held && !jobs.empty() && status.failure.empty(); };
      changed.wait(lock, [&] { return stopping || !commands.empty() || has_work(); });
      if (stopping) return;
      std::swap(taken, commands);
    }
    for (const auto& command : taken) guarded(command);
    guarded([this] {
      if (!held && !jobs.empty() && status.failure.empty()) step();
    });
    if (jobs.empty() && !after_last.empty()) {
      held = true;
      for (const Done& done : std::exchange(after_last, {})) tell(done, "");
    }
    publish();
    for (const auto& answer : std::exchange(answers, {})) answer();
  }
}

// Whatever is thrown ends the engine and not the program.
template <class Function>
void EngineThread::Impl::guarded(const Function& function) {
  try {
    function();
  } catch (const std::exception& error) {
    die(error.what());
  } catch (...) {
    die("an exception of an unknown kind");
  }
}

void EngineThread::Impl::start(EngineJob job) {
  if (!status.failure.empty()) return end_waiting(job, Finish::failed, status.failure);
  if (paused) return waiting.push_back(std::move(job));
  const int64_t number = engine.submit(job.request);
  numbers.emplace(job.id, number);
  RunningJob running;
  running.samples.resize(static_cast<size_t>(job.request.samples));
  if (!job.stop_texts.empty()) {
    for (WatchedSample& sample : running.samples) {
      sample.text.emplace(*tokenizer, job.stop_texts, false);
    }
  }
  running.job = std::move(job);
  jobs.emplace(number, std::move(running));
}

void EngineThread::Impl::end_waiting(const EngineJob& job, Finish finish,
                                     const std::string& failure) {
  for (int64_t sample = 0; sample < job.request.samples; ++sample) {
    EngineUpdate update;
    update.job = job.id;
    update.ended = true;
    update.sequence.sample = sample;
    update.sequence.finish = finish;
    update.sequence.failure = failure;
    updates.push_back(std::move(update));
  }
}

void EngineThread::Impl::cancel(int64_t id) {
  if (const auto found = numbers.find(id); found != numbers.end()) {
    jobs.at(found->second).cancelled = true;
    engine.cancel(found->second);
    engine.take_pending();
    return take_finished("");
  }
  for (auto job = waiting.begin(); job != waiting.end(); ++job) {
    if (job->id != id) continue;
    end_waiting(*job, Finish::cancelled, "");
    waiting.erase(job);
    return;
  }
}

void EngineThread::Impl::cancel_all() {
  for (const EngineJob& job : std::exchange(waiting, {})) end_waiting(job, Finish::cancelled, "");
  for (auto& [number, running] : jobs) {
    running.cancelled = true;
    engine.cancel(number);
  }
  engine.take_pending();
  take_finished("");
}

void EngineThread::Impl::step() {
  const auto begin = std::chrono::steady_clock::now();
  try {
    const StepReport step_report = engine.step();
    status.running = step_report.running;
    status.queued = step_report.queued;
    status.free_blocks = step_report.free_blocks;
    status.prompt_tokens += static_cast<uint64_t>(step_report.prompt_rows);
    status.sampled_tokens += static_cast<uint64_t>(step_report.sampled);
    ++status.steps;
    take_finished("");
  } catch (const Error& error) {
    // The engine has removed the request at fault; if there is none, it cannot go on.
    const size_t before = updates.size();
    take_finished(error.what());
    if (updates.size() == before) return die(error.what());
  }
  watch();
  status.step_seconds +=
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// Reads the new tokens of jobs that stream or that a stop text may end.
void EngineThread::Impl::watch() {
  bool stopped = false;
  for (auto& [number, running] : jobs) {
    if (!running.job.streams && running.job.stop_texts.empty()) continue;
    for (size_t i = 0; i < running.samples.size(); ++i) {
      WatchedSample& sample = running.samples[i];
      if (sample.ended) continue;
      const SampledSequence* now = engine.running(number, static_cast<int64_t>(i));
      if (now == nullptr) continue;
      for (; sample.text && sample.watched < now->ids.size(); ++sample.watched) {
        sample.text->push(now->ids[sample.watched]);
        if (!sample.text->stopped()) continue;
        sample.stopped = stopped = true;
        break;
      }
      if (running.job.streams && !sample.stopped && sample.reported < now->ids.size()) {
        updates.push_back({running.job.id, tokens_from(*now, sample.reported), false});
        sample.reported = now->ids.size();
      }
      if (sample.stopped) engine.cancel_sample(number, static_cast<int64_t>(i));
    }
  }
  if (stopped) take_finished("");
}

void EngineThread::Impl::take_finished(const std::string& failure) {
  for (SampledSequence& sequence : engine.take_finished()) end(std::move(sequence), failure);
}

void EngineThread::Impl::end(SampledSequence sequence, const std::string& failure) {
  const auto found = jobs.find(sequence.request);
  if (found == jobs.end()) return;
  RunningJob& running = found->second;
  WatchedSample& sample = running.samples[static_cast<size_t>(sequence.sample)];
  sample.ended = true;
  // A stop text that the very last token completes ends it by that as well.
  if (sample.text && !sample.stopped && sequence.finish == Finish::length) {
    for (; sample.watched < sequence.ids.size(); ++sample.watched) {
      sample.text->push(sequence.ids[sample.watched]);
    }
    sample.stopped = sample.text->stopped();
  }
  if (sample.stopped) {
    sequence.finish = Finish::stop;
  } else if (sequence.finish == Finish::cancelled && !running.cancelled) {
    sequence.finish = Finish::failed;
    sequence.failure = failure.empty() ? "the engine ended the request" : failure;
  }
  EngineUpdate update;
  update.job = running.job.id;
  update.ended = true;
  update.sequence = std::move(sequence);
  updates.push_back(std::move(update));
  for (const WatchedSample& other : running.samples) {
    if (!other.ended) return;
  }
  numbers.erase(running.job.id);
  jobs.erase(found);
}

void EngineThread::Impl::die(const std::string& failure) {
  if (!status.failure.empty()) return;
  status.failure = failure;
  for (const EngineJob& job : std::exchange(waiting, {})) {
    end_waiting(job, Finish::failed, failure);
  }
  for (const auto& [number, running] : jobs) {
    for (size_t i = 0; i < running.samples.size(); ++i) {
      if (running.samples[i].ended) continue;
      EngineUpdate update;
      update.job = running.job.id;
      update.ended = true;
      update.sequence.sample = static_cast<int64_t>(i);
      update.sequence.finish = Finish::failed;
      update.sequence.failure = failure;
      updates.push_back(std::move(update));
    }
  }
  jobs.clear();
  numbers.clear();
}

void EngineThread::Impl::publish() {
  status.paused = paused;
  if (jobs.empty()) status.running = status.queued = 0, status.free_blocks = status.blocks;
  EngineStatus seen = status;
  for (const EngineJob& job : waiting) seen.queued += job.request.samples;
  report(std::exchange(updates, {}), seen);
}

EngineThread::EngineThread(std::shared_ptr<const PolicySnapshot> weights,
                           const EngineOptions& options, const Tokenizer* tokenizer, Report report)
    : impl_(std::make_unique<Impl>(*weights, options, tokenizer, std::move(report))) {
  impl_->thread = start_thread([this] { impl_->run(); });
}

EngineThread::~EngineThread() {
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->stopping = true;
  }
  impl_->changed.notify_one();
  impl_->thread.join();
}

void EngineThread::post(std::function<void()> function) {
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->commands.push_back(std::move(function));
  }
  impl_->changed.notify_one();
}

void EngineThread::submit(EngineJob job) {
  impl_->engine.check(job.request);
  LEEWAY_CHECK(job.stop_texts.empty() || impl_->tokenizer != nullptr,
               "stop texts need a tokenizer");
  auto shared = std::make_shared<EngineJob>(std::move(job));
  post([this, shared] { impl_->start(std::move(*shared)); });
}

void EngineThread::cancel(int64_t job) {
  post([this, job] { impl_->cancel(job); });
}

void EngineThread::cancel_all() {
  post([this] { impl_->cancel_all(); });
}

void EngineThread::pause(PauseMode mode, Done done) {
  post([this, mode, done = std::move(done)] {
    impl_->paused = true;
    if (mode == PauseMode::wait && !impl_->jobs.empty() && !impl_->held) {
      impl_->after_last.push_back(done);
      return;
    }
    if (mode == PauseMode::abort) impl_->cancel_all();
    if (mode == PauseMode::recompute) impl_->engine.recompute();
    impl_->held = true;
    for (const Done& earlier : std::exchange(impl_->after_last, {})) impl_->tell(earlier, "");
    impl_->tell(done, "");
  });
}

void EngineThread::resume(Done done) {
  post([this, done = std::move(done)] {
    impl_->paused = impl_->held = false;
    for (const Done& earlier : std::exchange(impl_->after_last, {})) impl_->tell(earlier, "");
    for (EngineJob& job : std::exchange(impl_->waiting, {})) impl_->start(std::move(job));
    impl_->tell(done, "");
  });
}

void EngineThread::update_weights(std::shared_ptr<const PolicySnapshot> weights, Done done) {
  post([this, weights = std::move(weights), done = std::move(done)] {
    if (!impl_->status.failure.empty()) return impl_->tell(done, impl_->status.failure);
    try {
      impl_->engine.update_weights(weights);
    } catch (const Error& error) {
      return impl_->tell(done, error.what());
    }
    try {
      impl_->engine.take_pending();
    } catch (const std::exception& error) {
      impl_->die(error.what());
      return impl_->tell(done, error.what());
    }
    impl_->status.version = weights->version();
    impl_->take_finished("");
    impl_->tell(done, "");
  });
}

const Engine& EngineThread::engine() const { return impl_->engine; }

}  // namespace leeway
