#include "generate/token_lists.h"

#include <fmt/format.h>

#include "base/json.h"
#include "generate/input.h"
#include "leeway/error.h"

namespace leeway {
namespace {

constexpr const char* kShape =
    "expected {\"tokens\": [[1, 2, 3], ..]}, one list of ids per sequence";

}  // namespace

std::vector<std::vector<int32_t>> read_token_lists(const std::string& path,
                                                   const ModelConfig& config) {
  const auto [name, text] = read_input(path);
  const rapidjson::Document json = parse_json(name, text);
  if (!json.IsObject()) throw Error(fmt::format("{}: {}", name, kShape));
  const auto tokens = json.FindMember("tokens");
  if (tokens == json.MemberEnd()) throw Error(fmt::format("{}: no \"tokens\": {}", name, kShape));
  for (const auto& member : json.GetObject()) {
    const std::string_view key(member.name.GetString(), member.name.GetStringLength());
    if (key != "tokens") throw Error(fmt::format("{}: unknown key \"{}\": {}", name, key, kShape));
  }
  if (!tokens->value.IsArray()) throw Error(fmt::format("{}: tokens: {}", name, kShape));
  std::vector<std::vector<int32_t>> lists;
  for (const auto& sequence : tokens->value.GetArray()) {
    const size_t s = lists.size();
    if (!sequence.IsArray()) {
      throw Error(fmt::format("{}: tokens[{}] is not a list: {}", name, s, kShape));
    }
    if (sequence.Empty()) {
      throw Error(
          fmt::format("{}: tokens[{}] is empty; a sequence has at least one token", name, s));
    }
    if (sequence.Size() > config.max_position_embeddings) {
      throw Error(
          fmt::format("{}: tokens[{}] has {} tokens; the model takes at most {} "
                      "(max_position_embeddings)",
                      name, s, sequence.Size(), config.max_position_embeddings));
    }
    std::vector<int32_t>& ids = lists.emplace_back();
    for (const auto& item : sequence.GetArray()) {
      const std::string where = fmt::format("{}: tokens[{}][{}]", name, s, ids.size());
      if (!item.IsInt64() && !item.IsUint64()) {
        throw Error(fmt::format("{} is not an integer; token ids are integers", where));
      }
      if (!item.IsInt64() || item.GetInt64() < 0 || item.GetInt64() >= config.vocab_size) {
        const std::string id = item.IsInt64() ? fmt::format("{}", item.GetInt64())
                                              : fmt::format("{}", item.GetUint64());
        throw Error(fmt::format("{}: token id {} is outside the vocabulary of {} (ids 0 to {})",
                                where, id, config.vocab_size, config.vocab_size - 1));
      }
      ids.push_back(static_cast<int32_t>(item.GetInt64()));
    }
  }
  return lists;
}

}  // namespace leeway
