#include "run/sampling_worker.h"

#include <fmt/format.h>

#include <exception>
#include <utility>

#include "base/start_thread.h"

namespace leeway {

SamplingWorker::SamplingWorker(Ranks& ranks, const Parameters& like, SamplingWorkerOptions options)
    : ranks_(ranks), like_(like), options_(std::move(options)) {
  worker_ = start_thread([this] { serve(); });
  try {
    receiver_ = start_thread([this] { receive(); });
  } catch (const Error&) {
    {
      const std::lock_guard lock(mutex_);
      over_ = true;
    }
    changed_.notify_all();
    worker_.join();
    throw;
  }
}

SamplingWorker::~SamplingWorker() {
  receiver_.join();
  worker_.join();
}

void SamplingWorker::receive() {
  const std::string leave = message_of(SamplingOrder::leave);
  bool over = false;
  while (!over) {
    std::string message;
    try {
      message = ranks_.receive(0, Channel::sampling);
      over = message == leave;
    } catch (const Error&) {  // lost: whoever trains on this rank is told the same
      over = true;
    }
    {
      const std::lock_guard lock(mutex_);
      if (!over) messages_.push_back(std::move(message));
      over_ = over;
    }
    changed_.notify_all();
  }
}

// False when it is over.
bool SamplingWorker::wait(std::vector<std::string>& messages) {
  const bool idle = !engine_ || engine_->idle();
  std::unique_lock lock(mutex_);
  if (idle) changed_.wait(lock, [&] { return over_ || !messages_.empty(); });
  messages = std::exchange(messages_, {});
  return !over_;
}

void SamplingWorker::serve() {
  std::vector<std::string> messages;
  try {
    while (wait(messages)) {
      for (const std::string& message : messages) obey(message);
      work();
    }
  } catch (const Lost&) {
  }
  engine_.reset();
}

void SamplingWorker::obey(const std::string& message) {
  static const std::string end = message_of(SamplingOrder::end);
  if (message == end) {
    engine_.reset();
    failed_ = false;
    return send(message_of(SamplingReport::ended));
  }
  if (failed_) return;
  attempt([&] {
    ByteReader reader(message);
    do {
      obey(reader.get_enum(SamplingOrder::leave), reader);
    } while (!reader.at_end());
  });
}

void SamplingWorker::obey(SamplingOrder order, ByteReader& from) {
  const bool begin = order == SamplingOrder::begin;
  if (begin == (engine_ != nullptr)) {
    throw Error(begin ? "an order to begin while an engine samples"
                      : "an order for an engine that has not begun");
  }
  switch (order) {
    case SamplingOrder::begin: {
      const auto first = weights(from);
      engine_ = std::make_unique<NumberedEngine>(*first, options_.engine);
      return;
    }
    case SamplingOrder::request: {
      NumberedRequest sent = get_request(from);
      return engine_->submit(sent.number, std::move(sent.request));
    }
    case SamplingOrder::cancel: return engine_->cancel(from.get<int64_t>());
    case SamplingOrder::weights: return engine_->update_weights(weights(from));
    case SamplingOrder::end:
    case SamplingOrder::leave: throw Error("an order to end among others");
  }
}

std::shared_ptr<const PolicySnapshot> SamplingWorker::weights(ByteReader& from) const {
  SentWeights sent = get_weights(from, like_);
  if (sent.numbers) {
    return std::make_shared<const PolicySnapshot>(std::move(sent.numbers), sent.version);
  }
  auto known = options_.snapshot ? options_.snapshot(sent.version) : nullptr;
  if (!known) throw Error(fmt::format("there are no weights of version {} here", sent.version));
  return known;
}

void SamplingWorker::work() {
  if (!engine_) return;
  attempt([&] {
    const std::vector<SampledSequence> results = engine_->step();
    if (results.empty()) return;
    ByteWriter message;
    message.put(SamplingReport::results);
    put_results(message, results);
    send(message.take());
  });
}

// What fails ends the engine; rank 0 is told, and ends the run.
void SamplingWorker::attempt(const std::function<void()>& work) {
  try {
    work();
  } catch (const Lost&) {
    throw;
  } catch (const std::exception& error) {
    engine_.reset();
    failed_ = true;
    ByteWriter message;
    message.put(SamplingReport::failed);
    message.put(error.what());
    send(message.take());
  }
}

void SamplingWorker::send(const std::string& message) {
  ranks_.send(0, Channel::sampling, message);
}

}  // namespace leeway
