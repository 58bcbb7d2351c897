#include "text/bpe.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <functional>
#include <queue>

#include "leeway/error.h"
#include "text/byte_level.h"

namespace leeway {
namespace {

// Up to this length, scanning for the best merge is faster than keeping a heap.
constexpr size_t kShortPiece = 48;

uint32_t hash_bytes(std::string_view bytes) {
  const size_t hash = std::hash<std::string_view>{}(bytes);
  return static_cast<uint32_t>(hash ^ (hash >> 32));
}

uint64_t pair_key(int32_t left, int32_t right) {
  return (static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32) | static_cast<uint32_t>(right);
}

size_t hash_pair(uint64_t pair) {
  pair *= 0x9E3779B97F4A7C15u;
  return static_cast<size_t>(pair ^ (pair >> 29));
}

// Half-empty tables keep probe runs short.
size_t table_size(size_t entries) { return std::bit_ceil(2 * entries + 2); }

// Bytes that never occur in valid UTF-8; a vocabulary may lack them.
bool never_in_text(unsigned byte) { return byte == 0xC0 || byte == 0xC1 || byte >= 0xF5; }
// Control characters, and beginnings of planes that have hardly any character. Some real
// vocabularies (SmolLM's) lack them, and have no token for what is unknown: text loses such bytes,
// as it does with the model's own tokenizer.
bool hardly_in_text(unsigned byte) {
  return (byte < 0x20 && byte != '\t' && byte != '\n' && byte != '\r') || byte == 0x7F ||
         byte >= 0xF1;
}

}  // namespace

Bpe::Bpe(const std::string& file, const BpeModel& model,
         const std::unordered_set<int32_t>& reserved)
    : ignore_merges_(model.ignore_merges) {
  add_entries(file, model, reserved);
  add_alphabet(file, model);
  add_merges(file, model);
  wholeness_ = std::make_unique<std::atomic<uint8_t>[]>(tokens_.size());
}

void Bpe::add_entries(const std::string& file, const BpeModel& model,
                      const std::unordered_set<int32_t>& reserved) {
  int32_t largest = -1;
  for (const auto& [spelling, id] : model.vocab) {
    if (id < 0 || id >= kMostTokens) {
      throw Error(fmt::format("{}: model.vocab['{}']: the id {} is outside 0 to {}", file, spelling,
                              id, kMostTokens - 1));
    }
    largest = std::max(largest, id);
  }
  tokens_.resize(static_cast<size_t>(largest + 1));
  kinds_.resize(tokens_.size(), Kind::absent);
  by_bytes_.resize(table_size(model.vocab.size()));
  for (const auto& [spelling, id] : model.vocab) {
    if (kinds_[id] != Kind::absent) {
      throw Error(fmt::format("{}: model.vocab['{}']: the id {} is taken by another token", file,
                              spelling, id));
    }
    bool is_new = false;
    if (std::optional<std::string> bytes = byte_level_bytes(spelling)) {
      longest_ = std::max(longest_, bytes->size());
      const uint32_t hash = hash_bytes(*bytes);
      Slot& slot = slot_of(*bytes, hash);
      is_new = slot.id < 0;
      slot = {hash, id};
      kinds_[id] = reserved.contains(id) ? Kind::reserved : Kind::piece;
      tokens_[id] = std::move(*bytes);
    } else {
      is_new = by_spelling_.emplace(spelling, id).second;
      kinds_[id] = Kind::other;
      tokens_[id] = spelling;
    }
    if (!is_new) {
      throw Error(fmt::format("{}: model.vocab names the token '{}' twice", file, spelling));
    }
  }
}

void Bpe::add_alphabet(const std::string& file, const BpeModel& model) {
  for (unsigned byte = 0; byte < 256; ++byte) {
    const char c = static_cast<char>(static_cast<uint8_t>(byte));
    const int32_t id = find_bytes({&c, 1});
    alphabet_[byte] = id;
    if (id < 0 && !never_in_text(byte) && (model.has_unknown || !hardly_in_text(byte))) {
      std::string spelling;
      append_utf8(spelling, byte_level_code_point(static_cast<uint8_t>(byte)));
      throw Error(
          fmt::format("{}: model.vocab: no token '{}' for the byte 0x{:02X}; unknown-token "
                      "models are not supported",
                      file, spelling, byte));
    }
    if (id >= 0 && kinds_[id] == Kind::reserved) {
      throw Error(fmt::format("{}: added_tokens: the special token {} is also the byte 0x{:02X}",
                              file, id, byte));
    }
  }
}

void Bpe::add_merges(const std::string& file, const BpeModel& model) {
  merges_.resize(table_size(model.merges.size()));
  const size_t mask = merges_.size() - 1;
  uint32_t rank = 0;
  for (const auto& [left, right] : model.merges) {
    const auto entry = [&](const std::string& spelling) {
      const std::optional<int32_t> id = find(spelling);
      if (!id) {
        throw Error(fmt::format("{}: model.merges[{}]: the token '{}' is not in model.vocab", file,
                                rank, spelling));
      }
      return *id;
    };
    const int32_t left_id = entry(std::string(left)), right_id = entry(std::string(right));
    const int32_t id = entry(std::string(left) + std::string(right));
    if (kinds_[id] == Kind::reserved) {
      throw Error(fmt::format("{}: model.merges[{}] makes the special token {}", file, rank, id));
    }
    const uint64_t pair = pair_key(left_id, right_id);
    size_t at = hash_pair(pair) & mask;
    while (merges_[at].rank != kNoMerge && merges_[at].pair != pair) at = (at + 1) & mask;
    merges_[at] = {pair, rank++, id};  // if a merge is given twice, the last one counts
  }
}

Bpe::Slot& Bpe::slot_of(std::string_view bytes, uint32_t hash) {
  const size_t mask = by_bytes_.size() - 1;
  size_t at = hash & mask;
  while (by_bytes_[at].id >= 0 &&
         !(by_bytes_[at].hash == hash && tokens_[by_bytes_[at].id] == bytes)) {
    at = (at + 1) & mask;
  }
  return by_bytes_[at];
}

int32_t Bpe::find_bytes(std::string_view bytes) const {
  if (bytes.size() > longest_) return -1;
  return const_cast<Bpe*>(this)->slot_of(bytes, hash_bytes(bytes)).id;
}

std::optional<int32_t> Bpe::find(std::string_view spelling) const {
  if (const std::optional<std::string> bytes = byte_level_bytes(spelling)) {
    const int32_t id = find_bytes(*bytes);
    return id < 0 ? std::nullopt : std::optional(id);
  }
  const auto found = by_spelling_.find(std::string(spelling));
  return found == by_spelling_.end() ? std::nullopt : std::optional(found->second);
}

const std::string* Bpe::bytes_of(int32_t id) const {
  if (id < 0 || id >= size() || kinds_[id] == Kind::absent) return nullptr;
  return &tokens_[id];
}

Bpe::Merge Bpe::merge_of(int32_t left, int32_t right) const {
  const uint64_t pair = pair_key(left, right);
  const size_t mask = merges_.size() - 1;
  size_t at = hash_pair(pair) & mask;
  while (merges_[at].rank != kNoMerge && merges_[at].pair != pair) at = (at + 1) & mask;
  return merges_[at];
}

void Bpe::encode(std::string_view piece, std::vector<int32_t>& ids) const {
  if (piece.empty()) return;
  // Most pieces of ordinary text are one token. A read-only table needs no lock, unlike a cache.
  const int32_t whole = find_bytes(piece);
  if (whole < 0 || kinds_[whole] != Kind::piece) return merge(piece, ids);
  uint8_t wholeness =
      ignore_merges_ ? uint8_t{kWhole} : wholeness_[whole].load(std::memory_order_relaxed);
  if (wholeness == kWhole) {
    ids.push_back(whole);
    return;
  }
  const size_t before = ids.size();
  merge(piece, ids);
  if (wholeness == kUnknown) {
    wholeness = ids.size() == before + 1 && ids.back() == whole ? kWhole : kInParts;
    wholeness_[whole].store(wholeness, std::memory_order_relaxed);
  }
}

void Bpe::merge(std::string_view piece, std::vector<int32_t>& ids) const {
  if (piece.size() <= kShortPiece) {
    merge_short(piece, ids);
  } else {
    merge_long(piece, ids);
  }
}

void Bpe::merge_short(std::string_view piece, std::vector<int32_t>& ids) const {
  int32_t symbols[kShortPiece];
  size_t count = 0;
  for (const char c : piece) {
    const int32_t id = alphabet_[static_cast<uint8_t>(c)];
    if (id >= 0) symbols[count++] = id;
  }
  Merge next[kShortPiece];  // next[i] merges symbols i and i + 1
  for (size_t i = 0; i + 1 < count; ++i) next[i] = merge_of(symbols[i], symbols[i + 1]);
  while (count > 1) {
    size_t best = 0;
    for (size_t i = 1; i + 1 < count; ++i) {
      if (next[i].rank < next[best].rank) best = i;
    }
    if (next[best].rank == kNoMerge) break;
    symbols[best] = next[best].id;
    std::copy(symbols + best + 2, symbols + count, symbols + best + 1);
    if (best + 2 < count) std::copy(next + best + 2, next + count - 1, next + best + 1);
    --count;
    if (best > 0) next[best - 1] = merge_of(symbols[best - 1], symbols[best]);
    if (best + 1 < count) next[best] = merge_of(symbols[best], symbols[best + 1]);
  }
  ids.insert(ids.end(), symbols, symbols + count);
}

void Bpe::merge_long(std::string_view piece, std::vector<int32_t>& ids) const {
  struct Symbol {
    int32_t id;
    uint32_t previous, next;
    uint32_t rank;  // of merging with the next symbol; kNoMerge for a symbol merged away
    int32_t merged;
  };
  LEEWAY_CHECK(piece.size() < UINT32_MAX, "a piece of text must fit 32-bit positions");
  std::vector<Symbol> symbols;
  symbols.reserve(piece.size());
  for (const char c : piece) {
    const int32_t id = alphabet_[static_cast<uint8_t>(c)];
    const auto at = static_cast<uint32_t>(symbols.size());
    if (id >= 0) symbols.push_back({id, at - 1, at + 1, kNoMerge, -1});
  }
  const auto end = static_cast<uint32_t>(symbols.size());
  // Rank in the upper half, position in the lower: the smallest entry is the best merge, leftmost
  // among equals. An entry is stale once its symbol's rank has changed.
  std::vector<uint64_t> entries;
  const auto look = [&](uint32_t at) {
    Symbol& symbol = symbols[at];
    symbol.rank = kNoMerge;
    if (symbol.next >= end) return false;
    const Merge merge = merge_of(symbol.id, symbols[symbol.next].id);
    symbol.rank = merge.rank;
    symbol.merged = merge.id;
    return merge.rank != kNoMerge;
  };
  const auto entry = [&](uint32_t at) { return uint64_t{symbols[at].rank} << 32 | at; };
  for (uint32_t at = 0; at < end; ++at) {
    if (look(at)) entries.push_back(entry(at));
  }
  std::priority_queue<uint64_t, std::vector<uint64_t>, std::greater<>> heap(std::greater<>{},
                                                                            std::move(entries));
  while (!heap.empty()) {
    const auto at = static_cast<uint32_t>(heap.top());
    const auto rank = static_cast<uint32_t>(heap.top() >> 32);
    heap.pop();
    Symbol& symbol = symbols[at];
    if (symbol.rank != rank) continue;
    symbol.id = symbol.merged;
    symbols[symbol.next].rank = kNoMerge;
    symbol.next = symbols[symbol.next].next;
    if (symbol.next < end) symbols[symbol.next].previous = at;
    if (look(at)) heap.push(entry(at));
    if (at > 0 && look(symbol.previous)) heap.push(entry(symbol.previous));
  }
  for (uint32_t at = 0; at < end; at = symbols[at].next) ids.push_back(symbols[at].id);
}

}  // namespace leeway
