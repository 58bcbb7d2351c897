#include <fmt/format.h>

#include <chrono>
#include <cmath>

#include "base/json.h"
#include "cli/commands.h"
#include "cli/output.h"
#include "cli/token_lists.h"
#include "core/cpu/policy_head.h"
#include "leeway/error.h"
#include "model/cpu_decoder.h"

namespace leeway {
namespace {

struct Options {
  std::string model, tokens, numerics = "exact";
  int threads = 0;
};

// Sequences side by side, as many as fit a pass.
struct Pack {
  std::vector<int32_t> tokens;
  std::vector<int64_t> cu_seqlens{0};
};
constexpr size_t kPassTokens = 4096;

// log p(token t+1 | tokens to t) at row t; nothing at a sequence's last row.
std::vector<float> pack_logprobs(ThreadPool& pool, const Parameters& parameters, const Pack& pack,
                                 const TrainingOptions& options) {
  const ModelConfig& config = parameters.config();
  std::vector<float> hidden(pack.tokens.size() * static_cast<size_t>(config.hidden_size));
  training_forward(pool, parameters, {pack.tokens, pack.cu_seqlens}, options, hidden, nullptr);
  std::vector<int64_t> targets(pack.tokens.begin() + 1, pack.tokens.end()), rows;
  targets.push_back(0);
  for (size_t s = 0; s + 1 < pack.cu_seqlens.size(); ++s) {
    for (int64_t t = pack.cu_seqlens[s]; t + 1 < pack.cu_seqlens[s + 1]; ++t) rows.push_back(t);
  }
  HeadProblem problem;
  problem.tokens = static_cast<int64_t>(pack.tokens.size());
  problem.hidden_size = config.hidden_size, problem.vocabulary = config.vocab_size;
  problem.hidden = rows_of(hidden.data(), config.hidden_size);
  problem.weight = rows_of(network_of(parameters).head, config.hidden_size);
  problem.targets = targets, problem.rows = rows, problem.all_rows = false;
  std::vector<float> logprobs(pack.tokens.size());
  head_logprobs(pool, problem, logprobs, {});
  return logprobs;
}

void run(const Options& options) {
  const Parameters parameters = load_parameters(options.model);
  const auto lists = read_token_lists(options.tokens, parameters.config());
  const TrainingOptions training{.numerics =
                                     options.numerics == "fast" ? Numerics::fast : Numerics::exact};
  ThreadPool pool(options.threads);
  size_t total = 0, done = 0;
  for (const auto& list : lists) total += list.size();
  Progress progress("log-probabilities", "tokens");
  const auto start = std::chrono::steady_clock::now();
  JsonWriter json;
  json.begin_object().key("logprobs").begin_array();
  for (size_t next = 0; next < lists.size();) {
    Pack pack;
    while (next < lists.size() &&
           (pack.tokens.empty() || pack.tokens.size() + lists[next].size() <= kPassTokens)) {
      pack.tokens.insert(pack.tokens.end(), lists[next].begin(), lists[next].end());
      pack.cu_seqlens.push_back(static_cast<int64_t>(pack.tokens.size()));
      ++next;
    }
    const std::vector<float> logprobs = pack_logprobs(pool, parameters, pack, training);
    const size_t first = next + 1 - pack.cu_seqlens.size();
    for (size_t s = 0; s + 1 < pack.cu_seqlens.size(); ++s) {
      json.begin_array().null();
      for (int64_t t = pack.cu_seqlens[s]; t + 1 < pack.cu_seqlens[s + 1]; ++t) {
        const float logprob = logprobs[static_cast<size_t>(t)];
        if (!std::isfinite(logprob)) {
          throw Error(fmt::format(
              "{}: tokens[{}][{}]: its log-probability is {}, not finite: the "
              "weights in {} lead to numbers beyond float32",
              options.tokens, first + s, t + 1 - pack.cu_seqlens[s], logprob, options.model));
        }
        json.value(logprob);
      }
      json.end_array();
    }
    done += pack.tokens.size();
    progress.update(done, total);
  }
  json.end_array().end_object();
  print(json.text() + "\n");
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  say(fmt::format("{} tokens in {:.2f} s, {:.0f} tokens/s", total, seconds,
                  static_cast<double>(total) / std::max(seconds, 1e-9)));
}

}  // namespace

void add_logprobs(CLI::App& app, Program&) {
  auto* command = app.add_subcommand(
      "logprobs",
      "Log-probability of every token given those before it, float32, as the trainer computes it.\n"
      "Reads {\"tokens\": [[1, 2, ..], ..]}, prints {\"logprobs\": [[null, ..], ..]}.");
  auto options = std::make_shared<Options>();
  command->add_option("--model", options->model, "Hugging Face folder (Qwen3, Qwen2, Llama)")
      ->required();
  command->add_option("--tokens", options->tokens, "JSON file with token ids, or - for stdin")
      ->required();
  command
      ->add_option("--numerics", options->numerics,
                   "exact: bit for bit what sampling records; fast: products by the BLAS")
      ->check(CLI::IsMember({"exact", "fast"}))
      ->capture_default_str();
  command->add_option("--threads", options->threads, "0: one per core")
      ->check(CLI::Range(0, 1024))
      ->capture_default_str();
  command->callback([options] { run(*options); });
}

}  // namespace leeway
