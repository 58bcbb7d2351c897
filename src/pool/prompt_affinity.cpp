#include "pool/prompt_affinity.h"

#include <algorithm>

namespace leeway {
namespace {

constexpr size_t kMostPrompts = 16384;
constexpr uint64_t kStart = 0xcbf29ce484222325u;

uint64_t extended(uint64_t hash, int32_t id) {
  hash ^= static_cast<uint32_t>(id);
  hash *= 0x9e3779b97f4a7c15u;
  return hash ^ (hash >> 29);
}

uint64_t hash_of(std::span<const int32_t> prompt) {
  uint64_t hash = kStart;
  for (int32_t id : prompt) hash = extended(hash, id);
  return hash;
}

}  // namespace

std::string PromptAffinity::seen_by(std::span<const int32_t> prompt) const {
  std::string server;
  uint64_t hash = kStart;
  for (int32_t id : prompt) {
    hash = extended(hash, id);
    const auto found = entries_.find(hash);
    if (found != entries_.end() && !found->second.server.empty()) server = found->second.server;
  }
  return server;
}

std::string PromptAffinity::failed_at(std::span<const int32_t> prompt) const {
  const auto found = entries_.find(hash_of(prompt));
  return found == entries_.end() ? "" : found->second.failed;
}

PromptAffinity::Entry& PromptAffinity::entry(uint64_t hash) {
  const auto [found, made] = entries_.try_emplace(hash);
  if (made) {
    order_.push_back(hash);
    if (order_.size() > kMostPrompts) {
      entries_.erase(order_.front());
      order_.pop_front();
    }
  }
  return found->second;
}

void PromptAffinity::sent(std::span<const int32_t> prompt, const std::string& server) {
  entry(hash_of(prompt)).server = server;
}

void PromptAffinity::failed(std::span<const int32_t> prompt, const std::string& server) {
  Entry& known = entry(hash_of(prompt));
  known.failed = server;
  known.server.clear();
}

void PromptAffinity::succeeded(std::span<const int32_t> prompt) {
  const auto found = entries_.find(hash_of(prompt));
  if (found != entries_.end()) found->second.failed.clear();
}

}  // namespace leeway
