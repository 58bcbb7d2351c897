// Byte-pair merges over byte-level tokens.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace leeway {

// The model as the file spells it. The views point into the file's text.
struct BpeModel {
  std::vector<std::pair<std::string_view, int32_t>> vocab;
  std::vector<std::pair<std::string_view, std::string_view>> merges;  // best first
  bool ignore_merges =
      false;  // a piece that is a vocabulary entry becomes it, whether merges reach it or not
  bool has_unknown = false;  // a token stands for what the vocabulary lacks
};

// Ids stay below this, so that a stray number in a file cannot request gigabytes of tables.
constexpr int32_t kMostTokens = 1 << 21;

class Bpe {
 public:
  // Throws Error naming the file and the key. No piece of text is ever encoded as one of
  // `reserved`: these ids are control tokens, which ordinary text must not produce.
  Bpe(const std::string& file, const BpeModel& model, const std::unordered_set<int32_t>& reserved);

  // Appends the tokens of one piece of text.
  void encode(std::string_view piece, std::vector<int32_t>& ids) const;

  // The id of an entry by its spelling in the file.
  std::optional<int32_t> find(std::string_view spelling) const;
  // The bytes an entry stands for; null if the id has no entry.
  const std::string* bytes_of(int32_t id) const;
  int32_t size() const { return static_cast<int32_t>(tokens_.size()); }  // largest id plus one

 private:
  struct Slot {
    uint32_t hash = 0;
    int32_t id = -1;
  };
  struct Merge {
    uint64_t pair = 0;
    uint32_t rank = kNoMerge;  // kNoMerge marks a free slot
    int32_t id = -1;
  };
  enum class Kind : uint8_t { absent, piece, other, reserved };
  enum Wholeness : uint8_t { kUnknown, kWhole, kInParts };
  static constexpr uint32_t kNoMerge = UINT32_MAX;

  void add_entries(const std::string& file, const BpeModel& model,
                   const std::unordered_set<int32_t>& reserved);
  void add_alphabet(const std::string& file, const BpeModel& model);
  void add_merges(const std::string& file, const BpeModel& model);
  Slot& slot_of(std::string_view bytes, uint32_t hash);
  int32_t find_bytes(std::string_view bytes) const;
  Merge merge_of(int32_t left, int32_t right) const;
  void merge(std::string_view piece, std::vector<int32_t>& ids) const;
  void merge_short(std::string_view piece, std::vector<int32_t>& ids) const;
  void merge_long(std::string_view piece, std::vector<int32_t>& ids) const;

  std::vector<std::string> tokens_;  // bytes by id
  std::vector<Kind> kinds_;
  std::vector<Slot> by_bytes_;                            // open addressing, entries of Kind::piece
  std::unordered_map<std::string, int32_t> by_spelling_;  // entries outside the alphabet
  std::vector<Merge> merges_;                             // open addressing by pair
  int32_t alphabet_[256];                                 // -1: no entry for this byte
  size_t longest_ = 0;
  bool ignore_merges_ = false;
  // Whether merging an entry's own bytes yields the entry. Computed on first use; any thread may
  // write it, always with the same value.
  std::unique_ptr<std::atomic<uint8_t>[]> wholeness_;
};

}  // namespace leeway
