// Which server has seen which prompt: a server keeps keys and values of prefixes, and one that
// failed for a prompt is avoided by its retry.
#pragma once

#include <cstdint>
#include <deque>
#include <span>
#include <string>
#include <unordered_map>

namespace leeway {

class PromptAffinity {
 public:
  // The server that got the longest known prompt that this one begins with; empty: none.
  std::string seen_by(std::span<const int32_t> prompt) const;
  // The server that failed for this very prompt last; empty: none.
  std::string failed_at(std::span<const int32_t> prompt) const;

  void sent(std::span<const int32_t> prompt, const std::string& server);
  void failed(std::span<const int32_t> prompt, const std::string& server);
  void succeeded(std::span<const int32_t> prompt);

 private:
  struct Entry {
    std::string server, failed;
  };
  Entry& entry(uint64_t hash);

  std::unordered_map<uint64_t, Entry> entries_;  // by the hash of a whole prompt
  std::deque<uint64_t> order_;                   // the oldest first
};

}  // namespace leeway
