// The last tokens of a sequence, with all that belongs to them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

#include "data/sampling.h"

namespace leeway {

// The tokens from number `first` on.
inline SampledSequence tokens_from(const SampledSequence& all, size_t first) {
  SampledSequence tail;
  tail.request = all.request, tail.sample = all.sample, tail.finish = all.finish;
  const auto copy = [&](const auto& from, auto& to) {
    to.assign(from.begin() + static_cast<std::ptrdiff_t>(std::min(first, from.size())), from.end());
  };
  copy(all.ids, tail.ids);
  copy(all.raw_logprobs, tail.raw_logprobs);
  copy(all.processed_logprobs, tail.processed_logprobs);
  copy(all.versions, tail.versions);
  const size_t each = all.ids.empty() ? 0 : all.top.size() / all.ids.size();
  tail.top.assign(
      all.top.begin() + static_cast<std::ptrdiff_t>(std::min(first, all.ids.size()) * each),
      all.top.end());
  return tail;
}

inline void append_tokens(SampledSequence& to, const SampledSequence& from) {
  const auto add = [](auto& list, const auto& more) {
    list.insert(list.end(), more.begin(), more.end());
  };
  add(to.ids, from.ids);
  add(to.raw_logprobs, from.raw_logprobs);
  add(to.processed_logprobs, from.processed_logprobs);
  add(to.versions, from.versions);
  add(to.top, from.top);
}

// The most likely tokens at the place of token number `token`.
inline std::span<const TokenLogprob> top_of(const SampledSequence& tokens, size_t token) {
  const size_t each = tokens.ids.empty() ? 0 : tokens.top.size() / tokens.ids.size();
  return std::span(tokens.top).subspan(token * each, each);
}

}  // namespace leeway
