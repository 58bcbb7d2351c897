// The messages of protocol 2 of `process` environments, in both directions (docs/environments.md).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "orchestrator/environment.h"
#include "text/renderers/json_value.h"

namespace leeway {

// What a program of protocol 2 says in its hello.
struct EpisodeHello {
  // Examples of each split. Outer nothing: not said; inner nothing: unlimited.
  std::optional<std::optional<uint64_t>> train, eval;
  bool scores_groups = false;
};
// Throws Error for a member of the wrong kind and a size below 1.
EpisodeHello read_hello(const JsonValue& hello);

// How an episode ended.
struct EpisodeEnd {
  Turn turn;         // reward or unscored
  std::string info;  // JSON
};

// Each throws Error saying which member is wrong. `scores_groups`: an end may lack a reward.
SampleCall read_sample(const JsonValue& line);
EpisodeEnd read_done(const JsonValue& line, bool scores_groups);
GroupScores read_scores(const JsonValue& line, size_t members);

// The members "episode": .. and "id": .. as numbers of ours; nothing if there is none.
std::optional<uint64_t> read_number(const JsonValue& line, std::string_view key);

// Lines without their end. `example`: JSON.
std::string episode_line(uint64_t id, const EpisodePlace& place, uint64_t index,
                         const std::string& example);
std::string sampled_line(uint64_t episode, const SampleAnswer& answer);
std::string cancel_line(uint64_t episode);
struct ScoredEpisode {
  uint64_t id = 0, index = 0;
  std::string info;
};
std::string score_line(uint64_t id, int64_t group, const std::vector<ScoredEpisode>& episodes);

}  // namespace leeway
