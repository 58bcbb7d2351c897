#include "trainer/state_saving.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <memory>
#include <utility>

#include "base/bytes.h"
#include "base/files.h"
#include "base/folders.h"
#include "base/start_thread.h"
#include "leeway/error.h"
#include "model/weight_files.h"
#include "trainer/saved_state.h"
#include "trainer/state_files.h"

namespace leeway {
namespace {

// A file that says whether two ranks see the same folder.
constexpr const char* kProbe = "/.ranks_see_this";

enum class Answer { written, failed, not_here };

bool sees(const std::string& folder, const std::string& token) {
  try {
    return read_file(folder + kProbe) == token;
  } catch (const Error&) {
    return false;
  }
}

size_t file_of(StateKind kind) { return kind == StateKind::weight ? 0 : 1; }

std::string stem_of(size_t file, const LoraSettings* lora) {
  return file == 0 ? weights_stem(lora) : kMomentsStem;
}

std::string part_name(const std::string& stem, int rank, int ranks) {
  return stored_part_name(stem, static_cast<size_t>(rank), static_cast<size_t>(ranks));
}

void refuse_not_finite(const std::vector<TensorOfState>& tensors) {
  for (const TensorOfState& tensor : tensors) {
    const std::string bad = not_finite_text(tensor.parameter, tensor.shape, tensor.values);
    if (bad.empty()) continue;
    if (tensor.kind == StateKind::weight) throw Error(bad);
    throw Error(fmt::format("the {} moment of {}",
                            tensor.kind == StateKind::first_moment ? "first" : "second", bad));
  }
}

// Memory of what is written is given back.
FileSum write_part(const std::string& path, std::vector<TensorOfState>& tensors) {
  refuse_not_finite(tensors);
  std::vector<TensorPlan> plan;
  for (const TensorOfState& tensor : tensors) {
    plan.push_back({tensor.name, DType::f32, tensor.shape});
  }
  SafetensorsWriter file(path, std::move(plan));
  for (TensorOfState& tensor : tensors) {
    const std::vector<float> values = std::move(tensor.values);
    file.write(std::as_bytes(std::span(values)));
  }
  return file.commit();
}

}  // namespace

std::vector<size_t> saved_by(const StateShard& shard, int rank, int ranks) {
  std::vector<std::pair<size_t, int>> most(shard.model().table.size(), {0, 0});  // numbers, rank
  for (int r = 0; r < ranks; ++r) {
    for (const StatePiece& piece : shard.pieces(r)) {
      auto& best = most[piece.parameter];
      if (piece.count > best.first) best = {piece.count, r};
    }
  }
  std::vector<size_t> parameters;
  for (size_t i = 0; i < most.size(); ++i) {
    if (most[i].second == rank) parameters.push_back(i);
  }
  return parameters;
}

StateFiles complete_state(Ranks& ranks, const StateShard& shard) {
  const StateModel model = shard.model();
  std::vector<int> owner(model.table.size());
  for (int r = 0; r < ranks.size(); ++r) {
    for (const size_t i : saved_by(shard, r, ranks.size())) owner[i] = r;
  }
  std::map<std::pair<size_t, StateKind>, TensorOfState> own;
  const auto place = [&](StateKind kind, const StatePiece& piece) {
    const ParameterInfo& info = model.table[piece.parameter];
    TensorOfState& tensor = own[{piece.parameter, kind}];
    if (tensor.values.empty()) {
      tensor = {kind, info.name, stored_name(model.lora, kind, info.name), info.shape,
                std::vector<float>(static_cast<size_t>(info.size()))};
    }
    return std::span(tensor.values).subspan(piece.first, piece.count);
  };
  for (const StatePiece& piece : shard.pieces(ranks.rank())) {
    const int to = owner[piece.parameter];
    for (const StateKind kind : kStateKinds) {
      if (to == ranks.rank()) {
        shard.read(kind, piece, place(kind, piece));
        continue;
      }
      std::vector<float> numbers(piece.count);
      shard.read(kind, piece, numbers);
      ByteWriter message;
      message.put(numbers);
      ranks.send(to, Channel::training, message.take());
    }
  }
  for (int r = 0; r < ranks.size(); ++r) {
    if (r == ranks.rank()) continue;
    for (const StatePiece& piece : shard.pieces(r)) {
      if (owner[piece.parameter] != ranks.rank()) continue;
      for (const StateKind kind : kStateKinds) {
        const std::string message = ranks.receive(r, Channel::training);
        ByteReader reader(message);
        reader.get_list(place(kind, piece));
        reader.end();
      }
    }
  }
  StateFiles files;
  for (auto& [key, tensor] : own) files[file_of(key.second)].push_back(std::move(tensor));
  for (std::vector<TensorOfState>& file : files) {
    std::sort(file.begin(), file.end(),
              [](const TensorOfState& a, const TensorOfState& b) { return a.name < b.name; });
  }
  return files;
}

// What has been written so far, and the first failure.
struct StateSave::Parts {
  std::string token;
  FileSums sums;
  std::string failure;

  template <class Work>
  void attempt(int rank, const Work& work) {
    try {
      work();
    } catch (const Lost&) {
      throw;
    } catch (const Error& error) {
      if (failure.empty()) failure = fmt::format("rank {}: {}", rank, error.what());
    }
  }
};

StateSave::StateSave(Ranks& ranks, const StateShard& shard, int64_t steps)
    : ranks_(ranks),
      config_(shard.model().config),
      lora_(shard.model().lora != nullptr ? std::optional(*shard.model().lora) : std::nullopt),
      steps_(steps),
      own_(complete_state(ranks, shard)) {
  for (int r = 0; r < ranks.size(); ++r) {
    auto& plans = plans_.emplace_back();
    for (const size_t i : saved_by(shard, r, ranks.size())) {
      const ParameterInfo& info = shard.model().table[i];
      for (const StateKind kind : kStateKinds) {
        plans[file_of(kind)].push_back(
            {stored_name(lora(), kind, info.name), DType::f32, info.shape});
      }
    }
  }
}

StateSave::~StateSave() {
  if (told_) return;
  try {
    for (int r = 1; r < ranks_.size(); ++r) ranks_.send(r, Channel::saving, "");
  } catch (const Lost&) {
    // They have ended.
  }
}

FileSums StateSave::write(const std::string& folder) {
  make_folders(folder);
  remove_checksums(folder);
  const std::string where = absolute_path(folder);
  Parts parts;
  parts.token = fmt::format("{} {}", ::getpid(), static_cast<const void*>(this));
  write_file_atomically(where + kProbe, parts.token);
  told_ = true;
  for (int r = 1; r < ranks_.size(); ++r) {
    ByteWriter message;
    message.put(where);
    message.put(parts.token);
    ranks_.send(r, Channel::saving, message.take());
  }
  write_parts(where, parts);
  remove_tree(where + kProbe);
  if (!parts.failure.empty()) throw Error(parts.failure);
  for (size_t file = 0; file < kStateFiles; ++file) {
    const std::string stem = stem_of(file, lora());
    std::map<std::string, std::string> names;
    int64_t bytes = 0;
    for (int r = 0; r < ranks_.size(); ++r) {
      for (const TensorPlan& tensor : plans_[static_cast<size_t>(r)][file]) {
        names[tensor.name] = part_name(stem, r, ranks_.size());
        bytes += static_cast<int64_t>(tensor.byte_size());
      }
    }
    const std::string index = stem + ".safetensors.index.json";
    parts.sums[index] = write_file_atomically(where + "/" + index, stored_index_json(names, bytes));
  }
  remove_other_files(where, kMomentsStem, parts.sums);
  complete_weights(where, config_, lora(), parts.sums);
  parts.sums["trainer.json"] = write_steps(where, steps_);
  return std::move(parts.sums);
}

void StateSave::write_parts(const std::string& where, Parts& parts) {
  for (int r = 0; r < ranks_.size(); ++r) {
    for (size_t file = 0; file < kStateFiles; ++file) {
      if (plans_[static_cast<size_t>(r)][file].empty()) continue;
      const std::string name = part_name(stem_of(file, lora()), r, ranks_.size());
      const std::string path = where + "/" + name;
      if (r > 0) {
        take_part(r, file, path, parts);
        continue;
      }
      parts.attempt(r, [&] { parts.sums[name] = write_part(path, own_[file]); });
      own_[file].clear();
    }
  }
}

void StateSave::take_part(int rank, size_t file, const std::string& path, Parts& parts) {
  const std::string message = ranks_.receive(rank, Channel::saving);
  ByteReader reader(message);
  const Answer answer = reader.get_enum(Answer::not_here);
  FileSum& sum = parts.sums[path.substr(path.rfind('/') + 1)];
  if (answer == Answer::written) {
    sum.bytes = reader.get<uint64_t>();
    sum.crc32c = reader.get<uint32_t>();
    return;
  }
  if (answer == Answer::failed) {
    parts.attempt(rank, [&] { throw Error(reader.get_string()); });
    return;
  }
  // All of them are taken, also when the disk is full.
  const Plan& plan = plans_[static_cast<size_t>(rank)][file];
  std::unique_ptr<SafetensorsWriter> to;
  parts.attempt(rank, [&] { to = std::make_unique<SafetensorsWriter>(path, plan); });
  for (size_t k = 0; k < plan.size(); ++k) {
    const std::string tensor = ranks_.receive(rank, Channel::saving);
    ranks_.send(rank, Channel::saving, "");  // for the next: none waits in memory
    if (!parts.failure.empty()) continue;
    parts.attempt(rank, [&] { to->write(std::as_bytes(std::span(tensor))); });
  }
  if (parts.failure.empty()) parts.attempt(rank, [&] { sum = to->commit(); });
}

void StateWriter::wait() {
  if (thread_.joinable()) thread_.join();
}

void StateWriter::begin(const StateShard& shard) {
  wait();
  auto own = std::make_shared<StateFiles>(complete_state(ranks_, shard));
  std::array<std::string, kStateFiles> names;
  for (size_t file = 0; file < kStateFiles; ++file) {
    names[file] = part_name(stem_of(file, shard.model().lora), ranks_.rank(), ranks_.size());
  }
  thread_ = start_thread([this, own, names] { serve(names, std::move(*own)); });
}

void StateWriter::serve(const std::array<std::string, kStateFiles>& names, StateFiles own) {
  try {
    const std::string message = ranks_.receive(0, Channel::saving);
    if (message.empty()) return;
    ByteReader reader(message);
    const std::string folder = reader.get_string(), token = reader.get_string();
    const bool here = sees(folder, token);
    for (size_t file = 0; file < kStateFiles; ++file) {
      std::vector<TensorOfState>& tensors = own[file];
      if (tensors.empty()) continue;
      ByteWriter answer;
      bool gives = false;
      try {
        if (here) {
          const FileSum sum = write_part(folder + "/" + names[file], tensors);
          answer.put(Answer::written);
          answer.put(sum.bytes);
          answer.put(sum.crc32c);
        } else {
          refuse_not_finite(tensors);
          answer.put(Answer::not_here);
          gives = true;
        }
      } catch (const Error& error) {
        answer.put(Answer::failed);
        answer.put(error.what());
      }
      ranks_.send(0, Channel::saving, answer.take());
      for (TensorOfState& tensor : tensors) {
        if (!gives) break;
        const std::vector<float> values = std::move(tensor.values);
        const auto bytes = std::as_bytes(std::span(values));
        ranks_.send(0, Channel::saving,
                    std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size()));
        ranks_.receive(0, Channel::saving);
      }
    }
  } catch (const Lost&) {
    // Whoever trains on this rank says so.
  }
}

}  // namespace leeway
