#include "text/renderer.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <numeric>

#include "leeway/error.h"
#include "text/renderers/family.h"

namespace leeway {
namespace {

struct Entry {
  const char* name;
  MakeFamily make;
};
constexpr std::array<Entry, 13> kFamilies = {{{"qwen2.5", make_qwen2_5},
                                              {"qwen3", make_qwen3},
                                              {"qwen3.5", make_qwen3_5},
                                              {"qwen3-coder", make_qwen3_coder},
                                              {"glm4.5", make_glm4_5},
                                              {"glm4.6", make_glm4_6},
                                              {"llama3", make_llama3},
                                              {"deepseek-v3.1", make_deepseek_v3_1},
                                              {"kimi-k2", make_kimi_k2},
                                              {"kimi-k2-thinking", make_kimi_k2_thinking},
                                              {"gpt-oss", make_gpt_oss},
                                              {"smollm2", make_smollm2},
                                              {"chatml", make_chatml}}};

// Edit distance.
size_t distance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 0; i < a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i + 1;
    for (size_t j = 0; j < b.size(); ++j) {
      const size_t changed = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({changed, row[j] + 1, row[j + 1] + 1});
    }
  }
  return row.back();
}

// A tokenizer that claims to have every token it is asked for, and records which.
class AskedTokens final : public Tokenizer {
 public:
  std::vector<int32_t> encode(std::string_view text, SpecialTokens) const override {
    return {text.begin(), text.end()};
  }
  std::string decode(std::span<const int32_t>) const override { return ""; }
  std::optional<int32_t> token_id(std::string_view token) const override {
    const auto known = std::find(names.begin(), names.end(), token);
    const auto place = known - names.begin();
    if (known == names.end()) names.emplace_back(token);
    return 256 + static_cast<int32_t>(place);
  }
  bool is_special(int32_t id) const override { return id >= 256; }
  int32_t vocab_size() const override { return 256 + static_cast<int32_t>(names.size()); }

  mutable std::vector<std::string> names;
};

}  // namespace

const char* name_of(Role role) {
  switch (role) {
    case Role::system: return "system";
    case Role::user: return "user";
    case Role::assistant: return "assistant";
    case Role::tool: return "tool";
  }
  return "";
}

const char* name_of(ToolCallStatus status) {
  switch (status) {
    case ToolCallStatus::ok: return "ok";
    case ToolCallStatus::invalid_json: return "invalid_json";
    case ToolCallStatus::unclosed_block: return "unclosed_block";
    case ToolCallStatus::missing_name: return "missing_name";
    case ToolCallStatus::malformed: return "malformed";
  }
  return "";
}

std::vector<std::string> renderer_names() {
  std::vector<std::string> names;
  for (const Entry& entry : kFamilies) names.emplace_back(entry.name);
  return names;
}

std::unique_ptr<Renderer> make_renderer(std::string_view name, const Tokenizer* tokenizer,
                                        const ThinkingRetention& retention) {
  for (const Entry& entry : kFamilies) {
    if (name == entry.name) return entry.make(tokenizer, retention);
  }
  // The name is user input of any length; only its start can resemble a known name.
  const std::string_view head = name.substr(0, 64);
  const Entry& nearest =
      *std::min_element(kFamilies.begin(), kFamilies.end(), [&](const Entry& a, const Entry& b) {
        return distance(head, a.name) < distance(head, b.name);
      });
  throw Error(fmt::format("no renderer is called \"{}\"; did you mean {}? There are: {}", name,
                          nearest.name, fmt::join(renderer_names(), ", ")));
}

std::vector<std::string> control_tokens_of(std::string_view name) {
  const AskedTokens tokens;
  make_renderer(name, &tokens);
  return tokens.names;
}

}  // namespace leeway
