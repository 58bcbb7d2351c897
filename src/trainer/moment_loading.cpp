#include "trainer/moment_loading.h"

#include <stdlib.h>

#include <utility>
#include <vector>

#include "base/bytes.h"
#include "base/crc32c.h"
#include "base/files.h"
#include "leeway/error.h"
#include "trainer/saved_moments.h"
#include "trainer/state_files.h"

namespace leeway {
namespace {

// Of the files in a folder, as far as it tells one state from another: what lists the checksums of
// a checkpoint's files, the steps, and where tensors lie.
uint32_t fingerprint(const std::string& folder, const SavedMoments& moments) {
  std::string text = moments.layout_text();
  for (const char* name : {"/trainer.json", "/manifest.json"}) {
    if (is_present(folder + name)) text += read_file(folder + name);
  }
  return crc32c(text);
}

std::string absolute_path(const std::string& folder) {
  char* const path = ::realpath(folder.c_str(), nullptr);
  if (path == nullptr) return folder;
  std::string text = path;
  ::free(path);
  return text;
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
void give_moments(Ranks& ranks, int rank, const SavedMoments& moments) {
  std::vector<float> numbers;
  for (std::string message; !(message = ranks.receive(rank, Channel::training)).empty();) {
    ByteReader reader(message);
    const Moment which = reader.get_enum(Moment::second);
    MomentPiece piece;
    piece.parameter = reader.get<uint64_t>();
    piece.first = reader.get<uint64_t>();
    piece.count = reader.get<uint64_t>();
    ByteWriter answer;
    try {
      numbers.resize(piece.count);
      moments.read(which, piece, numbers);
      answer.put(true);
      answer.put(numbers);
    } catch (const Error& error) {
      answer.put(false);
      answer.put(error.what());
    }
    ranks.send(rank, Channel::training, answer.take());
  }
}

void ask_for(Ranks& ranks, Moment which, const MomentPiece& piece, std::span<float> to) {
  ByteWriter message;
  message.put(which);
  for (const size_t number : {piece.parameter, piece.first, piece.count})
    message.put(uint64_t{number});
  ranks.send(0, Channel::training, message.take());
  const std::string answer = ranks.receive(0, Channel::training);
  ByteReader reader(answer);
  if (!reader.get_bool()) throw Error(reader.get_string());
  reader.get_list(to);
}

}  // namespace

std::optional<int64_t> load_sharded(Ranks& ranks, const std::string& folder, MomentShard& shard,
                                    Parameters& policy, bool leads_alone) {
  const bool leads = ranks.rank() == 0;
  Told told;
  std::string failure;
  std::optional<Parameters> loaded;
  std::optional<SavedMoments> moments;  // that this rank sees
  if (leads) {
    try {
      const int64_t steps = read_steps(folder);
      loaded = load_policy(folder, policy);
      moments.emplace(folder, shard.table());
      told = {steps, absolute_path(folder), fingerprint(folder, *moments)};
    } catch (const Error& error) {
      failure = error.what();
    }
  }
  told = read_told(ranks.all_gather(leads ? message_of(told) : "")[0]);
  if (leads && told.steps < 0) throw Error(failure);
  if (told.steps < 0) return std::nullopt;
  if (!leads) {
    try {
      moments.emplace(told.folder, shard.table());
      if (fingerprint(told.folder, *moments) != told.fingerprint) moments.reset();
    } catch (const Error&) {
      // It is on another host, or rank 0 finds the same mistake.
    }
  }
  const std::vector<std::string> seen = ranks.all_gather(moments ? "seen" : "");
  std::function<void()> take;
  try {
    take = shard.prepare([&](Moment which, const MomentPiece& piece, std::span<float> to) {
      moments ? moments->read(which, piece, to) : ask_for(ranks, which, piece, to);
    });
  } catch (const Lost&) {
    throw;
  } catch (const Error& error) {
    failure = error.what();
  }
  if (!moments) ranks.send(0, Channel::training, "");
  for (int r = 1; leads && r < ranks.size(); ++r) {
    if (seen[static_cast<size_t>(r)].empty()) give_moments(ranks, r, *moments);
  }
  for (const std::string& problem : ranks.all_gather(failure)) {
    if (problem.empty()) continue;
    if (leads) throw Error(problem);
    return std::nullopt;
  }
  take();
  if (loaded) policy = std::move(*loaded);
  if (!leads_alone) ranks.broadcast(std::as_writable_bytes(policy.flat()), 0);
  return told.steps;
}

}  // namespace leeway
