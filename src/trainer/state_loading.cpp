#include "trainer/state_loading.h"

#include <utility>
#include <vector>

#include "base/bytes.h"
#include "base/crc32c.h"
#include "base/files.h"
#include "base/folders.h"
#include "leeway/error.h"
#include "trainer/saved_state.h"
#include "trainer/state_files.h"

namespace leeway {
namespace {

// Of the files in a folder, as far as it tells one state from another: what lists the checksums of
// a checkpoint's files, the steps, and where tensors lie.
uint32_t fingerprint(const std::string& folder, const SavedState& saved) {
  std::string text = saved.layout_text();
  for (const char* name : {"/trainer.json", "/manifest.json"}) {
    if (is_present(folder + name)) text += read_file(folder + name);
  }
  return crc32c(text);
}

// What rank 0 says of the state.
struct Told {
  int64_t steps = -1;  // it cannot be read
  std::string folder;
  uint32_t fingerprint = 0;
};

std::string message_of(const Told& told) {
  ByteWriter message;
  message.put(told.steps);
  message.put(told.folder);
  message.put(told.fingerprint);
  return message.take();
}

Told read_told(const std::string& message) {
  ByteReader reader(message);
  Told told;
  told.steps = reader.get<int64_t>();
  told.folder = reader.get_string();
  told.fingerprint = reader.get<uint32_t>();
  return told;
}

// Rank 0: gives `rank` what it asks for, until it has all.
void give_state(Ranks& ranks, int rank, const SavedState& saved) {
  std::vector<float> numbers;
  for (std::string message; !(message = ranks.receive(rank, Channel::training)).empty();) {
    ByteReader reader(message);
    const StateKind kind = reader.get_enum(StateKind::second_moment);
    StatePiece piece;
    piece.parameter = reader.get<uint64_t>();
    piece.first = reader.get<uint64_t>();
    piece.count = reader.get<uint64_t>();
    ByteWriter answer;
    try {
      numbers.resize(piece.count);
      saved.read(kind, piece, numbers);
      answer.put(true);
      answer.put(numbers);
    } catch (const Error& error) {
      answer.put(false);
      answer.put(error.what());
    }
    ranks.send(rank, Channel::training, answer.take());
  }
}

void ask_for(Ranks& ranks, StateKind kind, const StatePiece& piece, std::span<float> to) {
  ByteWriter message;
  message.put(kind);
  for (const size_t number : {piece.parameter, piece.first, piece.count})
    message.put(uint64_t{number});
  ranks.send(0, Channel::training, message.take());
  const std::string answer = ranks.receive(0, Channel::training);
  ByteReader reader(answer);
  if (!reader.get_bool()) throw Error(reader.get_string());
  reader.get_list(to);
}

}  // namespace

std::optional<int64_t> load_sharded(Ranks& ranks, const std::string& folder, StateShard& shard) {
  const bool leads = ranks.rank() == 0;
  Told told;
  std::string failure;
  std::optional<SavedState> saved;  // that this rank sees
  if (leads) {
    try {
      const int64_t steps = read_steps(folder);
      require_same_model(folder, shard.model());
      saved.emplace(folder, shard.model());
      told = {steps, absolute_path(folder), fingerprint(folder, *saved)};
    } catch (const Error& error) {
      failure = error.what();
    }
  }
  told = read_told(ranks.all_gather(leads ? message_of(told) : "")[0]);
  if (leads && told.steps < 0) throw Error(failure);
  if (told.steps < 0) return std::nullopt;
  if (!leads) {
    try {
      saved.emplace(told.folder, shard.model());
      if (fingerprint(told.folder, *saved) != told.fingerprint) saved.reset();
    } catch (const Error&) {  // it is on another host, or rank 0 finds the same mistake
      saved.reset();
    }
  }
  const std::vector<std::string> seen = ranks.all_gather(saved ? "seen" : "");
  std::function<void()> take;
  try {
    take = shard.prepare([&](StateKind kind, const StatePiece& piece, std::span<float> to) {
      saved ? saved->read(kind, piece, to) : ask_for(ranks, kind, piece, to);
    });
  } catch (const Lost&) {
    throw;
  } catch (const Error& error) {
    failure = error.what();
  }
  if (!saved) ranks.send(0, Channel::training, "");
  for (int r = 1; leads && r < ranks.size(); ++r) {
    if (seen[static_cast<size_t>(r)].empty()) give_state(ranks, r, *saved);
  }
  for (const std::string& problem : ranks.all_gather(failure)) {
    if (problem.empty()) continue;
    if (leads) throw Error(problem);
    return std::nullopt;
  }
  take();
  return told.steps;
}

}  // namespace leeway
