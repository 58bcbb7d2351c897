#include "trainer/moment_shard.h"

#include <algorithm>

#include "base/bytes.h"
#include "leeway/error.h"
#include "trainer/state_files.h"

namespace leeway {

std::vector<MomentPiece> pieces_between(const std::vector<ParameterInfo>& table,
                                        std::span<const size_t> offsets, size_t begin, size_t end) {
  std::vector<MomentPiece> pieces;
  for (size_t i = 0; i < table.size(); ++i) {
    const size_t first = std::max(offsets[i], begin);
    const size_t last = std::min(offsets[i] + static_cast<size_t>(table[i].size()), end);
    if (first < last) pieces.push_back({i, first - offsets[i], last - first});
  }
  return pieces;
}

void collect_moments(Ranks& ranks, const MomentShard& shard, AdamW* all) {
  if (all == nullptr) {
    std::vector<float> numbers;
    for (const Moment which : kMoments) {
      for (const MomentPiece& piece : shard.pieces(ranks.rank())) {
        numbers.resize(piece.count);
        shard.read(which, piece, numbers);
        ByteWriter message;
        message.put(std::span<const float>(numbers));
        ranks.send(0, Channel::training, message.take());
      }
    }
    return;
  }
  for (int r = 0; r < ranks.size(); ++r) {
    for (const Moment which : kMoments) {
      Parameters& into = which == Moment::first ? all->first_moment() : all->second_moment();
      for (const MomentPiece& piece : shard.pieces(r)) {
        const std::span<float> to = into.of(piece.parameter).subspan(piece.first, piece.count);
        if (r == 0) {
          shard.read(which, piece, to);
          continue;
        }
        const std::string message = ranks.receive(r, Channel::training);
        ByteReader reader(message);
        reader.get_list(to);
        reader.end();
      }
    }
  }
}

std::optional<int64_t> load_sharded(Ranks& ranks, const std::string& folder, MomentShard& shard,
                                    Parameters& policy) {
  std::optional<TrainingState> state;
  std::optional<Error> failure;
  int64_t steps = -1;  // the folder cannot be read
  if (ranks.rank() == 0) {
    try {
      state.emplace(TrainingState{policy, AdamW(policy)});
      load_state(folder, state->policy, state->optimizer);
      steps = state->optimizer.steps();
    } catch (const Error& error) {
      failure = error;
    }
  }
  ranks.broadcast(std::as_writable_bytes(std::span(&steps, 1)), 0);
  if (failure) throw Error(*failure);
  if (steps < 0) return std::nullopt;
  if (state) policy = std::move(state->policy);
  ranks.broadcast(std::as_writable_bytes(policy.flat()), 0);
  const auto numbers = [&](Moment which, const MomentPiece& piece) {
    const Parameters& all =
        which == Moment::first ? state->optimizer.first_moment() : state->optimizer.second_moment();
    return all.of(piece.parameter).subspan(piece.first, piece.count);
  };
  for (int r = 1; state && r < ranks.size(); ++r) {
    for (const Moment which : kMoments) {
      for (const MomentPiece& piece : shard.pieces(r)) {
        ByteWriter message;
        message.put(numbers(which, piece));
        ranks.send(r, Channel::training, message.take());
      }
    }
  }
  shard.prepare([&](Moment which, const MomentPiece& piece, std::span<float> to) {
    if (state) {
      std::copy_n(numbers(which, piece).begin(), piece.count, to.begin());
      return;
    }
    const std::string message = ranks.receive(0, Channel::training);
    ByteReader reader(message);
    reader.get_list(to);
    reader.end();
  })();
  return steps;
}

}  // namespace leeway
