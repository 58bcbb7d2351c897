#include <fmt/format.h>

#include <chrono>
#include <cmath>

#include "base/json.h"
#include "cli/choice_option.h"
#include "cli/commands.h"
#include "cli/output.h"
#include "cli/terminal_progress.h"
#include "cli/token_lists.h"
#include "core/cpu/policy_head.h"
#include "leeway/error.h"
#include "model/cpu_decoder.h"
#include "run/devices.h"
#include "run/durations.h"
#include "trainer/micro_batch.h"

namespace leeway {
namespace {

struct Options {
  std::string model, tokens;
  Numerics numerics = Numerics::exact;
  Device device = Device::cpu;
  TrainingPrecision precision = TrainingPrecision::float32;
  int threads = 0;
};

constexpr int64_t kPassTokens = 4096;

// Packs as many sequences as fit a pass, starting with list `next`, which is advanced. Row t gives
// log p(token t+1 | tokens up to t); a sequence's last row is not requested.
MicroBatch pack(const std::vector<std::vector<int32_t>>& lists, size_t& next) {
  MicroBatch batch;
  batch.cu_seqlens.push_back(0);
  while (next < lists.size() &&
         (batch.size() == 0 ||
          batch.size() + static_cast<int64_t>(lists[next].size()) <= kPassTokens)) {
    const std::vector<int32_t>& list = lists[next++];
    for (size_t t = 0; t < list.size(); ++t) {
      if (t + 1 < list.size()) batch.rows.push_back(batch.size() + static_cast<int64_t>(t));
      batch.targets.push_back(t + 1 < list.size() ? list[t + 1] : 0);
    }
    batch.tokens.insert(batch.tokens.end(), list.begin(), list.end());
    batch.cu_seqlens.push_back(batch.size());
  }
  return batch;
}

// On the CPU, without the memory that training needs.
std::vector<float> score(ThreadPool& pool, const Parameters& parameters, const MicroBatch& batch,
                         const TrainingOptions& options) {
  const ModelConfig& config = parameters.config();
  std::vector<float> hidden(static_cast<size_t>(batch.size() * config.hidden_size));
  training_forward(pool, parameters, batch.packed(), options, hidden, nullptr);
  HeadProblem problem;
  problem.tokens = batch.size();
  problem.hidden_size = config.hidden_size, problem.vocabulary = config.vocab_size;
  problem.hidden = rows_of(hidden.data(), config.hidden_size);
  problem.weight = rows_of(network_of(parameters).head, config.hidden_size);
  problem.targets = batch.targets, problem.rows = batch.rows, problem.all_rows = false;
  std::vector<float> logprobs(batch.tokens.size());
  head_logprobs(pool, problem, logprobs, {});
  return logprobs;
}

void check_options(const Options& options) {
  if (options.device == Device::cpu && options.precision == TrainingPrecision::bf16) {
    throw Error("--precision bf16: works on the GPU only; the CPU computes in float32");
  }
  check_device(options.device, "--device cuda");
}

void run(const Options& options) {
  check_options(options);
  const Parameters parameters = load_parameters(options.model);
  const auto lists = read_token_lists(options.tokens, parameters.config());
  const TrainingOptions training{.numerics = options.numerics};
  ThreadPool pool(options.threads);
  std::unique_ptr<TrainingBackend> gpu;
  if (const auto make = training_backend(options.device, options.precision)) {
    gpu = make({parameters}, {});
  }
  size_t total = 0, done = 0;
  for (const auto& list : lists) total += list.size();
  TerminalProgress progress;
  const auto start = std::chrono::steady_clock::now();
  JsonWriter json;
  json.begin_object().key("logprobs").begin_array();
  for (size_t next = 0; next < lists.size();) {
    const size_t first = next;
    const MicroBatch batch = pack(lists, next);
    RowValues values;
    if (gpu) {
      gpu->score(PolicyKind::current, batch, values);
    } else {
      values.logprobs = score(pool, parameters, batch, training);
    }
    for (size_t s = 0; s + 1 < batch.cu_seqlens.size(); ++s) {
      json.begin_array().null();
      for (int64_t t = batch.cu_seqlens[s]; t + 1 < batch.cu_seqlens[s + 1]; ++t) {
        const float logprob = values.logprobs[static_cast<size_t>(t)];
        if (!std::isfinite(logprob)) {
          throw Error(fmt::format(
              "{}: tokens[{}][{}]: its log-probability is {}, not finite: the "
              "weights in {} lead to numbers beyond float32",
              options.tokens, first + s, t + 1 - batch.cu_seqlens[s], logprob, options.model));
        }
        json.value(logprob);
      }
      json.end_array();
    }
    done += batch.tokens.size();
    progress.count("log-probabilities", "tokens", done, total);
  }
  json.end_array().end_object();
  print(json.text() + "\n");
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  say(fmt::format("{} tokens in {}, {:.0f} tokens/s", total, duration_text(seconds),
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
  add_choice(*command, "--numerics", options->numerics,
             "On the CPU. exact: bit for bit what sampling records; fast: products by the BLAS");
  add_choice(*command, "--device", options->device, "Device to run on; cuda needs a GPU");
  add_choice(*command, "--precision", options->precision, "Dtype of the passes on cuda",
             {"float32", "bf16"});
  command->add_option("--threads", options->threads, "0: one per core")
      ->check(CLI::Range(0, 1024))
      ->capture_default_str();
  command->callback([options] { run(*options); });
}

}  // namespace leeway
