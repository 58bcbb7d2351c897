#include "trainer/moment_saving.h"

#include <fmt/format.h>
#include <stdlib.h>

#include <algorithm>
#include <map>
#include <utility>

#include "base/bytes.h"
#include "base/files.h"
#include "base/folders.h"
#include "base/start_thread.h"
#include "leeway/error.h"
#include "model/safetensors.h"

namespace leeway {
namespace {

// A file that says whether two ranks see the same folder.
constexpr const char* kProbe = "/.ranks_see_this";

enum class Answer { written, failed, not_here };

std::string absolute_path(const std::string& folder) {
  char* const path = ::realpath(folder.c_str(), nullptr);
  if (path == nullptr) throw Error(folder + ": is not there");
  std::string text = path;
  ::free(path);
  return text;
}

bool sees(const std::string& folder, const std::string& token) {
  try {
    return read_file(folder + kProbe) == token;
  } catch (const Error&) {
    return false;
  }
}

std::string part_name(int rank, int ranks) {
  return stored_part_name("optimizer", static_cast<size_t>(rank), static_cast<size_t>(ranks));
}

std::vector<TensorPlan> plan_of(const std::vector<ParameterInfo>& table,
                                const std::vector<size_t>& parameters) {
  std::vector<TensorPlan> plan;
  for (const size_t i : parameters) {
    for (const Moment which : kMoments) {
      plan.push_back({moment_name(which, table[i]), DType::f32, table[i].shape});
    }
  }
  return plan;
}

// As they are in the file: by name.
std::vector<TensorToSave> tensors_of(const std::vector<ParameterInfo>& table,
                                     const std::vector<MomentsOfParameter>& own) {
  std::vector<TensorToSave> tensors;
  for (const MomentsOfParameter& each : own) {
    const ParameterInfo& info = table[each.parameter];
    tensors.push_back({moment_name(Moment::first, info), info.shape, each.first});
    tensors.push_back({moment_name(Moment::second, info), info.shape, each.second});
  }
  std::sort(tensors.begin(), tensors.end(),
            [](const TensorToSave& a, const TensorToSave& b) { return a.name < b.name; });
  return tensors;
}

FileSum write_part(const std::string& path, const std::vector<ParameterInfo>& table,
                   const std::vector<MomentsOfParameter>& own) {
  for (const MomentsOfParameter& each : own) refuse_not_finite(table, each);
  return write_safetensors(path, tensors_of(table, own));
}

}  // namespace

std::vector<size_t> saved_by(const MomentShard& shard, int rank, int ranks) {
  std::vector<std::pair<size_t, int>> most(shard.table().size(), {0, 0});  // numbers, rank
  for (int r = 0; r < ranks; ++r) {
    for (const MomentPiece& piece : shard.pieces(r)) {
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

std::vector<MomentsOfParameter> complete_moments(Ranks& ranks, const MomentShard& shard) {
  std::vector<int> owner(shard.table().size());
  for (int r = 0; r < ranks.size(); ++r) {
    for (const size_t i : saved_by(shard, r, ranks.size())) owner[i] = r;
  }
  std::map<size_t, MomentsOfParameter> own;
  const auto of = [&](size_t parameter) -> MomentsOfParameter& {
    MomentsOfParameter& moments = own[parameter];
    const auto size = static_cast<size_t>(shard.table()[parameter].size());
    moments.parameter = parameter;
    moments.first.resize(size), moments.second.resize(size);
    return moments;
  };
  const auto place = [](MomentsOfParameter& moments, Moment which, const MomentPiece& piece) {
    std::vector<float>& all = which == Moment::first ? moments.first : moments.second;
    return std::span(all).subspan(piece.first, piece.count);
  };
  for (const MomentPiece& piece : shard.pieces(ranks.rank())) {
    const int to = owner[piece.parameter];
    for (const Moment which : kMoments) {
      if (to == ranks.rank()) {
        shard.read(which, piece, place(of(piece.parameter), which, piece));
        continue;
      }
      std::vector<float> numbers(piece.count);
      shard.read(which, piece, numbers);
      ByteWriter message;
      message.put(numbers);
      ranks.send(to, Channel::training, message.take());
    }
  }
  for (int r = 0; r < ranks.size(); ++r) {
    if (r == ranks.rank()) continue;
    for (const MomentPiece& piece : shard.pieces(r)) {
      if (owner[piece.parameter] != ranks.rank()) continue;
      for (const Moment which : kMoments) {
        const std::string message = ranks.receive(r, Channel::training);
        ByteReader reader(message);
        reader.get_list(place(of(piece.parameter), which, piece));
        reader.end();
      }
    }
  }
  std::vector<MomentsOfParameter> list;
  for (auto& [parameter, moments] : own) list.push_back(std::move(moments));
  return list;
}

MomentSave::MomentSave(Ranks& ranks, const MomentShard& shard)
    : ranks_(ranks), table_(shard.table()), own_(complete_moments(ranks, shard)) {
  for (int r = 0; r < ranks.size(); ++r) saved_.push_back(saved_by(shard, r, ranks.size()));
}

MomentSave::~MomentSave() {
  if (written_) return;
  try {
    for (int r = 1; r < ranks_.size(); ++r) ranks_.send(r, Channel::saving, "");
  } catch (const Lost&) {
    // They have ended.
  }
}

FileSums MomentSave::write(const std::string& folder) {
  const std::string where = absolute_path(folder);
  const std::string token = fmt::format("{} {}", ::getpid(), static_cast<const void*>(this));
  write_file_atomically(where + kProbe, token);
  written_ = true;
  FileSums sums;
  std::string failure;
  const auto attempt = [&](int r, const auto& work) {
    try {
      work();
    } catch (const Lost&) {
      throw;
    } catch (const Error& error) {
      if (failure.empty()) failure = fmt::format("rank {}: {}", r, error.what());
    }
  };
  for (int r = 1; r < ranks_.size(); ++r) {
    ByteWriter message;
    message.put(where);
    message.put(token);
    ranks_.send(r, Channel::saving, message.take());
  }
  std::map<std::string, std::string> files;
  int64_t bytes = 0;
  for (int r = 0; r < ranks_.size(); ++r) {
    const std::vector<TensorPlan> plan = plan_of(table_, saved_[static_cast<size_t>(r)]);
    const std::string name = part_name(r, ranks_.size());
    for (const TensorPlan& tensor : plan) {
      files[tensor.name] = name;
      bytes += static_cast<int64_t>(tensor.byte_size());
    }
    if (plan.empty()) continue;
    if (r == 0) {
      attempt(r, [&] { sums[name] = write_part(where + "/" + name, table_, own_); });
      own_.clear();
      continue;
    }
    const std::string message = ranks_.receive(r, Channel::saving);
    ByteReader reader(message);
    const Answer answer = reader.get_enum(Answer::not_here);
    if (answer == Answer::written) {
      sums[name].bytes = reader.get<uint64_t>();
      sums[name].crc32c = reader.get<uint32_t>();
    } else if (answer == Answer::failed) {
      attempt(r, [&] { throw Error(reader.get_string()); });
    } else {
      // All of them are taken, also when the disk is full.
      std::unique_ptr<SafetensorsWriter> file;
      attempt(r, [&] { file = std::make_unique<SafetensorsWriter>(where + "/" + name, plan); });
      for (size_t k = 0; k < plan.size(); ++k) {
        const std::string tensor = ranks_.receive(r, Channel::saving);
        ranks_.send(r, Channel::saving, "");  // for the next: none waits in memory
        if (failure.empty()) attempt(r, [&] { file->write(std::as_bytes(std::span(tensor))); });
      }
      if (failure.empty()) attempt(r, [&] { sums[name] = file->commit(); });
    }
  }
  remove_tree(where + kProbe);
  if (!failure.empty()) throw Error(failure);
  constexpr const char* kIndex = "optimizer.safetensors.index.json";
  sums[kIndex] = write_file_atomically(where + "/" + kIndex, stored_index_json(files, bytes));
  return sums;
}

void MomentWriter::wait() {
  if (thread_.joinable()) thread_.join();
}

void MomentWriter::begin(const MomentShard& shard) {
  wait();
  auto own = std::make_shared<std::vector<MomentsOfParameter>>(complete_moments(ranks_, shard));
  thread_ = start_thread([this, table = shard.table(), own] { serve(table, std::move(*own)); });
}

void MomentWriter::serve(const std::vector<ParameterInfo>& table,
                         std::vector<MomentsOfParameter> own) {
  try {
    const std::string message = ranks_.receive(0, Channel::saving);
    if (message.empty() || own.empty()) return;
    ByteReader reader(message);
    const std::string folder = reader.get_string(), token = reader.get_string();
    ByteWriter answer;
    std::string failure;
    FileSum sum;
    const bool here = sees(folder, token);
    try {
      if (here) {
        sum = write_part(folder + "/" + part_name(ranks_.rank(), ranks_.size()), table, own);
      } else {
        for (const MomentsOfParameter& each : own) refuse_not_finite(table, each);
      }
    } catch (const Error& error) {
      failure = error.what();
    }
    answer.put(!failure.empty() ? Answer::failed : here ? Answer::written : Answer::not_here);
    if (!failure.empty()) {
      answer.put(failure);
    } else if (here) {
      answer.put(sum.bytes);
      answer.put(sum.crc32c);
    }
    ranks_.send(0, Channel::saving, answer.take());
    if (here || !failure.empty()) return;
    for (const TensorToSave& tensor : tensors_of(table, own)) {
      const auto bytes = std::as_bytes(tensor.values);
      ranks_.send(0, Channel::saving,
                  std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size()));
      ranks_.receive(0, Channel::saving);
    }
  } catch (const Lost&) {
    // Whoever trains on this rank says so.
  }
}

}  // namespace leeway
