#include "generate/scoring_text.h"

#include <fmt/format.h>

#include <cmath>
#include <limits>
#include <span>

#include "base/json.h"
#include "base/text_table.h"
#include "leeway/error.h"

namespace leeway {
namespace {

struct Total {
  size_t tokens = 0;
  double logprob = 0.0;
  // NaN of no token.
  double perplexity() const {
    return tokens == 0 ? std::numeric_limits<double>::quiet_NaN()
                       : std::exp(-logprob / static_cast<double>(tokens));
  }
};

Total total_of(const ScoredText& text, bool sampled_only) {
  Total total;
  for (size_t t = 1; t < text.ids.size(); ++t) {
    if (sampled_only && text.sampled[t] == 0) continue;
    ++total.tokens;
    total.logprob += static_cast<double>(text.logprobs[t - 1]);
  }
  return total;
}

std::string token_text(const Tokenizer& tokenizer, int32_t id) {
  try {
    return tokenizer.decode(std::span(&id, 1));
  } catch (const Error&) {
    return "";  // a row of the model that pads its vocabulary
  }
}

std::string total_line(const char* what, const Total& total) {
  if (total.tokens == 0) return fmt::format("{}: no token has a log-probability\n", what);
  return fmt::format("{}: {} tokens, log-probability {:.4f}, perplexity {:.4f}\n", what,
                     total.tokens, total.logprob, total.perplexity());
}

void write_total(JsonWriter& json, const Total& total) {
  json.key("total").value(total.logprob).key("perplexity").value(total.perplexity());
}

}  // namespace

std::string scores_json(const std::vector<std::vector<float>>& scores) {
  JsonWriter json;
  json.begin_object().key("logprobs").begin_array();
  for (const std::vector<float>& list : scores) {
    json.begin_array().null();
    for (const float logprob : list) json.value(logprob);
    json.end_array();
  }
  return json.end_array().end_object().text() + "\n";
}

std::string scored_table(const ScoredText& text, const Tokenizer& tokenizer) {
  const bool marks = !text.sampled.empty();
  std::vector<std::string> header = {"token", "id", "logprob"};
  if (marks) header.emplace_back("sampled");
  std::vector<std::vector<std::string>> rows;
  for (size_t t = 0; t < text.ids.size(); ++t) {
    JsonWriter quoted;
    quoted.value(token_text(tokenizer, text.ids[t]));
    rows.push_back({quoted.text(), fmt::format("{}", text.ids[t]),
                    t == 0 ? "" : fmt::format("{:.4f}", text.logprobs[t - 1])});
    if (marks) rows.back().emplace_back(text.sampled[t] != 0 ? "*" : "");
  }
  std::string out = format_table(header, rows);
  out += total_line("total", total_of(text, false));
  if (marks) out += total_line("sampled", total_of(text, true));
  return out;
}

std::string scored_json(const ScoredText& text, const Tokenizer& tokenizer) {
  JsonWriter json;
  json.begin_object().key("tokens").begin_array();
  for (const int32_t id : text.ids) json.value(static_cast<double>(id));
  json.end_array().key("text").begin_array();
  for (const int32_t id : text.ids) json.value(token_text(tokenizer, id));
  json.end_array().key("logprobs").begin_array().null();
  for (const float logprob : text.logprobs) json.value(logprob);
  json.end_array();
  write_total(json, total_of(text, false));
  if (!text.sampled.empty()) {
    json.key("mask").begin_array();
    for (const uint8_t flag : text.sampled) json.value(static_cast<double>(flag));
    const Total sampled = total_of(text, true);
    json.end_array().key("sampled").begin_object();
    json.key("tokens").value(static_cast<double>(sampled.tokens));
    write_total(json, sampled);
    json.end_object();
  }
  return json.end_object().text() + "\n";
}

}  // namespace leeway
