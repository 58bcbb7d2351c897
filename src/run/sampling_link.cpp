#include "run/sampling_link.h"

#include <fmt/format.h>

#include <utility>

#include "base/start_thread.h"
#include "run/sampling_messages.h"

namespace leeway {

SamplingLink::SamplingLink(Ranks& ranks, const std::string& begin)
    : ranks_(ranks), peers_(static_cast<size_t>(ranks.size())) {
  try {
    for (int rank = 1; rank < ranks.size(); ++rank) {
      peers_[static_cast<size_t>(rank)].receiver = start_thread([this, rank] { receive(rank); });
      ranks.send(rank, Channel::sampling, begin);
    }
  } catch (...) {
    close();
    throw;
  }
}

SamplingLink::~SamplingLink() { close(); }

void SamplingLink::close() {
  for (int rank = 1; rank < ranks_.size(); ++rank) {
    if (!peers_[static_cast<size_t>(rank)].receiver.joinable()) continue;
    try {
      ranks_.send(rank, Channel::sampling, message_of(SamplingOrder::end));
    } catch (const Error&) {  // lost: the receivers end by that
    }
  }
  for (Peer& peer : peers_) {
    if (peer.receiver.joinable()) peer.receiver.join();
  }
}

void SamplingLink::receive(int rank) {
  while (true) {
    std::string message;
    try {
      message = ranks_.receive(rank, Channel::sampling);
    } catch (...) {
      return fail(std::current_exception());
    }
    try {
      if (!read(rank, message)) return;
    } catch (const std::exception& error) {
      fail(std::make_exception_ptr(Error(fmt::format("rank {}: {}", rank, error.what()))));
    }
  }
}

// False: it was the last report.
bool SamplingLink::read(int rank, const std::string& message) {
  ByteReader reader(message);
  const SamplingReport report = reader.get_enum(SamplingReport::ended);
  std::vector<SampledSequence> sequences;
  if (report == SamplingReport::results) sequences = get_results(reader);
  if (report == SamplingReport::failed) throw Error(reader.get_string());
  reader.end();
  if (report == SamplingReport::ended) return false;
  for (SampledSequence& sequence : sequences) {
    if (sequence.finish != Finish::failed) continue;
    sequence.failure = fmt::format("rank {}: {}", rank, sequence.failure);
  }
  {
    const std::lock_guard lock(mutex_);
    results_.push_back({rank, std::move(sequences)});
  }
  changed_.notify_all();
  return true;
}

void SamplingLink::fail(std::exception_ptr failure) {
  {
    const std::lock_guard lock(mutex_);
    if (!failure_) failure_ = std::move(failure);
  }
  changed_.notify_all();
}

void SamplingLink::check() const {
  const std::lock_guard lock(mutex_);
  if (failure_) std::rethrow_exception(failure_);
}

void SamplingLink::flush() {
  check();
  for (int rank = 1; rank < ranks_.size(); ++rank) {
    const std::string message = orders(rank).take();
    if (!message.empty()) ranks_.send(rank, Channel::sampling, message);
  }
}

void SamplingLink::send_all(const std::string& message) {
  flush();
  for (int rank = 1; rank < ranks_.size(); ++rank) ranks_.send(rank, Channel::sampling, message);
}

std::vector<SamplingLink::Results> SamplingLink::take(
    std::chrono::steady_clock::time_point deadline) {
  std::unique_lock lock(mutex_);
  changed_.wait_until(lock, deadline, [&] { return failure_ || !results_.empty(); });
  if (failure_) std::rethrow_exception(failure_);
  return std::exchange(results_, {});
}

}  // namespace leeway
